//! One core for all pods: whose packet it is says the stub that it came through.

use std::net::IpAddr;

use anyhow::{Result, ensure};
use coil_guard_common::{
    abi::{CORE_SLOTS, PodConfig, mode},
    counters::Reason,
};
use coil_guard_tests::{
    cilium::{CiliumVersion, IpFamily},
    fou::{FOU_PORT, tcp},
    net::{Paths, lab_test},
    program::{REV_NAT, Scene, Sizes, pod_config},
};

use crate::support::{FAMILIES, each_family, ensure_untouched};

fn leaving(scene: &mut Scene, family: IpFamily) -> Result<()> {
    scene.begin(family, mode::RESET)?;
    scene.leaving(1, 0)
}

/// A slot without a core, and one that there is not: such a pod is not guarded, and nothing else happens to it.
#[test]
fn without_a_core_packets_pass_and_are_not_counted() -> Result<()> {
    lab_test(|| {
        let mut scene = Scene::load(Paths.cilium_maps(), CiliumVersion::V1_20, Sizes::default())?;
        for family in FAMILIES {
            leaving(&mut scene, family)?;
            scene.entry(FOU_PORT, 1, REV_NAT)?;
            let frame = scene.frame(FOU_PORT, &scene.tcp(1, tcp::ACK));
            let unguarded = |scene: &mut Scene, what: &str| -> Result<()> {
                let before = (scene.guard.counters()?, scene.guard.cilium().dump()?);
                let output = scene.guard.pass(&frame)?;
                ensure!(output == frame, "{what}: the packet was changed");
                ensure!(scene.guard.counters()? == before.0, "{what}: it was counted");
                ensure!(
                    before.1.changes(&scene.guard.cilium().dump()?).is_empty(),
                    "{what}: a map was changed"
                );
                Ok(())
            };
            scene.guard.set_core(false)?;
            unguarded(&mut scene, "no core")?;
            scene.guard.set_core(true)?;
            for slot in [CORE_SLOTS - 1, CORE_SLOTS, u32::from(u8::MAX)] {
                scene.guard.become_pod(&PodConfig { core: slot as u8, ..pod_config() })?;
                unguarded(&mut scene, &format!("slot {slot}"))?;
            }
            scene.guard.become_pod(&pod_config())?;
            let run = scene.run(&frame)?;
            ensure!(run.reason == Reason::Moved, "with its core again: {:?}", run.reason);
        }
        Ok(())
    })
}

/// Packets of two pods in turns, on the same CPU or not: each is judged by its own pod's addresses.
#[test]
fn each_packet_is_judged_by_the_pod_that_it_comes_from() -> Result<()> {
    each_family(|scene, family| {
        let mut other = pod_config();
        (other.address4[3], other.address6[15]) = (0x12, 0x12);
        other.generation += 1;
        leaving(scene, family)?;
        for round in 0..4 {
            let owner: IpAddr = scene.client();
            scene.guard.become_pod(&other)?;
            scene.entry(FOU_PORT, 1, REV_NAT)?;
            let frame = scene.frame(FOU_PORT, &scene.tcp(1, tcp::ACK));
            let run = scene.run(&frame)?;
            ensure!(
                run.reason == Reason::ForeignSource,
                "round {round}, {owner} from another pod: {:?}",
                run.reason
            );
            ensure_untouched(&frame, &run)?;
            scene.guard.become_pod(&pod_config())?;
            let run = scene.run(&frame)?;
            ensure!(run.reason == Reason::Moved, "round {round}, {family:?}: {:?}", run.reason);
        }
        Ok(())
    })
}
