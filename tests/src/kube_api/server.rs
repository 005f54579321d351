//! The HTTP side.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError, atomic::Ordering},
    time::Instant,
};

use axum::{
    Router,
    body::{Body, to_bytes},
    extract::{Query as AxumQuery, State as AxumState},
    http::{Request, StatusCode, header},
    response::Response,
};
use serde_json::{Value, json};
use tokio::sync::watch;

use super::{
    State,
    answer::{self, Answer},
    calls::{Call, Counters, Entry},
    discovery,
    error::ApiError,
    faults::Outage,
    kind::Kind,
    rbac::{self, Attributes},
    request::{Query, Target},
    watch as watches,
};

/// Of one request's body. A real server takes 3 MiB.
const BODY_LIMIT: usize = 3 << 20;

/// What the server and the handle share.
#[derive(Debug)]
pub(crate) struct Shared {
    state: Mutex<State>,
    pub(crate) changed: watch::Sender<()>,
}

impl Shared {
    pub(crate) fn new() -> Self {
        Self { state: Mutex::default(), changed: watch::channel(()).0 }
    }

    /// A test that failed while it held the lock must not hide its reason behind another panic.
    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes something and wakes the watches.
    pub(crate) fn change<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let result = change(&mut self.lock());
        self.changed.send_replace(());
        result
    }
}

pub(crate) fn router(shared: Arc<Shared>) -> Router {
    Router::new().fallback(handle).with_state(shared)
}

async fn handle(AxumState(shared): AxumState<Arc<Shared>>, request: Request<Body>) -> Response {
    let (parts, body) = request.into_parts();
    let query =
        AxumQuery::try_from_uri(&parts.uri).map_or_else(|_| Query::default(), |AxumQuery(map)| Query(map));
    let text =
        |name| parts.headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default().to_owned();
    let (accept, content_type) = (text(header::ACCEPT), text(header::CONTENT_TYPE));
    let body = match to_bytes(body, BODY_LIMIT).await {
        Ok(body) => body,
        Err(error) => return respond_error(&ApiError::new(413, "RequestEntityTooLarge", error.to_string())),
    };
    let target = Target::parse(parts.uri.path());
    let none = Attributes { verb: "get".into(), group: String::new(), resource: String::new() };
    let attributes = target.as_ref().map_or(none, |target| target.attributes(&parts.method, &query));
    let counters = Arc::new(Counters::default());
    let call = Call {
        at: Instant::now(),
        attributes: attributes.clone(),
        version: target.as_ref().map(|t| t.version.clone()).unwrap_or_default(),
        namespace: target.as_ref().and_then(|t| t.namespace.clone()),
        name: target.as_ref().and_then(|t| t.name.clone()).unwrap_or_default(),
        uri: parts.uri.to_string(),
        user_agent: text(header::USER_AGENT),
        request_bytes: body.len() as u64,
        response_bytes: 0,
        code: 0,
    };
    shared.lock().calls.push(Entry { call, counters: Arc::clone(&counters) });

    let result = match outage(&shared).await {
        Some(error) => Err(error),
        None => match target {
            None => discovery::answer(parts.uri.path()),
            Some(target) => {
                let partial = accept.contains("as=PartialObjectMetadata");
                let ask = Ask { target, attributes, query, partial, content_type };
                answer(&shared, &ask, &body, &counters)
            }
        },
    };
    let response = match result {
        Ok(Answer::Object(code, value)) => respond(code, &value, Some(&counters)),
        Ok(Answer::List(text)) => respond_text(200, text, Some(&counters)),
        Ok(Answer::Text(text)) => Response::new(Body::from(text)),
        Ok(Answer::Watch(watch)) => {
            let stream = watches::run(*watch, &shared);
            let mut response = Response::new(Body::from_stream(stream));
            response
                .headers_mut()
                .insert(header::CONTENT_TYPE, header::HeaderValue::from_static("application/json"));
            response
        }
        Err(error) => respond_error(&error),
    };
    counters.code.store(response.status().as_u16(), Ordering::Relaxed);
    response
}

/// Waits out a hang; gives the error of an outage that has one.
async fn outage(shared: &Shared) -> Option<ApiError> {
    let mut changed = shared.changed.subscribe();
    loop {
        changed.borrow_and_update();
        let now = shared.lock().faults.outage;
        match now {
            Outage::None => return None,
            Outage::Status(code) => {
                return Some(ApiError::new(code, "ServiceUnavailable", "this outage is a test"));
            }
            Outage::Hang => changed.changed().await.ok()?,
        }
    }
}

/// A request for a resource.
#[derive(Debug)]
pub(crate) struct Ask {
    pub(crate) target: Target,
    pub(crate) attributes: Attributes,
    pub(crate) query: Query,
    pub(crate) partial: bool,
    pub(crate) content_type: String,
}

fn answer(shared: &Shared, ask: &Ask, body: &[u8], counters: &Arc<Counters>) -> Result<Answer, ApiError> {
    authorize(&shared.lock(), ask)?;
    let kind = ask.target.kind()?;
    let parse = |body: &[u8]| {
        serde_json::from_slice::<Value>(body)
            .map_err(|error| ApiError::bad_request(format!("the body: {error}")))
    };
    if kind == Kind::SelfSubjectAccessReview {
        return review(&shared.lock(), parse(body)?);
    }
    match ask.attributes.verb.as_str() {
        "get" => answer::get(&shared.lock(), ask, kind),
        "list" => answer::list(&mut shared.lock(), ask, kind),
        "watch" => answer::watch(&shared.lock(), ask, kind, counters),
        "create" | "update" | "patch" => {
            let body = parse(body)?;
            shared.change(|state| answer::write(state, ask, kind, body))
        }
        "delete" => {
            let options = if body.is_empty() { json!({}) } else { parse(body)? };
            shared.change(|state| answer::delete(state, ask, kind, &options))
        }
        verb => Err(ApiError::new(405, "MethodNotAllowed", format!("{verb} is not served here"))),
    }
}

fn authorize(state: &State, ask: &Ask) -> Result<(), ApiError> {
    let Some(rules) = &state.rules else { return Ok(()) };
    let name = ask.target.name.as_deref().unwrap_or_default();
    if rbac::always_allowed(&ask.attributes) || rbac::allowed(rules, &ask.attributes, name) {
        return Ok(());
    }
    let Attributes { verb, group, resource } = &ask.attributes;
    let scope = match &ask.target.namespace {
        Some(namespace) => format!("in the namespace {namespace:?}"),
        None => "at the cluster scope".into(),
    };
    let message = format!(
        "{resource}{}{group} is forbidden: User {:?} cannot {verb} resource {resource:?} in API group {group:?} {scope}",
        if group.is_empty() { "" } else { "." },
        super::USER,
    );
    Err(ApiError::new(403, "Forbidden", message))
}

fn review(state: &State, mut review: Value) -> Result<Answer, ApiError> {
    Kind::SelfSubjectAccessReview.check(&review).map_err(ApiError::bad_request)?;
    let asked = &review["spec"]["resourceAttributes"];
    let text = |field: &str| asked[field].as_str().unwrap_or_default().to_owned();
    let resource = match text("subresource").as_str() {
        "" => text("resource"),
        subresource => format!("{}/{subresource}", text("resource")),
    };
    let attributes = Attributes { verb: text("verb"), group: text("group"), resource };
    let allowed = state.rules.as_ref().is_none_or(|rules| rbac::allowed(rules, &attributes, &text("name")));
    review["status"] = json!({"allowed": allowed});
    Ok(Answer::Object(201, review))
}

fn respond(code: u16, value: &Value, counters: Option<&Counters>) -> Response {
    respond_text(code, value.to_string(), counters)
}

fn respond_text(code: u16, text: String, counters: Option<&Counters>) -> Response {
    if let Some(counters) = counters {
        counters.bytes.fetch_add(text.len() as u64, Ordering::Relaxed);
    }
    let mut response = Response::new(Body::from(text));
    *response.status_mut() = StatusCode::from_u16(code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    response.headers_mut().insert(header::CONTENT_TYPE, header::HeaderValue::from_static("application/json"));
    response
}

fn respond_error(error: &ApiError) -> Response {
    respond(error.code, &error.status(), None)
}

/// Lists that are being read in parts: the rest of each, by token.
pub(crate) type Continues = BTreeMap<String, (u64, Vec<Arc<Value>>)>;
