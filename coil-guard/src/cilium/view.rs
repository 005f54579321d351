//! What Cilium's maps hold of the guarded services.
//!
//! Cilium's agent changes the maps while they are walked. A walk therefore errs on one side: an address that was seen at any
//! time of the walk counts as held, which only makes a mark live longer.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use aya::maps::{HashMap, IterableMap as _, Map, MapData, MapError};
use coil_guard_common::cilium::{
    Backend4, Backend6, MAPS4, MAPS6, PROTO_UDP, Service, ServiceKey4, ServiceKey6,
};
use zerocopy::{FromBytes, IntoBytes};

use super::{CiliumError, CiliumMaps, OpenMap};
use crate::{
    datapath::sys::elements,
    plan::{CiliumView, ServiceAddress},
};

/// A service's master is read again after its slots; if it changed in between they are walked once more, so often at most.
const WALKS: usize = 3;
/// Slots looked at behind the last one that the master announces: versions before 1.17 do not say how many there are.
const SLOT_BOUND: u16 = 8192;

/// The open maps of one family.
pub(super) enum Family {
    V4 { services: HashMap<MapData, [u8; 12], [u8; 12]>, backends: HashMap<MapData, u32, [u8; 12]> },
    V6 { services: HashMap<MapData, [u8; 24], [u8; 12]>, backends: HashMap<MapData, u32, [u8; 24]> },
}

/// A service's master and where it was found.
pub(super) struct Master {
    pub(super) service: Service,
    pub(super) proto: u8,
}

/// Walks the slots of these services in Cilium's maps, and looks whether it has these addresses. Cilium takes a terminating
/// backend out of the slots before it takes it out of the backends map, and flows bound to it live on until then.
///
/// # Errors
///
/// When a map cannot be read.
pub fn view(
    maps: CiliumMaps,
    services: &[ServiceAddress],
    addresses: &BTreeSet<IpAddr>,
) -> Result<CiliumView, CiliumError> {
    let mut view = CiliumView { forgotten: addresses.clone(), ..CiliumView::default() };
    for (v6, family) in families(maps)? {
        for address in services.iter().filter(|service| service.address.is_ipv6() == v6) {
            if let Some(backends) = family.walk(*address)? {
                view.forgotten.retain(|address| !backends.contains_key(address));
                view.slots.insert(*address, backends.into_keys().collect());
            }
        }
        let unplaced: BTreeSet<_> = view.forgotten.iter().copied().filter(|ip| ip.is_ipv6() == v6).collect();
        if !unplaced.is_empty() {
            let held = family.backends_among(&unplaced)?;
            view.forgotten.retain(|address| !held.contains(address));
        }
    }
    Ok(view)
}

pub(super) fn families(maps: CiliumMaps) -> Result<BTreeMap<bool, Family>, CiliumError> {
    let mut families = BTreeMap::new();
    let mut maps = maps.maps.into_iter();
    while let (Some(conntrack), Some(services), Some(backends), Some(_affinity)) =
        (maps.next(), maps.next(), maps.next(), maps.next())
    {
        let ipv6 = conntrack.spec.ipv6;
        let family = match (typed(services)?, typed(backends)?) {
            (Some(services), Some(backends)) if ipv6 => {
                Family::V6 { services: open(services)?, backends: open(backends)? }
            }
            (Some(services), Some(backends)) => {
                Family::V4 { services: open(services)?, backends: open(backends)? }
            }
            _ => continue,
        };
        families.insert(ipv6, family);
    }
    Ok(families)
}

pub(super) type Named = (&'static str, Map);

pub(super) fn typed(open: OpenMap) -> Result<Option<Named>, CiliumError> {
    let map = open.spec.pin_name;
    open.map
        .map(|(data, _)| Map::from_map_data(data).map(|data| (map, data)))
        .transpose()
        .map_err(|source| CiliumError::Read { map, source })
}

pub(super) fn open<M: TryFrom<Map, Error = MapError>>((map, data): Named) -> Result<M, CiliumError> {
    M::try_from(data).map_err(|source| CiliumError::Read { map, source })
}

impl Family {
    /// Backends in the service's slots with their ids, or `None` if Cilium does not know the service.
    pub(super) fn walk(&self, address: ServiceAddress) -> Result<Option<BTreeMap<IpAddr, u32>>, CiliumError> {
        let mut seen = None;
        for _ in 0..WALKS {
            let Some(before) = self.master(address)? else { return Ok(seen) };
            let seen = seen.get_or_insert_with(BTreeMap::new);
            let announced = before.service.count.saturating_add(before.service.qcount).min(SLOT_BOUND);
            for slot in 1..=SLOT_BOUND {
                match self.service(address, slot, before.proto)? {
                    Some(entry) => {
                        seen.extend(self.backend(entry.word)?.map(|address| (address, entry.word)));
                    }
                    None if slot > announced => break,
                    None => {}
                }
            }
            if self.master(address)?.is_some_and(|after| after.service == before.service) {
                break;
            }
        }
        Ok(seen)
    }

    pub(super) fn master(&self, address: ServiceAddress) -> Result<Option<Master>, CiliumError> {
        for proto in [PROTO_UDP, 0] {
            if let Some(service) = self.service(address, 0, proto)? {
                return Ok(Some(Master { service, proto }));
            }
        }
        Ok(None)
    }

    pub(super) fn service(
        &self,
        address: ServiceAddress,
        slot: u16,
        proto: u8,
    ) -> Result<Option<Service>, CiliumError> {
        let dport = address.port.to_be_bytes();
        let value = match (self, address.address) {
            (Self::V4 { services, .. }, IpAddr::V4(ip)) => {
                let key = ServiceKey4 {
                    address: ip.octets(),
                    dport,
                    backend_slot: slot,
                    proto,
                    scope: 0,
                    pad: [0; 2],
                };
                lookup(services, &bytes(&key), MAPS4.services)?
            }
            (Self::V6 { services, .. }, IpAddr::V6(ip)) => {
                let key = ServiceKey6 {
                    address: ip.octets(),
                    dport,
                    backend_slot: slot,
                    proto,
                    scope: 0,
                    pad: [0; 2],
                };
                lookup(services, &bytes(&key), MAPS6.services)?
            }
            _ => None,
        };
        Ok(value.and_then(|value| Service::read_from_bytes(&value).ok()))
    }

    pub(super) fn backend(&self, id: u32) -> Result<Option<IpAddr>, CiliumError> {
        Ok(match self {
            Self::V4 { backends, .. } => lookup(backends, &id, MAPS4.backends)?.and_then(|v| address4(&v)),
            Self::V6 { backends, .. } => lookup(backends, &id, MAPS6.backends)?.and_then(|v| address6(&v)),
        })
    }

    /// State byte of a backend.
    pub(super) fn state(&self, id: u32) -> Result<Option<u8>, CiliumError> {
        Ok(match self {
            Self::V4 { backends, .. } => lookup(backends, &id, MAPS4.backends)?.map(|value| value[7]),
            Self::V6 { backends, .. } => lookup(backends, &id, MAPS6.backends)?.map(|value| value[19]),
        })
    }

    /// Which of `addresses` are anywhere in the backends map.
    fn backends_among(&self, addresses: &BTreeSet<IpAddr>) -> Result<BTreeSet<IpAddr>, CiliumError> {
        match self {
            Self::V4 { backends, .. } => among(backends, addresses, address4, MAPS4.backends),
            Self::V6 { backends, .. } => among(backends, addresses, address6, MAPS6.backends),
        }
    }
}

pub(super) fn bytes<const N: usize>(value: &(impl IntoBytes + zerocopy::Immutable)) -> [u8; N] {
    let mut bytes = [0; N];
    bytes.copy_from_slice(value.as_bytes());
    bytes
}

pub(super) fn address4(value: &[u8; 12]) -> Option<IpAddr> {
    Backend4::read_from_bytes(value).ok().map(|backend| IpAddr::from(backend.address))
}

pub(super) fn address6(value: &[u8; 24]) -> Option<IpAddr> {
    Backend6::read_from_bytes(value).ok().map(|backend| IpAddr::from(backend.address))
}

pub(super) fn lookup<K: aya::Pod, V: aya::Pod>(
    map: &HashMap<MapData, K, V>,
    key: &K,
    name: &'static str,
) -> Result<Option<V>, CiliumError> {
    match map.get(key, 0) {
        Ok(value) => Ok(Some(value)),
        Err(MapError::KeyNotFound) => Ok(None),
        Err(source) => Err(CiliumError::Read { map: name, source }),
    }
}

/// Reads the whole map: some calls, and no walk that begins anew when the element that it stands on is deleted.
fn among<V: aya::Pod>(
    map: &HashMap<MapData, u32, V>,
    wanted: &BTreeSet<IpAddr>,
    address: fn(&V) -> Option<IpAddr>,
    name: &'static str,
) -> Result<BTreeSet<IpAddr>, CiliumError> {
    let mut found = BTreeSet::new();
    elements(map.map(), |_: &u32, value| {
        found.extend(address(value).filter(|address| wanted.contains(address)));
    })
    .map_err(|source| CiliumError::Read { map: name, source })?;
    Ok(found)
}
