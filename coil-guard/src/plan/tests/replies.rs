//! Symmetric replies of mode rewrite.

use serde_json::json;

use super::*;

/// As [`running`], and both egress pods are on this node.
fn with_local_egress_pods(mode: &str) -> Index {
    let mut index = running(mode);
    for (uid, address) in [("a", "10.0.1.1"), ("b", "10.0.1.2")] {
        index.client_is(&api_egress_pod(uid, &[address], &json!({})), at(0));
    }
    index
}

fn egress_pods(index: &Index) -> Vec<String> {
    plan_at(index, 0).egress_pods.into_keys().collect()
}

#[test]
fn egress_pods_of_this_node_and_clients_are_named_in_rewrite_only() {
    for mode in ["audit", "reset", "drain", "off"] {
        let desired = plan_at(&with_local_egress_pods(mode), 0);
        assert!(desired.egress_pods.is_empty(), "{mode}");
        assert!(desired.pods.values().all(|pod| !pod.symmetric), "{mode}");
    }
    let desired = plan_at(&with_local_egress_pods("rewrite"), 0);
    assert_eq!(desired.egress_pods.keys().collect::<Vec<_>>(), ["a", "b"]);
    let pod = &desired.egress_pods["a"];
    assert_eq!((pod.name.as_str(), &pod.egress), ("pod-a", &named(EGRESS)));
    assert_eq!(pod.addresses, BTreeSet::from([ip("10.0.1.1")]));
    assert!(desired.pods["uid-client"].symmetric);
    // A known egress pod on another node.
    assert!(egress_pods(&running("rewrite")).is_empty());
}

#[test]
fn replies_from_ports_of_their_own_are_left_alone() {
    let mut index = with_local_egress_pods("rewrite");
    let mut egress = api_egress(EGRESS, &[("coil-guard.io/mode", "rewrite")]);
    egress.spec.fou_source_port_auto = Some(true);
    index.egress_is(&egress, at(0));
    let desired = plan_at(&index, 0);
    assert!(desired.egress_pods.is_empty() && !desired.pods["uid-client"].symmetric);
}

#[test]
fn a_node_without_clients_still_serves_those_of_other_nodes() {
    let mut index = with_local_egress_pods("rewrite");
    index
        .client_is(&api_client("client", "10.0.0.1", EGRESS, &json!({"status": {"phase": "Failed"}})), at(0));
    let desired = plan_at(&index, 0);
    assert!(desired.pods.is_empty() && desired.is_guarding());
    assert_eq!(desired.egress_pods.len(), 2);
    assert!(!Desired::default().is_guarding());
}

#[test]
fn a_leaving_egress_pod_goes_on_and_one_that_has_ended_does_not() {
    let mut index = with_local_egress_pods("rewrite");
    for (uid, address, patch) in
        [("a", "10.0.1.1", deleted(30)), ("b", "10.0.1.2", json!({"status": {"phase": "Succeeded"}}))]
    {
        let pod = api_egress_pod(uid, &[address], &patch);
        index.client_is(&pod, at(1));
        index.pod_is(&pod, at(1));
    }
    assert_eq!(egress_pods(&index), ["a"]);
}

#[test]
fn a_client_whose_annotation_was_taken_away_keeps_its_replies_while_it_has_the_tunnel() {
    let unannotated = json!({"metadata": {"annotations": null}});
    let attached = BTreeSet::from(["uid-client".to_owned()]);
    let mut index = running("rewrite");
    index.client_is(&api_client("client", "10.0.0.1", "", &unannotated), at(1));
    let desired = plan(&index, &Settings::default(), &attached, true, at(1));
    let client = &desired.pods["uid-client"];
    assert!(client.symmetric && client.want == Want::WhileTunnelled, "{client:?}");

    // The same, met by an agent that never saw the annotation.
    let mut index = running("rewrite");
    index.update(Update::LocalPod(Change::Reset(vec![])), at(1));
    index.client_is(&api_client("client", "10.0.0.1", "", &unannotated), at(1));
    let desired = plan(&index, &Settings::default(), &attached, true, at(1));
    assert!(desired.pods["uid-client"].symmetric);
}
