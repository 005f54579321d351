//! Events to the agent.

use coil_guard_common::abi::{Event, ReportKey};

use crate::maps::{EVENTS, REPORTED, copy};

/// At most one event of a kind in this time for each client, service and backend.
const INTERVAL: u64 = 1_000_000_000;

/// Whether an event about `key` is due; notes that it is sent now.
#[inline(always)]
pub(crate) fn due(key: &ReportKey, now: u64) -> bool {
    if let Some(last) = copy!(REPORTED, key)
        && now.saturating_sub(last) < INTERVAL
    {
        return false;
    }
    REPORTED.insert(key, now, 0).is_ok()
}

/// Sends the event that `fill` writes; a full ring buffer loses it, the counters still tell.
#[inline(always)]
pub(crate) fn send(fill: impl FnOnce(&mut Event)) {
    let Some(mut entry) = EVENTS.reserve::<Event>(0) else { return };
    // SAFETY: integers only, so that any bytes are valid, and `fill` writes every field.
    fill(unsafe { &mut *entry.as_mut_ptr() });
    entry.submit(0);
}
