//! API objects for tests, as the API server would send them.

use std::net::IpAddr;

use serde_json::{Value, json};

use super::*;
use crate::plan::{CiliumView, ServiceAddress};

/// Namespace of everything Egress.
pub(crate) const NAMESPACE: &str = "net";
/// The Egress of most tests.
pub(crate) const EGRESS: &str = "nat";
/// Its ClusterIP.
pub(crate) const CLUSTER_IP: &str = "10.96.0.10";
/// The FoU port of every test.
pub(crate) const FOU_PORT: u16 = 5555;

/// A time, in milliseconds.
pub(crate) fn at(millis: u64) -> Monotonic {
    Monotonic(millis * 1_000_000)
}

/// An address.
pub(crate) fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

/// A name in [`NAMESPACE`].
pub(crate) fn named(name: &str) -> ObjectName {
    ObjectName { namespace: NAMESPACE.into(), name: name.into() }
}

/// An Egress with annotations.
pub(crate) fn api_egress(name: &str, annotations: &[(&str, &str)]) -> ApiEgress {
    let annotations: Value =
        annotations.iter().map(|(key, value)| ((*key).to_owned(), json!(value))).collect();
    serde_json::from_value(json!({
        "apiVersion": "coil.cybozu.com/v2", "kind": "Egress",
        "metadata": {"namespace": NAMESPACE, "name": name, "uid": format!("egress-{name}"), "annotations": annotations},
        "spec": {"destinations": ["0.0.0.0/0"], "replicas": 2},
    }))
    .unwrap()
}

/// A Service with the FoU port.
pub(crate) fn api_service(name: &str, cluster_ips: &[&str]) -> ApiService {
    serde_json::from_value(json!({
        "metadata": {"namespace": NAMESPACE, "name": name},
        "spec": {
            "clusterIP": cluster_ips.first(), "clusterIPs": cluster_ips,
            "ports": [{"port": FOU_PORT, "protocol": "UDP", "targetPort": FOU_PORT}],
        },
    }))
    .unwrap()
}

/// An endpoint: address, UID of its pod, and the conditions ready, serving, terminating.
pub(crate) fn endpoint(address: &str, uid: &str, conditions: &str) -> Value {
    let set = |condition: &str| conditions.split(' ').any(|set| set == condition);
    json!({
        "addresses": [address],
        "conditions": {"ready": set("r"), "serving": set("s"), "terminating": set("t")},
        "targetRef": {"kind": "Pod", "name": format!("pod-{uid}"), "namespace": NAMESPACE, "uid": uid},
    })
}

/// A slice of a Service. No endpoints are sent as `null`, and then without ports, as the API server does it.
pub(crate) fn api_slice(name: &str, service: &str, endpoints: &[Value]) -> ApiSlice {
    let ports =
        if endpoints.is_empty() { Value::Null } else { json!([{"port": FOU_PORT, "protocol": "UDP"}]) };
    let endpoints = if endpoints.is_empty() { Value::Null } else { json!(endpoints) };
    serde_json::from_value(json!({
        "metadata": {
            "namespace": NAMESPACE, "name": name,
            "labels": {"kubernetes.io/service-name": service, "app.kubernetes.io/name": "coil"},
        },
        "addressType": "IPv4", "endpoints": endpoints, "ports": ports,
    }))
    .unwrap()
}

/// An egress pod, Running and Ready, changed by `patch`.
pub(crate) fn api_egress_pod(uid: &str, addresses: &[&str], patch: &Value) -> ApiPod {
    let ips: Vec<Value> = addresses.iter().map(|address| json!({"ip": address})).collect();
    let mut pod = json!({
        "metadata": {
            "namespace": NAMESPACE, "name": format!("pod-{uid}"), "uid": uid,
            "labels": {"app.kubernetes.io/name": "coil", "app.kubernetes.io/instance": EGRESS},
        },
        "spec": {"containers": [{"name": "egress"}], "nodeName": "node", "terminationGracePeriodSeconds": 30},
        "status": {
            "phase": "Running", "podIP": addresses.first(), "podIPs": ips,
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    });
    merge(&mut pod, patch);
    serde_json::from_value(pod).unwrap()
}

/// What a DELETE with a grace period makes of a pod.
pub(crate) fn deleted(grace: i64) -> Value {
    json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:30Z", "deletionGracePeriodSeconds": grace}})
}

/// A client pod with Coil's annotation.
pub(crate) fn api_client(name: &str, address: &str, egresses: &str, patch: &Value) -> ApiPod {
    let mut pod = json!({
        "metadata": {
            "namespace": "app", "name": name, "uid": format!("uid-{name}"),
            "creationTimestamp": "2026-01-01T00:00:00Z",
            "annotations": {format!("egress.coil.cybozu.com/{NAMESPACE}"): egresses},
        },
        "spec": {"containers": [], "nodeName": "node"},
        "status": {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}]},
    });
    merge(&mut pod, patch);
    serde_json::from_value(pod).unwrap()
}

/// A JSON merge patch.
fn merge(target: &mut Value, patch: &Value) {
    match (target, patch) {
        (Value::Object(target), Value::Object(patch)) => {
            for (key, value) in patch {
                if value.is_null() {
                    target.remove(key);
                } else {
                    merge(target.entry(key.clone()).or_insert(Value::Null), value);
                }
            }
        }
        (target, patch) => *target = patch.clone(),
    }
}

/// An index that takes API objects.
impl Index {
    pub(crate) fn egress_is(&mut self, object: &ApiEgress, now: Monotonic) {
        let (name, egress) = egress(object).unwrap();
        self.update(Update::Egress(Change::Apply(name, egress)), now);
    }

    pub(crate) fn service_is(&mut self, object: &ApiService, now: Monotonic) {
        let (name, service) = service(object, FOU_PORT).unwrap();
        self.update(Update::Service(Change::Apply(name, service)), now);
    }

    pub(crate) fn slice_is(&mut self, object: &ApiSlice, now: Monotonic) {
        let (name, slice) = slice(object, FOU_PORT).unwrap();
        self.update(Update::Slice(Change::Apply(name, slice)), now);
    }

    pub(crate) fn pod_is(&mut self, object: &ApiPod, now: Monotonic) {
        let (name, pod) = egress_pod(object).unwrap();
        self.update(Update::EgressPod(Change::Apply(name, pod)), now);
    }

    pub(crate) fn pod_is_gone(&mut self, uid: &str, now: Monotonic) {
        self.update(Update::EgressPod(Change::Delete(named(&format!("pod-{uid}")))), now);
    }

    /// Cilium has these backends in the Service's slots, and no others anywhere.
    pub(crate) fn cilium_has(&mut self, addresses: &[&str], complete: bool, now: Monotonic) {
        let service = ServiceAddress { address: ip(CLUSTER_IP), port: FOU_PORT };
        let slots: BTreeSet<IpAddr> = addresses.iter().map(|text| ip(text)).collect();
        let forgotten = self.lingering().difference(&slots).copied().collect();
        let view = CiliumView { slots: BTreeMap::from([(service, slots)]), forgotten };
        self.observe_cilium(&view, complete, now);
    }

    pub(crate) fn client_is(&mut self, object: &ApiPod, now: Monotonic) {
        let (name, pod) = local_pod(object).unwrap();
        let change = match pod {
            Some(pod) => Change::Apply(name, pod),
            None => Change::Delete(name),
        };
        self.update(Update::LocalPod(change), now);
    }
}

/// An index with one guarded Egress, its Service, two ready pods `a` (10.0.1.1) and `b` (10.0.1.2) and a client pod.
pub(crate) fn running(mode: &str) -> Index {
    let mut index = Index::default();
    index.egress_is(&api_egress(EGRESS, &[("coil-guard.io/mode", mode)]), at(0));
    index.service_is(&api_service(EGRESS, &[CLUSTER_IP]), at(0));
    index.slice_is(
        &api_slice("s", EGRESS, &[endpoint("10.0.1.1", "a", "r s"), endpoint("10.0.1.2", "b", "r s")]),
        at(0),
    );
    index.pod_is(&api_egress_pod("a", &["10.0.1.1"], &json!({})), at(0));
    index.pod_is(&api_egress_pod("b", &["10.0.1.2"], &json!({})), at(0));
    index.client_is(&api_client("client", "10.0.0.1", EGRESS, &json!({})), at(0));
    index
}
