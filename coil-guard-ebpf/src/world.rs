//! What one packet's decision sees and does, in the kernel.

use aya_ebpf::bindings::BPF_NOEXIST;
use coil_guard_common::{
    abi::{BackendMark, InnerFlow, PinnedPort, Previous},
    decide::{Backend, DrainChange, Entry, Judgement, Master, State, Unmarked, World},
    inner::FlowPacket,
    packet::Address as _,
};

use crate::{
    atomic, config,
    family::{AnyBackend as _, Family},
    maps::{self, copy},
    memory,
    packet_client::ClientWorld,
    recent,
};

const NOEXIST: u64 = BPF_NOEXIST as u64;
/// Two sightings of a leaving backend further apart are two leavings.
const LEAVING_PAUSE: u64 = 60_000_000_000;

impl<F: Family> World for ClientWorld<F> {
    #[inline(always)]
    fn now(&self) -> u64 {
        self.scratch.now
    }

    #[inline(always)]
    fn client_port(&self) -> [u8; 2] {
        self.outer().source_port
    }

    #[inline(always)]
    fn fou_port(&self) -> [u8; 2] {
        self.scratch.fou_port
    }

    #[inline(always)]
    fn spread(&self, with_port: bool) -> u32 {
        let spread = self.outer().source.spread();
        if with_port { spread ^ u32::from(u16::from_be_bytes(self.outer().source_port)) } else { spread }
    }

    #[inline(always)]
    fn slot(&mut self, slot: u16) -> Option<u32> {
        self.service(slot).map(|service| service.word)
    }

    #[inline(always)]
    fn backend(&mut self, id: u32) -> Option<Backend> {
        // SAFETY: as for `copy!`; each field is read once.
        let backend = unsafe { F::backends().get(&id)? };
        Some(Backend { address: backend.address().mapped(), state: backend.state() })
    }

    #[inline(always)]
    fn affinity(&mut self, master: &Master) -> Option<u32> {
        let key = F::affinity_key(self.scratch, master.rev_nat_index);
        copy!(F::affinities(), key).map(|affinity| affinity.backend_id)
    }

    #[inline(always)]
    fn affinity_match(&mut self, master: &Master, id: u32) -> bool {
        let key = &mut self.scratch.affinity_match;
        (key.backend_id, key.rev_nat_index) = (id, master.rev_nat_index);
        copy!(maps::AFFINITY_MATCH, key).is_some()
    }

    #[inline(always)]
    fn entry(&mut self, port: [u8; 2]) -> Option<Entry> {
        let found = copy!(F::conntrack(), F::entry_key(self.scratch, port));
        (self.scratch.entry_port, self.scratch.entry_lifetime) = (port, 0);
        let entry = found?;
        self.scratch.entry_lifetime = entry.lifetime;
        Some(Entry { backend_id: entry.backend_id, rev_nat_index: entry.rev_nat_index })
    }

    #[inline(never)]
    fn create(&mut self, port: [u8; 2], master: &Master, id: u32) -> bool {
        if config::read_only() {
            return false;
        }
        self.scratch.new_entry.backend_id = u64::from(id);
        self.scratch.new_entry.rev_nat_index = master.rev_nat_index;
        let entry = &raw const self.scratch.new_entry;
        // SAFETY: the key and the value are different fields of the record.
        F::conntrack().insert(F::entry_key(self.scratch, port), unsafe { &*entry }, NOEXIST).is_ok()
    }

    #[inline(never)]
    fn repair(&mut self, port: [u8; 2], seen: &Entry, master: &Master, id: u32) -> bool {
        if config::read_only() {
            return false;
        }
        // The index that the entry is found fault with may be another service's, whose element took the memory of this one's while
        // it was read.
        if self.service(0).is_none_or(|again| again.rev_nat_index != master.rev_nat_index) {
            return false;
        }
        let Some(entry) = self.entry_ptr(port) else {
            return false;
        };
        // SAFETY: a non-null map value pointer; the element outlives this packet, whatever tuple it is for by then.
        unsafe {
            if (&raw const (*entry).backend_id).read_volatile() != seen.backend_id {
                return false;
            }
            // The index goes first: until the backend follows, the entry names a backend that Cilium takes for missing or
            // for another service's, and chooses anew.
            (&raw mut (*entry).rev_nat_index).write_volatile(master.rev_nat_index);
            atomic::exchange(&raw mut (*entry).backend_id, seen.backend_id, u64::from(id))
        }
    }

    #[inline(never)]
    fn swap(&mut self, port: [u8; 2], from: u64, to: u32) -> bool {
        if config::read_only() {
            return false;
        }
        match self.entry_ptr(port) {
            // SAFETY: as above.
            Some(entry) => unsafe { atomic::exchange(&raw mut (*entry).backend_id, from, u64::from(to)) },
            None => false,
        }
    }

    #[inline(never)]
    fn keep_replies(&mut self, port: [u8; 2], master: &Master, id: u32) {
        if config::read_only() {
            return;
        }
        let Some(backend) = copy!(F::backends(), &id) else { return };
        // As a rule it was read just now; one that was made since has no lifetime yet.
        if self.scratch.entry_port != port && self.entry(port).is_none() {
            return;
        }
        let lifetime = self.scratch.entry_lifetime;
        let key = F::egress_key(self.scratch, &backend);
        if let Some(entry) = F::conntrack().get_ptr_mut(key) {
            // SAFETY: as above. Same clock and unit in both; a refresh by Cilium that is lost here is made up for by the next
            // packet.
            unsafe {
                let kept = &raw mut (*entry).lifetime;
                if kept.read_volatile() < lifetime {
                    kept.write_volatile(lifetime);
                }
            }
            return;
        }
        self.scratch.new_replies.rev_nat_index = master.rev_nat_index;
        self.scratch.new_replies.lifetime = lifetime;
        let entry = &raw const self.scratch.new_replies;
        // SAFETY: the key and the value are different fields of the record. A failure means that Cilium made its own entry,
        // which is as good, or that the map is full, which Cilium reports.
        let _: Result<(), i32> =
            F::conntrack().insert(F::egress_key(self.scratch, &backend), unsafe { &*entry }, NOEXIST);
    }

    #[inline(always)]
    fn replies_are_kept(&mut self, _port: [u8; 2], id: u32) -> bool {
        let client = self.outer().source.mapped();
        recent::is_kept(client, id, self.scratch.now, || {
            let lifetime = self.scratch.entry_lifetime;
            let Some(backend) = copy!(F::backends(), &id) else { return false };
            copy!(F::conntrack(), F::egress_key(self.scratch, &backend))
                .is_some_and(|entry| entry.lifetime >= lifetime)
        })
    }

    #[inline(always)]
    fn select(&mut self, state: &mut State) {
        F::select(state);
    }

    #[inline(always)]
    fn judge(&mut self, id: u64, unmarked: Unmarked, out: &mut Judgement) {
        F::judge(id, unmarked, out);
    }

    #[inline(always)]
    fn mark(&mut self, address: &[u8; 16]) -> Option<BackendMark> {
        recent::mark(address, self.scratch.now, self.scratch.only_ready != 0)
    }

    #[inline(always)]
    fn only_ready_marks(&mut self) -> bool {
        self.scratch.only_ready != 0
    }

    #[inline(always)]
    fn heartbeat_fresh(&mut self) -> u64 {
        self.scratch.heartbeat_fresh
    }

    #[inline(never)]
    fn leaving_since(&mut self, address: &[u8; 16], id: u32, terminating: bool) -> u64 {
        let now = self.scratch.now;
        self.scratch.leaving.terminating = u8::from(terminating);
        (self.scratch.leaving.address, self.scratch.leaving.backend_id) = (*address, id);
        if let Some(seen) = maps::LEAVING.get_ptr_mut(&self.scratch.leaving) {
            // SAFETY: a map value pointer to plain integers; racing CPUs store nearly the same time.
            let seen = unsafe { &mut *seen };
            if now.saturating_sub(seen.last) > LEAVING_PAUSE {
                seen.first = now;
            }
            seen.last = now;
            return seen.first;
        }
        (self.scratch.seen.first, self.scratch.seen.last) = (now, now);
        // Lost to another CPU that saw it at the same moment.
        let _: Result<(), i32> = maps::LEAVING.insert(&self.scratch.leaving, &self.scratch.seen, NOEXIST);
        now
    }

    #[inline(always)]
    fn unmarked_drain(&self) -> u64 {
        self.scratch.unmarked_drain
    }

    #[inline(always)]
    fn previous(&mut self) -> Option<Previous> {
        let previous = copy!(maps::PREVIOUS, self.client_service())?;
        (previous.generation == self.scratch.generation).then_some(previous)
    }

    #[inline(never)]
    fn set_previous(&mut self, from: u32, at: u64) {
        let address = self.address(from);
        self.client_service();
        let previous = &mut self.scratch.previous;
        (previous.backend_address, previous.backend_id) = (address, from);
        (previous.moved_at, previous.generation) = (at, self.scratch.generation);
        // A full LRU evicts the oldest.
        let _: Result<(), i32> =
            maps::PREVIOUS.insert(&self.scratch.client_service, &self.scratch.previous, 0);
    }

    #[inline(always)]
    fn report(&mut self, kind: u8, from: u32, to: u32) {
        F::report(kind, from, to);
    }

    #[inline(always)]
    fn flow_packet(&self) -> FlowPacket {
        self.scratch.flow_packet
    }

    #[inline(always)]
    fn flow(&mut self) -> Option<InnerFlow> {
        memory::recall(self.scratch).filter(|flow| flow.generation == self.scratch.generation)
    }

    #[inline(always)]
    fn remember(&mut self, id: u32, flags: u32) {
        let address = self.address(id);
        let flow = &mut self.scratch.new_flow;
        (flow.backend_address, flow.backend_id) = (address, id);
        (flow.last_seen, flow.generation, flow.flags) = (self.scratch.now, self.scratch.generation, flags);
        memory::remember();
    }

    #[inline(always)]
    fn memory_since(&self) -> u64 {
        self.scratch.memory_since
    }

    #[inline(always)]
    fn pin(&mut self) -> Option<PinnedPort> {
        let (since, generation) = (self.memory_since(), self.scratch.generation);
        copy!(maps::PINNED_PORTS, self.pinned_port()).filter(|pin| {
            // A record that says neither says nothing.
            let noted = if pin.given_at > pin.stuck_since { pin.given_at } else { pin.stuck_since };
            pin.generation == generation && noted >= since
        })
    }

    #[inline(never)]
    fn set_pin(&mut self, pin: &PinnedPort) -> bool {
        self.scratch.new_pin = *pin;
        self.scratch.new_pin.generation = self.scratch.generation;
        self.pinned_port();
        // A full LRU evicts the oldest, whose flow then goes by its own port again.
        maps::PINNED_PORTS.insert(&self.scratch.pinned_port, &self.scratch.new_pin, 0).is_ok()
    }

    #[inline(always)]
    fn is_returning(&mut self) -> bool {
        self.scratch.given.client = self.outer().source.mapped();
        let generation = self.scratch.generation;
        copy!(maps::RETURNING, &self.scratch.given.client)
            .is_some_and(|returning| returning.generation == generation)
    }

    #[inline(never)]
    fn note_return(&mut self, port: [u8; 2]) -> bool {
        self.scratch.given.port = port;
        self.scratch.given_for.service = self.scratch.service.address;
        self.scratch.given_for.generation = self.scratch.generation;
        maps::RETURNS.insert(&self.scratch.given, &self.scratch.given_for, 0).is_ok()
    }

    #[inline(always)]
    fn is_port_good(&mut self, port: [u8; 2], state: &mut State) -> bool {
        F::is_port_good(port, state)
    }

    #[inline(never)]
    fn count_drain(&mut self, address: &[u8; 16], change: DrainChange) {
        if maps::DRAINS.get_ptr_mut(address).is_none() {
            // Lost to another CPU, which is as good.
            let _: Result<(), i32> = maps::DRAINS.insert(address, &self.scratch.no_drains, NOEXIST);
        }
        let Some(stats) = maps::DRAINS.get_ptr_mut(address) else { return };
        // SAFETY: a map value pointer; every field is an aligned u64. The counts are added to atomically, of the times
        // any CPU's will do.
        unsafe {
            match change {
                DrainChange::Started => {
                    atomic::add(&raw mut (*stats).flows, 1);
                    atomic::add(&raw mut (*stats).started, 1);
                    (*stats).last_packet = self.scratch.now;
                }
                DrainChange::Seen => (*stats).last_packet = self.scratch.now,
                DrainChange::Ended => {
                    atomic::add(&raw mut (*stats).flows, u64::MAX);
                    atomic::add(&raw mut (*stats).ended, 1);
                    (*stats).last_end = self.scratch.now;
                }
                DrainChange::Cut => {
                    atomic::add(&raw mut (*stats).flows, u64::MAX);
                    atomic::add(&raw mut (*stats).cut, 1);
                    (*stats).last_end = self.scratch.now;
                }
            }
        }
    }
}
