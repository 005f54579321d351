//! What the demonstration found, as `--json` prints it.

use serde::{Deserialize, Serialize};

/// Version of the document; grows when a field changes its meaning or goes.
pub const VERSION: u32 = 1;

/// The whole.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Document {
    /// See [`VERSION`].
    pub version: u32,
    /// Whether every check passed.
    pub passed: bool,
    /// The Cilium that was modelled.
    pub cilium: String,
    /// How its model was attached: `tcx` or `clsact`.
    pub attached: String,
    /// Length of a bin of [`Lane::packets`], milliseconds.
    pub bin_ms: u64,
    /// What was played, in order. Times in a scene count from its start.
    pub scenes: Vec<Scene>,
    /// The picture that was written.
    pub picture: Option<String>,
}

/// One timeline.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Scene {
    /// What it shows.
    pub title: String,
    /// Its length, milliseconds.
    pub length_ms: f64,
    /// Its parts, in order.
    pub acts: Vec<Act>,
    /// Packets per bin, by kind of flow and backend.
    pub lanes: Vec<Lane>,
    /// What happened, in order.
    pub events: Vec<Event>,
}

/// A part of a scene.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Act {
    /// `off`, `reset`, `agent_killed` or `drain`.
    pub name: String,
    /// What it shows.
    pub title: String,
    /// Begin, milliseconds.
    pub from_ms: f64,
    /// End, milliseconds.
    pub to_ms: f64,
    /// Its packets.
    pub packets: Tally,
    /// Flows that should have left a backend, and whether they did.
    pub moves: Vec<Move>,
    /// Inner connections, in `drain`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub connections: Option<Connections>,
    /// What must hold.
    pub checks: Vec<Check>,
}

/// Packets, counted where they were sent and where they arrived.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tally {
    /// Sent by the client.
    pub sent: u64,
    /// Arrived nowhere.
    pub lost: u64,
    /// Arrived more than once.
    pub duplicated: u64,
    /// Got no answer from the service's address.
    pub unanswered: u64,
    /// Answers from other addresses in the whole stream.
    pub foreign_answers: u64,
}

/// A flow and the backend that it should leave.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Move {
    /// That backend.
    pub from: String,
    /// Where it went; nothing when it stayed.
    pub to: Option<String>,
    /// When the change was begun.
    pub changed_at_ms: f64,
    /// When the first packet arrived elsewhere.
    pub moved_at_ms: Option<f64>,
    /// Time between the two.
    pub took_ms: Option<f64>,
    /// Packets sent after the change was begun that arrived at the old backend.
    pub to_old_after_change: u64,
    /// Of these, the ones sent after everybody had been told.
    pub to_old_after_all_knew: u64,
}

/// Inner connections of the drain act.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Connections {
    /// The leaving backend.
    pub leaving: String,
    /// Packets of the old connection after the mark, and how many of them arrived at the leaving backend.
    pub old_sent_after_mark: u64,
    /// See above.
    pub old_stayed_after_mark: u64,
    /// Outer source ports under which the old connection's packets arrived, in order of appearance.
    pub old_source_ports: Vec<u16>,
    /// When the old connection's FIN arrived at the leaving backend.
    pub old_ended_at_ms: Option<f64>,
    /// New connections that were opened after the mark.
    pub new_after_mark: u64,
    /// Of these, the ones on the leaving backend: they were opened in its first moments.
    pub new_joined_leaving: u64,
    /// When the last of these was opened, after the mark.
    pub new_last_joined_after_ms: Option<f64>,
    /// When the first packet of a new connection arrived elsewhere, after the mark.
    pub new_moved_after_ms: Option<f64>,
    /// Connections whose packets arrived at more than one backend.
    pub torn: u64,
}

/// Packets of one kind of flow at one backend.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Lane {
    /// Which flows.
    pub flows: String,
    /// Whether these flows are to stay on a leaving pod.
    pub stays: bool,
    /// Name of the pod.
    pub backend: String,
    /// Since when the pod is Terminating.
    pub leaving_from_ms: Option<f64>,
    /// Since when it is gone.
    pub gone_from_ms: Option<f64>,
    /// Arrivals per bin.
    pub packets: Vec<u64>,
    /// Of these, packets that were sent after the pod was marked.
    pub packets_after_mark: Vec<u64>,
}

/// Something that happened.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Event {
    /// When, in the scene.
    pub at_ms: f64,
    /// Its kind.
    pub kind: EventKind,
    /// In words.
    pub text: String,
}

/// Kind of an [`Event`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EventKind {
    /// An act begins.
    Act,
    /// A pod was marked Terminating.
    Mark,
    /// A flow moved.
    Move,
    /// The Egress got another mode.
    Mode,
    /// The agent was killed.
    Kill,
    /// A connection ended, or a pod is gone.
    End,
}

/// What must hold.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Check {
    /// What must hold.
    pub name: String,
    /// Whether it does.
    pub passed: bool,
    /// What was seen.
    pub seen: String,
}

impl Check {
    /// A check and what was seen.
    #[must_use]
    pub fn new(name: &str, passed: bool, seen: impl Into<String>) -> Self {
        Self { name: name.to_owned(), passed, seen: seen.into() }
    }
}

impl Document {
    /// The checks that failed, with the act that they belong to.
    pub fn failures(&self) -> impl Iterator<Item = (&Act, &Check)> {
        let acts = self.scenes.iter().flat_map(|scene| &scene.acts);
        acts.flat_map(|act| act.checks.iter().filter(|check| !check.passed).map(move |check| (act, check)))
    }
}
