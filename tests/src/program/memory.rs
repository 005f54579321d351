//! What the program remembers of the scene's client.

use anyhow::{Context as _, Result};
use coil_guard_common::abi::{
    ClientServiceKey, DrainStats, InnerFlow, InnerFlowKey, LeavingKey, LeavingSeen, PinnedPort,
    PinnedPortKey, Previous, maps,
};
use zerocopy::FromZeros as _;

use super::{
    clock::monotonic,
    scene::{CLIENT_GENERATION, Scene, address_of, mapped},
};
use crate::fou::FOU_PORT;

impl Scene {
    fn flow_key(&self, protocol: u8, port: u16, destination_port: u16) -> InnerFlowKey {
        InnerFlowKey {
            service: mapped(self.cluster_ip()),
            client: mapped(self.client()),
            source: mapped(self.client()),
            destination: mapped(self.outside()),
            service_port: FOU_PORT.to_be_bytes(),
            source_port: port.to_be_bytes(),
            destination_port: destination_port.to_be_bytes(),
            protocol,
            pad: 0,
        }
    }

    /// Remembers an inner flow of an unfragmented TCP or UDP packet on a backend.
    ///
    /// # Errors
    ///
    /// When the map cannot be written.
    pub fn remember(
        &mut self,
        protocol: u8,
        port: u16,
        destination_port: u16,
        flow: &InnerFlow,
    ) -> Result<()> {
        let key = self.flow_key(protocol, port, destination_port);
        self.guard.set(maps::INNER_FLOWS, &key, flow)
    }

    fn pinned_key(&self, port: u16) -> PinnedPortKey {
        PinnedPortKey {
            service: mapped(self.cluster_ip()),
            client: mapped(self.client()),
            service_port: FOU_PORT.to_be_bytes(),
            client_port: port.to_be_bytes(),
        }
    }

    /// What mode rewrite remembers of the client's packets from a source port.
    ///
    /// # Errors
    ///
    /// When the map cannot be read.
    pub fn pinned(&self, port: u16) -> Result<Option<PinnedPort>> {
        let key = self.pinned_key(port);
        match self.guard.own::<PinnedPortKey, PinnedPort>(maps::PINNED_PORTS)?.get(&key, 0) {
            Ok(pin) => Ok(Some(pin)),
            Err(aya::maps::MapError::KeyNotFound) => Ok(None),
            Err(error) => Err(error).context("cannot look up a given port"),
        }
    }

    /// Makes mode rewrite remember that.
    ///
    /// # Errors
    ///
    /// When the map cannot be written.
    pub fn pin(&mut self, port: u16, pin: &PinnedPort) -> Result<()> {
        let key = self.pinned_key(port);
        self.guard.set(maps::PINNED_PORTS, &key, pin)
    }

    /// A memory of a flow on the backend `id`, seen `age` nanoseconds ago.
    #[must_use]
    pub fn memory(&self, id: u32, age: u64) -> InnerFlow {
        InnerFlow {
            backend_address: mapped(address_of(self.family, id)),
            last_seen: monotonic() - age,
            backend_id: id,
            generation: CLIENT_GENERATION,
            flags: 0,
            pad: 0,
        }
    }

    /// Counts of drained flows of a backend.
    ///
    /// # Errors
    ///
    /// When the map cannot be read.
    pub fn drains(&self, id: u32) -> Result<DrainStats> {
        let key = mapped(address_of(self.family, id));
        match self.guard.own::<[u8; 16], DrainStats>(maps::DRAINS)?.get(&key, 0) {
            Ok(stats) => Ok(stats),
            Err(aya::maps::MapError::KeyNotFound) => Ok(DrainStats::new_zeroed()),
            Err(error) => Err(error).context("cannot look up drained flows"),
        }
    }

    /// Notes that the client was moved off the backend `id`, `age` nanoseconds ago.
    ///
    /// # Errors
    ///
    /// When the map cannot be written.
    pub fn moved_off(&mut self, id: u32, generation: u32, age: u64) -> Result<()> {
        let key = ClientServiceKey {
            service: mapped(self.cluster_ip()),
            client: mapped(self.client()),
            service_port: FOU_PORT.to_be_bytes(),
            pad: [0; 2],
        };
        let backend_address = mapped(address_of(self.family, id));
        let value = Previous { backend_address, moved_at: monotonic() - age, backend_id: id, generation };
        self.guard.set(maps::PREVIOUS, &key, &value)
    }

    /// Makes the program have seen the backend `id` leaving for the first time `age` nanoseconds ago.
    ///
    /// # Errors
    ///
    /// When the map cannot be written.
    pub fn seen_leaving(&mut self, id: u32, age: u64) -> Result<()> {
        let (address, now) = (mapped(address_of(self.family, id)), monotonic());
        let value = LeavingSeen { first: now - age, last: now };
        for terminating in [0, 1] {
            let key = LeavingKey { address, backend_id: id, terminating, pad: [0; 3] };
            self.guard.set(maps::LEAVING, &key, &value)?;
        }
        Ok(())
    }

    /// Memory of an inner flow of an unfragmented TCP or UDP packet.
    ///
    /// # Errors
    ///
    /// When the map cannot be read.
    pub fn flow(&self, protocol: u8, port: u16, destination_port: u16) -> Result<Option<InnerFlow>> {
        let key = self.flow_key(protocol, port, destination_port);
        match self.guard.own::<InnerFlowKey, InnerFlow>(maps::INNER_FLOWS)?.get(&key, 0) {
            Ok(flow) => Ok(Some(flow)),
            Err(aya::maps::MapError::KeyNotFound) => Ok(None),
            Err(error) => Err(error).context("cannot look up an inner flow"),
        }
    }
}
