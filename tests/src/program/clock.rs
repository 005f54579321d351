//! The program's clock.

use std::time::Duration;

use nix::time::{ClockId, clock_gettime};

/// CLOCK_MONOTONIC, ns. The program's own reading is that of the last tick of the kernel's timer.
///
/// # Panics
///
/// Never: the kernel always has this clock.
#[must_use]
pub fn monotonic() -> u64 {
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC).expect("CLOCK_MONOTONIC always exists");
    Duration::from(now).as_nanos() as u64
}
