//! The stub: the small program that is attached in each pod, with the pod as its constants.

use std::{ptr, sync::LazyLock};

use aya::{Ebpf, EbpfLoader, programs::SchedClassifier};
use coil_guard_common::abi::{self, maps};
use zerocopy::{FromZeros as _, IntoBytes as _};

use super::{
    DatapathError,
    layout::Layout,
    program::{Pins, STUB_OBJECT, classifier, is_built_in, load_error, load_program, new_loader},
};

/// The maps that stubs use.
const MAPS: [&str; 2] = [maps::CLIENT, maps::CORES];

/// A loaded stub. Dropping it leaves what is attached and pinned attached.
#[derive(Debug)]
pub(crate) struct Stub {
    ebpf: Ebpf,
    /// Kernel id of the program.
    pub(crate) id: u32,
}

impl Stub {
    pub(crate) fn program(&mut self) -> Result<&mut SchedClassifier, DatapathError> {
        classifier(&mut self.ebpf, abi::PROGRAM)
    }
}

/// Makes stubs, all over the same two maps.
#[derive(Debug)]
pub(crate) struct Stubs {
    pins: Pins,
    /// One for all: making a loader reads the kernel's types, whether they are wanted or not, and that takes longer than
    /// everything else about a stub.
    loader: EbpfLoader<'static>,
}

impl Stubs {
    pub(crate) fn new(layout: &Layout) -> Result<Self, DatapathError> {
        let mut pins = Pins::default();
        for name in MAPS {
            pins.own(layout, name)?;
        }
        Ok(Self { pins, loader: new_loader() })
    }

    /// What tells one stub from another: its code, its constants and its maps. One that is attached and has the same is as
    /// good as one that is loaded now.
    pub(crate) fn fingerprint(&self, config: &abi::PodConfig) -> u64 {
        static CODE: LazyLock<u64> = LazyLock::new(|| fnv(FNV, STUB_OBJECT));
        let maps = self.pins.ids().fold(*CODE, |hash, id| fnv(hash, &id.to_ne_bytes()));
        fnv(maps, config.as_bytes())
    }

    /// Loads the stub of a pod.
    pub(crate) fn load(&mut self, config: &abi::PodConfig) -> Result<Stub, DatapathError> {
        static NOBODY: LazyLock<abi::PodConfig> = LazyLock::new(abi::PodConfig::new_zeroed);
        if !is_built_in() {
            return Err(DatapathError::NoProgram);
        }
        // SAFETY: the loader only keeps the reference, and has another one before this function returns it.
        let constants: &'static abi::PodConfig = unsafe { &*ptr::from_ref(config) };
        self.loader.override_global(abi::POD_CONFIG, constants, true);
        let loaded = self.pins.load(&mut self.loader, STUB_OBJECT);
        self.loader.override_global(abi::POD_CONFIG, &*NOBODY, true);
        let mut ebpf = loaded?;
        let id = load_program(&mut ebpf, abi::PROGRAM)?.info().map_err(load_error)?.id();
        Ok(Stub { ebpf, id })
    }
}

const FNV: u64 = 0xcbf2_9ce4_8422_2325;

/// FNV-1a. It is stored, so it must not differ between builds of the agent.
fn fnv(hash: u64, bytes: &[u8]) -> u64 {
    bytes.iter().fold(hash, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3))
}
