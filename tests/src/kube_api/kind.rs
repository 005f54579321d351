//! The kinds of object that the server knows.

use k8s_openapi::{
    api::{
        apps::v1::{DaemonSet, Deployment},
        authorization::v1::SelfSubjectAccessReview,
        core::v1::{Namespace, Node, Pod, Service, ServiceAccount},
        discovery::v1::EndpointSlice,
        events::v1::Event,
        rbac::v1::{ClusterRole, ClusterRoleBinding},
    },
    apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition,
};
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::custom::{Egress, PodMonitor, PrometheusRule};

/// A kind of object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// `pods`
    Pod,
    /// `services`
    Service,
    /// `endpointslices.discovery.k8s.io`
    EndpointSlice,
    /// `egresses.coil.cybozu.com`
    Egress,
    /// `events.events.k8s.io`
    Event,
    /// `nodes`
    Node,
    /// `namespaces`
    Namespace,
    /// `serviceaccounts`
    ServiceAccount,
    /// `daemonsets.apps`
    DaemonSet,
    /// `deployments.apps`
    Deployment,
    /// `clusterroles.rbac.authorization.k8s.io`
    ClusterRole,
    /// `clusterrolebindings.rbac.authorization.k8s.io`
    ClusterRoleBinding,
    /// `customresourcedefinitions.apiextensions.k8s.io`
    CustomResourceDefinition,
    /// `podmonitors.monitoring.coreos.com`
    PodMonitor,
    /// `prometheusrules.monitoring.coreos.com`
    PrometheusRule,
    /// `selfsubjectaccessreviews.authorization.k8s.io`: answered, never stored
    SelfSubjectAccessReview,
}

/// What a kind looks like in the API.
#[derive(Clone, Copy, Debug)]
pub struct KindInfo {
    /// API group, empty for the core group.
    pub group: &'static str,
    /// Version.
    pub version: &'static str,
    /// The name in paths.
    pub plural: &'static str,
    /// The name in objects.
    pub kind: &'static str,
    /// Whether objects live in a namespace.
    pub namespaced: bool,
    /// Whether it has a status subresource.
    pub status: bool,
    decode: fn(&Value) -> Result<(), String>,
}

impl KindInfo {
    /// `group/version`, or the version alone for the core group.
    #[must_use]
    pub fn api_version(&self) -> String {
        if self.group.is_empty() { self.version.into() } else { format!("{}/{}", self.group, self.version) }
    }

    /// `plural.group`, as error messages name it.
    #[must_use]
    pub fn qualified(&self) -> String {
        if self.group.is_empty() { self.plural.into() } else { format!("{}.{}", self.plural, self.group) }
    }
}

impl Kind {
    /// Every kind.
    pub const ALL: [Self; 16] = [
        Self::Pod,
        Self::Service,
        Self::EndpointSlice,
        Self::Egress,
        Self::Event,
        Self::Node,
        Self::Namespace,
        Self::ServiceAccount,
        Self::DaemonSet,
        Self::Deployment,
        Self::ClusterRole,
        Self::ClusterRoleBinding,
        Self::CustomResourceDefinition,
        Self::PodMonitor,
        Self::PrometheusRule,
        Self::SelfSubjectAccessReview,
    ];

    /// Names, scope and type.
    #[must_use]
    pub fn info(self) -> KindInfo {
        let info = |group, version, plural, kind, namespaced, status, decode| KindInfo {
            group,
            version,
            plural,
            kind,
            namespaced,
            status,
            decode,
        };
        let rbac = "rbac.authorization.k8s.io";
        let monitoring = "monitoring.coreos.com";
        match self {
            Self::Pod => info("", "v1", "pods", "Pod", true, true, strict::<Pod>),
            Self::Service => info("", "v1", "services", "Service", true, true, strict::<Service>),
            Self::EndpointSlice => info(
                "discovery.k8s.io",
                "v1",
                "endpointslices",
                "EndpointSlice",
                true,
                false,
                strict::<EndpointSlice>,
            ),
            Self::Egress => info("coil.cybozu.com", "v2", "egresses", "Egress", true, true, strict::<Egress>),
            Self::Event => info("events.k8s.io", "v1", "events", "Event", true, false, strict::<Event>),
            Self::Node => info("", "v1", "nodes", "Node", false, true, strict::<Node>),
            Self::Namespace => info("", "v1", "namespaces", "Namespace", false, true, strict::<Namespace>),
            Self::ServiceAccount => {
                info("", "v1", "serviceaccounts", "ServiceAccount", true, false, strict::<ServiceAccount>)
            }
            Self::DaemonSet => info("apps", "v1", "daemonsets", "DaemonSet", true, true, strict::<DaemonSet>),
            Self::Deployment => {
                info("apps", "v1", "deployments", "Deployment", true, true, strict::<Deployment>)
            }
            Self::ClusterRole => {
                info(rbac, "v1", "clusterroles", "ClusterRole", false, false, strict::<ClusterRole>)
            }
            Self::ClusterRoleBinding => info(
                rbac,
                "v1",
                "clusterrolebindings",
                "ClusterRoleBinding",
                false,
                false,
                strict::<ClusterRoleBinding>,
            ),
            Self::CustomResourceDefinition => info(
                "apiextensions.k8s.io",
                "v1",
                "customresourcedefinitions",
                "CustomResourceDefinition",
                false,
                true,
                strict::<CustomResourceDefinition>,
            ),
            Self::PodMonitor => {
                info(monitoring, "v1", "podmonitors", "PodMonitor", true, false, strict::<PodMonitor>)
            }
            Self::PrometheusRule => info(
                monitoring,
                "v1",
                "prometheusrules",
                "PrometheusRule",
                true,
                false,
                strict::<PrometheusRule>,
            ),
            Self::SelfSubjectAccessReview => info(
                "authorization.k8s.io",
                "v1",
                "selfsubjectaccessreviews",
                "SelfSubjectAccessReview",
                false,
                false,
                strict::<SelfSubjectAccessReview>,
            ),
        }
    }

    /// The kind of an object, by its `apiVersion` and `kind`.
    #[must_use]
    pub fn of(object: &Value) -> Option<Self> {
        let (version, kind) = (object["apiVersion"].as_str()?, object["kind"].as_str()?);
        Self::ALL.into_iter().find(|k| k.info().kind == kind && k.info().api_version() == version)
    }

    /// The kind that a path names.
    #[must_use]
    pub fn by_path(group: &str, version: &str, plural: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| {
            let info = kind.info();
            (info.group, info.version, info.plural) == (group, version, plural)
        })
    }

    /// Decodes an object as this kind.
    ///
    /// # Errors
    ///
    /// What does not fit the type, and every field that the type does not have.
    pub fn check(self, object: &Value) -> Result<(), String> {
        (self.info().decode)(object)
    }
}

fn strict<T: DeserializeOwned>(object: &Value) -> Result<(), String> {
    let mut unknown = Vec::new();
    let decoded: Result<T, _> = serde_ignored::deserialize(object, |path| unknown.push(path.to_string()));
    decoded.map_err(|error| error.to_string())?;
    // serde_ignored writes the step into an Option as "?".
    let unknown: Vec<_> = unknown.iter().map(|path| path.replace(".?", "").replace("?.", "")).collect();
    if unknown.is_empty() {
        return Ok(());
    }
    Err(format!("strict decoding error: unknown field {}", unknown.join(", ")))
}
