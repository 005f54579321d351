//! Binding to Cilium's maps and loading program instances.

use std::{collections::BTreeMap, path::PathBuf};

use aya::{
    Ebpf, EbpfLoader, VerifierLogLevel,
    maps::{Map, MapData, MapInfo},
    programs::{ProgramError, SchedClassifier},
};
use coil_guard_common::abi::{self, maps};

use super::{
    BoundMap, DatapathError,
    layout::{Layout, file_error, list, unpin},
    own_maps::{create_stand_in, map_error},
};
use crate::cilium::CiliumMaps;

/// The object with the program; empty where there was no toolchain to build it.
pub static OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/coil-guard-bpf"));

/// Suffix of the pin of a stand-in.
const STAND_IN: &str = "-empty";

/// What the programs are bound to: own pins of Cilium's maps and of stand-ins.
#[derive(Debug)]
pub(crate) struct Binding {
    /// Ids of Cilium's maps in the order of [`CiliumMaps::maps`], to see a change.
    pub(crate) ids: Vec<Option<u32>>,
    pub(crate) maps: Vec<BoundMap>,
    /// Counts up with every binding of this agent.
    pub(crate) generation: u64,
    pins: BTreeMap<&'static str, (PathBuf, u32)>,
}

impl Binding {
    /// Pins the maps in our own directory, in place of an earlier binding's.
    pub(crate) fn make(layout: &Layout, cilium: &CiliumMaps, generation: u64) -> Result<Self, DatapathError> {
        let directory = layout.bound();
        for name in list(&directory)? {
            unpin(&directory.join(name))?;
        }
        let mut binding = Self { ids: cilium.ids(), maps: Vec::new(), generation, pins: BTreeMap::new() };
        for open in &cilium.maps {
            let spec = &open.spec;
            let (path, id) = match &open.map {
                Some((map, id)) => (pin(map, directory.join(spec.object_name))?, *id),
                None => {
                    let map = create_stand_in(spec)?;
                    let id = map.info().map_err(map_error("inspect", spec.object_name))?.id();
                    (pin(&map, directory.join(format!("{}{STAND_IN}", spec.object_name)))?, id)
                }
            };
            binding
                .maps
                .push(BoundMap { name: spec.pin_name.to_owned(), id: open.map.as_ref().map(|(_, id)| *id) });
            binding.pins.insert(spec.object_name, (path, id));
        }
        Ok(binding)
    }

    /// The bindings pinned by whatever agent ran last.
    pub(crate) fn pinned(layout: &Layout) -> Result<Vec<BoundMap>, DatapathError> {
        let names = list(&layout.bound())?;
        let mut bound = Vec::new();
        for spec in crate::cilium::specs() {
            let id = if names.iter().any(|name| name == spec.object_name) {
                let info = MapInfo::from_pin(layout.bound().join(spec.object_name))
                    .map_err(map_error("inspect", spec.object_name))?;
                Some(info.id())
            } else if names.iter().any(|name| name.strip_suffix(STAND_IN) == Some(spec.object_name)) {
                None
            } else {
                continue;
            };
            bound.push(BoundMap { name: spec.pin_name.to_owned(), id });
        }
        Ok(bound)
    }
}

fn pin(map: &MapData, path: PathBuf) -> Result<PathBuf, DatapathError> {
    match map.pin(&path) {
        Ok(()) => Ok(path),
        Err(source) => Err(DatapathError::Pin { path, source }),
    }
}

/// A loaded program instance. Dropping it leaves what is attached and pinned attached.
#[derive(Debug)]
pub(crate) struct Instance {
    ebpf: Ebpf,
    pub(crate) id: u32,
}

impl Instance {
    pub(crate) fn program(&mut self) -> Result<&mut SchedClassifier, DatapathError> {
        self.ebpf
            .program_mut(abi::PROGRAM)
            .and_then(|program| <&mut SchedClassifier>::try_from(program).ok())
            .ok_or(DatapathError::NoProgram)
    }
}

/// Whether this build has a program.
pub(crate) fn is_built_in() -> bool {
    !OBJECT.is_empty()
}

/// Lets the kernel's verifier look at the program, over small maps that are gone afterwards. Gives the number of
/// instructions that it went through (0 where the kernel does not tell).
///
/// # Errors
///
/// When there is no program in this build, or the kernel refuses it.
pub fn try_load() -> Result<u32, DatapathError> {
    const ENTRIES: u32 = 1024;
    if !is_built_in() {
        return Err(DatapathError::NoProgram);
    }
    let config =
        abi::PodConfig { flags: abi::POD_HAS_IPV4 | abi::POD_HAS_IPV6, ..zerocopy::FromZeros::new_zeroed() };
    let mut loader = new_loader();
    loader.override_global(abi::POD_CONFIG, &config, true);
    for name in
        maps::ALL.into_iter().filter(|name| ![maps::AGENT, maps::COUNTERS, maps::EVENTS].contains(name))
    {
        loader.map_max_entries(name, ENTRIES);
    }
    for spec in crate::cilium::specs() {
        loader.map_max_entries(spec.object_name, ENTRIES);
    }
    let mut ebpf = loader.load(OBJECT).map_err(DatapathError::Load)?;
    let info = load_program(&mut ebpf)?.info().map_err(load_error)?;
    Ok(info.verified_instruction_count().unwrap_or(0))
}

fn new_loader<'a>() -> EbpfLoader<'a> {
    let mut loader = EbpfLoader::new();
    // There are no relocations against the kernel's types, and reading those takes longer than everything else. The log is
    // what the verifier says at the end: with every instruction in it, a refused program would be verified again and again,
    // each time with ten times the memory for the log, for half a minute.
    loader.btf(None).verifier_log_level(VerifierLogLevel::STATS);
    loader
}

fn load_program(ebpf: &mut Ebpf) -> Result<&mut SchedClassifier, DatapathError> {
    let program = ebpf
        .program_mut(abi::PROGRAM)
        .and_then(|program| <&mut SchedClassifier>::try_from(program).ok())
        .ok_or(DatapathError::NoProgram)?;
    program.load().map_err(load_error)?;
    Ok(program)
}

fn load_error(error: ProgramError) -> DatapathError {
    match error {
        ProgramError::LoadError { io_error, verifier_log } => {
            DatapathError::refused(io_error, &verifier_log.to_string())
        }
        source => DatapathError::Program { action: "load", source },
    }
}

/// Loads an instance with `config`, over the pinned own maps and what `binding` holds.
pub(crate) fn load(
    layout: &Layout,
    binding: &Binding,
    config: &abi::PodConfig,
) -> Result<Instance, DatapathError> {
    if !is_built_in() {
        return Err(DatapathError::NoProgram);
    }
    let mut loader = new_loader();
    loader.override_global(abi::POD_CONFIG, config, true);
    let mut expected = BTreeMap::new();
    for name in maps::ALL {
        let path = layout.map(name);
        let id = MapInfo::from_pin(&path).map_err(map_error("inspect", name))?.id();
        loader.map_pin_path(name, path);
        expected.insert(name, id);
    }
    for (name, (path, id)) in &binding.pins {
        loader.map_pin_path(name, path);
        expected.insert(name, *id);
    }
    let mut ebpf = loader.load(OBJECT).map_err(DatapathError::Load)?;
    // The loader makes a map of its own where a pin has gone. All of them are in our directory, but a program bound to
    // such a map would do nothing: see that each is the one that was meant.
    for (name, id) in expected {
        let Some(found) = ebpf.map(name).and_then(data) else { continue };
        let found = found.info().map_err(map_error("inspect", name))?.id();
        if found != id {
            let path = layout.directory().join(name);
            return Err(file_error("bind", &path)(std::io::Error::other(format!(
                "the pin was replaced while the program was loaded (map id {found}, expected {id})"
            ))));
        }
    }
    let id = load_program(&mut ebpf)?.info().map_err(load_error)?.id();
    Ok(Instance { ebpf, id })
}

fn data(map: &Map) -> Option<&MapData> {
    match map {
        Map::Array(map)
        | Map::PerCpuArray(map)
        | Map::HashMap(map)
        | Map::LruHashMap(map)
        | Map::PerCpuHashMap(map)
        | Map::PerCpuLruHashMap(map)
        | Map::RingBuf(map) => Some(map),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        cilium::specs,
        datapath::{Sizes, own_maps::own_maps},
    };

    /// Relocation compares nothing: a map of the object that differs from what is pinned would be read past its end.
    #[test]
    fn maps_of_the_object_have_the_layouts_that_are_pinned() {
        if !is_built_in() {
            eprintln!("SKIPPED: no eBPF toolchain, the object is empty");
            return;
        }
        let object = aya_obj::Object::parse(OBJECT).unwrap();
        for own in own_maps(&Sizes::default()).iter().filter(|own| maps::ALL.contains(&own.name)) {
            let Some(map) = object.maps.get(own.name) else { continue };
            assert_eq!(
                own.kind_and_sizes(),
                (map.map_type(), map.key_size(), map.value_size()),
                "{}",
                own.name
            );
        }
        for spec in specs() {
            let Some(map) = object.maps.get(spec.object_name) else { continue };
            assert_eq!(
                (spec.kind as u32, spec.key_size, spec.value_size),
                (map.map_type(), map.key_size(), map.value_size()),
                "{}",
                spec.object_name
            );
        }
    }
}
