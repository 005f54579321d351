//! Mode `rewrite`, from end to end: Cilium's maps are only read, and Cilium itself chooses anew.

use std::{collections::BTreeSet, time::Duration};

use anyhow::{Context as _, Result, ensure};
use coil_guard_common::abi::{REWRITE_PORT_FIRST, mark};
use coil_guard_tests::{
    cilium::{AttachKind, BackendState, CiliumVersion, IpFamily, MatchPolicy},
    fou::{StreamReport, log::now},
    lab::{Lab, LabBuilder, eventually},
    net::lab_test,
    scenario::{EGRESS, NAMESPACE, Scenario, ScenarioBuilder, check},
};

const AFFINITY: Option<Duration> = Some(Duration::from_secs(10_800));
const PACE: Duration = Duration::from_millis(1);
/// Packets on each side of an event.
const ENOUGH: u64 = 60;

fn rewrite(lab: LabBuilder) -> ScenarioBuilder {
    Scenario::builder(lab).mode("rewrite")
}

/// Source ports of the packets that were sent at or after a time, as they arrived.
fn ports_since(report: &StreamReport, since: u64) -> BTreeSet<u16> {
    let late = report.arrivals().into_iter().filter(|(sequence, _)| report.sent[*sequence as usize] >= since);
    late.flat_map(|(_, records)| records).map(|record| record.source.1).collect()
}

/// Cilium first, so that it has taken the pod out of its slots when the agent tells that it leaves.
fn terminate(scenario: &mut Scenario, index: usize) -> Result<()> {
    scenario.lab.set_backend(index, BackendState::Terminating)?;
    scenario.cluster.terminate(&scenario.backend_pod(index)?, None)?;
    scenario.wait_mark(index, mark::LEAVING)
}

/// The pod is gone for good, and another one takes its place.
fn comes_back(scenario: &mut Scenario, index: usize) -> Result<()> {
    scenario.cluster.force_delete(&scenario.backend_pod(index)?)?;
    scenario.lab.remove_backend(index)?;
    scenario.announce_backend(index)?;
    scenario.lab.publish_backend(index)?;
    scenario.wait_mark(index, mark::READY)
}

/// Which backend the client's entry under a port of the range names.
fn bound_by(scenario: &Scenario, family: IpFamily, ports: &BTreeSet<u16>) -> Result<(u16, usize)> {
    let port = *ports.first().context("no port was seen")?;
    ensure!(ports.len() == 1 && port >= REWRITE_PORT_FIRST, "sent from ports {ports:?}");
    Ok((port, scenario.bound(0, family, port)?))
}

/// Sends from every port of both families and lets the bound backend leave three times in a row, as a rolling update does.
fn leaves_with_next_packet(lab: LabBuilder, attach: &str, auto: bool) -> Result<()> {
    lab_test(move || {
        let mut builder = rewrite(lab).arguments(&["--attach", attach]);
        if auto {
            builder = builder.sport_auto();
        }
        let mut scenario = builder.start()?;
        for family in scenario.lab.families().to_vec() {
            for port in [5555, 40_123] {
                roll(&mut scenario, family, port).with_context(|| format!("{family:?}, port {port}"))?;
            }
        }
        Ok(())
    })
}

fn roll(scenario: &mut Scenario, family: IpFamily, own: u16) -> Result<()> {
    let mut port = own;
    for _ in 0..3 {
        let spec = scenario.lab.spec(0, family).source_port(own).interval(PACE);
        let stream = scenario.lab.stream(0, spec)?;
        stream.wait_arrived(ENOUGH, scenario.patience())?;
        let from = scenario.bound(0, family, port)?;
        terminate(scenario, from)?;
        let since = now();
        stream.wait_arrived(stream.sent() + ENOUGH, scenario.patience())?;
        let report = stream.finish(true)?;
        check::left(&report, from, since).with_context(|| format!("away from backend {from}"))?;
        ensure!(report.unanswered().is_empty(), "packets without a reply: {report:?}");
        let (given, to) = bound_by(scenario, family, &ports_since(&report, since))?;
        ensure!(given != port && to != from, "{given} leads to {to}, it was {port} to {from}");
        // Nobody wrote to the entry that the flow had.
        ensure!(scenario.bound(0, family, port)? == from, "the entry under port {port} was changed");
        comes_back(scenario, from)?;
        port = given;
    }
    Ok(())
}

#[test]
fn flow_leaves_cilium_1_14_no_affinity() -> Result<()> {
    leaves_with_next_packet(Lab::builder().version(CiliumVersion::V1_14), "tcx", false)
}

#[test]
fn flow_leaves_cilium_1_17_no_affinity_clsact_auto() -> Result<()> {
    let lab = Lab::builder().version(CiliumVersion::V1_17).attach(AttachKind::Clsact);
    leaves_with_next_packet(lab, "clsact", true)
}

#[test]
fn flow_leaves_cilium_1_18_affinity_match_dropped() -> Result<()> {
    let lab =
        Lab::builder().version(CiliumVersion::V1_18).affinity(AFFINITY).match_policy(MatchPolicy::Dropped);
    leaves_with_next_packet(lab, "tcx", false)
}

#[test]
fn flow_leaves_cilium_1_20_affinity_match_dropped_auto() -> Result<()> {
    let lab =
        Lab::builder().version(CiliumVersion::V1_20).affinity(AFFINITY).match_policy(MatchPolicy::Dropped);
    leaves_with_next_packet(lab, "tcx", true)
}

#[test]
fn where_affinity_holds_the_flow_it_stays_and_that_is_said() -> Result<()> {
    lab_test(|| {
        let lab =
            Lab::builder().version(CiliumVersion::V1_17).affinity(AFFINITY).match_policy(MatchPolicy::Kept);
        let mut scenario = rewrite(lab).start()?;
        let family = IpFamily::V4;
        let stream = scenario.lab.stream(0, scenario.lab.spec(0, family).interval(PACE))?;
        stream.wait_arrived(ENOUGH, scenario.patience())?;
        let from = scenario.bound(0, family, 5555)?;
        terminate(&mut scenario, from)?;
        let told = eventually("event about flows that cannot move", scenario.patience(), || {
            let events = scenario.events();
            let found = events.iter().find(|(reason, _)| reason == "FlowsCannotMove").cloned();
            Ok(found.ok_or_else(|| format!("{events:?}")))
        });
        let (_, note) = scenario.explain(told)?;
        ensure!(note.contains("session affinity would send them back"), "{note}");
        let agent = scenario.agent()?;
        ensure!(agent.metric("coil_guard_flow_events_total", &["kind=\"cannot_move\""])? >= 1.0);
        ensure!(agent.metric("coil_guard_egress_actions_total", &["action=\"cannot_move\""])? >= 100.0);
        // Cilium drops the backend: that it handles by itself.
        scenario.cluster.force_delete(&scenario.backend_pod(from)?)?;
        scenario.lab.remove_backend(from)?;
        let since = now();
        stream.wait_arrived(stream.sent() + ENOUGH, scenario.patience())?;
        let report = stream.finish(true)?;
        check::left(&report, from, since)?;
        ensure!(ports_since(&report, 0) == [5555].into(), "{:?}", ports_since(&report, 0));
        Ok(())
    })
}

#[test]
fn a_healthy_flow_keeps_its_port_and_a_restarted_agent_keeps_those_given() -> Result<()> {
    lab_test(|| {
        let mut scenario = rewrite(Lab::builder()).start()?;
        for family in scenario.lab.families().to_vec() {
            let stream = scenario.lab.stream(0, scenario.lab.spec(0, family).interval(PACE))?;
            stream.wait_arrived(ENOUGH, scenario.patience())?;
            let from = scenario.bound(0, family, 5555)?;
            // Another one leaves and is replaced: nothing to this flow.
            let other = (from + 1) % 3;
            terminate(&mut scenario, other)?;
            stream.wait_arrived(stream.sent() + ENOUGH, scenario.patience())?;
            comes_back(&mut scenario, other)?;
            let moved = now();
            terminate(&mut scenario, from)?;
            let since = now();
            stream.wait_arrived(stream.sent() + ENOUGH, scenario.patience())?;
            scenario.kill_agent()?;
            stream.wait_arrived(stream.sent() + ENOUGH, scenario.patience())?;
            scenario.start_agent()?;
            stream.wait_arrived(stream.sent() + ENOUGH, scenario.patience())?;
            let report = stream.finish(true)?;
            check::left(&report, from, since)?;
            let before: BTreeSet<_> = report
                .arrivals()
                .iter()
                .filter(|(sequence, _)| report.sent[**sequence as usize] < moved)
                .flat_map(|(_, records)| records.iter().map(|record| record.source.1))
                .collect();
            ensure!(before == [5555].into(), "a healthy flow was sent from {before:?}");
            bound_by(&scenario, family, &ports_since(&report, since))?;
            comes_back(&mut scenario, from)?;
        }
        Ok(())
    })
}

#[test]
fn the_mode_is_switched_while_packets_flow() -> Result<()> {
    lab_test(|| {
        let mut scenario = rewrite(Lab::builder()).start()?;
        let family = IpFamily::V4;
        let stream = scenario.lab.stream(0, scenario.lab.spec(0, family).interval(PACE))?;
        stream.wait_arrived(ENOUGH, scenario.patience())?;
        let from = scenario.bound(0, family, 5555)?;
        terminate(&mut scenario, from)?;
        stream.wait_arrived(stream.sent() + ENOUGH, scenario.patience())?;
        ensure!(scenario.bound(0, family, 5555)? == from, "rewrite wrote");
        // Reset goes by the flow's own port, and moves its entry off the leaving backend.
        scenario.set_mode(Some("reset"))?;
        let moved = eventually("entry moved by reset", scenario.patience(), || {
            let bound = scenario.lab.bound_backend(0, family, 5555)?;
            Ok(if bound == Some(from) { Err(format!("{bound:?}")) } else { Ok(()) })
        });
        scenario.explain(moved)?;
        stream.wait_arrived(stream.sent() + ENOUGH, scenario.patience())?;
        let since = now();
        stream.wait_arrived(stream.sent() + ENOUGH, scenario.patience())?;
        scenario.set_mode(Some("rewrite"))?;
        stream.wait_arrived(stream.sent() + ENOUGH, scenario.patience())?;
        scenario.set_mode(Some("off"))?;
        scenario.wait_detached(0)?;
        stream.wait_arrived(stream.sent() + ENOUGH, scenario.patience())?;
        let report = stream.finish(true)?;
        report.ensure_exactly_once()?;
        ensure!(ports_since(&report, since) == [5555].into(), "{:?}", ports_since(&report, since));
        Ok(())
    })
}

#[test]
fn modes_that_write_are_refused_where_cilium_may_only_be_read() -> Result<()> {
    lab_test(|| {
        let mut scenario = rewrite(Lab::builder()).arguments(&["--cilium-access", "read-only"]).start()?;
        for mode in ["reset", "drain"] {
            scenario.set_mode(Some(mode))?;
            scenario.wait_detached(0)?;
            let told = eventually("event about the refused mode", scenario.patience(), || {
                let events = scenario.events();
                let found = events.iter().any(|(reason, note)| {
                    reason == "GuardModeRefused" && note.contains("--cilium-access read-only")
                });
                Ok(if found { Ok(()) } else { Err(format!("{events:?}")) })
            });
            scenario.explain(told)?;
            ensure!(scenario.agent()?.metric("coil_guard_refused_egresses", &[])? == 1.0);
            scenario.set_mode(Some("rewrite"))?;
            scenario.wait_attached(0)?;
        }
        let family = IpFamily::V6;
        let stream = scenario.lab.stream(0, scenario.lab.spec(0, family).interval(PACE))?;
        stream.wait_arrived(ENOUGH, scenario.patience())?;
        let from = scenario.bound(0, family, 5555)?;
        terminate(&mut scenario, from)?;
        let since = now();
        stream.wait_arrived(stream.sent() + ENOUGH, scenario.patience())?;
        check::left(&stream.finish(true)?, from, since)?;
        ensure!(scenario.agent()?.metric("coil_guard_refused_egresses", &[])? == 0.0);
        ensure!(
            scenario.agent()?.metric(
                "coil_guard_egress_actions_total",
                &[
                    "action=\"rewritten\"",
                    &format!("egress=\"{EGRESS}\""),
                    &format!("namespace=\"{NAMESPACE}\"")
                ]
            )? > 0.0
        );
        Ok(())
    })
}
