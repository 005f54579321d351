//! Opening and checking the maps.

use std::{
    io,
    path::{Path, PathBuf},
};

use aya::maps::{MapData, MapError, MapInfo, MapType};
use coil_guard_common::cilium::{
    AFFINITY_MATCH, Affinity, AffinityKey4, AffinityKey6, AffinityMatchKey, Backend4, Backend6, CtEntry,
    CtKey4, CtKey6, MAPS4, MAPS6, MapNames, Service, ServiceKey4, ServiceKey6,
};

use super::{CiliumError, MapShape};
use crate::datapath::sys::open_read_only;

/// What a map is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Conntrack of everything but TCP.
    Conntrack,
    /// Services and slots.
    Services,
    /// Backends by id.
    Backends,
    /// Session affinity. A working Cilium may lack it.
    Affinity,
    /// Backends that affinity may choose, of both families. A working Cilium may lack it.
    AffinityMatch,
}

/// One of the maps of Cilium's that the program declares.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MapSpec {
    /// Name in the program's object.
    pub object_name: &'static str,
    /// File name of Cilium's pin.
    pub pin_name: &'static str,
    /// What it is for.
    pub role: Role,
    /// Whether it is of the IPv6 family; not where it is of both.
    pub ipv6: bool,
    /// Its type.
    pub kind: MapType,
    /// Bytes of a key.
    pub key_size: u32,
    /// Bytes of a value.
    pub value_size: u32,
}

const fn family<Ct, Sk, B, Ak>(names: MapNames, objects: [&'static str; 4], ipv6: bool) -> [MapSpec; 4] {
    const fn spec(
        object_name: &'static str,
        pin_name: &'static str,
        role: Role,
        ipv6: bool,
        kind: MapType,
        key_size: usize,
        value_size: usize,
    ) -> MapSpec {
        MapSpec {
            object_name,
            pin_name,
            role,
            ipv6,
            kind,
            key_size: key_size as u32,
            value_size: value_size as u32,
        }
    }
    let [conntrack, services, backends, affinity] = objects;
    [
        spec(
            conntrack,
            names.conntrack,
            Role::Conntrack,
            ipv6,
            MapType::LruHash,
            size_of::<Ct>(),
            size_of::<CtEntry>(),
        ),
        spec(
            services,
            names.services,
            Role::Services,
            ipv6,
            MapType::Hash,
            size_of::<Sk>(),
            size_of::<Service>(),
        ),
        spec(backends, names.backends, Role::Backends, ipv6, MapType::Hash, size_of::<u32>(), size_of::<B>()),
        spec(
            affinity,
            names.affinity,
            Role::Affinity,
            ipv6,
            MapType::LruHash,
            size_of::<Ak>(),
            size_of::<Affinity>(),
        ),
    ]
}

/// The IPv4 maps, in the order conntrack, services, backends, affinity.
pub const SPECS4: [MapSpec; 4] = family::<CtKey4, ServiceKey4, Backend4, AffinityKey4>(
    MAPS4,
    ["CT4", "SERVICES4", "BACKENDS4", "AFFINITY4"],
    false,
);
/// The IPv6 maps, in the same order.
pub const SPECS6: [MapSpec; 4] = family::<CtKey6, ServiceKey6, Backend6, AffinityKey6>(
    MAPS6,
    ["CT6", "SERVICES6", "BACKENDS6", "AFFINITY6"],
    true,
);

/// The map of both families.
pub const SPEC_MATCH: MapSpec = MapSpec {
    object_name: "AFFINITY_MATCH",
    pin_name: AFFINITY_MATCH,
    role: Role::AffinityMatch,
    ipv6: false,
    kind: MapType::Hash,
    key_size: size_of::<AffinityMatchKey>() as u32,
    value_size: 1,
};

/// All of them, in the order of [`CiliumMaps::maps`].
pub fn specs() -> impl Iterator<Item = &'static MapSpec> {
    SPECS4.iter().chain(&SPECS6).chain([&SPEC_MATCH])
}

/// A map of Cilium's, if it has it.
#[derive(Debug)]
pub struct OpenMap {
    /// Which.
    pub spec: MapSpec,
    /// The open map and its kernel id; `None` where the program gets an empty stand-in.
    pub map: Option<(MapData, u32)>,
}

/// Cilium's maps, opened and checked.
#[derive(Debug)]
pub struct CiliumMaps {
    /// IPv4 maps, then IPv6 maps, in the order of [`SPECS4`] and [`SPECS6`], then [`SPEC_MATCH`].
    pub maps: Vec<OpenMap>,
}

impl CiliumMaps {
    /// Opens the maps pinned in `directory`. A family whose conntrack, service or backend map is absent is left out
    /// as a whole, and absent maps about affinity by themselves; one whole family must be there.
    ///
    /// # Errors
    ///
    /// When no family is there, or a map that is there has another type or other sizes than known. Flags and
    /// `max_entries` do not matter.
    pub fn open(directory: &Path) -> Result<Self, CiliumError> {
        let mut maps = Vec::with_capacity(9);
        let mut usable = false;
        let mut first_missing = None;
        let mut first_present = None;
        for specs in [&SPECS4, &SPECS6] {
            let mut opened = Vec::with_capacity(4);
            for spec in specs {
                opened.push(OpenMap { spec: *spec, map: open_checked(directory, spec)? });
            }
            for open in &opened {
                let path = directory.join(open.spec.pin_name);
                match &open.map {
                    Some(_) => first_present = first_present.or(Some(path)),
                    None if open.spec.role == Role::Backends => {
                        refuse_old_backends(directory, &open.spec)?;
                        first_missing = first_missing.or(Some(path));
                    }
                    None if open.spec.role != Role::Affinity => first_missing = first_missing.or(Some(path)),
                    None => {}
                }
            }
            if opened.iter().all(|open| open.map.is_some() || open.spec.role == Role::Affinity) {
                usable = true;
            } else {
                opened.iter_mut().for_each(|open| open.map = None);
            }
            maps.extend(opened);
        }
        maps.push(OpenMap { spec: SPEC_MATCH, map: open_checked(directory, &SPEC_MATCH)? });
        if usable {
            return Ok(Self { maps });
        }
        let missing = first_missing.unwrap_or_else(|| directory.join(MAPS4.conntrack));
        Err(match first_present {
            Some(present) => CiliumError::Incomplete { missing, present },
            None => CiliumError::Missing { path: missing, directory: directory.to_owned() },
        })
    }

    /// Kernel ids in the order of [`Self::maps`].
    #[must_use]
    pub fn ids(&self) -> Vec<Option<u32>> {
        self.maps.iter().map(|open| open.map.as_ref().map(|(_, id)| *id)).collect()
    }
}

fn open_checked(directory: &Path, spec: &MapSpec) -> Result<Option<(MapData, u32)>, CiliumError> {
    let path = directory.join(spec.pin_name);
    // The agent never writes to them, so its descriptors cannot.
    let fd = match open_read_only(&path) {
        Ok(Some(fd)) => fd,
        Ok(None) => return Ok(None),
        Err(error) => return Err(CiliumError::Open { path, source: MapError::IoError(error) }),
    };
    let (map, info) = match MapData::from_fd(fd).and_then(|map| map.info().map(|info| (map, info))) {
        Ok(opened) => opened,
        Err(source) => return Err(CiliumError::Open { path, source }),
    };
    let found = shape_of(&info);
    let expected =
        MapShape { kind: format!("{:?}", spec.kind), key_size: spec.key_size, value_size: spec.value_size };
    if found == expected {
        Ok(Some((map, info.id())))
    } else {
        Err(CiliumError::Layout { path, found, expected })
    }
}

/// Cilium before 1.14 has backends under another name with a shorter value, and nothing under the one we know.
fn refuse_old_backends(directory: &Path, spec: &MapSpec) -> Result<(), CiliumError> {
    let old = old_backends(directory, spec);
    if old.exists() {
        return Err(CiliumError::TooOld { found: old, expected: directory.join(spec.pin_name) });
    }
    Ok(())
}

fn old_backends(directory: &Path, spec: &MapSpec) -> PathBuf {
    directory.join(spec.pin_name.replace("_v3", "_v2"))
}

/// Type and sizes of a map.
pub(crate) fn shape_of(info: &MapInfo) -> MapShape {
    MapShape {
        kind: info.map_type().map_or_else(|_| "unknown".to_owned(), |kind| format!("{kind:?}")),
        key_size: info.key_size(),
        value_size: info.value_size(),
    }
}

/// Whether the pin does not exist.
pub(crate) fn is_not_found(error: &MapError) -> bool {
    matches!(error, MapError::SyscallError(error) if error.io_error.kind() == io::ErrorKind::NotFound)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_those_of_the_known_versions() {
        let sizes = |specs: &[MapSpec; 4]| specs.map(|spec| (spec.key_size, spec.value_size));
        assert_eq!(sizes(&SPECS4), [(14, 56), (12, 12), (4, 12), (16, 16)]);
        assert_eq!(sizes(&SPECS6), [(38, 56), (24, 12), (4, 24), (24, 16)]);
    }

    #[test]
    fn old_backends_have_the_same_name_but_for_the_version() {
        assert_eq!(old_backends(Path::new("/x"), &SPECS6[2]), Path::new("/x/cilium_lb6_backends_v2"));
    }

    #[test]
    fn an_empty_directory_is_missing_maps_and_names_the_directory() {
        let directory = tempfile::tempdir().unwrap();
        let error = CiliumMaps::open(directory.path()).unwrap_err();
        assert!(error.is_missing(), "{error}");
        assert!(error.to_string().contains(&directory.path().display().to_string()), "{error}");
    }
}
