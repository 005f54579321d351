//! What the agent remembers over its own death, in two maps of which the program knows nothing.

use std::{collections::BTreeMap, net::IpAddr};

use aya::maps::{HashMap, Map, MapData, MapError};
use coil_guard_common::abi;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::{
    Attachment, DatapathError, PodSnapshot,
    cores::Core,
    own_maps::map_error,
    part::Key,
    report::{from_mapped, to_mapped},
};
use crate::{clock::Monotonic, plan::EgressName};

/// Egress name → index into `EGRESS_COUNTERS`.
pub(crate) const EGRESSES: &str = "EGRESSES";
/// Name of a part of a pod ([`Key::name`]) → [`PodRecord`].
pub(crate) const PODS: &str = "PODS";

/// `namespace/name` of a Kubernetes object, zero-padded. The longest is 63 + 1 + 253 bytes.
pub(crate) type EgressKey = [u8; 320];
/// A pod UID and the name of a part, zero-padded.
pub(crate) type PodKey = [u8; 64];

/// [`PodRecord::flags`]: the clsact qdisc is ours.
const QDISC_ADDED: u8 = 1;
/// [`PodRecord::flags`]: the pod's ephemeral ports overlap the drain ports.
const PORTS_OVERLAP: u8 = 2;

/// An attachment as it is stored.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub(crate) struct PodRecord {
    guarded_since: u64,
    namespace: u64,
    stub: u64,
    program_id: u32,
    interface_index: u32,
    attachment: u8,
    flags: u8,
    core: u8,
    pad: [u8; 5],
    address4: [u8; 16],
    address6: [u8; 16],
    name: EgressKey,
}

// SAFETY: repr(C), made of integers only, and IntoBytes proves that there is no padding.
unsafe impl aya::Pod for PodRecord {}

/// An attachment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Attached {
    /// `namespace/name` of the pod.
    pub(crate) name: String,
    pub(crate) attachment: Attachment,
    /// Inode of the network namespace.
    pub(crate) namespace: u64,
    pub(crate) interface_index: u32,
    pub(crate) program_id: u32,
    pub(crate) guarded_since: Monotonic,
    pub(crate) qdisc_added: bool,
    pub(crate) ports_overlap: bool,
    /// As the program knows them.
    pub(crate) addresses: Vec<IpAddr>,
    /// The core that its packets get.
    pub(crate) core: Core,
    /// Fingerprint of the stub that is attached; 0 for none or an unknown one.
    pub(crate) stub: u64,
}

impl From<&Attached> for PodRecord {
    fn from(attached: &Attached) -> Self {
        let address =
            |v6| attached.addresses.iter().find(|ip| ip.is_ipv6() == v6).map_or([0; 16], |ip| to_mapped(*ip));
        Self {
            guarded_since: attached.guarded_since.0,
            namespace: attached.namespace,
            stub: attached.stub,
            program_id: attached.program_id,
            interface_index: attached.interface_index,
            attachment: match attached.attachment {
                Attachment::Tcx => 1,
                Attachment::Clsact => 2,
            },
            flags: if attached.qdisc_added { QDISC_ADDED } else { 0 }
                | if attached.ports_overlap { PORTS_OVERLAP } else { 0 },
            core: attached.core.slot(),
            pad: [0; 5],
            address4: address(false),
            address6: address(true),
            name: padded(&attached.name),
        }
    }
}

impl From<&PodRecord> for Attached {
    fn from(record: &PodRecord) -> Self {
        Self {
            name: unpadded(&record.name),
            attachment: if record.attachment == 2 { Attachment::Clsact } else { Attachment::Tcx },
            namespace: record.namespace,
            interface_index: record.interface_index,
            program_id: record.program_id,
            guarded_since: Monotonic(record.guarded_since),
            qdisc_added: record.flags & QDISC_ADDED != 0,
            ports_overlap: record.flags & PORTS_OVERLAP != 0,
            addresses: [record.address4, record.address6]
                .into_iter()
                .filter(|address| *address != [0; 16])
                .map(from_mapped)
                .collect(),
            core: Core::at(record.core),
            stub: record.stub,
        }
    }
}

impl From<&Attached> for PodSnapshot {
    fn from(attached: &Attached) -> Self {
        Self {
            name: attached.name.clone(),
            addresses: attached.addresses.clone(),
            attachment: attached.attachment,
            interface_index: attached.interface_index,
            guarded_since: attached.guarded_since,
            program_id: attached.program_id,
            core: attached.core.label(),
            ports_overlap: attached.ports_overlap,
        }
    }
}

fn padded<const N: usize>(text: &str) -> [u8; N] {
    let mut key = [0; N];
    let length = text.len().min(N);
    key[..length].copy_from_slice(&text.as_bytes()[..length]);
    key
}

fn unpadded(key: &[u8]) -> String {
    let length = key.iter().position(|byte| *byte == 0).unwrap_or(key.len());
    String::from_utf8_lossy(&key[..length]).into_owned()
}

/// Longest UID that is taken. With the name of a part behind it, it fits a record's key. Those of Kubernetes have 36 bytes.
const LONGEST_UID: usize = 48;

/// Whether the UID can be a pin's file name and a record's key.
pub(crate) fn is_valid_uid(uid: &str) -> bool {
    (1..=LONGEST_UID).contains(&uid.len())
        && uid.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
}

/// Differs between pods with high probability (FNV-1a of the UID).
pub(crate) fn generation(uid: &str) -> u32 {
    uid.bytes().fold(0x811c_9dc5, |hash: u32, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193))
}

/// Attachments by pod.
#[derive(Debug)]
pub(crate) struct Pods {
    map: HashMap<MapData, PodKey, PodRecord>,
    size: u32,
}

impl Pods {
    pub(crate) fn new(map: MapData) -> Result<Self, DatapathError> {
        let size = map.info().map_err(map_error("inspect", PODS))?.max_entries();
        Ok(Self { map: typed(map, PODS)?, size })
    }

    /// A record of a part that a later version knows is none.
    pub(crate) fn load(&self) -> Result<BTreeMap<Key, Attached>, DatapathError> {
        self.map
            .iter()
            .filter_map(|entry| {
                entry
                    .map(|(name, record)| Some((Key::parse(&unpadded(&name))?, Attached::from(&record))))
                    .transpose()
            })
            .collect::<Result<_, _>>()
            .map_err(map_error("read", PODS))
    }

    pub(crate) fn store(&mut self, key: &Key, attached: &Attached) -> Result<(), DatapathError> {
        self.map.insert(padded::<64>(&key.name()), PodRecord::from(attached), 0).map_err(|error| {
            let what = || format!("pod {} ({}, {})", attached.name, key.uid, key.part.label());
            full_or(error, PODS, self.size, what, "--map-pods")
        })
    }

    pub(crate) fn remove(&mut self, key: &Key) -> Result<(), DatapathError> {
        match self.map.remove(&padded(&key.name())) {
            Err(error) if !is_absent(&error) => Err(map_error("remove from", PODS)(error)),
            _ => Ok(()),
        }
    }
}

/// Indexes of Egresses. An index outlives its Egress, so that one that is switched off and on again goes on with its
/// counters; it is given to another one only when there are no fresh ones left.
#[derive(Debug)]
pub(crate) struct Egresses {
    map: HashMap<MapData, EgressKey, u32>,
    by_name: BTreeMap<EgressName, u32>,
    size: u32,
}

/// An index, and whether its counters must be cleared first because another Egress had it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Index {
    pub(crate) index: u32,
    pub(crate) reused: bool,
}

impl Egresses {
    pub(crate) fn new(map: MapData) -> Result<Self, DatapathError> {
        let size = map.info().map_err(map_error("inspect", EGRESSES))?.max_entries();
        let map: HashMap<_, EgressKey, u32> = typed(map, EGRESSES)?;
        let mut by_name = BTreeMap::new();
        for entry in &map {
            let (key, index) = entry.map_err(map_error("read", EGRESSES))?;
            by_name.extend(name_of(&key).map(|name| (name, index)));
        }
        Ok(Self { map, by_name, size })
    }

    pub(crate) fn names(&self) -> &BTreeMap<EgressName, u32> {
        &self.by_name
    }

    /// The index of `name`, given to it now if it has none. `in_use` says which others must keep theirs.
    pub(crate) fn index(
        &mut self,
        name: &EgressName,
        in_use: impl Fn(&EgressName) -> bool,
    ) -> Result<Index, DatapathError> {
        if let Some(index) = self.by_name.get(name) {
            return Ok(Index { index: *index, reused: false });
        }
        let (index, replaced) =
            choose(&self.by_name, self.size, in_use).ok_or_else(|| DatapathError::Full {
                map: EGRESSES,
                max_entries: self.size,
                what: format!("the counters of Egress {name}"),
                flag: "--map-egresses",
            })?;
        if let Some(old) = &replaced {
            self.map.remove(&padded(&old.to_string())).map_err(map_error("remove from", EGRESSES))?;
            self.by_name.remove(old);
        }
        self.map
            .insert(padded::<320>(&name.to_string()), index, 0)
            .map_err(map_error("write to", EGRESSES))?;
        self.by_name.insert(name.clone(), index);
        Ok(Index { index, reused: replaced.is_some() })
    }
}

fn choose(
    taken: &BTreeMap<EgressName, u32>,
    size: u32,
    in_use: impl Fn(&EgressName) -> bool,
) -> Option<(u32, Option<EgressName>)> {
    let indexes: std::collections::BTreeSet<_> = taken.values().copied().collect();
    if let Some(fresh) = (0..size).find(|index| !indexes.contains(index)) {
        return Some((fresh, None));
    }
    taken.iter().find(|(name, _)| !in_use(name)).map(|(name, index)| (*index, Some(name.clone())))
}

fn name_of(key: &[u8]) -> Option<EgressName> {
    let text = unpadded(key);
    let (namespace, name) = text.split_once('/')?;
    Some(EgressName { namespace: namespace.into(), name: name.into() })
}

pub(crate) fn typed<M: TryFrom<Map, Error = MapError>>(
    map: MapData,
    name: &'static str,
) -> Result<M, DatapathError> {
    Map::from_map_data(map).and_then(M::try_from).map_err(map_error("open", name))
}

/// Turns "no room" (E2BIG) into an error that names the flag.
pub(crate) fn full_or(
    error: MapError,
    map: &'static str,
    max_entries: u32,
    what: impl FnOnce() -> String,
    flag: &'static str,
) -> DatapathError {
    match &error {
        MapError::SyscallError(call) if call.io_error.raw_os_error() == Some(libc::E2BIG) => {
            DatapathError::Full { map, max_entries, what: what(), flag }
        }
        _ => map_error("write to", map)(error),
    }
}

/// Whether the element was not there.
pub(crate) fn is_absent(error: &MapError) -> bool {
    match error {
        MapError::KeyNotFound | MapError::ElementNotFound => true,
        MapError::SyscallError(call) => call.io_error.kind() == std::io::ErrorKind::NotFound,
        _ => false,
    }
}

/// Constants of a pod's stub.
pub(crate) fn pod_config(
    uid: &str,
    attached: &Attached,
    fou_port: u16,
    unmarked_drain: std::time::Duration,
) -> abi::PodConfig {
    let mut config = abi::PodConfig {
        address6: [0; 16],
        address4: [0; 4],
        flags: if attached.ports_overlap { abi::POD_PORTS_OVERLAP } else { 0 },
        guarded_since: attached.guarded_since.0,
        generation: generation(uid),
        fou_port: fou_port.to_be_bytes(),
        core: attached.core.slot(),
        pad: [0; 1],
        unmarked_drain: u64::try_from(unmarked_drain.as_nanos()).unwrap_or(u64::MAX),
    };
    for address in &attached.addresses {
        match address {
            IpAddr::V4(v4) => {
                config.address4 = v4.octets();
                config.flags |= abi::POD_HAS_IPV4;
            }
            IpAddr::V6(v6) => {
                config.address6 = v6.octets();
                config.flags |= abi::POD_HAS_IPV6;
            }
        }
    }
    config
}

#[cfg(test)]
mod tests {
    use super::*;

    fn egress(name: &str) -> EgressName {
        EgressName { namespace: "internet".into(), name: name.into() }
    }

    #[test]
    fn a_record_survives_storing() {
        let attached = Attached {
            name: "default/client".into(),
            attachment: Attachment::Clsact,
            namespace: 4_026_532_000,
            interface_index: 3,
            program_id: 17,
            guarded_since: Monotonic(42),
            qdisc_added: true,
            ports_overlap: false,
            addresses: vec!["10.0.0.1".parse().unwrap(), "fd00::1".parse().unwrap()],
            core: Core::Guard,
            stub: 7,
        };
        assert_eq!(Attached::from(&PodRecord::from(&attached)), attached);
    }

    #[test]
    fn a_fresh_index_is_preferred_and_one_in_use_is_never_given_away() {
        let taken: BTreeMap<_, _> = [(egress("a"), 0), (egress("b"), 1)].into();
        assert_eq!(choose(&taken, 3, |_| true), Some((2, None)));
        assert_eq!(choose(&taken, 2, |name| *name == egress("a")), Some((1, Some(egress("b")))));
        assert_eq!(choose(&taken, 2, |_| true), None);
    }

    #[test]
    fn uids_that_cannot_be_file_names_are_refused() {
        assert!(is_valid_uid("0b5a0f4e-95d2-4c4e-b2a5-0f2d35b4e1a3"));
        for uid in ["", "..", "a/b", "a.b", &"x".repeat(64)] {
            assert!(!is_valid_uid(uid), "{uid}");
        }
    }
}
