//! The checks beyond decoding that an API server makes and that a client of this project could trip over.

use serde_json::Value;

use super::{error::ApiError, kind::Kind};

/// Checks a new object.
pub(crate) fn create(kind: Kind, object: &Value) -> Result<(), ApiError> {
    match kind {
        Kind::Event => check(kind, object, event(object)),
        Kind::DaemonSet | Kind::Deployment => check(kind, object, workload(object)),
        _ => Ok(()),
    }
}

/// Checks a change of an object.
pub(crate) fn update(kind: Kind, old: &Value, new: &Value) -> Result<(), ApiError> {
    match kind {
        Kind::Event => check(kind, new, event(new).and_then(|()| event_update(old, new))),
        _ => Ok(()),
    }
}

fn check(kind: Kind, object: &Value, result: Result<(), String>) -> Result<(), ApiError> {
    result.map_err(|m| ApiError::invalid(kind, object["metadata"]["name"].as_str().unwrap_or_default(), &m))
}

/// As events.k8s.io/v1 validates an Event.
fn event(event: &Value) -> Result<(), String> {
    let text = |field: &str| event[field].as_str().unwrap_or_default();
    let limits = [("reason", 128), ("action", 128), ("reportingController", 63), ("reportingInstance", 128)];
    for (field, limit) in limits {
        let length = text(field).chars().count();
        if length == 0 {
            return Err(format!("{field}: Required value"));
        }
        // The controller is a qualified name: the limit is that of the part after the slash.
        if field != "reportingController" && length > limit {
            return Err(format!("{field}: can have at most {limit} characters, has {length}"));
        }
    }
    if event["eventTime"].is_null() {
        return Err("eventTime: Required value".into());
    }
    if text("note").len() > 1024 {
        return Err(format!("note: can have at most 1024 bytes, has {}", text("note").len()));
    }
    if !matches!(text("type"), "Normal" | "Warning") {
        return Err(format!("type: Unsupported value {:?}: expected Normal or Warning", text("type")));
    }
    for field in
        ["deprecatedCount", "deprecatedFirstTimestamp", "deprecatedLastTimestamp", "deprecatedSource"]
    {
        let empty = event[field].as_object().is_some_and(serde_json::Map::is_empty);
        if !event[field].is_null() && !empty && event[field] != 0 {
            return Err(format!("{field}: must be unset"));
        }
    }
    let series = &event["series"];
    if !series.is_null()
        && (series["count"].as_i64().unwrap_or(0) < 2 || series["lastObservedTime"].is_null())
    {
        return Err("series: count should be at least 2, and lastObservedTime is required".into());
    }
    // A namespace of the object that is another than the Event's is taken, once eventTime is set.
    let (own, regarding) = (event["metadata"]["namespace"].as_str(), &event["regarding"]["namespace"]);
    if regarding.as_str().unwrap_or_default().is_empty() && !matches!(own, Some("default" | "kube-system")) {
        return Err("regarding.namespace: does not match event.namespace".into());
    }
    Ok(())
}

/// Only the series of an Event can change.
fn event_update(old: &Value, new: &Value) -> Result<(), String> {
    let fixed = ["regarding", "reason", "note", "eventTime", "action", "related", "reportingController"];
    for field in fixed.into_iter().chain(["reportingInstance", "type"]) {
        if old[field] != new[field] {
            return Err(format!("{field}: field is immutable"));
        }
    }
    Ok(())
}

/// The mistakes in a DaemonSet or Deployment that decode well and are refused all the same.
fn workload(workload: &Value) -> Result<(), String> {
    let template = &workload["spec"]["template"];
    let selector = workload["spec"]["selector"]["matchLabels"].as_object();
    let Some(selector) = selector.filter(|labels| !labels.is_empty()) else {
        return Err("spec.selector: Required value".into());
    };
    if selector.iter().any(|(label, value)| template["metadata"]["labels"][label] != *value) {
        return Err("spec.template.metadata.labels: `selector` does not match template `labels`".into());
    }
    let spec = &template["spec"];
    let names = |list: &Value| -> Vec<String> {
        list.as_array().into_iter().flatten().filter_map(|v| v["name"].as_str().map(str::to_owned)).collect()
    };
    let volumes = names(&spec["volumes"]);
    let all = ["initContainers", "containers"];
    for container in all.into_iter().flat_map(|list| spec[list].as_array().into_iter().flatten()) {
        let name = &container["name"];
        if container["image"].as_str().unwrap_or_default().is_empty() {
            return Err(format!("container {name}: image: Required value"));
        }
        for mount in container["volumeMounts"].as_array().into_iter().flatten() {
            let volume = mount["name"].as_str().unwrap_or_default();
            if !volumes.iter().any(|v| v == volume) {
                return Err(format!("container {name}: volumeMounts: volume {volume:?} not found"));
            }
            if mount["mountPropagation"] == "Bidirectional"
                && container["securityContext"]["privileged"] != true
            {
                return Err(format!("container {name}: Bidirectional mount propagation needs privileged"));
            }
        }
        for port in container["ports"].as_array().into_iter().flatten() {
            if spec["hostNetwork"] == true
                && !port["hostPort"].is_null()
                && port["hostPort"] != port["containerPort"]
            {
                return Err(format!("container {name}: with hostNetwork, hostPort must equal containerPort"));
            }
        }
        for (resource, request) in container["resources"]["requests"].as_object().into_iter().flatten() {
            let limit = &container["resources"]["limits"][resource];
            let parse = |value: &Value| value.as_str().map_or(value.as_f64(), quantity);
            if !limit.is_null() && parse(request) > parse(limit) {
                return Err(format!(
                    "container {name}: requests.{resource} {request} exceeds the limit {limit}"
                ));
            }
        }
    }
    Ok(())
}

fn quantity(text: &str) -> Option<f64> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let factor = match &text[digits.len()..] {
        "" => 1.0,
        "m" => 1e-3,
        "k" => 1e3,
        "M" => 1e6,
        "G" => 1e9,
        "Ki" => 1024.0,
        "Mi" => 1024.0 * 1024.0,
        "Gi" => 1024.0 * 1024.0 * 1024.0,
        _ => return None,
    };
    digits.parse::<f64>().ok().map(|number| number * factor)
}
