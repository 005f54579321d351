//! Whatever happens, in whatever order: backends that are worked out by what changed are those that come out when all are.

use std::time::Duration;

use proptest::prelude::*;
use serde_json::{Value, json};

use super::{refresh::Group, testing::*, *};
use crate::plan::CiliumView;

/// Few of everything, so that they meet.
const PODS: u8 = 5;
const ADDRESSES: u8 = 4;
const SLICES: u8 = 3;

#[derive(Clone, Debug)]
enum Step {
    Pod {
        pod: u8,
        address: u8,
        second: Option<u8>,
        labelled: bool,
        deleting: bool,
        finished: bool,
        ready: bool,
    },
    PodGone(u8),
    Slice {
        slice: u8,
        endpoints: Vec<(u8, Option<u8>, u8)>,
    },
    SliceGone(u8),
    Wait(u16),
    /// Cilium has forgotten what is in no slice any more.
    Forget,
    /// Cilium has an address.
    Has(u8),
}

fn step() -> impl Strategy<Value = Step> {
    let endpoint = (0..ADDRESSES, prop::option::weighted(0.9, 0..PODS), 0u8..8);
    prop_oneof![
        4 => (0..PODS, 0..ADDRESSES, prop::option::weighted(0.2, 0..ADDRESSES), any::<[bool; 4]>(), 0u8..8).prop_map(
            |(pod, address, second, [labelled, deleting, finished, ready], rare)| Step::Pod {
                pod, address, second, ready,
                labelled: labelled || rare > 1,
                deleting: deleting && rare < 4,
                finished: finished && rare < 3,
            }
        ),
        2 => (0..PODS).prop_map(Step::PodGone),
        6 => (0..SLICES, prop::collection::vec(endpoint, 0..4))
            .prop_map(|(slice, endpoints)| Step::Slice { slice, endpoints }),
        1 => (0..SLICES).prop_map(Step::SliceGone),
        2 => prop_oneof![Just(100u16), Just(900), Just(1100), Just(61_000)].prop_map(Step::Wait),
        1 => Just(Step::Forget),
        1 => (0..ADDRESSES).prop_map(Step::Has),
    ]
}

fn address(number: u8) -> String {
    format!("10.0.1.{}", number + 1)
}

fn endpoint_of((at, pod, conditions): (u8, Option<u8>, u8)) -> Value {
    let set: Vec<&str> = ["r", "s", "t"]
        .into_iter()
        .enumerate()
        .filter(|(bit, _)| conditions >> bit & 1 == 1)
        .map(|(_, c)| c)
        .collect();
    let mut endpoint = endpoint(&address(at), &pod.unwrap_or(0).to_string(), &set.join(" "));
    if pod.is_none() {
        endpoint["targetRef"] = Value::Null;
    }
    endpoint
}

fn take(index: &mut Index, step: &Step, now: &mut Monotonic) {
    match step {
        Step::Pod { pod, address: first, second, labelled, deleting, finished, ready } => {
            let addresses: Vec<String> = [Some(*first), *second].into_iter().flatten().map(address).collect();
            let addresses: Vec<&str> = addresses.iter().map(String::as_str).collect();
            let mut patch = if *deleting { deleted(30) } else { json!({}) };
            let status = |set: bool| if set { "True" } else { "False" };
            patch["status"] = json!({
                "phase": if *finished { "Failed" } else { "Running" },
                "conditions": [{"type": "Ready", "status": status(*ready)}],
            });
            if !labelled {
                patch["metadata"]["labels"] = Value::Null;
            }
            index.pod_is(&api_egress_pod(&pod.to_string(), &addresses, &patch), *now);
        }
        Step::PodGone(pod) => index.pod_is_gone(&pod.to_string(), *now),
        Step::Slice { slice, endpoints } => {
            let endpoints: Vec<Value> = endpoints.iter().copied().map(endpoint_of).collect();
            index.slice_is(&api_slice(&format!("s{slice}"), EGRESS, &endpoints), *now);
        }
        Step::SliceGone(slice) => {
            index.update(Update::Slice(Change::Delete(named(&format!("s{slice}")))), *now);
        }
        Step::Wait(millis) => *now = now.saturating_add(Duration::from_millis((*millis).into())),
        Step::Forget => {
            let endpoints = || index.slices.values().flat_map(|slice| &slice.endpoints);
            // Those of a leaving pod count as listed with any of them.
            let of_pods = endpoints().filter_map(|endpoint| index.egress_pod(endpoint.pod.as_ref()?));
            let of_pods = of_pods.flat_map(|(_, pod)| pod.addresses.iter().copied());
            let listed: BTreeSet<IpAddr> =
                endpoints().flat_map(|endpoint| endpoint.addresses.iter().copied()).chain(of_pods).collect();
            let forgotten = index.lingering().difference(&listed).copied().collect();
            index.observe_cilium(&CiliumView { forgotten, ..CiliumView::default() }, true, *now);
        }
        Step::Has(at) => {
            let address = address(*at);
            let view = [address.as_str()];
            let service = crate::plan::ServiceAddress { address: ip(CLUSTER_IP), port: FOU_PORT };
            let slots = BTreeMap::from([(service, view.iter().map(|text| ip(text)).collect())]);
            index.observe_cilium(&CiliumView { slots, ..CiliumView::default() }, true, *now);
        }
    }
}

/// All backends worked out anew.
fn anew(index: &Index, now: Monotonic) -> BTreeMap<ObjectName, Backends> {
    let mut whole = index.clone();
    let egresses: BTreeSet<_> = index.backends.keys().chain(index.slices_of.keys()).cloned().collect();
    for egress in egresses {
        whole.refresh(egress, Group::everything(), now);
    }
    whole.backends
}

fn lingering(index: &Index) -> BTreeSet<(ObjectName, BackendKey)> {
    let all = index.backends.iter().flat_map(|(egress, of)| of.iter().map(move |one| (egress, one)));
    all.filter(|(_, (_, backend))| matches!(backend.state, BackendState::Gone | BackendState::Settling))
        .map(|(egress, (key, _))| (egress.clone(), key.clone()))
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1024, ..ProptestConfig::default() })]

    #[test]
    fn what_a_change_touches_is_all_that_it_changes(steps in prop::collection::vec(step(), 1..60)) {
        let mut index = Index::default();
        index.service_is(&api_service(EGRESS, &[CLUSTER_IP]), at(0));
        let mut now = at(1_000_000);
        for step in &steps {
            let before = index.backends.clone();
            index.take_touched();
            take(&mut index, step, &mut now);
            prop_assert_eq!(&index.backends, &anew(&index, now), "after {:?}", step);
            prop_assert_eq!(&index.lingering, &lingering(&index));
            let touched = index.take_touched().backends;
            let none = Backends::new();
            let (was, is) = (before.get(&named(EGRESS)).unwrap_or(&none), index.backends.get(&named(EGRESS)).unwrap_or(&none));
            let changed: BTreeSet<IpAddr> = was.keys().chain(is.keys())
                .filter(|key| was.get(*key) != is.get(*key)).map(|key| key.address).collect();
            prop_assert_eq!(touched.get(&named(EGRESS)).cloned().unwrap_or_default(), changed);
        }
    }
}
