//! What a stream's account must say about a move.

use std::time::Duration;

use anyhow::{Result, ensure};
use coil_guard_common::decide::SETTLE;

use crate::{cilium::Dump, fou::StreamReport};

/// Lets the time pass for which new connections still join a leaving backend. The program's clock is up to 10 ms behind.
pub fn wait_settled() {
    std::thread::sleep(Duration::from_nanos(SETTLE) + Duration::from_millis(15));
}

/// Checks that nothing was lost or doubled, that no packet sent at or after `since` (CLOCK_MONOTONIC, ns) went to the
/// backend `from`, and that there were such packets, and earlier ones on `from`.
///
/// # Errors
///
/// When not; with the account.
pub fn left(report: &StreamReport, from: usize, since: u64) -> Result<()> {
    report.ensure_exactly_once()?;
    let backends = report.backends();
    let (before, after): (Vec<u64>, Vec<u64>) =
        backends.keys().partition(|sequence| report.sent[**sequence as usize] < since);
    ensure!(!before.is_empty() && !after.is_empty(), "no packets on both sides of the event: {report:?}");
    ensure!(before.iter().any(|sequence| backends[sequence] == from), "never on {from}: {report:?}");
    let late: Vec<_> = after.iter().filter(|sequence| backends[sequence] == from).collect();
    ensure!(
        late.is_empty(),
        "{} packets went to {from} after the event, first {:?}: {report:?}",
        late.len(),
        late.first()
    );
    Ok(())
}

/// Checks that every packet went to one backend.
///
/// # Errors
///
/// When not; with the account.
pub fn stayed(report: &StreamReport, on: usize) -> Result<()> {
    report.ensure_exactly_once()?;
    let backends: Vec<_> = report.per_backend().into_keys().collect();
    ensure!(backends == [on], "packets went to {backends:?} and not to {on} alone: {report:?}");
    Ok(())
}

/// Checks that maps that nobody but Cilium's agent may write did not change, and that conntrack has only entries of
/// these keys that it did not have before.
///
/// # Errors
///
/// When not; with the changes.
pub fn only_these_entries(before: &Dump, after: &Dump, allowed: &[Vec<u8>]) -> Result<()> {
    for change in before.changes(after) {
        let own = change.map.contains("_ct_any") && allowed.contains(&change.key);
        ensure!(own, "a map of Cilium's changed where only its own agent and datapath may write: {change:?}");
    }
    Ok(())
}
