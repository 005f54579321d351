//! The client of one packet, and the packet's own keys.

use core::marker::PhantomData;

use coil_guard_common::{
    abi::{ClientServiceKey, PinnedPortKey},
    cilium::{CtEntry, PROTO_UDP, SERVICE_FLAG_AFFINITY, Service},
    decide::Master,
    packet::{Address as _, Outer},
};

use crate::{
    family::{AnyBackend as _, Family},
    maps::copy,
    report,
    scratch::Scratch,
};

/// See the module. What it does as the decision's world is in `world.rs`.
pub(crate) struct ClientWorld<F: Family> {
    pub(crate) scratch: &'static mut Scratch,
    family: PhantomData<F>,
}

impl<F: Family> ClientWorld<F> {
    /// The world of the packet that the record is about.
    #[inline(always)]
    pub(crate) fn new(scratch: &'static mut Scratch) -> Self {
        Self { scratch, family: PhantomData }
    }

    /// The key of the packet's client and service.
    #[inline(always)]
    pub(crate) fn client_service(&mut self) -> &ClientServiceKey {
        let client = self.outer().source.mapped();
        let (key, service) = (&mut self.scratch.client_service, &self.scratch.service);
        (key.client, key.service, key.service_port) = (client, service.address, service.port);
        key
    }

    /// The key of the packet's outer tuple.
    #[inline(always)]
    pub(crate) fn pinned_port(&mut self) -> &PinnedPortKey {
        let (client, port) = (self.outer().source.mapped(), self.outer().source_port);
        let (key, service) = (&mut self.scratch.pinned_port, &self.scratch.service);
        (key.client, key.service, key.service_port) = (client, service.address, service.port);
        key.client_port = port;
        key
    }

    /// `World::report`.
    #[inline(always)]
    pub(crate) fn send_report(&mut self, kind: u8, from: u32, to: u32) {
        let client = self.outer().source.mapped();
        let (key, service) = (&mut self.scratch.report, &self.scratch.service);
        (key.service, key.client) = (service.address, client);
        (key.service_port, key.from_id, key.kind) = (service.port, from, kind);
        if !report::due(&self.scratch.report, self.scratch.now) {
            return;
        }
        report::send(|event| {
            event.time = self.scratch.now;
            event.client = self.scratch.report.client;
            event.service = self.scratch.report.service;
            event.from = self.address(from);
            event.to = self.address(to);
            event.from_id = from;
            event.to_id = to;
            event.egress = self.scratch.egress;
            event.service_port = self.scratch.report.service_port;
            event.client_port = self.outer().source_port;
            event.kind = kind;
            event.mode = self.scratch.mode;
            event.pad = [0; 6];
        });
    }

    #[inline(always)]
    pub(crate) fn outer(&self) -> &Outer<F::Address> {
        F::outer(self.scratch)
    }

    /// The service's master entry: keyed by protocol from Cilium 1.17, by "any" before.
    #[inline(always)]
    pub(crate) fn find_master(&mut self, out: &mut Master) -> bool {
        self.scratch.proto = PROTO_UDP;
        if self.read_master(out) {
            return true;
        }
        self.scratch.proto = 0;
        self.read_master(out)
    }

    #[inline(always)]
    fn read_master(&mut self, out: &mut Master) -> bool {
        let Some(master) = self.service(0) else { return false };
        out.rev_nat_index = master.rev_nat_index;
        out.count = master.count;
        out.affinity = master.flags & SERVICE_FLAG_AFFINITY != 0;
        true
    }

    #[inline(always)]
    pub(crate) fn service(&mut self, slot: u16) -> Option<Service> {
        copy!(F::services(), F::service_key(self.scratch, slot))
    }

    /// Address of a backend, zeros when Cilium has none of that id.
    #[inline(always)]
    pub(crate) fn address(&self, id: u32) -> [u8; 16] {
        match copy!(F::backends(), &id) {
            Some(backend) => backend.address().mapped(),
            None => [0; 16],
        }
    }

    /// The service entry under `port` in Cilium's map.
    #[inline(always)]
    pub(crate) fn entry_ptr(&mut self, port: [u8; 2]) -> Option<*mut CtEntry> {
        F::conntrack().get_ptr_mut(F::entry_key(self.scratch, port))
    }
}
