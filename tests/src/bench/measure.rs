//! Timing in turns, and what is made of several measurements of one thing.

use std::fmt;

use anyhow::Result;
use serde::Serialize;

use super::report::short;

/// How long to measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// Long enough for figures that can be told to others.
    Full,
    /// Just long enough to see that everything works.
    Quick,
}

impl Extent {
    /// `full`, or `quick` in a smoke run.
    pub fn pick<T>(self, full: T, quick: T) -> T {
        match self {
            Self::Full => full,
            Self::Quick => quick,
        }
    }
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

/// Several measurements of one thing: the middle one, and the middle half of them. Neither is moved by a few that were
/// disturbed.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Spread {
    /// The middle one.
    pub median: f64,
    /// A quarter is below.
    pub low: f64,
    /// A quarter is above.
    pub high: f64,
    /// The largest.
    pub most: f64,
    /// How many there are.
    pub count: usize,
}

impl Spread {
    /// Of these; zeros of none.
    #[must_use]
    pub fn of(mut figures: Vec<f64>) -> Self {
        figures.sort_by(f64::total_cmp);
        let at = |part: usize| {
            figures
                .get((figures.len() * part / 4).min(figures.len().saturating_sub(1)))
                .copied()
                .unwrap_or(0.0)
        };
        Self { median: at(2), low: at(1), high: at(3), most: at(4), count: figures.len() }
    }
}

impl fmt::Display for Spread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({} to {})", short(self.median), short(self.low), short(self.high))
    }
}

#[cfg(test)]
mod tests {
    use super::Spread;

    #[test]
    fn a_spread_is_not_moved_by_the_worst() {
        let spread = Spread::of(vec![5.0, 1.0, 2.0, 1000.0, 4.0, 3.0, 2.5]);
        assert_eq!(
            (spread.median, spread.low, spread.high, spread.most, spread.count),
            (3.0, 2.0, 5.0, 1000.0, 7)
        );
        assert_eq!(Spread::of(Vec::new()).median, 0.0);
        assert_eq!(Spread::of(vec![7.0]).high, 7.0);
    }
}
