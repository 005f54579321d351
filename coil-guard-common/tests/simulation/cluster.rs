//! The cluster's truth, and what the guard's agent makes of it.

use std::collections::BTreeMap;

use coil_guard_common::abi::{BackendMark, FOR_EVER, mark, v4_mapped};

use super::cilium::{Cilium, SECOND};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    Ready,
    NotReady,
    Leaving { serving: bool },
    Gone,
}

#[derive(Clone, Debug)]
pub(crate) struct Pod {
    pub(crate) uid: u32,
    pub(crate) id: u32,
    pub(crate) address: [u8; 16],
    pub(crate) phase: Phase,
    /// Forwards packets, whatever Kubernetes says.
    pub(crate) forwards: bool,
    /// Grace period, ns.
    pub(crate) grace: u64,
}

pub(crate) fn pod_address(number: u8) -> [u8; 16] {
    v4_mapped([10, 0, 1, number])
}

const VALID: u64 = 60 * SECOND;
const HEARTBEAT: u64 = 15 * SECOND;

#[derive(Clone, Debug)]
struct Seen {
    phase: Phase,
    since: u64,
    address: [u8; 16],
    grace: u64,
}

/// The guard's agent.
#[derive(Debug)]
pub(crate) struct Agent {
    pub(crate) alive: bool,
    pub(crate) drain: bool,
    /// `FOR_EVER`: never.
    pub(crate) not_ready_after: u64,
    pub(crate) marks: BTreeMap<[u8; 16], BackendMark>,
    pub(crate) heartbeat_until: u64,
    seen: BTreeMap<u32, Seen>,
}

impl Agent {
    pub(crate) fn new(drain: bool, not_ready_after: u64) -> Self {
        Self {
            alive: true,
            drain,
            not_ready_after,
            marks: BTreeMap::new(),
            heartbeat_until: 0,
            seen: BTreeMap::new(),
        }
    }

    /// Takes in what the API says.
    pub(crate) fn observe(&mut self, pods: &[Pod], now: u64) {
        for pod in pods {
            let seen = self.seen.entry(pod.uid).or_insert(Seen {
                phase: pod.phase,
                since: now,
                address: pod.address,
                grace: pod.grace,
            });
            if seen.phase != pod.phase {
                // That a leaving pod stops serving does not begin a new leaving.
                let leaving =
                    matches!(seen.phase, Phase::Leaving { .. }) && matches!(pod.phase, Phase::Leaving { .. });
                if !leaving {
                    seen.since = now;
                }
                seen.phase = pod.phase;
            }
        }
    }

    /// Writes marks and heartbeat. A pod that is gone from Cilium's maps is forgotten.
    pub(crate) fn write(&mut self, cilium: &Cilium, now: u64) {
        let known = |address: &[u8; 16]| cilium.backends.values().any(|backend| backend.address == *address);
        self.seen.retain(|_, seen| seen.phase != Phase::Gone || known(&seen.address));
        let mut marks: BTreeMap<[u8; 16], (u8, BackendMark)> = BTreeMap::new();
        for seen in self.seen.values() {
            let (rank, state, keep_until) = match seen.phase {
                Phase::Ready => (3, mark::READY, FOR_EVER),
                Phase::NotReady => (0, mark::NOT_READY, self.not_ready(seen)),
                Phase::Leaving { serving: true } if self.drain => (1, mark::LEAVING, seen.since + seen.grace),
                Phase::Leaving { .. } => (1, mark::LEAVING, 0),
                Phase::Gone => (2, mark::GONE, 0),
            };
            let new = BackendMark {
                keep_until,
                valid_until: now + VALID,
                since: seen.since,
                state,
                pad: [0; 3],
                seen_before: 0,
            };
            let present = marks.entry(seen.address).or_insert((rank, new));
            if (rank, new.since) > (present.0, present.1.since) {
                *present = (rank, new);
            }
        }
        for (address, (_, mark)) in &mut marks {
            // What counts is when the program can have known.
            mark.since = match self.marks.get(address) {
                Some(written) if written.state == mark.state => written.since,
                _ => now,
            };
        }
        self.marks = marks.into_iter().map(|(address, (_, mark))| (address, mark)).collect();
        self.heartbeat_until = now + HEARTBEAT;
    }

    fn not_ready(&self, seen: &Seen) -> u64 {
        match self.not_ready_after {
            FOR_EVER => FOR_EVER,
            0 => 0,
            after => seen.since + after,
        }
    }
}

impl Agent {
    /// Whether it still has something to say of a pod.
    pub(crate) fn knows(&self, uid: u32) -> bool {
        self.seen.contains_key(&uid)
    }
}
