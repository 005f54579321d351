//! Packets by verdict.

use anyhow::{Result, bail};
use coil_guard_common::{abi::EgressCounters, counters::Reason};

/// Packets by verdict.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Counters(Vec<u64>);

impl Counters {
    pub(super) fn new(counts: Vec<u64>) -> Self {
        Self(counts)
    }

    /// Packets of one verdict.
    #[must_use]
    pub fn of(&self, reason: Reason) -> u64 {
        self.0[reason as usize]
    }

    /// The one verdict that was counted since `earlier`.
    ///
    /// # Errors
    ///
    /// When it was not exactly one.
    pub fn one_since(&self, earlier: &Self) -> Result<Reason> {
        let grown: Vec<_> = Reason::ALL
            .iter()
            .filter(|reason| self.of(**reason) != earlier.of(**reason))
            .map(|reason| (*reason, self.of(*reason) - earlier.of(*reason)))
            .collect();
        match grown.as_slice() {
            [(reason, 1)] => Ok(*reason),
            _ => bail!("one packet was counted as {grown:?}"),
        }
    }
}

const FIELDS: usize = size_of::<EgressCounters>() / size_of::<u64>();

/// The sum of what each CPU counted.
pub(super) fn total<'a, I: Iterator<Item = &'a EgressCounters>>(counters: I) -> EgressCounters {
    let mut sum = [0u64; FIELDS];
    for counters in counters {
        let fields: &[u64; FIELDS] = zerocopy::transmute_ref!(counters);
        for (sum, field) in sum.iter_mut().zip(fields) {
            *sum += field;
        }
    }
    zerocopy::transmute!(sum)
}

/// What was counted between two readings.
pub(super) fn difference(after: &EgressCounters, before: &EgressCounters) -> EgressCounters {
    let (after, before): (&[u64; FIELDS], &[u64; FIELDS]) =
        (zerocopy::transmute_ref!(after), zerocopy::transmute_ref!(before));
    let mut difference = [0u64; FIELDS];
    for ((difference, after), before) in difference.iter_mut().zip(after).zip(before) {
        *difference = after - before;
    }
    zerocopy::transmute!(difference)
}
