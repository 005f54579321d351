//! Which mark a backend gets, and for how long it keeps its flows.

use std::time::Duration;

use serde_json::json;

use super::{super::*, plan_at};
use crate::index::{BackendState, SETTLE, testing::*};

fn mark(index: &Index, address: &str, millis: u64) -> Option<(MarkState, Keep)> {
    plan_at(index, millis).marks.get(&ip(address)).map(|mark| (mark.state, mark.keep))
}

fn slice_of(index: &mut Index, endpoints: &[serde_json::Value], millis: u64) {
    index.slice_is(&api_slice("s", EGRESS, endpoints), at(millis));
}

const READY: Option<(MarkState, Keep)> = Some((MarkState::Ready, Keep::ForEver));
const LEAVING: Option<(MarkState, Keep)> = Some((MarkState::Leaving, Keep::No));
const GONE: Option<(MarkState, Keep)> = Some((MarkState::Gone, Keep::No));

fn draining(until_millis: u64) -> Option<(MarkState, Keep)> {
    Some((MarkState::Leaving, Keep::Until(at(until_millis))))
}

fn not_ready(until_millis: u64) -> Option<(MarkState, Keep)> {
    Some((MarkState::NotReady, Keep::Until(at(until_millis))))
}

#[test]
fn a_pod_is_leaving_when_either_stream_says_so() {
    let mut by_pod = running("reset");
    by_pod.pod_is(&api_egress_pod("a", &["10.0.1.1"], &deleted(30)), at(5));
    assert_eq!(mark(&by_pod, "10.0.1.1", 5), LEAVING);
    assert_eq!(mark(&by_pod, "10.0.1.2", 5), READY);

    let mut by_slice = running("reset");
    slice_of(&mut by_slice, &[endpoint("10.0.1.1", "a", "s t"), endpoint("10.0.1.2", "b", "r s")], 5);
    assert_eq!(mark(&by_slice, "10.0.1.1", 5), LEAVING);

    // publishNotReadyAddresses keeps it ready while it terminates.
    let mut published = running("reset");
    slice_of(&mut published, &[endpoint("10.0.1.1", "a", "r s t")], 5);
    assert_eq!(mark(&published, "10.0.1.1", 5), LEAVING);
}

#[test]
fn audit_keeps_nothing_on_a_leaving_backend() {
    let mut index = running("audit");
    index.pod_is(&api_egress_pod("a", &["10.0.1.1"], &deleted(30)), at(5));
    assert_eq!(mark(&index, "10.0.1.1", 5), LEAVING);
}

#[test]
fn a_drain_lasts_for_the_grace_period_from_when_it_was_seen() {
    let mut index = running("drain");
    index.pod_is(&api_egress_pod("a", &["10.0.1.1"], &deleted(60)), at(5_000));
    slice_of(&mut index, &[endpoint("10.0.1.1", "a", "s t"), endpoint("10.0.1.2", "b", "r s")], 5_006);
    assert_eq!(mark(&index, "10.0.1.1", 5_010), draining(65_000));
    assert_eq!(mark(&index, "10.0.1.1", 80_000), draining(65_000), "stuck beyond it, nothing is added");
}

#[test]
fn the_drain_timeout_shortens_and_never_lengthens() {
    for (timeout, until) in [("10s", Some(15_000)), ("10m", Some(35_000)), ("0s", None)] {
        let mut index = running("drain");
        let annotations = [("coil-guard.io/mode", "drain"), ("coil-guard.io/drain-timeout", timeout)];
        index.egress_is(&api_egress(EGRESS, &annotations), at(0));
        index.pod_is(&api_egress_pod("a", &["10.0.1.1"], &deleted(30)), at(5_000));
        assert_eq!(mark(&index, "10.0.1.1", 5_000), until.map_or(LEAVING, draining), "{timeout}");
    }
}

#[test]
fn a_second_delete_with_a_shorter_grace_shortens() {
    let mut index = running("drain");
    index.pod_is(&api_egress_pod("a", &["10.0.1.1"], &deleted(300)), at(5_000));
    assert_eq!(mark(&index, "10.0.1.1", 5_000), draining(305_000));
    index.pod_is(&api_egress_pod("a", &["10.0.1.1"], &deleted(10)), at(7_000));
    assert_eq!(mark(&index, "10.0.1.1", 7_000), draining(15_000));
    index.pod_is(&api_egress_pod("a", &["10.0.1.1"], &deleted(0)), at(8_000));
    assert_eq!(mark(&index, "10.0.1.1", 8_000), LEAVING);
}

#[test]
fn a_drain_known_from_the_slice_alone_uses_the_grace_of_the_spec() {
    let mut index = running("drain");
    let spec = json!({"spec": {"terminationGracePeriodSeconds": 120}});
    index.pod_is(&api_egress_pod("a", &["10.0.1.1"], &spec), at(0));
    slice_of(&mut index, &[endpoint("10.0.1.1", "a", "s t")], 1_000);
    assert_eq!(mark(&index, "10.0.1.1", 1_000), draining(121_000));
}

#[test]
fn a_leaving_pod_that_stops_serving_keeps_nothing_until_it_serves_again() {
    let mut index = running("drain");
    index.pod_is(&api_egress_pod("a", &["10.0.1.1"], &deleted(30)), at(1_000));
    for (conditions, expected) in [("s t", draining(31_000)), ("t", LEAVING), ("s t", draining(31_000))] {
        slice_of(&mut index, &[endpoint("10.0.1.1", "a", conditions)], 2_000);
        assert_eq!(mark(&index, "10.0.1.1", 2_000), expected, "{conditions}");
    }
}

#[test]
fn a_mark_covers_all_addresses_of_a_leaving_pod() {
    let mut index = running("drain");
    let both = ["10.0.1.1", "fd00::1:1"];
    index.pod_is(&api_egress_pod("a", &both, &json!({})), at(0));
    index.slice_is(&api_slice("s6", EGRESS, &[endpoint("fd00::1:1", "a", "r s")]), at(0));
    assert_eq!(mark(&index, "fd00::1:1", 0), READY);
    // Only the slice of the other family has been written yet, and the pod's event has not arrived.
    slice_of(&mut index, &[endpoint("10.0.1.1", "a", "s t")], 1_000);
    assert_eq!(mark(&index, "fd00::1:1", 1_000), draining(31_000));
    assert_eq!(mark(&index, "10.0.1.1", 1_000), draining(31_000));
    // A slice of the family that never had the address.
    let mut index = running("reset");
    index.pod_is(&api_egress_pod("a", &both, &deleted(30)), at(1));
    assert_eq!(mark(&index, "fd00::1:1", 1), LEAVING);
}

#[test]
fn not_ready_keeps_for_its_time_and_a_flap_starts_anew() {
    let mut index = running("reset");
    let of = |conditions| [endpoint("10.0.1.1", "a", conditions)];
    slice_of(&mut index, &of(""), 1_000);
    assert_eq!(mark(&index, "10.0.1.1", 1_000), not_ready(31_000));
    slice_of(&mut index, &of(""), 9_000);
    assert_eq!(mark(&index, "10.0.1.1", 9_000), not_ready(31_000));
    slice_of(&mut index, &of("r s"), 10_000);
    assert_eq!(mark(&index, "10.0.1.1", 10_000), READY);
    slice_of(&mut index, &of(""), 20_000);
    assert_eq!(mark(&index, "10.0.1.1", 20_000), not_ready(50_000));
    assert_eq!(plan_at(&index, 20_000).next_change, None, "the program looks at the clock itself");
}

#[test]
fn not_ready_after_is_set_by_annotation_and_flag() {
    for (value, expected) in [
        ("0s", Some((MarkState::NotReady, Keep::No))),
        ("2m", not_ready(121_000)),
        ("never", Some((MarkState::NotReady, Keep::ForEver))),
        ("nonsense", not_ready(8_000)),
    ] {
        let mut index = running("reset");
        let annotations = [("coil-guard.io/mode", "reset"), ("coil-guard.io/not-ready-after", value)];
        index.egress_is(&api_egress(EGRESS, &annotations), at(0));
        slice_of(&mut index, &[endpoint("10.0.1.1", "a", "")], 1_000);
        let settings =
            Settings { not_ready_after: NotReadyAfter::After(Duration::from_secs(7)), ..Settings::default() };
        let desired = plan(&index, &settings, &BTreeSet::new(), true, at(1_000));
        let mark = &desired.marks[&ip("10.0.1.1")];
        assert_eq!(Some((mark.state, mark.keep)), expected, "{value}");
    }
}

#[test]
fn an_address_in_two_slices_is_ready_if_it_is_in_either() {
    let mut index = running("reset");
    index.slice_is(&api_slice("s2", EGRESS, &[endpoint("10.0.1.1", "a", "")]), at(1));
    assert_eq!(mark(&index, "10.0.1.1", 1), READY);
    slice_of(&mut index, &[endpoint("10.0.1.2", "b", "r s")], 2);
    assert_eq!(mark(&index, "10.0.1.1", 2), not_ready(30_002));
    index.slice_is(
        &api_slice("s2", EGRESS, &[endpoint("10.0.1.1", "a", "s t"), endpoint("10.0.1.2", "b", "r s")]),
        at(3),
    );
    assert_eq!(mark(&index, "10.0.1.1", 3), LEAVING);
}

#[test]
fn an_address_between_two_slices_is_given_a_moment() {
    let left = || {
        let mut index = running("drain");
        slice_of(&mut index, &[endpoint("10.0.1.2", "b", "r s")], 1_000);
        index
    };
    let mut index = left();
    assert_eq!(mark(&index, "10.0.1.1", 1_000), not_ready(2_000));
    assert_eq!(plan_at(&index, 1_000).next_change, Some(at(2_000)));
    index.slice_is(&api_slice("s2", EGRESS, &[endpoint("10.0.1.1", "a", "r s")]), at(1_003));
    assert_eq!(mark(&index, "10.0.1.1", 1_003), READY);

    let mut never_back = left();
    assert_eq!(mark(&never_back, "10.0.1.1", 2_000), GONE);
    never_back.pod_is_gone("a", at(1_500));
    assert_eq!(mark(&never_back, "10.0.1.1", 1_500), GONE, "its pod went: no need to wait");
    assert_eq!(SETTLE, Duration::from_secs(1));
}

#[test]
fn a_pod_that_left_the_selector_is_gone_at_once() {
    let mut index = running("reset");
    let relabelled = json!({"metadata": {"labels": {"app.kubernetes.io/instance": "other"}}});
    index.pod_is(&api_egress_pod("a", &["10.0.1.1"], &relabelled), at(1));
    assert_eq!(mark(&index, "10.0.1.1", 1), READY, "the slice decides");
    slice_of(&mut index, &[endpoint("10.0.1.2", "b", "r s")], 2);
    assert_eq!(mark(&index, "10.0.1.1", 2), GONE);
}

#[test]
fn a_deleted_pod_is_gone_although_a_slice_still_lists_it_as_ready() {
    let mut index = running("drain");
    index.pod_is_gone("a", at(1));
    assert_eq!(mark(&index, "10.0.1.1", 1), GONE);
    slice_of(&mut index, &[endpoint("10.0.1.1", "a", "s t"), endpoint("10.0.1.2", "b", "r s")], 2);
    assert_eq!(mark(&index, "10.0.1.1", 2), GONE);
}

#[test]
fn a_finished_pod_never_counts_whoever_has_its_address() {
    for phase in ["Succeeded", "Failed"] {
        let mut index = running("drain");
        index.pod_is(&api_egress_pod("a", &["10.0.1.1"], &json!({"status": {"phase": phase}})), at(1));
        assert_eq!(mark(&index, "10.0.1.1", 1), GONE, "{phase}");
        // The next pod at that address; the finished one is held by a finalizer.
        index.pod_is(&api_egress_pod("c", &["10.0.1.1"], &json!({})), at(2));
        slice_of(&mut index, &[endpoint("10.0.1.1", "c", "")], 2);
        assert_eq!(mark(&index, "10.0.1.1", 2), GONE, "not ready yet: the old flows have nothing there");
        slice_of(&mut index, &[endpoint("10.0.1.1", "c", "r s")], 3);
        assert_eq!(mark(&index, "10.0.1.1", 3), READY);
        slice_of(&mut index, &[endpoint("10.0.1.1", "c", "")], 4);
        assert_eq!(mark(&index, "10.0.1.1", 4), not_ready(30_004), "and the old one is forgotten");
    }
}

#[test]
fn an_address_reused_in_one_coalesced_event_is_the_new_pods() {
    let mut index = running("drain");
    slice_of(&mut index, &[endpoint("10.0.1.1", "a", "s t")], 1);
    assert_eq!(mark(&index, "10.0.1.1", 1), draining(30_001));
    slice_of(&mut index, &[endpoint("10.0.1.1", "a2", "r s")], 2);
    assert_eq!(mark(&index, "10.0.1.1", 2), READY);
    let desired = plan_at(&index, 2);
    assert_eq!(desired.marks[&ip("10.0.1.1")].since, at(2));
    index.pod_is_gone("a", at(3));
    assert_eq!(mark(&index, "10.0.1.1", 3), READY, "the old pod's end says nothing about the new one");
}

#[test]
fn a_gone_mark_stays_as_long_as_cilium_has_the_address() {
    let mut index = running("reset");
    index.pod_is_gone("a", at(1));
    slice_of(&mut index, &[endpoint("10.0.1.2", "b", "r s")], 1);
    index.cilium_has(&["10.0.1.1", "10.0.1.2"], true, at(100));
    assert_eq!(mark(&index, "10.0.1.1", 100), GONE);
    index.cilium_has(&["10.0.1.2"], true, at(200));
    assert_eq!(mark(&index, "10.0.1.1", 200), None);
}

#[test]
fn what_cilium_alone_has_is_gone_once_the_watches_had_time_to_tell() {
    let mut index = running("reset");
    let view = ["10.0.1.1", "10.0.1.2", "10.0.1.66"];
    index.cilium_has(&view, false, at(0));
    index.cilium_has(&view, false, at(60_000));
    assert_eq!(mark(&index, "10.0.1.66", 60_000), None, "an incomplete watch proves nothing");
    index.cilium_has(&view, true, at(60_000));
    assert_eq!(mark(&index, "10.0.1.66", 60_000), None, "Cilium may have heard of a new pod before us");
    index.cilium_has(&view, true, at(65_000));
    assert_eq!(mark(&index, "10.0.1.66", 65_000), GONE);
    slice_of(&mut index, &[endpoint("10.0.1.66", "z", "r s")], 66_000);
    assert_eq!(mark(&index, "10.0.1.66", 66_000), READY);
}

#[test]
fn a_restarted_agent_goes_on_counting() {
    let recovered = |state, millis| Recovered { state, since: at(millis) };
    let mut index = Index::recover(BTreeMap::from([
        (ip("10.0.1.1"), recovered(MarkState::Leaving, 1_000)),
        (ip("10.0.1.2"), recovered(MarkState::NotReady, 2_000)),
        (ip("10.0.1.3"), recovered(MarkState::Ready, 500)),
    ]));
    index.egress_is(&api_egress(EGRESS, &[("coil-guard.io/mode", "drain")]), at(9_000));
    index.service_is(&api_service(EGRESS, &[CLUSTER_IP]), at(9_000));
    index.client_is(&api_client("client", "10.0.0.1", EGRESS, &json!({})), at(9_000));
    // The slice is listed before the pod that is leaving.
    slice_of(&mut index, &[endpoint("10.0.1.1", "a", "r s"), endpoint("10.0.1.2", "b", "")], 9_000);
    index.pod_is(&api_egress_pod("a", &["10.0.1.1"], &deleted(30)), at(9_100));
    assert_eq!(mark(&index, "10.0.1.1", 9_100), draining(31_000));
    assert_eq!(mark(&index, "10.0.1.2", 9_100), not_ready(32_000));
    // Left while no agent was looking: no need to wait for it.
    index.cilium_has(&["10.0.1.1", "10.0.1.2", "10.0.1.3"], true, at(9_200));
    assert_eq!(mark(&index, "10.0.1.3", 9_200), GONE);
}

#[test]
fn the_last_endpoint_may_go_and_come_back() {
    let mut index = running("reset");
    index.pod_is_gone("a", at(1));
    index.pod_is_gone("b", at(1));
    slice_of(&mut index, &[], 1);
    let states: Vec<_> = index.backends(&named(EGRESS)).map(|(_, backend)| backend.state).collect();
    assert_eq!(states, [BackendState::Gone, BackendState::Gone]);
    slice_of(&mut index, &[endpoint("10.0.1.3", "c", "r s")], 2);
    assert_eq!(mark(&index, "10.0.1.3", 2), READY);
}
