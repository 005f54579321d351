//! The verifier takes the programs, at a cost that a node with hundreds of client pods can pay.

use anyhow::{Result, ensure};
use coil_guard_common::abi::{CORE_SLOTS, POD_HAS_IPV4, PodConfig};
use coil_guard_tests::{
    cilium::CiliumVersion,
    net::{Paths, lab_test},
    program::{Scene, Sizes, pod_config},
};

/// The kernel's limit is a million; the cost of a load grows with it.
const INSTRUCTIONS: u32 = 90_000;
/// Of the stub, which is loaded for each pod.
const STUB_INSTRUCTIONS: u32 = 100;

#[test]
fn verifies_over_the_maps_of_every_version() -> Result<()> {
    lab_test(|| {
        for version in CiliumVersion::ALL {
            let directory = Paths.cilium_maps().join(version.minor().to_string());
            let load = Scene::load(&directory, version, Sizes::default())?.guard.load;
            println!("Cilium {version}: {load:?}");
            ensure!(load.verified_instructions > 0, "the kernel counted no instructions");
            ensure!(
                load.verified_instructions <= INSTRUCTIONS,
                "the verifier went through {} instructions, expected at most {INSTRUCTIONS}",
                load.verified_instructions
            );
        }
        Ok(())
    })
}

/// What the loader writes into the constants is known to the verifier.
#[test]
fn verifies_with_every_kind_of_pod() -> Result<()> {
    lab_test(|| {
        let mut scene = Scene::load(Paths.cilium_maps(), CiliumVersion::V1_18, Sizes::default())?;
        let mut load = |what: &str, config: PodConfig| -> Result<()> {
            scene.guard.become_pod(&config)?;
            let load = scene.guard.stub_load;
            println!("{what}: {load:?}");
            ensure!(load.verified_instructions > 0, "the kernel counted no instructions");
            ensure!(
                load.verified_instructions <= STUB_INSTRUCTIONS,
                "{what}: the verifier went through {} instructions, expected at most {STUB_INSTRUCTIONS}",
                load.verified_instructions
            );
            Ok(())
        };
        for flags in 0..8 {
            load(&format!("flags {flags}"), PodConfig { flags, ..pod_config() })?;
        }
        let config = PodConfig {
            flags: POD_HAS_IPV4,
            guarded_since: u64::MAX,
            fou_port: [0; 2],
            unmarked_drain: 0,
            ..pod_config()
        };
        load("odd", config)?;
        load("a slot without a core", PodConfig { core: (CORE_SLOTS - 1) as u8, ..pod_config() })?;
        load("no slot at all", PodConfig { core: u8::MAX, ..pod_config() })
    })
}
