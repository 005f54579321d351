//! Kubernetes changes, lags, repeats itself and goes away.

use std::{
    net::IpAddr,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use coil_guard_common::abi::mark;
use coil_guard_tests::{
    cilium::{BackendState, IpFamily},
    fou::FOU_PORT,
    kube_api::{
        Close, Delivery, Gone, Kind,
        cluster::{EgressSpec, PodSpec},
    },
    lab::{FlowTuple, Lab, eventually},
    net::{lab_test, topology::service_address},
    scenario::{EGRESS, NAMESPACE, NODE, Scenario},
};
use serde_json::json;

use crate::support::{counted, finish, leaves_nothing, sent, setting, streams, wait_left};

const EVERY: Duration = Duration::from_millis(2);

/// A backend leaves by Kubernetes' word alone, and comes back as another pod at the same address.
fn leave_and_return(scenario: &mut Scenario, index: usize) -> Result<()> {
    let pod = scenario.backend_pod(index)?;
    scenario.cluster.terminate(&pod, None)?;
    scenario.wait_mark(index, mark::LEAVING)?;
    wait_left(scenario, &[0], index)?;
    scenario.cluster.force_delete(&pod)?;
    scenario.announce_backend(index)?;
    scenario.wait_mark(index, mark::READY)
}

fn wait_following(scenario: &Scenario) -> Result<()> {
    let following = eventually("every watch", scenario.patience(), || {
        let watches = scenario.agent()?.metric("coil_guard_watch_established", &[])?;
        Ok(if watches as u64 == 5 { Ok(()) } else { Err(watches) })
    });
    scenario.explain(following)
}

#[test]
fn an_api_server_that_is_gone_during_a_rolling_update_leaves_it_to_ciliums_state() -> Result<()> {
    lab_test(|| {
        let outage = Duration::from_secs(setting("COIL_GUARD_OUTAGE_SECONDS", 60));
        let mut scenario = Scenario::builder(Lab::builder().backends(4)).mode("reset").start()?;
        let running = streams(&scenario, &[0], EVERY)?;
        scenario.api.stop_listening();
        let gone = Instant::now();
        let mut rolled = 0;
        while gone.elapsed() < outage || rolled < 4 {
            let index = rolled % 4;
            scenario.lab.set_backend(index, BackendState::Terminating)?;
            wait_left(&scenario, &[0], index)?;
            scenario.lab.remove_backend(index)?;
            scenario.lab.publish_backend(index)?;
            rolled += 1;
            thread::sleep(Duration::from_millis(50));
        }
        ensure!(
            scenario.agent()?.metric("coil_guard_watch_established", &[])? < 5.0,
            "the agent takes an API server that is gone for one that is there"
        );
        scenario.api.start_listening()?;
        wait_following(&scenario)?;
        leave_and_return(&mut scenario, 0)?;
        let reports = finish(running)?;
        eprintln!("{rolled} backends replaced in {:.0?} without an API server", gone.elapsed());
        counted(&scenario, sent(&reports))?;
        leaves_nothing(&scenario, &[0])
    })
}

#[test]
fn however_a_watch_ends_the_next_leaving_pod_is_left() -> Result<()> {
    lab_test(|| {
        let mut scenario = Scenario::builder(Lab::builder()).mode("reset").start()?;
        let running = streams(&scenario, &[0], EVERY)?;
        let ends = [
            (Close::Clean, Gone::Event),
            (Close::Abrupt, Gone::Event),
            (Close::Expired, Gone::Event),
            (Close::Clean, Gone::Status),
        ];
        for (round, (how, gone)) in ends.into_iter().enumerate() {
            scenario.api.set_gone(gone);
            scenario.api.close_watches(None, how);
            // Every other time the history is gone too, so that what happens now is seen by listing again only.
            if round % 2 == 1 {
                scenario.api.compact();
            }
            leave_and_return(&mut scenario, round % 3).with_context(|| format!("{how:?}, {gone:?}"))?;
            wait_following(&scenario)?;
        }
        finish(running)?;
        leaves_nothing(&scenario, &[0])
    })
}

#[test]
fn events_that_repeat_lag_and_merge_move_what_they_should() -> Result<()> {
    lab_test(|| {
        let mut scenario = Scenario::builder(Lab::builder()).mode("reset").start()?;
        let running = streams(&scenario, &[0], EVERY)?;
        let delay = Duration::from_millis(100);
        let deliveries = [
            Delivery { duplicate: true, ..Delivery::default() },
            Delivery { delay, ..Delivery::default() },
            Delivery { coalesce: true, delay, ..Delivery::default() },
            Delivery { newest_first: true, delay, ..Delivery::default() },
            Delivery { duplicate: true, coalesce: true, newest_first: true, delay, ..Delivery::default() },
        ];
        for (round, delivery) in deliveries.into_iter().enumerate() {
            for late in [Kind::Pod, Kind::EndpointSlice] {
                scenario.api.deliver(Kind::Pod, delivery);
                scenario.api.deliver(Kind::EndpointSlice, delivery);
                // One of the two streams is behind for as long as the flow needs to leave.
                scenario.api.hold(late);
                let index = round % 3;
                let pod = scenario.backend_pod(index)?;
                scenario.cluster.terminate(&pod, None)?;
                wait_left(&scenario, &[0], index).with_context(|| format!("{delivery:?}, {late:?} held"))?;
                scenario.api.deliver(late, delivery);
                scenario.cluster.force_delete(&pod)?;
                scenario.announce_backend(index)?;
                scenario.wait_mark(index, mark::READY)?;
            }
        }
        finish(running)?;
        leaves_nothing(&scenario, &[0])
    })
}

#[test]
fn an_address_that_a_new_pod_has_at_once_is_live_again() -> Result<()> {
    lab_test(|| {
        let mut scenario = Scenario::builder(Lab::builder()).mode("reset").start()?;
        let running = streams(&scenario, &[0], EVERY)?;
        for index in 0..3 {
            let pod = scenario.backend_pod(index)?;
            scenario.cluster.terminate(&pod, None)?;
            scenario.wait_mark(index, mark::LEAVING)?;
            wait_left(&scenario, &[0], index)?;
            // "Gone" is never seen: one event, in which only the UID tells the two pods apart.
            scenario.backends[index] = Some(scenario.cluster.replace_in_place(&pod)?);
            scenario.wait_mark(index, mark::READY)?;
        }
        // A completed pod keeps its address, and a running one has it too.
        let completed = scenario.backend_pod(0)?;
        scenario.cluster.set_phase(&completed, "Failed")?;
        wait_left(&scenario, &[0], 0)?;
        let mut spec = PodSpec::new("nat-again", "node-2", &scenario.lab.backend(0).addresses);
        spec.grace = 30;
        scenario.backends[0] = Some(scenario.cluster.backend(NAMESPACE, EGRESS, &spec)?);
        scenario.wait_mark(0, mark::READY)?;
        for index in [1, 2] {
            let pod = scenario.backend_pod(index)?;
            scenario.cluster.terminate(&pod, None)?;
            scenario.wait_mark(index, mark::LEAVING)?;
            wait_left(&scenario, &[0], index)?;
        }
        ensure!(
            scenario.bound(0, IpFamily::V4, FOU_PORT)? == 0,
            "the only live backend has the reused address"
        );
        finish(running)?;
        leaves_nothing(&scenario, &[0])
    })
}

#[test]
fn a_completed_client_pod_takes_nothing_from_the_running_one_with_its_address() -> Result<()> {
    lab_test(|| {
        let scenario = Scenario::builder(Lab::builder()).mode("reset").start()?;
        let spec = PodSpec::new("completed", NODE, &scenario.lab.client(0).addresses);
        let completed = scenario.cluster.client("default", &spec.client_of(NAMESPACE, EGRESS))?;
        scenario.cluster.set_phase(&completed, "Succeeded")?;
        let wanted = |number: f64| {
            let found = eventually(&format!("{number} wanted pods"), scenario.patience(), || {
                let now = scenario.agent()?.metric("coil_guard_pods", &["state=\"wanted\""])?;
                Ok(if (now - number).abs() < 0.5 { Ok(()) } else { Err(now) })
            });
            scenario.explain(found)
        };
        wanted(1.0)?;
        scenario.wait_attached(0)?;
        scenario.cluster.force_delete(&completed)?;
        wanted(1.0)?;
        let running = streams(&scenario, &[0], EVERY)?;
        let bound = scenario.bound(0, IpFamily::V4, FOU_PORT)?;
        scenario.cluster.terminate(&scenario.backend_pod(bound)?, None)?;
        wait_left(&scenario, &[0], bound)?;
        finish(running)?;
        leaves_nothing(&scenario, &[0])
    })
}

/// Index of the backend that a client's flow to another service is bound to.
fn bound_to(scenario: &Scenario, service: IpAddr) -> Result<Option<u32>> {
    let client = scenario.lab.client(0).address(IpFamily::V4);
    let flow = FlowTuple { client: (client, FOU_PORT), destination: (service, FOU_PORT) };
    let entry = scenario.lab.maps.conntrack(IpFamily::V4)?.lookup_bytes(&flow.service_key()?)?;
    let entry = entry.map(|bytes| {
        <coil_guard_common::cilium::CtEntry as zerocopy::FromBytes>::read_from_bytes(&bytes)
            .map_err(|error| anyhow::anyhow!("{error}"))
    });
    Ok(entry.transpose()?.map(|entry| entry.backend_id as u32))
}

/// Adds a service with another ClusterIP over the same backends to Cilium's maps, and says it and its backends' ids.
fn second_service(scenario: &mut Scenario) -> Result<(IpAddr, Vec<u32>)> {
    let address = service_address(IpFamily::V4, 1);
    let service = scenario.lab.control.add_service(address, FOU_PORT, None);
    let backends: Vec<IpAddr> =
        (0..3).map(|index| scenario.lab.backend(index).address(IpFamily::V4)).collect();
    let ids = backends
        .into_iter()
        .map(|backend| scenario.lab.control.add_backend(service, backend, FOU_PORT))
        .collect();
    scenario.lab.catch_up()?;
    Ok((address, ids))
}

fn stream_to(scenario: &Scenario, service: IpAddr) -> Result<coil_guard_tests::fou::Stream> {
    let mut spec = scenario.lab.spec(0, IpFamily::V4).interval(EVERY);
    spec.outer.destination = (service, FOU_PORT);
    let stream = scenario.lab.stream(0, spec)?;
    stream.wait_arrived(5, scenario.patience())?;
    Ok(stream)
}

#[test]
fn a_service_made_anew_with_another_address_is_guarded_there() -> Result<()> {
    lab_test(|| {
        let mut scenario =
            Scenario::builder(Lab::builder().families(&[IpFamily::V4])).mode("reset").start()?;
        let (address, ids) = second_service(&mut scenario)?;
        let mut service = scenario.api.get(Kind::Service, NAMESPACE, EGRESS).context("the Service")?;
        scenario.api.delete(Kind::Service, NAMESPACE, EGRESS, None)?;
        let metadata =
            json!({"namespace": NAMESPACE, "name": EGRESS, "labels": service["metadata"]["labels"]});
        service["metadata"] = metadata;
        service["spec"]["clusterIP"] = json!(address);
        service["spec"]["clusterIPs"] = json!([address]);
        scenario.api.create(&service)?;
        scenario.cluster.settle(NAMESPACE, EGRESS)?;
        let text = address.to_string();
        scenario.agent()?.wait_log(&["guarding the Service", &text], scenario.patience())?;
        let running = stream_to(&scenario, address)?;
        let id = bound_to(&scenario, address)?.context("no service entry")?;
        let index = ids.iter().position(|known| *known == id).context("an id of the service")?;
        scenario.cluster.terminate(&scenario.backend_pod(index)?, None)?;
        let left = eventually("move of the flow to the new address", scenario.patience(), || {
            let now = bound_to(&scenario, address)?;
            Ok(if now == Some(id) { Err(now) } else { Ok(()) })
        });
        scenario.explain(left)?;
        running.finish(true)?.ensure_exactly_once()?;
        leaves_nothing(&scenario, &[0])
    })
}

#[test]
fn two_egresses_share_a_client_and_each_has_its_own_mode() -> Result<()> {
    lab_test(|| {
        let mut scenario =
            Scenario::builder(Lab::builder().families(&[IpFamily::V4])).mode("reset").start()?;
        let (address, ids) = second_service(&mut scenario)?;
        scenario.cluster.egress(&EgressSpec::new(NAMESPACE, "other", &[address]).mode("audit"))?;
        for index in 0..3 {
            let spec =
                PodSpec::new(&format!("other-{index}"), "node-2", &scenario.lab.backend(index).addresses);
            scenario.cluster.backend(NAMESPACE, "other", &spec)?;
        }
        let key = format!("egress.coil.cybozu.com/{NAMESPACE}");
        let client = scenario.clients[0].clone();
        let both = format!("{EGRESS},other");
        scenario.api.annotate(Kind::Pod, &client.namespace, &client.name, &key, Some(&both))?;
        let text = address.to_string();
        scenario.agent()?.wait_log(&["guarding the Service", &text, "Audit"], scenario.patience())?;
        scenario.wait_attached(0)?;
        let own = streams(&scenario, &[0], EVERY)?;
        let other = stream_to(&scenario, address)?;
        // Cilium's state holds for both services: the one in reset is left, the one in audit is not.
        let bound = scenario.bound(0, IpFamily::V4, FOU_PORT)?;
        let id = bound_to(&scenario, address)?.context("no service entry")?;
        let its_index = ids.iter().position(|known| *known == id).context("an id of the service")?;
        for index in [bound, its_index] {
            scenario.lab.set_backend(index, BackendState::Terminating)?;
        }
        wait_left(&scenario, &[0], bound)?;
        let reason = ["action=\"would_move\"", "egress=\"other\""];
        let would = eventually("audit's count", scenario.patience(), || {
            let now = scenario.agent()?.metric("coil_guard_egress_actions_total", &reason)?;
            Ok(if now >= 1.0 { Ok(()) } else { Err(now) })
        });
        scenario.explain(would)?;
        ensure!(bound_to(&scenario, address)? == Some(id), "audit moved a flow");
        // One off: the other still needs the program. Both off: nothing is left.
        scenario.set_mode(None)?;
        scenario.agent()?.wait_log(&["not guarding the Service any more", EGRESS], scenario.patience())?;
        scenario.wait_attached(0)?;
        finish(own)?;
        other.finish(true)?.ensure_exactly_once()?;
        scenario.cluster.set_mode(NAMESPACE, "other", None)?;
        leaves_nothing(&scenario, &[0])
    })
}
