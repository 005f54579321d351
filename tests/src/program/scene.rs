//! One client, one guarded service, some backends: what the maps say, and packets.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::Path;

use anyhow::{Context as _, Result};
use coil_guard_common::{
    abi::{
        AgentState, BackendMark, ClientServiceKey, DrainStats, FOR_EVER, GuardedService, InnerFlow,
        InnerFlowKey, LeavingKey, LeavingSeen, POD_HAS_IPV4, POD_HAS_IPV6, PodConfig, Previous, ServiceKey,
        maps, mark, v4_mapped,
    },
    cilium::{
        Affinity, AffinityKey4, AffinityKey6, Backend4, Backend6, CtEntry, CtKey4, CtKey6, PROTO_UDP,
        SERVICE_FLAG_AFFINITY, Service, ServiceKey4, ServiceKey6,
    },
};
use zerocopy::{FromBytes as _, FromZeros as _, IntoBytes as _};

use super::instance::{Instance, Run, Sizes, monotonic};
use crate::{
    cilium::{CiliumVersion, Expect, IpFamily, RawMap},
    fou::{self, ChecksumKind, FOU_PORT, InnerPacket, Outer, Tag, checksum},
};

/// `rev_nat_index` of the scene's service, network order.
pub const REV_NAT: [u8; 2] = [0x01, 0x02];
/// Generation of the client pod.
pub const CLIENT_GENERATION: u32 = 7;
/// Index of the scene's Egress.
pub const EGRESS: u32 = 3;

const SECOND: u64 = 1_000_000_000;

/// Constants of the scene's client pod, which has an address of each family.
#[must_use]
pub fn pod_config() -> PodConfig {
    PodConfig {
        address6: Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 0x11).octets(),
        address4: [10, 0, 0, 0x11],
        flags: POD_HAS_IPV4 | POD_HAS_IPV6,
        guarded_since: 1,
        generation: CLIENT_GENERATION,
        fou_port: FOU_PORT.to_be_bytes(),
        pad: [0; 2],
        unmarked_drain: 5 * SECOND,
    }
}

/// Address of the backend `id`.
#[must_use]
pub fn address_of(family: IpFamily, id: u32) -> IpAddr {
    let [a, b, c, d] = id.to_be_bytes();
    match family {
        IpFamily::V4 => Ipv4Addr::new(10, 64 ^ a ^ b, c, d).into(),
        IpFamily::V6 => Ipv6Addr::from(0xfd01_u128 << 112 | u128::from(id)).into(),
    }
}

/// State of the outer UDP checksum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Checksum {
    /// 0.
    None,
    /// The pseudo-header sum, for whoever finishes it.
    Unfinished,
    /// Right.
    Finished,
}

impl Checksum {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::None, Self::Unfinished, Self::Finished];
}

/// Offset of the outer UDP header in a frame of [`Scene::frame`]'s making.
#[must_use]
pub fn udp_offset(frame: &[u8], inner: &[u8]) -> usize {
    frame.len() - inner.len() - 8
}

/// See the module.
#[derive(Debug)]
pub struct Scene {
    /// The program and its maps.
    pub guard: Instance,
    /// Family of the outer packets.
    pub family: IpFamily,
    /// Port of backends that are written from now on.
    pub backend_port: u16,
    version: CiliumVersion,
}

impl Scene {
    /// Loads an instance for [`pod_config`], with Cilium's maps in `directory`.
    ///
    /// # Errors
    ///
    /// As [`Instance::load`].
    pub fn load(directory: &Path, version: CiliumVersion, sizes: Sizes) -> Result<Self> {
        Self::load_for(directory, version, sizes, &pod_config())
    }

    /// Loads an instance for another pod.
    ///
    /// # Errors
    ///
    /// As [`Instance::load`].
    pub fn load_for(
        directory: &Path,
        version: CiliumVersion,
        sizes: Sizes,
        config: &PodConfig,
    ) -> Result<Self> {
        Ok(Self::new(Instance::load(directory, version, config, sizes)?, version))
    }

    /// A scene on an instance that was loaded over the maps of `version`.
    #[must_use]
    pub fn new(guard: Instance, version: CiliumVersion) -> Self {
        Self { guard, family: IpFamily::V4, backend_port: FOU_PORT, version }
    }

    /// Starts anew: the service guarded in `mode` by a living agent, backends 1 and 2 active, ready and in the slots, no
    /// affinity, no entry.
    ///
    /// # Errors
    ///
    /// When a map cannot be written.
    pub fn begin(&mut self, family: IpFamily, mode: u8) -> Result<()> {
        self.guard.clear()?;
        self.family = family;
        self.backend_port = FOU_PORT;
        self.agent_alive(true)?;
        self.guarded(mode, 0)?;
        self.service(&[1, 2], false)?;
        for id in [1, 2] {
            self.backend(id, 0)?;
            self.mark(id, mark::READY, FOR_EVER, 0)?;
        }
        Ok(())
    }

    /// The client pod's address.
    #[must_use]
    pub fn client(&self) -> IpAddr {
        let config = pod_config();
        match self.family {
            IpFamily::V4 => config.address4.into(),
            IpFamily::V6 => config.address6.into(),
        }
    }

    /// The service's ClusterIP.
    #[must_use]
    pub fn cluster_ip(&self) -> IpAddr {
        match self.family {
            IpFamily::V4 => Ipv4Addr::new(10, 96, 0, 10).into(),
            IpFamily::V6 => Ipv6Addr::new(0xfd96, 0, 0, 0, 0, 0, 0, 10).into(),
        }
    }

    /// Whether the agent's heartbeat is fresh.
    ///
    /// # Errors
    ///
    /// When the map cannot be written.
    pub fn agent_alive(&mut self, alive: bool) -> Result<()> {
        let heartbeat_until = if alive { monotonic() + 3600 * SECOND } else { 1 };
        self.guard.set_agent(AgentState { heartbeat_until })
    }

    /// Guards the service in `mode` with `flags`.
    ///
    /// # Errors
    ///
    /// When the map cannot be written.
    pub fn guarded(&mut self, mode: u8, flags: u8) -> Result<()> {
        self.guarded_until(mode, flags, FOR_EVER, 1)
    }

    /// Guards the service until a time, its flows remembered since another.
    ///
    /// # Errors
    ///
    /// When the map cannot be written.
    pub fn guarded_until(&mut self, mode: u8, flags: u8, expires_at: u64, tracked_since: u64) -> Result<()> {
        let key =
            ServiceKey { address: mapped(self.cluster_ip()), port: FOU_PORT.to_be_bytes(), pad: [0; 2] };
        let value = GuardedService { expires_at, tracked_since, egress: EGRESS, mode, flags, pad: [0; 2] };
        self.guard.set(maps::GUARDED_SERVICES, &key, &value)
    }

    /// Marks a backend as the agent does; valid for an hour.
    ///
    /// # Errors
    ///
    /// When the map cannot be written.
    pub fn mark(&mut self, id: u32, state: u8, keep_until: u64, since: u64) -> Result<()> {
        let valid_until = monotonic() + 3600 * SECOND;
        let value = BackendMark { keep_until, valid_until, since, state, pad: [0; 7] };
        let key = mapped(address_of(self.family, id));
        self.guard.set(maps::BACKEND_MARKS, &key, &value)
    }

    /// Marks a backend as leaving since a second, keeping its flows for `seconds`.
    ///
    /// # Errors
    ///
    /// When the map cannot be written.
    pub fn leaving(&mut self, id: u32, seconds: u64) -> Result<()> {
        let now = monotonic();
        let keep_until = if seconds == 0 { 0 } else { now + seconds * SECOND };
        self.mark(id, mark::LEAVING, keep_until, now - SECOND)
    }

    /// Removes a mark.
    ///
    /// # Errors
    ///
    /// When the map cannot be written.
    pub fn unmark(&mut self, id: u32) -> Result<()> {
        let key = mapped(address_of(self.family, id));
        self.guard.unset::<[u8; 16], BackendMark>(maps::BACKEND_MARKS, &key)
    }

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
        let map = self.map(self.family.names().services)?;
        let value =
            |word, count, flags| Service { word, count, rev_nat_index: REV_NAT, flags, flags2: 0, qcount: 0 };
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
        self.map(self.family.names().services)?.delete_bytes(&self.service_key(0)).map(drop)
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
                CtKey6::service(octets6(client), port, octets6(service), service_port).as_bytes().to_vec()
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
                CtKey6::egress(octets6(client), port, octets6(backend), backend_port).as_bytes().to_vec()
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
    pub fn set_conntrack(&self, key: &[u8], entry: &CtEntry) -> Result<()> {
        self.map(self.family.names().conntrack)?.update_bytes(key, entry.as_bytes(), Expect::Any).map(drop)
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
    pub fn forget(&self, key: &[u8]) -> Result<()> {
        self.map(self.family.names().conntrack)?.delete_bytes(key).map(drop)
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

    /// Address of the peer that inner packets go to, of the outer family.
    #[must_use]
    pub fn outside(&self) -> IpAddr {
        match self.family {
            IpFamily::V4 => Ipv4Addr::new(203, 0, 113, 9).into(),
            IpFamily::V6 => Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 9).into(),
        }
    }

    /// An inner TCP segment of the connection from `port`.
    #[must_use]
    pub fn tcp(&self, port: u16, flags: u8) -> InnerPacket {
        InnerPacket::tcp((self.client(), port), (self.outside(), 443), flags)
    }

    /// An inner UDP datagram of the flow from `port`.
    #[must_use]
    pub fn udp(&self, port: u16) -> InnerPacket {
        InnerPacket::udp((self.client(), port), (self.outside(), 53))
    }

    /// A FoU frame as Coil makes it.
    #[must_use]
    pub fn frame(&self, port: u16, inner: &InnerPacket) -> Vec<u8> {
        self.frame_with(port, &bytes(inner), Checksum::None, true)
    }

    /// A FoU frame.
    #[must_use]
    pub fn frame_with(&self, port: u16, inner: &[u8], state: Checksum, destination_options: bool) -> Vec<u8> {
        let outer = Outer {
            source: (self.client(), port),
            destination: (self.cluster_ip(), FOU_PORT),
            checksum: if state == Checksum::Finished { ChecksumKind::Correct } else { ChecksumKind::Zero },
            destination_options,
        };
        let mut frame = fou::frame([2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2], &outer.packet(inner));
        if state == Checksum::Unfinished {
            let at = udp_offset(&frame, inner) + 6;
            let sum = checksum::pseudo_header(self.client(), self.cluster_ip(), PROTO_UDP, inner.len() + 8);
            frame[at..at + 2].copy_from_slice(&sum.to_be_bytes());
        }
        frame
    }

    /// Runs a frame.
    ///
    /// # Errors
    ///
    /// As [`Instance::run`].
    pub fn run(&mut self, frame: &[u8]) -> Result<Run> {
        self.guard.run(frame, EGRESS)
    }

    /// Runs an inner packet under the FoU port, as Coil makes it.
    ///
    /// # Errors
    ///
    /// As [`Instance::run`].
    pub fn send(&mut self, inner: &InnerPacket) -> Result<Run> {
        let frame = self.frame(FOU_PORT, inner);
        self.run(&frame)
    }

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

/// Bytes of an inner packet.
pub fn bytes(inner: &InnerPacket) -> Vec<u8> {
    inner.build(Tag { stream: 1, sequence: 1 })
}

/// v4-mapped.
pub(crate) fn mapped(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(address) => v4_mapped(address.octets()),
        IpAddr::V6(address) => address.octets(),
    }
}

fn octets6(address: IpAddr) -> [u8; 16] {
    mapped(address)
}
