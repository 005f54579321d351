//! The agent's watches, index and plan against the in-process API and its faults. Needs no privileges.

mod follower;
mod rows;

use std::{net::IpAddr, time::Duration};

use anyhow::Result;
use coil_guard::{
    index::BackendState,
    plan::{Desired, MarkState, Want},
};
use coil_guard_tests::{
    kube_api::{
        Close, Delivery, Gone, Kind, KubeApi, Outage,
        cluster::{Cluster, EgressSpec, PodSpec},
    },
    lab::eventually,
};
use serde_json::json;

use crate::follower::{Follower, NODE, PATIENCE};

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

/// An Egress in reset with two backends, and one client on this node.
fn cluster() -> Result<(KubeApi, Cluster)> {
    let api = KubeApi::start()?;
    let cluster = Cluster::new(&api);
    cluster.egress(&EgressSpec::new("net", "nat", &[ip("10.96.0.10")]).mode("reset"))?;
    cluster.backend("net", "nat", &PodSpec::new("a", "node-8", &[ip("10.0.1.1")]))?;
    cluster.backend("net", "nat", &PodSpec::new("b", "node-9", &[ip("10.0.1.2")]))?;
    let client = PodSpec::new("client", NODE, &[ip("10.0.0.1")]).client_of("net", "nat");
    cluster.client("app", &client)?;
    // Not of this node, and on the host's network: no clients here.
    cluster.client("app", &PodSpec::new("far", "node-2", &[ip("10.0.2.1")]).client_of("net", "nat"))?;
    let mut host = PodSpec::new("host", NODE, &[ip("192.0.2.1")]).client_of("net", "nat");
    host.host_network = true;
    cluster.client("app", &host)?;
    Ok((api, cluster))
}

const READY: BackendState = BackendState::Ready;

#[test]
fn the_first_lists_make_a_complete_plan() -> Result<()> {
    let (api, _cluster) = cluster()?;
    let follower = Follower::start(&api);
    let desired = follower.wait_complete()?;
    assert_eq!(
        desired.services.keys().map(|service| service.address).collect::<Vec<_>>(),
        [ip("10.96.0.10")]
    );
    let pods: Vec<_> = desired.pods.values().map(|pod| (pod.name.as_str(), pod.want)).collect();
    assert_eq!(pods, [("client", Want::Attached)]);
    assert!(desired.marks.values().all(|mark| mark.state == MarkState::Ready));
    assert_eq!(desired.marks.len(), 2);
    Ok(())
}

#[test]
fn long_lists_come_in_pages_and_lose_nothing() -> Result<()> {
    let (api, cluster) = cluster()?;
    for number in 0..250u32 {
        let [_, _, high, low] = number.to_be_bytes();
        let address = IpAddr::from([10, 5, high, low]);
        cluster
            .client("app", &PodSpec::new(&format!("c{number}"), NODE, &[address]).client_of("net", "nat"))?;
    }
    let follower = Follower::start(&api);
    assert_eq!(follower.wait_complete()?.pods.len(), 251);
    Ok(())
}

#[test]
fn modes_are_switched_live() -> Result<()> {
    let (api, cluster) = cluster()?;
    let follower = Follower::start(&api);
    follower.wait_complete()?;
    for mode in ["audit", "Drain", "off", "reset"] {
        cluster.set_mode("net", "nat", Some(mode))?;
        follower.wait(mode, |desired| {
            let found = desired.services.values().next().map(|service| format!("{:?}", service.mode));
            found.unwrap_or_else(|| "off".into()).eq_ignore_ascii_case(mode)
        })?;
    }
    Ok(())
}

#[test]
fn however_a_watch_ends_nothing_is_missed() -> Result<()> {
    for (how, gone) in [
        (Close::Clean, Gone::Event),
        (Close::Abrupt, Gone::Event),
        (Close::Expired, Gone::Event),
        (Close::Expired, Gone::Status),
    ] {
        let (api, cluster) = cluster()?;
        api.set_gone(gone);
        let follower = Follower::start(&api);
        follower.wait_complete()?;
        let old = cluster.backends("net", "nat").remove(0);
        // Both while the watches are down and after: a pod goes and another comes, and the history is forgotten.
        api.stop_listening();
        cluster.force_delete(&old)?;
        cluster.backend("net", "nat", &PodSpec::new("c", "node-7", &[ip("10.0.1.3")]))?;
        if how == Close::Expired {
            api.compact();
        }
        api.start_listening()?;
        follower.wait(&format!("new backend after {how:?}, {gone:?}"), |desired| {
            desired.complete
                && desired.marks.get(&ip("10.0.1.3")).is_some_and(|mark| mark.state == MarkState::Ready)
        })?;
        api.close_watches(None, how);
        cluster.backend("net", "nat", &PodSpec::new("d", "node-7", &[ip("10.0.1.4")]))?;
        follower.wait_backends(&[
            ("10.0.1.1", BackendState::Gone),
            ("10.0.1.2", READY),
            ("10.0.1.3", READY),
            ("10.0.1.4", READY),
        ])?;
        follower.wait_complete()?;
    }
    Ok(())
}

#[test]
fn an_api_server_that_is_gone_is_noticed_and_one_that_is_back_too() -> Result<()> {
    let (api, _cluster) = cluster()?;
    let follower = Follower::start(&api);
    follower.wait_complete()?;
    api.stop_listening();
    let desired = follower.wait("incomplete plan", |desired| !desired.complete)?;
    assert_eq!(
        (desired.services.len(), desired.marks.len(), desired.pods.len()),
        (1, 2, 1),
        "what is known stays"
    );
    let updates = follower.state.lock().unwrap().updates;
    api.start_listening()?;
    // Nothing has changed meanwhile, so no event says that the watches follow again.
    follower.wait_complete()?;
    assert_eq!(follower.state.lock().unwrap().updates, updates);
    Ok(())
}

#[test]
fn refusals_are_repeated_until_they_end() -> Result<()> {
    let (api, _cluster) = cluster()?;
    api.set_outage(Outage::Status(500));
    let follower = Follower::start(&api);
    eventually("problem of every watch", PATIENCE, || {
        let watches = follower.state.lock().unwrap().watches.clone();
        let told = watches
            .all()
            .values()
            .all(|watch| watch.problem.as_ref().is_some_and(|problem| problem.contains("500")));
        Ok(if told { Ok(()) } else { Err(watches) })
    })?;
    api.set_outage(Outage::None);
    follower.wait_complete()?;
    Ok(())
}

#[test]
fn a_malformed_object_is_skipped_alone() -> Result<()> {
    let (api, cluster) = cluster()?;
    let labels = json!({"app.kubernetes.io/name": "coil", "app.kubernetes.io/component": "egress"});
    let odd = |spec: serde_json::Value| json!({"apiVersion": "v1", "kind": "Service", "metadata": {"namespace": "net", "name": "odd", "labels": labels}, "spec": spec});
    api.put_raw(Kind::Service, "net", "odd", odd(json!({"ports": "many"})));
    api.put_raw(
        Kind::Egress,
        "net",
        "strange",
        json!({
            "apiVersion": "coil.cybozu.com/v2", "kind": "Egress",
            "metadata": {"namespace": "net", "name": "strange"}, "spec": {"fouSourcePortAuto": "perhaps"},
        }),
    );
    let follower = Follower::start(&api);
    assert_eq!(follower.wait_complete()?.services.len(), 1);
    let told = follower.state.lock().unwrap().malformed.join("\n");
    assert!(told.contains("Service net/odd is skipped: spec.ports"), "{told}");
    assert!(told.contains("Egress net/strange is skipped: spec.fouSourcePortAuto"), "{told}");

    // A known object that turns bad keeps what was known of it; a bad one that turns good is taken.
    let good = api.get(Kind::Service, "net", "nat").unwrap();
    let mut bad = good.clone();
    bad["spec"]["clusterIPs"] = json!(["nowhere"]);
    bad["spec"]["clusterIP"] = json!("nowhere");
    api.put_raw(Kind::Service, "net", "nat", bad);
    cluster.backend("net", "nat", &PodSpec::new("c", "node-7", &[ip("10.0.1.3")]))?;
    let desired = follower.wait("third backend", |desired| desired.marks.len() == 3)?;
    eventually("warning", PATIENCE, || {
        let told = follower.state.lock().unwrap().malformed.join("\n");
        Ok(if told.contains("Service net/nat is skipped") && told.contains("nowhere") {
            Ok(())
        } else {
            Err(told)
        })
    })?;
    assert_eq!(desired.services.keys().next().map(|service| service.address), Some(ip("10.96.0.10")));
    api.put_raw(Kind::Service, "net", "nat", good);
    Ok(())
}

#[test]
fn duplicated_coalesced_and_reordered_events_end_in_the_same_plan() -> Result<()> {
    let delay = Duration::from_millis(5);
    for delivery in [
        Delivery { duplicate: true, ..Delivery::default() },
        Delivery { coalesce: true, delay, ..Delivery::default() },
        Delivery { newest_first: true, delay, ..Delivery::default() },
        Delivery { duplicate: true, coalesce: true, newest_first: true, delay, ..Delivery::default() },
    ] {
        for late in [Kind::Pod, Kind::EndpointSlice] {
            let (api, cluster) = cluster()?;
            let follower = Follower::start(&api);
            follower.wait_complete()?;
            for kind in [Kind::Pod, Kind::EndpointSlice] {
                api.deliver(kind, delivery);
            }
            api.hold(late);
            let new: Vec<PodSpec> = (3..5)
                .map(|last| PodSpec::new(&format!("n{last}"), "node-7", &[IpAddr::from([10, 0, 1, last])]))
                .collect();
            cluster.roll("net", "nat", &new, |_| Ok(()))?;
            let leaving = cluster.backends("net", "nat").remove(0);
            cluster.terminate(&leaving, Some(30))?;
            api.deliver(late, delivery);

            let fresh = Follower::start(&api);
            let expected = comparable(&fresh.wait_complete()?);
            follower.wait(&format!("plan as listed afresh, {delivery:?}, {late:?} late"), |desired| {
                comparable(desired) == expected
            })?;
        }
    }
    Ok(())
}

/// Addresses and states of what has not gone: who started later never knew those.
fn comparable(desired: &Desired) -> Vec<(IpAddr, MarkState)> {
    let here = desired.marks.iter().filter(|(_, mark)| mark.state != MarkState::Gone);
    here.map(|(address, mark)| (*address, mark.state)).collect()
}
