//! Loading the guard's programs, and what that costs.

use std::{path::Path, time::Duration};

use anyhow::{Context as _, Result};
use aya::{Ebpf, EbpfLoader, VerifierLogLevel, programs::SchedClassifier};
use coil_guard_common::{
    abi::{CORE_PROGRAM, FLOW_COST, POD_CONFIG, PROGRAM, PodConfig, READ_ONLY, flow_cost, maps},
    cilium::{AFFINITY_MATCH, MAPS4, MAPS6},
};

use super::{clock::processor_time, instance::Sizes};
use crate::cilium::CiliumMaps;

/// What loading a program cost, in processor time.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    /// Parsing, relocating and making the own maps.
    pub prepare: Duration,
    /// Verifying and compiling, inside the kernel.
    pub verify: Duration,
    /// Instructions that the verifier went through.
    pub verified_instructions: u32,
    /// Bytes of the translated program.
    pub translated: u32,
    /// Bytes of machine code.
    pub machine_code: u32,
    /// Bytes of kernel memory for the program.
    pub memory: u32,
}

/// Loads the core of `object` over Cilium's maps, or the one that only reads them.
pub(super) fn core(
    object: &[u8],
    directory: &Path,
    cilium: &CiliumMaps,
    sizes: Sizes,
    read_only: bool,
) -> Result<(Ebpf, Load)> {
    let began = processor_time();
    let flow_cost = flow_cost(sizes.inner_flows);
    let mut loader = EbpfLoader::new();
    loader.btf(None).verifier_log_level(VerifierLogLevel::STATS).override_global(FLOW_COST, &flow_cost, true);
    if read_only {
        loader.override_global(READ_ONLY, &1u32, true);
    }
    for name in maps::ALL {
        match name {
            maps::AGENT | maps::COUNTERS | maps::CORES => {}
            maps::CLIENT => {
                loader.map_pin_path(name, directory.join(name));
            }
            maps::EVENTS => {
                loader.map_max_entries(name, 1 << 20);
            }
            maps::GUARDED_SERVICES => {
                loader.map_max_entries(name, sizes.services);
            }
            maps::INNER_FLOWS => {
                loader.map_max_entries(name, sizes.inner_flows);
            }
            _ => {
                loader.map_max_entries(name, sizes.others);
            }
        }
    }
    let names = [MAPS4, MAPS6];
    let bound = ["4", "6"].into_iter().zip(&names).flat_map(|(suffix, names)| {
        [
            ("CT", names.conntrack),
            ("SERVICES", names.services),
            ("BACKENDS", names.backends),
            ("AFFINITY", names.affinity),
        ]
        .map(|(own, pinned)| (format!("{own}{suffix}"), cilium.path(pinned)))
    });
    let affinity_match = ("AFFINITY_MATCH".to_owned(), cilium.path(AFFINITY_MATCH));
    let bound: Vec<_> = bound.chain([affinity_match]).collect();
    for (name, path) in &bound {
        loader.map_pin_path(name, path);
    }
    let mut ebpf = loader.load(object).context("cannot read the core's object")?;
    let load = into_kernel(&mut ebpf, CORE_PROGRAM, processor_time() - began)?;
    Ok((ebpf, load))
}

/// Loads the stub of a pod.
pub(super) fn stub(directory: &Path, config: &PodConfig) -> Result<(Ebpf, Load)> {
    let mut loader = EbpfLoader::new();
    // Making a loader reads the kernel's types, and the agent has one loader for all its stubs.
    let began = processor_time();
    loader.btf(None).verifier_log_level(VerifierLogLevel::STATS).override_global(POD_CONFIG, config, true);
    for name in [maps::CLIENT, maps::CORES] {
        loader.map_pin_path(name, directory.join(name));
    }
    let mut stub = loader.load(coil_guard::datapath::STUB_OBJECT).context("cannot read the stub's object")?;
    let load = into_kernel(&mut stub, PROGRAM, processor_time() - began)?;
    Ok((stub, load))
}

fn into_kernel(ebpf: &mut Ebpf, name: &str, prepare: Duration) -> Result<Load> {
    let program: &mut SchedClassifier =
        ebpf.program_mut(name).with_context(|| format!("the object has no {name}"))?.try_into()?;
    let began = processor_time();
    program.load().with_context(|| format!("the kernel refuses {name}"))?;
    let verify = processor_time() - began;
    let info = program.info()?;
    Ok(Load {
        prepare,
        verify,
        verified_instructions: info.verified_instruction_count().unwrap_or(0),
        translated: info.size_translated().unwrap_or(0),
        machine_code: info.size_jitted(),
        memory: info.memory_locked().unwrap_or(0),
    })
}
