//! A Kubernetes API server in process, good enough for kube's clients and watchers.
//!
//! It keeps objects in memory and speaks plain HTTP on 127.0.0.1. Its thread has a runtime of its own, and the handle
//! blocks for microseconds only, so tests of any shape can use it. It does what a real server does as far as this
//! project depends on it: revisions, history, compaction, selectors, bookmarks, streaming lists, paged lists, grace
//! periods, finalizers, strict decoding, RBAC and access reviews. It has no controllers: [`cluster`] plays those.
//!
//! Not served: Protobuf, strategic merge patches, field ownership of server-side apply, dry runs, admission, quotas.

mod answer;
mod calls;
pub mod cluster;
mod custom;
mod discovery;
mod error;
mod faults;
mod kind;
mod listener;
mod rbac;
mod request;
mod selector;
mod server;
mod store;
mod validate;
mod watch;
mod write;

use std::{collections::BTreeMap, path::Path, sync::Arc, time::Duration};

use anyhow::Context as _;
use k8s_openapi::api::rbac::v1::PolicyRule;
use serde::{Serialize, de::DeserializeOwned};
use serde_json::{Value, json};

pub use self::{
    calls::Call,
    error::ApiError,
    faults::{Close, Delivery, Gone, Outage},
    kind::{Kind, KindInfo},
    rbac::Attributes,
};
use self::{
    calls::Entry,
    faults::Faults,
    listener::Listener,
    server::{Continues, Shared},
    store::{Key, Store},
    write::{DeleteOptions, Scope},
};

/// Who the clients are, in refusals.
const USER: &str = "system:serviceaccount:kube-system:coil-guard";

#[derive(Debug, Default)]
struct State {
    store: Store,
    faults: Faults,
    /// `None` allows everything.
    rules: Option<Vec<PolicyRule>>,
    calls: Vec<Entry>,
    /// How many watches run.
    watches: BTreeMap<Kind, usize>,
    continues: Continues,
    tokens: u64,
}

/// A running server. Clones are handles of the same one; it stops with the last.
#[derive(Clone, Debug)]
pub struct KubeApi {
    shared: Arc<Shared>,
    listener: Arc<Listener>,
}

impl KubeApi {
    /// Starts a server on a free port of 127.0.0.1.
    ///
    /// # Errors
    ///
    /// No socket, thread or temporary directory.
    pub fn start() -> anyhow::Result<Self> {
        let shared = Arc::new(Shared::new());
        let listener = Arc::new(Listener::start(Arc::clone(&shared))?);
        Ok(Self { shared, listener })
    }

    /// `http://127.0.0.1:PORT`
    #[must_use]
    pub fn url(&self) -> String {
        self.listener.url()
    }

    /// A kubeconfig for it, for `KUBECONFIG` or `--kubeconfig`. The file goes with the last handle.
    #[must_use]
    pub fn kubeconfig(&self) -> &Path {
        self.listener.kubeconfig()
    }

    /// Closes the port and cuts every connection: the API server is gone. Objects stay.
    pub fn stop_listening(&self) {
        self.listener.stop();
    }

    /// Serves again, on the same port.
    ///
    /// # Errors
    ///
    /// The port cannot be listened on.
    pub fn start_listening(&self) -> anyhow::Result<()> {
        self.listener.listen(Arc::clone(&self.shared))
    }

    // ---- objects ----

    /// Creates an object (typed, or a [`Value`] with apiVersion and kind), its status included. It is decoded strictly.
    ///
    /// # Errors
    ///
    /// An unknown kind, or what the server answers.
    pub fn create(&self, object: &impl Serialize) -> anyhow::Result<Value> {
        let object = serde_json::to_value(object)?;
        let kind = Kind::of(&object).with_context(|| {
            format!("{} {} is no kind that this server knows", object["apiVersion"], object["kind"])
        })?;
        let created = self.shared.change(|s| write::create(&mut s.store, kind, None, object, Scope::All))?;
        Ok((*created).clone())
    }

    /// Stores whatever it is, under the names given: for objects with missing and odd fields.
    pub fn put_raw(&self, kind: Kind, namespace: &str, name: &str, object: Value) {
        self.shared.change(|state| state.store.put(Key::new(kind, namespace, name), object));
    }

    /// Removes an object at once, whatever holds it.
    pub fn remove_raw(&self, kind: Kind, namespace: &str, name: &str) {
        self.shared.change(|state| state.store.remove(&Key::new(kind, namespace, name)));
    }

    /// An object as it is now.
    #[must_use]
    pub fn get(&self, kind: Kind, namespace: &str, name: &str) -> Option<Value> {
        self.shared.lock().store.get(&Key::new(kind, namespace, name)).map(|object| (**object).clone())
    }

    /// An object as it is now, decoded.
    ///
    /// # Errors
    ///
    /// It does not exist, or is no `T`.
    pub fn object<T: DeserializeOwned>(&self, kind: Kind, namespace: &str, name: &str) -> anyhow::Result<T> {
        let object = self.get(kind, namespace, name);
        let object = object.with_context(|| format!("there is no {kind:?} {namespace}/{name}"))?;
        Ok(serde_json::from_value(object)?)
    }

    /// All objects of a kind, by namespace and name.
    #[must_use]
    pub fn list(&self, kind: Kind) -> Vec<Value> {
        self.shared.lock().store.of_kind(kind).map(|(_, object)| (**object).clone()).collect()
    }

    /// Replaces an object, its status included. With a resourceVersion in it, only if that is still the newest.
    ///
    /// # Errors
    ///
    /// An unknown kind, or what the server answers.
    pub fn replace(&self, object: &impl Serialize) -> anyhow::Result<Value> {
        let object = serde_json::to_value(object)?;
        let kind = Kind::of(&object).with_context(|| {
            format!("{} {} is no kind that this server knows", object["apiVersion"], object["kind"])
        })?;
        let text = |field: &str| object["metadata"][field].as_str().unwrap_or_default().to_owned();
        let key = Key::new(kind, &text("namespace"), &text("name"));
        let replaced =
            self.shared.change(|state| write::update(&mut state.store, &key, object, Scope::All))?;
        Ok((*replaced).clone())
    }

    /// Merges a patch (RFC 7396) into an object, its status included.
    ///
    /// # Errors
    ///
    /// What the server answers.
    pub fn patch(&self, kind: Kind, namespace: &str, name: &str, patch: &Value) -> anyhow::Result<Value> {
        let key = Key::new(kind, namespace, name);
        let patched = self.shared.change(|state| {
            let old = state.store.get(&key).ok_or_else(|| ApiError::not_found(kind, name))?;
            let mut new = (**old).clone();
            write::merge(&mut new, patch);
            write::update(&mut state.store, &key, new, Scope::All)
        })?;
        Ok((*patched).clone())
    }

    /// Sets an annotation, or removes it (`None`).
    ///
    /// # Errors
    ///
    /// What the server answers.
    pub fn annotate(
        &self,
        kind: Kind,
        namespace: &str,
        name: &str,
        key: &str,
        to: Option<&str>,
    ) -> anyhow::Result<()> {
        self.patch(kind, namespace, name, &json!({"metadata": {"annotations": {key: to}}})).map(drop)
    }

    /// Deletes an object; a pod with this grace period (seconds), or with its own (`None`).
    ///
    /// # Errors
    ///
    /// What the server answers.
    pub fn delete(&self, kind: Kind, namespace: &str, name: &str, grace: Option<i64>) -> anyhow::Result<()> {
        let options = DeleteOptions { grace, ..DeleteOptions::default() };
        let key = Key::new(kind, namespace, name);
        self.shared.change(|state| write::delete(&mut state.store, &key, &options))?;
        Ok(())
    }

    /// The newest revision.
    #[must_use]
    pub fn revision(&self) -> u64 {
        self.shared.lock().store.revision()
    }

    // ---- faults ----

    /// Sets how events of a kind reach its watches, those that run included.
    pub fn deliver(&self, kind: Kind, delivery: Delivery) {
        self.shared.change(|state| state.faults.delivery.insert(kind, delivery));
    }

    /// Keeps back the events of a kind until [`KubeApi::deliver`] says otherwise.
    pub fn hold(&self, kind: Kind) {
        self.deliver(kind, Delivery { held: true, ..Delivery::default() });
    }

    /// Ends the watches that run, of one kind or of all.
    pub fn close_watches(&self, kind: Option<Kind>, how: Close) {
        self.shared.change(|state| state.faults.closes.push((kind, how)));
    }

    /// How many watches of a kind run. A client whose connection is gone counts until the server notices.
    #[must_use]
    pub fn running_watches(&self, kind: Kind) -> usize {
        self.shared.lock().watches.get(&kind).copied().unwrap_or(0)
    }

    /// Forgets the history and the parts of lists that were not read yet: a watch from an older revision, and a
    /// continued list, gets 410.
    pub fn compact(&self) {
        self.shared.change(|state| {
            state.store.compact();
            state.continues.clear();
        });
    }

    /// Makes every client list again: 410 to the watches that run, and to those that resume.
    pub fn expire_watches(&self) {
        self.compact();
        self.close_watches(None, Close::Expired);
    }

    /// How many changes the history keeps (default 100,000).
    pub fn set_history_limit(&self, changes: usize) {
        self.shared.lock().store.history_limit = changes;
    }

    /// How a watch from a compacted revision is refused.
    pub fn set_gone(&self, gone: Gone) {
        self.shared.lock().faults.gone = gone;
    }

    /// Sends `{"type": event, "object": object}` to the watches of a kind that run, whatever it is and whatever they select.
    pub fn inject(&self, kind: Kind, event: &str, object: &Value) {
        let event = json!({"type": event, "object": object});
        self.shared.change(|state| state.faults.injected.push((kind, event)));
    }

    /// Sets what happens to every request.
    pub fn set_outage(&self, outage: Outage) {
        self.shared.change(|state| state.faults.outage = outage);
    }

    /// How often watches get bookmarks, from their next one on (default every minute).
    pub fn set_bookmark_interval(&self, every: Duration) {
        self.shared.change(|state| {
            state.faults.bookmarks_every = every;
            state.faults.bookmark_rounds += 1;
        });
    }

    /// Sends a bookmark to every watch that allows them.
    pub fn send_bookmarks(&self) {
        self.shared.change(|state| state.faults.bookmark_rounds += 1);
    }

    // ---- rights and the log ----

    /// Allows only what these rules allow, in every namespace (`None`: everything). Watches that run go on.
    pub fn set_rules(&self, rules: Option<Vec<PolicyRule>>) {
        self.shared.lock().rules = rules;
    }

    /// Every call of a client since the start or [`KubeApi::clear_calls`], in order. The handle's own are not among them.
    #[must_use]
    pub fn calls(&self) -> Vec<Call> {
        self.shared.lock().calls.iter().map(Entry::snapshot).collect()
    }

    /// Empties the log.
    pub fn clear_calls(&self) {
        self.shared.lock().calls.clear();
    }
}
