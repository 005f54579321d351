//! Cilium's maps of one node: made and pinned as the agent does, or not quite.

use std::{
    collections::BTreeMap,
    fmt, fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, ensure};
use coil_guard_common::cilium::{
    AFFINITY_MATCH, CtEntry, MAPS4, MAPS6, MapNames, REVERSE_NAT4, REVERSE_NAT6,
};
use zerocopy::FromBytes as _;

use super::{
    raw_map::{Elements, Expect, MapKind, MapShape, NO_PREALLOC, READ_ONLY_FOR_PROGRAMS, RawMap},
    version::CiliumVersion,
};

/// An IP family.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum IpFamily {
    /// IPv4
    V4,
    /// IPv6
    V6,
}

impl IpFamily {
    /// Pin names.
    #[must_use]
    pub const fn names(self) -> &'static MapNames {
        match self {
            Self::V4 => &MAPS4,
            Self::V6 => &MAPS6,
        }
    }

    /// Pin name of the reverse NAT map.
    #[must_use]
    pub const fn reverse_nat(self) -> &'static str {
        match self {
            Self::V4 => REVERSE_NAT4,
            Self::V6 => REVERSE_NAT6,
        }
    }
}

/// Which maps there are, and how large.
#[derive(Clone, Debug)]
pub struct MapOptions {
    /// Flags differ between versions.
    pub version: CiliumVersion,
    /// Families whose maps exist.
    pub families: Vec<IpFamily>,
    /// Whether the affinity and match maps exist (agents up to 1.18 without session affinity have none).
    pub affinity: bool,
    /// No program may write to any of them: the verifier refuses one that would. Cilium's own are not like that.
    pub sealed: bool,
    /// Capacity of the conntrack maps.
    pub conntrack_entries: u32,
    /// Capacity of the others.
    pub service_entries: u32,
}

impl MapOptions {
    /// Everything that an agent of this version makes, for both families.
    #[must_use]
    pub fn new(version: CiliumVersion) -> Self {
        Self {
            version,
            families: vec![IpFamily::V4, IpFamily::V6],
            affinity: true,
            sealed: false,
            conntrack_entries: 65_536,
            service_entries: 65_536,
        }
    }

    /// The maps by pin name.
    #[must_use]
    pub fn shapes(&self) -> BTreeMap<&'static str, MapShape> {
        let read_only = if self.version.read_only_services() { READ_ONLY_FOR_PROGRAMS } else { 0 };
        let hash = |key_size, value_size, flags| MapShape {
            kind: MapKind::Hash,
            key_size,
            value_size,
            max_entries: self.service_entries,
            flags: NO_PREALLOC | flags,
        };
        let lru = |key_size, value_size, max_entries| MapShape {
            kind: MapKind::LruHash,
            key_size,
            value_size,
            max_entries,
            flags: 0,
        };
        let mut shapes = BTreeMap::new();
        for family in &self.families {
            let names = family.names();
            let (tuple, service, backend, address, affinity) = match family {
                IpFamily::V4 => (14, 12, 12, 6, 16),
                IpFamily::V6 => (38, 24, 24, 18, 24),
            };
            shapes.insert(names.conntrack, lru(tuple, 56, self.conntrack_entries));
            shapes.insert(names.services, hash(service, 12, read_only));
            shapes.insert(names.backends, hash(4, backend, 0));
            shapes.insert(family.reverse_nat(), hash(2, address, 0));
            if self.affinity {
                shapes.insert(names.affinity, lru(affinity, 16, self.service_entries));
            }
        }
        if self.affinity {
            shapes.insert(AFFINITY_MATCH, hash(8, 1, read_only));
        }
        if self.sealed {
            shapes.values_mut().for_each(|shape| shape.flags |= READ_ONLY_FOR_PROGRAMS);
        }
        shapes
    }
}

/// Cilium's maps of one node.
///
/// The pins and the maps are apart: a pin can be removed, or replaced by something odd, while the model goes on with the
/// maps that it was loaded with.
#[derive(Debug)]
pub struct CiliumMaps {
    directory: PathBuf,
    options: MapOptions,
    maps: BTreeMap<&'static str, RawMap>,
}

impl CiliumMaps {
    /// Makes the maps and pins them in `directory` (`<bpffs>/tc/globals`), which is created.
    ///
    /// # Errors
    ///
    /// When a map cannot be made or pinned.
    pub fn create(directory: &Path, options: MapOptions) -> Result<Self> {
        fs::create_dir_all(directory).with_context(|| format!("cannot create {}", directory.display()))?;
        let mut maps = Self { directory: directory.to_owned(), options, maps: BTreeMap::new() };
        maps.recreate_all(maps.options.clone())?;
        Ok(maps)
    }

    /// Makes all maps anew, empty and under other ids, as an agent does whose options changed. The old ones live as
    /// long as a program uses them: load the model anew.
    ///
    /// # Errors
    ///
    /// When a map cannot be made or pinned.
    pub fn recreate_all(&mut self, options: MapOptions) -> Result<()> {
        let old: Vec<_> = self.maps.keys().copied().collect();
        for name in old {
            self.unpin(name)?;
        }
        self.maps.clear();
        for (name, shape) in options.shapes() {
            let map = RawMap::create(name, shape)?;
            map.pin(&self.path(name))?;
            self.maps.insert(name, map);
        }
        self.options = options;
        Ok(())
    }

    /// Makes one map anew in another shape, with the elements that fit, and pins it: an agent with other sizes.
    ///
    /// # Errors
    ///
    /// When it cannot be made, pinned or filled.
    pub fn recreate(&mut self, name: &str, shape: MapShape) -> Result<()> {
        let (key, old) = self
            .maps
            .get_key_value(name)
            .with_context(|| format!("there is no map {name}, only {:?}", self.maps.keys()))?;
        let map = RawMap::create(name, shape)?;
        if old.shape().key_size == shape.key_size && old.shape().value_size == shape.value_size {
            for (key, value) in old.dump()? {
                map.update_bytes(&key, &value, Expect::Any)?;
            }
        }
        let key = *key;
        self.unpin(name)?;
        map.pin(&self.path(name))?;
        self.maps.insert(key, map);
        Ok(())
    }

    /// Pins a map of another shape in place of `name`; the model's own map stays as it is.
    ///
    /// # Errors
    ///
    /// When it cannot be made or pinned.
    pub fn pin_imposter(&self, name: &str, shape: MapShape) -> Result<()> {
        self.unpin(name)?;
        RawMap::create(name, shape)?.pin(&self.path(name))
    }

    /// Removes a pin, if there is one.
    ///
    /// # Errors
    ///
    /// When it cannot be removed.
    pub fn unpin(&self, name: &str) -> Result<()> {
        let path = self.path(name);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(error).with_context(|| format!("cannot remove {}", path.display()))
            }
            _ => Ok(()),
        }
    }

    /// Pins the map itself, in place of whatever is pinned there.
    ///
    /// # Errors
    ///
    /// When there is no such map, or it cannot be pinned.
    pub fn restore_pin(&self, name: &str) -> Result<()> {
        self.unpin(name)?;
        self.get(name)?.pin(&self.path(name))
    }

    /// Where `name` is pinned.
    #[must_use]
    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    /// Directory of the pins.
    #[must_use]
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// What was made.
    #[must_use]
    pub fn options(&self) -> &MapOptions {
        &self.options
    }

    /// Names of the maps that exist.
    pub fn names(&self) -> impl Iterator<Item = &'static str> + '_ {
        self.maps.keys().copied()
    }

    /// A map by pin name.
    ///
    /// # Errors
    ///
    /// When it was left out.
    pub fn get(&self, name: &str) -> Result<&RawMap> {
        self.maps.get(name).with_context(|| format!("there is no map {name}, only {:?}", self.maps.keys()))
    }

    /// The conntrack map of a family.
    ///
    /// # Errors
    ///
    /// When the family was left out.
    pub fn conntrack(&self, family: IpFamily) -> Result<&RawMap> {
        self.get(family.names().conntrack)
    }

    /// All elements of all maps.
    ///
    /// # Errors
    ///
    /// When a map cannot be walked.
    pub fn dump(&self) -> Result<Dump> {
        let maps = self.maps.iter().map(|(name, map)| Ok((*name, map.dump()?))).collect::<Result<_>>()?;
        Ok(Dump { maps })
    }

    /// One run of the agent's garbage collection: removes the conntrack entries whose lifetime is over, and says how
    /// many.
    ///
    /// # Errors
    ///
    /// When a map cannot be walked or changed.
    pub fn collect_garbage(&self) -> Result<usize> {
        let families = self.options.families.iter();
        families.map(|family| collect_garbage(self.conntrack(*family)?)).sum()
    }
}

/// One run of the garbage collection over one conntrack map.
///
/// # Errors
///
/// When it cannot be walked or changed.
pub fn collect_garbage(conntrack: &RawMap) -> Result<usize> {
    let now = nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC)?.tv_sec();
    let mut removed = 0;
    for (key, value) in conntrack.dump()? {
        let entry = CtEntry::read_from_bytes(&value);
        ensure!(entry.is_ok(), "{} has a value of {} bytes", conntrack.name(), value.len());
        if entry.is_ok_and(|entry| i64::from(entry.lifetime) < now) && conntrack.delete_bytes(&key)? {
            removed += 1;
        }
    }
    Ok(removed)
}

/// All elements of all maps at one moment.
#[derive(Clone, PartialEq, Eq)]
pub struct Dump {
    /// By pin name.
    pub maps: BTreeMap<&'static str, Elements>,
}

/// How an element changed between two dumps.
#[derive(Clone, PartialEq, Eq)]
pub struct Change {
    /// Pin name.
    pub map: &'static str,
    /// Key.
    pub key: Vec<u8>,
    /// Value before, `None` when it was not there.
    pub before: Option<Vec<u8>>,
    /// Value after, `None` when it is gone.
    pub after: Option<Vec<u8>>,
}

impl Dump {
    /// What changed from `self` to `later`; empty when nothing did.
    #[must_use]
    pub fn changes(&self, later: &Self) -> Vec<Change> {
        let empty = Elements::new();
        let names: std::collections::BTreeSet<_> =
            self.maps.keys().chain(later.maps.keys()).copied().collect();
        let mut changes = Vec::new();
        for map in names {
            let before = self.maps.get(map).unwrap_or(&empty);
            let after = later.maps.get(map).unwrap_or(&empty);
            let keys: std::collections::BTreeSet<_> = before.keys().chain(after.keys()).collect();
            for key in keys {
                let (before, after) = (before.get(key).cloned(), after.get(key).cloned());
                if before != after {
                    changes.push(Change { map, key: key.clone(), before, after });
                }
            }
        }
        changes
    }
}

/// Bytes as `0a60000a…`.
#[must_use]
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

impl fmt::Debug for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let value = |value: &Option<Vec<u8>>| value.as_deref().map_or_else(|| "-".to_owned(), hex);
        write!(f, "{} {}: {} -> {}", self.map, hex(&self.key), value(&self.before), value(&self.after))
    }
}

impl fmt::Debug for Dump {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, elements) in &self.maps {
            writeln!(f, "{name}")?;
            for (key, value) in elements {
                writeln!(f, "  {} {}", hex(key), hex(value))?;
            }
        }
        Ok(())
    }
}
