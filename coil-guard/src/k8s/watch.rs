//! One watch: list, then follow, for ever.
//!
//! This drives kube's client itself rather than kube's watcher, because of three things that decide whether marks may be
//! renewed and that the watcher keeps to itself: when a broken watch is established again although nothing changed
//! meanwhile, bookmarks (the only sign of life of a quiet watch), and objects that cannot be decoded.

use std::time::Duration;

use futures::{AsyncBufReadExt as _, TryStreamExt as _};
use kube::{
    Client,
    core::{
        Request,
        params::{ListParams, WatchParams},
    },
};
use tokio::{sync::mpsc, time::timeout};

use super::{
    Health, Message, Node,
    backoff::Backoff,
    kinds::Watched,
    raw::{self, EventKind, RawEvent},
};
use crate::{clock::Monotonic, index::Change};

/// Objects of a page, as many as Kubernetes' own clients ask for. A page is in memory as text once; of 500 pods that is some
/// two and a half megabytes.
const PAGE: u32 = 500;
/// An API server sends a bookmark about every minute. A watch that is silent for longer than this has lost its connection
/// without being told, and its word must not be renewed.
const SILENCE: Duration = Duration::from_secs(100);
/// Bound of a list request, and of the time until a watch request is answered.
const REQUEST: Duration = Duration::from_secs(30);
/// A server that closes watches at once is not asked again faster than this.
const SHORTEST_WATCH: Duration = Duration::from_millis(200);

/// Why a watch ended.
#[derive(Debug)]
enum Ended {
    /// By the server, as they do after some minutes. Goes on from the last version.
    Closed,
    /// The version is too old: list anew.
    Expired,
    /// Something failed.
    Failed(String),
    /// Nobody listens any more.
    Unheard,
}

pub(super) struct Watch<K> {
    client: Client,
    node: Node,
    out: mpsc::Sender<Message>,
    version: Option<String>,
    kind: std::marker::PhantomData<K>,
}

impl<K: Watched> Watch<K> {
    pub(super) fn new(client: Client, node: Node, out: mpsc::Sender<Message>) -> Self {
        Self { client, node, out, version: None, kind: std::marker::PhantomData }
    }

    /// Lists and follows until nobody listens any more.
    pub(super) async fn run(mut self) {
        let mut backoff = Backoff::new(Duration::from_millis(200), Duration::from_secs(5));
        loop {
            let started = Monotonic::now();
            let ended = match self.list_if_needed().await {
                Ok(version) => self.follow(&version, &mut backoff).await,
                Err(ended) => ended,
            };
            match ended {
                Ended::Unheard => return,
                Ended::Closed => {
                    let lasted = Monotonic::now().since(started);
                    tokio::time::sleep(SHORTEST_WATCH.saturating_sub(lasted)).await;
                }
                Ended::Expired => {
                    tracing::info!(watch = K::KIND.label(), "the watch's version has expired; listing anew");
                    self.version = None;
                    if self.tell(Health::Lost("the version has expired".into())).await.is_err() {
                        return;
                    }
                    tokio::time::sleep(backoff.next()).await;
                }
                Ended::Failed(error) => {
                    if self.tell(Health::Lost(error)).await.is_err() {
                        return;
                    }
                    tokio::time::sleep(backoff.next()).await;
                }
            }
        }
    }

    async fn list_if_needed(&mut self) -> Result<String, Ended> {
        if let Some(version) = &self.version {
            return Ok(version.clone());
        }
        let version = self.list().await?;
        self.version = Some(version.clone());
        Ok(version)
    }

    async fn list(&self) -> Result<String, Ended> {
        let (label_selector, field_selector) = K::KIND.selectors(&self.node.name);
        let mut page =
            ListParams { label_selector, field_selector, limit: Some(PAGE), ..ListParams::default() };
        let mut objects = Vec::new();
        loop {
            let request =
                Request::new(K::KIND.path()).list(&page).map_err(|error| Ended::Failed(error.to_string()))?;
            let text = match timeout(REQUEST, self.client.request_text(request)).await {
                Ok(answer) => answer.map_err(|error| failed::<K>("list", &error))?,
                Err(_) => {
                    return Err(Ended::Failed(format!(
                        "cannot list {}: no answer within 30 s",
                        K::KIND.resource()
                    )));
                }
            };
            let read = raw::page::<K>(&text, self.node.fou_port).map_err(|error| {
                Ended::Failed(format!(
                    "cannot list {}: the answer is not a list: {error}",
                    K::KIND.resource()
                ))
            })?;
            drop(text);
            for read in read.objects {
                match read.object {
                    Ok(Some(object)) => objects.push((read.name, Some(object))),
                    Ok(None) => {}
                    Err(malformed) => {
                        self.send(Message::Malformed(K::KIND, malformed)).await?;
                        objects.push((read.name, None));
                    }
                }
            }
            page.continue_token = read.next;
            if page.continue_token.is_none() {
                self.change(Change::Reset(objects)).await?;
                return Ok(read.resource_version.unwrap_or_default());
            }
        }
    }

    async fn follow(&mut self, version: &str, backoff: &mut Backoff) -> Ended {
        let (label_selector, field_selector) = K::KIND.selectors(&self.node.name);
        let params =
            WatchParams { label_selector, field_selector, bookmarks: true, ..WatchParams::default() };
        let request = match Request::new(K::KIND.path()).watch(&params, version) {
            Ok(request) => request,
            Err(error) => return Ended::Failed(error.to_string()),
        };
        let stream = match timeout(REQUEST, self.client.request_stream(request)).await {
            Ok(Ok(stream)) => stream.lines(),
            Ok(Err(error)) => return failed::<K>("watch", &error),
            Err(_) => {
                return Ended::Failed(format!("cannot watch {}: no answer within 30 s", K::KIND.resource()));
            }
        };
        if let Err(ended) = self.tell(Health::Established).await {
            return ended;
        }
        let mut stream = std::pin::pin!(stream);
        loop {
            let line = match timeout(SILENCE, stream.try_next()).await {
                Ok(Ok(Some(line))) => line,
                Ok(Ok(None)) => return Ended::Closed,
                // However the connection broke, what was received is whole lines: go on after them.
                Ok(Err(error)) => {
                    return Ended::Failed(format!(
                        "the watch of {} broke: {}",
                        K::KIND.resource(),
                        chain(&error)
                    ));
                }
                Err(_) => {
                    return Ended::Failed(format!(
                        "the watch of {} was silent for 100 s",
                        K::KIND.resource()
                    ));
                }
            };
            let event = match serde_json::from_str::<RawEvent>(&line) {
                Ok(event) => event,
                // The last line of a connection that was cut.
                Err(error) if error.is_eof() => return Ended::Closed,
                Err(error) => {
                    // Which object it was about is not known, so everything is listed anew.
                    self.version = None;
                    return Ended::Failed(format!(
                        "the watch of {} sent no event: {error}",
                        K::KIND.resource()
                    ));
                }
            };
            backoff.reset();
            if let Err(ended) = self.take(&event).await {
                return ended;
            }
        }
    }

    async fn take(&mut self, event: &RawEvent) -> Result<(), Ended> {
        if event.kind == EventKind::Error {
            return Err(failed::<K>("watch", &kube::Error::Api(Box::new(event.object.status()))));
        }
        if event.kind == EventKind::Bookmark {
            self.version = event.object.resource_version().or_else(|| self.version.take());
            return Ok(());
        }
        let read = event.object.read::<K>(self.node.fou_port);
        if let Some(version) = read.resource_version {
            self.version = Some(version);
        }
        match read.object {
            // A deletion counts whatever the object looks like.
            _ if event.kind == EventKind::Deleted => self.change(Change::Delete(read.name)).await,
            Ok(Some(object)) => self.change(Change::Apply(read.name, object)).await,
            Ok(None) => self.change(Change::Delete(read.name)).await,
            Err(malformed) => self.send(Message::Malformed(K::KIND, malformed)).await,
        }
    }

    async fn change(&self, change: Change<K::Object>) -> Result<(), Ended> {
        let listed = matches!(change, Change::Reset(_));
        let received = Monotonic::now();
        self.send(Message::Update { kind: K::KIND, update: Box::new(K::update(change)), listed, received })
            .await
    }

    async fn tell(&self, health: Health) -> Result<(), Ended> {
        self.send(Message::Health(K::KIND, health)).await
    }

    async fn send(&self, message: Message) -> Result<(), Ended> {
        self.out.send(message).await.map_err(|_| Ended::Unheard)
    }
}

/// What an error means, and what to do about it.
fn failed<K: Watched>(verb: &str, error: &kube::Error) -> Ended {
    let resource = K::KIND.resource();
    if let kube::Error::Api(status) = error {
        let message = &status.message;
        return match status.code {
            410 => Ended::Expired,
            401 => Ended::Failed(format!("cannot {verb} {resource}: not authenticated: {message}")),
            403 => Ended::Failed(format!(
                "cannot {verb} {resource}: {message}; the agent's ClusterRole must grant list and watch of {resource}"
            )),
            404 if K::KIND == super::Kind::Egress => Ended::Failed(format!(
                "cannot {verb} {resource}: Coil's custom resource v2 is not installed in this cluster ({message})"
            )),
            code => Ended::Failed(format!("cannot {verb} {resource}: {code} {message}")),
        };
    }
    Ended::Failed(format!("cannot {verb} {resource}: {}", chain(error)))
}

fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text.push_str(": ");
            text.push_str(&cause_text);
        }
        source = cause.source();
    }
    text
}

/// Starts a watch on the current runtime.
pub(super) fn spawn<K: Watched>(client: &Client, node: &Node, out: &mpsc::Sender<Message>) {
    let watch = Watch::<K>::new(client.clone(), node.clone(), out.clone());
    drop(tokio::task::spawn_local(watch.run()));
}
