//! Mode `drain`, from end to end: existing inner connections stay, new ones leave.

use std::{net::IpAddr, time::Duration};

use anyhow::{Context as _, Result, ensure};
use coil_guard_common::{abi::mark, decide::drain_port};
use coil_guard_tests::{
    cilium::{BackendState, CiliumVersion, IpFamily, MatchPolicy, Policy},
    fou::{InnerPacket, StreamReport, StreamSpec, inner::tcp, log::now},
    lab::{Lab, LabBuilder, eventually},
    net::lab_test,
    scenario::{Scenario, ScenarioBuilder, check},
};

const AFFINITY: Option<Duration> = Some(Duration::from_secs(10_800));
const PACE: Duration = Duration::from_millis(1);
const ENOUGH: u64 = 60;

fn drain(lab: LabBuilder) -> ScenarioBuilder {
    Scenario::builder(lab).mode("drain")
}

fn outside(family: IpFamily) -> Result<IpAddr> {
    Ok(match family {
        IpFamily::V4 => "198.51.100.7".parse()?,
        IpFamily::V6 => "2001:db8::7".parse()?,
    })
}

/// A TCP segment of the connection from `port`.
fn segment(scenario: &Scenario, family: IpFamily, port: u16, flags: u8) -> Result<InnerPacket> {
    let source = scenario.lab.client(0).address(family);
    Ok(InnerPacket::tcp((source, port), (outside(family)?, 443), flags))
}

fn segments(scenario: &Scenario, family: IpFamily, port: u16, flags: u8) -> Result<StreamSpec> {
    Ok(scenario.lab.spec(0, family).inner(vec![segment(scenario, family, port, flags)?]))
}

/// Opens a connection: a SYN and a few segments.
fn open(scenario: &Scenario, family: IpFamily, port: u16) -> Result<usize> {
    let syn = scenario.lab.stream(0, segments(scenario, family, port, tcp::SYN)?.count(1))?.finish(false)?;
    syn.ensure_exactly_once()?;
    let home = syn.backend_of(0).context("the SYN arrived")?;
    let more = scenario.lab.stream(0, segments(scenario, family, port, tcp::ACK)?.count(3))?.finish(false)?;
    check::stayed(&more, home).with_context(|| format!("connection {port} right after its SYN"))?;
    Ok(home)
}

/// Sends a few segments of an open connection.
fn go_on(scenario: &Scenario, family: IpFamily, port: u16) -> Result<StreamReport> {
    let report =
        scenario.lab.stream(0, segments(scenario, family, port, tcp::ACK)?.count(5))?.finish(false)?;
    report.ensure_exactly_once()?;
    Ok(report)
}

fn old_stay_and_new_leave(lab: LabBuilder, sport_auto: bool) -> Result<()> {
    lab_test(move || {
        let mut builder = drain(lab);
        if sport_auto {
            builder = builder.sport_auto();
        }
        let mut scenario = builder.start()?;
        for family in scenario.lab.families().to_vec() {
            let home = open(&scenario, family, 50_001)?;
            let spec = segments(&scenario, family, 50_001, tcp::ACK)?.interval(PACE);
            let old = scenario.lab.stream(0, spec)?;
            old.wait_arrived(ENOUGH, scenario.patience())?;
            scenario.terminate(home)?;
            scenario.wait_mark(home, mark::LEAVING)?;
            check::wait_settled();
            for port in 50_100..50_120 {
                let new = open(&scenario, family, port)?;
                ensure!(new != home, "{family:?}: new connection {port} went to the leaving backend {home}");
            }
            old.wait_arrived(old.sent() + ENOUGH, scenario.patience())?;
            let report = old.finish(true)?;
            check::stayed(&report, home).with_context(|| format!("{family:?}: the old connection"))?;
            report.ensure_answered_by(scenario.lab.service(family))?;
            let to_fou_port = report.replies().values().flatten().all(|record| record.destination.1 == 5555);
            ensure!(to_fou_port, "replies came to another port");
            // The pod is gone: the old connection is reset, and everything is 5555 again.
            scenario.cluster.force_delete(&scenario.backend_pod(home)?)?;
            scenario.lab.remove_backend(home)?;
            scenario.wait_mark_gone_or_absent(home)?;
            let after = go_on(&scenario, family, 50_001)?;
            ensure!(after.arrived_at(home).is_empty(), "a packet met the pod that is gone: {after:?}");
            let ports: Vec<_> = after.arrivals().values().flatten().map(|record| record.source.1).collect();
            ensure!(ports.iter().all(|port| *port == 5555), "source ports {ports:?} after the drain");
            scenario.announce_backend(home)?;
            scenario.lab.publish_backend(home)?;
            scenario.wait_mark(home, mark::READY)?;
        }
        Ok(())
    })
}

#[test]
fn old_connections_stay_and_new_ones_leave_cilium_1_17_affinity_match_kept() -> Result<()> {
    let lab = Lab::builder().version(CiliumVersion::V1_17).affinity(AFFINITY).match_policy(MatchPolicy::Kept);
    old_stay_and_new_leave(lab, false)
}

#[test]
fn old_connections_stay_and_new_ones_leave_cilium_1_20_affinity_match_dropped() -> Result<()> {
    let lab =
        Lab::builder().version(CiliumVersion::V1_20).affinity(AFFINITY).match_policy(MatchPolicy::Dropped);
    old_stay_and_new_leave(lab, false)
}

#[test]
fn old_connections_stay_and_new_ones_leave_cilium_1_16_no_affinity() -> Result<()> {
    old_stay_and_new_leave(Lab::builder().version(CiliumVersion::V1_16), false)
}

#[test]
fn source_port_auto_old_connections_stay_and_new_ones_leave() -> Result<()> {
    lab_test(|| {
        let lab =
            Lab::builder().version(CiliumVersion::V1_17).affinity(AFFINITY).match_policy(MatchPolicy::Kept);
        let mut scenario = drain(lab).sport_auto().start()?;
        let family = IpFamily::V4;
        // Each connection has its own outer port; two share one.
        let ports = [(50_001, 40_001), (50_002, 40_002), (50_003, 40_002)];
        let spec = |scenario: &Scenario, inner, outer, flags| -> Result<StreamSpec> {
            Ok(segments(scenario, family, inner, flags)?.source_port(outer))
        };
        let mut homes = Vec::new();
        for (inner, outer) in ports {
            let syn =
                scenario.lab.stream(0, spec(&scenario, inner, outer, tcp::SYN)?.count(1))?.finish(false)?;
            syn.ensure_exactly_once()?;
            homes.push(syn.backend_of(0).context("the SYN arrived")?);
        }
        let leaving = homes[1];
        scenario.terminate(leaving)?;
        scenario.wait_mark(leaving, mark::LEAVING)?;
        check::wait_settled();
        // A new connection on the shared outer port, and one on a port of its own.
        for (inner, outer) in [(51_001, 40_002), (51_002, 40_077)] {
            let syn =
                scenario.lab.stream(0, spec(&scenario, inner, outer, tcp::SYN)?.count(1))?.finish(false)?;
            syn.ensure_exactly_once()?;
            ensure!(syn.backend_of(0) != Some(leaving), "connection {inner} went to the leaving backend");
        }
        for ((inner, outer), home) in ports.into_iter().zip(homes) {
            let report =
                scenario.lab.stream(0, spec(&scenario, inner, outer, tcp::ACK)?.count(10))?.finish(false)?;
            check::stayed(&report, home).with_context(|| format!("connection {inner} under {outer}"))?;
        }
        Ok(())
    })
}

#[test]
fn the_deadline_resets_what_is_left() -> Result<()> {
    lab_test(|| {
        let mut scenario =
            drain(Lab::builder()).annotation("coil-guard.io/drain-timeout", "2s").grace(60).start()?;
        let family = IpFamily::V4;
        let home = open(&scenario, family, 50_001)?;
        let old = scenario.lab.stream(0, segments(&scenario, family, 50_001, tcp::ACK)?.interval(PACE))?;
        old.wait_arrived(ENOUGH, scenario.patience())?;
        let began = now();
        scenario.terminate(home)?;
        let address = scenario.lab.backend(home).address(family);
        eventually("arrival at another backend", scenario.patience(), || {
            let elsewhere = scenario.lab.log.with(|state| {
                state.streams[&old.number()].records.iter().any(|record| {
                    matches!(record.place, coil_guard_tests::fou::Place::Backend(index) if index != home)
                })
            });
            Ok(if elsewhere { Ok(()) } else { Err(format!("all at {address}")) })
        })?;
        let kept = Duration::from_nanos(now() - began);
        let report = old.finish(true)?;
        report.ensure_exactly_once()?;
        ensure!(
            kept > Duration::from_millis(1900),
            "the drain-timeout is 2s, and the flow was cut after {kept:?}"
        );
        eventually("count of the cut flow", scenario.patience(), || {
            let cut = scenario.agent()?.metric("coil_guard_egress_actions_total", &["action=\"cut\""])?;
            Ok(if cut >= 1.0 { Ok(()) } else { Err(cut) })
        })
    })
}

#[test]
fn replies_pass_default_deny_after_a_long_pause() -> Result<()> {
    lab_test(|| {
        let lifetime = Duration::from_secs(2);
        let lab = Lab::builder().affinity(AFFINITY).policy(Policy::DefaultDeny).lifetime(lifetime);
        let mut scenario = drain(lab).start()?;
        let _garbage = scenario.lab.start_garbage_collection(Duration::from_millis(200))?;
        for family in scenario.lab.families().to_vec() {
            let home = open(&scenario, family, 50_001)?;
            scenario.terminate(home)?;
            scenario.wait_mark(home, mark::LEAVING)?;
            check::wait_settled();
            ensure!(open(&scenario, family, 50_002)? != home);
            go_on(&scenario, family, 50_001)?.ensure_answered_by(scenario.lab.service(family))?;
            // The connection is quiet until the garbage collection has taken every entry of it.
            eventually("collected entries", 4 * lifetime, || {
                let id = scenario.lab.backend_id(family, home)?;
                let port = u16::from_be_bytes(drain_port(id));
                let entry = scenario.lab.service_entry(0, family, port)?;
                let egress = scenario.lab.egress_entry(0, family, 5555, home)?;
                Ok(if entry.is_none() && egress.is_none() { Ok(()) } else { Err((entry, egress)) })
            })?;
            let after = go_on(&scenario, family, 50_001)?;
            check::stayed(&after, home)?;
            after.ensure_answered_by(scenario.lab.service(family))?;
            scenario.cluster.force_delete(&scenario.backend_pod(home)?)?;
            scenario.lab.remove_backend(home)?;
        }
        Ok(())
    })
}

#[test]
fn connections_opened_while_nothing_was_live_drain_too() -> Result<()> {
    lab_test(|| {
        let mut scenario = drain(Lab::builder().backends(2).published(1)).start()?;
        let family = IpFamily::V4;
        let home = open(&scenario, family, 50_001)?;
        ensure!(home == 0);
        scenario.terminate(0)?;
        scenario.wait_mark(0, mark::LEAVING)?;
        check::wait_settled();
        ensure!(open(&scenario, family, 50_002)? == 0, "there is no other backend");
        scenario.announce_backend(1)?;
        scenario.lab.publish_backend(1)?;
        scenario.wait_mark(1, mark::READY)?;
        ensure!(open(&scenario, family, 50_003)? == 1, "new connections go to the replacement");
        for port in [50_001, 50_002] {
            check::stayed(&go_on(&scenario, family, port)?, 0)
                .with_context(|| format!("connection {port}"))?;
        }
        check::stayed(&go_on(&scenario, family, 50_003)?, 1)
    })
}

#[test]
fn a_backend_that_comes_back_keeps_its_flows() -> Result<()> {
    lab_test(|| {
        let scenario = drain(Lab::builder()).start()?;
        let family = IpFamily::V4;
        let home = open(&scenario, family, 50_001)?;
        let pod = scenario.backend_pod(home)?;
        let old = scenario.lab.stream(0, segments(&scenario, family, 50_001, tcp::ACK)?.interval(PACE))?;
        old.wait_arrived(ENOUGH, scenario.patience())?;
        scenario.cluster.set_ready(&pod, false)?;
        scenario.wait_mark(home, mark::NOT_READY)?;
        check::wait_settled();
        let moved = open(&scenario, family, 50_002)?;
        ensure!(moved != home, "new connections avoid a backend that is not ready");
        old.wait_arrived(old.sent() + ENOUGH, scenario.patience())?;
        scenario.cluster.set_ready(&pod, true)?;
        scenario.wait_mark(home, mark::READY)?;
        old.wait_arrived(old.sent() + ENOUGH, scenario.patience())?;
        check::stayed(&old.finish(true)?, home)?;
        check::stayed(&go_on(&scenario, family, 50_002)?, moved)
    })
}

#[test]
fn marked_drains_go_on_without_the_agent() -> Result<()> {
    lab_test(|| {
        let mut scenario = drain(Lab::builder()).grace(60).start()?;
        let family = IpFamily::V4;
        let home = open(&scenario, family, 50_001)?;
        scenario.terminate(home)?;
        scenario.wait_mark(home, mark::LEAVING)?;
        check::wait_settled();
        scenario.kill_agent()?;
        ensure!(open(&scenario, family, 50_002)? != home);
        // Longer than a drain that no agent has marked.
        std::thread::sleep(Duration::from_secs(6));
        check::stayed(&go_on(&scenario, family, 50_001)?, home)
    })
}

#[test]
fn without_an_agent_a_leaving_backend_drains_for_five_seconds() -> Result<()> {
    lab_test(|| {
        let mut scenario = drain(Lab::builder()).start()?;
        let family = IpFamily::V4;
        let home = open(&scenario, family, 50_001)?;
        scenario.kill_agent()?;
        scenario.lab.set_backend(home, BackendState::Terminating)?;
        check::stayed(&go_on(&scenario, family, 50_001)?, home)?;
        check::wait_settled();
        ensure!(open(&scenario, family, 50_002)? != home);
        check::stayed(&go_on(&scenario, family, 50_001)?, home)?;
        std::thread::sleep(Duration::from_millis(5_200));
        let after = go_on(&scenario, family, 50_001)?;
        ensure!(after.arrived_at(home).is_empty(), "still on the leaving backend after 5 s: {after:?}");
        Ok(())
    })
}

#[test]
fn a_syn_of_a_known_tuple_is_a_new_flow() -> Result<()> {
    lab_test(|| {
        let mut scenario = drain(Lab::builder()).start()?;
        let family = IpFamily::V4;
        let home = open(&scenario, family, 50_001)?;
        scenario.terminate(home)?;
        scenario.wait_mark(home, mark::LEAVING)?;
        check::wait_settled();
        check::stayed(&go_on(&scenario, family, 50_001)?, home)?;
        let again = open(&scenario, family, 50_001)?;
        ensure!(again != home, "the new connection of an old tuple went to the leaving backend");
        check::stayed(&go_on(&scenario, family, 50_001)?, again)
    })
}
