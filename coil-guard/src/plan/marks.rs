//! Backends to marks.

use std::{collections::BTreeSet, net::IpAddr, time::Duration};

use super::{EgressName, Keep, Mark, MarkState, Mode, Settings};
use crate::{
    clock::Monotonic,
    index::{Backend, BackendState, Egress, NotReadyAfter, SETTLE, Service},
};

/// How an Egress is guarded: what its services and marks are made of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Guard {
    pub(super) mode: Mode,
    pub(super) sport_auto: bool,
    pub(super) cluster_ips: BTreeSet<IpAddr>,
    not_ready_after: NotReadyAfter,
    drain_timeout: Option<Duration>,
}

impl Guard {
    pub(super) fn new(egress: &Egress, mode: Mode, service: &Service, settings: &Settings) -> Self {
        Self {
            mode,
            sport_auto: egress.sport_auto,
            cluster_ips: service.cluster_ips.clone(),
            not_ready_after: egress.not_ready_after.unwrap_or(settings.not_ready_after),
            drain_timeout: egress.drain_timeout,
        }
    }

    /// Whether the marks are the same.
    pub(super) fn marks_like(&self, other: &Self) -> bool {
        (self.mode, self.not_ready_after, self.drain_timeout)
            == (other.mode, other.not_ready_after, other.drain_timeout)
    }

    /// The mark of a backend.
    pub(super) fn mark(&self, egress: &EgressName, backend: &Backend, now: Monotonic) -> Mark {
        let settled = settled(backend);
        let (state, keep) = match backend.state {
            BackendState::Ready => (MarkState::Ready, Keep::ForEver),
            BackendState::NotReady => {
                let keep = match self.not_ready_after {
                    NotReadyAfter::Never => Keep::ForEver,
                    NotReadyAfter::After(Duration::ZERO) => Keep::No,
                    NotReadyAfter::After(after) => Keep::Until(backend.since.saturating_add(after)),
                };
                (MarkState::NotReady, keep)
            }
            BackendState::Leaving => (MarkState::Leaving, self.keep_leaving(backend)),
            BackendState::Settling if now < settled => (MarkState::NotReady, Keep::Until(settled)),
            BackendState::Settling | BackendState::Gone => (MarkState::Gone, Keep::No),
        };
        Mark { egress: egress.clone(), state, keep, since: backend.since }
    }

    /// A leaving backend keeps flows in drain alone, while it serves, and no longer than its pod may live. A pod that is
    /// stuck beyond its grace period is as good as gone: nobody can say what still works in it.
    fn keep_leaving(&self, backend: &Backend) -> Keep {
        if self.mode != Mode::Drain || !backend.serving {
            return Keep::No;
        }
        let longest = self.drain_timeout.map_or(backend.grace, |timeout| timeout.min(backend.grace));
        if longest.is_zero() { Keep::No } else { Keep::Until(backend.since.saturating_add(longest)) }
    }
}

fn settled(backend: &Backend) -> Monotonic {
    backend.since.saturating_add(SETTLE)
}

/// When the mark of a backend becomes another one without anything happening. A time until which flows are kept changes
/// nothing: the program looks at the clock itself.
pub(super) fn changes_at(backend: &Backend, now: Monotonic) -> Option<Monotonic> {
    Some(settled(backend)).filter(|settled| backend.state == BackendState::Settling && *settled > now)
}

/// Takes `mark` in place of the present one if it is the one that holds.
pub(super) fn join(present: &mut Option<Mark>, mark: Mark) {
    let rank = |mark: &Mark| (rank(mark.state), mark.since);
    if present.as_ref().is_none_or(|present| rank(present) < rank(&mark)) {
        *present = Some(mark);
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
