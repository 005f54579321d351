//! The EndpointSlice controller.

use serde_json::{Value, json};

use super::objects::family;
use crate::kube_api::{Kind, KubeApi};

/// Brings the slices of a Service up to date with its pods; writes only what changed.
pub(crate) fn reconcile(api: &KubeApi, namespace: &str, service: &str) -> anyhow::Result<()> {
    let existing: Vec<Value> = api
        .list(Kind::EndpointSlice)
        .into_iter()
        .filter(|slice| {
            let metadata = &slice["metadata"];
            metadata["namespace"] == namespace
                && metadata["labels"]["kubernetes.io/service-name"] == service
                && metadata["labels"]["endpointslice.kubernetes.io/managed-by"] == CONTROLLER
        })
        .collect();
    let Some(service) = api.get(Kind::Service, namespace, service) else {
        for slice in existing {
            api.delete(
                Kind::EndpointSlice,
                namespace,
                slice["metadata"]["name"].as_str().unwrap_or_default(),
                None,
            )?;
        }
        return Ok(());
    };
    let pods: Vec<Value> =
        api.list(Kind::Pod).into_iter().filter(|pod| pod["metadata"]["namespace"] == namespace).collect();
    for wanted in slices_of(&service, &pods) {
        let same_name = existing.iter().find(|slice| slice["metadata"]["name"] == wanted["metadata"]["name"]);
        match same_name {
            None => drop(api.create(&wanted)?),
            Some(old) => {
                let mut new = old.clone();
                for field in ["endpoints", "ports"] {
                    new[field] = wanted[field].clone();
                }
                // Empty lists come back as null once there was something in them.
                let empty = |slice: &Value| slice["endpoints"].as_array().is_none_or(Vec::is_empty);
                if empty(&new) && !empty(old) {
                    new["endpoints"] = Value::Null;
                    new["ports"] = Value::Null;
                }
                if !(empty(&new) && empty(old)) && new != *old {
                    api.replace(&new)?;
                }
            }
        }
    }
    Ok(())
}

const CONTROLLER: &str = "endpointslice-controller.k8s.io";

/// One slice per family of the Service.
fn slices_of(service: &Value, pods: &[Value]) -> Vec<Value> {
    let metadata = &service["metadata"];
    let name = metadata["name"].as_str().unwrap_or_default();
    let families = service["spec"]["ipFamilies"].as_array().into_iter().flatten().filter_map(Value::as_str);
    let mut labels = metadata["labels"].clone();
    labels["kubernetes.io/service-name"] = json!(name);
    labels["endpointslice.kubernetes.io/managed-by"] = json!(CONTROLLER);
    families
        .map(|wanted| {
            let endpoints: Vec<Value> =
                pods.iter().filter_map(|pod| endpoint(service, pod, wanted)).collect();
            let ports: Vec<Value> =
                service["spec"]["ports"].as_array().into_iter().flatten().map(port).collect();
            let ports = if endpoints.is_empty() { Vec::new() } else { ports };
            json!({
                "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
                "metadata": {
                    "namespace": metadata["namespace"],
                    "name": format!("{name}-{}", if wanted == "IPv4" { "4xk2p" } else { "6mfqz" }),
                    "labels": labels,
                },
                "addressType": wanted,
                "endpoints": endpoints,
                "ports": ports,
            })
        })
        .collect()
}

fn port(port: &Value) -> Value {
    json!({"name": port["name"].as_str().unwrap_or_default(), "port": port["targetPort"], "protocol": port["protocol"]})
}

/// The endpoint that a pod is of a Service, if it is one.
fn endpoint(service: &Value, pod: &Value, wanted: &str) -> Option<Value> {
    let (metadata, status) = (&pod["metadata"], &pod["status"]);
    let selector = service["spec"]["selector"].as_object()?;
    if !selector.iter().all(|(key, value)| metadata["labels"][key] == *value) {
        return None;
    }
    if matches!(status["phase"].as_str(), Some("Succeeded" | "Failed")) {
        return None;
    }
    let addresses = status["podIPs"].as_array().into_iter().flatten().filter_map(|ip| ip["ip"].as_str());
    let address = addresses.filter_map(|ip| ip.parse().ok()).find(|ip| family(*ip) == wanted)?;
    let conditions = status["conditions"].as_array();
    let pod_ready = conditions.into_iter().flatten().any(|c| c["type"] == "Ready" && c["status"] == "True");
    let publish = service["spec"]["publishNotReadyAddresses"] == true;
    let terminating = metadata["deletionTimestamp"].is_string();
    let mut endpoint = json!({
        "addresses": [address],
        "conditions": {
            "ready": publish || (pod_ready && !terminating),
            "serving": publish || pod_ready,
            "terminating": terminating,
        },
        "targetRef": {
            "kind": "Pod", "namespace": metadata["namespace"], "name": metadata["name"], "uid": metadata["uid"],
        },
    });
    if pod["spec"]["nodeName"].is_string() {
        endpoint["nodeName"] = pod["spec"]["nodeName"].clone();
    }
    Some(endpoint)
}
