//! The core that only reads Cilium's maps. The proof is the kernel's: over maps that no program may write, its verifier takes
//! this one and refuses the other.

use anyhow::{Result, ensure};
use coil_guard_common::{abi::mode, cilium::BACKEND_TERMINATING, counters::Reason};
use coil_guard_tests::{
    cilium::{CiliumVersion, MapOptions},
    fou::{FOU_PORT, tcp},
    net::{Paths, lab_test},
    program::{Instance, REV_NAT, Scene, pod_config},
};

use crate::support::{FAMILIES, ensure_same_packet, ensure_untouched};

fn sealed(version: CiliumVersion) -> MapOptions {
    MapOptions { sealed: true, ..MapOptions::new(version) }
}

#[test]
fn the_verifier_takes_it_over_maps_that_no_program_may_write_and_refuses_the_other() -> Result<()> {
    lab_test(|| {
        for version in CiliumVersion::ALL {
            let directory = Paths.cilium_maps().join(version.minor().to_string());
            let load = |name: &str, read_only| {
                Instance::load_core(&directory.join(name), sealed(version), &pod_config(), read_only)
            };
            println!("Cilium {version}: {:?}", load("read-only", true)?.load);
            let Err(refused) = load("guard", false) else {
                anyhow::bail!(
                    "Cilium {version}: the core that writes was taken over maps that no program may write"
                )
            };
            let text = format!("{refused:#}");
            ensure!(text.contains("write into map forbidden"), "refused for another reason: {text}");
        }
        Ok(())
    })
}

#[test]
fn it_rewrites_and_in_a_mode_that_writes_it_leaves_everything_as_it_is() -> Result<()> {
    lab_test(|| {
        let version = CiliumVersion::V1_18;
        let guard = Instance::load_core(Paths.cilium_maps(), sealed(version), &pod_config(), true)?;
        let mut scene = Scene::new(guard, version);
        for family in FAMILIES {
            for mode in [mode::REWRITE, mode::RESET, mode::DRAIN, mode::AUDIT] {
                scene.begin(family, mode)?;
                scene.backend(1, BACKEND_TERMINATING)?;
                scene.service(&[2], false)?;
                scene.entry(FOU_PORT, 1, REV_NAT)?;
                scene.leaving(1, 0)?;
                let frame = scene.frame(FOU_PORT, &scene.tcp(1000, tcp::SYN));
                let run = scene.run(&frame)?;
                ensure!(run.changes.is_empty(), "{family:?}, mode {mode}: {:?}", run.changes);
                match mode {
                    mode::REWRITE => ensure!(run.reason == Reason::NewPort, "{run:?}"),
                    mode::AUDIT => {
                        ensure!(run.reason == Reason::WouldMove, "{run:?}");
                        ensure_untouched(&frame, &run)?;
                    }
                    _ => {
                        ensure!(run.reason == Reason::Contended, "{run:?}");
                        ensure_same_packet(&frame, &run)?;
                    }
                }
            }
        }
        Ok(())
    })
}
