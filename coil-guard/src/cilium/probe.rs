//! How this Cilium treats the guarded services, as far as its maps tell. For the preflight: it walks the whole conntrack
//! map.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    path::Path,
};

use aya::maps::{HashMap, MapData};
use coil_guard_common::cilium::{
    AFFINITY_MATCH, BACKEND_TERMINATING, CT_SERVICE, CtKey4, CtKey6, PROTO_UDP, SERVICE_FLAG_AFFINITY,
};
use zerocopy::FromBytes as _;

use super::{
    CiliumError, CiliumMaps, Role,
    view::{Family, families, open, typed},
};
use crate::plan::ServiceAddress;

/// Elements of the conntrack map looked at, at most: its largest size with Cilium's own limits is 16 Mi.
const BOUND: usize = 1 << 24;
/// Slots looked at behind the selectable ones.
const SLOT_BOUND: u16 = 8192;

/// What happens to a backend's affinity match when it begins to leave.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AffinityMatch {
    /// It stays: a new outer tuple of a client is sent back to the leaving backend (Cilium up to 1.17).
    Kept,
    /// It goes (Cilium 1.18 and later).
    Dropped,
    /// There is no leaving backend of a service with affinity to tell it by.
    #[default]
    Unknown,
}

/// A service in Cilium's maps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ServiceProbe {
    /// Whether Cilium knows it.
    pub known: bool,
    /// Whether it has ClientIP affinity.
    pub affinity: bool,
    /// Number of service entries of clients on this node. Without one there is nothing to guard by: either no client has
    /// sent anything yet, or sockets are balanced and not packets.
    pub entries: usize,
}

/// How this Cilium treats the guarded services.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Probe {
    /// By service.
    pub services: BTreeMap<ServiceAddress, ServiceProbe>,
    /// Over all services.
    pub affinity_match: AffinityMatch,
}

/// Looks at `services` in the maps pinned in `directory`.
///
/// # Errors
///
/// When the maps are missing, have another layout or cannot be read.
pub fn probe(directory: &Path, services: &BTreeSet<ServiceAddress>) -> Result<Probe, CiliumError> {
    let mut probe = Probe::default();
    let families = families(CiliumMaps::open(directory)?)?;
    let matches = affinity_matches(directory)?;
    for service in services {
        let mut found = ServiceProbe::default();
        if let Some(family) = families.get(&service.address.is_ipv6())
            && let Some(master) = family.master(*service)?
        {
            found.known = true;
            found.affinity = master.service.flags & SERVICE_FLAG_AFFINITY != 0;
            if found.affinity && probe.affinity_match != AffinityMatch::Kept {
                let mut seen =
                    leaving_matches(family, *service, master.proto, master.service.rev_nat_index, &matches)?;
                // Keys without a protocol are from versions up to 1.16, of which it is known.
                if seen == AffinityMatch::Unknown && master.proto == 0 {
                    seen = AffinityMatch::Kept;
                }
                if seen != AffinityMatch::Unknown {
                    probe.affinity_match = seen;
                }
            }
        }
        probe.services.insert(*service, found);
    }
    count_entries(CiliumMaps::open(directory)?, &mut probe.services)?;
    Ok(probe)
}

/// Backend ids by the service's reverse NAT index.
type Matches = BTreeSet<([u8; 2], u32)>;

fn affinity_matches(directory: &Path) -> Result<Matches, CiliumError> {
    let found =
        CiliumMaps::open(directory)?.maps.into_iter().find(|open| open.spec.role == Role::AffinityMatch);
    let Some(map) = found.map(typed).transpose()?.flatten() else { return Ok(Matches::new()) };
    let failed = |source| CiliumError::Read { map: AFFINITY_MATCH, source };
    let map: HashMap<_, [u8; 8], u8> = open(map)?;
    map.keys()
        .take(BOUND)
        .map(|key| {
            key.map(|[a, b, c, d, e, f, ..]| ([e, f], u32::from_ne_bytes([a, b, c, d]))).map_err(failed)
        })
        .collect()
}

fn leaving_matches(
    family: &Family,
    service: ServiceAddress,
    proto: u8,
    rev_nat_index: [u8; 2],
    matches: &Matches,
) -> Result<AffinityMatch, CiliumError> {
    // A backend that is not ready keeps its match from 1.19 on, whatever a terminating one does.
    let is_leaving = |id| family.state(id).map(|state| state == Some(BACKEND_TERMINATING));
    for (index, id) in matches {
        if *index == rev_nat_index && is_leaving(*id)? {
            return Ok(AffinityMatch::Kept);
        }
    }
    for slot in 1..=SLOT_BOUND {
        let Some(entry) = family.service(service, slot, proto)? else { break };
        if is_leaving(entry.word)? {
            return Ok(AffinityMatch::Dropped);
        }
    }
    Ok(AffinityMatch::Unknown)
}

fn count_entries(
    maps: CiliumMaps,
    services: &mut BTreeMap<ServiceAddress, ServiceProbe>,
) -> Result<(), CiliumError> {
    for conntrack in maps.maps.into_iter().filter(|open| open.spec.role == Role::Conntrack) {
        let (name, ipv6) = (conntrack.spec.pin_name, conntrack.spec.ipv6);
        let Some(map) = typed(conntrack)? else { continue };
        if ipv6 {
            let map: HashMap<MapData, [u8; 38], [u8; 56]> = open(map)?;
            let keys = map.keys().map(|key| key.map(|key| CtKey6::read_from_bytes(&key).ok()));
            count(keys, name, services, |key| {
                (key.flags == CT_SERVICE && key.nexthdr == PROTO_UDP).then(|| (key.daddr.into(), key.sport))
            })?;
        } else {
            let map: HashMap<MapData, [u8; 14], [u8; 56]> = open(map)?;
            let keys = map.keys().map(|key| key.map(|key| CtKey4::read_from_bytes(&key).ok()));
            count(keys, name, services, |key| {
                (key.flags == CT_SERVICE && key.nexthdr == PROTO_UDP).then(|| (key.daddr.into(), key.sport))
            })?;
        }
    }
    Ok(())
}

fn count<K>(
    keys: impl Iterator<Item = Result<Option<K>, aya::maps::MapError>>,
    map: &'static str,
    services: &mut BTreeMap<ServiceAddress, ServiceProbe>,
    service: impl Fn(&K) -> Option<(IpAddr, [u8; 2])>,
) -> Result<(), CiliumError> {
    for key in keys.take(BOUND) {
        let key = key.map_err(|source| CiliumError::Read { map, source })?;
        let Some((address, port)) = key.as_ref().and_then(&service) else { continue };
        let address = ServiceAddress { address, port: u16::from_be_bytes(port) };
        if let Some(found) = services.get_mut(&address) {
            found.entries += 1;
        }
    }
    Ok(())
}
