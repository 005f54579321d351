//! Backends to marks.

use std::{collections::BTreeMap, net::IpAddr, time::Duration};

use super::{EgressName, Keep, Mark, MarkState, Mode, Settings};
use crate::{
    clock::Monotonic,
    index::{Backend, BackendState, Egress, NotReadyAfter, SETTLE},
};

/// The mark of a backend.
pub(super) fn mark(
    name: &EgressName,
    egress: &Egress,
    mode: Mode,
    settings: &Settings,
    backend: &Backend,
    now: Monotonic,
) -> Mark {
    let settled = backend.since.saturating_add(SETTLE);
    let (state, keep) = match backend.state {
        BackendState::Ready => (MarkState::Ready, Keep::ForEver),
        BackendState::NotReady => {
            let keep = match egress.not_ready_after.unwrap_or(settings.not_ready_after) {
                NotReadyAfter::Never => Keep::ForEver,
                NotReadyAfter::After(Duration::ZERO) => Keep::No,
                NotReadyAfter::After(after) => Keep::Until(backend.since.saturating_add(after)),
            };
            (MarkState::NotReady, keep)
        }
        BackendState::Leaving => (MarkState::Leaving, keep_leaving(egress, mode, backend)),
        BackendState::Settling if now < settled => (MarkState::NotReady, Keep::Until(settled)),
        BackendState::Settling | BackendState::Gone => (MarkState::Gone, Keep::No),
    };
    Mark { egress: name.clone(), state, keep, since: backend.since }
}

/// A leaving backend keeps flows in drain alone, while it serves, and no longer than its pod may live. A pod that is
/// stuck beyond its grace period is as good as gone: nobody can say what still works in it.
fn keep_leaving(egress: &Egress, mode: Mode, backend: &Backend) -> Keep {
    if mode != Mode::Drain || !backend.serving {
        return Keep::No;
    }
    let longest = egress.drain_timeout.map_or(backend.grace, |timeout| timeout.min(backend.grace));
    if longest.is_zero() { Keep::No } else { Keep::Until(backend.since.saturating_add(longest)) }
}

/// Marks by address. One address can have been several pods', one after the other.
#[derive(Default)]
pub(super) struct Marks {
    marks: BTreeMap<IpAddr, Mark>,
}

impl Marks {
    pub(super) fn add(&mut self, address: IpAddr, mark: Mark) {
        let rank = |mark: &Mark| (rank(mark.state), mark.since);
        match self.marks.get_mut(&address) {
            Some(present) if rank(present) >= rank(&mark) => {}
            Some(present) => *present = mark,
            None => drop(self.marks.insert(address, mark)),
        }
    }

    /// The marks, and when they change without anything happening.
    pub(super) fn finish(self, now: Monotonic) -> (BTreeMap<IpAddr, Mark>, Option<Monotonic>) {
        let ends = |mark: &Mark| match mark.keep {
            Keep::Until(end) if mark.state == MarkState::NotReady && end > now => Some(end),
            _ => None,
        };
        let next = self.marks.values().filter_map(ends).min();
        (self.marks, next)
    }
}

/// Which of two marks of one address holds. A ready pod is the one that answers there now. Short of that, what the
/// address was to its flows counts: they belong to the pod that is gone or going, not to a new one that is not ready.
fn rank(state: MarkState) -> u8 {
    match state {
        MarkState::Ready => 3,
        MarkState::Gone => 2,
        MarkState::Leaving => 1,
        MarkState::NotReady => 0,
    }
}
