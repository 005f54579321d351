//! What Cilium's maps say about the scene's client, service and backends.

use std::net::IpAddr;

use anyhow::{Context as _, Result};
use coil_guard_common::cilium::{
    AFFINITY_MATCH, Affinity, AffinityKey4, AffinityKey6, AffinityMatchKey, Backend4, Backend6, CtEntry,
    CtKey4, CtKey6, PROTO_UDP, SERVICE_FLAG_AFFINITY, Service, ServiceKey4, ServiceKey6,
};
use zerocopy::{FromBytes as _, IntoBytes as _};

use super::scene::{REV_NAT, Scene, address_of, mapped};
use crate::{
    cilium::{Expect, RawMap},
    fou::FOU_PORT,
};

impl Scene {
    fn map(&self, name: &str) -> Result<&RawMap> {
        self.guard.cilium().get(name)
    }

    /// Key of a slot of the service, as bytes.
    #[must_use]
    pub fn service_key(&self, slot: u16) -> Vec<u8> {
        let (dport, proto) = (FOU_PORT.to_be_bytes(), self.version.service_protocol());
        match self.cluster_ip() {
            IpAddr::V4(address) => {
                let address = address.octets();
                ServiceKey4 { address, dport, backend_slot: slot, proto, scope: 0, pad: [0; 2] }
                    .as_bytes()
                    .to_vec()
            }
            IpAddr::V6(address) => {
                let address = address.octets();
                ServiceKey6 { address, dport, backend_slot: slot, proto, scope: 0, pad: [0; 2] }
                    .as_bytes()
                    .to_vec()
            }
        }
    }

    /// Writes the service with these backends in its selectable slots.
    ///
    /// # Errors
    ///
    /// When the map cannot be written.
    pub fn service(&mut self, slots: &[u32], affinity: bool) -> Result<()> {
        self.service_with(slots, affinity, REV_NAT)
    }

    /// Writes it with another reverse NAT index, as one that was made anew has.
    ///
    /// # Errors
    ///
    /// When the map cannot be written.
    pub fn service_of(&mut self, slots: &[u32], rev_nat_index: [u8; 2]) -> Result<()> {
        self.service_with(slots, false, rev_nat_index)
    }

    fn service_with(&mut self, slots: &[u32], affinity: bool, rev_nat_index: [u8; 2]) -> Result<()> {
        let map = self.map(self.family.names().services)?;
        let value = |word, count, flags| Service { word, count, rev_nat_index, flags, flags2: 0, qcount: 0 };
        let flags = if affinity { SERVICE_FLAG_AFFINITY } else { 0 };
        let master = value(10800, slots.len() as u16, flags);
        map.update_bytes(&self.service_key(0), master.as_bytes(), Expect::Any)?;
        for (index, id) in slots.iter().enumerate() {
            map.update_bytes(&self.service_key(index as u16 + 1), value(*id, 0, 0).as_bytes(), Expect::Any)?;
        }
        Ok(())
    }

    /// Removes the master entry.
    ///
    /// # Errors
    ///
    /// When the map cannot be written.
    pub fn remove_service(&mut self) -> Result<()> {
        self.map(self.family.names().services)?.delete_bytes(&self.service_key(0)).map(drop)?;
        self.guard.forget_recent()
    }

    /// Writes a backend in a state.
    ///
    /// # Errors
    ///
    /// When the map cannot be written.
    pub fn backend(&mut self, id: u32, state: u8) -> Result<()> {
        self.backend_at(id, address_of(self.family, id), state)
    }

    /// Writes a backend at any address.
    ///
    /// # Errors
    ///
    /// When the map cannot be written.
    pub fn backend_at(&mut self, id: u32, address: IpAddr, state: u8) -> Result<()> {
        let (port, proto) = (self.backend_port.to_be_bytes(), PROTO_UDP);
        let value = match address {
            IpAddr::V4(address) => {
                let address = address.octets();
                Backend4 { address, port, proto, state, cluster_id: 0, zone: 0, pad: 0 }.as_bytes().to_vec()
            }
            IpAddr::V6(address) => {
                let address = address.octets();
                Backend6 { address, port, proto, state, cluster_id: 0, zone: 0, pad: 0 }.as_bytes().to_vec()
            }
        };
        self.map(self.family.names().backends)?.update_bytes(&id.to_ne_bytes(), &value, Expect::Any).map(drop)
    }

    /// Removes a backend.
    ///
    /// # Errors
    ///
    /// When the map cannot be written.
    pub fn remove_backend(&mut self, id: u32) -> Result<()> {
        self.map(self.family.names().backends)?.delete_bytes(&id.to_ne_bytes()).map(drop)
    }

    /// Key of the client's service entry under a source port, as bytes.
    #[must_use]
    pub fn entry_key(&self, port: u16) -> Vec<u8> {
        let (port, service_port) = (port.to_be_bytes(), FOU_PORT.to_be_bytes());
        match (self.client(), self.cluster_ip()) {
            (IpAddr::V4(client), IpAddr::V4(service)) => {
                CtKey4::service(client.octets(), port, service.octets(), service_port).as_bytes().to_vec()
            }
            (client, service) => {
                CtKey6::service(mapped(client), port, mapped(service), service_port).as_bytes().to_vec()
            }
        }
    }

    /// Key of the egress entry of the client's packets to a backend, as bytes.
    #[must_use]
    pub fn egress_key(&self, port: u16, id: u32) -> Vec<u8> {
        let (port, backend_port) = (port.to_be_bytes(), self.backend_port.to_be_bytes());
        match (self.client(), address_of(self.family, id)) {
            (IpAddr::V4(client), IpAddr::V4(backend)) => {
                CtKey4::egress(client.octets(), port, backend.octets(), backend_port).as_bytes().to_vec()
            }
            (client, backend) => {
                CtKey6::egress(mapped(client), port, mapped(backend), backend_port).as_bytes().to_vec()
            }
        }
    }

    /// Writes a service entry as Cilium does once it has seen traffic.
    ///
    /// # Errors
    ///
    /// When the map cannot be written.
    pub fn entry(&mut self, port: u16, id: u64, rev_nat_index: [u8; 2]) -> Result<()> {
        let entry = CtEntry {
            backend_id: id,
            packets: 0x1111,
            bytes: 0x2222_2222,
            lifetime: 0x3333,
            src_sec_id: 0x4444,
            last_tx_report: 0x5555,
            ..CtEntry::for_backend(0, rev_nat_index)
        };
        self.set_conntrack(&self.entry_key(port), &entry)
    }

    /// Writes any conntrack entry.
    ///
    /// # Errors
    ///
    /// When the map cannot be written.
    pub fn set_conntrack(&mut self, key: &[u8], entry: &CtEntry) -> Result<()> {
        self.map(self.family.names().conntrack)?
            .update_bytes(key, entry.as_bytes(), Expect::Any)
            .map(drop)?;
        self.guard.forget_recent()
    }

    /// A conntrack entry.
    ///
    /// # Errors
    ///
    /// When the map cannot be read.
    pub fn conntrack(&self, key: &[u8]) -> Result<Option<CtEntry>> {
        let bytes = self.map(self.family.names().conntrack)?.lookup_bytes(key)?;
        bytes
            .map(|bytes| CtEntry::read_from_bytes(&bytes).ok().context("a conntrack entry of another size"))
            .transpose()
    }

    /// The client's service entry under a source port.
    ///
    /// # Errors
    ///
    /// When the map cannot be read.
    pub fn entry_at(&self, port: u16) -> Result<Option<CtEntry>> {
        self.conntrack(&self.entry_key(port))
    }

    /// Backend id of that entry, 0 when there is none.
    ///
    /// # Errors
    ///
    /// When the map cannot be read.
    pub fn bound(&self, port: u16) -> Result<u64> {
        Ok(self.entry_at(port)?.map_or(0, |entry| entry.backend_id))
    }

    /// Removes a conntrack entry.
    ///
    /// # Errors
    ///
    /// When the map cannot be written.
    pub fn forget(&mut self, key: &[u8]) -> Result<()> {
        self.map(self.family.names().conntrack)?.delete_bytes(key).map(drop)?;
        self.guard.forget_recent()
    }

    /// Writes the client's affinity entry.
    ///
    /// # Errors
    ///
    /// When the map cannot be written.
    pub fn affinity(&mut self, id: u32) -> Result<()> {
        let rev_nat_index = REV_NAT;
        let key = match self.client() {
            IpAddr::V4(client) => {
                AffinityKey4 { client: client.octets(), pad0: [0; 4], rev_nat_index, pad: [0; 6] }
                    .as_bytes()
                    .to_vec()
            }
            IpAddr::V6(client) => {
                AffinityKey6 { client: client.octets(), rev_nat_index, pad: [0; 6] }.as_bytes().to_vec()
            }
        };
        let value = Affinity { last_used: 1, backend_id: id, pad: 0 };
        self.map(self.family.names().affinity)?.update_bytes(&key, value.as_bytes(), Expect::Any).map(drop)
    }

    /// Whether affinity may choose a backend.
    ///
    /// # Errors
    ///
    /// When the map cannot be written.
    pub fn affinity_match(&mut self, id: u32, may: bool) -> Result<()> {
        let key = AffinityMatchKey { backend_id: id, rev_nat_index: REV_NAT, pad: [0; 2] };
        let map = self.map(AFFINITY_MATCH)?;
        if may {
            map.update_bytes(key.as_bytes(), &[1], Expect::Any).map(drop)
        } else {
            map.delete_bytes(key.as_bytes()).map(drop)
        }
    }
}
