//! Kubernetes events about Egresses, events.k8s.io/v1.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use k8s_openapi::{
    api::{
        core::v1::ObjectReference,
        events::v1::{Event, EventSeries},
    },
    apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta},
    jiff::Timestamp,
};
use kube::{
    Api, Client,
    api::{Patch, PatchParams, PostParams},
};
use serde_json::json;
use tokio::{sync::mpsc, time::timeout};

use super::ledger::Write;

/// Names the writer, as a qualified name.
const CONTROLLER: &str = "coil-guard.io/agent";
/// The API refuses a longer note.
const LONGEST_NOTE: usize = 1024;
/// The API refuses a longer name; the Egress's own may be that long.
const LONGEST_NAME: usize = 253;
/// Events are worth no longer wait.
const REQUEST: Duration = Duration::from_secs(10);

/// Writes events, one at a time, apart from the work of the agent: a slow API server must not hold that up.
#[derive(Debug)]
pub struct EventWriter {
    writes: mpsc::Sender<Write>,
}

/// Outcome of a write, for the metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// A new event.
    Created,
    /// An event was brought up to date.
    Patched,
    /// Neither.
    Failed,
}

impl EventWriter {
    /// Starts the writer on the current `LocalSet`. `report` is called with the outcome of each write.
    #[must_use]
    pub fn start(client: Client, node: String, report: impl Fn(Outcome) + 'static) -> Self {
        let (writes, mut queue) = mpsc::channel::<Write>(64);
        drop(tokio::task::spawn_local(async move {
            // Differs between agents and between an agent's lives, so that names do not collide.
            let started = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_micros();
            while let Some(write) = queue.recv().await {
                let name = event_name(&write, started);
                let outcome = match timeout(REQUEST, put(&client, &node, &name, &write)).await {
                    Ok(Ok(outcome)) => outcome,
                    Ok(Err(error)) => {
                        tracing::warn!(egress = %write.notice.egress, reason = write.notice.topic.reason(), %error,
                            "cannot write a Kubernetes event; the agent's ClusterRole must grant create and patch of \
                             events.events.k8s.io");
                        Outcome::Failed
                    }
                    Err(_) => {
                        tracing::warn!(egress = %write.notice.egress, reason = write.notice.topic.reason(),
                            "cannot write a Kubernetes event: no answer within 10 s");
                        Outcome::Failed
                    }
                };
                report(outcome);
            }
        }));
        Self { writes }
    }

    /// Queues a write. One that finds the queue full is dropped: its topic's next write carries its numbers.
    pub fn write(&self, write: Write) {
        if self.writes.try_send(write).is_err() {
            tracing::debug!("the queue of Kubernetes events is full");
        }
    }
}

fn event_name(write: &Write, started: u128) -> String {
    let suffix = format!(".{started:x}.{:x}", write.serial);
    let egress = &write.notice.egress.name;
    let room = LONGEST_NAME - suffix.len();
    format!("{}{suffix}", egress.get(..room).unwrap_or(egress))
}

async fn put(client: &Client, node: &str, name: &str, write: &Write) -> Result<Outcome, kube::Error> {
    let api: Api<Event> = Api::namespaced(client.clone(), &write.notice.egress.namespace);
    if write.again {
        // The API refuses a change of anything else, the note included: it keeps the numbers of its first seconds.
        let series = json!({"count": write.count, "lastObservedTime": MicroTime(Timestamp::now())});
        let patch = json!({"series": series});
        match api.patch(name, &PatchParams::default(), &Patch::Merge(patch)).await {
            Ok(_) => return Ok(Outcome::Patched),
            // It has expired, or its creation failed.
            Err(kube::Error::Api(status)) if status.code == 404 => {}
            Err(error) => return Err(error),
        }
    }
    api.create(&PostParams::default(), &event(node, name, write)).await?;
    Ok(Outcome::Created)
}

fn note(write: &Write) -> String {
    let mut note = write.note.clone();
    if note.len() > LONGEST_NOTE {
        let mut end = LONGEST_NOTE - '…'.len_utf8();
        while !note.is_char_boundary(end) {
            end -= 1;
        }
        note.truncate(end);
        note.push('…');
    }
    note
}

fn event(node: &str, name: &str, write: &Write) -> Event {
    let notice = &write.notice;
    let now = MicroTime(Timestamp::now());
    Event {
        metadata: ObjectMeta {
            name: Some(name.to_owned()),
            namespace: Some(notice.egress.namespace.to_string()),
            ..ObjectMeta::default()
        },
        action: Some(notice.topic.action().to_owned()),
        event_time: Some(now.clone()),
        note: Some(note(write)),
        reason: Some(notice.topic.reason().to_owned()),
        regarding: Some(ObjectReference {
            api_version: Some("coil.cybozu.com/v2".into()),
            kind: Some("Egress".into()),
            namespace: Some(notice.egress.namespace.to_string()),
            name: Some(notice.egress.name.to_string()),
            uid: Some(notice.egress_uid.clone()).filter(|uid| !uid.is_empty()),
            ..ObjectReference::default()
        }),
        reporting_controller: Some(CONTROLLER.to_owned()),
        reporting_instance: Some(node.to_owned()),
        series: (write.count > 1).then(|| EventSeries {
            count: i32::try_from(write.count).unwrap_or(i32::MAX),
            last_observed_time: now,
        }),
        type_: Some(if notice.topic.is_warning() { "Warning" } else { "Normal" }.to_owned()),
        ..Event::default()
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::ledger::{Notice, Topic},
        *,
    };
    use crate::plan::EgressName;

    fn write(name: &str, note: String) -> Write {
        let egress = EgressName { namespace: "net".into(), name: name.into() };
        let topic = Topic::NoLive(None);
        let notice = Notice { egress, egress_uid: "u".into(), topic, client: None, text: String::new() };
        Write { notice, note, count: 2, serial: 255, again: false }
    }

    #[test]
    fn names_and_notes_stay_within_what_the_api_takes() {
        let write = write(&"n".repeat(253), "é".repeat(800));
        let name = event_name(&write, u128::from(u64::MAX));
        assert_eq!(name.len(), 253);
        assert!(name.ends_with(".ffffffffffffffff.ff"));
        assert!(note(&write).len() <= 1024 && note(&write).ends_with('…'));
    }

    #[test]
    fn an_event_regards_the_egress() {
        let event = event("node-1", "nat.1", &write("nat", "no backend is live".into()));
        let regarding = event.regarding.unwrap();
        assert_eq!((regarding.kind.as_deref(), regarding.uid.as_deref()), (Some("Egress"), Some("u")));
        assert_eq!(event.reason.as_deref(), Some("NoLiveBackend"));
        assert_eq!(event.type_.as_deref(), Some("Warning"));
        assert_eq!(event.reporting_instance.as_deref(), Some("node-1"));
        assert_eq!(event.series.unwrap().count, 2);
    }
}
