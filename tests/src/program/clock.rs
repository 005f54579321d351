//! The program's clock, and what it costs.

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

/// Waits for the next tick of the kernel's timer, at which the program looks everything up again.
///
/// # Panics
///
/// When there is none within a second.
pub fn await_tick() {
    let coarse = || clock_gettime(ClockId::CLOCK_MONOTONIC_COARSE).expect("this clock always exists");
    let (before, deadline) = (coarse(), monotonic() + 1_000_000_000);
    while coarse() == before {
        assert!(monotonic() < deadline, "the kernel's timer stands still");
        std::hint::spin_loop();
    }
}

/// Processor time of this thread, kernel and all: what something costs on a busy machine.
///
/// # Panics
///
/// Never: the kernel always has this clock.
#[must_use]
pub fn processor_time() -> Duration {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).expect("CLOCK_THREAD_CPUTIME_ID always exists").into()
}
