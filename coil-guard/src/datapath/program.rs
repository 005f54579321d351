//! Binding to Cilium's maps, and loading programs.

use std::{collections::BTreeMap, path::PathBuf};

use aya::{
    Ebpf, EbpfLoader, VerifierLogLevel,
    maps::{Map, MapData, MapInfo},
    programs::{ProgramError, SchedClassifier},
};
use coil_guard_common::abi::{self, maps, reply_program};

use super::{
    BoundMap, DatapathError,
    layout::{Layout, file_error, list, unpin},
    own_maps::{create_stand_in, map_error},
    replies::REPLIES_OBJECT,
};
use crate::cilium::{CiliumMaps, is_not_found};

/// The object with the core program; empty where there was no toolchain to build it.
pub static OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/coil-guard-bpf"));
/// The object with the stub that is attached in the pods; empty likewise.
pub static STUB_OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/coil-guard-stub-bpf"));

/// Suffix of the pin of a stand-in.
const STAND_IN: &str = "-empty";

/// What the programs are bound to: own pins of Cilium's maps and of stand-ins.
#[derive(Debug)]
pub(crate) struct Binding {
    /// Ids of Cilium's maps in the order of [`CiliumMaps::maps`], to see a change.
    pub(crate) ids: Vec<Option<u32>>,
    pub(crate) maps: Vec<BoundMap>,
    pins: BTreeMap<&'static str, (PathBuf, u32)>,
}

impl Binding {
    /// Pins the maps in our own directory, in place of an earlier binding's.
    pub(crate) fn make(layout: &Layout, cilium: &CiliumMaps) -> Result<Self, DatapathError> {
        let directory = layout.bound();
        for name in list(&directory)? {
            unpin(&directory.join(name))?;
        }
        let mut binding = Self { ids: cilium.ids(), maps: Vec::new(), pins: BTreeMap::new() };
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
                match MapInfo::from_pin(layout.bound().join(spec.object_name)) {
                    Ok(info) => Some(info.id()),
                    // Another binding has taken its place since the directory was listed.
                    Err(error) if is_not_found(&error) => continue,
                    Err(error) => return Err(map_error("inspect", spec.object_name)(error)),
                }
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

/// Whether this build has a program.
pub(crate) fn is_built_in() -> bool {
    !OBJECT.is_empty() && !STUB_OBJECT.is_empty() && !REPLIES_OBJECT.is_empty()
}

/// Lets the kernel's verifier look at the programs, over small maps that are gone afterwards. Gives the number of
/// instructions of the core that it went through (0 where the kernel does not tell).
///
/// # Errors
///
/// When there is no program in this build, or the kernel refuses one.
pub fn try_load() -> Result<u32, DatapathError> {
    const ENTRIES: u32 = 1024;
    const AS_THEY_ARE: [&str; 6] =
        [maps::AGENT, maps::COUNTERS, maps::EVENTS, maps::CLIENT, maps::CORES, maps::REPLY_COUNTERS];
    if !is_built_in() {
        return Err(DatapathError::NoProgram);
    }
    let mut loader = new_loader();
    for name in maps::ALL.into_iter().filter(|name| !AS_THEY_ARE.contains(name)) {
        loader.map_max_entries(name, ENTRIES);
    }
    for spec in crate::cilium::specs() {
        loader.map_max_entries(spec.object_name, ENTRIES);
    }
    let mut core = loader.load(OBJECT).map_err(DatapathError::Load)?;
    let info = load_program(&mut core, abi::CORE_PROGRAM)?.info().map_err(load_error)?;
    let mut stub = new_loader().load(STUB_OBJECT).map_err(DatapathError::Load)?;
    load_program(&mut stub, abi::PROGRAM)?;
    let mut loader = new_loader();
    for name in [maps::ANSWERS, maps::RETURNS, maps::BACKEND_MARKS] {
        loader.map_max_entries(name, ENTRIES);
    }
    let mut replies = loader.load(REPLIES_OBJECT).map_err(DatapathError::Load)?;
    for name in [reply_program::LEARN, reply_program::ANSWER, reply_program::RETURN] {
        load_program(&mut replies, name)?;
    }
    Ok(info.verified_instruction_count().unwrap_or(0))
}

pub(crate) fn new_loader<'a>() -> EbpfLoader<'a> {
    let mut loader = EbpfLoader::new();
    // There are no relocations against the kernel's types, which `new` has read all the same. The log is
    // what the verifier says at the end: with every instruction in it, a refused program would be verified again and again,
    // each time with ten times the memory for the log, for half a minute.
    loader.btf(None).verifier_log_level(VerifierLogLevel::STATS);
    loader
}

/// A classifier of the object.
pub(crate) fn classifier<'a>(
    ebpf: &'a mut Ebpf,
    name: &str,
) -> Result<&'a mut SchedClassifier, DatapathError> {
    ebpf.program_mut(name)
        .and_then(|program| <&mut SchedClassifier>::try_from(program).ok())
        .ok_or(DatapathError::NoProgram)
}

/// Loads a classifier of the object into the kernel.
pub(crate) fn load_program<'a>(
    ebpf: &'a mut Ebpf,
    name: &str,
) -> Result<&'a mut SchedClassifier, DatapathError> {
    let program = classifier(ebpf, name)?;
    program.load().map_err(load_error)?;
    Ok(program)
}

pub(crate) fn load_error(error: ProgramError) -> DatapathError {
    match error {
        ProgramError::LoadError { io_error, verifier_log } => {
            DatapathError::refused(io_error, &verifier_log.to_string())
        }
        source => DatapathError::Program { action: "load", source },
    }
}

/// Points the loader to own pins, and remembers which maps are meant.
#[derive(Debug, Default)]
pub(crate) struct Pins(BTreeMap<&'static str, (PathBuf, u32)>);

impl Pins {
    /// Adds an own map, as it is pinned.
    pub(crate) fn own(&mut self, layout: &Layout, name: &'static str) -> Result<(), DatapathError> {
        let path = layout.map(name);
        let id = MapInfo::from_pin(&path).map_err(map_error("inspect", name))?.id();
        self.0.insert(name, (path, id));
        Ok(())
    }

    /// Adds what the binding holds.
    pub(crate) fn bound(&mut self, binding: &Binding) {
        self.0.extend(binding.pins.clone());
    }

    /// Ids of the maps, by name.
    pub(crate) fn ids(&self) -> impl Iterator<Item = u32> {
        self.0.values().map(|(_, id)| *id)
    }

    /// Loads `object` over these maps.
    pub(crate) fn load(&self, loader: &mut EbpfLoader<'_>, object: &[u8]) -> Result<Ebpf, DatapathError> {
        for (name, (path, _)) in &self.0 {
            loader.map_pin_path(name, path.clone());
        }
        let ebpf = loader.load(object).map_err(DatapathError::Load)?;
        // The loader makes a map of its own where a pin has gone. All of them are in our directory, but a program bound to
        // such a map would do nothing: see that each is the one that was meant.
        for (name, (path, id)) in &self.0 {
            let Some(found) = ebpf.map(name).and_then(data) else { continue };
            let found = found.info().map_err(map_error("inspect", name))?.id();
            if found != *id {
                return Err(file_error("bind", path)(std::io::Error::other(format!(
                    "the pin was replaced while the program was loaded (map id {found}, expected {id})"
                ))));
            }
        }
        Ok(ebpf)
    }
}

fn data(map: &Map) -> Option<&MapData> {
    match map {
        Map::Array(map)
        | Map::PerCpuArray(map)
        | Map::HashMap(map)
        | Map::LruHashMap(map)
        | Map::PerCpuHashMap(map)
        | Map::PerCpuLruHashMap(map)
        | Map::ProgramArray(map)
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
        let [core, stub, replies] =
            [OBJECT, STUB_OBJECT, REPLIES_OBJECT].map(|object| aya_obj::Object::parse(object).unwrap());
        let mut compared = Vec::new();
        for (name, expected) in own_maps(&Sizes::default())
            .iter()
            .map(|own| (own.name, own.kind_and_sizes()))
            .chain(specs().map(|spec| (spec.object_name, (spec.kind as u32, spec.key_size, spec.value_size))))
        {
            for map in [&core, &stub, &replies].into_iter().filter_map(|object| object.maps.get(name)) {
                assert_eq!(expected, (map.map_type(), map.key_size(), map.value_size()), "{name}");
                compared.push(name);
            }
        }
        assert!(compared.len() > maps::ALL.len() + 4, "only {compared:?}");
        assert!(stub.maps.keys().all(|name| [".rodata", maps::CLIENT, maps::CORES].contains(&name.as_str())));
    }
}
