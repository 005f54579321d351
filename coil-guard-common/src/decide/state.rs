//! What is found out about one packet.

use super::{Entry, Judgement, Unmarked};
use crate::{
    abi::{InnerFlow, PinnedPort, mode},
    counters::Reason,
};

/// The master entry of the packet's service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Master {
    /// Network order, never interpreted.
    pub rev_nat_index: [u8; 2],
    /// Number of selectable slots.
    pub count: u16,
    /// ClientIP session affinity.
    pub affinity: bool,
}

/// A service entry and the verdict about the backend that it names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Read {
    /// As it was read; zeros when there is none.
    pub entry: Entry,
    /// Of the backend that the entry names; absent when there is no entry.
    pub backend: Judgement,
    /// Of that backend; means nothing when it is absent.
    pub address: [u8; 16],
    /// There is an entry.
    pub exists: bool,
    /// The entry is one that Cilium would follow.
    pub valid: bool,
}

impl Read {
    const NONE: Self = Self {
        entry: Entry { backend_id: 0, rev_nat_index: [0; 2] },
        backend: Judgement::absent(0),
        address: [0; 16],
        exists: false,
        valid: false,
    };
}

/// What the tuple of the packet is to the memory of inner flows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Memory {
    /// Unknown.
    Nothing,
    /// The packet belongs to the remembered flow.
    Known,
    /// The packet begins another flow of the same tuple and so ends the remembered one.
    Earlier,
}

/// What came of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// Counted.
    pub reason: Reason,
    /// Replaces the outer source port; network order.
    pub source_port: Option<[u8; 2]>,
    /// An inner flow was reset because its backend stopped keeping it.
    pub cut: bool,
    /// Audit: drain would have kept the flow.
    pub would_drain: bool,
    /// Rewrite: the flow is seen on another backend for the first time since it was given its port.
    pub moved: bool,
}

/// See the module. Fields are written by one step and read by later ones; [`State::begin`] makes a used one fit for the
/// next packet.
#[derive(Debug)]
pub struct State {
    /// The result.
    pub outcome: Outcome,
    /// Set by the caller.
    pub master: Master,
    pub(super) port: [u8; 2],
    pub(super) unmarked: Unmarked,
    /// Not audit.
    pub(super) act: bool,
    /// Under the packet's own source port.
    pub(super) read: Read,
    /// Under a drain port, or one that may be given.
    pub(super) drain_read: Read,
    /// Remembered flow, if `memory` is not `Nothing`.
    pub(super) flow: InnerFlow,
    pub(super) memory: Memory,
    /// Of the packet's tuple in rewrite.
    pub(super) pin: PinnedPort,
    /// The flow's backend is still the one at the remembered address.
    pub(super) in_place: bool,
    /// The backend that the flow must stay on, if `keeps`.
    pub(super) home: Judgement,
    /// Of the client's affinity entry.
    pub(super) favourite: Judgement,
    /// Of the slot that is being looked at.
    pub(super) candidate: Judgement,
    /// The one to send new flows to, if `usable`.
    pub(super) live: Judgement,
    /// One that Cilium would follow, usable or not, if `present`.
    pub(super) present: Judgement,
    /// Whatever Cilium chooses is usable.
    pub(super) all_usable: bool,
    /// Whatever Cilium chooses is there, as far as was looked.
    pub(super) all_present: bool,
    /// Look no further than the first usable backend.
    pub(super) first_only: bool,
    /// 1 when the flow is given a port at which its client has replies, else 0.
    pub(super) symmetric: u32,
}

impl State {
    /// Of no packet.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            outcome: Outcome {
                reason: Reason::NotGuarded,
                source_port: None,
                cut: false,
                would_drain: false,
                moved: false,
            },
            master: Master { rev_nat_index: [0; 2], count: 0, affinity: false },
            port: [0; 2],
            unmarked: Unmarked::No,
            act: false,
            read: Read::NONE,
            drain_read: Read::NONE,
            flow: InnerFlow {
                backend_address: [0; 16],
                last_seen: 0,
                backend_id: 0,
                generation: 0,
                flags: 0,
                pad: 0,
            },
            memory: Memory::Nothing,
            pin: PinnedPort::NONE,
            in_place: false,
            home: Judgement::absent(0),
            favourite: Judgement::absent(0),
            candidate: Judgement::absent(0),
            live: Judgement::absent(0),
            present: Judgement::absent(0),
            all_usable: false,
            all_present: false,
            first_only: false,
            symmetric: 0,
        }
    }

    #[inline(always)]
    pub(super) fn begin(&mut self, port: [u8; 2], mode: u8) {
        self.outcome = Outcome {
            reason: Reason::NotGuarded,
            source_port: None,
            cut: false,
            would_drain: false,
            moved: false,
        };
        self.port = port;
        self.unmarked = if mode == mode::DRAIN { Unmarked::Awhile } else { Unmarked::No };
        self.act = mode != mode::AUDIT;
        self.memory = Memory::Nothing;
    }

    /// The packet's known flow is on the backend `id`.
    #[inline(always)]
    pub(super) fn flow_is_on(&self, id: u32) -> bool {
        self.memory == Memory::Known && self.in_place && self.flow.backend_id == id
    }
}

impl Default for State {
    fn default() -> Self {
        Self::new()
    }
}
