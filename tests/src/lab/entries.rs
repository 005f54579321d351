//! Single entries of Cilium's maps.

use std::net::IpAddr;

use anyhow::{Result, bail};
use coil_guard_common::cilium::{Affinity, AffinityKey4, AffinityKey6, CtEntry, CtKey4, CtKey6};
use zerocopy::IntoBytes as _;

use super::Lab;
use crate::cilium::{Expect, IpFamily, RawMap};

/// An outer flow as the client sends it. Ports in host order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FlowTuple {
    /// Client pod and its port.
    pub client: (IpAddr, u16),
    /// ClusterIP and its port, or a backend and its port.
    pub destination: (IpAddr, u16),
}

impl FlowTuple {
    /// Key of its service entry; `destination` is the ClusterIP.
    ///
    /// # Errors
    ///
    /// When the addresses are not of one family.
    pub fn service_key(&self) -> Result<Vec<u8>> {
        let (client_port, port) = (self.client.1.to_be_bytes(), self.destination.1.to_be_bytes());
        Ok(match (self.client.0, self.destination.0) {
            (IpAddr::V4(client), IpAddr::V4(service)) => {
                CtKey4::service(client.octets(), client_port, service.octets(), port).as_bytes().to_vec()
            }
            (IpAddr::V6(client), IpAddr::V6(service)) => {
                CtKey6::service(client.octets(), client_port, service.octets(), port).as_bytes().to_vec()
            }
            (client, service) => bail!("{client} and {service} are not of one family"),
        })
    }

    /// Key of its egress entry; `destination` is the backend.
    ///
    /// # Errors
    ///
    /// When the addresses are not of one family.
    pub fn egress_key(&self) -> Result<Vec<u8>> {
        let (client_port, port) = (self.client.1.to_be_bytes(), self.destination.1.to_be_bytes());
        Ok(match (self.client.0, self.destination.0) {
            (IpAddr::V4(client), IpAddr::V4(backend)) => {
                CtKey4::egress(client.octets(), client_port, backend.octets(), port).as_bytes().to_vec()
            }
            (IpAddr::V6(client), IpAddr::V6(backend)) => {
                CtKey6::egress(client.octets(), client_port, backend.octets(), port).as_bytes().to_vec()
            }
            (client, backend) => bail!("{client} and {backend} are not of one family"),
        })
    }
}

impl Lab {
    /// The outer flow of a client port to the Egress's service.
    #[must_use]
    pub fn flow(&self, client: usize, family: IpFamily, client_port: u16) -> FlowTuple {
        FlowTuple {
            client: (self.client(client).address(family), client_port),
            destination: self.service(family),
        }
    }

    /// The service entry of a client port, if there is one.
    ///
    /// # Errors
    ///
    /// When the map refuses.
    pub fn service_entry(
        &self,
        client: usize,
        family: IpFamily,
        client_port: u16,
    ) -> Result<Option<CtEntry>> {
        self.entry(family, &self.flow(client, family, client_port).service_key()?)
    }

    /// Writes a service entry; says whether it was as expected.
    ///
    /// # Errors
    ///
    /// When the map refuses.
    pub fn set_service_entry(
        &self,
        client: usize,
        family: IpFamily,
        client_port: u16,
        entry: &CtEntry,
        expect: Expect,
    ) -> Result<bool> {
        let key = self.flow(client, family, client_port).service_key()?;
        self.maps.conntrack(family)?.update_bytes(&key, entry.as_bytes(), expect)
    }

    /// Deletes a service entry, as the garbage collection does; says whether there was one.
    ///
    /// # Errors
    ///
    /// When the map refuses.
    pub fn delete_service_entry(&self, client: usize, family: IpFamily, client_port: u16) -> Result<bool> {
        self.maps.conntrack(family)?.delete_bytes(&self.flow(client, family, client_port).service_key()?)
    }

    /// The egress entry of a client port towards a backend, if there is one.
    ///
    /// # Errors
    ///
    /// When the map refuses.
    pub fn egress_entry(
        &self,
        client: usize,
        family: IpFamily,
        client_port: u16,
        backend: usize,
    ) -> Result<Option<CtEntry>> {
        let destination = (self.backend(backend).address(family), self.options.backend_port);
        let flow = FlowTuple { client: (self.client(client).address(family), client_port), destination };
        self.entry(family, &flow.egress_key()?)
    }

    /// The index of the backend that the service entry of a client port names; `None` without an entry.
    ///
    /// # Errors
    ///
    /// When the entry names a backend that is none of the lab's.
    pub fn bound_backend(&self, client: usize, family: IpFamily, client_port: u16) -> Result<Option<usize>> {
        let Some(entry) = self.service_entry(client, family, client_port)? else { return Ok(None) };
        for index in 0..self.topology.backends.len() {
            if self.backend_id(family, index).is_ok_and(|id| u64::from(id) == entry.backend_id) {
                return Ok(Some(index));
            }
        }
        bail!("the service entry of client {client} port {client_port} names backend id {}", entry.backend_id)
    }

    /// The affinity of a client to the Egress's service, if there is one.
    ///
    /// # Errors
    ///
    /// When the map refuses.
    pub fn affinity(&self, client: usize, family: IpFamily) -> Result<Option<Affinity>> {
        let rev_nat_index = self.control.service(self.service_id(family)).rev_nat.to_be_bytes();
        let map: &RawMap = self.maps.get(family.names().affinity)?;
        match self.client(client).address(family) {
            IpAddr::V4(address) => map.lookup(&AffinityKey4 {
                client: address.octets(),
                pad0: [0; 4],
                rev_nat_index,
                pad: [0; 6],
            }),
            IpAddr::V6(address) => {
                map.lookup(&AffinityKey6 { client: address.octets(), rev_nat_index, pad: [0; 6] })
            }
        }
    }

    fn entry(&self, family: IpFamily, key: &[u8]) -> Result<Option<CtEntry>> {
        use zerocopy::FromBytes as _;
        let value = self.maps.conntrack(family)?.lookup_bytes(key)?;
        Ok(value.and_then(|bytes| CtEntry::read_from_bytes(&bytes).ok()))
    }
}
