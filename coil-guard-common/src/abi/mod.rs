//! Layouts of the guard's own maps, shared by the agent and the program.
//!
//! They are pinned under a directory named after [`LAYOUT_VERSION`]; any change of a size, an offset or a meaning here
//! needs a new version. Integers are in host order unless said otherwise; times are nanoseconds of CLOCK_MONOTONIC.
//! No field is a `bool` or an enum and no padding is implicit: what the other side wrote is valid whatever it is.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Names the pin directory.
pub const LAYOUT_VERSION: &str = "v2";

/// Names of the own maps, as in the program's object and as pin file names.
pub mod maps {
    /// [`super::ServiceKey`] → [`super::GuardedService`], hash, written by the agent.
    pub const GUARDED_SERVICES: &str = "GUARDED_SERVICES";
    /// Address (16 B) → [`super::BackendMark`], hash, written by the agent.
    pub const BACKEND_MARKS: &str = "BACKEND_MARKS";
    /// `[AgentState; 1]`, array, written by the agent.
    pub const AGENT: &str = "AGENT";
    /// [`super::InnerFlowKey`] → [`super::InnerFlow`], LRU hash, written by the program.
    pub const INNER_FLOWS: &str = "INNER_FLOWS";
    /// [`super::InnerFlowKey`] → [`super::InnerFlow`], LRU hash, written by the program: inner flows beyond their client's
    /// share of `INNER_FLOWS`, see [`super::FLOW_BURST`].
    pub const CROWDED_FLOWS: &str = "CROWDED_FLOWS";
    /// Client address (16 B) → time (u64) until which its share of `INNER_FLOWS` is spent, LRU hash, written by the program.
    pub const FLOW_SHARES: &str = "FLOW_SHARES";
    /// [`super::FragmentKey`] → [`super::FragmentPorts`], LRU hash, written by the program.
    pub const FRAGMENTS: &str = "FRAGMENTS";
    /// [`super::ClientServiceKey`] → [`super::Previous`], LRU hash, written by the program.
    pub const PREVIOUS: &str = "PREVIOUS";
    /// [`super::PinnedPortKey`] → [`super::PinnedPort`], LRU hash, written by the program.
    pub const PINNED_PORTS: &str = "PINNED_PORTS";
    /// [`super::LeavingKey`] → [`super::LeavingSeen`], LRU hash, written by the program.
    pub const LEAVING: &str = "LEAVING";
    /// Address (16 B) → [`super::DrainStats`], LRU hash, written by the program.
    pub const DRAINS: &str = "DRAINS";
    /// [`super::AnswerKey`] → [`super::Answer`], LRU hash, written by the programs for replies.
    pub const ANSWERS: &str = "ANSWERS";
    /// [`super::ReturnKey`] → [`super::Return`], LRU hash, written by the program.
    pub const RETURNS: &str = "RETURNS";
    /// Address (16 B) → [`super::Returning`], hash, written by the agent.
    pub const RETURNING: &str = "RETURNING";
    /// `[u64; ReplyCount::COUNT]`, per-CPU array, written by the programs for replies.
    pub const REPLY_COUNTERS: &str = "REPLY_COUNTERS";
    /// `[u64; Reason::COUNT]`, per-CPU array, written by the program.
    pub const COUNTERS: &str = "COUNTERS";
    /// `[EgressCounters; n]` by egress index, per-CPU array, written by the program.
    pub const EGRESS_COUNTERS: &str = "EGRESS_COUNTERS";
    /// [`super::ReportKey`] → time (u64) of the last event of its kind, LRU hash, written by the program.
    pub const REPORTED: &str = "REPORTED";
    /// [`super::Event`]s, ring buffer.
    pub const EVENTS: &str = "EVENTS";
    /// `[PodConfig; 1]`, per-CPU array: whose packet it is, written by the pods' stubs for the core program.
    pub const CLIENT: &str = "CLIENT";
    /// [`super::CORE_SLOTS`] programs, program array: where the stubs go on. See [`super::core_slot`].
    pub const CORES: &str = "CORES";

    /// All of them that programs use, pinned.
    pub const ALL: [&str; 21] = [
        GUARDED_SERVICES,
        BACKEND_MARKS,
        AGENT,
        INNER_FLOWS,
        CROWDED_FLOWS,
        FLOW_SHARES,
        FRAGMENTS,
        PREVIOUS,
        PINNED_PORTS,
        LEAVING,
        DRAINS,
        COUNTERS,
        EGRESS_COUNTERS,
        REPORTED,
        EVENTS,
        CLIENT,
        CORES,
        ANSWERS,
        RETURNS,
        RETURNING,
        REPLY_COUNTERS,
    ];
}

/// Name of the stub, the program that is attached in each pod, in its object and in the kernel.
pub const PROGRAM: &str = "coil_guard";
/// Name of the constant in the core's object that holds what [`flow_cost`] says.
pub const FLOW_COST: &str = "FLOW_COST";
/// Name of the constant in the stub's object that holds the [`PodConfig`].
pub const POD_CONFIG: &str = "POD_CONFIG";
/// Name of the constant in the core's object that is 1 in a core that must not write to Cilium's maps.
pub const READ_ONLY: &str = "READ_ONLY";
/// Name of the core program, which all stubs share, in its object and in the kernel (which cuts names after 15 bytes).
pub const CORE_PROGRAM: &str = "coil_guard_core";

/// Elements of [`maps::CORES`]: more than there are, so that another program needs no new layout.
pub const CORE_SLOTS: u32 = 8;

/// Indexes into [`maps::CORES`], as [`PodConfig::core`].
pub mod core_slot {
    /// The program that guards.
    pub const GUARD: u8 = 0;
    /// The same, loaded with [`super::READ_ONLY`]: it cannot write to Cilium's maps.
    pub const READ_ONLY: u8 = 1;
    /// [`super::reply_program::LEARN`].
    pub const LEARN: u8 = 4;
    /// [`super::reply_program::ANSWER`].
    pub const ANSWER: u8 = 5;
    /// [`super::reply_program::RETURN`].
    pub const RETURN: u8 = 6;
}

macro_rules! shared {
    ($(#[$meta:meta])* $name:ident, $size:literal { $($(#[$field_meta:meta])* $field:ident: $type:ty,)+ }) => {
        $(#[$meta])*
        // Aligned so that the program copies addresses by words and not by bytes; the kernel aligns keys and values to 8.
        #[repr(C, align(4))]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
        pub struct $name { $($(#[$field_meta])* pub $field: $type,)+ }
        const _: () = assert!(size_of::<$name>() == $size);
        #[cfg(feature = "user")]
        // SAFETY: repr(C), made of integers only, and IntoBytes proves that there is no padding.
        unsafe impl aya::Pod for $name {}
    };
}

mod flows;
mod replies;
mod report;
mod rewrite;

pub use self::{flows::*, replies::*, report::*, rewrite::*};

/// What the guard does for an Egress, as [`GuardedService::mode`].
pub mod mode {
    /// Counts and reports what reset would do, changes nothing.
    pub const AUDIT: u8 = 1;
    /// Every flow leaves a leaving backend with its next packet.
    pub const RESET: u8 = 2;
    /// New inner connections leave at once, existing ones stay while the old pod serves.
    pub const DRAIN: u8 = 3;
    /// A flow on a leaving backend gets another outer source port, so that Cilium chooses anew; Cilium's maps are only
    /// read.
    pub const REWRITE: u8 = 4;
}

/// [`GuardedService::flags`] bit: the Egress has `fouSourcePortAuto`, each inner flow has its own outer source port.
pub const SERVICE_SPORT_AUTO: u8 = 1;

/// [`BackendMark::state`].
pub mod mark {
    /// A ready endpoint of the Service.
    pub const READY: u8 = 1;
    /// Its endpoint is not ready; may come back.
    pub const NOT_READY: u8 = 2;
    /// Its pod is being deleted; never comes back.
    pub const LEAVING: u8 = 3;
    /// Its address has left the Service's slices; never comes back.
    pub const GONE: u8 = 4;
}

/// [`BackendMark::keep_until`]: no end. The largest time: all are below 2^63, so that two can be compared by a subtraction.
pub const FOR_EVER: u64 = i64::MAX as u64;

shared! {
    /// A guarded address and port.
    ServiceKey, 20 {
        /// ClusterIP; IPv4 as a v4-mapped IPv6 address.
        address: [u8; 16],
        /// Network order.
        port: [u8; 2],
        /// Zero.
        pad: [u8; 2],
    }
}

shared! {
    /// What to do for a guarded service.
    GuardedService, 24 {
        /// After this the service is not guarded any more: a bound on how long a dead agent's word holds.
        expires_at: u64,
        /// Since when inner flows of this service are remembered, or in `REWRITE` ports are given; 0 in other modes. What
        /// was remembered before does not count.
        tracked_since: u64,
        /// Index into `EGRESS_COUNTERS`.
        egress: u32,
        /// See [`mode`].
        mode: u8,
        /// `SERVICE_SPORT_AUTO`.
        flags: u8,
        /// Zero.
        pad: [u8; 2],
    }
}

shared! {
    /// What the agent knows about a backend address.
    BackendMark, 32 {
        /// Absolute time until which the backend keeps the flows it has; `FOR_EVER`, or 0 for not at all. Of LEAVING
        /// marks it holds without the agent; ignored for READY.
        keep_until: u64,
        /// Until when `state` is to be believed.
        valid_until: u64,
        /// When the agent first wrote this state.
        since: u64,
        /// See [`mark`].
        state: u8,
        /// Zero.
        pad: [u8; 3],
        /// How long before `since` the agent saw this state, µs; the agent's own.
        seen_before: u32,
    }
}

shared! {
    /// The agent's sign of life.
    AgentState, 16 {
        /// Until when the set of READY marks is complete.
        heartbeat_until: u64,
        /// 1 when every mark there is says READY; 0 when one may not. Taken back before another is written.
        only_ready: u64,
    }
}

/// [`PodConfig::flags`]: `address4` is set.
pub const POD_HAS_IPV4: u32 = 1;
/// [`PodConfig::flags`]: `address6` is set.
pub const POD_HAS_IPV6: u32 = 2;
/// [`PodConfig::flags`]: the pod's ephemeral ports overlap the drain ports, so with `SERVICE_SPORT_AUTO` drain is reset.
pub const POD_PORTS_OVERLAP: u32 = 4;

shared! {
    /// A client pod, as the constants of its stub say.
    PodConfig, 48 {
        /// The pod's IPv6 address.
        address6: [u8; 16],
        /// The pod's IPv4 address.
        address4: [u8; 4],
        /// `POD_HAS_IPV4`, …
        flags: u32,
        /// Since when this pod is guarded without a break.
        guarded_since: u64,
        /// Differs between pods that had the same address one after the other.
        generation: u32,
        /// Network order.
        fou_port: [u8; 2],
        /// The core program that its packets get, see [`core_slot`].
        core: u8,
        /// Zero.
        pad: [u8; 1],
        /// How long a backend that left by Cilium's state alone is drained, nanoseconds.
        unmarked_drain: u64,
    }
}

/// Whether two addresses are the same. By words: the comparison of arrays is one of bytes to the program.
#[inline(always)]
#[must_use]
pub const fn same_address(one: [u8; 16], other: [u8; 16]) -> bool {
    let (one, other): ([u64; 2], [u64; 2]) = (zerocopy::transmute!(one), zerocopy::transmute!(other));
    (one[0] ^ other[0]) | (one[1] ^ other[1]) == 0
}

/// The v4-mapped form of an IPv4 address.
#[inline(always)]
#[must_use]
pub const fn v4_mapped(address: [u8; 4]) -> [u8; 16] {
    // By words: the program would call memset for ten zero bytes.
    zerocopy::transmute!([0, 0, u32::from_ne_bytes([0, 0, 0xff, 0xff]), u32::from_ne_bytes(address)])
}
