//! The decision, per packet.
//!
//! Words: an entry is *valid* when its reverse NAT index is the service's and its backend is in Cilium's map; any other
//! is *dangling*, and Cilium treats it as none. A backend is *usable* when it may get new flows, and *keeps* when it may
//! keep the flows it has; see [`judge`].
//!
//! Everything is a plain function over [`World`], so that the host's tests run the very code that the kernel runs. What is
//! found out on the way stands in a [`State`] that the caller provides: in the kernel it lies in a map. That keeps frames
//! small, and because the verifier does not follow values through maps, it sees one path where it would see hundreds. For
//! the same reason the steps are functions of their own that are not inlined.

mod drain;
mod judge;
mod put;
mod reset;
mod rewrite;
mod shortcut;
mod state;

pub use judge::{Judgement, Unmarked, judge};
pub use put::select;
pub use rewrite::{PORT_PROBES, PORT_TRIES, ROUND_PAUSE, STUCK_REPORT, is_port_good};
pub use shortcut::{Shortcut, shortcut};
pub use state::{Master, Outcome, Read, State};

use crate::{
    abi::{BackendMark, InnerFlow, PinnedPort, Previous, mode},
    counters::Reason,
    inner::FlowPacket,
};

/// First drain port. The kernel's default ephemeral range ends at 60999.
pub const DRAIN_PORT_FIRST: u16 = 61000;
/// Number of drain ports.
pub const DRAIN_PORTS: u32 = 4096;

/// Bound on the slots that are looked at for one packet. Of a service with more, each client sees this many, from a
/// start of its own.
pub const MAX_SLOTS: u16 = 16;

/// Non-TCP flows that were idle for longer are new flows.
pub const IDLE: u64 = 120_000_000_000;
/// How long after a backend began to leave new flows still join it, so that packets already on their way to Cilium
/// under the FoU port are through before its entry moves.
pub const SETTLE: u64 = 20_000_000;
/// How often a lost race is tried again.
pub const RETRIES: u32 = 2;
/// How exact the time of a flow's last packet is: a known flow costs no write within it.
pub const COARSE: u64 = 1_000_000_000;
/// How long an unknown flow may be taken for one of a backend that became usable again.
pub const PREVIOUS_MEMORY: u64 = 600_000_000_000;

/// The drain port of a backend id, network order.
#[inline(always)]
#[must_use]
pub const fn drain_port(backend_id: u32) -> [u8; 2] {
    (DRAIN_PORT_FIRST + (backend_id % DRAIN_PORTS) as u16).to_be_bytes()
}

/// Whether a source port (network order) is one that the guard gives.
#[inline(always)]
#[must_use]
pub const fn is_reserved_port(port: [u8; 2]) -> bool {
    u16::from_be_bytes(port) >= DRAIN_PORT_FIRST
}

/// A backend as Cilium has it. Aligned to be copied by words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C, align(8))]
pub struct Backend {
    /// v4-mapped.
    pub address: [u8; 16],
    /// See [`crate::cilium::BACKEND_ACTIVE`] and its siblings.
    pub state: u8,
}

/// A service entry as it was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The backend that it names.
    pub backend_id: u64,
    /// Network order.
    pub rev_nat_index: [u8; 2],
}

/// What the program sees and does for one packet of one client to one service. Ports in network order.
///
/// Reads may change between two calls; every write says whether it happened.
pub trait World {
    /// CLOCK_MONOTONIC, ns; the same for the whole packet.
    fn now(&self) -> u64;
    /// Outer source port of the packet.
    fn client_port(&self) -> [u8; 2];
    /// Port on which the client's FoU socket listens.
    fn fou_port(&self) -> [u8; 2];
    /// Spreads clients over backends; depends on the port too when there is no affinity.
    fn spread(&self, with_port: bool) -> u32;

    /// Backend id in a selectable slot, 1-based.
    fn slot(&mut self, slot: u16) -> Option<u32>;
    /// A backend.
    fn backend(&mut self, id: u32) -> Option<Backend>;
    /// Backend id of the client's affinity entry.
    fn affinity(&mut self, master: &Master) -> Option<u32>;
    /// Whether affinity may choose a backend.
    fn affinity_match(&mut self, master: &Master, id: u32) -> bool;
    /// Service entry of the client under a source port.
    fn entry(&mut self, port: [u8; 2]) -> Option<Entry>;
    /// Makes a service entry unless one exists.
    fn create(&mut self, port: [u8; 2], master: &Master, id: u32) -> bool;
    /// Turns the dangling entry that was read as `seen` into one for `id`, if it still names the backend it named.
    fn repair(&mut self, port: [u8; 2], seen: &Entry, master: &Master, id: u32) -> bool;
    /// Makes the entry name `to` if it still names `from`.
    fn swap(&mut self, port: [u8; 2], from: u64, to: u32) -> bool;
    /// Keeps the egress entry `client:client_port → id` alive as long as the service entry under `port`.
    fn keep_replies(&mut self, port: [u8; 2], master: &Master, id: u32);
    /// Whether nothing is left to do for [`Self::keep_replies`]. The entry under `port` was read last.
    fn replies_are_kept(&mut self, port: [u8; 2], id: u32) -> bool;

    /// The agent's mark of a backend address.
    fn mark(&mut self, address: &[u8; 16]) -> Option<BackendMark>;
    /// Whether every mark there is says READY: those of the moment at which the packet came, or of a later one.
    fn only_ready_marks(&mut self) -> bool;
    /// 1 when the agent's set of READY marks is complete at this moment, else 0.
    fn heartbeat_fresh(&mut self) -> u64;
    /// [`select`], out of line where the caller's verifier wants that.
    #[inline(always)]
    fn select(&mut self, state: &mut State)
    where
        Self: Sized,
    {
        select(self, state);
    }
    /// [`judge`], as [`Self::select`].
    #[inline(always)]
    fn judge(&mut self, id: u64, unmarked: Unmarked, out: &mut Judgement)
    where
        Self: Sized,
    {
        judge(self, id, unmarked, out);
    }
    /// When the program first saw this backend leaving, apart for one that Cilium calls terminating; notes it if it never did.
    fn leaving_since(&mut self, address: &[u8; 16], id: u32, terminating: bool) -> u64;
    /// How long a backend that left by Cilium's state alone is drained, ns.
    fn unmarked_drain(&self) -> u64;

    /// The backend that the client was last moved off, if it is the same client pod.
    fn previous(&mut self) -> Option<Previous>;
    /// Notes that the client was moved off a backend at a time.
    fn set_previous(&mut self, from: u32, at: u64);
    /// Sends an event to the agent, unless one like it was sent a moment ago. Backend ids, 0 for none.
    fn report(&mut self, kind: u8, from: u32, to: u32);

    /// What the inner packet says about its flow.
    fn flow_packet(&self) -> FlowPacket;
    /// The remembered flow of the inner packet, if it is of the same client pod.
    fn flow(&mut self) -> Option<InnerFlow>;
    /// Remembers the inner flow on a backend, now; `flags` as [`crate::abi::FLOW_DRAINED`].
    fn remember(&mut self, id: u32, flags: u32);
    /// Since when every flow of this client and service is remembered, or its given port.
    fn memory_since(&self) -> u64;
    /// The record of the packet's tuple in mode `rewrite`, if it is of the same client pod and not older than
    /// [`Self::memory_since`].
    fn pin(&mut self) -> Option<PinnedPort>;
    /// Stores that record; its generation is filled in. Whether it is stored.
    fn set_pin(&mut self, pin: &PinnedPort) -> bool;
    /// Whether replies to ports that the client is given are turned back.
    fn is_returning(&mut self) -> bool;
    /// Notes that the client is given a port at which it is to have replies. Whether it is noted.
    fn note_return(&mut self, port: [u8; 2]) -> bool;
    /// [`is_port_good`], as [`Self::select`].
    #[inline(always)]
    fn is_port_good(&mut self, port: [u8; 2], state: &mut State) -> bool
    where
        Self: Sized,
    {
        is_port_good(self, port, state)
    }
    /// Counts a change in a leaving backend's drained flows.
    fn count_drain(&mut self, address: &[u8; 16], change: DrainChange);
}

/// See [`World::count_drain`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DrainChange {
    /// A flow stays on a leaving backend for the first time.
    Started,
    /// It is still there; said at most once a second and flow.
    Seen,
    /// It ended by itself.
    Ended,
    /// It was reset.
    Cut,
}

/// Decides for one packet to the guarded service of `state.master` in `mode`, one of [`mode`]; an unknown mode is off. The result stands in
/// `state.outcome`.
#[inline(always)]
pub fn decide(world: &mut impl World, state: &mut State, mode: u8) {
    state.begin(world.client_port(), mode);
    match mode {
        mode::AUDIT | mode::RESET => reset::reset(world, state),
        mode::DRAIN => drain::drain(world, state),
        mode::REWRITE => rewrite::rewrite(world, state),
        _ => state.outcome.reason = Reason::NotGuarded,
    }
}

/// Whether the decision needs the inner flow.
#[inline(always)]
#[must_use]
pub const fn tracks_flows(mode: u8) -> bool {
    matches!(mode, mode::DRAIN | mode::AUDIT)
}
