//! What was looked up a moment ago: a hash map costs as much as all that is done with what it holds.
//!
//! The moment is one tick of the clock, see [`config::now`](crate::config::now): the first packet of a tick looks again, so
//! what is found here is at most 10 ms old. Each CPU has records of its own, and classifiers do not nest. What shares a record
//! with something else is looked up each time.

use aya_ebpf::{macros::map, maps::PerCpuArray};
use coil_guard_common::{
    abi::{BackendMark, GuardedService, ServiceKey, mark, same_address},
    decide::COARSE,
};

use crate::maps::{self, copy};

const RECORDS: u32 = 64;

/// A guarded service.
#[repr(C)]
pub(crate) struct Service {
    tick: u64,
    address: [u8; 16],
    pub(crate) guarded: GuardedService,
    /// When its master entry was seen; 0 for never.
    master_at: u64,
    /// Of the master entry. Network order, never interpreted.
    rev_nat_index: [u8; 2],
    /// Network order.
    port: [u8; 2],
    pad: [u8; 4],
}

/// A backend with a READY mark.
#[repr(C)]
struct Ready {
    tick: u64,
    address: [u8; 16],
    valid_until: u64,
}

/// An egress entry that is kept: of a client's packets to a backend.
#[repr(C)]
struct Kept {
    tick: u64,
    client: [u8; 16],
    backend_id: u32,
    pad: u32,
}

#[map]
static RECENT_SERVICES: PerCpuArray<Service> = PerCpuArray::with_max_entries(RECORDS, 0);
#[map]
static RECENT_READY: PerCpuArray<Ready> = PerCpuArray::with_max_entries(RECORDS, 0);
#[map]
static RECENT_KEPT: PerCpuArray<Kept> = PerCpuArray::with_max_entries(RECORDS, 0);

/// The record for an address: its last byte tells neighbours apart.
#[inline(always)]
const fn place(address: [u8; 16]) -> u32 {
    (u128::from_le_bytes(address) >> 120) as u32 % RECORDS
}

/// The service at this mapped address and port, if it is guarded. `key` is its key.
#[inline(always)]
pub(crate) fn service(
    address: [u8; 16],
    port: [u8; 2],
    key: &ServiceKey,
    now: u64,
) -> Option<&'static mut Service> {
    // SAFETY: see the module.
    let recent = unsafe { &mut *RECENT_SERVICES.get_ptr_mut(place(address))? };
    let same =
        same_address(recent.address, address) && u16::from_ne_bytes(recent.port) == u16::from_ne_bytes(port);
    if !(same && recent.tick == now) {
        if !same {
            (recent.address, recent.port, recent.master_at) = (address, port, 0);
        }
        // One that is off is like one that is not there.
        recent.guarded.mode = OFF;
        if let Some(found) = maps::guarded_service(key) {
            // Field by field: as a whole it would be a call of memmove.
            let guarded = &mut recent.guarded;
            (guarded.expires_at, guarded.tracked_since) = (found.expires_at, found.tracked_since);
            (guarded.egress, guarded.mode, guarded.flags) = (found.egress, found.mode, found.flags);
        }
        recent.tick = now;
    }
    (recent.guarded.mode != OFF).then_some(recent)
}

/// No mode.
const OFF: u8 = 0;

impl Service {
    /// The reverse NAT index of its master entry, if that was seen within the last second.
    #[inline(always)]
    pub(crate) fn rev_nat_index(&self, now: u64) -> Option<[u8; 2]> {
        (now.wrapping_sub(self.master_at) < COARSE).then_some(self.rev_nat_index)
    }

    #[inline(always)]
    pub(crate) fn saw_master(&mut self, now: u64, rev_nat_index: [u8; 2]) {
        (self.master_at, self.rev_nat_index) = (now, rev_nat_index);
    }
}

/// The mark of a backend. While all marks are READY, one that was there a moment ago is: the agent takes `only_ready` back
/// before it writes another.
#[inline(always)]
pub(crate) fn mark(address: &[u8; 16], now: u64, only_ready: bool) -> Option<BackendMark> {
    if !only_ready {
        return copy!(maps::BACKEND_MARKS, address);
    }
    // SAFETY: see the module.
    let recent = unsafe { &mut *RECENT_READY.get_ptr_mut(place(*address))? };
    if !(recent.tick == now && same_address(recent.address, *address)) {
        let found = copy!(maps::BACKEND_MARKS, address)?;
        if found.state != mark::READY {
            return Some(found);
        }
        (recent.tick, recent.address, recent.valid_until) = (now, *address, found.valid_until);
    }
    // The time at which a READY mark was made, and until when it would keep flows, mean nothing.
    Some(BackendMark {
        keep_until: 0,
        valid_until: recent.valid_until,
        since: 0,
        state: mark::READY,
        pad: [0; 3],
        seen_before: 0,
    })
}

/// Whether `look` has said, since the tick began, that the egress entry of `client` to this backend is kept.
#[inline(always)]
pub(crate) fn is_kept(client: [u8; 16], backend_id: u32, now: u64, look: impl FnOnce() -> bool) -> bool {
    // SAFETY: see the module.
    let Some(recent) = RECENT_KEPT.get_ptr_mut(place(client)).map(|recent| unsafe { &mut *recent }) else {
        return false;
    };
    if recent.tick == now && recent.backend_id == backend_id && same_address(recent.client, client) {
        return true;
    }
    let kept = look();
    if kept {
        (recent.tick, recent.client, recent.backend_id) = (now, client, backend_id);
    }
    kept
}
