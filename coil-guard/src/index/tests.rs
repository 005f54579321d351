//! The edge and the joins that the plan's tests do not show.

use serde_json::json;

use super::{testing::*, *};

#[test]
fn a_slice_without_endpoints_is_read() {
    let (_, slice) = slice(&api_slice("s", EGRESS, &[]), FOU_PORT).unwrap();
    assert_eq!((slice.service, slice.endpoints), (named(EGRESS), vec![]));
}

#[test]
fn a_slice_of_another_port_or_protocol_counts_for_nothing() {
    for port in [
        json!({"port": 5556, "protocol": "UDP"}),
        json!({"port": 5555, "protocol": "TCP"}),
        json!({"port": 5555}),
    ] {
        let mut object =
            serde_json::to_value(api_slice("s", EGRESS, &[endpoint("10.0.1.1", "a", "r s")])).unwrap();
        object["ports"] = json!([port]);
        let (_, slice) = slice(&serde_json::from_value(object).unwrap(), FOU_PORT).unwrap();
        assert_eq!(slice.endpoints, [], "{port}");
    }
}

#[test]
fn unset_conditions_mean_what_the_api_says() {
    let mut object = serde_json::to_value(api_slice("s", EGRESS, &[endpoint("10.0.1.1", "a", "")])).unwrap();
    let mut conditions = |value: serde_json::Value| {
        object["endpoints"][0]["conditions"] = value;
        let (_, slice) = slice(&serde_json::from_value(object.clone()).unwrap(), FOU_PORT).unwrap();
        let endpoint = &slice.endpoints[0];
        (endpoint.ready, endpoint.serving, endpoint.terminating)
    };
    assert_eq!(conditions(json!(null)), (true, true, false));
    assert_eq!(conditions(json!({"ready": false})), (false, false, false));
    assert_eq!(
        conditions(json!({"ready": false, "serving": true, "terminating": true})),
        (false, true, true)
    );
}

#[test]
fn malformed_objects_name_themselves_and_the_field() {
    let text = |error: Malformed| error.to_string();

    let mut object = api_service(EGRESS, &["10.96.0.300"]);
    assert_eq!(
        text(service(&object, FOU_PORT).unwrap_err()),
        "Service net/nat is skipped: spec.clusterIPs: an IP address is expected, found \"10.96.0.300\""
    );
    object.spec = None;
    assert!(text(service(&object, FOU_PORT).unwrap_err()).contains("net/nat is skipped: spec:"));
    let object = api_service(EGRESS, &[CLUSTER_IP]);
    let error = text(service(&object, 6666).unwrap_err());
    assert!(
        error.contains("UDP port 6666 is expected, found UDP ports [5555]") && error.contains("--fou-port"),
        "{error}"
    );

    let mut object = api_slice("s", EGRESS, &[]);
    object.metadata.labels = None;
    assert!(
        text(slice(&object, FOU_PORT).unwrap_err()).contains("metadata.labels[kubernetes.io/service-name]")
    );
    let object = api_slice("s", EGRESS, &[endpoint("10.0.1.1", "a", "r"), endpoint("nowhere", "b", "r")]);
    assert!(
        text(slice(&object, FOU_PORT).unwrap_err())
            .contains("EndpointSlice net/s is skipped: endpoints[1].addresses")
    );

    let mut object = api_egress_pod("a", &["10.0.1.1"], &json!({}));
    object.metadata.uid = None;
    assert!(text(egress_pod(&object).unwrap_err()).contains("Pod net/pod-a is skipped: metadata.uid"));
    object.metadata.name = None;
    assert!(text(egress_pod(&object).unwrap_err()).contains("Pod net/ is skipped: metadata.name"));
    let object = api_egress_pod("a", &["x"], &json!({}));
    assert!(text(egress_pod(&object).unwrap_err()).contains("status.podIPs"));
    let mut object = api_egress(EGRESS, &[]);
    object.metadata.namespace = None;
    assert!(text(egress(&object).unwrap_err()).contains("Egress /nat is skipped: metadata.namespace"));
}

#[test]
fn a_headless_service_has_no_address() {
    let (_, service) = service(&api_service(EGRESS, &["None"]), FOU_PORT).unwrap();
    assert!(service.cluster_ips.is_empty());
}

#[test]
fn a_pre_stop_hook_is_found_in_the_egress_container_alone() {
    let with = |containers: serde_json::Value| {
        let mut object = api_egress(EGRESS, &[]);
        object.spec = serde_json::from_value(json!({
            "fouSourcePortAuto": true,
            "template": {"spec": {"containers": containers, "terminationGracePeriodSeconds": 600}},
        }))
        .unwrap();
        egress(&object).unwrap().1
    };
    let hook = json!({"preStop": {"exec": {"command": ["sleep", "500"]}}});
    let found = with(json!([{"name": "egress", "lifecycle": hook}]));
    assert!(found.pre_stop && found.sport_auto);
    assert_eq!(found.grace, Some(std::time::Duration::from_secs(600)));
    assert!(!with(json!([{"name": "sidecar", "lifecycle": hook}, {"name": "egress"}])).pre_stop);
}

#[test]
fn host_network_pods_are_no_clients() {
    let object = api_client("client", "10.0.0.1", EGRESS, &json!({"spec": {"hostNetwork": true}}));
    assert_eq!(local_pod(&object).unwrap().1, None);
}

#[test]
fn a_reset_drops_what_it_does_not_list_and_keeps_what_could_not_be_read() {
    let mut index = running("reset");
    index.egress_is(&api_egress("other", &[]), at(0));
    index.egress_is(&api_egress("third", &[]), at(0));
    let (name, egress) = egress(&api_egress(EGRESS, &[("coil-guard.io/mode", "drain")])).unwrap();
    index.update(
        Update::Egress(Change::Reset(vec![
            (name.clone(), Some(egress)),
            (named("other"), None),
            (named("new"), None),
        ])),
        at(1),
    );
    assert_eq!(index.egresses().keys().collect::<Vec<_>>(), [&name, &named("other")]);
    assert_eq!(index.egresses()[&name].mode, Some(Some(crate::plan::Mode::Drain)));
}

#[test]
fn a_pod_made_anew_under_the_same_name_ends_the_old_one() {
    let mut index = running("reset");
    // The DELETED event was missed; the slice still lists the old pod.
    let mut object = api_egress_pod("a2", &["10.0.1.9"], &json!({}));
    object.metadata.name = Some("pod-a".into());
    index.pod_is(&object, at(1));
    let of_old = index.backends(&named(EGRESS)).find(|(key, _)| key.address == ip("10.0.1.1")).unwrap();
    assert_eq!(of_old.1.state, BackendState::Gone);
}

#[test]
fn egresses_named_earlier_are_remembered_while_the_pod_lives() {
    let mut index = running("reset");
    let client = ObjectName { namespace: "app".into(), name: "client".into() };
    index.client_is(&api_client("client", "10.0.0.1", "other", &json!({})), at(1));
    assert_eq!(index.local_pods()[&client].before, BTreeSet::from([named(EGRESS)]));
    index.client_is(&api_client("client", "10.0.0.1", EGRESS, &json!({})), at(2));
    assert_eq!(index.local_pods()[&client].before, BTreeSet::from([named("other")]));
    index.client_is(&api_client("client", "10.0.0.1", "x", &json!({"metadata": {"uid": "another"}})), at(3));
    assert_eq!(index.local_pods()[&client].before, BTreeSet::new());
}
