//! Types of custom resources, for strict decoding. They hold the fields that Coil's v2 CRD and the Prometheus Operator's
//! CRDs have, as far as manifests of this project may use them.

use std::collections::BTreeMap;

use k8s_openapi::{
    api::{
        apps::v1::DeploymentStrategy,
        core::v1::{PodSpec, SessionAffinityConfig},
    },
    apimachinery::pkg::{
        apis::meta::v1::{LabelSelector, ObjectMeta},
        util::intstr::IntOrString,
    },
};
use serde::Deserialize;
use serde_json::Value;

macro_rules! fields {
    ($(#[$doc:meta])* $name:ident { $($(#[$attribute:meta])* $field:ident: $type:ty),* $(,)? }) => {
        $(#[$doc])*
        #[derive(Debug, Deserialize)]
        #[serde(rename_all = "camelCase")]
        #[expect(dead_code, reason = "decoded only to see whether it can be")]
        pub(crate) struct $name {
            $($(#[$attribute])* $field: $type,)*
        }
    };
}

fields!(
    /// `egresses.coil.cybozu.com/v2`.
    Egress { api_version: String, kind: String, metadata: ObjectMeta, spec: EgressSpec, status: Option<EgressStatus> }
);
fields!(EgressSpec {
    destinations: Vec<String>,
    replicas: Option<i32>,
    strategy: Option<DeploymentStrategy>,
    template: Option<EgressPodTemplate>,
    session_affinity: Option<SessionAffinity>,
    session_affinity_config: Option<SessionAffinityConfig>,
    fou_source_port_auto: Option<bool>,
    #[serde(rename = "enableNFT")]
    enable_nft: Option<bool>,
    pod_disruption_budget: Option<EgressPdb>,
});
fields!(EgressStatus { replicas: Option<i32>, selector: Option<String> });
fields!(EgressPodTemplate { metadata: Option<TemplateMetadata>, spec: Option<PodSpec> });
fields!(TemplateMetadata {
    annotations: Option<BTreeMap<String, String>>,
    labels: Option<BTreeMap<String, String>>,
});
fields!(EgressPdb { min_available: Option<IntOrString>, max_unavailable: Option<IntOrString> });

#[derive(Debug, Deserialize)]
pub(crate) enum SessionAffinity {
    #[serde(rename = "ClientIP")]
    ClientIp,
    None,
}

fields!(
    /// `podmonitors.monitoring.coreos.com/v1`.
    PodMonitor { api_version: String, kind: String, metadata: ObjectMeta, spec: PodMonitorSpec }
);
fields!(PodMonitorSpec {
    job_label: Option<String>,
    pod_target_labels: Option<Vec<String>>,
    selector: LabelSelector,
    namespace_selector: Option<NamespaceSelector>,
    pod_metrics_endpoints: Vec<PodMetricsEndpoint>,
});
fields!(NamespaceSelector { any: Option<bool>, match_names: Option<Vec<String>> });
fields!(PodMetricsEndpoint {
    port: Option<String>,
    port_number: Option<i32>,
    path: Option<String>,
    scheme: Option<String>,
    interval: Option<String>,
    scrape_timeout: Option<String>,
    honor_labels: Option<bool>,
    relabelings: Option<Vec<Relabeling>>,
    metric_relabelings: Option<Vec<Relabeling>>,
});
fields!(Relabeling {
    source_labels: Option<Vec<String>>,
    separator: Option<String>,
    target_label: Option<String>,
    regex: Option<String>,
    modulus: Option<u64>,
    replacement: Option<String>,
    action: Option<String>,
});

fields!(
    /// `prometheusrules.monitoring.coreos.com/v1`.
    PrometheusRule { api_version: String, kind: String, metadata: ObjectMeta, spec: PrometheusRuleSpec }
);
fields!(PrometheusRuleSpec { groups: Vec<RuleGroup> });
fields!(RuleGroup { name: String, interval: Option<String>, labels: Option<BTreeMap<String, String>>, rules: Vec<Rule> });
fields!(Rule {
    alert: Option<String>,
    record: Option<String>,
    expr: Value,
    #[serde(rename = "for")]
    pending: Option<String>,
    keep_firing_for: Option<String>,
    labels: Option<BTreeMap<String, String>>,
    annotations: Option<BTreeMap<String, String>>,
});
