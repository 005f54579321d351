//! Where the clients and backends of guarded services stand in Cilium's maps now. For `status`, which may be repeated every
//! second: single elements are looked up, and only the backends map may be walked.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    path::Path,
};

use aya::maps::{HashMap, MapData, MapError};
use coil_guard_common::cilium::{
    BACKEND_ACTIVE, BACKEND_MAINTENANCE, BACKEND_QUARANTINED, BACKEND_TERMINATING, Backend4, Backend6,
    CtEntry, CtKey4, CtKey6, MAPS4, MAPS6, SERVICE_FLAG_AFFINITY,
};
use zerocopy::FromBytes as _;

use super::{
    CiliumError, CiliumMaps, Role,
    view::{Family, bytes, families, lookup, open, typed},
};
use crate::plan::ServiceAddress;

/// Elements of the backends map looked at, at most: its default size is 64 Ki.
const BACKENDS: usize = 1 << 20;
/// Service entries looked up, at most; a second's work.
const ENTRIES: usize = 1 << 19;

/// A backend in Cilium's map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CurrentBackend {
    /// Its id.
    pub id: u32,
    /// Its state byte, `BACKEND_ACTIVE`, ….
    pub state: u8,
}

/// A service that Cilium knows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CurrentService {
    /// Whether it has ClientIP affinity.
    pub affinity: bool,
    /// Addresses in its slots, selectable or not.
    pub backends: BTreeSet<IpAddr>,
    /// Clients with a service entry under their source port, and the backend that it names; `None` for an id that is no
    /// backend's any more. Absent where it cannot be looked up: every inner flow has a port of its own, or there are too many
    /// clients and services.
    pub clients: Option<BTreeMap<IpAddr, Option<IpAddr>>>,
}

/// What Cilium's maps hold.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Current {
    /// Those of the services asked for that Cilium knows.
    pub services: BTreeMap<ServiceAddress, CurrentService>,
    /// Backends in their slots, those that clients are on, and those of the addresses asked for.
    pub backends: BTreeMap<IpAddr, CurrentBackend>,
    /// Kernel ids by pin name of the maps that are there.
    pub ids: BTreeMap<&'static str, u32>,
}

/// What is looked for.
#[derive(Clone, Debug, Default)]
pub struct Sought {
    /// Services, and whether all inner flows of a client share one source port, which is then that of the service.
    pub services: BTreeMap<ServiceAddress, bool>,
    /// Addresses of client pods.
    pub clients: BTreeSet<IpAddr>,
    /// Source ports of those that have another one than the service's.
    pub ports: BTreeMap<(IpAddr, ServiceAddress), u16>,
    /// Addresses of backends that may have left the slots.
    pub backends: BTreeSet<IpAddr>,
}

enum Conntrack {
    V4(HashMap<MapData, [u8; 14], [u8; 56]>),
    V6(HashMap<MapData, [u8; 38], [u8; 56]>),
}

/// Looks at the maps pinned in `directory`.
///
/// # Errors
///
/// When the maps are missing, have another layout or cannot be read.
pub fn current(directory: &Path, sought: &Sought) -> Result<Current, CiliumError> {
    let maps = CiliumMaps::open(directory)?;
    let ids = maps.maps.iter().filter_map(|open| Some((open.spec.pin_name, open.map.as_ref()?.1))).collect();
    let mut current = Current { ids, ..Current::default() };
    let families = families(maps)?;
    let conntracks = conntracks(CiliumMaps::open(directory)?)?;
    let few = sought.services.len().saturating_mul(sought.clients.len()) <= ENTRIES;
    for (service, one_port) in &sought.services {
        let v6 = service.address.is_ipv6();
        let (Some(family), Some(conntrack)) = (families.get(&v6), conntracks.get(&v6)) else { continue };
        let Some(master) = family.master(*service)? else { continue };
        let mut found = CurrentService {
            affinity: master.service.flags & SERVICE_FLAG_AFFINITY != 0,
            backends: BTreeSet::new(),
            clients: (few && *one_port).then(BTreeMap::new),
        };
        for (address, id) in family.walk(*service)?.unwrap_or_default() {
            found.backends.insert(address);
            // Gone since, and with it what could be said.
            let Some(state) = family.state(id)? else { continue };
            current.backends.insert(address, CurrentBackend { id, state });
        }
        if let Some(clients) = &mut found.clients {
            for client in &sought.clients {
                let port = sought.ports.get(&(*client, *service)).copied().unwrap_or(service.port);
                let Some(entry) = conntrack.service_entry((*client, port), *service)? else { continue };
                if entry.rev_nat_index != master.service.rev_nat_index {
                    continue;
                }
                let backend = u32::try_from(entry.backend_id).ok().map(|id| family.found(id)).transpose()?;
                let backend = backend.flatten();
                current.backends.extend(backend);
                clients.insert(*client, backend.map(|(address, _)| address));
            }
        }
        current.services.insert(*service, found);
    }
    let ports: BTreeSet<_> = sought.services.keys().map(|service| service.port).collect();
    for (v6, family) in &families {
        let known = |address: &IpAddr| current.backends.contains_key(address);
        let unplaced = sought.backends.iter().filter(|address| address.is_ipv6() == *v6 && !known(address));
        let unplaced: BTreeSet<_> = unplaced.copied().collect();
        if !unplaced.is_empty() {
            current.backends.extend(family.among(&unplaced, &ports)?);
        }
    }
    Ok(current)
}

fn conntracks(maps: CiliumMaps) -> Result<BTreeMap<bool, Conntrack>, CiliumError> {
    let mut conntracks = BTreeMap::new();
    for map in maps.maps.into_iter().filter(|open| open.spec.role == Role::Conntrack) {
        let ipv6 = map.spec.ipv6;
        let Some(map) = typed(map)? else { continue };
        conntracks.insert(ipv6, if ipv6 { Conntrack::V6(open(map)?) } else { Conntrack::V4(open(map)?) });
    }
    Ok(conntracks)
}

impl Conntrack {
    fn service_entry(
        &self,
        (client, client_port): (IpAddr, u16),
        service: ServiceAddress,
    ) -> Result<Option<CtEntry>, CiliumError> {
        let (client_port, port) = (client_port.to_be_bytes(), service.port.to_be_bytes());
        let value = match (self, client, service.address) {
            (Self::V4(map), IpAddr::V4(client), IpAddr::V4(service)) => {
                let key = CtKey4::service(client.octets(), client_port, service.octets(), port);
                lookup(map, &bytes(&key), MAPS4.conntrack)?
            }
            (Self::V6(map), IpAddr::V6(client), IpAddr::V6(service)) => {
                let key = CtKey6::service(client.octets(), client_port, service.octets(), port);
                lookup(map, &bytes(&key), MAPS6.conntrack)?
            }
            _ => None,
        };
        Ok(value.and_then(|value| CtEntry::read_from_bytes(&value).ok()))
    }
}

impl Family {
    fn found(&self, id: u32) -> Result<Option<(IpAddr, CurrentBackend)>, CiliumError> {
        let (address, state) = (self.backend(id)?, self.state(id)?);
        Ok(address.zip(state).map(|(address, state)| (address, CurrentBackend { id, state })))
    }

    /// Which of `addresses` are anywhere in the backends map, under one of `ports`: an address can be a backend of other
    /// Services too.
    fn among(
        &self,
        addresses: &BTreeSet<IpAddr>,
        ports: &BTreeSet<u16>,
    ) -> Result<BTreeMap<IpAddr, CurrentBackend>, CiliumError> {
        match self {
            Self::V4 { backends, .. } => walk(backends, MAPS4.backends, addresses, ports, |value| {
                Backend4::read_from_bytes(value).ok().map(|b| (b.address.into(), b.port, b.state))
            }),
            Self::V6 { backends, .. } => walk(backends, MAPS6.backends, addresses, ports, |value| {
                Backend6::read_from_bytes(value).ok().map(|b| (b.address.into(), b.port, b.state))
            }),
        }
    }
}

/// A walk starts anew when the element it stands on is deleted, so it is bounded.
fn walk<V: aya::Pod>(
    map: &HashMap<MapData, u32, V>,
    name: &'static str,
    addresses: &BTreeSet<IpAddr>,
    ports: &BTreeSet<u16>,
    read: impl Fn(&V) -> Option<(IpAddr, [u8; 2], u8)>,
) -> Result<BTreeMap<IpAddr, CurrentBackend>, CiliumError> {
    let mut found = BTreeMap::new();
    for entry in map.iter().take(BACKENDS) {
        let (id, value) = match entry {
            Ok(entry) => entry,
            Err(MapError::KeyNotFound) => continue,
            Err(source) => return Err(CiliumError::Read { map: name, source }),
        };
        let Some((address, port, state)) = read(&value) else { continue };
        if addresses.contains(&address) && ports.contains(&u16::from_be_bytes(port)) {
            found.insert(address, CurrentBackend { id, state });
        }
        if found.len() == addresses.len() {
            break;
        }
    }
    Ok(found)
}

/// Cilium's name of a backend's state.
#[must_use]
pub fn state_name(state: u8) -> &'static str {
    match state {
        BACKEND_ACTIVE => "ACTIVE",
        BACKEND_TERMINATING => "TERMINATING",
        BACKEND_QUARANTINED => "QUARANTINED",
        BACKEND_MAINTENANCE => "MAINTENANCE",
        _ => "in a state that is not known",
    }
}
