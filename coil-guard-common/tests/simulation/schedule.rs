//! What happens: random, and the same for the same seed.

use coil_guard_common::abi::mode;

use super::{
    cilium::SECOND,
    cluster::Phase,
    flows::Flow,
    sim::{FOU_PORT, Sim},
};

const CLIENTS: u8 = 2;
const FLOWS: usize = 24;
const TUPLES: u32 = 300;

impl Sim {
    /// One event, after a while.
    pub(crate) fn step(&mut self) {
        let by = match self.schedule.u32(..1000) {
            0..700 => self.schedule.u64(1_000..200_000),
            700..900 => self.schedule.u64(200_000..10_000_000),
            900..990 => self.schedule.u64(10_000_000..SECOND),
            990..999 => self.schedule.u64(1..20) * SECOND,
            _ => self.schedule.u64(60..200) * SECOND,
        };
        self.advance(by);
        let cpu = self.schedule.usize(..2);
        match self.schedule.u32(..1000) {
            0..600 => self.send_any(cpu),
            600..700 => {
                if self.settings.interleave {
                    self.deliver(cpu);
                }
            }
            700..780 => self.open_flow(),
            780..800 => self.lose_flow(),
            800..890 => self.cilium_step(),
            890..950 => self.agent_step(),
            950..975 => self.change_pod(),
            _ => self.fault(),
        }
        self.changed();
    }

    fn open_flow(&mut self) {
        let (client, tuple) = (self.schedule.u8(..CLIENTS), self.schedule.u32(..TUPLES));
        let (tcp, own_port) = (self.schedule.bool(), self.schedule.u16(32768..61020));
        if self.flows.len() >= FLOWS
            || self.flows.values().any(|flow| (flow.client, flow.tuple) == (client, tuple))
        {
            return;
        }
        let port = if self.settings.auto { own_port } else { FOU_PORT };
        let last_arrived = self.now;
        self.flows.insert(
            self.next_flow,
            Flow { client, tuple, tcp, port, home: None, in_flight: 0, last_arrived, torn: false },
        );
        let flow = self.next_flow;
        self.note(|| format!("flow {flow} opens, tcp {tcp}"));
        self.next_flow += 1;
        let cpu = self.schedule.usize(..2);
        self.send(flow, cpu);
    }

    /// A flow ends without a word.
    fn lose_flow(&mut self) {
        let nth = self.schedule.usize(..FLOWS);
        if let Some(flow) = self.flows.keys().nth(nth).copied()
            && self.flows.len() > FLOWS / 2
        {
            self.flows.remove(&flow);
        }
    }

    fn cilium_step(&mut self) {
        if !self.cilium_up {
            return;
        }
        if !self.cilium.write() {
            self.note(|| "cilium reconciles".into());
            self.cilium.reconcile(&self.pods);
        } else {
            self.note(|| "cilium writes".into());
        }
        self.forget_gone();
    }

    pub(crate) fn change_pod(&mut self) {
        let alive = self.pods.iter().filter(|pod| pod.phase != Phase::Gone).count();
        let what = self.schedule.u32(..100);
        let nth = self.schedule.usize(..alive.max(1));
        if alive < 2 || (alive < 5 && what < 20) {
            return self.start_pod();
        }
        let Some(pod) = self.pods.iter_mut().filter(|pod| pod.phase != Phase::Gone).nth(nth) else { return };
        let before = pod.phase;
        (pod.phase, pod.forwards) = match (pod.phase, what) {
            (Phase::Ready, 20..60) => (Phase::NotReady, pod.forwards && what < 55),
            (Phase::Ready, 60..95) => (Phase::Leaving { serving: true }, true),
            (Phase::NotReady, 20..85) => (Phase::Ready, true),
            (Phase::NotReady, 85..95) => (Phase::Leaving { serving: false }, what < 90),
            (Phase::Leaving { serving: true }, 20..40) => (Phase::Leaving { serving: false }, what < 30),
            (Phase::Leaving { .. }, 40..70) => (Phase::Gone, false),
            // Deleted by force, or its node lost.
            (_, 97..) => (Phase::Gone, false),
            (phase, _) => (phase, pod.forwards),
        };
        let (uid, phase) = (pod.uid, pod.phase);
        if phase != before {
            self.note(|| format!("pod {uid} {before:?} -> {phase:?}"));
        }
    }

    fn fault(&mut self) {
        let (what, nth) = (self.schedule.u32(..100), self.schedule.usize(..64));
        match what {
            0..30 => {
                let on_their_way: Vec<_> = self
                    .queues
                    .iter()
                    .flatten()
                    .flat_map(|packet| [(packet.client, packet.sent_port), (packet.client, packet.port)])
                    .collect();
                self.note(|| "garbage is collected".into());
                self.cilium.collect(self.now, &on_their_way);
            }
            30..36 => {
                self.agent.alive = !self.agent.alive;
                let alive = self.agent.alive;
                self.note(|| format!("agent alive {alive}"));
            }
            36..44 => self.cilium_up = !self.cilium_up,
            44..60 if self.settings.faults => {
                if let Some(key) = self.own.flows.keys().nth(nth).copied() {
                    self.note(|| format!("flow {key:?} is forgotten"));
                    self.own.evict(key);
                }
            }
            60..64 if self.settings.faults => drop(self.own.previous.pop_first()),
            64..76 if self.settings.faults => self.spoil(nth, what),
            76..78 if self.settings.faults => {
                if let Some(tuple) = self.own.pins.keys().nth(nth % 8).copied() {
                    self.note(|| format!("the port given to {tuple:?} is forgotten"));
                    self.own.pins.remove(&tuple);
                }
            }
            _ => {}
        }
        if what > 90 {
            (self.agent.alive, self.cilium_up) = (true, true);
        }
    }

    /// An entry goes bad: of another service, or of no backend.
    fn spoil(&mut self, nth: usize, what: u32) {
        // An entry with a packet on its way is not spoiled: nobody could have known.
        if self.queues.iter().any(|queue| !queue.is_empty()) {
            return;
        }
        if let Some(entry) = self.cilium.entries.values_mut().nth(nth) {
            match what % 3 {
                0 => entry.rev_nat_index = [9, 9],
                1 => entry.backend_id = 77_777,
                _ => entry.backend_id |= 1 << 40,
            }
            self.note(|| format!("entry {nth} is spoiled"));
        }
    }

    /// The end: whoever leaves has left, everybody knows, and all is as if there were no guard.
    pub(crate) fn settle_down(&mut self) {
        while self.queues.iter().any(|queue| !queue.is_empty()) {
            self.deliver(0);
            self.deliver(1);
        }
        (self.agent.alive, self.cilium_up) = (true, true);
        for pod in &mut self.pods {
            match pod.phase {
                Phase::Leaving { .. } => (pod.phase, pod.forwards) = (Phase::Gone, false),
                Phase::NotReady => (pod.phase, pod.forwards) = (Phase::Ready, true),
                Phase::Ready | Phase::Gone => {}
            }
        }
        self.start_pod();
        self.settings.interleave = false;
        self.catch_up();
        self.advance(30 * SECOND);
        self.catch_up();
        for round in 0..3 {
            for id in self.flows.keys().copied().collect::<Vec<_>>() {
                self.send(id, 0);
                self.check_settled(id, round);
            }
        }
    }

    fn check_settled(&mut self, id: u32, round: u32) {
        let Some(flow) = self.flows.get(&id).cloned() else { return };
        let lives = |uid: u32| self.pods.iter().any(|pod| pod.uid == uid && pod.phase == Phase::Ready);
        let Some(home) = flow.home else { return };
        if !lives(home.uid)
            && round > 0
            && matches!(self.mode(), Some(mode::RESET | mode::DRAIN | mode::REWRITE))
            && self.any_live()
        {
            self.fail(format!("flow {id} is still on a pod that is gone"));
        }
        let memory = self.own.flows.get(&(flow.client, flow.tuple)).map(|flow| flow.backend_id);
        if self.mode() == Some(mode::DRAIN) && round > 0 && memory != Some(home.id) {
            self.fail(format!("flow {id} is on {} and remembered on {memory:?}", home.id));
        }
    }
}
