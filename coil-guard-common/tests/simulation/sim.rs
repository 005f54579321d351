//! The simulation: who exists, what time it is, what is on its way.

use std::{
    collections::{BTreeMap, VecDeque},
    ops::AddAssign,
};

use coil_guard_common::{abi::mode, cilium::BACKEND_TERMINATING, decide::State, inner::FlowPacket};

use super::{
    cilium::{Cilium, SECOND, Version},
    cluster::{Agent, Phase, Pod, pod_address},
    flows::Flow,
    own::Own,
    prose::{Facts, Verdict},
};

pub(crate) const FOU_PORT: u16 = 5555;
/// No packet waits longer between the guard and Cilium: half of what the guard reckons with.
const LONGEST_WAY: u64 = 10_000_000;
const TRACE: usize = 60;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Settings {
    /// `None`: no guard.
    pub(crate) mode: Option<u8>,
    pub(crate) version: Version,
    pub(crate) affinity: bool,
    /// Each inner flow has its own outer source port.
    pub(crate) auto: bool,
    /// Packets wait between guard and Cilium, and two CPUs run into each other.
    pub(crate) interleave: bool,
    /// Backends whose drain port is the same.
    pub(crate) collisions: bool,
    /// Memories are lost and entries go bad.
    pub(crate) faults: bool,
    pub(crate) not_ready_after: u64,
    pub(crate) unmarked_drain: u64,
}

/// A packet on its way.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Packet {
    pub(crate) flow: u32,
    pub(crate) client: u8,
    pub(crate) tuple: u32,
    /// Outer source port as the client chose it.
    pub(crate) port: u16,
    /// … and after the guard.
    pub(crate) sent_port: u16,
    pub(crate) kind: FlowPacket,
    pub(crate) sent_at: u64,
    /// The backend, and its address, that has to get it.
    pub(crate) expect: Option<(u32, [u8; 16])>,
    /// … unless something allows another one.
    pub(crate) excused: bool,
    /// That backend was usable when the guard let the packet pass.
    pub(crate) was_usable: bool,
    /// Things changed while the guard looked at it.
    pub(crate) disturbed: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tally {
    pub(crate) packets: u64,
    pub(crate) good: u64,
    /// At a backend that forwards nothing, or dropped.
    pub(crate) lost: u64,
    /// At another backend than the flow's, which served on.
    pub(crate) cut: u64,
    /// … though it kept its flows.
    pub(crate) cut_unduly: u64,
    pub(crate) drained: u64,
    pub(crate) moved: u64,
    pub(crate) settling: u64,
    pub(crate) not_drained: u64,
    pub(crate) no_live: u64,
    pub(crate) contended: u64,
    pub(crate) repaired: u64,
    pub(crate) would_move: u64,
    pub(crate) rewritten: u64,
    pub(crate) new_port: u64,
    pub(crate) held: u64,
    pub(crate) not_moved: u64,
    /// Compared with the decision.
    pub(crate) shortcuts: u64,
}

impl AddAssign for Tally {
    fn add_assign(&mut self, other: Self) {
        self.packets += other.packets;
        self.good += other.good;
        self.lost += other.lost;
        self.cut += other.cut;
        self.cut_unduly += other.cut_unduly;
        self.drained += other.drained;
        self.moved += other.moved;
        self.settling += other.settling;
        self.not_drained += other.not_drained;
        self.no_live += other.no_live;
        self.contended += other.contended;
        self.repaired += other.repaired;
        self.would_move += other.would_move;
        self.rewritten += other.rewritten;
        self.new_port += other.new_port;
        self.held += other.held;
        self.not_moved += other.not_moved;
        self.shortcuts += other.shortcuts;
    }
}

pub(crate) struct Sim {
    pub(crate) now: u64,
    pub(crate) settings: Settings,
    /// Decides what happens. Its stream is the same with and without the guard.
    pub(crate) schedule: fastrand::Rng,
    /// Cilium's choices.
    pub(crate) luck: fastrand::Rng,
    /// What happens in the middle of a pass.
    pub(crate) mischief: fastrand::Rng,
    pub(crate) pods: Vec<Pod>,
    pub(crate) cilium: Cilium,
    pub(crate) cilium_up: bool,
    pub(crate) agent: Agent,
    pub(crate) own: Own,
    pub(crate) guarding: bool,
    pub(crate) flows: BTreeMap<u32, Flow>,
    pub(crate) next_flow: u32,
    pub(crate) queues: [VecDeque<Packet>; 2],
    pub(crate) states: [Option<Box<State>>; 2],
    pub(crate) tally: Tally,
    pub(crate) violation: Option<String>,
    trace: Option<VecDeque<String>>,
    pub(crate) next_uid: u32,
    pub(crate) next_id: u32,
}

impl Sim {
    pub(crate) fn new(seed: u64, settings: Settings, traced: bool) -> Self {
        let mut sim = Self {
            now: 1000 * SECOND,
            settings,
            schedule: fastrand::Rng::with_seed(seed),
            luck: fastrand::Rng::with_seed(seed ^ 0x5eed),
            mischief: fastrand::Rng::with_seed(seed ^ 0xbad),
            pods: Vec::new(),
            cilium: Cilium::new(settings.version, settings.affinity),
            cilium_up: true,
            agent: Agent::new(settings.mode == Some(mode::DRAIN), settings.not_ready_after),
            own: Own::default(),
            guarding: false,
            flows: BTreeMap::new(),
            next_flow: 0,
            queues: [VecDeque::new(), VecDeque::new()],
            states: [None, None],
            tally: Tally::default(),
            violation: None,
            trace: traced.then(VecDeque::new),
            next_uid: 0,
            next_id: 1,
        };
        for _ in 0..3 {
            sim.start_pod();
        }
        sim.catch_up();
        sim
    }

    pub(crate) fn fail(&mut self, what: String) {
        self.note(|| format!("VIOLATION {what}"));
        self.violation.get_or_insert(what);
    }

    pub(crate) fn note(&mut self, line: impl FnOnce() -> String) {
        if let Some(trace) = &mut self.trace {
            if trace.len() == TRACE {
                trace.pop_front();
            }
            trace.push_back(format!("{:>16.6} {}", self.now as f64 / 1e9, line()));
        }
    }

    pub(crate) fn tail(&self) -> String {
        self.trace.iter().flatten().fold(String::new(), |text, line| text + line + "\n")
    }

    /// The mode in force.
    pub(crate) fn mode(&self) -> Option<u8> {
        self.settings.mode.filter(|_| self.guarding)
    }

    pub(crate) fn facts(&self, id: u32) -> Option<Facts> {
        let backend = self.cilium.backends.get(&id)?;
        Some(Facts {
            now: self.now,
            state: backend.state,
            mark: self.agent.marks.get(&backend.address).copied(),
            fresh: self.now < self.agent.heartbeat_until,
            drain: self.settings.mode == Some(mode::DRAIN),
            first_seen: self.own.first_seen(
                &backend.address,
                id,
                backend.state == BACKEND_TERMINATING,
                self.now,
            ),
            unmarked_drain: self.settings.unmarked_drain,
        })
    }

    /// What the rules say of a backend.
    pub(crate) fn verdict(&self, id: u32) -> Verdict {
        self.facts(id).map_or(Verdict { usable: false, keeps: false }, |facts| facts.verdict())
    }

    /// Whether the backend is still the one at this address and keeps its flows.
    pub(crate) fn keeps(&self, (id, address): (u32, [u8; 16])) -> bool {
        self.cilium.backends.get(&id).is_some_and(|backend| backend.address == address)
            && self.verdict(id).keeps
    }

    /// A usable backend among those that Cilium could choose.
    pub(crate) fn any_live(&self) -> bool {
        self.cilium.selectable().any(|id| self.verdict(id).usable)
    }

    /// After any change: a packet whose backend stopped keeping its flows, be it for a moment, is excused.
    pub(crate) fn changed(&mut self) {
        for cpu in 0..self.queues.len() {
            for at in 0..self.queues[cpu].len() {
                let packet = self.queues[cpu][at];
                let Some(home) = packet.expect else { continue };
                if !self.keeps(home) || self.leaves_again(&packet, home.0) {
                    self.queues[cpu][at].excused = true;
                }
            }
        }
    }

    /// A limit that is accepted: a backend that was usable for a moment only may be taken for one that left before that, so
    /// that no time is left for packets on their way.
    fn leaves_again(&self, packet: &Packet, home: u32) -> bool {
        let Some(facts) = self.facts(home) else { return true };
        let began = facts.mark.filter(|_| facts.explained()).map_or(facts.first_seen, |mark| mark.since);
        packet.was_usable && !facts.verdict().usable && began < packet.sent_at
    }

    /// Something may happen on the other CPU while the guard looks at `packet`.
    pub(crate) fn meanwhile(&mut self, cpu: usize, packet: &mut Packet) {
        if !self.settings.interleave || packet.disturbed || self.mischief.u32(..32) != 0 {
            return;
        }
        let other = 1 - cpu;
        if self.states[other].is_none() {
            return;
        }
        packet.disturbed = true;
        self.note(|| format!("  in the middle of the pass of flow {}:", packet.flow));
        std::mem::swap(&mut self.schedule, &mut self.mischief);
        match self.schedule.u32(..6) {
            0 => self.deliver(other),
            1 | 2 => self.send_any(other),
            3 => self.change_pod(),
            4 => drop(self.cilium.write()),
            _ => self.agent_step(),
        }
        std::mem::swap(&mut self.schedule, &mut self.mischief);
        self.changed();
        if packet.expect.is_some_and(|expect| !self.keeps(expect)) {
            packet.excused = true;
        }
    }

    /// Lets time pass; nothing waits too long and a living agent renews what it said.
    pub(crate) fn advance(&mut self, mut by: u64) {
        while self.queues.iter().flatten().any(|packet| packet.sent_at + LONGEST_WAY < self.now + by) {
            for cpu in 0..2 {
                self.deliver(cpu);
            }
        }
        while by > 0 {
            let part = by.min(9 * SECOND);
            (by, self.now) = (by - part, self.now + part);
            if part >= SECOND / 2 {
                if self.agent.alive {
                    self.agent.write(&self.cilium, self.now);
                }
                if self.cilium_up && part >= SECOND {
                    while self.cilium.write() {}
                }
            }
        }
        self.changed();
    }

    /// Everybody learns everything.
    pub(crate) fn catch_up(&mut self) {
        while self.cilium.write() {}
        self.cilium.reconcile(&self.pods);
        while self.cilium.write() {}
        self.agent.observe(&self.pods, self.now);
        self.agent.write(&self.cilium, self.now);
        self.forget_gone();
        self.changed();
    }

    pub(crate) fn forget_gone(&mut self) {
        let (cilium, agent) = (&self.cilium, &self.agent);
        self.pods.retain(|pod| {
            pod.phase != Phase::Gone || agent.knows(pod.uid) || cilium.backends.contains_key(&pod.id)
        });
    }

    pub(crate) fn start_pod(&mut self) {
        let wanted: [u8; 8] = std::array::from_fn(|_| self.schedule.u8(1..=12));
        let taken = |address| self.pods.iter().any(|pod| pod.phase != Phase::Gone && pod.address == address);
        let Some(address) = wanted.into_iter().map(pod_address).find(|address| !taken(*address)) else {
            return;
        };
        let of_address =
            self.cilium.backends.iter().find(|(_, backend)| backend.address == address).map(|(id, _)| *id);
        let luck = self.schedule.u32(..10);
        let id = of_address.unwrap_or_else(|| self.allocate(luck));
        let (uid, grace) = (self.next_uid, self.schedule.u64(0..40) * SECOND);
        self.next_uid += 1;
        self.pods.push(Pod { uid, id, address, phase: Phase::Ready, forwards: true, grace });
        self.note(|| format!("pod {uid} starts, id {id}, address {}", address[15]));
    }

    /// A backend id: mostly a new one, at times one that was used before, or one with the drain port of another.
    fn allocate(&mut self, luck: u32) -> u32 {
        let free = |sim: &Self, id: u32| {
            !sim.cilium.backends.contains_key(&id) && sim.pods.iter().all(|pod| pod.id != id)
        };
        if luck == 0 && self.next_id > 4 && free(self, self.next_id - 4) {
            return self.next_id - 4;
        }
        if luck <= 3
            && self.settings.collisions
            && let Some(pod) = self.pods.first()
        {
            let twin = (pod.id + 4096) % 8192;
            if twin != 0 && free(self, twin) {
                return twin;
            }
        }
        self.next_id += 1;
        self.next_id
    }

    pub(crate) fn agent_step(&mut self) {
        if !self.agent.alive {
            return;
        }
        if self.schedule.bool() {
            self.note(|| "agent observes".into());
            self.agent.observe(&self.pods, self.now);
        } else {
            self.note(|| "agent writes".into());
            self.agent.write(&self.cilium, self.now);
        }
        self.forget_gone();
    }
}
