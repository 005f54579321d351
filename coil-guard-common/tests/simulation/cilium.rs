//! Cilium: its maps, its per-packet load balancing of UDP, its agent's writes, its garbage collection.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use coil_guard_common::{
    cilium::{BACKEND_ACTIVE, BACKEND_MAINTENANCE, BACKEND_TERMINATING},
    decide::{Backend, Master},
};

use super::cluster::{Phase, Pod};

pub(crate) const SECOND: u64 = 1_000_000_000;
pub(crate) const REV_NAT: [u8; 2] = [0, 7];
const LIFETIME: u64 = 60;
const AFFINITY_TIMEOUT: u64 = 10_800;

/// What differs between Cilium versions.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Version {
    #[expect(dead_code, reason = "for the message of a failure")]
    name: &'static str,
    /// A terminating backend keeps its affinity match.
    leaving_keeps_match: bool,
    /// A backend that is not ready stays, as MAINTENANCE, and keeps its match.
    keeps_not_ready: bool,
    /// A terminating backend that does not serve any more stays.
    keeps_not_serving: bool,
    /// No selectable slot: everything is dropped, entry or not.
    pub(crate) count_first: bool,
    /// Each backend's state, slot and match are written together and the count last; else all states go first.
    by_backend: bool,
}

pub(crate) const VERSIONS: [Version; 4] = [
    Version {
        name: "1.14",
        leaving_keeps_match: true,
        keeps_not_ready: false,
        keeps_not_serving: false,
        count_first: true,
        by_backend: false,
    },
    Version {
        name: "1.16",
        leaving_keeps_match: true,
        keeps_not_ready: false,
        keeps_not_serving: false,
        count_first: false,
        by_backend: false,
    },
    Version {
        name: "1.18",
        leaving_keeps_match: false,
        keeps_not_ready: false,
        keeps_not_serving: false,
        count_first: false,
        by_backend: true,
    },
    Version {
        name: "1.19",
        leaving_keeps_match: false,
        keeps_not_ready: true,
        keeps_not_serving: true,
        count_first: false,
        by_backend: true,
    },
];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CtEntry {
    pub(crate) backend_id: u64,
    pub(crate) rev_nat_index: [u8; 2],
    /// Seconds.
    pub(crate) lifetime: u64,
}

/// Where a packet would go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    Dropped,
    Pinned(u32),
    /// At random; ids that lead nowhere are among them.
    OneOf(Vec<u32>),
}

#[derive(Clone, Debug)]
enum Write {
    Backend(u32, Backend),
    Slot(usize, u32),
    Count(u16),
    Match(u32, bool),
    Remove(u32),
}

pub(crate) type Tuple = (u8, u16);

#[derive(Debug)]
pub(crate) struct Cilium {
    pub(crate) version: Version,
    pub(crate) with_affinity: bool,
    pub(crate) backends: BTreeMap<u32, Backend>,
    /// Selectable ones first.
    pub(crate) slots: Vec<u32>,
    pub(crate) count: u16,
    pub(crate) matches: BTreeSet<u32>,
    /// Client → backend id, last used in seconds.
    pub(crate) affinity: BTreeMap<u8, (u32, u64)>,
    /// Client and source port → service entry.
    pub(crate) entries: BTreeMap<Tuple, CtEntry>,
    /// Client, source port and backend address → lifetime of the egress entry in seconds.
    pub(crate) replies: BTreeMap<(u8, u16, [u8; 16]), u64>,
    work: VecDeque<Write>,
}

impl Cilium {
    pub(crate) fn new(version: Version, with_affinity: bool) -> Self {
        Self {
            version,
            with_affinity,
            backends: BTreeMap::new(),
            slots: Vec::new(),
            count: 0,
            matches: BTreeSet::new(),
            affinity: BTreeMap::new(),
            entries: BTreeMap::new(),
            replies: BTreeMap::new(),
            work: VecDeque::new(),
        }
    }

    pub(crate) fn master(&self) -> Master {
        Master { rev_nat_index: REV_NAT, count: self.count, affinity: self.with_affinity }
    }

    pub(crate) fn selectable(&self) -> impl Iterator<Item = u32> + '_ {
        self.slots.iter().copied().take(usize::from(self.count))
    }

    /// The backend that affinity would choose for a tuple without an entry.
    fn favourite(&self, client: u8, now: u64) -> Option<u32> {
        let (id, used) = *self.affinity.get(&client).filter(|_| self.with_affinity)?;
        let young = now / SECOND < used + AFFINITY_TIMEOUT;
        (young && self.matches.contains(&id) && self.backends.contains_key(&id)).then_some(id)
    }

    /// Where a packet under this tuple would go now.
    pub(crate) fn fate(&self, (client, port): Tuple, now: u64) -> Fate {
        if self.version.count_first && self.count == 0 {
            return Fate::Dropped;
        }
        let entry = self.entries.get(&(client, port));
        let known = entry.is_some_and(|entry| entry.rev_nat_index == REV_NAT);
        if known
            && let Some(id) = entry.and_then(|entry| u32::try_from(entry.backend_id).ok())
            && self.backends.contains_key(&id)
        {
            return Fate::Pinned(id);
        }
        if self.count == 0 {
            return Fate::Dropped;
        }
        // A missing backend is replaced at random; any other tuple asks affinity first.
        if !known && let Some(id) = self.favourite(client, now) {
            return Fate::Pinned(id);
        }
        Fate::OneOf(self.selectable().collect())
    }

    /// Sends a packet on; the backend that gets it, and its address.
    pub(crate) fn pass(&mut self, tuple: Tuple, now: u64, luck: u32) -> Option<(u32, [u8; 16])> {
        let id = match self.fate(tuple, now) {
            Fate::Dropped => return None,
            Fate::Pinned(id) => id,
            Fate::OneOf(ids) => *ids.get(luck as usize % ids.len().max(1))?,
        };
        let address = self.backends.get(&id)?.address;
        let lifetime = now / SECOND + LIFETIME;
        self.entries.insert(tuple, CtEntry { backend_id: u64::from(id), rev_nat_index: REV_NAT, lifetime });
        if self.with_affinity {
            self.affinity.insert(tuple.0, (id, now / SECOND));
        }
        self.replies.insert((tuple.0, tuple.1, address), lifetime);
        Some((id, address))
    }

    /// Deletes what is past its lifetime, but not under a packet that is on its way.
    pub(crate) fn collect(&mut self, now: u64, on_their_way: &[Tuple]) {
        let second = now / SECOND;
        self.entries.retain(|tuple, entry| entry.lifetime >= second || on_their_way.contains(tuple));
        self.replies.retain(|(client, port, _), lifetime| {
            *lifetime >= second || on_their_way.contains(&(*client, *port))
        });
    }

    /// Begins to bring the maps up to the cluster; the writes are done by [`Self::write`].
    pub(crate) fn reconcile(&mut self, pods: &[Pod]) {
        if !self.work.is_empty() {
            return;
        }
        let mut wanted: BTreeMap<u32, (Backend, bool)> = BTreeMap::new();
        for pod in pods {
            let state = match pod.phase {
                Phase::Ready => BACKEND_ACTIVE,
                Phase::Leaving { serving: true } => BACKEND_TERMINATING,
                Phase::Leaving { serving: false } if self.version.keeps_not_serving => BACKEND_TERMINATING,
                Phase::NotReady if self.version.keeps_not_ready => BACKEND_MAINTENANCE,
                _ => continue,
            };
            let serving = !matches!(pod.phase, Phase::Leaving { serving: false });
            wanted.insert(pod.id, (Backend { address: pod.address, state }, serving));
        }
        let with = |state: u8| {
            wanted
                .iter()
                .filter(move |(_, (backend, serving))| backend.state == state && *serving)
                .map(|(id, _)| *id)
        };
        let mut slots: Vec<u32> = with(BACKEND_ACTIVE).collect();
        if slots.is_empty() {
            slots = with(BACKEND_TERMINATING).collect();
        }
        let count = slots.len() as u16;
        slots.extend(
            wanted.iter().filter(|(id, _)| !slots.contains(id)).map(|(id, _)| *id).collect::<Vec<_>>(),
        );
        self.plan(&wanted, &slots, count);
    }

    fn plan(&mut self, wanted: &BTreeMap<u32, (Backend, bool)>, slots: &[u32], count: u16) {
        let version = self.version;
        let matches = |id: u32, state: u8| {
            if version.leaving_keeps_match || state == BACKEND_ACTIVE {
                Some(Write::Match(id, true))
            } else if state == BACKEND_MAINTENANCE {
                None
            } else {
                Some(Write::Match(id, false))
            }
        };
        let mut work = VecDeque::new();
        if version.by_backend {
            for (at, id) in slots.iter().enumerate() {
                let (backend, _) = wanted[id];
                work.push_back(Write::Backend(*id, backend));
                work.push_back(Write::Slot(at, *id));
                work.extend(matches(*id, backend.state));
            }
            work.push_back(Write::Count(count));
        } else {
            work.extend(wanted.iter().map(|(id, (backend, _))| Write::Backend(*id, *backend)));
            work.extend(slots.iter().enumerate().map(|(at, id)| Write::Slot(at, *id)));
            work.push_back(Write::Count(count));
            work.extend(wanted.iter().filter_map(|(id, (backend, _))| matches(*id, backend.state)));
        }
        work.extend(self.backends.keys().filter(|id| !wanted.contains_key(id)).map(|id| Write::Remove(*id)));
        self.work = work;
    }

    /// One write of the agent; false when it has nothing to do.
    pub(crate) fn write(&mut self) -> bool {
        let Some(write) = self.work.pop_front() else { return false };
        match write {
            Write::Backend(id, backend) => drop(self.backends.insert(id, backend)),
            Write::Slot(at, id) => {
                if at < self.slots.len() {
                    self.slots[at] = id;
                } else {
                    self.slots.push(id);
                }
            }
            Write::Count(count) => self.count = count,
            Write::Match(id, true) => drop(self.matches.insert(id)),
            Write::Match(id, false) => drop(self.matches.remove(&id)),
            Write::Remove(id) => {
                self.backends.remove(&id);
                self.matches.remove(&id);
            }
        }
        true
    }
}
