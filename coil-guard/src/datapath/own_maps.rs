//! The own maps: their layouts and sizes, making and opening them.

use std::path::Path;

use aya::maps::{MapData, MapType};
use aya_obj::generated::bpf_map_type::{
    self, BPF_MAP_TYPE_ARRAY, BPF_MAP_TYPE_HASH, BPF_MAP_TYPE_LRU_HASH, BPF_MAP_TYPE_PERCPU_ARRAY,
    BPF_MAP_TYPE_PROG_ARRAY, BPF_MAP_TYPE_RINGBUF,
};
use coil_guard_common::{
    abi,
    abi::maps,
    counters::{Reason, ReplyCount},
};

use super::{
    DatapathError, Sizes,
    layout::Layout,
    records::{EGRESSES, EgressKey, PODS, PodKey, PodRecord},
};
use crate::cilium::{MapShape, MapSpec, is_not_found, shape_of};

/// Do not allocate all elements when the map is made: these maps are written by the agent only and mostly empty.
const NO_PREALLOC: u32 = 1;

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
            maps::CROWDED_FLOWS,
            BPF_MAP_TYPE_LRU_HASH,
            size_of::<abi::InnerFlowKey>(),
            size_of::<abi::InnerFlow>(),
            // The kernel wants as many LRU elements as there can be processors.
            (sizes.inner_flows / 4).max(1024),
            0,
        ),
        own(maps::FLOW_SHARES, BPF_MAP_TYPE_LRU_HASH, ADDRESS, size_of::<u64>(), sizes.pods.max(1024), 0),
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
            maps::PINNED_PORTS,
            BPF_MAP_TYPE_LRU_HASH,
            size_of::<abi::PinnedPortKey>(),
            size_of::<abi::PinnedPort>(),
            sizes.pinned_ports,
            0,
        ),
        own(
            maps::RETURNS,
            BPF_MAP_TYPE_LRU_HASH,
            size_of::<abi::ReturnKey>(),
            size_of::<abi::Return>(),
            sizes.returns,
            0,
        ),
        own(
            maps::ANSWERS,
            BPF_MAP_TYPE_LRU_HASH,
            size_of::<abi::AnswerKey>(),
            size_of::<abi::Answer>(),
            sizes.answers,
            0,
        ),
        own(
            maps::RETURNING,
            BPF_MAP_TYPE_HASH,
            ADDRESS,
            size_of::<abi::Returning>(),
            sizes.pods,
            NO_PREALLOC,
        ),
        own(maps::REPLY_COUNTERS, BPF_MAP_TYPE_PERCPU_ARRAY, U32, size_of::<u64>(), ReplyCount::COUNT, 0),
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
        own(maps::CLIENT, BPF_MAP_TYPE_PERCPU_ARRAY, U32, size_of::<abi::PodConfig>(), 1, 0),
        own(maps::CORES, BPF_MAP_TYPE_PROG_ARRAY, U32, U32, abi::CORE_SLOTS, 0),
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
}
