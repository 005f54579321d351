//! The maps, under the names that Cilium pins them by.

use aya_ebpf::{
    macros::map,
    maps::{Array, HashMap, LruHashMap, PerCpuArray},
};
use coil_guard_common::cilium::{
    Affinity, AffinityKey4, AffinityKey6, AffinityMatchKey, Backend4, Backend6, CtEntry, CtKey4, CtKey6,
    ReverseNat4, ReverseNat6, Service, ServiceKey4, ServiceKey6,
};

use crate::{
    abi::{STAT_COUNT, Settings, Stat},
    family::{Scratch, V4, V6},
};

// Sizes matter only where the lab leaves a family out and the loader makes a private map.
const ENTRIES: u32 = 4096;

#[map(name = "cilium_ct_any4_global")]
pub static CT4: LruHashMap<CtKey4, CtEntry> = LruHashMap::with_max_entries(ENTRIES, 0);
#[map(name = "cilium_ct_any6_global")]
pub static CT6: LruHashMap<CtKey6, CtEntry> = LruHashMap::with_max_entries(ENTRIES, 0);
#[map(name = "cilium_lb4_services_v2")]
pub static SERVICES4: HashMap<ServiceKey4, Service> = HashMap::with_max_entries(ENTRIES, 1);
#[map(name = "cilium_lb6_services_v2")]
pub static SERVICES6: HashMap<ServiceKey6, Service> = HashMap::with_max_entries(ENTRIES, 1);
#[map(name = "cilium_lb4_backends_v3")]
pub static BACKENDS4: HashMap<u32, Backend4> = HashMap::with_max_entries(ENTRIES, 1);
#[map(name = "cilium_lb6_backends_v3")]
pub static BACKENDS6: HashMap<u32, Backend6> = HashMap::with_max_entries(ENTRIES, 1);
#[map(name = "cilium_lb4_reverse_nat")]
pub static REVERSE_NAT4: HashMap<[u8; 2], ReverseNat4> = HashMap::with_max_entries(ENTRIES, 1);
#[map(name = "cilium_lb6_reverse_nat")]
pub static REVERSE_NAT6: HashMap<[u8; 2], ReverseNat6> = HashMap::with_max_entries(ENTRIES, 1);
#[map(name = "cilium_lb4_affinity")]
pub static AFFINITY4: LruHashMap<AffinityKey4, Affinity> = LruHashMap::with_max_entries(ENTRIES, 0);
#[map(name = "cilium_lb6_affinity")]
pub static AFFINITY6: LruHashMap<AffinityKey6, Affinity> = LruHashMap::with_max_entries(ENTRIES, 0);
#[map(name = "cilium_lb_affinity_match")]
pub static AFFINITY_MATCH: HashMap<AffinityMatchKey, u8> = HashMap::with_max_entries(ENTRIES, 1);

#[map(name = "MODEL_SETTINGS")]
static SETTINGS: Array<Settings> = Array::with_max_entries(1, 0);
#[map(name = "MODEL_STATS")]
static STATS: Array<u64> = Array::with_max_entries(STAT_COUNT, 0);

#[map(name = "MODEL_SCRATCH4")]
pub static SCRATCH4: PerCpuArray<Scratch<V4>> = PerCpuArray::with_max_entries(1, 0);
#[map(name = "MODEL_SCRATCH6")]
pub static SCRATCH6: PerCpuArray<Scratch<V6>> = PerCpuArray::with_max_entries(1, 0);

#[inline(always)]
pub fn settings() -> Option<&'static Settings> {
    SETTINGS.get(0)
}

#[inline(always)]
pub fn count(stat: Stat) {
    if let Some(counter) = STATS.get_ptr_mut(stat as u32) {
        add(counter, 1);
    }
}

/// Adds without losing what another CPU adds at the same time.
#[inline(always)]
pub fn add(counter: *mut u64, amount: u64) {
    // The target has no atomic types with read-modify-write operations, but the instruction exists.
    // SAFETY: points into a map value, aligned; other CPUs write it only by the same instruction.
    unsafe {
        core::arch::asm!("lock *(u64 *)({counter} + 0) += {amount}", counter = in(reg) counter, amount = in(reg) amount);
    }
}
