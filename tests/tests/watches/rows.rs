//! What the agent makes of each thing that a real API server was seen to do around a terminating egress pod. That the API in
//! this process does the same is held by `kube_api::rows`.

use std::{net::IpAddr, time::Duration};

use anyhow::{Context as _, Result};
use coil_guard::index::{Backend, BackendState, ObjectName};
use coil_guard_tests::{
    kube_api::{
        Delivery, Kind, KubeApi,
        cluster::{Cluster, EgressSpec, PodRef, PodSpec, RollStep, SliceLag},
    },
    lab::eventually,
};
use serde_json::{Value, json};

use crate::follower::{Follower, NODE, PATIENCE};

const NET: &str = "net";
const NAT: &str = "nat";
const ADDRESS: &str = "10.0.1.1";

const READY: BackendState = BackendState::Ready;
const NOT_READY: BackendState = BackendState::NotReady;
const LEAVING: BackendState = BackendState::Leaving;
const GONE: BackendState = BackendState::Gone;

struct Row {
    api: KubeApi,
    cluster: Cluster,
    follower: Follower,
}

impl Row {
    fn new() -> Result<Self> {
        let api = KubeApi::start()?;
        let cluster = Cluster::new(&api);
        cluster.egress(&EgressSpec::new(NET, NAT, &["10.96.0.10".parse()?]).mode("drain"))?;
        // Only what a client of this node uses is guarded here.
        let client = PodSpec::new("client", NODE, &["10.0.0.1".parse()?]);
        cluster.client("app", &client.client_of(NET, NAT))?;
        let follower = Follower::start(&api);
        follower.wait_complete()?;
        Ok(Self { api, cluster, follower })
    }

    fn with_pod() -> Result<(Self, PodRef)> {
        let row = Self::new()?;
        let pod = row.cluster.backend(NET, NAT, &spec("a", ADDRESS)?)?;
        row.is(READY)?;
        Ok((row, pod))
    }

    fn is(&self, state: BackendState) -> Result<()> {
        self.follower.wait_backends(&[(ADDRESS, state)])
    }

    /// As [`Self::is`], when everything that was written before has been told: a second pod came after it.
    fn stays(&self, state: BackendState) -> Result<()> {
        let last = self.cluster.backend(NET, NAT, &spec("last", "10.0.1.9")?)?;
        self.follower.wait_backends(&[(ADDRESS, state), ("10.0.1.9", READY)])?;
        self.cluster.force_delete(&last)?;
        self.follower.wait_backends(&[(ADDRESS, state), ("10.0.1.9", GONE)])
    }

    fn guarded(&self) -> usize {
        self.follower.desired().services.len()
    }

    fn backend(&self) -> Result<Backend> {
        let state = self.follower.state.lock().map_err(|_| anyhow::anyhow!("the follower panicked"))?;
        let name = ObjectName { namespace: NET.into(), name: NAT.into() };
        let mut backends = state.index.backends(&name);
        let found = backends.find(|(key, _)| key.address.to_string() == ADDRESS);
        found.map(|(_, backend)| backend.clone()).context("no such backend")
    }
}

fn spec(name: &str, address: &str) -> Result<PodSpec> {
    Ok(PodSpec::new(name, "node-8", &[address.parse::<IpAddr>()?]))
}

#[test]
fn a_service_without_pods_is_guarded_and_has_no_backends() -> Result<()> {
    let row = Row::new()?;
    assert_eq!(row.guarded(), 1);
    row.follower.wait_backends(&[])
}

#[test]
fn a_pod_is_a_backend_once_it_has_an_address_and_ready_once_its_endpoint_is() -> Result<()> {
    let row = Row::new()?;
    let pod = row.cluster.pending_backend(NET, NAT, &spec("a", ADDRESS)?)?;
    // One that came later is known, so the first one is too.
    row.cluster.backend(NET, NAT, &spec("b", "10.0.1.2")?)?;
    row.follower.wait_backends(&[("10.0.1.2", READY)])?;
    row.cluster.run(&pod, &[ADDRESS.parse()?], false)?;
    row.follower.wait_backends(&[(ADDRESS, NOT_READY), ("10.0.1.2", READY)])?;
    row.cluster.set_ready(&pod, true)?;
    row.follower.wait_backends(&[(ADDRESS, READY), ("10.0.1.2", READY)])
}

#[test]
fn a_deleted_pod_is_leaving_for_ever_whatever_its_readiness_says() -> Result<()> {
    let (row, pod) = Row::with_pod()?;
    row.cluster.terminate(&pod, None)?;
    row.is(LEAVING)?;
    assert_eq!(row.backend()?.grace, Duration::from_secs(30));
    for (ready, expected) in [(false, false), (true, true)] {
        row.cluster.set_ready(&pod, ready)?;
        eventually("readiness of the leaving pod", PATIENCE, || {
            let backend = row.backend()?;
            Ok(if backend.serving == expected { Ok(()) } else { Err(backend) })
        })?;
        row.is(LEAVING)?;
    }
    // The grace period runs out and no kubelet takes the pod down: nothing is told any more.
    row.stays(LEAVING)
}

#[test]
fn a_second_deletion_brings_the_end_forward_and_never_puts_it_off() -> Result<()> {
    let (row, pod) = Row::with_pod()?;
    row.cluster.terminate(&pod, Some(600))?;
    row.is(LEAVING)?;
    let since = row.backend()?.since;
    row.cluster.terminate(&pod, Some(5))?;
    eventually("shorter grace period", PATIENCE, || {
        let backend = row.backend()?;
        Ok(if backend.grace == Duration::from_secs(5) { Ok(()) } else { Err(backend) })
    })?;
    row.cluster.terminate(&pod, Some(60))?;
    row.stays(LEAVING)?;
    let backend = row.backend()?;
    assert_eq!((backend.grace, backend.since), (Duration::from_secs(5), since));
    Ok(())
}

#[test]
fn a_forced_deletion_is_gone_in_either_order_of_its_two_events() -> Result<()> {
    let (row, pod) = Row::with_pod()?;
    row.cluster.terminate(&pod, None)?;
    row.is(LEAVING)?;
    row.cluster.force_delete(&pod)?;
    row.is(GONE)?;
    // Of a ready pod: straight, or by way of a terminating endpoint, which a finalizer makes visible here.
    let (row, pod) = Row::with_pod()?;
    row.cluster.force_delete(&pod)?;
    row.is(GONE)?;
    let (row, pod) = Row::with_pod()?;
    let finalizers = |list: Value| json!({"metadata": {"finalizers": list}});
    row.api.patch(Kind::Pod, NET, "a", &finalizers(json!(["test/hold"])))?;
    row.cluster.force_delete(&pod)?;
    row.is(LEAVING)?;
    row.api.patch(Kind::Pod, NET, "a", &finalizers(Value::Null))?;
    row.cluster.settle(NET, NAT)?;
    row.is(GONE)
}

#[test]
fn a_leaving_pod_that_has_finished_is_gone_before_its_object_is() -> Result<()> {
    for phase in ["Succeeded", "Failed"] {
        let (row, pod) = Row::with_pod()?;
        row.cluster.terminate(&pod, None)?;
        row.is(LEAVING)?;
        row.cluster.set_phase(&pod, phase)?;
        row.is(GONE)?;
        row.cluster.force_delete(&pod)?;
        row.stays(GONE)?;
    }
    Ok(())
}

#[test]
fn a_pod_that_was_not_ready_is_leaving_once_it_is_deleted() -> Result<()> {
    let (row, pod) = Row::with_pod()?;
    row.cluster.set_ready(&pod, false)?;
    row.is(NOT_READY)?;
    row.cluster.terminate(&pod, None)?;
    row.is(LEAVING)
}

#[test]
fn a_pod_that_never_had_a_node_was_never_a_backend() -> Result<()> {
    let row = Row::new()?;
    let pod = row.cluster.pending_backend(NET, NAT, &PodSpec::new("a", "", &[]))?;
    row.cluster.terminate(&pod, None)?;
    row.cluster.backend(NET, NAT, &spec("b", "10.0.1.2")?)?;
    row.follower.wait_backends(&[("10.0.1.2", READY)])
}

#[test]
fn a_pod_whose_label_leaves_the_selector_is_gone_and_alive() -> Result<()> {
    let (row, pod) = Row::with_pod()?;
    row.cluster.set_label(&pod, "app.kubernetes.io/instance", Some("other"))?;
    row.is(GONE)
}

#[test]
fn the_same_name_and_address_made_anew_is_ready_whether_its_end_was_seen_or_not() -> Result<()> {
    let (row, pod) = Row::with_pod()?;
    row.cluster.terminate(&pod, None)?;
    row.is(LEAVING)?;
    // One event, in which only the UID tells.
    let new = row.cluster.replace_in_place(&pod)?;
    row.is(READY)?;
    row.cluster.force_delete(&new)?;
    row.cluster.backend(NET, NAT, &spec("a", ADDRESS)?)?;
    row.is(READY)
}

#[test]
fn a_leaving_pod_that_is_published_as_ready_is_leaving() -> Result<()> {
    let (row, pod) = Row::with_pod()?;
    row.api.patch(Kind::Service, NET, NAT, &json!({"spec": {"publishNotReadyAddresses": true}}))?;
    row.cluster.terminate(&pod, None)?;
    row.is(LEAVING)?;
    row.stays(LEAVING)
}

#[test]
fn a_service_whose_last_endpoint_goes_stays_guarded_until_it_is_deleted() -> Result<()> {
    let (row, pod) = Row::with_pod()?;
    row.cluster.force_delete(&pod)?;
    row.is(GONE)?;
    assert_eq!(row.guarded(), 1);
    row.cluster.delete_egress(NET, NAT)?;
    row.follower.wait("plan without services", |desired| desired.services.is_empty()).map(drop)
}

#[test]
fn in_a_rolling_update_a_ready_backend_is_known_before_the_old_one_leaves() -> Result<()> {
    let (row, _) = Row::with_pod()?;
    row.cluster.roll(NET, NAT, &[spec("b", "10.0.1.2")?], |step| {
        if let RollStep::Terminating(_) = step {
            row.follower.wait_backends(&[(ADDRESS, LEAVING), ("10.0.1.2", READY)])?;
        }
        Ok(())
    })?;
    row.follower.wait_backends(&[(ADDRESS, GONE), ("10.0.1.2", READY)])
}

#[test]
fn either_stream_alone_says_that_a_pod_leaves() -> Result<()> {
    // The slice never comes, comes batched with what followed, or comes late.
    let (row, pod) = Row::with_pod()?;
    row.cluster.set_slice_lag(SliceLag::Stopped);
    row.cluster.terminate(&pod, None)?;
    row.is(LEAVING)?;
    row.cluster.replace_in_place(&pod)?;
    row.cluster.settle(NET, NAT)?;
    row.is(READY)?;
    // The pod comes after its slice.
    let (row, pod) = Row::with_pod()?;
    row.api.hold(Kind::Pod);
    row.cluster.terminate(&pod, None)?;
    row.is(LEAVING)?;
    row.api.deliver(Kind::Pod, Delivery::default());
    row.stays(LEAVING)
}
