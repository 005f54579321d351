//! What must hold of mode `rewrite`.

use coil_guard_common::{
    abi::{RETURN_PORT_FIRST, REWRITE_PORT_FIRST},
    counters::Reason,
    decide::{Outcome, PORT_PROBES, PORT_TRIES, is_reserved_port},
};

use super::{
    cilium::{Fate, REV_NAT},
    sim::{FOU_PORT, Packet, Sim},
};

impl Sim {
    /// The port under which a packet goes if nothing is done.
    pub(crate) fn given_port(&self, packet: &Packet) -> u16 {
        let pin = self.own.pin((packet.client, packet.port)).filter(|pin| pin.given_at != 0);
        pin.map_or(packet.port, |pin| u16::from_be_bytes(pin.port))
    }

    /// The backend that the entry under a port binds the client to.
    fn bound(&self, client: u8, port: u16) -> Option<u32> {
        let entry =
            self.cilium.entries.get(&(client, port)).filter(|entry| entry.rev_nat_index == REV_NAT)?;
        u32::try_from(entry.backend_id).ok().filter(|id| self.cilium.backends.contains_key(id))
    }

    /// `port` is the one that the packet would have gone by.
    pub(crate) fn check_rewrite(&mut self, packet: &Packet, port: u16, outcome: Outcome, before: &Fate) {
        let after = self.cilium.fate((packet.client, packet.sent_port), self.now);
        if *before != Fate::Dropped && after == Fate::Dropped {
            self.fail(format!("{before:?} became {after:?}"));
        }
        let bound = self.bound(packet.client, port);
        let must_leave = bound.filter(|id| !self.verdict(*id).keeps);
        if packet.sent_port != port && (must_leave.is_none() || outcome.reason != Reason::NewPort) {
            self.fail(format!("from port {port} to {} by {:?}", packet.sent_port, outcome.reason));
        }
        let Some(id) = must_leave else {
            let reason = match (bound, port == packet.port) {
                (_, false) => Reason::Rewritten,
                (Some(_), true) => Reason::Healthy,
                (None, true) => Reason::LeftToCilium,
            };
            if outcome.reason != reason && !is_reserved_port(packet.port.to_be_bytes()) {
                self.fail(format!("{:?} where nothing is to be done", outcome.reason));
            }
            return;
        };
        let affinity = self.cilium.affinity.get(&packet.client).map(|(id, _)| *id);
        let affinity =
            affinity.filter(|id| self.cilium.with_affinity && self.cilium.backends.contains_key(id));
        let held = affinity.filter(|id| self.cilium.matches.contains(id) && !self.verdict(*id).keeps);
        let live = self.any_live() || affinity.is_some_and(|id| self.verdict(id).usable);
        let complete = self.cilium.selectable().all(|id| self.cilium.backends.contains_key(&id));
        let pin = self.own.pin((packet.client, packet.port)).copied();
        let tries = pin.map_or(0, |pin| pin.tries);
        let expected = if !live || self.cilium.count == 0 {
            outcome.reason == Reason::NoLive
        } else if held.is_some() {
            outcome.reason == Reason::HeldByAffinity
        } else if !complete {
            outcome.reason == Reason::NotMoved
        } else if outcome.reason == Reason::NotMoved {
            tries >= PORT_TRIES || self.taken(packet.client) >= usize::from(PORT_PROBES)
        } else {
            outcome.reason == Reason::NewPort && (1..=PORT_TRIES).contains(&tries)
        };
        if !expected {
            let verdict = self.verdict(id);
            self.fail(format!(
                "{:?} on {id}, which is {verdict:?}: live {live}, held by {held:?}, complete {complete}, {pin:?}",
                outcome.reason
            ));
        }
        if outcome.reason == Reason::NewPort {
            // Which half the port is of tells the other side whether replies can be had there.
            let symmetric = packet.port == FOU_PORT && self.own.returns.is_returning(packet.client);
            let noted = self.own.returns.is_noted(packet.client, packet.sent_port);
            if symmetric != (packet.sent_port >= RETURN_PORT_FIRST) || symmetric && !noted {
                self.fail(format!("{} was given, noted {noted}, symmetric {symmetric}", packet.sent_port));
            }
            let good = match &after {
                Fate::Dropped => false,
                Fate::Pinned(to) => self.verdict(*to).keeps,
                Fate::OneOf(_) => true,
            };
            if !good {
                self.fail(format!("the new port {} leads to {after:?}", packet.sent_port));
            }
        }
    }

    /// Ports of the range that bind the client to a backend that takes no new flows.
    fn taken(&self, client: u8) -> usize {
        (REWRITE_PORT_FIRST..=u16::MAX)
            .filter(|port| self.bound(client, *port).is_some_and(|id| !self.verdict(id).usable))
            .count()
    }
}
