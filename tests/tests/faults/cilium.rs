//! Cilium's maps change under the agent.

use std::{
    collections::BTreeMap,
    fs,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use aya::maps::MapInfo;
use coil_guard_tests::{
    cilium::{CiliumVersion, IpFamily, MapKind, MapOptions, MapShape},
    lab::{Lab, eventually},
    net::{Paths, lab_test},
    scenario::{Agent, Scenario},
};

use crate::support::{finish, guards, leaves_nothing, link_id, streams};

/// What is promised, and what the machine may take on top.
const REBOUND_WITHIN: Duration = Duration::from_secs(5);
const MACHINE: Duration = Duration::from_secs(5);

/// What is pinned in Cilium's directory: names and map ids.
fn cilium_pins() -> Result<BTreeMap<String, u32>> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(Paths.cilium_maps())? {
        let path = entry?.path();
        let info = MapInfo::from_pin(&path).with_context(|| format!("no map at {}", path.display()))?;
        found.insert(path.file_name().unwrap_or_default().to_string_lossy().into_owned(), info.id());
    }
    Ok(found)
}

fn binds(scenario: &Scenario) -> Result<u64> {
    Ok(scenario.agent()?.metric("coil_guard_cilium_binds_total", &[])? as u64)
}

/// Waits for one more binding, and says how long it took.
fn wait_bound(scenario: &Scenario, before: u64) -> Result<()> {
    let since = Instant::now();
    let bound = eventually("new binding", scenario.patience(), || {
        let now = binds(scenario)?;
        Ok(if now > before { Ok(()) } else { Err(now) })
    });
    scenario.explain(bound)?;
    eprintln!("bound anew after {:.1?}", since.elapsed());
    ensure!(since.elapsed() < REBOUND_WITHIN + MACHINE, "bound anew after {:?} only", since.elapsed());
    scenario.wait_attached(0)
}

#[test]
fn maps_that_are_made_anew_are_bound_anew_whoever_runs_then() -> Result<()> {
    lab_test(|| {
        let mut scenario = Scenario::builder(Lab::builder()).mode("reset").start()?;
        let link = link_id(&scenario, 0)?;
        let running = streams(&scenario, &[0], Duration::from_millis(2))?;
        guards(&mut scenario, IpFamily::V4)?;
        // Other ids and sizes; then other flags (1.20's services are read-only for programs, 1.16's are not).
        for (version, conntrack_entries) in [(CiliumVersion::V1_20, 32_768), (CiliumVersion::V1_16, 131_072)]
        {
            let before = binds(&scenario)?;
            scenario.lab.recreate_maps(MapOptions { conntrack_entries, ..MapOptions::new(version) })?;
            let pinned = cilium_pins()?;
            wait_bound(&scenario, before)?;
            guards(&mut scenario, IpFamily::V4)?;
            guards(&mut scenario, IpFamily::V6)?;
            ensure!(cilium_pins()? == pinned, "Cilium's pins were {pinned:?}, now {:?}", cilium_pins()?);
        }
        // While no agent runs.
        scenario.kill_agent()?;
        scenario.lab.recreate_maps(MapOptions::new(CiliumVersion::V1_20))?;
        scenario.start_agent()?;
        guards(&mut scenario, IpFamily::V4)?;
        ensure!(link_id(&scenario, 0)? == link, "the link was made anew");
        finish(running)?;
        leaves_nothing(&scenario, &[0])
    })
}

#[test]
fn pins_that_are_removed_and_brought_back_interrupt_nothing() -> Result<()> {
    lab_test(|| {
        let mut scenario = Scenario::builder(Lab::builder()).mode("reset").start()?;
        let running = streams(&scenario, &[0], Duration::from_millis(2))?;
        let names: Vec<_> = scenario.lab.maps.names().collect();
        let pinned = cilium_pins()?;
        for name in &names {
            scenario.lab.maps.unpin(name)?;
        }
        scenario.agent()?.wait_log(&["not bound to Cilium's maps"], scenario.patience())?;
        scenario.wait_attached(0)?;
        wait_unready(&scenario)?;
        // The programs still have the maps: an agent of Cilium's that is down has left them as they are.
        guards(&mut scenario, IpFamily::V4)?;
        ensure!(cilium_pins()?.is_empty(), "a map was made in Cilium's place: {:?}", cilium_pins()?);
        let before = binds(&scenario)?;
        for name in &names {
            scenario.lab.maps.restore_pin(name)?;
        }
        wait_bound(&scenario, before)?;
        guards(&mut scenario, IpFamily::V6)?;
        ensure!(cilium_pins()? == pinned, "Cilium's pins were {pinned:?}, now {:?}", cilium_pins()?);
        finish(running)?;
        leaves_nothing(&scenario, &[0])
    })
}

#[test]
fn ipv6_maps_that_appear_later_are_bound() -> Result<()> {
    lab_test(|| {
        let mut scenario = Scenario::builder(Lab::builder()).mode("reset").no_agent().start()?;
        let names: Vec<_> = scenario.lab.maps.names().filter(|name| name.contains('6')).collect();
        ensure!(names.len() >= 3, "IPv6's maps are {names:?}");
        for name in &names {
            scenario.lab.maps.unpin(name)?;
        }
        scenario.start_agent()?;
        scenario.wait_attached(0)?;
        let running = streams(&scenario, &[0], Duration::from_millis(2))?;
        let bound = scenario.bound(0, IpFamily::V4, 5555)?;
        let pod = scenario.backend_pod(bound)?;
        scenario.cluster.terminate(&pod, None)?;
        let left = eventually("end of the IPv4 flow's stay", scenario.patience(), || {
            let now = scenario.lab.bound_backend(0, IpFamily::V4, 5555)?;
            Ok(if now == Some(bound) { Err(now) } else { Ok(()) })
        });
        scenario.explain(left)?;
        ensure!(cilium_pins()?.keys().all(|name| !names.contains(&name.as_str())), "IPv6 maps were made");
        scenario.cluster.force_delete(&pod)?;
        scenario.announce_backend(bound)?;
        let before = binds(&scenario)?;
        for name in &names {
            scenario.lab.maps.restore_pin(name)?;
        }
        wait_bound(&scenario, before)?;
        guards(&mut scenario, IpFamily::V6)?;
        finish(running)?;
        leaves_nothing(&scenario, &[0])
    })
}

/// Readiness hears of what the log told a moment later.
fn wait_unready(scenario: &Scenario) -> Result<()> {
    let agent = scenario.agent()?;
    eventually("an agent that is not ready for want of Cilium's maps", scenario.patience(), || {
        let (ready, body) = agent.ready()?;
        Ok(if !ready && body.contains("[-]cilium_maps") { Ok(()) } else { Err(body) })
    })
}

/// Another layout of one map: refused, named, and the programs that are bound to the old map are taken off.
fn refused(scenario: &Scenario, name: &str, shape: MapShape, told: &[&str]) -> Result<()> {
    let since = Instant::now();
    scenario.lab.maps.pin_imposter(name, shape)?;
    let pinned = cilium_pins()?;
    scenario.agent()?.wait_log(&[&["ERROR", name], told].concat(), scenario.patience())?;
    scenario.wait_detached(0)?;
    ensure!(since.elapsed() < REBOUND_WITHIN + MACHINE, "{name}: detached after {:?} only", since.elapsed());
    wait_unready(scenario).with_context(|| name.to_owned())?;
    ensure!(cilium_pins()? == pinned, "Cilium's pins were {pinned:?}, now {:?}", cilium_pins()?);
    Ok(())
}

#[test]
fn another_layout_detaches_and_the_known_one_is_guarded_again() -> Result<()> {
    lab_test(|| {
        let mut scenario = Scenario::builder(Lab::builder()).mode("reset").start()?;
        let running = streams(&scenario, &[0], Duration::from_millis(2))?;
        let shapes = MapOptions::new(CiliumVersion::V1_20).shapes();
        let of = |name: &str| shapes[name];
        let conntrack = "cilium_ct_any6_global";
        let services = "cilium_lb4_services_v2";
        let backends = "cilium_lb4_backends_v3";
        let others = [
            (backends, MapShape { value_size: 20, ..of(backends) }, ["20", "12"]),
            (conntrack, MapShape { key_size: 44, ..of(conntrack) }, ["44", "38"]),
            (services, MapShape { kind: MapKind::LruHash, flags: 0, ..of(services) }, ["LruHash", "Hash"]),
        ];
        for (name, shape, told) in others {
            let before = binds(&scenario)?;
            refused(&scenario, name, shape, &told)?;
            scenario.lab.maps.restore_pin(name)?;
            wait_bound(&scenario, before)?;
            guards(&mut scenario, IpFamily::V4)?;
        }
        // While no agent runs: the next one takes off what the one before had attached.
        scenario.kill_agent()?;
        let name = "cilium_lb4_affinity";
        scenario.lab.maps.pin_imposter(name, MapShape { value_size: 24, ..of(name) })?;
        scenario.agent = Some(Agent::start(&scenario.api, &[])?);
        scenario.agent()?.wait_log(&["ERROR", name, "24", "16"], scenario.patience())?;
        scenario.wait_detached(0)?;
        scenario.lab.maps.restore_pin(name)?;
        scenario.wait_attached(0)?;
        guards(&mut scenario, IpFamily::V6)?;
        finish(running)?;
        leaves_nothing(&scenario, &[0])
    })
}
