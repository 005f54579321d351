//! The objects as Coil, kubelet and the scheduler leave them.

use std::{collections::BTreeMap, net::IpAddr};

use serde_json::{Value, json};

/// Seconds.
const DEFAULT_GRACE: i64 = 30;

/// An Egress and its Service.
#[derive(Clone, Debug)]
pub struct EgressSpec {
    /// Namespace of both.
    pub namespace: String,
    /// Name of both.
    pub name: String,
    /// One, or two of different families.
    pub cluster_ips: Vec<IpAddr>,
    /// FoU port of the Service.
    pub port: u16,
    /// `sessionAffinity: ClientIP`, which is Coil's default.
    pub affinity: bool,
    /// `fouSourcePortAuto`.
    pub sport_auto: bool,
    /// `spec.replicas`.
    pub replicas: u32,
    /// Annotations of the Egress.
    pub annotations: BTreeMap<String, String>,
    /// `spec.template`.
    pub template: Option<Value>,
}

impl EgressSpec {
    /// An Egress with Coil's defaults and no annotation.
    #[must_use]
    pub fn new(namespace: &str, name: &str, cluster_ips: &[IpAddr]) -> Self {
        Self {
            namespace: namespace.into(),
            name: name.into(),
            cluster_ips: cluster_ips.into(),
            port: 5555,
            affinity: true,
            sport_auto: false,
            replicas: 2,
            annotations: BTreeMap::new(),
            template: None,
        }
    }

    /// With `coil-guard.io/mode`.
    #[must_use]
    pub fn mode(mut self, mode: &str) -> Self {
        self.annotations.insert(super::MODE.into(), mode.into());
        self
    }

    fn affinity_name(&self) -> &'static str {
        if self.affinity { "ClientIP" } else { "None" }
    }

    pub(crate) fn egress(&self) -> Value {
        let mut spec = json!({
            "destinations": ["0.0.0.0/0", "::/0"],
            "replicas": self.replicas,
            "sessionAffinity": self.affinity_name(),
            "fouSourcePortAuto": self.sport_auto,
        });
        if let Some(template) = &self.template {
            spec["template"] = template.clone();
        }
        json!({
            "apiVersion": "coil.cybozu.com/v2", "kind": "Egress",
            "metadata": {"namespace": self.namespace, "name": self.name, "annotations": self.annotations},
            "spec": spec,
        })
    }

    pub(crate) fn service(&self) -> Value {
        json!({
            "apiVersion": "v1", "kind": "Service",
            "metadata": {"namespace": self.namespace, "name": self.name, "labels": labels(&self.name)},
            "spec": {
                "type": "ClusterIP",
                "clusterIP": self.cluster_ips.first(),
                "clusterIPs": self.cluster_ips,
                "ipFamilies": self.cluster_ips.iter().map(|ip| family(*ip)).collect::<Vec<_>>(),
                "ipFamilyPolicy": if self.cluster_ips.len() > 1 { "PreferDualStack" } else { "SingleStack" },
                "ports": [{"port": self.port, "targetPort": self.port, "protocol": "UDP"}],
                "selector": labels(&self.name),
                "sessionAffinity": self.affinity_name(),
            },
        })
    }
}

/// The labels that Coil gives to the pods and the Service of an Egress, and selects by.
#[must_use]
pub fn labels(egress: &str) -> Value {
    json!({
        "app.kubernetes.io/name": "coil",
        "app.kubernetes.io/component": "egress",
        "app.kubernetes.io/instance": egress,
    })
}

/// `IPv4` or `IPv6`.
pub(crate) fn family(address: IpAddr) -> &'static str {
    if address.is_ipv4() { "IPv4" } else { "IPv6" }
}

/// A pod to be.
#[derive(Clone, Debug)]
pub struct PodSpec {
    /// Name.
    pub name: String,
    /// `spec.nodeName`; empty for a pod that is not scheduled.
    pub node: String,
    /// Addresses once it runs: one, or two of different families.
    pub addresses: Vec<IpAddr>,
    /// `spec.terminationGracePeriodSeconds`.
    pub grace: i64,
    /// `spec.hostNetwork`.
    pub host_network: bool,
    /// Annotations.
    pub annotations: BTreeMap<String, String>,
}

impl PodSpec {
    /// A pod with Kubernetes' defaults.
    #[must_use]
    pub fn new(name: &str, node: &str, addresses: &[IpAddr]) -> Self {
        Self {
            name: name.into(),
            node: node.into(),
            addresses: addresses.into(),
            grace: DEFAULT_GRACE,
            host_network: false,
            annotations: BTreeMap::new(),
        }
    }

    /// Makes it a client of Egresses of a namespace: a name, or several with commas between them.
    #[must_use]
    pub fn client_of(mut self, namespace: &str, egresses: &str) -> Self {
        self.annotations.insert(format!("egress.coil.cybozu.com/{namespace}"), egresses.into());
        self
    }

    pub(crate) fn pod(&self, namespace: &str, labels: &Value, container: &str) -> Value {
        let mut spec = json!({
            "containers": [{"name": container, "image": container}],
            "terminationGracePeriodSeconds": self.grace,
            "hostNetwork": self.host_network,
        });
        if !self.node.is_empty() {
            spec["nodeName"] = json!(self.node);
        }
        json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {
                "namespace": namespace, "name": self.name, "labels": labels, "annotations": self.annotations,
            },
            "spec": spec,
            "status": {"phase": "Pending"},
        })
    }
}

/// The status of a running pod.
pub(crate) fn running(addresses: &[IpAddr], ready: bool) -> Value {
    json!({
        "phase": "Running",
        "podIP": addresses.first(),
        "podIPs": addresses.iter().map(|ip| json!({"ip": ip})).collect::<Vec<_>>(),
        "conditions": [ready_condition(ready)],
    })
}

pub(crate) fn ready_condition(ready: bool) -> Value {
    json!({"type": "Ready", "status": if ready { "True" } else { "False" }})
}
