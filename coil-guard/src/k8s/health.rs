//! Which watches can be believed.

use std::collections::BTreeMap;

use super::Kind;
use crate::clock::Monotonic;

/// State of a watch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Health {
    /// Following.
    Established,
    /// Not following, and why.
    Lost(String),
}

/// One watch's record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Watch {
    /// Its first list has arrived.
    pub listed: bool,
    /// It is following now.
    pub established: bool,
    /// Since when `established` is as it is.
    pub since: Monotonic,
    /// Why it is not following.
    pub problem: Option<String>,
}

/// The state of every watch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Watches {
    watches: BTreeMap<Kind, Watch>,
}

impl Watches {
    /// None has been heard of yet.
    #[must_use]
    pub fn new(now: Monotonic) -> Self {
        let watch = Watch { listed: false, established: false, since: now, problem: None };
        Self { watches: Kind::ALL.into_iter().map(|kind| (kind, watch.clone())).collect() }
    }

    /// A whole list has arrived.
    pub fn listed(&mut self, kind: Kind) {
        if let Some(watch) = self.watches.get_mut(&kind) {
            watch.listed = true;
        }
    }

    /// Takes in a change; true when there is something new to tell the operator.
    pub fn set(&mut self, kind: Kind, health: Health, now: Monotonic) -> bool {
        let Some(watch) = self.watches.get_mut(&kind) else { return false };
        let (established, problem) = match health {
            Health::Established => (true, None),
            Health::Lost(problem) => (false, Some(problem)),
        };
        let news = watch.established != established || watch.problem != problem;
        if watch.established != established {
            watch.since = now;
        }
        (watch.established, watch.problem) = (established, problem);
        news
    }

    /// Every watch has listed once: the index is whole, if perhaps old.
    #[must_use]
    pub fn all_listed(&self) -> bool {
        self.watches.values().all(|watch| watch.listed)
    }

    /// Every watch has listed and follows: the index is whole and current.
    #[must_use]
    pub fn complete(&self) -> bool {
        self.watches.values().all(|watch| watch.listed && watch.established)
    }

    /// By kind.
    #[must_use]
    pub fn all(&self) -> &BTreeMap<Kind, Watch> {
        &self.watches
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn complete_needs_every_watch_listed_and_following() {
        let now = Monotonic(1);
        let mut watches = Watches::new(now);
        for kind in Kind::ALL {
            assert!(!watches.complete());
            watches.listed(kind);
            assert!(watches.set(kind, Health::Established, now));
        }
        assert!(watches.complete() && watches.all_listed());
        assert!(watches.set(Kind::Service, Health::Lost("closed".into()), now));
        assert!(!watches.complete() && watches.all_listed(), "what is known stays known");
        assert!(!watches.set(Kind::Service, Health::Lost("closed".into()), now), "no news");
        assert!(watches.set(Kind::Service, Health::Lost("refused".into()), now));
        assert!(watches.set(Kind::Service, Health::Established, now) && watches.complete());
    }
}
