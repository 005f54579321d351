//! Mode `reset`, from end to end: the lab, the API, the real agent.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use coil_guard_common::abi::mark;
use coil_guard_tests::{
    cilium::{AttachKind, BackendState, CiliumVersion, IpFamily, MatchPolicy},
    fou::log::now,
    lab::{Lab, LabBuilder, eventually},
    net::lab_test,
    scenario::{EGRESS, NAMESPACE, Scenario, ScenarioBuilder, check},
};

const AFFINITY: Option<Duration> = Some(Duration::from_secs(10_800));
/// Fast enough that a break of milliseconds shows, slow enough for two cores.
const PACE: Duration = Duration::from_micros(500);
/// Packets on each side of an event.
const ENOUGH: u64 = 100;

fn reset(lab: LabBuilder) -> ScenarioBuilder {
    Scenario::builder(lab).mode("reset").annotation("coil-guard.io/not-ready-after", "2s")
}

/// Sends from every port of both families, makes the bound backend leave by `event`, and checks each flow.
fn leave_with_next_packet(
    scenario: &mut Scenario,
    ports: &[u16],
    event: impl Fn(&mut Scenario, usize) -> Result<()>,
) -> Result<()> {
    for family in scenario.lab.families().to_vec() {
        for port in ports {
            let spec = scenario.lab.spec(0, family).source_port(*port).interval(PACE);
            let stream = scenario.lab.stream(0, spec)?;
            stream.wait_arrived(ENOUGH, scenario.patience())?;
            let from = scenario.bound(0, family, *port)?;
            event(scenario, from)?;
            let since = now();
            stream.wait_arrived(stream.sent() + ENOUGH, scenario.patience())?;
            let report = stream.finish(true)?;
            let context = || format!("{family:?}, client port {port}, away from backend {from}");
            check::left(&report, from, since).with_context(context)?;
            ensure!(report.unanswered().is_empty(), "{}: packets without a reply: {report:?}", context());
            // Replies come to the FoU port: those to another source port match no egress entry, guard or not.
            if *port == 5555 {
                report.ensure_answered_by(scenario.lab.service(family)).with_context(context)?;
            }
            comes_back(scenario, from)?;
        }
    }
    Ok(())
}

/// The pod is gone for good, and another one takes its place.
fn comes_back(scenario: &mut Scenario, index: usize) -> Result<()> {
    scenario.cluster.force_delete(&scenario.backend_pod(index)?)?;
    scenario.lab.remove_backend(index)?;
    scenario.announce_backend(index)?;
    scenario.lab.publish_backend(index)?;
    scenario.wait_mark(index, mark::READY)
}

fn terminating_backend_is_left(lab: LabBuilder, attach: &str) -> Result<()> {
    lab_test(move || {
        let mut scenario = reset(lab).arguments(&["--attach", attach]).start()?;
        leave_with_next_packet(&mut scenario, &[5555, 40_123], |scenario, from| {
            scenario.terminate(from)?;
            scenario.wait_mark(from, mark::LEAVING)
        })
    })
}

#[test]
fn flow_leaves_a_terminating_backend_cilium_1_16_no_affinity() -> Result<()> {
    terminating_backend_is_left(Lab::builder().version(CiliumVersion::V1_16), "tcx")
}

#[test]
fn flow_leaves_a_terminating_backend_cilium_1_16_affinity_match_kept() -> Result<()> {
    let lab = Lab::builder().version(CiliumVersion::V1_16).affinity(AFFINITY).match_policy(MatchPolicy::Kept);
    terminating_backend_is_left(lab, "tcx")
}

#[test]
fn flow_leaves_a_terminating_backend_cilium_1_17_affinity_match_kept() -> Result<()> {
    let lab = Lab::builder().version(CiliumVersion::V1_17).affinity(AFFINITY).match_policy(MatchPolicy::Kept);
    terminating_backend_is_left(lab, "clsact")
}

#[test]
fn flow_leaves_a_terminating_backend_cilium_1_20_affinity_match_dropped() -> Result<()> {
    let lab =
        Lab::builder().version(CiliumVersion::V1_20).affinity(AFFINITY).match_policy(MatchPolicy::Dropped);
    terminating_backend_is_left(lab, "tcx")
}

#[test]
fn flow_leaves_a_terminating_backend_cilium_1_20_no_affinity_all_clsact() -> Result<()> {
    let lab = Lab::builder().version(CiliumVersion::V1_20).attach(AttachKind::Clsact);
    terminating_backend_is_left(lab, "clsact")
}

#[test]
fn the_agents_mark_alone_moves_the_flow() -> Result<()> {
    lab_test(|| {
        let mut scenario = reset(Lab::builder().affinity(AFFINITY)).start()?;
        leave_with_next_packet(&mut scenario, &[5555], |scenario, from| {
            let pod = scenario.backend_pod(from)?;
            scenario.cluster.terminate(&pod, None)?;
            scenario.wait_mark(from, mark::LEAVING)
        })
    })
}

#[test]
fn ciliums_state_alone_moves_the_flow_while_the_agent_is_dead() -> Result<()> {
    lab_test(|| {
        let mut scenario =
            reset(Lab::builder().affinity(AFFINITY).match_policy(MatchPolicy::Kept)).start()?;
        let family = IpFamily::V4;
        let stream = scenario.lab.stream(0, scenario.lab.spec(0, family).interval(PACE))?;
        stream.wait_arrived(ENOUGH, scenario.patience())?;
        scenario.kill_agent()?;
        let from = scenario.bound(0, family, 5555)?;
        stream.wait_arrived(stream.sent() + ENOUGH, scenario.patience())?;
        scenario.lab.set_backend(from, BackendState::Terminating)?;
        let since = now();
        stream.wait_arrived(stream.sent() + ENOUGH, scenario.patience())?;
        let report = stream.finish(true)?;
        check::left(&report, from, since)?;
        report.ensure_answered_by(scenario.lab.service(family))
    })
}

/// A new tuple while a backend leaves: never on it, not even with its first packet.
fn new_tuples_avoid_a_leaving_backend(lagging: bool) -> Result<()> {
    lab_test(move || {
        let lab =
            Lab::builder().version(CiliumVersion::V1_17).affinity(AFFINITY).match_policy(MatchPolicy::Kept);
        let mut scenario = reset(lab).start()?;
        for family in scenario.lab.families().to_vec() {
            let first = scenario.lab.stream(0, scenario.lab.spec(0, family).count(5))?.finish(false)?;
            first.ensure_exactly_once()?;
            let from = scenario.bound(0, family, 5555)?;
            if lagging {
                // Cilium's slots still hold it; only the agent knows.
                let pod = scenario.backend_pod(from)?;
                scenario.cluster.terminate(&pod, None)?;
            } else {
                scenario.terminate(from)?;
            }
            scenario.wait_mark(from, mark::LEAVING)?;
            for port in 41_000..41_040 {
                let spec = scenario.lab.spec(0, family).source_port(port).count(5);
                let report = scenario.lab.stream(0, spec)?.finish(false)?;
                report.ensure_exactly_once()?;
                ensure!(report.arrived_at(from).is_empty(), "{family:?} port {port} met {from}: {report:?}");
            }
            // An evicted entry is a new tuple, too.
            scenario.lab.delete_service_entry(0, family, 5555)?;
            let again = scenario.lab.stream(0, scenario.lab.spec(0, family).count(5))?.finish(false)?;
            again.ensure_exactly_once()?;
            ensure!(again.arrived_at(from).is_empty(), "{family:?}: the evicted flow met {from}: {again:?}");
            comes_back(&mut scenario, from)?;
        }
        Ok(())
    })
}

#[test]
fn new_tuples_avoid_a_leaving_backend_whose_affinity_match_is_kept() -> Result<()> {
    new_tuples_avoid_a_leaving_backend(false)
}

#[test]
fn new_tuples_avoid_a_leaving_backend_that_is_still_in_the_slots() -> Result<()> {
    new_tuples_avoid_a_leaving_backend(true)
}

#[test]
fn a_short_readiness_flap_moves_nothing_and_a_long_one_moves() -> Result<()> {
    lab_test(|| {
        let scenario = reset(Lab::builder().affinity(AFFINITY)).start()?;
        let family = IpFamily::V4;
        let stream = scenario.lab.stream(0, scenario.lab.spec(0, family).interval(PACE))?;
        stream.wait_arrived(ENOUGH, scenario.patience())?;
        let from = scenario.bound(0, family, 5555)?;
        let pod = scenario.backend_pod(from)?;
        scenario.cluster.set_ready(&pod, false)?;
        scenario.wait_mark(from, mark::NOT_READY)?;
        stream.wait_arrived(stream.sent() + 2 * ENOUGH, scenario.patience())?;
        scenario.cluster.set_ready(&pod, true)?;
        scenario.wait_mark(from, mark::READY)?;
        stream.wait_arrived(stream.sent() + ENOUGH, scenario.patience())?;
        check::stayed(&stream.finish(true)?, from)?;

        let stream = scenario.lab.stream(0, scenario.lab.spec(0, family).interval(PACE))?;
        stream.wait_arrived(ENOUGH, scenario.patience())?;
        let began = now();
        scenario.cluster.set_ready(&pod, false)?;
        eventually("move off the backend that is not ready", scenario.patience(), || {
            let bound = scenario.lab.bound_backend(0, family, 5555)?;
            Ok(if bound == Some(from) { Err(bound) } else { Ok(()) })
        })?;
        let moved = now();
        stream.wait_arrived(stream.sent() + ENOUGH, scenario.patience())?;
        let report = stream.finish(true)?;
        check::left(&report, from, moved)?;
        let kept = Duration::from_nanos(moved - began);
        ensure!(
            kept >= Duration::from_secs(2),
            "not-ready-after is 2s, and the flow was moved after {kept:?}"
        );
        Ok(())
    })
}

/// How a pod goes without ever being seen Terminating for long.
fn gone_pod_gets_no_flow(go: impl Fn(&Scenario, usize) -> Result<()> + Send) -> Result<()> {
    lab_test(move || {
        let scenario = reset(Lab::builder()).start()?;
        let family = IpFamily::V4;
        scenario
            .lab
            .stream(0, scenario.lab.spec(0, family).count(5))?
            .finish(false)?
            .ensure_exactly_once()?;
        let gone = scenario.bound(0, family, 5555)?;
        // Cilium's agent is behind: state, slots and count stay as they are.
        go(&scenario, gone)?;
        scenario.wait_mark(gone, mark::GONE)?;
        for port in [5555].into_iter().chain(42_000..42_030) {
            let spec = scenario.lab.spec(0, family).source_port(port).count(3);
            let report = scenario.lab.stream(0, spec)?.finish(false)?;
            report.ensure_exactly_once()?;
            ensure!(report.arrived_at(gone).is_empty(), "port {port} met the gone pod: {report:?}");
        }
        Ok(())
    })
}

#[test]
fn a_force_deleted_pod_in_stale_slots_gets_no_flow() -> Result<()> {
    gone_pod_gets_no_flow(|scenario, index| scenario.cluster.force_delete(&scenario.backend_pod(index)?))
}

#[test]
fn a_failed_pod_in_stale_slots_gets_no_flow() -> Result<()> {
    gone_pod_gets_no_flow(|scenario, index| {
        scenario.cluster.set_phase(&scenario.backend_pod(index)?, "Failed")
    })
}

#[test]
fn a_pod_that_lost_its_label_gets_no_flow_from_stale_slots() -> Result<()> {
    gone_pod_gets_no_flow(|scenario, index| {
        let pod = scenario.backend_pod(index)?;
        scenario.cluster.set_label(&pod, "app.kubernetes.io/instance", Some("another"))
    })
}

#[test]
fn a_client_whose_entry_was_collected_stays_with_its_healthy_backend() -> Result<()> {
    lab_test(|| {
        let mut scenario =
            reset(Lab::builder().affinity(AFFINITY).match_policy(MatchPolicy::Kept)).start()?;
        for family in scenario.lab.families().to_vec() {
            let stream = scenario.lab.stream(0, scenario.lab.spec(0, family).count(5))?;
            stream.finish(false)?.ensure_exactly_once()?;
            let own = scenario.bound(0, family, 5555)?;
            let other = (own + 1) % 3;
            scenario.terminate(other)?;
            scenario.wait_mark(other, mark::LEAVING)?;
            scenario.lab.delete_service_entry(0, family, 5555)?;
            let report = scenario.lab.stream(0, scenario.lab.spec(0, family).count(20))?.finish(false)?;
            check::stayed(&report, own)?;
            comes_back(&mut scenario, other)?;
        }
        Ok(())
    })
}

#[test]
fn without_a_live_backend_nothing_changes_and_it_is_counted() -> Result<()> {
    lab_test(|| {
        let mut scenario = reset(Lab::builder().backends(2)).start()?;
        let family = IpFamily::V4;
        let stream = scenario.lab.stream(0, scenario.lab.spec(0, family).interval(PACE))?;
        stream.wait_arrived(ENOUGH, scenario.patience())?;
        let own = scenario.bound(0, family, 5555)?;
        for index in [1 - own, own] {
            scenario.terminate(index)?;
            scenario.wait_mark(index, mark::LEAVING)?;
        }
        stream.wait_arrived(stream.sent() + ENOUGH, scenario.patience())?;
        check::stayed(&stream.finish(true)?, own)?;
        eventually("count of packets without a live backend", scenario.patience(), || {
            let seen = scenario.agent()?.metric("coil_guard_packets_total", &["reason=\"no_live\""])?;
            Ok(if seen >= ENOUGH as f64 { Ok(()) } else { Err(seen) })
        })
    })
}

#[test]
fn only_service_entries_of_the_client_are_written() -> Result<()> {
    lab_test(|| {
        let mut scenario = reset(Lab::builder()).start()?;
        let family = IpFamily::V4;
        scenario
            .lab
            .stream(0, scenario.lab.spec(0, family).count(5))?
            .finish(false)?
            .ensure_exactly_once()?;
        let from = scenario.bound(0, family, 5555)?;
        scenario.terminate(from)?;
        scenario.wait_mark(from, mark::LEAVING)?;
        let before = scenario.lab.dump()?;
        let report = scenario.lab.stream(0, scenario.lab.spec(0, family).count(1))?.finish(false)?;
        report.ensure_exactly_once()?;
        let to = report.backend_of(0).context("it arrived")?;
        ensure!(to != from);
        let (client, port) = (scenario.lab.client(0).address(family), 5555);
        let mut allowed = vec![scenario.lab.flow(0, family, port).service_key()?];
        // Cilium's own datapath makes an egress entry and a related one towards the new backend.
        let destination = (scenario.lab.backend(to).address(family), port);
        let egress = coil_guard_tests::lab::FlowTuple { client: (client, port), destination }.egress_key()?;
        let mut related = egress.clone();
        related[8..14].copy_from_slice(&[0, 0, 0, 0, 1, 2]);
        allowed.extend([egress, related]);
        check::only_these_entries(&before, &scenario.lab.dump()?, &allowed)
    })
}

#[test]
fn an_unknown_mode_is_off_and_named() -> Result<()> {
    lab_test(|| {
        let scenario = Scenario::builder(Lab::builder()).arguments(&["--default-mode", "reset"]).start()?;
        scenario.wait_attached(0)?;
        scenario.set_mode(Some("fast"))?;
        scenario.wait_detached(0)?;
        scenario.agent()?.wait_log(&["WARN", NAMESPACE, EGRESS, "fast"], scenario.patience())
    })
}
