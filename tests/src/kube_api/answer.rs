//! What each verb answers.

use std::{sync::Arc, time::Duration};

use serde::{Serialize, Serializer};
use serde_json::{Value, json};
use tokio::time::Instant;

use super::{
    State,
    calls::Counters,
    error::ApiError,
    faults::Gone,
    kind::Kind,
    request::{Query, Target},
    server::Ask,
    watch::{self, Watch},
    write::{self, DeleteOptions, Scope},
};

/// An answer that is not an error.
pub(crate) enum Answer {
    Object(u16, Value),
    /// As it is to be sent.
    List(String),
    Text(&'static str),
    Watch(Box<Watch>),
}

fn shown(object: &Value, partial: bool) -> Value {
    if partial { watch::partial(object) } else { object.clone() }
}

pub(crate) fn get(state: &State, ask: &Ask, kind: Kind) -> Result<Answer, ApiError> {
    scope(&ask.target, kind)?;
    let key = ask.target.key(kind)?;
    let object = state.store.get(&key).ok_or_else(|| ApiError::not_found(kind, &key.name))?;
    Ok(Answer::Object(200, shown(object, ask.partial)))
}

pub(crate) fn list(state: &mut State, ask: &Ask, kind: Kind) -> Result<Answer, ApiError> {
    let filter = ask.query.filter(&ask.target)?;
    let limit = ask.query.number("limit")?.filter(|limit| *limit > 0).unwrap_or(u64::MAX);
    let limit = usize::try_from(limit).unwrap_or(usize::MAX);
    let (revision, mut items) = match ask.query.get("continue") {
        Some(token) => state.continues.remove(token).ok_or_else(|| {
            ApiError::new(
                410,
                "Expired",
                "The provided continue parameter is too old to display a consistent list result",
            )
        })?,
        None => {
            let revision = state.store.revision();
            check_revision(&ask.query, revision)?;
            let items =
                state.store.of_kind(kind).map(|(_, object)| object).filter(|object| filter.matches(object));
            (revision, items.cloned().collect())
        }
    };
    let rest = if items.len() > limit { items.split_off(limit) } else { Vec::new() };
    let info = kind.info();
    let mut metadata = json!({"resourceVersion": revision.to_string()});
    if !rest.is_empty() {
        state.tokens += 1;
        let token = format!("continue-{}", state.tokens);
        metadata["continue"] = json!(token);
        metadata["remainingItemCount"] = json!(rest.len());
        state.continues.insert(token, (revision, rest));
    }
    // The items of a list of a built-in kind carry neither apiVersion nor kind; those of a custom resource do.
    let custom = info.group.contains('.') && !info.group.ends_with(".k8s.io");
    let (api_version, list) = if ask.partial {
        ("meta.k8s.io/v1".to_owned(), "PartialObjectMetadataList".to_owned())
    } else {
        (info.api_version(), format!("{}List", info.kind))
    };
    let items = items.iter().map(|object| Item { object, typed: custom, partial: ask.partial }).collect();
    let list = List { api_version, items, kind: list, metadata };
    let text = serde_json::to_string(&list).map_err(|error| ApiError::bad_request(error.to_string()))?;
    Ok(Answer::List(text))
}

/// A list, written without a copy of what is in it: it can be of ten thousand pods, and on the same machine as what is measured.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct List<'a> {
    api_version: String,
    items: Vec<Item<'a>>,
    kind: String,
    metadata: Value,
}

struct Item<'a> {
    object: &'a Value,
    typed: bool,
    partial: bool,
}

impl Serialize for Item<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.object.as_object() {
            Some(fields) if !self.typed && !self.partial => serializer.collect_map(
                fields.iter().filter(|(name, _)| !["apiVersion", "kind"].contains(&name.as_str())),
            ),
            _ => shown(self.object, self.partial).serialize(serializer),
        }
    }
}

fn check_revision(query: &Query, newest: u64) -> Result<(), ApiError> {
    let Some(asked) = query.number("resourceVersion")? else { return Ok(()) };
    if asked > newest {
        return Err(too_large(asked, newest));
    }
    match query.get("resourceVersionMatch") {
        Some("Exact") if asked != newest => Err(ApiError::expired(asked, newest)),
        None | Some("Exact" | "NotOlderThan") => Ok(()),
        Some(other) => {
            Err(ApiError::bad_request(format!("resourceVersionMatch: unsupported value {other:?}")))
        }
    }
}

fn too_large(asked: u64, newest: u64) -> ApiError {
    ApiError::new(504, "Timeout", format!("Too large resource version: {asked}, current: {newest}"))
}

pub(crate) fn watch(
    state: &State,
    ask: &Ask,
    kind: Kind,
    counters: &Arc<Counters>,
) -> Result<Answer, ApiError> {
    scope(&ask.target, kind)?;
    let query = &ask.query;
    let filter = query.filter(&ask.target)?;
    let newest = state.store.revision();
    let asked = query.number("resourceVersion")?;
    let send_initial = query.flag("sendInitialEvents");
    if send_initial && query.get("resourceVersionMatch") != Some("NotOlderThan") {
        let message = "resourceVersionMatch: Forbidden: must be NotOlderThan when sendInitialEvents is set";
        return Err(ApiError::new(422, "Invalid", message));
    }
    // A real server chooses 30 to 60 minutes where the client names no time.
    let seconds = query.number("timeoutSeconds")?.filter(|seconds| *seconds > 0).unwrap_or(1800);
    let mut watch = Watch {
        kind,
        cursor: newest,
        bookmarks: query.flag("allowWatchBookmarks"),
        partial: ask.partial,
        deadline: Instant::now() + Duration::from_secs(seconds),
        initial: Vec::new(),
        counters: Arc::clone(counters),
        filter,
    };
    if asked.is_some_and(|asked| asked > newest) {
        return Err(too_large(asked.unwrap_or_default(), newest));
    }
    if send_initial || asked.unwrap_or(0) == 0 {
        for (_, object) in state.store.of_kind(kind) {
            if watch.filter.matches(object) {
                watch.initial.extend(watch::line("ADDED", &shown(object, ask.partial)));
            }
        }
        if send_initial && watch.bookmarks {
            watch.initial.extend(watch::bookmark(kind, newest, true));
        }
    } else if let Some(asked) = asked {
        if let Err(error) = state.store.since(asked).map(drop) {
            if state.faults.gone == Gone::Status {
                return Err(error);
            }
            watch.initial = watch::line("ERROR", &error.status());
            watch.deadline = Instant::now();
            watch.bookmarks = false;
        } else {
            watch.cursor = asked;
        }
    }
    Ok(Answer::Watch(Box::new(watch)))
}

pub(crate) fn write(state: &mut State, ask: &Ask, kind: Kind, body: Value) -> Result<Answer, ApiError> {
    scope(&ask.target, kind)?;
    if ask.query.get("dryRun").is_some() {
        return Err(ApiError::bad_request("dryRun is not served here"));
    }
    let part = match ask.target.subresource.as_deref() {
        None => Scope::Object,
        Some("status") if kind.info().status => Scope::Status,
        Some(_) => return Err(ApiError::no_such_path()),
    };
    let store = &mut state.store;
    if ask.attributes.verb == "create" {
        if ask.target.name.is_some() {
            return Err(ApiError::no_such_path());
        }
        let created = write::create(store, kind, ask.target.namespace.as_deref(), body, part)?;
        return Ok(Answer::Object(201, (*created).clone()));
    }
    let key = ask.target.key(kind)?;
    if ask.attributes.verb == "update" {
        let name = body["metadata"]["name"].as_str().unwrap_or_default();
        if name != key.name {
            let message =
                format!("the name of the object ({name}) does not match the name on the URL ({})", key.name);
            return Err(ApiError::bad_request(message));
        }
        return Ok(Answer::Object(200, (*write::update(store, &key, body, part)?).clone()));
    }
    let old = store.get(&key).map(|object| (**object).clone());
    let media = ask.content_type.split(';').next().unwrap_or_default().trim();
    let new = match (media, old) {
        ("application/apply-patch+yaml", None) => {
            let created = write::create(store, kind, ask.target.namespace.as_deref(), body, part)?;
            return Ok(Answer::Object(201, (*created).clone()));
        }
        (_, None) => return Err(ApiError::not_found(kind, &key.name)),
        // Apply without ownership: fields that were applied before and are left out now stay.
        ("application/merge-patch+json" | "application/apply-patch+yaml", Some(mut new)) => {
            write::merge(&mut new, &body);
            if body["metadata"]["resourceVersion"].is_null() {
                new["metadata"]["resourceVersion"] = json!("");
            }
            new
        }
        ("application/json-patch+json", Some(mut new)) => {
            let invalid = |error: String| ApiError::new(422, "Invalid", error);
            let patch: json_patch::Patch =
                serde_json::from_value(body).map_err(|e| invalid(e.to_string()))?;
            json_patch::patch(&mut new, &patch).map_err(|e| invalid(e.to_string()))?;
            new
        }
        (other, Some(_)) => {
            return Err(ApiError::new(
                415,
                "UnsupportedMediaType",
                format!("patches of type {other:?} are not served"),
            ));
        }
    };
    Ok(Answer::Object(200, (*write::update(store, &key, new, part)?).clone()))
}

pub(crate) fn delete(state: &mut State, ask: &Ask, kind: Kind, body: &Value) -> Result<Answer, ApiError> {
    scope(&ask.target, kind)?;
    if ask.target.subresource.is_some() {
        return Err(ApiError::no_such_path());
    }
    let text = |value: &Value| value.as_str().map(str::to_owned);
    let in_query = ask.query.number("gracePeriodSeconds")?.and_then(|seconds| i64::try_from(seconds).ok());
    let options = DeleteOptions {
        grace: body["gracePeriodSeconds"].as_i64().or(in_query),
        uid: text(&body["preconditions"]["uid"]),
        resource_version: text(&body["preconditions"]["resourceVersion"]),
    };
    let last = write::delete(&mut state.store, &ask.target.key(kind)?, &options)?;
    Ok(Answer::Object(200, (*last).clone()))
}

/// A namespace belongs in the path of namespaced kinds only.
fn scope(target: &Target, kind: Kind) -> Result<(), ApiError> {
    if target.namespace.is_some() && !kind.info().namespaced { Err(ApiError::no_such_path()) } else { Ok(()) }
}
