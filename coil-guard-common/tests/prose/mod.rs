//! May a backend get new flows, may it keep the ones it has: the design's prose, written down a second time.
//!
//! Plain conditions in the order of the text, so that the table in `decide::judge` has something to be compared with that
//! was not derived from it.

use coil_guard_common::{
    abi::{BackendMark, mark},
    cilium::{BACKEND_ACTIVE, BACKEND_TERMINATING},
};

/// Everything that the rules look at.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Facts {
    /// CLOCK_MONOTONIC, ns.
    pub(crate) now: u64,
    /// Cilium's state byte.
    pub(crate) state: u8,
    /// The agent's mark of its address.
    pub(crate) mark: Option<BackendMark>,
    /// The agent's heartbeat is fresh.
    pub(crate) fresh: bool,
    /// Mode drain.
    pub(crate) drain: bool,
    /// When the program first saw it leaving, in the same way as now; now if it has not yet.
    pub(crate) first_seen: u64,
    /// How long it is drained without a mark.
    pub(crate) unmarked_drain: u64,
}

/// What follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Verdict {
    /// May get new flows.
    pub(crate) usable: bool,
    /// May keep the flows that it has.
    pub(crate) keeps: bool,
}

impl Facts {
    /// The mark if the agent still stands by it.
    fn valid_mark(&self) -> Option<BackendMark> {
        self.mark.filter(|mark| self.now < mark.valid_until)
    }

    fn usable(&self) -> bool {
        if self.state != BACKEND_ACTIVE {
            return false;
        }
        let marked = self.valid_mark().map_or(0, |mark| mark.state);
        if self.fresh {
            // The agent's list of ready endpoints is complete: who is not on it gets nothing new.
            marked == mark::READY
        } else {
            // Cilium's state decides, but a pod that is being deleted or gone does not come back.
            marked != mark::LEAVING && marked != mark::GONE
        }
    }

    fn keeps(&self) -> bool {
        let Some(mark) = self.mark else { return self.keeps_without_mark() };
        let valid = self.now < mark.valid_until;
        match mark.state {
            mark::LEAVING => self.drain && self.now < mark.keep_until,
            mark::NOT_READY if valid && self.fresh => self.now < mark.keep_until,
            mark::GONE if valid => false,
            _ => self.keeps_without_mark(),
        }
    }

    fn keeps_without_mark(&self) -> bool {
        if self.state != BACKEND_TERMINATING {
            return true;
        }
        self.drain && self.now < self.first_seen + self.unmarked_drain
    }

    /// Whether the agent's mark says why it gets nothing new.
    pub(crate) fn explained(&self) -> bool {
        let valid = self.valid_mark().is_some();
        self.mark.is_some_and(|mark| match mark.state {
            mark::LEAVING => true,
            mark::NOT_READY => valid && self.fresh,
            mark::GONE => valid,
            _ => false,
        })
    }

    /// The verdict.
    pub(crate) fn verdict(&self) -> Verdict {
        let usable = self.usable();
        Verdict { usable, keeps: usable || self.keeps() }
    }
}
