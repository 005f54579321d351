//! Keys and values too large for the 512 bytes of stack.

use aya_ebpf::{macros::map, maps::PerCpuArray};
use coil_guard_common::{
    abi::{
        ClientServiceKey, DrainStats, FragmentKey, FragmentPorts, GuardedService, InnerFlow, InnerFlowKey,
        LeavingKey, LeavingSeen, PinnedPort, PinnedPortKey, Previous, ReportKey, Return, ReturnKey,
        ServiceKey,
    },
    cilium::{
        AffinityKey4, AffinityKey6, AffinityMatchKey, CtEntry, CtKey4, CtKey6, ServiceKey4, ServiceKey6,
    },
    decide::State,
    inner::FlowPacket,
    packet::Outer,
};

use crate::{config::Client, family::Family, maps, skb::WINDOW};

/// What is known about one packet and client. It stands here and not on the stack also because the verifier does not
/// follow values through maps: to it, all packets that got this far are one.
///
/// One record per CPU. A classifier on egress runs with bottom halves off and is not re-entered, so a record has one user
/// at a time. Padding fields stay zero: they are parts of keys.
#[repr(C)]
pub(crate) struct Scratch {
    pub(crate) flow: InnerFlowKey,
    pub(crate) new_flow: InnerFlow,
    /// Zeros but for what `create` sets; Cilium fills in the lifetime with the next packet.
    pub(crate) new_entry: CtEntry,
    /// Zeros but for what `keep_replies` sets.
    pub(crate) new_replies: CtEntry,
    pub(crate) fragment: FragmentKey,
    pub(crate) report: ReportKey,
    pub(crate) previous: Previous,
    pub(crate) outer4: Outer<[u8; 4]>,
    pub(crate) outer6: Outer<[u8; 16]>,
    pub(crate) keys4: Keys<CtKey4, ServiceKey4, AffinityKey4>,
    pub(crate) keys6: Keys<CtKey6, ServiceKey6, AffinityKey6>,
    pub(crate) leaving: LeavingKey,
    pub(crate) seen: LeavingSeen,
    /// Zeros.
    pub(crate) no_drains: DrainStats,
    pub(crate) service: ServiceKey,
    pub(crate) client_service: ClientServiceKey,
    pub(crate) pinned_port: PinnedPortKey,
    pub(crate) new_pin: PinnedPort,
    pub(crate) affinity_match: AffinityMatchKey,
    pub(crate) given: ReturnKey,
    pub(crate) given_for: Return,
    pub(crate) ports: FragmentPorts,
    pub(crate) flow_packet: FlowPacket,
    pub(crate) mode: u8,
    /// Protocol in the keys of Cilium's services map.
    pub(crate) proto: u8,
    /// 1 or 0.
    pub(crate) heartbeat_fresh: u64,
    /// Where the packet's flow is remembered, see `memory`.
    pub(crate) remembered: u64,
    /// 1 or 0.
    pub(crate) only_ready: u64,
    /// The first bytes of the inner packet.
    pub(crate) window: [u8; WINDOW],
    /// When the packet came.
    pub(crate) now: u64,
    /// Since when inner flows of the packet's client and service are remembered.
    pub(crate) memory_since: u64,
    /// Of the packet's client.
    pub(crate) unmarked_drain: u64,
    /// Of the packet's client.
    pub(crate) generation: u32,
    /// Of the packet's service.
    pub(crate) egress: u32,
    /// Of the packet's client.
    pub(crate) fou_port: [u8; 2],
    /// Source port of the service entry that was read last.
    pub(crate) entry_port: [u8; 2],
    /// Its lifetime, 0 when there was none.
    pub(crate) entry_lifetime: u32,
}

/// Keys of Cilium's maps for the packet's client and service. Built once a packet; a lookup then changes a field or two.
#[repr(C)]
pub(crate) struct Keys<C, S, A> {
    /// Service entry; the ports are left to set.
    pub(crate) entry: Aligned<C>,
    /// Egress entry; backend and ports are left to set.
    pub(crate) egress: Aligned<C>,
    /// The slot is left to set.
    pub(crate) service: S,
    /// The reverse NAT index is left to set.
    pub(crate) affinity: A,
}

/// A value aligned to 8 bytes, so that words can be written into it.
#[repr(C, align(8))]
pub(crate) struct Aligned<T>(pub(crate) T);

#[map]
static SCRATCH: PerCpuArray<Scratch> = PerCpuArray::with_max_entries(1, 0);

impl Scratch {
    /// This CPU's record.
    #[inline(always)]
    pub(crate) fn get() -> Option<&'static mut Self> {
        // SAFETY: see the type: one user at a time, and the map lives as long as the program.
        SCRATCH.get_ptr_mut(0).map(|scratch| unsafe { &mut *scratch })
    }

    /// Fills in what the decision needs to know about the packet and its client, and the keys.
    #[inline(always)]
    pub(crate) fn prepare<F: Family>(&mut self, now: u64, service: &GuardedService, client: Client) {
        (self.heartbeat_fresh, self.only_ready) = match maps::AGENT.get(0) {
            Some(agent) => (u64::from(now < agent.heartbeat_until), agent.only_ready),
            None => (0, 0),
        };
        F::prepare(self);
        self.now = now;
        self.egress = service.egress;
        self.memory_since = service.tracked_since.max(client.guarded_since());
        (self.generation, self.fou_port) = (client.generation(), client.fou_port());
        self.unmarked_drain = client.unmarked_drain();
    }
}

#[map]
static STATE: PerCpuArray<State> = PerCpuArray::with_max_entries(1, 0);

/// This CPU's record for the decision.
#[inline(always)]
pub(crate) fn state() -> Option<&'static mut State> {
    // SAFETY: as for the scratch record. Zeros, which the map holds at first, are a valid State: no field has an invalid zero.
    STATE.get_ptr_mut(0).map(|state| unsafe { &mut *state })
}
