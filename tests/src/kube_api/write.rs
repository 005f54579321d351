//! Create, update, patch and delete, with the server's bookkeeping of metadata.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::SystemTime,
};

use k8s_openapi::{
    apimachinery::pkg::apis::meta::v1::Time,
    jiff::{SignedDuration, Timestamp},
};
use serde_json::{Map, Value, json};

use super::{
    error::ApiError,
    kind::Kind,
    store::{Key, Store},
    validate,
};

/// What part of an object a write may change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scope {
    /// The object's own path: all but the status, where the kind has a status subresource.
    Object,
    /// The status subresource: the status alone.
    Status,
    /// Both, for the tests' own handle.
    All,
}

/// The options of a delete call.
#[derive(Clone, Debug, Default)]
pub(crate) struct DeleteOptions {
    pub(crate) grace: Option<i64>,
    pub(crate) uid: Option<String>,
    pub(crate) resource_version: Option<String>,
}

/// The wall clock, in whole seconds as in metadata.
fn now() -> Timestamp {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    Timestamp::from_second(since.as_secs().cast_signed()).unwrap_or(Timestamp::MAX)
}

pub(crate) fn timestamp(time: Timestamp) -> Value {
    serde_json::to_value(Time(time)).unwrap_or_default()
}

/// Creates an object; `scope` says whether a status in it is kept.
pub(crate) fn create(
    store: &mut Store,
    kind: Kind,
    namespace: Option<&str>,
    mut object: Value,
    scope: Scope,
) -> Result<Arc<Value>, ApiError> {
    let info = kind.info();
    if !object.is_object() {
        return Err(ApiError::bad_request(format!("expected a {}, found {object}", info.kind)));
    }
    let found =
        (object["apiVersion"].as_str().unwrap_or_default(), object["kind"].as_str().unwrap_or_default());
    if found != (info.api_version().as_str(), info.kind) {
        let wanted = format!("{} {}", info.api_version(), info.kind);
        return Err(ApiError::bad_request(format!(
            "the object is a {} {}, not a {wanted}",
            found.0, found.1
        )));
    }
    kind.check(&object).map_err(ApiError::bad_request)?;
    if object["metadata"].is_null() {
        object["metadata"] = json!({});
    }
    let metadata = &mut object["metadata"];
    let namespace = match (info.namespaced, namespace, metadata["namespace"].as_str()) {
        (false, ..) => String::new(),
        (true, Some(asked), Some(own)) if asked != own => {
            let message =
                "the namespace of the provided object does not match the namespace sent on the request";
            return Err(ApiError::bad_request(message));
        }
        (true, Some(asked), _) => asked.into(),
        (true, None, own) => own.unwrap_or("default").into(),
    };
    if metadata["name"].as_str().unwrap_or_default().is_empty() {
        let Some(prefix) = metadata["generateName"].as_str() else {
            return Err(ApiError::invalid(
                kind,
                "",
                "metadata.name: Required value: name or generateName is required",
            ));
        };
        metadata["name"] = json!(format!("{prefix}{:05x}", store.revision() & 0xf_ffff));
    }
    let name = metadata["name"].as_str().unwrap_or_default().to_owned();
    if !metadata["resourceVersion"].as_str().unwrap_or_default().is_empty() {
        return Err(ApiError::bad_request("resourceVersion should not be set on objects to be created"));
    }
    let key = Key::new(kind, &namespace, &name);
    if store.get(&key).is_some() {
        let message = format!("{} {name:?} already exists", info.qualified());
        return Err(ApiError::new(409, "AlreadyExists", message));
    }
    if info.namespaced {
        metadata["namespace"] = json!(namespace);
    }
    let keep = if scope == Scope::All { metadata["uid"].as_str().map(str::to_owned) } else { None };
    metadata["uid"] = json!(keep.unwrap_or_else(new_uid));
    metadata["creationTimestamp"] = timestamp(now());
    metadata["generation"] = json!(1);
    if scope == Scope::Object && info.status {
        let fields = object.as_object_mut().into_iter();
        fields.for_each(|fields| drop(fields.remove("status")));
        if kind == Kind::Pod {
            object["status"] = json!({"phase": "Pending"});
        }
    }
    validate::create(kind, &object)?;
    Ok(store.put(key, object))
}

/// Replaces an object.
pub(crate) fn update(store: &mut Store, key: &Key, new: Value, scope: Scope) -> Result<Arc<Value>, ApiError> {
    let old = Arc::clone(store.get(key).ok_or_else(|| ApiError::not_found(key.kind, &key.name))?);
    let mut new = new;
    if !new["metadata"].is_object() {
        return Err(ApiError::bad_request(format!(
            "{} {:?} has no metadata",
            key.kind.info().kind,
            key.name
        )));
    }
    let sent = new["metadata"]["resourceVersion"].as_str().unwrap_or_default();
    if !sent.is_empty() && Some(sent) != old["metadata"]["resourceVersion"].as_str() {
        let message =
            "the object has been modified; please apply your changes to the latest version and try again";
        return Err(ApiError::conflict(key.kind, &key.name, message));
    }
    if new["metadata"]["uid"].as_str().is_some_and(|uid| Some(uid) != old["metadata"]["uid"].as_str()) {
        let message = format!("Precondition failed: UID in object meta: {}", old["metadata"]["uid"]);
        return Err(ApiError::conflict(key.kind, &key.name, &message));
    }
    match scope {
        Scope::Status => {
            let status = new["status"].take();
            new = (*old).clone();
            set(&mut new, "status", status);
        }
        Scope::Object if key.kind.info().status => set(&mut new, "status", old["status"].clone()),
        Scope::Object | Scope::All => {}
    }
    let fixed = ["name", "namespace", "uid", "creationTimestamp", "resourceVersion", "generation"];
    for field in fixed.iter().chain(["deletionTimestamp", "deletionGracePeriodSeconds"].iter()) {
        let value = old["metadata"][*field].clone();
        set(&mut new["metadata"], field, value);
    }
    set(&mut new, "apiVersion", old["apiVersion"].clone());
    set(&mut new, "kind", old["kind"].clone());
    key.kind.check(&new).map_err(|message| ApiError::invalid(key.kind, &key.name, &message))?;
    validate::update(key.kind, &old, &new)?;
    if new == *old {
        return Ok(old);
    }
    let rest = |object: &Value| {
        let mut rest = object.as_object().cloned().unwrap_or_default();
        rest.retain(|field, _| field != "metadata" && field != "status");
        rest
    };
    if rest(&new) != rest(&old) {
        new["metadata"]["generation"] = json!(old["metadata"]["generation"].as_i64().unwrap_or(0) + 1);
    }
    let stored = store.put(key.clone(), new);
    if ready_to_go(&stored) {
        store.remove(key);
    }
    Ok(stored)
}

/// JSON merge patch (RFC 7396).
pub(crate) fn merge(target: &mut Value, patch: &Value) {
    let Value::Object(patch) = patch else {
        *target = patch.clone();
        return;
    };
    if !target.is_object() {
        *target = Value::Object(Map::new());
    }
    if let Value::Object(fields) = target {
        for (field, value) in patch {
            if value.is_null() {
                fields.remove(field);
            } else {
                merge(fields.entry(field.clone()).or_insert(Value::Null), value);
            }
        }
    }
}

/// Deletes an object, or begins to: pods have their grace period, and finalizers hold any object.
pub(crate) fn delete(store: &mut Store, key: &Key, options: &DeleteOptions) -> Result<Arc<Value>, ApiError> {
    let old = Arc::clone(store.get(key).ok_or_else(|| ApiError::not_found(key.kind, &key.name))?);
    let metadata = &old["metadata"];
    for (field, wanted) in [("uid", &options.uid), ("resourceVersion", &options.resource_version)] {
        if let Some(wanted) = wanted
            && metadata[field].as_str() != Some(wanted)
        {
            let message = format!("Precondition failed: {field} is {}, not {wanted:?}", metadata[field]);
            return Err(ApiError::conflict(key.kind, &key.name, &message));
        }
    }
    let terminating = metadata["deletionTimestamp"].as_str().and_then(|time| time.parse::<Timestamp>().ok());
    let held = metadata["finalizers"].as_array().is_some_and(|finalizers| !finalizers.is_empty());
    let grace = if key.kind == Kind::Pod { pod_grace(&old, options.grace) } else { 0 };
    let (at, grace) = match terminating {
        None => (now() + SignedDuration::from_secs(grace), grace),
        Some(at) => {
            let before = metadata["deletionGracePeriodSeconds"].as_i64().unwrap_or(0);
            // A further delete can only shorten the wait, and without a period of its own it changes nothing.
            let grace = if options.grace.is_some() { grace.min(before) } else { before };
            (at - SignedDuration::from_secs(before - grace), grace)
        }
    };
    let mut last = Arc::clone(&old);
    if key.kind == Kind::Pod || held {
        let mut new = (*old).clone();
        new["metadata"]["deletionTimestamp"] = timestamp(at);
        new["metadata"]["deletionGracePeriodSeconds"] = json!(grace);
        if new != *old {
            last = store.put(key.clone(), new);
        }
    }
    if grace == 0 && !held {
        store.remove(key);
    }
    Ok(last)
}

fn pod_grace(pod: &Value, asked: Option<i64>) -> i64 {
    let finished = matches!(pod["status"]["phase"].as_str(), Some("Succeeded" | "Failed"));
    if finished || pod["spec"]["nodeName"].as_str().unwrap_or_default().is_empty() {
        return 0;
    }
    asked.or(pod["spec"]["terminationGracePeriodSeconds"].as_i64()).unwrap_or(30).max(0)
}

/// Whether the last finalizer of an object that was only held by finalizers has gone.
fn ready_to_go(object: &Value) -> bool {
    let metadata = &object["metadata"];
    metadata["deletionTimestamp"].is_string()
        && metadata["deletionGracePeriodSeconds"].as_i64() == Some(0)
        && metadata["finalizers"].as_array().is_none_or(Vec::is_empty)
}

fn set(object: &mut Value, field: &str, value: Value) {
    if let Some(fields) = object.as_object_mut() {
        if value.is_null() {
            fields.remove(field);
        } else {
            fields.insert(field.into(), value);
        }
    }
}

/// A UID that no other object of this machine has, whichever server made it.
fn new_uid() -> String {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    format!("{:08x}-0000-4000-8000-{:012x}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::merge;

    #[test]
    fn merge_patch_replaces_removes_and_descends() {
        let mut target = json!({"a": {"b": 1, "c": 2}, "l": [1, 2]});
        merge(&mut target, &json!({"a": {"b": null, "d": {"e": null, "f": 3}}, "l": [3]}));
        assert_eq!(target, json!({"a": {"c": 2, "d": {"f": 3}}, "l": [3]}));
    }
}
