//! Carries out the plan: maps, programs, links and pins.
//!
//! ```text
//!           apply()                       worker thread
//! plan ──> [tables]  marks, services      [pods] namespaces, attach, replace, detach
//!              │      heartbeat           [binding] Cilium's maps, every 2 s
//!              └──────── own maps, pinned in <pin-dir>/v1 ────────┘
//! ```
//!
//! [`Datapath::apply`] writes the tables at once (one map write per changed backend, whatever the number of clients) and
//! hands the pods to a worker, which does everything slow. The worker tells what happened by [`Report`]s. What the
//! program tells comes as [`FlowEvent`]s.
//!
//! While an agent lives it holds an exclusive lock on the pin directory. Nothing is taken down when it ends: programs,
//! links and maps are pinned and go on guarding. When no Egress is guarded any more the last pod's program goes, then the
//! maps and the layout directory: an off state leaves nothing but the empty pin directory, and counters start anew with the
//! next guarded Egress.

mod error;
mod options;
mod report;
mod snapshot;

use std::{collections::BTreeMap, net::IpAddr, path::PathBuf};

pub use error::DatapathError;
pub use options::{AttachKind, Options, Sizes};
pub use report::{Attachment, BoundMap, FlowEvent, FlowEventKind, How, Report};
pub use snapshot::{MarkSnapshot, PodSnapshot, ServiceSnapshot, Snapshot};
use tokio::sync::mpsc::UnboundedReceiver;

use crate::{
    cilium::CiliumError,
    clock::Monotonic,
    plan::{CiliumView, Desired, EgressName, ServiceAddress},
};

/// The datapath of this node. Only one agent at a time has it.
#[derive(Debug)]
pub struct Datapath {}

/// Outcome of [`Datapath::try_open`].
#[derive(Debug)]
pub enum Opened {
    /// It is ours.
    Datapath(Datapath),
    /// Another agent holds the pin directory; try again (a lock is freed by its holder's death).
    Busy(PathBuf),
}

/// Outcome of [`Datapath::apply`].
#[derive(Debug, Default)]
pub struct Applied {
    /// Services whose entry was written (new, or another mode or flag).
    pub services: Vec<(ServiceAddress, EgressName)>,
    /// Number of map writes and removals.
    pub writes: usize,
    /// What could not be written; everything else was, and each is tried again with the next call.
    pub errors: Vec<DatapathError>,
    /// By when to call again even if the plan has not changed: marks, heartbeat and services are renewed by it.
    pub renew_by: Monotonic,
}

/// What a mark of an earlier agent says, for a plan that starts anew: without it a deadline would start anew too.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Remembered {
    /// Marks by address.
    pub marks: BTreeMap<IpAddr, MarkSnapshot>,
    /// Guarded services and their Egress.
    pub services: BTreeMap<ServiceAddress, ServiceSnapshot>,
}

/// State of the worker, for readiness and status.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// Pods that are wanted.
    pub wanted: usize,
    /// Pods of these that are attached.
    pub attached: usize,
    /// Pods of these whose last attempt failed.
    pub failing: usize,
    /// Whether Cilium's maps are bound; `None` before the first look.
    pub bound: Option<bool>,
    /// Whether the worker has looked at everything in the latest plan once.
    pub settled: bool,
}

/// Events of the program.
#[derive(Debug)]
pub struct Events {}

impl Events {
    /// The next event. Waits while there is none, and while nothing is guarded; cancel safe.
    ///
    /// # Errors
    ///
    /// When the ring cannot be opened or waited for.
    pub async fn next(&mut self) -> Result<FlowEvent, DatapathError> {
        todo!()
    }
}

impl Datapath {
    /// Takes the pin directory (making it if needed), reopens what is pinned, starts the worker.
    ///
    /// Neither Cilium's maps nor any pod need to exist. Needs a tokio runtime only for [`Events`].
    ///
    /// # Errors
    ///
    /// When the directory cannot be made, is not on a bpffs, or holds maps that are not of this layout.
    pub fn try_open(options: &Options) -> Result<Opened, DatapathError> {
        let _ = options;
        todo!()
    }

    /// What an earlier agent left pinned, as found by `try_open`.
    #[must_use]
    pub fn remembered(&self) -> &Remembered {
        todo!()
    }

    /// Makes the datapath as desired. Cheap when little has changed.
    ///
    /// Nothing at all is done before the first complete plan: what an earlier agent pinned stays as it is. Later,
    /// differences are always written, and marks, heartbeat and expiry renewed while the plan is complete.
    pub fn apply(&mut self, desired: &Desired, now: Monotonic) -> Applied {
        let _ = (desired, now);
        todo!()
    }

    /// Takes the channel of the worker's reports.
    ///
    /// # Panics
    ///
    /// When it is taken twice.
    pub fn take_reports(&mut self) -> UnboundedReceiver<Report> {
        todo!()
    }

    /// The program's events. One reader at a time: readers share the ring.
    #[must_use]
    pub fn events(&self) -> Events {
        todo!()
    }

    /// State of the worker.
    #[must_use]
    pub fn progress(&self) -> Progress {
        todo!()
    }

    /// The Egress behind an index of [`FlowEvent::egress`].
    #[must_use]
    pub fn egress_of(&self, index: u32) -> Option<EgressName> {
        let _ = index;
        todo!()
    }

    /// What Cilium's maps hold of the guarded services, for dropping marks. Call it now and then (every few seconds while
    /// there are marks of backends that are not ready), not on every change: it walks maps.
    ///
    /// # Errors
    ///
    /// When Cilium's maps are missing or have another layout; then no mark may be dropped.
    pub fn cilium_view(&self, desired: &Desired) -> Result<CiliumView, CiliumError> {
        let _ = desired;
        todo!()
    }

    /// Counters, marks, attachments.
    ///
    /// # Errors
    ///
    /// When a pinned map cannot be read.
    pub fn snapshot(&self) -> Result<Snapshot, DatapathError> {
        todo!()
    }
}

/// Removes everything of ours from the node: programs, links, filters, qdiscs that we added, maps, directories.
/// Gives a line for each thing removed.
///
/// # Errors
///
/// When another agent is running, or something cannot be removed; what can be is removed all the same.
pub fn cleanup(options: &Options) -> Result<Vec<String>, DatapathError> {
    let _ = options;
    todo!()
}
