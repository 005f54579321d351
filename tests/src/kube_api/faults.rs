//! What can be made to go wrong.

use std::{collections::BTreeMap, time::Duration};

use serde_json::Value;

use super::kind::Kind;

/// How the events of a kind reach its watches.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Delivery {
    /// Nothing is sent, and what happens is kept for later.
    pub held: bool,
    /// Every event comes this much later than it happened.
    pub delay: Duration,
    /// Every event is sent twice.
    pub duplicate: bool,
    /// Of what is due at once, only each object's last state is sent, as one event.
    pub coalesce: bool,
    /// Of what is due at once, the newest object's events come first; those of one object keep their order.
    pub newest_first: bool,
}

/// How the watches are ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Close {
    /// As when the server's timeout is over.
    Clean,
    /// In the middle of an answer.
    Abrupt,
    /// With an ERROR event that carries 410.
    Expired,
}

/// How a watch from a revision that is too old is refused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Gone {
    /// Answer 200, first event ERROR with code 410: what the watch cache does.
    #[default]
    Event,
    /// HTTP status 410, which the API's contract allows too. kube's watcher does not list again by itself then: it asks
    /// for the same revision for ever.
    Status,
}

/// What happens to every request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Outage {
    /// It is answered.
    #[default]
    None,
    /// It is accepted and never answered. Watches stay silent.
    Hang,
    /// It gets this HTTP status. Watches that run go on. kube's client itself repeats what gets 429, 503 or 504.
    Status(u16),
}

/// The present faults.
#[derive(Debug)]
pub(crate) struct Faults {
    pub(crate) delivery: BTreeMap<Kind, Delivery>,
    pub(crate) outage: Outage,
    pub(crate) gone: Gone,
    /// Raised to end the watches that began before; with the kind that it is limited to.
    pub(crate) closes: Vec<(Option<Kind>, Close)>,
    /// Events that never happened.
    pub(crate) injected: Vec<(Kind, Value)>,
    pub(crate) bookmarks_every: Duration,
    /// Raised to send a bookmark at once.
    pub(crate) bookmark_rounds: u64,
}

impl Default for Faults {
    fn default() -> Self {
        Self {
            delivery: BTreeMap::new(),
            outage: Outage::None,
            gone: Gone::Event,
            closes: Vec::new(),
            injected: Vec::new(),
            bookmarks_every: Duration::from_secs(60),
            bookmark_rounds: 0,
        }
    }
}
