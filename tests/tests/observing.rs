//! What an operator sees: Kubernetes events, log level, readiness of a second agent.

use std::{
    io::{Read as _, Write as _},
    net::TcpStream,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use coil_guard_common::abi::mark;
use coil_guard_tests::{
    cilium::IpFamily,
    kube_api::Kind,
    lab::{Lab, command, eventually},
    net::lab_test,
    scenario::{EGRESS, NAMESPACE, Scenario, binary},
};
use serde_json::Value;

fn wait_event(scenario: &Scenario, reason: &str, parts: &[&str]) -> Result<Value> {
    let found = eventually(&format!("{reason} event with {parts:?}"), scenario.patience(), || {
        let events = scenario.api.list(Kind::Event);
        let found = events.iter().find(|event| {
            let note = event["note"].as_str().unwrap_or_default();
            event["reason"] == reason && parts.iter().all(|part| note.contains(part))
        });
        Ok(found.cloned().ok_or(events))
    });
    scenario.explain(found)
}

#[test]
fn flows_that_moved_are_one_event_about_the_egress() -> Result<()> {
    lab_test(|| {
        let mut scenario = Scenario::builder(Lab::builder().clients(2)).mode("reset").start()?;
        let family = IpFamily::V4;
        let mut streams = Vec::new();
        for client in 0..2 {
            let spec = scenario.lab.spec(client, family).interval(Duration::from_millis(1));
            streams.push(scenario.lab.stream(client, spec)?);
        }
        for stream in &streams {
            stream.wait_arrived(20, scenario.patience())?;
        }
        let own = scenario.bound(0, family, 5555)?;
        let pod = scenario.backend_pod(own)?;
        scenario.terminate(own)?;
        let event = wait_event(&scenario, "FlowsMoved", &[&format!("(pod {})", pod.name), "node node-1"])?;
        let egress = scenario.api.get(Kind::Egress, NAMESPACE, EGRESS).context("the Egress")?;
        ensure!(event["regarding"]["uid"] == egress["metadata"]["uid"], "{event:#}");
        ensure!(event["metadata"]["namespace"] == NAMESPACE && event["type"] == "Normal", "{event:#}");
        let moved: Vec<_> =
            scenario.events().into_iter().filter(|(reason, _)| reason == "FlowsMoved").collect();
        ensure!(moved.len() == 1, "one event for a leaving backend: {moved:?}");
        Ok(())
    })
}

#[test]
fn no_live_backend_is_a_warning() -> Result<()> {
    lab_test(|| {
        let mut scenario = Scenario::builder(Lab::builder().backends(1)).mode("reset").start()?;
        let stream =
            scenario.lab.stream(0, scenario.lab.spec(0, IpFamily::V4).interval(Duration::from_millis(1)))?;
        stream.wait_arrived(20, scenario.patience())?;
        scenario.terminate(0)?;
        let event = wait_event(&scenario, "NoLiveBackend", &["No backend is live"])?;
        ensure!(event["type"] == "Warning", "{event:#}");
        Ok(())
    })
}

#[test]
fn configuration_is_told_where_the_operator_looks() -> Result<()> {
    lab_test(|| {
        let scenario = Scenario::builder(Lab::builder()).mode("audit").no_pre_stop().start()?;
        scenario.set_mode(Some("drain"))?;
        wait_event(&scenario, "GuardModeChanged", &["now drain", "was audit"])?;
        wait_event(&scenario, "DrainWithoutPreStop", &["preStop: {exec:"])?;
        scenario.set_mode(Some("dry-run"))?;
        wait_event(
            &scenario,
            "InvalidAnnotation",
            &["coil-guard.io/mode: \"dry-run\"", "off, audit, reset"],
        )?;
        scenario.agent()?.wait_log(&["WARN", "internet/nat", "dry-run"], scenario.patience())?;
        eventually("metric of invalid annotations", scenario.patience(), || {
            let seen = scenario.agent()?.metric("coil_guard_invalid_annotations", &[])?;
            Ok(if seen == 1.0 { Ok(()) } else { Err(seen) })
        })
    })
}

fn put_log_level(level: &str) -> Result<String> {
    let mut stream = TcpStream::connect(("127.0.0.1", 9398))?;
    let length = level.len();
    write!(stream, "PUT /log-level HTTP/1.0\r\nHost: lab\r\nContent-Length: {length}\r\n\r\n{level}")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}

#[test]
fn the_log_level_changes_while_the_agent_runs() -> Result<()> {
    lab_test(|| {
        let scenario = Scenario::builder(Lab::builder()).mode("reset").start()?;
        let answer = put_log_level("trace")?;
        ensure!(answer.contains("200 OK") && answer.ends_with("trace\n"), "{answer}");
        let answer = put_log_level("coil_guard=loud")?;
        ensure!(answer.contains("400") && answer.contains("allowed are error, warn"), "{answer}");
        scenario.agent()?.wait_log(&["the log level was changed", "trace"], scenario.patience())
    })
}

#[test]
fn a_second_agent_waits_and_takes_over() -> Result<()> {
    lab_test(|| {
        let mut scenario = Scenario::builder(Lab::builder()).mode("reset").start()?;
        // Without endpoints of its own, which the first one has.
        let quiet = ["--health-address", "127.0.0.1:9498", "--metrics-address", ""].map(str::to_owned);
        let second = coil_guard_tests::scenario::Agent::start(&scenario.api, &quiet)?;
        second.wait_log(&["another agent is at work on this node"], scenario.patience())?;
        let mut stream = TcpStream::connect(("127.0.0.1", 9498))?;
        write!(stream, "GET /readyz HTTP/1.0\r\nHost: lab\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        ensure!(answer.contains("503") && answer.contains("[-]lock another agent holds"), "{answer}");

        let first = scenario.agent.take().context("the first agent")?;
        first.stop(scenario.patience())?;
        second.wait_log(&["readiness changed", "ready=true"], scenario.patience())?;
        ensure!(
            !second.log().contains("how=Fresh"),
            "what is attached is taken over in place:\n{}",
            second.log()
        );
        let pod = scenario.backend_pod(0)?;
        scenario.cluster.terminate(&pod, None)?;
        scenario.wait_mark(0, mark::LEAVING)
    })
}

fn status() -> Result<Value> {
    let output = command(binary()?).args(["status", "--json"]).output()?;
    ensure!(output.status.success(), "status: {}", String::from_utf8_lossy(&output.stderr));
    Ok(serde_json::from_slice(&output.stdout)?)
}

#[test]
fn status_shows_the_cutover_and_the_leaving_backend_from_both_sides() -> Result<()> {
    lab_test(|| {
        let mut scenario = Scenario::builder(Lab::builder()).mode("reset").start()?;
        let family = IpFamily::V4;
        let spec = scenario.lab.spec(0, family).interval(Duration::from_millis(1));
        let stream = scenario.lab.stream(0, spec)?;
        stream.wait_arrived(20, scenario.patience())?;
        let own = scenario.bound(0, family, 5555)?;
        scenario.terminate(own)?;
        let address = |index: usize| scenario.lab.backend(index).address(family).to_string();
        let shown = eventually("status of the move", scenario.patience(), || {
            let status = status()?;
            let egress = &status["egresses"][format!("{NAMESPACE}/{EGRESS}")];
            let backends = egress["backends"].as_array();
            let leaving = backends.and_then(|all| all.iter().find(|one| one["address"] == address(own)));
            let complete = leaving.is_some_and(|one| {
                one["state"] == "leaving" && one["cilium"]["state"] == "TERMINATING" && one["clients"] == 0
            });
            let cutovers = egress["lastCutovers"].as_array();
            let v4 = |one: &&Value| one["from"] == address(own);
            Ok(match cutovers.and_then(|all| all.iter().find(v4)) {
                Some(cutover) if complete => Ok((status.clone(), cutover.clone())),
                _ => Err(status),
            })
        });
        let (status, cutover) = scenario.explain(shown)?;
        let now = address(scenario.bound(0, family, 5555)?);
        ensure!(cutover["to"] == now && cutover["pod"].is_string(), "{now} is expected: {cutover:#}");
        let egress = &status["egresses"][format!("{NAMESPACE}/{EGRESS}")];
        ensure!(egress["clients"] == serde_json::json!([cutover["pod"]]), "{egress:#}");
        ensure!(egress["counters"]["moved"] == 1, "{egress:#}");
        ensure!(status["problems"] == serde_json::json!([]), "{:#}", status["problems"]);
        Ok(())
    })
}

/// The numbers in status and in the metrics are those of the packets that were sent.
#[test]
fn metrics_and_status_agree_with_what_was_sent() -> Result<()> {
    lab_test(|| {
        let mut scenario = Scenario::builder(Lab::builder()).mode("reset").start()?;
        let family = IpFamily::V4;
        let send = |scenario: &Scenario, count: u64| -> Result<()> {
            let stream = scenario.lab.stream(0, scenario.lab.spec(0, family).count(count))?;
            stream.finish(false)?.ensure_exactly_once()
        };
        send(&scenario, 100)?;
        let own = scenario.bound(0, family, 5555)?;
        scenario.terminate(own)?;
        scenario.wait_mark(own, mark::LEAVING)?;
        send(&scenario, 50)?;
        // The first packet finds no entry and is left to Cilium; one packet moves the flow; the others are healthy.
        let expected = [("left_to_cilium", 1.0), ("moved", 1.0), ("healthy", 148.0)];
        let found = eventually("numbers in the metrics", scenario.patience(), || {
            let agent = scenario.agent()?;
            let mut seen = vec![agent.metric("coil_guard_egress_packets_total", &[EGRESS])?];
            for (reason, _) in expected {
                seen.push(agent.metric("coil_guard_packets_total", &[&format!("reason=\"{reason}\"")])?);
            }
            let wanted: Vec<f64> = [150.0].into_iter().chain(expected.map(|(_, packets)| packets)).collect();
            Ok(if seen == wanted { Ok(()) } else { Err((seen, wanted)) })
        });
        scenario.explain(found)?;
        let status = status()?;
        let counters = &status["egresses"][format!("{NAMESPACE}/{EGRESS}")]["counters"];
        ensure!(counters["packets"] == 150 && counters["moved"] == 1, "{counters:#}");
        for (reason, packets) in expected {
            ensure!(status["packets"][reason] == packets as u64, "{reason}: {:#}", status["packets"]);
        }
        Ok(())
    })
}
