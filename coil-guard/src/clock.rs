//! CLOCK_MONOTONIC, which is what `bpf_ktime_get_ns` reads.

use std::time::Duration;

/// Nanoseconds of CLOCK_MONOTONIC. Ordered, and comparable with every time in the shared maps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Monotonic(pub u64);

impl Monotonic {
    /// Now.
    ///
    /// # Panics
    ///
    /// Never: the clock exists on every Linux.
    #[must_use]
    pub fn now() -> Self {
        let time =
            nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC).expect("CLOCK_MONOTONIC exists");
        Self(Duration::from(time).as_nanos() as u64)
    }

    /// Later by `duration`; sticks at the end of time.
    #[must_use]
    pub fn saturating_add(self, duration: Duration) -> Self {
        Self(self.0.saturating_add(u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)))
    }

    /// Time from `earlier` to `self`, zero when `earlier` is later.
    #[must_use]
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}
