//! Timing in turns.

use std::time::Duration;

use anyhow::Result;

/// How long to measure.
#[derive(Clone, Copy, Debug)]
pub struct Effort {
    /// Packets of a repeated case, per turn.
    pub packets: u32,
    /// Packets of a single case.
    pub singles: u32,
    /// Turns.
    pub turns: u32,
}

/// Nanoseconds of each of several measurements, taken in turns: the least of each, which is the one with the least noise
/// of others in it.
pub(super) fn in_turns<const N: usize>(
    turns: u32,
    mut measure: impl FnMut(usize) -> Result<f64>,
) -> Result<[f64; N]> {
    let mut least = [f64::INFINITY; N];
    for _ in 0..turns.max(1) {
        for (index, least) in least.iter_mut().enumerate() {
            *least = least.min(measure(index)?);
        }
    }
    Ok(least)
}

/// The middle of several durations, in nanoseconds.
pub(super) fn median(durations: &mut [Duration]) -> f64 {
    let middle = durations.len() / 2;
    if durations.is_empty() {
        return 0.0;
    }
    let (_, median, _) = durations.select_nth_unstable(middle);
    median.as_nanos() as f64
}
