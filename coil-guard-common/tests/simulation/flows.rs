//! Inner flows with the truth about each, the way of a packet, and what must hold of it.

use coil_guard_common::{
    abi::{mark, mode},
    counters::Reason,
    decide::{IDLE, Outcome, PREVIOUS_MEMORY, SETTLE, Shortcut, State, decide, drain_port, shortcut},
    inner::FlowPacket,
};

use super::{
    cilium::{Fate, REV_NAT, SECOND},
    cluster::Phase,
    guard::Pass,
    sim::{FOU_PORT, Packet, Sim},
};

/// The backend that a flow lives on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Home {
    pub(crate) uid: u32,
    pub(crate) id: u32,
    pub(crate) address: [u8; 16],
}

#[derive(Clone, Debug)]
pub(crate) struct Flow {
    pub(crate) client: u8,
    pub(crate) tuple: u32,
    pub(crate) tcp: bool,
    pub(crate) port: u16,
    /// Where its first packet arrived.
    pub(crate) home: Option<Home>,
    pub(crate) in_flight: u32,
    pub(crate) last_arrived: u64,
    /// Two packets of it were on their way when its backend stopped keeping flows: the guard's memory and the truth are
    /// not the same.
    pub(crate) torn: bool,
}

fn outcome_of(shortcut: Shortcut) -> Outcome {
    let (reason, source_port) = match shortcut {
        Shortcut::Healthy => (Reason::Healthy, None),
        Shortcut::Drained(id) => (Reason::Drained, Some(drain_port(id))),
    };
    Outcome { reason, source_port, cut: false, would_drain: false, moved: false }
}

impl Pass<'_> {
    /// What the decision says, which has to be `expected` and to write nothing but how long replies live.
    fn compare(&mut self, expected: Outcome, state: &mut State) -> Outcome {
        let (entries, flows) = (self.sim.cilium.entries.clone(), self.sim.own.flows.clone());
        decide(self, state, self.mode);
        if state.outcome != expected {
            self.sim.fail(format!("the shortcut says {expected:?}, the decision {:?}", state.outcome));
        }
        if self.sim.cilium.entries != entries || self.sim.own.flows != flows {
            self.sim.fail(format!("a shortcut to {expected:?}, and the decision writes"));
        }
        self.sim.tally.shortcuts += 1;
        state.outcome
    }
}

impl Sim {
    pub(crate) fn send_any(&mut self, cpu: usize) {
        let nth = self.schedule.usize(..self.flows.len().max(1));
        if let Some(flow) = self.flows.keys().nth(nth).copied() {
            self.send(flow, cpu);
        }
    }

    /// Sends a packet of the flow through the guard and on its way.
    pub(crate) fn send(&mut self, id: u32, cpu: usize) {
        let closing = self.schedule.u32(..40) == 0;
        let Some(flow) = self.flows.get_mut(&id) else { return };
        let opening = flow.tcp && flow.home.is_none();
        if opening && flow.in_flight > 0 {
            return;
        }
        let idle = self.now.saturating_sub(flow.last_arrived);
        let blurred = !flow.tcp && idle > IDLE - 2 * SECOND;
        if !flow.tcp && idle > IDLE + 2 * SECOND {
            flow.home = None;
        }
        flow.in_flight += 1;
        let kind = match (flow.tcp, opening, closing) {
            (false, ..) => FlowPacket::Stateless,
            (true, true, _) => FlowPacket::Opening,
            (true, false, true) => FlowPacket::Closing,
            (true, false, false) => FlowPacket::Established,
        };
        let packet = Packet {
            flow: id,
            client: flow.client,
            tuple: flow.tuple,
            port: flow.port,
            sent_port: flow.port,
            kind,
            sent_at: self.now,
            expect: flow.home.map(|home| (home.id, home.address)),
            excused: blurred || flow.torn,
            was_usable: false,
            disturbed: false,
        };
        let packet = self.guard(packet, cpu);
        self.queues[cpu].push_back(packet);
        if !self.settings.interleave {
            self.deliver(cpu);
        }
    }

    fn guard(&mut self, mut packet: Packet, cpu: usize) -> Packet {
        let Some(mode) = self.mode() else {
            packet.excused = true;
            return packet;
        };
        let port = if mode == mode::REWRITE { self.given_port(&packet) } else { packet.port };
        let before = self.cilium.fate((packet.client, port), self.now);
        packet.excused |= self.excuse(&packet, port, mode, &before);
        let memory = self.own.flows.get(&(packet.client, packet.tuple));
        let known = memory.is_some_and(|flow| self.now - flow.last_seen <= IDLE);
        let mut state = self.states[cpu].take().unwrap_or_default();
        state.master = self.cilium.master();
        let fresh = u64::from(self.now < self.agent.heartbeat_until);
        let now = self.now;
        let only_ready = self.agent.marks.values().all(|mark| mark.state == mark::READY);
        let mut pass = Pass { sim: self, packet, cpu, now, fresh, only_ready, mode };
        let short = shortcut(&mut pass, REV_NAT, mode).map(outcome_of);
        let outcome = match short {
            // Where nothing can change in between, every other one is compared with the decision, the rest has to do.
            Some(outcome) if pass.sim.settings.interleave || pass.sim.tally.packets.is_multiple_of(2) => {
                outcome
            }
            Some(outcome) => pass.compare(outcome, &mut state),
            None => {
                decide(&mut pass, &mut state, mode);
                state.outcome
            }
        };
        packet = pass.packet;
        self.states[cpu] = Some(state);
        packet.sent_port = outcome.source_port.map_or(packet.port, u16::from_be_bytes);
        self.note(|| {
            format!(
                "cpu {cpu} flow {} client {} {:?} from {} known {known}: was {before:?}, expects {:?} excused {} -> {:?} from {}",
                packet.flow,
                packet.client,
                packet.kind,
                packet.port,
                packet.expect.map(|(id, _)| id),
                packet.excused,
                outcome.reason,
                packet.sent_port
            )
        });
        self.count(outcome);
        self.check_outcome(&packet, mode, outcome);
        if !packet.disturbed && mode == mode::REWRITE {
            self.check_rewrite(&packet, port, outcome, &before);
        } else if !packet.disturbed {
            self.check_fate(&packet, mode, outcome, &before, known);
        }
        // Where another backend has the drain port, a packet under the FoU port can be overtaken: a limit that is accepted.
        let exposed = self.settings.collisions
            && packet.sent_port == packet.port
            && packet.expect.is_some_and(|(home, _)| !self.verdict(home).usable);
        if exposed || matches!(outcome.reason, Reason::Contended | Reason::NotDrained | Reason::ReservedPort)
        {
            packet.excused = true;
        }
        if mode == mode::DRAIN && packet.expect.is_none() {
            let memory = self.own.flows.get(&(packet.client, packet.tuple));
            packet.expect = memory.map(|flow| (flow.backend_id, flow.backend_address));
            packet.excused |= packet.expect.is_some_and(|expect| !self.keeps(expect));
        }
        packet.was_usable = packet.expect.is_some_and(|(home, _)| self.verdict(home).usable);
        packet
    }

    /// Whether the rules let this packet of a flow with a home go elsewhere.
    fn excuse(&self, packet: &Packet, port: u16, mode: u8, before: &Fate) -> bool {
        let Some(home) = packet.expect else { return false };
        if !self.keeps(home) {
            return true;
        }
        // A tuple without an entry is a new one, and affinity alone is no reason to send it to a backend that is not usable.
        let entry = self.cilium.entries.get(&(packet.client, port));
        let has_entry = entry
            .is_some_and(|entry| (entry.backend_id, entry.rev_nat_index) == (u64::from(home.0), REV_NAT));
        // Reset leaves such a tuple to Cilium, whose affinity follows whatever packet comes first.
        let first_in_line = mode == mode::DRAIN || !self.settings.interleave;
        let by_affinity = self.verdict(home.0).usable && first_in_line;
        let bound = *before == Fate::Pinned(home.0) && (has_entry || by_affinity);
        if mode != mode::DRAIN {
            return !bound;
        }
        let memory = self.own.flows.get(&(packet.client, packet.tuple));
        // A packet that lost its race passes without being noted, so that what it belongs to can have fallen silent for the guard.
        let silent = self.settings.interleave
            && packet.kind == FlowPacket::Stateless
            && memory.is_some_and(|flow| self.now - flow.last_seen > IDLE);
        if !silent && memory.is_some_and(|flow| (flow.backend_id, flow.backend_address) == home) {
            return false;
        }
        // Forgotten, or older than the guard. What Cilium alone would do is the least, unless the client was moved off
        // another backend that still keeps flows: the flow could as well be one of that.
        let misled = self.own.previous.get(&packet.client).is_some_and(|previous| {
            let previous = (previous.backend_id, previous.backend_address);
            previous != home && self.keeps(previous)
        });
        let new = packet.kind == FlowPacket::Stateless && self.now - self.own.memory_since >= IDLE;
        let from_there = self.own.previous.get(&packet.client).is_some_and(|previous| {
            let recent = self.now - previous.moved_at < PREVIOUS_MEMORY || !self.verdict(home.0).usable;
            (previous.backend_id, previous.backend_address) == home && recent
        });
        if from_there && !new && memory.is_none() {
            return false;
        }
        memory.is_some() || !bound || misled || (new && !self.verdict(home.0).usable)
    }

    /// What must hold of where the packet would go if Cilium saw it now.
    fn check_fate(&mut self, packet: &Packet, mode: u8, outcome: Outcome, before: &Fate, known: bool) {
        let after = self.cilium.fate((packet.client, packet.sent_port), self.now);
        if mode == mode::AUDIT {
            if after != *before {
                self.fail(format!("audit turned {before:?} into {after:?}"));
            }
            return;
        }
        if *before != Fate::Dropped && after == Fate::Dropped {
            self.fail(format!("{before:?} became {after:?}"));
        }
        if let Some((home, _)) = packet.expect
            && !packet.excused
            && !matches!(outcome.reason, Reason::NotDrained | Reason::ReservedPort)
            && after != Fate::Pinned(home)
            && !(self.cilium.version.count_first && self.cilium.count == 0)
        {
            let facts = self.facts(home);
            self.fail(format!(
                "flow {} of {home}, which keeps its flows, would go to {after:?}; {facts:?}",
                packet.flow
            ));
        }
        if outcome.source_port.is_some() {
            self.check_replies(packet);
        }
        if outcome.reason == Reason::NotDrained && !packet.excused {
            self.check_collision(packet);
        }
        if outcome.reason == Reason::ReservedPort || !self.any_live() {
            return;
        }
        let ids = match &after {
            Fate::Dropped => return,
            Fate::Pinned(id) => std::slice::from_ref(id),
            Fate::OneOf(ids) => ids,
        };
        let pinned = matches!(after, Fate::Pinned(_));
        for id in ids.iter().copied() {
            let verdict = self.verdict(id);
            if !verdict.keeps || !(pinned || verdict.usable) {
                self.fail(format!("{id} may get the packet though it is {verdict:?} and another is live"));
            }
            let complete = self.now - self.own.memory_since >= IDLE;
            let new = packet.kind == FlowPacket::Opening || (packet.expect.is_none() && !known && complete);
            if mode == mode::DRAIN && new && !verdict.usable {
                let began = self
                    .facts(id)
                    .map_or(0, |facts| facts.first_seen.max(facts.mark.map_or(0, |mark| mark.since)));
                if outcome.reason != Reason::Settling || self.now - began >= SETTLE {
                    self.fail(format!("new flow {} on {id}, which is not usable", packet.flow));
                }
            }
        }
    }

    /// Replies to the FoU port live as long as the drain entry.
    fn check_replies(&mut self, packet: &Packet) {
        let entry = self.cilium.entries.get(&(packet.client, packet.sent_port)).copied();
        let Some(entry) = entry else {
            return self.fail(format!("drained under port {}, which has no entry", packet.sent_port));
        };
        let Some(address) =
            self.cilium.backends.get(&(entry.backend_id as u32)).map(|backend| backend.address)
        else {
            return self.fail(format!("drained to {}, which Cilium does not have", entry.backend_id));
        };
        let kept = self.cilium.replies.get(&(packet.client, FOU_PORT, address)).copied();
        if packet.port == FOU_PORT && kept.is_none_or(|kept| kept < entry.lifetime) {
            self.fail(format!("replies live until {kept:?}, the drain entry until {}", entry.lifetime));
        }
    }

    /// Not drained only where the drain port is another's that needs it.
    fn check_collision(&mut self, packet: &Packet) {
        let memory = packet.expect.map(|(id, _)| id);
        let true_one = self.cilium.entries.iter().any(|((client, port), entry)| {
            let id = entry.backend_id as u32;
            *client == packet.client
                && *port == u16::from_be_bytes(drain_port(id))
                && memory.is_none_or(|home| home != id && drain_port(home) == drain_port(id))
                && self.verdict(id).keeps
        });
        if !true_one {
            self.fail("not drained though the drain port is free".into());
        }
    }

    /// The oldest packet of a CPU reaches Cilium, and maybe a backend.
    pub(crate) fn deliver(&mut self, cpu: usize) {
        let Some(packet) = self.queues[cpu].pop_front() else { return };
        let luck = self.luck.u32(..);
        let got = self.cilium.pass((packet.client, packet.sent_port), self.now, luck);
        let pod = got.and_then(|(_, address)| {
            self.pods.iter().find(|pod| pod.address == address && pod.phase != Phase::Gone).cloned()
        });
        self.tally.packets += 1;
        self.note(|| format!("cpu {cpu} flow {} arrives at {:?}", packet.flow, got.map(|(id, _)| id)));
        let Some(flow) = self.flows.get(&packet.flow).cloned() else { return };
        let forwards = pod.as_ref().is_some_and(|pod| pod.forwards);
        let arrived =
            pod.filter(|_| forwards).zip(got).map(|(pod, (id, address))| Home { uid: pod.uid, id, address });
        let lives = flow.home.is_some_and(|home| {
            self.pods.iter().any(|pod| pod.uid == home.uid && pod.phase != Phase::Gone && pod.forwards)
        });
        let astray = match flow.home {
            Some(home) => lives && arrived != Some(home),
            None => false,
        };
        let dropped_by_count = self.cilium.count == 0 && got.is_none();
        let unexpected = packet.expect.is_some_and(|expect| got != Some(expect));
        if unexpected && !packet.excused && !dropped_by_count && (flow.home.is_none() || astray) {
            self.fail(format!("flow {} expected at {:?} arrived at {got:?}", packet.flow, packet.expect));
        }
        if !forwards {
            self.tally.lost += 1;
        } else if astray {
            self.tally.cut += 1;
            self.tally.cut_unduly +=
                u64::from(flow.home.is_some_and(|home| self.keeps((home.id, home.address))));
        } else {
            self.tally.good += 1;
        }
        let memory = self
            .own
            .flows
            .get(&(packet.client, packet.tuple))
            .map(|flow| (flow.backend_id, flow.backend_address));
        let drain = self.mode() == Some(mode::DRAIN);
        let Some(flow) = self.flows.get_mut(&packet.flow) else { return };
        flow.in_flight -= 1;
        if got.is_some() {
            flow.last_arrived = self.now;
        }
        if arrived.is_some() {
            flow.home = arrived;
        }
        flow.torn = drain && memory.is_some() && flow.home.map(|home| (home.id, home.address)) != memory;
        if packet.kind == FlowPacket::Closing && flow.in_flight == 0 {
            self.flows.remove(&packet.flow);
        }
    }
}
