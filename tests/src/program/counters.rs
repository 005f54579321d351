//! Packets by verdict.

use anyhow::{Result, bail};
use coil_guard_common::counters::Reason;

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
