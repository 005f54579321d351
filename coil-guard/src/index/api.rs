//! API objects, as far as they matter here. What is in no field of these is skipped unread: of a pod as the API server sends
//! it, that is nine tenths.

use std::collections::BTreeMap;

use serde::Deserialize;

/// The usual metadata.
#[derive(Clone, Debug, Default, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(rename_all = "camelCase", default)]
pub struct Metadata {
    /// Kubernetes namespace.
    pub namespace: Option<String>,
    /// Object name.
    pub name: Option<String>,
    /// Its UID.
    pub uid: Option<String>,
    /// Version of this state.
    pub resource_version: Option<String>,
    /// The labels that matter.
    pub labels: Option<Labels>,
    /// All annotations.
    pub annotations: Option<BTreeMap<String, String>>,
    /// RFC 3339.
    pub creation_timestamp: Option<String>,
    /// There when it is being deleted.
    pub deletion_timestamp: Option<String>,
    /// How long that may take, seconds.
    pub deletion_grace_period_seconds: Option<i64>,
}

/// See [`Metadata::labels`].
#[derive(Clone, Debug, Default, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(default)]
pub struct Labels {
    /// The Service of a slice.
    #[serde(rename = "kubernetes.io/service-name")]
    pub service: Option<String>,
    /// The Egress of a pod.
    #[serde(rename = "app.kubernetes.io/instance")]
    pub instance: Option<String>,
}

/// An object with metadata.
pub trait Object {
    /// Its metadata.
    fn metadata(&self) -> &Metadata;
}

macro_rules! objects {
    ($($object:ident)+) => { $(
        impl Object for $object {
            fn metadata(&self) -> &Metadata {
                &self.metadata
            }
        }
    )+ };
}

objects! { ApiEgress ApiService ApiSlice ApiPod }

/// An Egress.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct ApiEgress {
    /// The usual.
    pub metadata: Metadata,
    /// The part of the specification that matters.
    pub spec: ApiEgressSpec,
}

/// See [`ApiEgress::spec`].
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ApiEgressSpec {
    /// Whether each inner flow has its own outer source port.
    pub fou_source_port_auto: Option<bool>,
    /// The pods' template.
    pub template: Option<ApiTemplate>,
}

/// See [`ApiEgressSpec::template`].
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct ApiTemplate {
    /// The pods' specification.
    pub spec: Option<ApiPodSpec>,
}

/// A Service.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct ApiService {
    /// The usual.
    pub metadata: Metadata,
    /// Its specification.
    pub spec: Option<ApiServiceSpec>,
}

/// See [`ApiService::spec`].
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ApiServiceSpec {
    /// The first address, or `None` in letters.
    #[serde(rename = "clusterIP")]
    pub cluster_ip: Option<String>,
    /// All addresses.
    #[serde(rename = "clusterIPs")]
    pub cluster_ips: Option<Vec<String>>,
    /// Its ports.
    pub ports: Option<Vec<ApiPort>>,
}

/// A port of a Service or a slice.
#[derive(Clone, Debug, Default, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(default)]
pub struct ApiPort {
    /// Number.
    pub port: Option<i32>,
    /// UDP, TCP, ….
    pub protocol: Option<String>,
}

/// An EndpointSlice.
#[derive(Clone, Debug, Default, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(default)]
pub struct ApiSlice {
    /// The usual.
    pub metadata: Metadata,
    /// `null` where there are none.
    pub endpoints: Option<Vec<ApiEndpoint>>,
    /// Its ports.
    pub ports: Option<Vec<ApiPort>>,
}

/// See [`ApiSlice::endpoints`].
#[derive(Clone, Debug, Default, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(rename_all = "camelCase", default)]
pub struct ApiEndpoint {
    /// Of the slice's family.
    pub addresses: Option<Vec<String>>,
    /// What it says of itself.
    pub conditions: Option<ApiConditions>,
    /// What is behind it.
    pub target_ref: Option<ApiTarget>,
}

/// See [`ApiEndpoint::conditions`].
#[derive(Clone, Debug, Default, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(default)]
pub struct ApiConditions {
    /// May get new flows.
    pub ready: Option<bool>,
    /// Passes its readiness probe.
    pub serving: Option<bool>,
    /// Is being deleted.
    pub terminating: Option<bool>,
}

/// See [`ApiEndpoint::target_ref`].
#[derive(Clone, Debug, Default, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(default)]
pub struct ApiTarget {
    /// `Pod`.
    pub kind: Option<String>,
    /// Its UID.
    pub uid: Option<String>,
}

/// A pod.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct ApiPod {
    /// The usual.
    pub metadata: Metadata,
    /// Its specification.
    pub spec: Option<ApiPodSpec>,
    /// What kubelet says of it.
    pub status: Option<ApiPodStatus>,
}

/// See [`ApiPod::spec`], and of a template.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ApiPodSpec {
    /// It is on the host's network.
    pub host_network: Option<bool>,
    /// How long it may take to end, seconds.
    pub termination_grace_period_seconds: Option<i64>,
    /// Its containers.
    pub containers: Option<Vec<ApiContainer>>,
}

/// See [`ApiPodSpec::containers`].
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct ApiContainer {
    /// Its name.
    pub name: Option<String>,
    /// Its hooks.
    pub lifecycle: Option<ApiLifecycle>,
}

/// See [`ApiContainer::lifecycle`].
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ApiLifecycle {
    /// Whatever it is.
    pub pre_stop: Option<serde::de::IgnoredAny>,
}

/// See [`ApiPod::status`].
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ApiPodStatus {
    /// `Running`, `Succeeded`, ….
    pub phase: Option<String>,
    /// The first address.
    #[serde(rename = "podIP")]
    pub pod_ip: Option<String>,
    /// All addresses.
    #[serde(rename = "podIPs")]
    pub pod_ips: Option<Vec<ApiPodIp>>,
    /// `Ready`, ….
    pub conditions: Option<Vec<ApiPodCondition>>,
}

/// See [`ApiPodStatus::pod_ips`].
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct ApiPodIp {
    /// The address.
    pub ip: Option<String>,
}

/// See [`ApiPodStatus::conditions`].
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct ApiPodCondition {
    /// Its name.
    #[serde(rename = "type")]
    pub kind: Option<String>,
    /// `True`, `False` or `Unknown`.
    pub status: Option<String>,
}
