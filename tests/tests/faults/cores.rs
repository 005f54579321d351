//! The core program is replaced under traffic of several pods.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use coil_guard::datapath::Snapshot;
use coil_guard_common::abi::mark;
use coil_guard_tests::{
    cilium::{CiliumVersion, IpFamily, MapOptions},
    lab::{Lab, eventually},
    net::lab_test,
    scenario::Scenario,
};

use crate::support::{counted, finish, guard_pins, leaves_nothing, sent, streams, wait_left};

const CLIENTS: [usize; 3] = [0, 1, 2];

/// Kernel ids of the core, and of the programs in the pods.
fn programs() -> Result<(u32, Vec<u32>)> {
    let snapshot = Snapshot::read(&guard_pins())?;
    let core = *snapshot.cores.get("guard").context("no core is loaded")?;
    Ok((core, snapshot.pods.values().map(|pod| pod.program_id).collect()))
}

/// A backend leaves by the agent's mark alone, so that only a core that is bound to the present maps can move flows off it: all
/// pods' flows do.
fn all_pods_leave(scenario: &mut Scenario) -> Result<()> {
    for family in [IpFamily::V4, IpFamily::V6] {
        let bound = scenario.bound(0, family, 5555)?;
        let pod = scenario.backend_pod(bound)?;
        scenario.cluster.terminate(&pod, None)?;
        scenario.wait_mark(bound, mark::LEAVING)?;
        wait_left(scenario, &CLIENTS, bound)?;
        scenario.cluster.force_delete(&pod)?;
        scenario.announce_backend(bound)?;
        scenario.wait_mark(bound, mark::READY)?;
    }
    Ok(())
}

#[test]
fn a_core_that_is_replaced_under_traffic_switches_all_pods_and_loses_nothing() -> Result<()> {
    lab_test(|| {
        let lab = Lab::builder().clients(CLIENTS.len());
        let mut scenario = Scenario::builder(lab).mode("reset").start()?;
        CLIENTS.into_iter().try_for_each(|client| scenario.wait_attached(client))?;
        let running = streams(&scenario, &CLIENTS, Duration::from_millis(2))?;
        let (mut core, stubs) = programs()?;
        ensure!(stubs.len() == CLIENTS.len(), "{stubs:?}");
        for round in 0..4 {
            if round % 2 == 0 {
                // Another agent, the same maps.
                scenario.kill_agent()?;
                ensure!(programs()? == (core, stubs.clone()), "something went with the agent");
                scenario.start_agent()?;
            } else {
                scenario.lab.recreate_maps(MapOptions::new(CiliumVersion::V1_20))?;
            }
            let replaced = eventually("another core under the same stubs", scenario.patience(), || {
                let now = programs()?;
                Ok(if now.0 != core && now.1 == stubs { Ok(now.0) } else { Err(now) })
            });
            core = scenario.explain(replaced)?;
            all_pods_leave(&mut scenario).with_context(|| format!("round {round}"))?;
        }
        counted(&scenario, sent(&finish(running)?))?;
        leaves_nothing(&scenario, &CLIENTS)
    })
}
