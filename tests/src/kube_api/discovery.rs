//! Discovery, health and version.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::{answer::Answer, error::ApiError, kind::Kind};

/// Answers the paths that name no resource.
pub(crate) fn answer(path: &str) -> Result<Answer, ApiError> {
    let steps: Vec<&str> = path.split('/').filter(|step| !step.is_empty()).collect();
    let value = match steps.as_slice() {
        ["livez" | "readyz" | "healthz"] => return Ok(Answer::Text("ok")),
        ["version"] => json!({
            "major": "1", "minor": "35", "gitVersion": "v1.35.6", "gitCommit": "", "gitTreeState": "clean",
            "buildDate": "2026-01-01T00:00:00Z", "goVersion": "", "compiler": "gc", "platform": "linux/amd64",
        }),
        ["api"] => json!({"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []}),
        ["apis"] => {
            let groups: Vec<Value> = groups().iter().map(|(name, version)| group(name, version)).collect();
            json!({"kind": "APIGroupList", "apiVersion": "v1", "groups": groups})
        }
        ["apis", name] => {
            let version = groups().get(name).copied().ok_or_else(ApiError::no_such_path)?;
            let mut group = group(name, version);
            group["kind"] = json!("APIGroup");
            group["apiVersion"] = json!("v1");
            group
        }
        ["api", version] => resources("", version)?,
        ["apis", name, version] => resources(name, version)?,
        _ => return Err(ApiError::no_such_path()),
    };
    Ok(Answer::Object(200, value))
}

fn groups() -> BTreeMap<&'static str, &'static str> {
    let infos = Kind::ALL.iter().map(|kind| kind.info());
    infos.filter(|info| !info.group.is_empty()).map(|info| (info.group, info.version)).collect()
}

fn group(name: &str, version: &str) -> Value {
    let version = json!({"groupVersion": format!("{name}/{version}"), "version": version});
    json!({"name": name, "versions": [version], "preferredVersion": version})
}

fn resources(group: &str, version: &str) -> Result<Value, ApiError> {
    let mut resources = Vec::new();
    for kind in Kind::ALL {
        let info = kind.info();
        if (info.group, info.version) != (group, version) {
            continue;
        }
        let all = json!(["create", "delete", "get", "list", "patch", "update", "watch"]);
        let verbs = if kind == Kind::SelfSubjectAccessReview { json!(["create"]) } else { all };
        resources.push(json!({
            "name": info.plural, "singularName": info.kind.to_lowercase(), "namespaced": info.namespaced,
            "kind": info.kind, "verbs": verbs,
        }));
        if info.status {
            resources.push(json!({
                "name": format!("{}/status", info.plural), "singularName": "", "namespaced": info.namespaced,
                "kind": info.kind, "verbs": ["get", "patch", "update"],
            }));
        }
    }
    if resources.is_empty() {
        return Err(ApiError::no_such_path());
    }
    let group_version = if group.is_empty() { version.to_owned() } else { format!("{group}/{version}") };
    Ok(json!({
        "kind": "APIResourceList", "apiVersion": "v1", "groupVersion": group_version, "resources": resources,
    }))
}
