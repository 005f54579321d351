//! The guard's view of the simulation: one packet's [`World`].

use coil_guard_common::{
    abi::{BackendMark, InnerFlow, PinnedPort, Previous, mode},
    decide::{Backend, DrainChange, Entry, Master, World, drain_port, is_reserved_port},
    inner::FlowPacket,
};

use super::{
    cilium::{CtEntry, REV_NAT},
    sim::{FOU_PORT, Packet, Sim},
};

const GENERATION: u32 = 3;

/// One pass of a packet through the guard. What it reads can change between two reads: on the other CPU things go on.
pub(crate) struct Pass<'a> {
    pub(crate) sim: &'a mut Sim,
    pub(crate) packet: Packet,
    pub(crate) cpu: usize,
    pub(crate) now: u64,
    pub(crate) fresh: u64,
    pub(crate) only_ready: bool,
    pub(crate) mode: u8,
}

impl Pass<'_> {
    fn tuple(&self, port: [u8; 2]) -> (u8, u16) {
        (self.packet.client, u16::from_be_bytes(port))
    }

    /// Something may happen before the next read or write.
    fn meanwhile(&mut self) {
        self.sim.meanwhile(self.cpu, &mut self.packet);
    }

    /// Only the packet's own entry may be written, or that under the drain port of the backend that it will name.
    fn check_write(&mut self, port: [u8; 2], id: u32) {
        if matches!(self.mode, mode::AUDIT | mode::REWRITE) {
            self.sim.fail(format!("mode {} wrote an entry for {id}", self.mode));
        }
        let own = port == self.packet.port.to_be_bytes();
        if own && is_reserved_port(port) {
            self.sim.fail(format!("put under the reserved port {port:?}"));
        }
        if !own && (self.mode != mode::DRAIN || port != drain_port(id)) {
            self.sim.fail(format!("wrote under port {port:?} for {id}"));
        }
        if !self.sim.cilium.backends.contains_key(&id) && !self.packet.disturbed {
            self.sim.fail(format!("wrote {id}, which Cilium does not have"));
        }
    }

    /// An entry that is followed and whose backend may get new flows is nobody's to take.
    fn check_taken(&mut self, port: [u8; 2], from: u64) {
        let from = from as u32;
        let own = port == self.packet.port.to_be_bytes();
        let verdict = self.sim.verdict(from);
        if own && verdict.usable && !self.packet.disturbed {
            self.sim.fail(format!("took the entry off {from}, which is usable"));
        }
        if !own
            && from % 4096 == u32::from(u16::from_be_bytes(port) - 61000)
            && verdict.keeps
            && !self.packet.disturbed
        {
            self.sim.fail(format!("took the drain entry off {from}, which keeps its flows"));
        }
    }
}

impl World for Pass<'_> {
    fn now(&self) -> u64 {
        self.now
    }
    fn client_port(&self) -> [u8; 2] {
        self.packet.port.to_be_bytes()
    }
    fn fou_port(&self) -> [u8; 2] {
        FOU_PORT.to_be_bytes()
    }
    fn spread(&self, with_port: bool) -> u32 {
        let client = u32::from(self.packet.client).wrapping_mul(0x9e37_79b9);
        if with_port { client ^ u32::from(self.packet.port) } else { client }
    }
    fn slot(&mut self, slot: u16) -> Option<u32> {
        self.meanwhile();
        self.sim.cilium.slots.get(usize::from(slot).checked_sub(1)?).copied()
    }
    fn backend(&mut self, id: u32) -> Option<Backend> {
        self.meanwhile();
        self.sim.cilium.backends.get(&id).copied()
    }
    fn affinity(&mut self, master: &Master) -> Option<u32> {
        self.meanwhile();
        assert_eq!(master.rev_nat_index, REV_NAT);
        self.sim.cilium.affinity.get(&self.packet.client).map(|(id, _)| *id)
    }
    fn affinity_match(&mut self, _: &Master, id: u32) -> bool {
        self.meanwhile();
        self.sim.cilium.matches.contains(&id)
    }
    fn entry(&mut self, port: [u8; 2]) -> Option<Entry> {
        self.meanwhile();
        let entry = self.sim.cilium.entries.get(&self.tuple(port))?;
        Some(Entry { backend_id: entry.backend_id, rev_nat_index: entry.rev_nat_index })
    }
    fn create(&mut self, port: [u8; 2], master: &Master, id: u32) -> bool {
        self.meanwhile();
        self.check_write(port, id);
        let tuple = self.tuple(port);
        if self.sim.cilium.entries.contains_key(&tuple) {
            return false;
        }
        let entry = CtEntry { backend_id: u64::from(id), rev_nat_index: master.rev_nat_index, lifetime: 0 };
        self.sim.cilium.entries.insert(tuple, entry);
        true
    }
    fn repair(&mut self, port: [u8; 2], seen: &Entry, master: &Master, id: u32) -> bool {
        self.meanwhile();
        self.check_write(port, id);
        let tuple = self.tuple(port);
        match self.sim.cilium.entries.get_mut(&tuple) {
            Some(entry) if entry.backend_id == seen.backend_id => {
                (entry.rev_nat_index, entry.backend_id) = (master.rev_nat_index, u64::from(id));
                true
            }
            _ => false,
        }
    }
    fn swap(&mut self, port: [u8; 2], from: u64, to: u32) -> bool {
        self.meanwhile();
        self.check_write(port, to);
        self.check_taken(port, from);
        let tuple = self.tuple(port);
        match self.sim.cilium.entries.get_mut(&tuple) {
            Some(entry) if entry.backend_id == from => {
                entry.backend_id = u64::from(to);
                true
            }
            _ => false,
        }
    }
    fn keep_replies(&mut self, port: [u8; 2], _master: &Master, id: u32) {
        self.meanwhile();
        if self.packet.port != FOU_PORT || port != drain_port(id) || self.mode != mode::DRAIN {
            self.sim.fail(format!("saw to replies of {id} for a packet from {}", self.packet.port));
        }
        let tuple = self.tuple(port);
        let cilium = &mut self.sim.cilium;
        let (Some(backend), Some(entry)) = (cilium.backends.get(&id), cilium.entries.get(&tuple)) else {
            return;
        };
        let kept = cilium.replies.entry((self.packet.client, FOU_PORT, backend.address)).or_default();
        *kept = (*kept).max(entry.lifetime);
    }
    fn replies_are_kept(&mut self, port: [u8; 2], id: u32) -> bool {
        self.meanwhile();
        let tuple = self.tuple(port);
        let cilium = &self.sim.cilium;
        let (Some(backend), Some(entry)) = (cilium.backends.get(&id), cilium.entries.get(&tuple)) else {
            return false;
        };
        let kept = cilium.replies.get(&(self.packet.client, FOU_PORT, backend.address));
        kept.is_some_and(|kept| *kept >= entry.lifetime)
    }

    fn mark(&mut self, address: &[u8; 16]) -> Option<BackendMark> {
        self.meanwhile();
        self.sim.agent.marks.get(address).copied()
    }
    fn only_ready_marks(&mut self) -> bool {
        self.only_ready
    }
    fn heartbeat_fresh(&mut self) -> u64 {
        self.fresh
    }
    fn leaving_since(&mut self, address: &[u8; 16], id: u32, terminating: bool) -> u64 {
        self.meanwhile();
        self.sim.own.leaving_since(address, id, terminating, self.now)
    }
    fn unmarked_drain(&self) -> u64 {
        self.sim.settings.unmarked_drain
    }

    fn previous(&mut self) -> Option<Previous> {
        self.meanwhile();
        self.sim.own.previous.get(&self.packet.client).copied()
    }
    fn set_previous(&mut self, from: u32, at: u64) {
        self.meanwhile();
        let backend_address = self.sim.cilium.backends.get(&from).map_or([0; 16], |backend| backend.address);
        let previous = Previous { backend_address, moved_at: at, backend_id: from, generation: GENERATION };
        self.sim.own.previous.insert(self.packet.client, previous);
    }
    fn report(&mut self, _kind: u8, _from: u32, _to: u32) {}

    fn flow_packet(&self) -> FlowPacket {
        self.packet.kind
    }
    fn flow(&mut self) -> Option<InnerFlow> {
        self.meanwhile();
        self.sim.own.flows.get(&(self.packet.client, self.packet.tuple)).copied()
    }
    fn remember(&mut self, id: u32, flags: u32) {
        self.meanwhile();
        let backend_address = self.sim.cilium.backends.get(&id).map_or([0; 16], |backend| backend.address);
        let flow = InnerFlow {
            backend_address,
            last_seen: self.now,
            backend_id: id,
            generation: GENERATION,
            flags,
            pad: 0,
        };
        self.sim.own.flows.insert((self.packet.client, self.packet.tuple), flow);
    }
    fn memory_since(&self) -> u64 {
        self.sim.own.memory_since
    }
    fn pin(&mut self) -> Option<PinnedPort> {
        self.meanwhile();
        self.sim.own.pin((self.packet.client, self.packet.port)).copied()
    }
    fn set_pin(&mut self, pin: &PinnedPort) -> bool {
        self.meanwhile();
        let pin = PinnedPort { generation: GENERATION, ..*pin };
        self.sim.own.pins.insert((self.packet.client, self.packet.port), pin);
        true
    }
    fn is_returning(&mut self) -> bool {
        self.meanwhile();
        self.sim.own.returns.is_returning(self.packet.client)
    }
    fn note_return(&mut self, port: [u8; 2]) -> bool {
        self.meanwhile();
        self.sim.own.returns.note(self.packet.client, port)
    }
    fn count_drain(&mut self, address: &[u8; 16], change: DrainChange) {
        self.sim.own.count(address, change);
    }
}
