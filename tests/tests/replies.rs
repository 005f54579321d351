//! Symmetric replies of mode `rewrite`, from end to end: under an ingress policy that lets in nothing but replies.
//!
//! What listens at a client's device sees packets before the guard's program there does, so replies are seen at the port
//! that the flow was given. That they arrive at the FoU port is told by the kernel: it counts what no socket wanted.

use std::{collections::BTreeSet, time::Duration};

use anyhow::{Context as _, Result, ensure};
use coil_guard_common::abi::{RETURN_PORT_FIRST, mark};
use coil_guard_tests::{
    cilium::{BackendState, CiliumVersion, IpFamily, Policy},
    fou::{ChecksumKind, FOU_PORT, StreamReport, log::now},
    lab::{Lab, LabBuilder, eventually},
    net::{Attachments, attachments, lab_test, topology::POD_DEVICE},
    scenario::{Scenario, ScenarioBuilder, check},
};

const PACE: Duration = Duration::from_millis(1);
/// Packets on each side of an event.
const ENOUGH: u64 = 60;
/// Of the first packet under a new port the lab's egress pod can answer before the kernel has shown it to the guard.
const EARLY: usize = 1;

fn rewrite(lab: LabBuilder) -> ScenarioBuilder {
    Scenario::builder(lab).mode("rewrite")
}

fn programs(attachments: &Attachments) -> (usize, usize) {
    (attachments.ingress_programs(), attachments.egress_programs())
}

/// Waits for so many programs on ingress and egress of the client and of each egress pod.
fn wait_programs(scenario: &Scenario, client: (usize, usize), egress_pods: (usize, usize)) -> Result<()> {
    let found = eventually("programs on the pods' devices", scenario.patience(), || {
        let at_client = programs(&scenario.lab.attachments(0)?);
        let at_backends = scenario
            .lab
            .topology
            .backends
            .iter()
            .map(|pod| pod.namespace.run(|| Ok(programs(&attachments(POD_DEVICE)?))))
            .collect::<Result<BTreeSet<_>>>()?;
        let as_wanted = at_client == client && at_backends == [egress_pods].into();
        Ok(if as_wanted { Ok(()) } else { Err((at_client, at_backends)) })
    });
    scenario.explain(found)
}

/// Cilium first, so that it has taken the pod out of its slots when the agent tells that it leaves.
fn terminate(scenario: &mut Scenario, index: usize) -> Result<()> {
    scenario.lab.set_backend(index, BackendState::Terminating)?;
    scenario.cluster.terminate(&scenario.backend_pod(index)?, None)?;
    scenario.wait_mark(index, mark::LEAVING)
}

/// Of the packets sent at or after a time: the ports that they came from, where replies came from, to which ports those
/// went, and how many there were none of.
fn since(report: &StreamReport, time: u64) -> (BTreeSet<u16>, BTreeSet<String>, BTreeSet<u16>, usize) {
    let late = |sequence: &u64| report.sent[*sequence as usize] >= time;
    let sent = report.arrivals().into_iter().filter(|(sequence, _)| late(sequence));
    let ports = sent.flat_map(|(_, records)| records).map(|record| record.source.1).collect();
    let replies: Vec<_> = report.replies().into_iter().filter(|(sequence, _)| late(sequence)).collect();
    let replies = || replies.iter().flat_map(|(_, records)| records);
    let sources = replies().map(|record| format!("{}:{}", record.source.0, record.source.1)).collect();
    let unanswered = report.unanswered().iter().filter(|sequence| late(sequence)).count();
    (ports, sources, replies().map(|record| record.destination.1).collect(), unanswered)
}

/// The bound backend leaves; replies of all packets under the new port are symmetric.
fn leaves_with_symmetric_replies(
    scenario: &mut Scenario,
    family: IpFamily,
    checksum: ChecksumKind,
    port: u16,
) -> Result<u16> {
    let spec = scenario.lab.spec(0, family).checksum(checksum).interval(PACE);
    let stream = scenario.lab.stream(0, spec)?;
    stream.wait_arrived(ENOUGH, scenario.patience())?;
    let from = scenario.bound(0, family, port)?;
    terminate(scenario, from)?;
    let left = now();
    stream.wait_arrived(stream.sent() + ENOUGH, scenario.patience())?;
    let report = stream.finish(true)?;
    check::left(&report, from, left)?;
    let (ports, sources, destinations, unanswered) = since(&report, left);
    ensure!(ports.len() == 1, "sent from ports {ports:?}");
    ensure!(*ports.first().context("no port")? >= RETURN_PORT_FIRST, "sent from ports {ports:?}");
    let service = scenario.lab.service(family);
    let service = format!("{}:{}", service.0, service.1);
    ensure!(sources == [service.clone()].into(), "replies came from {sources:?}, not from {service} alone");
    ensure!(destinations == ports, "replies to ports {destinations:?}, packets from {ports:?}");
    ensure!(unanswered <= EARLY, "{unanswered} packets got no reply: {report:?}");
    ports.first().copied().context("no port")
}

fn under_default_deny(lab: LabBuilder, attach: &str) -> Result<()> {
    lab_test(move || {
        let lab = lab.backends(4).policy(Policy::DefaultDeny);
        let mut scenario = rewrite(lab).local_backends().arguments(&["--attach", attach]).start()?;
        wait_programs(&scenario, (1, 1), (1, 1))?;
        for family in scenario.lab.families().to_vec() {
            let mut port = FOU_PORT;
            for checksum in [ChecksumKind::Zero, ChecksumKind::Correct] {
                let given = leaves_with_symmetric_replies(&mut scenario, family, checksum, port);
                let given = scenario.explain(given).with_context(|| format!("{family:?}, {checksum:?}"))?;
                ensure!(given != port, "the port stayed the same");
                port = given;
            }
            for index in 0..4 {
                if scenario.lab.backend_id(family, index).is_ok() {
                    scenario.cluster.force_delete(&scenario.backend_pod(index)?)?;
                    scenario.lab.remove_backend(index)?;
                }
                scenario.announce_backend(index)?;
                scenario.lab.publish_backend(index)?;
                scenario.wait_mark(index, mark::READY)?;
            }
            wait_programs(&scenario, (1, 1), (1, 1))?;
        }
        let errors = scenario.lab.udp_errors()?;
        ensure!(errors.no_port == 0 && errors.checksum == 0, "{errors:?}");
        let agent = scenario.agent()?;
        for action in ["learnt", "answered", "returned"] {
            let label = format!("action=\"{action}\"");
            ensure!(agent.metric("coil_guard_reply_packets_total", &[&label])? >= 1.0, "no packet {action}");
        }
        Ok(())
    })
}

#[test]
fn replies_pass_default_deny_cilium_1_20_tcx() -> Result<()> {
    under_default_deny(Lab::builder(), "tcx")
}

#[test]
fn replies_pass_default_deny_cilium_1_16_clsact() -> Result<()> {
    under_default_deny(Lab::builder().version(CiliumVersion::V1_16), "clsact")
}

/// The egress pods are on a node without the guard: replies are as they always were.
#[test]
fn without_the_egress_side_replies_are_asymmetric_and_work_without_policy() -> Result<()> {
    lab_test(|| {
        let mut scenario = rewrite(Lab::builder()).start()?;
        wait_programs(&scenario, (1, 1), (0, 0))?;
        for family in scenario.lab.families().to_vec() {
            let stream = scenario.lab.stream(0, scenario.lab.spec(0, family).interval(PACE))?;
            stream.wait_arrived(ENOUGH, scenario.patience())?;
            let from = scenario.bound(0, family, FOU_PORT)?;
            terminate(&mut scenario, from)?;
            let left = now();
            stream.wait_arrived(stream.sent() + ENOUGH, scenario.patience())?;
            let report = stream.finish(true)?;
            check::left(&report, from, left)?;
            ensure!(report.unanswered().is_empty(), "packets without a reply: {report:?}");
            let (ports, sources, destinations, _) = since(&report, left);
            let (to, _) = (scenario.bound(0, family, *ports.first().context("no port")?)?, ());
            let own = format!("{}:{FOU_PORT}", scenario.lab.backend(to).address(family));
            ensure!(
                sources == [own].into() && destinations == [FOU_PORT].into(),
                "{sources:?} {destinations:?}"
            );
            scenario.cluster.force_delete(&scenario.backend_pod(from)?)?;
            scenario.lab.remove_backend(from)?;
            scenario.announce_backend(from)?;
            scenario.lab.publish_backend(from)?;
            scenario.wait_mark(from, mark::READY)?;
        }
        ensure!(scenario.lab.udp_errors()?.no_port == 0);
        Ok(())
    })
}

/// A flow that was given a port goes on, and each side may come and go: with the mode, with the agent, and for good.
#[test]
fn each_side_comes_and_goes_and_no_reply_is_lost_for_it() -> Result<()> {
    lab_test(|| {
        let mut scenario = rewrite(Lab::builder()).local_backends().start()?;
        wait_programs(&scenario, (1, 1), (1, 1))?;
        let family = IpFamily::V4;
        leaves_with_symmetric_replies(&mut scenario, family, ChecksumKind::Zero, FOU_PORT)?;
        let answered = |scenario: &Scenario, what: &str| {
            let spec = scenario.lab.spec(0, family).count(ENOUGH).interval(PACE);
            let report = scenario.lab.stream(0, spec)?.finish(false)?;
            report.ensure_exactly_once()?;
            let lost = report.unanswered().len();
            ensure!(lost == 0, "{what}: {lost} packets without a reply: {report:?}");
            Ok(since(&report, 0))
        };
        scenario.kill_agent()?;
        let (ports, ..) = answered(&scenario, "without the agent")?;
        ensure!(ports.iter().all(|port| *port >= RETURN_PORT_FIRST), "{ports:?}");
        scenario.start_agent()?;
        wait_programs(&scenario, (1, 1), (1, 1))?;
        let (after, ..) = answered(&scenario, "after a restart")?;
        ensure!(after == ports, "{ports:?} became {after:?}");

        scenario.set_mode(Some("reset"))?;
        wait_programs(&scenario, (0, 1), (0, 0))?;
        let (ports, _, destinations, _) = answered(&scenario, "in mode reset")?;
        ensure!(ports == [FOU_PORT].into() && destinations == ports, "{ports:?} {destinations:?}");

        scenario.set_mode(Some("rewrite"))?;
        wait_programs(&scenario, (1, 1), (1, 1))?;
        answered(&scenario, "in mode rewrite again")?;
        scenario.set_mode(None)?;
        scenario.wait_detached(0)?;
        wait_programs(&scenario, (0, 0), (0, 0))?;
        answered(&scenario, "off")?;
        ensure!(scenario.lab.udp_errors()?.no_port == 0);
        Ok(())
    })
}

/// Replies of an Egress with `fouSourcePortAuto` come from ports of their own.
#[test]
fn with_ports_of_their_own_replies_are_left_alone() -> Result<()> {
    lab_test(|| {
        let scenario = rewrite(Lab::builder()).local_backends().sport_auto().start()?;
        wait_programs(&scenario, (0, 1), (0, 0))
    })
}
