//! What is worth a Kubernetes event, and when. Pure: notices in, writes out, and the clock is an argument.
//!
//! A roll of three egress pods with a hundred clients on a node is a few events, not hundreds: notices of one topic are
//! one event, written a moment after the first and then patched at most once a minute with the numbers so far.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    time::Duration,
};

use crate::{clock::Monotonic, plan::EgressName};

/// Notices that come together are told together.
const GATHER: Duration = Duration::from_secs(2);
/// An event is patched no more often than this.
const PATCH_EVERY: Duration = Duration::from_secs(60);
/// A topic that was quiet for this long starts a new event.
const QUIET: Duration = Duration::from_secs(600);
/// Clients counted one by one; beyond it the number is a lower bound.
const MOST_CLIENTS: usize = 4096;
/// Topics held at a time. More means that something is badly wrong, and the API server should not pay for it.
const MOST_TOPICS: usize = 512;

/// What an event is about. One topic of one Egress is one event at a time.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Topic {
    /// The guard's mode for the Egress is another one now.
    ModeChanged,
    /// Flows left this leaving backend.
    Moved(IpAddr),
    /// Audit: flows would have left it.
    WouldMove(IpAddr),
    /// Flows should have left it, and no backend was live.
    NoLive(Option<IpAddr>),
    /// This annotation has a value that is not understood.
    InvalidAnnotation(&'static str),
    /// Client pods cannot be guarded.
    AttachFailed,
    /// In drain, without a preStop hook.
    NoPreStop,
    /// A drain port was taken, so flows were reset.
    NotDrained(IpAddr),
    /// Client pods whose ephemeral ports overlap the drain ports.
    PortsOverlap,
    /// Rewrite: flows should have left this leaving backend, and another source port is of no use.
    CannotMove(IpAddr),
    /// The mode writes to Cilium's maps, which is forbidden here.
    ModeRefused,
}

impl Topic {
    /// The event's `reason`.
    #[must_use]
    pub const fn reason(&self) -> &'static str {
        match self {
            Self::ModeChanged => "GuardModeChanged",
            Self::Moved(_) => "FlowsMoved",
            Self::WouldMove(_) => "FlowsWouldMove",
            Self::NoLive(_) => "NoLiveBackend",
            Self::InvalidAnnotation(_) => "InvalidAnnotation",
            Self::AttachFailed => "AttachFailed",
            Self::NoPreStop => "DrainWithoutPreStop",
            Self::NotDrained(_) => "DrainPortCollision",
            Self::PortsOverlap => "DrainPortsOverlap",
            Self::CannotMove(_) => "FlowsCannotMove",
            Self::ModeRefused => "GuardModeRefused",
        }
    }

    /// The event's `action`: what the agent did or tried.
    #[must_use]
    pub const fn action(&self) -> &'static str {
        match self {
            Self::ModeChanged | Self::InvalidAnnotation(_) | Self::NoPreStop | Self::ModeRefused => {
                "Configure"
            }
            Self::AttachFailed | Self::PortsOverlap => "Attach",
            Self::Moved(_)
            | Self::WouldMove(_)
            | Self::NoLive(_)
            | Self::NotDrained(_)
            | Self::CannotMove(_) => "MoveFlows",
        }
    }

    /// Whether somebody should look at it.
    #[must_use]
    pub const fn is_warning(&self) -> bool {
        !matches!(self, Self::ModeChanged | Self::Moved(_) | Self::WouldMove(_))
    }
}

/// Something that happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Notice {
    /// To which Egress.
    pub egress: EgressName,
    /// The Egress's UID, which ties the event to this object and not to its successor.
    pub egress_uid: String,
    /// What.
    pub topic: Topic,
    /// Which client it concerns, if one: an address or a name.
    pub client: Option<String>,
    /// For a person. Of several notices the latest is shown.
    pub text: String,
}

/// What is to be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Write {
    /// The latest notice of the topic.
    pub notice: Notice,
    /// The full text.
    pub note: String,
    /// How often it happened.
    pub count: u64,
    /// Which event of the topic this is; the same for the creation and the patches of one event.
    pub serial: u64,
    /// The event exists: patch it.
    pub again: bool,
}

#[derive(Debug)]
struct Entry {
    latest: Notice,
    serial: u64,
    count: u64,
    clients: BTreeSet<String>,
    written: bool,
    /// There is something that has not been written.
    due: Option<Monotonic>,
    last_notice: Monotonic,
    last_write: Monotonic,
}

/// What happened lately, by topic.
#[derive(Debug, Default)]
pub struct Ledger {
    entries: BTreeMap<(EgressName, Topic), Entry>,
    serial: u64,
    dropped: u64,
}

impl Ledger {
    /// Takes a notice.
    pub fn take(&mut self, notice: Notice, now: Monotonic) {
        self.entries.retain(|_, entry| entry.due.is_some() || now.since(entry.last_notice) < QUIET);
        let key = (notice.egress.clone(), notice.topic.clone());
        if !self.entries.contains_key(&key) && self.entries.len() >= MOST_TOPICS {
            self.dropped += 1;
            return;
        }
        let serial = &mut self.serial;
        let entry = self.entries.entry(key).or_insert_with(|| {
            *serial += 1;
            Entry {
                latest: notice.clone(),
                serial: *serial,
                count: 0,
                clients: BTreeSet::new(),
                written: false,
                due: None,
                last_notice: now,
                last_write: now,
            }
        });
        entry.count += 1;
        if let Some(client) = notice.client.as_ref().filter(|_| entry.clients.len() < MOST_CLIENTS) {
            entry.clients.insert(client.clone());
        }
        entry.last_notice = now;
        let earliest = if entry.written {
            entry.last_write.saturating_add(PATCH_EVERY)
        } else {
            now.saturating_add(GATHER)
        };
        entry.due = Some(entry.due.unwrap_or(earliest.max(now)));
        entry.latest = notice;
    }

    /// When [`Self::due`] has something next.
    #[must_use]
    pub fn next_due(&self) -> Option<Monotonic> {
        self.entries.values().filter_map(|entry| entry.due).min()
    }

    /// What is to be written now.
    pub fn due(&mut self, now: Monotonic) -> Vec<Write> {
        let mut writes = Vec::new();
        for entry in self.entries.values_mut() {
            if entry.due.is_none_or(|due| due > now) {
                continue;
            }
            entry.due = None;
            entry.last_write = now;
            writes.push(Write {
                notice: entry.latest.clone(),
                note: entry.note(),
                count: entry.count,
                serial: entry.serial,
                again: std::mem::replace(&mut entry.written, true),
            });
        }
        writes
    }

    /// Notices lost because too many topics were open.
    #[must_use]
    pub fn dropped(&self) -> u64 {
        self.dropped
    }
}

impl Entry {
    fn note(&self) -> String {
        let text = &self.latest.text;
        let clients = self.clients.len();
        let plural = |number: usize| if number == 1 { "" } else { "s" };
        match self.latest.topic {
            Topic::Moved(_)
            | Topic::WouldMove(_)
            | Topic::NoLive(_)
            | Topic::NotDrained(_)
            | Topic::CannotMove(_) => {
                let times = if self.count == 1 { "once".into() } else { format!("{} times", self.count) };
                format!("{text} ({times}, {clients} client pod{})", plural(clients))
            }
            Topic::AttachFailed | Topic::PortsOverlap => {
                format!("{clients} client pod{}: {text}", plural(clients))
            }
            Topic::ModeChanged | Topic::InvalidAnnotation(_) | Topic::NoPreStop | Topic::ModeRefused => {
                text.clone()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Monotonic {
        Monotonic(seconds * 1_000_000_000)
    }

    fn notice(topic: Topic, client: u32) -> Notice {
        Notice {
            egress: EgressName { namespace: "net".into(), name: "nat".into() },
            egress_uid: "u".into(),
            topic,
            client: Some(client.to_string()),
            text: "flows moved".into(),
        }
    }

    fn backend(last: u8) -> IpAddr {
        [10, 0, 1, last].into()
    }

    #[test]
    fn a_hundred_clients_and_three_rolling_pods_are_three_events() {
        let mut ledger = Ledger::default();
        for client in 0..300 {
            ledger.take(notice(Topic::Moved(backend((client % 3) as u8)), client), at(10));
        }
        assert_eq!(ledger.due(at(11)), [], "gathering");
        assert_eq!(ledger.next_due(), Some(at(12)));
        let writes = ledger.due(at(12));
        assert_eq!(writes.len(), 3);
        for write in &writes {
            assert_eq!((write.count, write.again), (100, false));
            assert_eq!(write.note, "flows moved (100 times, 100 client pods)");
        }
        assert_eq!((ledger.due(at(12)), ledger.next_due()), (vec![], None));
    }

    #[test]
    fn later_ones_patch_the_same_event_once_a_minute() {
        let mut ledger = Ledger::default();
        ledger.take(notice(Topic::Moved(backend(1)), 1), at(0));
        let first = ledger.due(at(2)).remove(0);
        for second in 3..50 {
            ledger.take(notice(Topic::Moved(backend(1)), 1), at(second));
            assert_eq!(ledger.due(at(second)), []);
        }
        let second = ledger.due(at(62)).remove(0);
        assert_eq!((second.serial, second.again, second.count), (first.serial, true, 48));
        assert_eq!(second.note, "flows moved (48 times, 1 client pod)");
    }

    #[test]
    fn a_quiet_topic_starts_a_new_event() {
        let mut ledger = Ledger::default();
        ledger.take(notice(Topic::NoPreStop, 1), at(0));
        let first = ledger.due(at(2)).remove(0);
        ledger.take(notice(Topic::NoPreStop, 1), at(700));
        let second = ledger.due(at(702)).remove(0);
        assert_ne!(first.serial, second.serial);
        assert_eq!((second.again, second.count), (false, 1));
    }

    #[test]
    fn a_flood_of_topics_is_bounded() {
        let mut ledger = Ledger::default();
        for topic in 0..1000u32 {
            ledger.take(notice(Topic::Moved(IpAddr::from(topic.to_be_bytes())), 1), at(0));
        }
        assert_eq!(ledger.due(at(5)).len(), MOST_TOPICS);
        assert_eq!(ledger.dropped(), 1000 - MOST_TOPICS as u64);
    }
}
