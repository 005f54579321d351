//! The rules, each on objects as the API server sends them.

mod marks;
mod replies;

use serde_json::json;

use super::*;
use crate::index::{Change, Update, testing::*};

fn plan_at(index: &Index, millis: u64) -> Desired {
    plan(index, &Settings::default(), &BTreeSet::new(), true, at(millis))
}

#[test]
fn a_guarded_egress_with_a_client_here_is_planned() {
    let desired = plan_at(&running("reset"), 0);
    let service = ServiceAddress { address: ip(CLUSTER_IP), port: 5555 };
    let guarded = GuardedService { egress: named(EGRESS), mode: Mode::Reset, sport_auto: false };
    assert_eq!(desired.services, BTreeMap::from([(service, guarded)]));
    assert_eq!(desired.marks.len(), 2);
    let client = &desired.pods["uid-client"];
    assert_eq!((client.want, client.name.as_str()), (Want::Attached, "client"));
    assert_eq!(client.egresses, BTreeSet::from([named(EGRESS)]));
    assert_eq!(client.addresses, BTreeSet::from([ip("10.0.0.1")]));
    assert_eq!(desired.next_change, None);
}

#[test]
fn off_leaves_nothing() {
    for annotations in [&[][..], &[("coil-guard.io/mode", "off")], &[("coil-guard.io/mode", "yes")]] {
        let mut index = running("reset");
        index.egress_is(&api_egress(EGRESS, annotations), at(0));
        let attached = BTreeSet::from(["uid-client".to_owned()]);
        let desired = plan(&index, &Settings::default(), &attached, true, at(1));
        assert_eq!(desired, Desired { complete: true, ..Desired::default() }, "{annotations:?}");
    }
}

#[test]
fn the_default_mode_is_for_egresses_without_the_annotation() {
    let settings = Settings { default_mode: Some(Mode::Audit), ..Settings::default() };
    let mode = |annotations: &[(&str, &str)]| {
        let mut index = running("reset");
        index.egress_is(&api_egress(EGRESS, annotations), at(0));
        let desired = plan(&index, &settings, &BTreeSet::new(), true, at(0));
        desired.services.into_values().map(|service| service.mode).next()
    };
    assert_eq!(mode(&[]), Some(Mode::Audit));
    assert_eq!(mode(&[("coil-guard.io/mode", "Drain")]), Some(Mode::Drain));
    assert_eq!(mode(&[("coil-guard.io/mode", "off")]), None);
    assert_eq!(
        mode(&[("coil-guard.io/mode", "unknown")]),
        None,
        "an unknown value means off, whatever the default"
    );
}

#[test]
fn modes_that_write_are_refused_where_nothing_may_write() {
    let settings = Settings { read_only: true, default_mode: Some(Mode::Reset), ..Settings::default() };
    for (asked, given) in [
        ("reset", None),
        ("drain", None),
        ("audit", Some(Mode::Audit)),
        ("rewrite", Some(Mode::Rewrite)),
        ("off", None),
    ] {
        let mut index = running(asked);
        let desired = plan(&index, &settings, &BTreeSet::new(), true, at(0));
        let modes: BTreeSet<_> = desired.services.values().map(|service| Some(service.mode)).collect();
        assert_eq!(modes, given.map(Some).into_iter().collect(), "{asked}");
        index.egress_is(&api_egress(EGRESS, &[("coil-guard.io/mode", asked)]), at(0));
        let egress = &index.egresses()[&named(EGRESS)];
        assert_eq!(settings.refused(egress).is_some(), ["reset", "drain"].contains(&asked), "{asked}");
    }
    let mut index = running("reset");
    index.egress_is(&api_egress(EGRESS, &[]), at(0));
    assert_eq!(settings.refused(&index.egresses()[&named(EGRESS)]), Some(Mode::Reset), "the default mode");
}

#[test]
fn both_cluster_ips_are_guarded_and_a_changed_one_replaces_the_old() {
    let mut index = running("reset");
    index.service_is(&api_service(EGRESS, &[CLUSTER_IP, "fd00::10"]), at(1));
    let addresses =
        |index: &Index| plan_at(index, 1).services.into_keys().map(|key| key.address).collect::<Vec<_>>();
    assert_eq!(addresses(&index), [ip(CLUSTER_IP), ip("fd00::10")]);
    index.service_is(&api_service(EGRESS, &["10.96.0.99"]), at(2));
    assert_eq!(addresses(&index), [ip("10.96.0.99")]);
}

#[test]
fn labels_do_not_join() {
    // A Service and a slice with all the labels, and no Egress of that name.
    let mut index = running("reset");
    index.service_is(&api_service("stray", &["10.96.0.77"]), at(0));
    index.slice_is(&api_slice("stray", "stray", &[endpoint("10.0.1.7", "x", "r s")]), at(0));
    let desired = plan_at(&index, 0);
    assert_eq!((desired.services.len(), desired.marks.len()), (1, 2));
}

#[test]
fn egresses_without_clients_here_cost_nothing() {
    let mut index = running("reset");
    index.egress_is(&api_egress("far", &[("coil-guard.io/mode", "reset")]), at(0));
    index.service_is(&api_service("far", &["10.96.0.20"]), at(0));
    index.slice_is(&api_slice("far", "far", &[endpoint("10.0.2.1", "f", "r s")]), at(0));
    assert_eq!((plan_at(&index, 0).services.len(), plan_at(&index, 0).marks.len()), (1, 2));
    index.client_is(&api_client("second", "10.0.0.2", "far", &json!({})), at(0));
    assert_eq!((plan_at(&index, 0).services.len(), plan_at(&index, 0).marks.len()), (2, 3));
}

#[test]
fn a_client_is_detached_by_annotation_only_when_its_tunnel_is_gone() {
    let mut index = running("reset");
    let attached = BTreeSet::from(["uid-client".to_owned()]);
    let unannotated = json!({"metadata": {"annotations": null}});
    index.client_is(&api_client("client", "10.0.0.1", "", &unannotated), at(1));
    let desired = plan(&index, &Settings::default(), &attached, true, at(1));
    assert_eq!(desired.pods["uid-client"].want, Want::WhileTunnelled);
    assert_eq!(desired.services.len(), 1, "its tunnel still leads there");
    assert!(plan_at(&index, 1).pods.is_empty(), "not attached: nothing to keep");

    // The same, met by an agent that never saw the annotation.
    let mut index = running("reset");
    index.update(Update::LocalPod(Change::Reset(vec![])), at(1));
    index.client_is(&api_client("client", "10.0.0.1", "", &unannotated), at(1));
    let desired = plan(&index, &Settings::default(), &attached, true, at(1));
    assert_eq!((desired.pods["uid-client"].want, desired.services.len()), (Want::WhileTunnelled, 1));
}

#[test]
fn a_pod_is_read_only_while_no_egress_of_its_is_in_a_mode_that_writes() {
    let read_only = |index: &Index, attached: &BTreeSet<PodUid>| {
        plan(index, &Settings::default(), attached, true, at(9)).pods["uid-client"].read_only
    };
    let none = BTreeSet::new();
    for (mode, expected) in [("audit", true), ("rewrite", true), ("reset", false), ("drain", false)] {
        assert_eq!(read_only(&running(mode), &none), expected, "{mode}");
    }
    // One of another Egress's clients as well.
    let mut index = running("rewrite");
    index.egress_is(&api_egress("other", &[("coil-guard.io/mode", "reset")]), at(0));
    assert!(read_only(&index, &none), "what others are clients of does not matter");
    let both = format!("{EGRESS},other");
    index.client_is(&api_client("client", "10.0.0.1", &both, &json!({})), at(1));
    assert!(!read_only(&index, &none));
    // Taken out of the annotation: the tunnel stays, and with it what it may need.
    index.client_is(&api_client("client", "10.0.0.1", EGRESS, &json!({})), at(2));
    assert!(!read_only(&index, &none));
    // Met by an agent that never saw an annotation.
    let mut index = running("rewrite");
    index.update(Update::LocalPod(Change::Reset(vec![])), at(1));
    let unannotated = json!({"metadata": {"annotations": null}});
    index.client_is(&api_client("client", "10.0.0.1", "", &unannotated), at(1));
    let attached = BTreeSet::from(["uid-client".to_owned()]);
    assert!(read_only(&index, &attached));
    index.egress_is(&api_egress("other", &[("coil-guard.io/mode", "reset")]), at(0));
    assert!(!read_only(&index, &attached), "its tunnel may lead to any of them");
}

#[test]
fn clients_without_an_address_or_with_another_pods_are_left_out() {
    let mut index = running("reset");
    let starting = json!({"status": {"phase": "Pending", "podIP": null, "podIPs": null}});
    index.client_is(&api_client("starting", "-", EGRESS, &starting), at(1));
    let finished = json!({"status": {"phase": "Succeeded"}});
    index.client_is(&api_client("finished", "10.0.0.1", EGRESS, &finished), at(1));
    let ending = json!({"metadata": {"deletionTimestamp": "2026-01-02T00:00:00Z"}});
    index.client_is(&api_client("ending", "10.0.0.1", EGRESS, &ending), at(1));
    assert_eq!(plan_at(&index, 1).pods.into_keys().collect::<Vec<_>>(), ["uid-client"]);
    let later = json!({"metadata": {"creationTimestamp": "2026-01-03T00:00:00Z"}});
    index.client_is(&api_client("later", "10.0.0.1", EGRESS, &later), at(1));
    assert_eq!(plan_at(&index, 1).pods.into_keys().collect::<Vec<_>>(), ["uid-later"]);
}

#[test]
fn an_egress_being_deleted_stays_guarded_until_it_is_gone() {
    let mut index = running("reset");
    let mut object = api_egress(EGRESS, &[("coil-guard.io/mode", "reset")]);
    object.metadata = serde_json::from_value({
        let mut metadata = serde_json::to_value(&object.metadata).unwrap();
        metadata["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
        metadata
    })
    .unwrap();
    index.egress_is(&object, at(1));
    assert_eq!(plan_at(&index, 1).services.len(), 1);
    index.update(Update::Egress(Change::Delete(named(EGRESS))), at(2));
    assert_eq!(plan_at(&index, 2).services.len(), 0);
}
