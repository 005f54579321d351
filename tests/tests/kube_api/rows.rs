//! Every row of what a real API server and its controllers were seen to do around a terminating egress pod.

use coil_guard_tests::kube_api::{
    Delivery, Kind, KubeApi,
    cluster::{Cluster, EgressSpec, PodRef, PodSpec, RollStep, SliceLag},
};
use k8s_openapi::api::{core::v1::Pod, discovery::v1::EndpointSlice};
use serde_json::{Value, json};

use super::tape::{Tape, ip};

const TERMINATING: &str = "10.0.0.1 r=F s=T t=T";

struct Row {
    cluster: Cluster,
    pods: Tape<Pod>,
    slices: Tape<EndpointSlice>,
}

impl Row {
    async fn new() -> Self {
        let api = KubeApi::start().expect("a server");
        let cluster = Cluster::new(&api);
        let row = Self { pods: Tape::start(&api).await, slices: Tape::start(&api).await, cluster };
        row.cluster.egress(&EgressSpec::new("egress", "nat", &[ip("10.96.0.1")])).expect("an Egress");
        row
    }

    /// With a Ready pod, and all events up to that behind it.
    async fn with_pod() -> (Self, PodRef) {
        let mut row = Self::new().await;
        let pod = row.cluster.backend("egress", "nat", &spec("nat-1", "10.0.0.1")).expect("a pod");
        row.pods.so_far().await;
        row.slices.so_far().await;
        (row, pod)
    }

    fn api(&self) -> &KubeApi {
        self.cluster.api()
    }

    async fn expect(&mut self, pods: &[&str], slices: &[&str]) {
        assert_eq!(
            (self.pods.described().await, self.slices.described().await),
            (strings(pods), strings(slices))
        );
    }
}

fn strings(texts: &[&str]) -> Vec<String> {
    texts.iter().map(|text| (*text).to_owned()).collect()
}

fn spec(name: &str, address: &str) -> PodSpec {
    PodSpec::new(name, "node1", &[ip(address)])
}

#[tokio::test]
async fn a_pod_from_creation_to_ready() {
    let mut row = Row::new().await;
    row.expect(&[], &["ADDED empty"]).await;
    let pod = row.cluster.pending_backend("egress", "nat", &spec("nat-1", "10.0.0.1")).unwrap();
    row.expect(&["ADDED Pending Ready=- ip=- grace=-"], &[]).await;
    row.cluster.run(&pod, &[ip("10.0.0.1")], false).unwrap();
    row.expect(&["MODIFIED Running Ready=False ip=10.0.0.1 grace=-"], &["MODIFIED 10.0.0.1 r=F s=F t=F"])
        .await;
    row.cluster.set_ready(&pod, true).unwrap();
    row.expect(&["MODIFIED Running Ready=True ip=10.0.0.1 grace=-"], &["MODIFIED 10.0.0.1 r=T s=T t=F"])
        .await;
}

#[tokio::test]
async fn a_graceful_deletion_and_readiness_meanwhile() {
    let (mut row, pod) = Row::with_pod().await;
    row.cluster.terminate(&pod, None).unwrap();
    let terminating = format!("MODIFIED {TERMINATING}");
    row.expect(&["MODIFIED Running Ready=True ip=10.0.0.1 grace=30"], &[&terminating]).await;
    row.cluster.set_ready(&pod, false).unwrap();
    row.expect(&["MODIFIED Running Ready=False ip=10.0.0.1 grace=30"], &["MODIFIED 10.0.0.1 r=F s=F t=T"])
        .await;
    row.cluster.set_ready(&pod, true).unwrap();
    row.expect(&["MODIFIED Running Ready=True ip=10.0.0.1 grace=30"], &[&terminating]).await;
    // The grace period runs out and no kubelet is there: nothing happens, for ever.
    row.expect(&[], &[]).await;
}

#[tokio::test]
async fn the_deletion_timestamp_lies_ahead_by_the_grace_period_and_moves_earlier() {
    let (mut row, pod) = Row::with_pod().await;
    let before = row.api().object::<Pod>(Kind::Pod, "egress", "nat-1").unwrap().metadata.creation_timestamp;
    row.cluster.terminate(&pod, Some(600)).unwrap();
    let stamp =
        |pods: Vec<(&str, Pod)>| pods.last().unwrap().1.metadata.deletion_timestamp.clone().unwrap().0;
    let first = stamp(row.pods.so_far().await);
    let ahead = first.as_second() - before.unwrap().0.as_second();
    assert!((600..660).contains(&ahead), "{ahead}");
    row.slices.so_far().await;
    row.cluster.terminate(&pod, Some(5)).unwrap();
    let second = stamp(row.pods.so_far().await);
    assert_eq!(first.as_second() - second.as_second(), 595);
    assert!(row.slices.so_far().await.is_empty());
    // Longer again, or without a period: nothing.
    row.cluster.terminate(&pod, Some(60)).unwrap();
    row.cluster.terminate(&pod, None).unwrap();
    row.expect(&[], &[]).await;
}

#[tokio::test]
async fn a_forced_deletion_of_a_terminating_pod() {
    let (mut row, pod) = Row::with_pod().await;
    row.cluster.terminate(&pod, None).unwrap();
    row.pods.so_far().await;
    row.slices.so_far().await;
    row.cluster.force_delete(&pod).unwrap();
    let gone = "Running Ready=True ip=10.0.0.1 grace=0";
    row.expect(&[&format!("MODIFIED {gone}"), &format!("DELETED {gone}")], &["MODIFIED empty"]).await;
    // The last endpoint is gone and the slice stays, with null instead of a list.
    let slice = row.api().list(Kind::EndpointSlice).pop().unwrap();
    assert_eq!((&slice["endpoints"], &slice["ports"]), (&Value::Null, &Value::Null));
}

#[tokio::test]
async fn a_forced_deletion_of_a_ready_pod_goes_straight_or_by_terminating() {
    let (mut row, pod) = Row::with_pod().await;
    row.cluster.force_delete(&pod).unwrap();
    let gone = "Running Ready=True ip=10.0.0.1 grace=0";
    row.expect(&[&format!("MODIFIED {gone}"), &format!("DELETED {gone}")], &["MODIFIED empty"]).await;

    // The other outcome of the race: the controller sees the first of the two writes. A finalizer holds the pod for it.
    let (mut row, pod) = Row::with_pod().await;
    let finalizers = |list: Value| json!({"metadata": {"finalizers": list}});
    row.api().patch(Kind::Pod, "egress", "nat-1", &finalizers(json!(["test/hold"]))).unwrap();
    row.cluster.force_delete(&pod).unwrap();
    row.api().patch(Kind::Pod, "egress", "nat-1", &finalizers(Value::Null)).unwrap();
    row.cluster.settle("egress", "nat").unwrap();
    assert_eq!(row.slices.described().await, [format!("MODIFIED {TERMINATING}"), "MODIFIED empty".into()]);
    assert_eq!(row.pods.so_far().await.last().unwrap().0, "DELETED");
}

#[tokio::test]
async fn a_terminating_pod_that_has_finished_leaves_the_slice_first() {
    for phase in ["Succeeded", "Failed"] {
        let (mut row, pod) = Row::with_pod().await;
        row.cluster.terminate(&pod, None).unwrap();
        row.pods.so_far().await;
        row.slices.so_far().await;
        row.cluster.set_phase(&pod, phase).unwrap();
        row.expect(&[&format!("MODIFIED {phase} Ready=True ip=10.0.0.1 grace=30")], &["MODIFIED empty"])
            .await;
        row.cluster.force_delete(&pod).unwrap();
        let gone = format!("{phase} Ready=True ip=10.0.0.1 grace=0");
        row.expect(&[&format!("MODIFIED {gone}"), &format!("DELETED {gone}")], &[]).await;
    }
}

#[tokio::test]
async fn a_not_ready_pod_is_deleted() {
    let (mut row, pod) = Row::with_pod().await;
    row.cluster.set_ready(&pod, false).unwrap();
    row.pods.so_far().await;
    row.slices.so_far().await;
    row.cluster.terminate(&pod, None).unwrap();
    row.expect(&["MODIFIED Running Ready=False ip=10.0.0.1 grace=30"], &["MODIFIED 10.0.0.1 r=F s=F t=T"])
        .await;
}

#[tokio::test]
async fn a_pod_without_a_node_goes_at_once() {
    let mut row = Row::new().await;
    row.slices.so_far().await;
    let pod = row.cluster.pending_backend("egress", "nat", &PodSpec::new("nat-1", "", &[])).unwrap();
    row.cluster.terminate(&pod, None).unwrap();
    let pods = ["ADDED Pending Ready=- ip=- grace=-", "MODIFIED Pending Ready=- ip=- grace=0"];
    row.expect(&[pods[0], pods[1], "DELETED Pending Ready=- ip=- grace=0"], &[]).await;
}

#[tokio::test]
async fn a_pod_whose_label_leaves_the_selector_was_never_terminating() {
    let (mut row, pod) = Row::with_pod().await;
    row.cluster.set_label(&pod, "app.kubernetes.io/instance", Some("other")).unwrap();
    row.expect(&["MODIFIED Running Ready=True ip=10.0.0.1 grace=-"], &["MODIFIED empty"]).await;
}

#[tokio::test]
async fn the_same_name_and_address_made_anew() {
    let (mut row, pod) = Row::with_pod().await;
    row.cluster.terminate(&pod, None).unwrap();
    row.pods.so_far().await;
    row.slices.so_far().await;
    let new = row.cluster.replace_in_place(&pod).unwrap();
    assert_ne!(new.uid, pod.uid);
    let events: Vec<_> = row.pods.so_far().await.iter().map(|(event, _)| *event).collect();
    assert_eq!(events, ["MODIFIED", "DELETED", "ADDED", "MODIFIED"]);
    // One event, "gone" is never seen, and the UID alone tells.
    let slices = row.slices.so_far().await;
    assert_eq!(slices.len(), 1);
    let endpoint = &slices[0].1.endpoints[0];
    assert_eq!(endpoint.target_ref.as_ref().unwrap().uid.as_deref(), Some(new.uid.as_str()));
    assert_eq!(endpoint.conditions.as_ref().unwrap().ready, Some(true));
    // With no batching, it goes and comes back.
    row.cluster.force_delete(&new).unwrap();
    row.cluster.backend("egress", "nat", &spec("nat-1", "10.0.0.1")).unwrap();
    assert_eq!(row.slices.described().await, ["MODIFIED empty", "MODIFIED 10.0.0.1 r=T s=T t=F"]);
}

#[tokio::test]
async fn publish_not_ready_addresses_keeps_a_terminating_pod_ready() {
    let (mut row, pod) = Row::with_pod().await;
    let patch = json!({"spec": {"publishNotReadyAddresses": true}});
    row.api().patch(Kind::Service, "egress", "nat", &patch).unwrap();
    row.cluster.terminate(&pod, None).unwrap();
    assert_eq!(row.slices.described().await, ["MODIFIED 10.0.0.1 r=T s=T t=T"]);
}

#[tokio::test]
async fn deleting_the_service_deletes_the_slices() {
    let (mut row, _) = Row::with_pod().await;
    row.cluster.delete_egress("egress", "nat").unwrap();
    let slices = row.slices.so_far().await;
    assert_eq!(slices.iter().map(|(event, _)| *event).collect::<Vec<_>>(), ["DELETED"]);
}

#[tokio::test]
async fn a_rolling_update_has_the_new_pod_ready_before_the_old_one_leaves() {
    let (mut row, _) = Row::with_pod().await;
    let mut seen = Vec::new();
    let api = row.api().clone();
    let new = [spec("nat-2", "10.0.0.2")];
    row.cluster
        .roll("egress", "nat", &new, |step| {
            if let RollStep::Terminating(_) = step {
                seen.extend(api.list(Kind::EndpointSlice));
            }
            Ok(())
        })
        .unwrap();
    let ready = |slice: &Value, index: usize| slice["endpoints"][index]["conditions"].clone();
    assert_eq!(ready(&seen[0], 0), json!({"ready": false, "serving": true, "terminating": true}));
    assert_eq!(ready(&seen[0], 1), json!({"ready": true, "serving": true, "terminating": false}));
    assert_eq!(row.slices.described().await.last().unwrap(), "MODIFIED 10.0.0.2 r=T s=T t=F");
}

#[tokio::test]
async fn the_slice_follows_later_coalesced_or_never() {
    let (mut row, pod) = Row::with_pod().await;
    row.cluster.set_slice_lag(SliceLag::Stopped);
    row.cluster.terminate(&pod, None).unwrap();
    row.expect(&["MODIFIED Running Ready=True ip=10.0.0.1 grace=30"], &[]).await;
    // As with batching: what lay between is never seen.
    row.cluster.replace_in_place(&pod).unwrap();
    row.cluster.settle("egress", "nat").unwrap();
    assert_eq!(row.slices.described().await, ["MODIFIED 10.0.0.1 r=T s=T t=F"]);

    let pod = row.cluster.backends("egress", "nat").pop().unwrap();
    row.cluster.set_slice_lag(SliceLag::After(std::time::Duration::from_millis(50)));
    row.cluster.terminate(&pod, None).unwrap();
    let event = row.slices.next().await;
    assert!(matches!(event, Some(kube::core::WatchEvent::Modified(_))), "{event:?}");
}

#[tokio::test]
async fn the_slice_can_come_before_the_pod() {
    let (mut row, pod) = Row::with_pod().await;
    row.api().hold(Kind::Pod);
    row.cluster.terminate(&pod, None).unwrap();
    assert_eq!(row.slices.described().await, [format!("MODIFIED {TERMINATING}")]);
    row.api().deliver(Kind::Pod, Delivery::default());
    assert_eq!(row.pods.described().await, ["MODIFIED Running Ready=True ip=10.0.0.1 grace=30"]);
}

#[tokio::test]
async fn two_families_have_a_slice_each() {
    let mut row = Row::new().await;
    row.slices.so_far().await;
    let both = [ip("10.0.1.1"), ip("fd00::1")];
    row.cluster.egress(&EgressSpec::new("egress", "dual", &[ip("10.96.0.2"), ip("fd00:96::2")])).unwrap();
    row.cluster.backend("egress", "dual", &PodSpec::new("dual-1", "node1", &both)).unwrap();
    let expected =
        ["ADDED empty", "ADDED empty", "MODIFIED 10.0.1.1 r=T s=T t=F", "MODIFIED fd00::1 r=T s=T t=F"];
    assert_eq!(row.slices.described().await, expected);
}
