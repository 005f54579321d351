//! The maps: our own, shared by all instances through pins, and Cilium's, bound by the loader to Cilium's pins.
//!
//! Sizes given here are placeholders; the loader sets our own and binds Cilium's as they are.

use aya_ebpf::{
    bindings::BPF_F_NO_PREALLOC,
    macros::map,
    maps::{Array, HashMap, LruHashMap, PerCpuArray, RingBuf},
};
use coil_guard_common::{
    abi::{
        AgentState, BackendMark, ClientServiceKey, DrainStats, EgressCounters, FragmentKey, FragmentPorts,
        GuardedService, InnerFlow, InnerFlowKey, LeavingKey, LeavingSeen, PinnedPort, PinnedPortKey,
        Previous, ReportKey, Return, ReturnKey, Returning, ServiceKey,
    },
    cilium::{
        Affinity, AffinityKey4, AffinityKey6, AffinityMatchKey, Backend4, Backend6, CtEntry, CtKey4, CtKey6,
        Service, ServiceKey4, ServiceKey6,
    },
    counters::Reason,
    inner,
};

use crate::scratch::Scratch;

#[map]
pub(crate) static GUARDED_SERVICES: HashMap<ServiceKey, GuardedService> =
    HashMap::with_max_entries(1, BPF_F_NO_PREALLOC);
#[map]
pub(crate) static BACKEND_MARKS: HashMap<[u8; 16], BackendMark> =
    HashMap::with_max_entries(1, BPF_F_NO_PREALLOC);
#[map]
pub(crate) static AGENT: Array<AgentState> = Array::with_max_entries(1, 0);
#[map]
pub(crate) static INNER_FLOWS: LruHashMap<InnerFlowKey, InnerFlow> = LruHashMap::with_max_entries(1, 0);
#[map]
pub(crate) static CROWDED_FLOWS: LruHashMap<InnerFlowKey, InnerFlow> = LruHashMap::with_max_entries(1, 0);
#[map]
pub(crate) static FLOW_SHARES: LruHashMap<[u8; 16], u64> = LruHashMap::with_max_entries(1, 0);
#[map]
pub(crate) static FRAGMENTS: LruHashMap<FragmentKey, FragmentPorts> = LruHashMap::with_max_entries(1, 0);
#[map]
pub(crate) static PREVIOUS: LruHashMap<ClientServiceKey, Previous> = LruHashMap::with_max_entries(1, 0);
#[map]
pub(crate) static PINNED_PORTS: LruHashMap<PinnedPortKey, PinnedPort> = LruHashMap::with_max_entries(1, 0);
#[map]
pub(crate) static RETURNING: HashMap<[u8; 16], Returning> = HashMap::with_max_entries(1, BPF_F_NO_PREALLOC);
#[map]
pub(crate) static RETURNS: LruHashMap<ReturnKey, Return> = LruHashMap::with_max_entries(1, 0);
#[map]
pub(crate) static LEAVING: LruHashMap<LeavingKey, LeavingSeen> = LruHashMap::with_max_entries(1, 0);
#[map]
pub(crate) static DRAINS: LruHashMap<[u8; 16], DrainStats> = LruHashMap::with_max_entries(1, 0);
#[map]
static COUNTERS: PerCpuArray<u64> = PerCpuArray::with_max_entries(Reason::COUNT, 0);
#[map]
static EGRESS_COUNTERS: PerCpuArray<EgressCounters> = PerCpuArray::with_max_entries(1, 0);
#[map]
pub(crate) static REPORTED: LruHashMap<ReportKey, u64> = LruHashMap::with_max_entries(1, 0);
#[map]
pub(crate) static EVENTS: RingBuf = RingBuf::with_byte_size(4096, 0);

#[map]
pub(crate) static CT4: LruHashMap<CtKey4, CtEntry> = LruHashMap::with_max_entries(1, 0);
#[map]
pub(crate) static SERVICES4: HashMap<ServiceKey4, Service> = HashMap::with_max_entries(1, BPF_F_NO_PREALLOC);
#[map]
pub(crate) static BACKENDS4: HashMap<u32, Backend4> = HashMap::with_max_entries(1, BPF_F_NO_PREALLOC);
#[map]
pub(crate) static AFFINITY4: LruHashMap<AffinityKey4, Affinity> = LruHashMap::with_max_entries(1, 0);
#[map]
pub(crate) static CT6: LruHashMap<CtKey6, CtEntry> = LruHashMap::with_max_entries(1, 0);
#[map]
pub(crate) static SERVICES6: HashMap<ServiceKey6, Service> = HashMap::with_max_entries(1, BPF_F_NO_PREALLOC);
#[map]
pub(crate) static BACKENDS6: HashMap<u32, Backend6> = HashMap::with_max_entries(1, BPF_F_NO_PREALLOC);
#[map]
pub(crate) static AFFINITY6: LruHashMap<AffinityKey6, Affinity> = LruHashMap::with_max_entries(1, 0);

#[map]
pub(crate) static AFFINITY_MATCH: HashMap<AffinityMatchKey, u8> =
    HashMap::with_max_entries(1, BPF_F_NO_PREALLOC);

/// A copy of a value. Values of hash maps can change or be recycled while they are read; every reader here tolerates a
/// mixture, because it uses each field by itself and checks what it acts on again when it writes.
macro_rules! copy {
    ($map:expr, $key:expr) => {
        // SAFETY: the value is plain integers; see above for concurrent changes.
        unsafe { $map.get($key).copied() }
    };
}
pub(crate) use copy;

#[inline(always)]
pub(crate) fn guarded_service(key: &ServiceKey) -> Option<&'static GuardedService> {
    // SAFETY: as for `copy!`; used during this packet only.
    unsafe { GUARDED_SERVICES.get(key) }
}

#[inline(always)]
pub(crate) fn count(reason: Reason) {
    if let Some(counter) = COUNTERS.get_ptr_mut(reason as u32) {
        // SAFETY: this CPU's own counter, and classifiers do not nest.
        unsafe { *counter += 1 };
    }
}

#[inline(always)]
pub(crate) fn egress_counters(egress: u32) -> Option<&'static mut EgressCounters> {
    // SAFETY: this CPU's own record, and classifiers do not nest.
    EGRESS_COUNTERS.get_ptr_mut(egress).map(|counters| unsafe { &mut *counters })
}

/// Notes the ports of a first fragment for the later ones.
#[inline(always)]
pub(crate) fn remember_fragment(scratch: &mut Scratch) {
    scratch.ports = FragmentPorts {
        source_port: scratch.flow.source_port,
        destination_port: scratch.flow.destination_port,
    };
    // A full LRU evicts; what fails beyond that costs only the later fragments their flow.
    let _: Result<(), i32> = FRAGMENTS.insert(&scratch.fragment, &scratch.ports, 0);
}

#[inline(always)]
pub(crate) fn follow_fragment(scratch: &mut Scratch) {
    if let Some(ports) = copy!(FRAGMENTS, &scratch.fragment) {
        inner::follow_first(&mut scratch.flow, &ports);
    }
}
