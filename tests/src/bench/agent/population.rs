//! A large cluster: objects of the size that a real API server sends.

use std::net::{IpAddr, Ipv4Addr};

use anyhow::Result;
use serde_json::{Value, json};

use crate::{
    kube_api::{
        Kind, KubeApi,
        cluster::{Cluster, EgressSpec, SliceLag, labels},
    },
    lab::Lab,
    scenario::NODE,
};

/// Namespace of the Egresses and their pods.
pub(super) const NAMESPACE: &str = "internet";
/// The EndpointSlice controller puts no more into one slice.
const SLICE: usize = 100;

/// How large it is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Size {
    /// Egresses, each with its Service.
    pub(super) egresses: usize,
    /// Egress pods of all of them, on other nodes.
    pub(super) endpoints: usize,
}

impl Size {
    /// Egress pods of each Egress.
    pub(super) fn backends(self) -> usize {
        self.endpoints / self.egresses
    }

    /// The numbers of an Egress's pods.
    pub(super) fn pods_of(self, egress: usize) -> std::ops::Range<usize> {
        egress * self.backends()..(egress + 1) * self.backends()
    }
}

/// Name of an Egress.
pub(super) fn egress_name(egress: usize) -> String {
    format!("nat-{egress}")
}

/// Address of an egress pod.
pub(super) fn pod_address(pod: usize) -> IpAddr {
    let [_, _, high, low] = (pod as u32 + 1).to_be_bytes();
    Ipv4Addr::new(10, 128, high, low).into()
}

fn service_address(egress: usize) -> IpAddr {
    let [_, _, high, low] = (egress as u32 + 1).to_be_bytes();
    Ipv4Addr::new(10, 97, high, low).into()
}

fn uid(pod: usize) -> String {
    format!("5f0c1c6e-8d2b-4f53-9c1a-{pod:012x}")
}

/// Makes Egresses, Services, slices and egress pods at the API server, and the services in Cilium's maps.
pub(super) fn populate(lab: &mut Lab, api: &KubeApi, size: Size) -> Result<()> {
    let cluster = Cluster::new(api);
    // Slices are written here, in the sizes of the real controller.
    cluster.set_slice_lag(SliceLag::Stopped);
    for egress in 0..size.egresses {
        let address = service_address(egress);
        let mut spec = EgressSpec::new(NAMESPACE, &egress_name(egress), &[address]).mode("reset");
        spec.template = Some(json!({"spec": {"terminationGracePeriodSeconds": 60, "containers": [
            {"name": "egress", "lifecycle": {"preStop": {"exec": {"command": ["sleep", "50"]}}}}]}}));
        cluster.egress(&spec)?;
        let service = lab.control.add_service(address, spec.port, None);
        for pod in size.pods_of(egress) {
            create_pod(api, egress, pod)?;
            lab.control.add_backend(service, pod_address(pod), spec.port);
        }
        let pods: Vec<usize> = size.pods_of(egress).collect();
        for (number, pods) in pods.chunks(SLICE).enumerate() {
            let endpoints: Vec<Value> = pods.iter().map(|pod| endpoint(*pod, EndpointState::Ready)).collect();
            api.create(&slice(egress, number, &endpoints))?;
        }
    }
    lab.control.sync(&lab.maps)
}

/// Makes the lab's client pods clients of the Egresses, in turn.
pub(super) fn announce_clients(lab: &Lab, api: &KubeApi, size: Size) -> Result<()> {
    for (index, client) in lab.topology.clients.iter().enumerate() {
        let mut pod = pod(&format!("client-{index}"), NODE, &client.addresses, &json!({"app": "client"}));
        let egress = egress_name(index % size.egresses);
        pod["metadata"]["annotations"] = json!({format!("egress.coil.cybozu.com/{NAMESPACE}"): egress});
        pod["metadata"]["namespace"] = json!("default");
        api.create(&pod)?;
    }
    Ok(())
}

/// Makes an egress pod, Running and Ready.
pub(super) fn create_pod(api: &KubeApi, egress: usize, number: usize) -> Result<()> {
    let node = format!("node-{}", 2 + number % 200);
    let labels = labels(&egress_name(egress));
    let mut pod = pod(&pod_name(number), &node, &[pod_address(number)], &labels);
    pod["metadata"]["uid"] = json!(uid(number));
    api.create(&pod)?;
    Ok(())
}

/// Name of an egress pod.
pub(super) fn pod_name(pod: usize) -> String {
    format!("nat-6c9f7d5b8d-{pod:05}")
}

/// What an endpoint says of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EndpointState {
    Ready,
    Terminating,
}

/// An endpoint of a slice.
pub(super) fn endpoint(pod: usize, state: EndpointState) -> Value {
    let terminating = state == EndpointState::Terminating;
    json!({
        "addresses": [pod_address(pod)],
        "conditions": {"ready": !terminating, "serving": true, "terminating": terminating},
        "nodeName": format!("node-{}", 2 + pod % 200),
        "targetRef": {"kind": "Pod", "namespace": NAMESPACE, "name": pod_name(pod), "uid": uid(pod)},
        "zone": "zone-1",
    })
}

/// Replaces the endpoints of a slice.
pub(super) fn set_endpoints(api: &KubeApi, egress: usize, number: usize, endpoints: &[Value]) -> Result<()> {
    let patch = json!({"endpoints": endpoints});
    api.patch(Kind::EndpointSlice, NAMESPACE, &slice_name(egress, number), &patch)?;
    Ok(())
}

fn slice_name(egress: usize, number: usize) -> String {
    format!("{}-{number:05x}", egress_name(egress))
}

fn slice(egress: usize, number: usize, endpoints: &[Value]) -> Value {
    let mut labels = labels(&egress_name(egress));
    labels["kubernetes.io/service-name"] = json!(egress_name(egress));
    labels["endpointslice.kubernetes.io/managed-by"] = json!("endpointslice-controller.k8s.io");
    json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
        "metadata": {"namespace": NAMESPACE, "name": slice_name(egress, number), "labels": labels},
        "addressType": "IPv4", "endpoints": endpoints,
        "ports": [{"name": "", "port": 5555, "protocol": "UDP"}],
    })
}

/// A running pod with what kubelet, the controllers and admission put into one.
fn pod(name: &str, node: &str, addresses: &[IpAddr], labels: &Value) -> Value {
    let condition = |kind: &str| {
        json!({"type": kind, "status": "True", "lastProbeTime": null,
            "lastTransitionTime": "2026-01-01T00:00:00Z"})
    };
    let conditions = ["PodReadyToStartContainers", "Initialized", "Ready", "ContainersReady", "PodScheduled"]
        .map(condition);
    let field = |path: &str| json!({"fieldRef": {"apiVersion": "v1", "fieldPath": path}});
    let managed = |manager: &str, fields: &[&str]| {
        let fields: serde_json::Map<String, Value> =
            fields.iter().map(|field| (format!("f:{field}"), json!({".": {}, "f:value": {}}))).collect();
        json!({"manager": manager, "operation": "Update", "apiVersion": "v1", "fieldsType": "FieldsV1",
            "time": "2026-01-01T00:00:00Z", "fieldsV1": {"f:metadata": fields.clone(), "f:spec": fields}})
    };
    let specified = [
        "affinity",
        "containers",
        "dnsPolicy",
        "enableServiceLinks",
        "restartPolicy",
        "schedulerName",
        "securityContext",
        "serviceAccount",
        "terminationGracePeriodSeconds",
        "volumes",
    ];
    let reported =
        ["conditions", "containerStatuses", "hostIP", "hostIPs", "phase", "podIP", "podIPs", "startTime"];
    let tolerate = |key: &str| json!({"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300});
    let mount = json!([{"name": "kube-api-access", "readOnly": true,
        "mountPath": "/var/run/secrets/kubernetes.io/serviceaccount"}]);
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {
            "namespace": NAMESPACE, "name": name, "labels": labels,
            "ownerReferences": [{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "nat-6c9f7d5b8d",
                "uid": uid(0xffff), "controller": true, "blockOwnerDeletion": true}],
            "managedFields": [managed("kube-controller-manager", &specified), managed("kubelet", &reported)],
        },
        "spec": {
            "nodeName": node, "restartPolicy": "Always", "dnsPolicy": "ClusterFirst",
            "schedulerName": "default-scheduler", "serviceAccountName": "coil-egress", "priority": 0,
            "enableServiceLinks": true, "terminationGracePeriodSeconds": 60, "preemptionPolicy": "PreemptLowerPriority",
            "tolerations": [tolerate("node.kubernetes.io/not-ready"), tolerate("node.kubernetes.io/unreachable")],
            "containers": [{
                "name": "egress", "image": "coil:2.10.0", "command": ["coil-egress"],
                "imagePullPolicy": "IfNotPresent", "volumeMounts": mount,
                "env": [
                    {"name": "COIL_POD_NAMESPACE", "valueFrom": field("metadata.namespace")},
                    {"name": "COIL_POD_NAME", "valueFrom": field("metadata.name")},
                    {"name": "COIL_EGRESS_NAME", "value": "nat"},
                ],
                "ports": [{"name": "metrics", "containerPort": 8080, "protocol": "TCP"},
                    {"name": "health", "containerPort": 8081, "protocol": "TCP"}],
                "resources": {"requests": {"cpu": "100m", "memory": "200Mi"}},
                "livenessProbe": {"httpGet": {"path": "/healthz", "port": "health", "scheme": "HTTP"},
                    "timeoutSeconds": 1, "periodSeconds": 10, "successThreshold": 1, "failureThreshold": 3},
                "readinessProbe": {"httpGet": {"path": "/readyz", "port": "health", "scheme": "HTTP"},
                    "timeoutSeconds": 1, "periodSeconds": 10, "successThreshold": 1, "failureThreshold": 3},
                "securityContext": {"privileged": true, "readOnlyRootFilesystem": true},
                "terminationMessagePath": "/dev/termination-log", "terminationMessagePolicy": "File",
            }],
            "volumes": [{"name": "kube-api-access", "projected": {"defaultMode": 420, "sources": [
                {"serviceAccountToken": {"expirationSeconds": 3607, "path": "token"}},
                {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
            ]}}],
        },
        "status": {
            "phase": "Running", "qosClass": "Burstable", "hostIP": "192.0.2.10",
            "hostIPs": [{"ip": "192.0.2.10"}], "startTime": "2026-01-01T00:00:00Z",
            "podIP": addresses.first(),
            "podIPs": addresses.iter().map(|ip| json!({"ip": ip})).collect::<Vec<_>>(),
            "conditions": conditions,
            "containerStatuses": [{
                "name": "egress", "image": "coil:2.10.0", "ready": true, "restartCount": 0,
                "started": true, "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}},
                "imageID": "coil@sha256:0000000000000000000000000000000000000000000000000000000000000000",
                "containerID": "containerd://0000000000000000000000000000000000000000000000000000000000000000",
            }],
        },
    })
}
