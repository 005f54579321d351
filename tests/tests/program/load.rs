//! The verifier takes the program, at a cost that a node with hundreds of client pods can pay.

use anyhow::{Result, ensure};
use coil_guard_common::abi::{POD_HAS_IPV4, PodConfig};
use coil_guard_tests::{
    cilium::CiliumVersion,
    net::{Paths, lab_test},
    program::{Scene, Sizes, pod_config},
};

/// The kernel's limit is a million; the cost of a load grows with it.
const INSTRUCTIONS: u32 = 80_000;

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

/// What the loader writes into the constants decides which branches are dead to the verifier: each combination is a program
/// of its own.
#[test]
fn verifies_with_every_kind_of_pod() -> Result<()> {
    lab_test(|| {
        for flags in 0..8 {
            let directory = Paths.cilium_maps().join(flags.to_string());
            let config = PodConfig { flags, ..pod_config() };
            let scene = Scene::load_for(&directory, CiliumVersion::V1_18, Sizes::default(), &config)?;
            println!("flags {flags}: {} instructions", scene.guard.load.verified_instructions);
        }
        let config = PodConfig {
            flags: POD_HAS_IPV4,
            guarded_since: u64::MAX,
            fou_port: [0; 2],
            unmarked_drain: 0,
            ..pod_config()
        };
        Scene::load_for(&Paths.cilium_maps().join("odd"), CiliumVersion::V1_18, Sizes::default(), &config)?;
        Ok(())
    })
}
