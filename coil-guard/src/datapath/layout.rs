//! The pin directory: who holds it, where things are, and the own maps in it.

use std::{
    fs::{self, File},
    io::{self, ErrorKind},
    os::unix::fs::DirBuilderExt as _,
    path::{Path, PathBuf},
};

use aya::maps::{MapData, MapType};
use aya_obj::generated::bpf_map_type::{
    self, BPF_MAP_TYPE_ARRAY, BPF_MAP_TYPE_HASH, BPF_MAP_TYPE_LRU_HASH, BPF_MAP_TYPE_PERCPU_ARRAY,
    BPF_MAP_TYPE_RINGBUF,
};
use coil_guard_common::{abi, abi::maps, counters::Reason};
use nix::{
    errno::Errno,
    fcntl::{Flock, FlockArg},
    sys::statfs::{BPF_FS_MAGIC, statfs},
};

use super::{
    DatapathError, Sizes,
    records::{EGRESSES, EgressKey, PODS, PodKey, PodRecord},
};
use crate::cilium::{MapShape, MapSpec, is_not_found, shape_of};

/// Do not allocate all elements when the map is made: these maps are written by the agent only and mostly empty.
const NO_PREALLOC: u32 = 1;

/// Pin directory, with an exclusive lock held on it until it is dropped.
#[derive(Debug)]
pub(crate) struct Lock {
    _lock: Flock<File>,
}

/// Paths below the pin directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    root: PathBuf,
    version: PathBuf,
}

impl Layout {
    pub(crate) fn new(pin_directory: &Path) -> Self {
        Self { root: pin_directory.to_owned(), version: pin_directory.join(abi::LAYOUT_VERSION) }
    }

    /// Parent of all layout versions, which is what is locked.
    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    /// Directory of this layout version.
    pub(crate) fn directory(&self) -> &Path {
        &self.version
    }

    pub(crate) fn map(&self, name: &str) -> PathBuf {
        self.version.join(name)
    }

    /// Links by pod UID.
    pub(crate) fn links(&self) -> PathBuf {
        self.version.join("links")
    }

    pub(crate) fn link(&self, pod: &str) -> PathBuf {
        self.links().join(pod)
    }

    /// Own pins of what the programs are bound to: Cilium's maps, and stand-ins for those that it does not have. The
    /// loader is pointed here and never into Cilium's directory, so that it cannot make a pin there.
    pub(crate) fn bound(&self) -> PathBuf {
        self.version.join("cilium")
    }

    /// Makes the directories of this layout.
    pub(crate) fn make(&self) -> Result<(), DatapathError> {
        for path in [self.version.clone(), self.links(), self.bound()] {
            make_directory(&path)?;
        }
        Ok(())
    }

    /// Names of pods with a pinned link.
    pub(crate) fn pinned_links(&self) -> Result<Vec<String>, DatapathError> {
        list(&self.links())
    }

    /// Directories of other layout versions.
    pub(crate) fn other_versions(&self) -> Result<Vec<PathBuf>, DatapathError> {
        Ok(list(&self.root)?
            .into_iter()
            .filter(|name| name != abi::LAYOUT_VERSION && is_version(name))
            .map(|name| self.root.join(name))
            .collect())
    }
}

fn is_version(name: &str) -> bool {
    name.strip_prefix('v')
        .is_some_and(|digits| !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit()))
}

/// Makes the pin directory and takes it; `None` when another agent has it.
pub(crate) fn lock(pin_directory: &Path) -> Result<Option<Lock>, DatapathError> {
    require_bpffs(pin_directory)?;
    make_directory(pin_directory)?;
    lock_existing(pin_directory)
}

/// As [`lock`], of a directory that exists.
pub(crate) fn lock_existing(pin_directory: &Path) -> Result<Option<Lock>, DatapathError> {
    let directory = File::open(pin_directory).map_err(file_error("open", pin_directory))?;
    match Flock::lock(directory, FlockArg::LockExclusiveNonblock) {
        Ok(lock) => Ok(Some(Lock { _lock: lock })),
        Err((_, Errno::EWOULDBLOCK)) => Ok(None),
        Err((_, errno)) => Err(file_error("lock", pin_directory)(errno.into())),
    }
}

/// Looks at the nearest ancestor that exists.
pub(crate) fn require_bpffs(path: &Path) -> Result<(), DatapathError> {
    let mut at = path;
    loop {
        match statfs(at) {
            Ok(stat) if stat.filesystem_type() == BPF_FS_MAGIC => return Ok(()),
            Ok(stat) => {
                #[expect(clippy::unnecessary_cast, reason = "its type differs between targets")]
                let found = stat.filesystem_type().0 as u64;
                return Err(DatapathError::NotBpffs { path: path.to_owned(), found });
            }
            Err(Errno::ENOENT) => match at.parent() {
                Some(parent) if !parent.as_os_str().is_empty() => at = parent,
                _ => return Err(file_error("find", path)(Errno::ENOENT.into())),
            },
            Err(errno) => return Err(file_error("look at", at)(errno.into())),
        }
    }
}

fn make_directory(path: &Path) -> Result<(), DatapathError> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(file_error("make", path))
}

pub(crate) fn file_error(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> DatapathError {
    let path = path.to_owned();
    move |source| DatapathError::File { action, path, source }
}

/// Names in a directory; none if it does not exist.
pub(crate) fn list(directory: &Path) -> Result<Vec<String>, DatapathError> {
    let entries = match fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(file_error("list", directory)(error)),
    };
    entries
        .map(|entry| {
            Ok(entry.map_err(file_error("list", directory))?.file_name().to_string_lossy().into_owned())
        })
        .collect()
}

/// Removes a pin; gone already is fine.
pub(crate) fn unpin(path: &Path) -> Result<(), DatapathError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(file_error("remove", path)(error)),
        _ => Ok(()),
    }
}

/// Removes a directory of pins, one level of directories below it included. Tells each file that it removed.
pub(crate) fn remove_tree(directory: &Path, removed: &mut Vec<PathBuf>) -> Result<(), DatapathError> {
    for name in list(directory)? {
        let path = directory.join(name);
        if path.is_dir() {
            remove_tree(&path, removed)?;
        } else {
            unpin(&path)?;
            removed.push(path);
        }
    }
    match fs::remove_dir(directory) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(file_error("remove", directory)(error)),
        _ => Ok(()),
    }
}

/// One own map.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct OwnMap {
    pub(crate) name: &'static str,
    kind: bpf_map_type,
    key_size: u32,
    value_size: u32,
    max_entries: u32,
    flags: u32,
}

const fn own(
    name: &'static str,
    kind: bpf_map_type,
    key: usize,
    value: usize,
    max_entries: u32,
    flags: u32,
) -> OwnMap {
    OwnMap { name, kind, key_size: key as u32, value_size: value as u32, max_entries, flags }
}

/// All own maps with the sizes given.
pub(crate) fn own_maps(sizes: &Sizes) -> [OwnMap; maps::ALL.len() + 2] {
    const U32: usize = size_of::<u32>();
    const ADDRESS: usize = 16;
    let ring = sizes.event_bytes.max(4096).checked_next_power_of_two().unwrap_or(1 << 31);
    [
        own(
            maps::GUARDED_SERVICES,
            BPF_MAP_TYPE_HASH,
            size_of::<abi::ServiceKey>(),
            size_of::<abi::GuardedService>(),
            sizes.services,
            NO_PREALLOC,
        ),
        own(
            maps::BACKEND_MARKS,
            BPF_MAP_TYPE_HASH,
            ADDRESS,
            size_of::<abi::BackendMark>(),
            sizes.marks,
            NO_PREALLOC,
        ),
        own(maps::AGENT, BPF_MAP_TYPE_ARRAY, U32, size_of::<abi::AgentState>(), 1, 0),
        own(
            maps::INNER_FLOWS,
            BPF_MAP_TYPE_LRU_HASH,
            size_of::<abi::InnerFlowKey>(),
            size_of::<abi::InnerFlow>(),
            sizes.inner_flows,
            0,
        ),
        own(
            maps::FRAGMENTS,
            BPF_MAP_TYPE_LRU_HASH,
            size_of::<abi::FragmentKey>(),
            size_of::<abi::FragmentPorts>(),
            sizes.fragments,
            0,
        ),
        own(
            maps::PREVIOUS,
            BPF_MAP_TYPE_LRU_HASH,
            size_of::<abi::ClientServiceKey>(),
            size_of::<abi::Previous>(),
            sizes.previous,
            0,
        ),
        own(
            maps::LEAVING,
            BPF_MAP_TYPE_LRU_HASH,
            size_of::<abi::LeavingKey>(),
            size_of::<abi::LeavingSeen>(),
            sizes.leaving,
            0,
        ),
        own(maps::DRAINS, BPF_MAP_TYPE_LRU_HASH, ADDRESS, size_of::<abi::DrainStats>(), sizes.drains, 0),
        own(maps::COUNTERS, BPF_MAP_TYPE_PERCPU_ARRAY, U32, size_of::<u64>(), Reason::COUNT, 0),
        own(
            maps::EGRESS_COUNTERS,
            BPF_MAP_TYPE_PERCPU_ARRAY,
            U32,
            size_of::<abi::EgressCounters>(),
            sizes.egresses,
            0,
        ),
        own(
            maps::REPORTED,
            BPF_MAP_TYPE_LRU_HASH,
            size_of::<abi::ReportKey>(),
            size_of::<u64>(),
            sizes.previous,
            0,
        ),
        own(maps::EVENTS, BPF_MAP_TYPE_RINGBUF, 0, 0, ring, 0),
        own(EGRESSES, BPF_MAP_TYPE_HASH, size_of::<EgressKey>(), U32, sizes.egresses, NO_PREALLOC),
        own(PODS, BPF_MAP_TYPE_HASH, size_of::<PodKey>(), size_of::<PodRecord>(), sizes.pods, NO_PREALLOC),
    ]
}

impl OwnMap {
    /// Type, key and value size as numbers.
    #[cfg(test)]
    pub(crate) fn kind_and_sizes(&self) -> (u32, u32, u32) {
        (self.kind as u32, self.key_size, self.value_size)
    }

    fn shape(&self) -> MapShape {
        let kind =
            MapType::try_from(self.kind).map_or_else(|_| "unknown".to_owned(), |kind| format!("{kind:?}"));
        MapShape { kind, key_size: self.key_size, value_size: self.value_size }
    }

    /// Opens the pin, or makes and pins the map. The second value warns of a size other than asked for.
    pub(crate) fn open_or_create(&self, layout: &Layout) -> Result<(MapData, Option<String>), DatapathError> {
        let path = layout.map(self.name);
        if let Some(map) = open_pinned(&path, self.name, &self.shape())? {
            let found = map.info().map_err(map_error("inspect", self.name))?.max_entries();
            let warning = (found != self.max_entries).then(|| {
                format!(
                    "the pinned map {} keeps its size of {found}, the flags ask for {}: run `coil-guard cleanup` on this node \
                     to change it",
                    path.display(),
                    self.max_entries
                )
            });
            return Ok((map, warning));
        }
        let map = create(self.name, self.kind, self.key_size, self.value_size, self.max_entries, self.flags)?;
        map.pin(&path).map_err(|source| DatapathError::Pin { path, source })?;
        Ok((map, None))
    }
}

/// Opens an own pinned map and compares it; `None` if it is not pinned.
pub(crate) fn open_pinned(
    path: &Path,
    name: &'static str,
    expected: &MapShape,
) -> Result<Option<MapData>, DatapathError> {
    let map = match MapData::from_pin(path) {
        Ok(map) => map,
        Err(error) if is_not_found(&error) => return Ok(None),
        Err(source) => return Err(DatapathError::Map { action: "open", map: name, source }),
    };
    let found = shape_of(&map.info().map_err(map_error("inspect", name))?);
    if found != *expected {
        return Err(DatapathError::OwnLayout {
            path: path.to_owned(),
            found: found.to_string(),
            expected: expected.to_string(),
        });
    }
    Ok(Some(map))
}

/// Opens the pin of an own map, if it is there and has the right layout.
pub(crate) fn open_own(layout: &Layout, name: &str) -> Result<Option<MapData>, DatapathError> {
    match own_maps(&Sizes::default()).into_iter().find(|map| map.name == name) {
        Some(map) => open_pinned(&layout.map(name), map.name, &map.shape()),
        None => Ok(None),
    }
}

fn create(
    name: &'static str,
    kind: bpf_map_type,
    key_size: u32,
    value_size: u32,
    max_entries: u32,
    flags: u32,
) -> Result<MapData, DatapathError> {
    let definition = aya_obj::Map::new_from_params(kind as u32, key_size, value_size, max_entries, flags);
    MapData::create(definition, name, None).map_err(map_error("make", name))
}

/// An empty map in place of one that Cilium does not have.
pub(crate) fn create_stand_in(spec: &MapSpec) -> Result<MapData, DatapathError> {
    let kind = if spec.kind == MapType::LruHash { BPF_MAP_TYPE_LRU_HASH } else { BPF_MAP_TYPE_HASH };
    // The kernel wants as many LRU elements as there can be processors.
    create(
        spec.object_name,
        kind,
        spec.key_size,
        spec.value_size,
        1024,
        if kind == BPF_MAP_TYPE_HASH { NO_PREALLOC } else { 0 },
    )
}

pub(crate) fn map_error(
    action: &'static str,
    map: &'static str,
) -> impl FnOnce(aya::maps::MapError) -> DatapathError {
    move |source| DatapathError::Map { action, map, source }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_shared_map_is_made() {
        let made: Vec<_> = own_maps(&Sizes::default()).iter().map(|map| map.name).collect();
        for name in maps::ALL {
            assert!(made.contains(&name), "{name} is shared with the program and not made");
        }
    }

    #[test]
    fn only_version_directories_of_other_layouts_are_ours_to_remove() {
        assert!(is_version("v1") && is_version("v23"));
        assert!(!is_version("v") && !is_version("vx") && !is_version("links"));
    }

    #[test]
    fn a_directory_elsewhere_is_not_a_bpffs() {
        let directory = tempfile::tempdir().unwrap();
        let error = lock(&directory.path().join("coil-guard")).unwrap_err();
        assert!(matches!(error, DatapathError::NotBpffs { .. }), "{error}");
    }
}
