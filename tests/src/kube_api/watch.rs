//! One watch: from the store's history to a stream of lines.

use std::{
    collections::BTreeMap,
    io,
    sync::{Arc, atomic::Ordering},
};

use axum::body::Bytes;
use futures::{Stream, stream};
use serde_json::{Value, json};
use tokio::{sync::watch, time::Instant};

use super::{
    State,
    calls::Counters,
    error::ApiError,
    faults::{Close, Delivery, Outage},
    kind::Kind,
    selector::Filter,
    server::Shared,
    store::{Change, Key},
};

/// What a watch was asked for, and where it stands.
pub(crate) struct Watch {
    pub(crate) kind: Kind,
    pub(crate) filter: Filter,
    /// Everything up to this revision has been sent.
    pub(crate) cursor: u64,
    pub(crate) bookmarks: bool,
    /// Send metadata only.
    pub(crate) partial: bool,
    pub(crate) deadline: Instant,
    /// Lines to send before anything else.
    pub(crate) initial: Vec<u8>,
    pub(crate) counters: Arc<Counters>,
}

struct Running {
    watch: Watch,
    shared: Arc<Shared>,
    changed: watch::Receiver<()>,
    /// How many of the closes, injected events and rounds of bookmarks came before.
    closes: usize,
    injected: usize,
    rounds: u64,
    next_bookmark: Instant,
    ended: bool,
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(running) = self.shared.lock().watches.get_mut(&self.watch.kind) {
            *running -= 1;
        }
    }
}

enum Step {
    Send(Vec<u8>),
    SendAndEnd(Vec<u8>),
    Break,
    Wait(Instant),
}

/// Runs a watch.
pub(crate) fn run(watch: Watch, shared: &Arc<Shared>) -> impl Stream<Item = io::Result<Bytes>> + use<> {
    let changed = shared.changed.subscribe();
    let mut state = shared.lock();
    *state.watches.entry(watch.kind).or_default() += 1;
    let running = Running {
        closes: state.faults.closes.len(),
        injected: state.faults.injected.len(),
        rounds: state.faults.bookmark_rounds,
        next_bookmark: Instant::now() + state.faults.bookmarks_every,
        ended: false,
        watch,
        changed,
        shared: Arc::clone(shared),
    };
    drop(state);
    stream::unfold(running, |mut running| async move { running.next().await.map(|item| (item, running)) })
}

impl Running {
    async fn next(&mut self) -> Option<io::Result<Bytes>> {
        if self.ended {
            return None;
        }
        if !self.watch.initial.is_empty() {
            let lines = std::mem::take(&mut self.watch.initial);
            return self.send(lines);
        }
        loop {
            // Before looking: what changes after this wakes the wait below.
            self.changed.borrow_and_update();
            match self.step() {
                Step::Send(lines) => return self.send(lines),
                Step::SendAndEnd(lines) => {
                    self.ended = true;
                    return if lines.is_empty() { None } else { self.send(lines) };
                }
                Step::Break => {
                    self.ended = true;
                    return Some(Err(io::Error::other("the watch was cut")));
                }
                Step::Wait(until) => {
                    tokio::select! {
                        gone = self.changed.changed() => {
                            if gone.is_err() {
                                return None;
                            }
                        }
                        () = tokio::time::sleep_until(until) => {}
                    }
                }
            }
        }
    }

    fn send(&self, lines: Vec<u8>) -> Option<io::Result<Bytes>> {
        self.watch.counters.bytes.fetch_add(lines.len() as u64, Ordering::Relaxed);
        Some(Ok(lines.into()))
    }

    fn step(&mut self) -> Step {
        let shared = Arc::clone(&self.shared);
        let state = shared.lock();
        let closes = &state.faults.closes;
        let close = closes[self.closes..].iter().find(|(kind, _)| kind.is_none_or(|k| k == self.watch.kind));
        match close {
            Some((_, Close::Clean)) => return Step::SendAndEnd(Vec::new()),
            Some((_, Close::Abrupt)) => return Step::Break,
            Some((_, Close::Expired)) => {
                let error = ApiError::expired(self.watch.cursor, state.store.revision());
                return Step::SendAndEnd(line("ERROR", &error.status()));
            }
            None => self.closes = closes.len(),
        }
        let now = Instant::now();
        let delivery = state.faults.delivery.get(&self.watch.kind).copied().unwrap_or_default();
        if delivery.held || state.faults.outage == Outage::Hang {
            return if now >= self.watch.deadline {
                Step::SendAndEnd(Vec::new())
            } else {
                Step::Wait(self.watch.deadline)
            };
        }
        let (mut lines, next_due) = match self.due(&state, delivery, now) {
            Ok(due) => due,
            Err(error) => return Step::SendAndEnd(line("ERROR", &error.status())),
        };
        for (kind, event) in &state.faults.injected[self.injected..] {
            if *kind == self.watch.kind {
                lines.extend(raw_line(event));
            }
        }
        self.injected = state.faults.injected.len();
        let over = now >= self.watch.deadline;
        let asked = self.rounds != state.faults.bookmark_rounds;
        self.rounds = state.faults.bookmark_rounds;
        if self.watch.bookmarks && (over || asked || now >= self.next_bookmark) {
            lines.extend(bookmark(self.watch.kind, self.watch.cursor, false));
        }
        if asked || now >= self.next_bookmark {
            self.next_bookmark = now + state.faults.bookmarks_every;
        }
        if over {
            return Step::SendAndEnd(lines);
        }
        if !lines.is_empty() {
            return Step::Send(lines);
        }
        Step::Wait(next_due.into_iter().fold(self.watch.deadline.min(self.next_bookmark), Instant::min))
    }

    /// The lines of what is due, and when more will be.
    fn due(
        &mut self,
        state: &State,
        delivery: Delivery,
        now: Instant,
    ) -> Result<(Vec<u8>, Option<Instant>), ApiError> {
        let mut next_due = None;
        let mut events = Vec::new();
        let mut cursor = self.watch.cursor;
        for change in state.store.since(self.watch.cursor)? {
            if change.key.kind == self.watch.kind {
                let due = Instant::from_std(change.at) + delivery.delay;
                if due > now {
                    next_due = Some(due);
                    break;
                }
                events.push(change.clone());
            }
            cursor = change.revision;
        }
        self.watch.cursor = cursor;
        let mut lines = Vec::new();
        for change in arrange(events, delivery) {
            if let Some((event, object)) = seen_through(&change, &self.watch.filter) {
                let copies = if delivery.duplicate { 2 } else { 1 };
                let object = if self.watch.partial { partial(&object) } else { object };
                lines.extend(line(event, &object).repeat(copies));
            }
        }
        Ok((lines, next_due))
    }
}

/// Coalesces and reorders, as the faults say.
fn arrange(changes: Vec<Change>, delivery: Delivery) -> Vec<Change> {
    if !delivery.coalesce && !delivery.newest_first {
        return changes;
    }
    let mut by_object: BTreeMap<Key, Vec<Change>> = BTreeMap::new();
    for change in changes {
        let of_object = by_object.entry(change.key.clone()).or_default();
        match of_object.last_mut() {
            Some(last) if delivery.coalesce => {
                let before = last.before.take();
                *last = Change { before, ..change };
            }
            _ => of_object.push(change),
        }
    }
    let mut groups: Vec<_> = by_object.into_values().collect();
    groups.sort_by_key(|group| group.last().map(|change| change.revision));
    if delivery.newest_first {
        groups.reverse();
        return groups.into_iter().flatten().collect();
    }
    groups.into_iter().flatten().collect()
}

/// The event that a watch with this filter gets. An object that leaves a selector is deleted as far as the watch goes.
fn seen_through(change: &Change, filter: &Filter) -> Option<(&'static str, Value)> {
    let before = change.before.as_ref().filter(|object| filter.matches(object));
    let after = change.after.as_ref().filter(|object| filter.matches(object));
    match (before, after) {
        (None, None) => None,
        (None, Some(after)) => Some(("ADDED", (**after).clone())),
        (Some(_), Some(after)) => Some(("MODIFIED", (**after).clone())),
        (Some(before), None) => {
            let mut object = (**before).clone();
            if let Some(metadata) = object["metadata"].as_object_mut() {
                metadata.insert("resourceVersion".into(), json!(change.revision.to_string()));
            }
            Some(("DELETED", object))
        }
    }
}

/// The metadata alone, as `PartialObjectMetadata`.
pub(crate) fn partial(object: &Value) -> Value {
    json!({"apiVersion": "meta.k8s.io/v1", "kind": "PartialObjectMetadata", "metadata": object["metadata"]})
}

/// A line of a watch's answer.
pub(crate) fn line(event: &str, object: &Value) -> Vec<u8> {
    raw_line(&json!({"type": event, "object": object}))
}

fn raw_line(event: &Value) -> Vec<u8> {
    let mut line = event.to_string().into_bytes();
    line.push(b'\n');
    line
}

/// A bookmark; `initial` ends the first part of a streaming list.
pub(crate) fn bookmark(kind: Kind, revision: u64, initial: bool) -> Vec<u8> {
    let info = kind.info();
    let mut metadata = json!({"resourceVersion": revision.to_string(), "creationTimestamp": null});
    if initial {
        metadata["annotations"] = json!({"k8s.io/initial-events-end": "true"});
    }
    line("BOOKMARK", &json!({"apiVersion": info.api_version(), "kind": info.kind, "metadata": metadata}))
}
