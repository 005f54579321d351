//! Carries out the plan: maps, programs, links and pins.
//!
//! ```text
//!           apply()                       worker thread
//! plan ──> [tables]  marks, services      [pods] namespaces, attach, replace, detach
//!              │      heartbeat           [binding] Cilium's maps, every 2 s
//!              └──────── own maps, pinned in <pin-dir>/v2 ────────┘
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

mod attach;
mod cleanup;
mod cores;
mod diff;
mod error;
mod events;
mod given_ports;
mod layout;
mod mailbox;
mod namespaces;
mod netlink;
mod options;
mod own_maps;
mod part;
mod pods;
mod program;
mod records;
mod replies;
mod report;
mod snapshot;
mod stub;
pub(crate) mod sys;
mod tables;
mod worker;

use std::{
    collections::{BTreeMap, BTreeSet},
    mem,
    net::IpAddr,
    path::PathBuf,
    sync::Arc,
    thread::{self, JoinHandle},
};

pub use cleanup::{Cleanup, cleanup};
pub use error::DatapathError;
pub use events::Events;
pub use given_ports::GivenPort;
pub use namespaces::count_namespaces;
pub use options::{AttachKind, Options, Sizes};
pub use part::Part;
pub use program::{OBJECT, STUB_OBJECT, try_load};
pub use replies::{REPLIES_OBJECT, ReplySnapshot};
pub use report::{Attachment, BoundMap, FlowEvent, FlowEventKind, How, Report};
pub use snapshot::{LastMove, MarkSnapshot, PodSnapshot, ServiceSnapshot, Snapshot, draining};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use self::{
    layout::{Layout, Lock, file_error},
    mailbox::{Mailbox, Wanted},
    tables::Tables,
    worker::Worker,
};
use crate::{
    cilium::{CiliumError, CiliumMaps},
    clock::Monotonic,
    plan::{Changes, CiliumView, Desired, EgressName, ServiceAddress},
};

/// The datapath of this node. Only one agent at a time has it. Dropping it ends the worker and leaves everything attached.
#[derive(Debug)]
pub struct Datapath {
    options: Options,
    layout: Layout,
    mailbox: Arc<Mailbox>,
    worker: Option<JoinHandle<()>>,
    reports: Option<UnboundedReceiver<Report>>,
    warnings: UnboundedSender<Report>,
    remembered: Remembered,
    /// Whether there was a complete plan.
    began: bool,
    /// The next plan is to be compared with what is there, and not with the last one.
    whole: bool,
    _lock: Lock,
}

/// Outcome of [`Datapath::try_open`].
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "there is one of it, and it is taken apart at once")]
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
#[derive(Clone, Debug, Default, PartialEq, Eq)]
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
    /// Why the kernel refuses a program that one of these pods needs, while it does.
    pub refused: Option<String>,
    /// Whether the worker has looked at everything in the latest plan once.
    pub settled: bool,
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
        let Some(lock) = layout::lock(&options.pin_directory)? else {
            return Ok(Opened::Busy(options.pin_directory.clone()));
        };
        if !program::is_built_in() {
            return Err(DatapathError::NoProgram);
        }
        let layout = Layout::new(&options.pin_directory);
        let (warnings, reports) = unbounded_channel();
        let mut tables = None;
        let mut remembered = Remembered::default();
        if layout.directory().exists() {
            let (opened, notes) = Tables::open(&layout, &options.sizes)?;
            notes.into_iter().for_each(|note| drop(warnings.send(Report::Warning(note))));
            remembered = opened.remembered();
            tables = Some(opened);
        }
        let mailbox = Arc::new(Mailbox::new(tables)?);
        let worker = Worker::new(Arc::clone(&mailbox), options.clone(), warnings.clone());
        let worker = thread::Builder::new()
            .name("datapath".to_owned())
            .spawn(move || worker.run())
            .map_err(file_error("start", "the datapath thread".as_ref()))?;
        Ok(Opened::Datapath(Self {
            options: options.clone(),
            layout,
            mailbox,
            worker: Some(worker),
            reports: Some(reports),
            warnings,
            remembered,
            began: false,
            whole: true,
            _lock: lock,
        }))
    }

    /// What an earlier agent left pinned, as found by `try_open`.
    #[must_use]
    pub fn remembered(&self) -> &Remembered {
        &self.remembered
    }

    /// Makes the datapath as desired, whatever it is now.
    ///
    /// Nothing at all is done before the first complete plan: what an earlier agent pinned stays as it is. Later,
    /// differences are always written, and marks, heartbeat and expiry renewed while the plan is complete.
    pub fn apply(&mut self, desired: &Desired, now: Monotonic) -> Applied {
        self.whole = true;
        self.apply_changes(desired, &Changes::default(), now)
    }

    /// As [`Self::apply`], where nothing else differs from what was desired the last time. Looks at nothing else either, but
    /// for what could not be done then.
    pub fn apply_changes(&mut self, desired: &Desired, changes: &Changes, now: Monotonic) -> Applied {
        let mut applied =
            Applied { renew_by: now.saturating_add(diff::HEARTBEAT_RENEWAL), ..Applied::default() };
        self.began |= desired.complete;
        if !self.began {
            self.whole = true;
            return applied;
        }
        let mut tables = self.mailbox.tables();
        if tables.is_none() && desired.is_guarding() {
            match Tables::open(&self.layout, &self.options.sizes) {
                Ok((opened, notes)) => {
                    notes.into_iter().for_each(|note| drop(self.warnings.send(Report::Warning(note))));
                    *tables = Some(opened);
                    self.mailbox.maps_changed();
                }
                Err(error) => {
                    self.whole = true;
                    applied.errors.push(error);
                    return applied;
                }
            }
        }
        let whole = mem::take(&mut self.whole);
        if let Some(tables) = &mut *tables {
            applied = tables.apply(desired, Some(changes).filter(|_| !whole), now);
        }
        if whole || changes.pods || changes.services.is_some() {
            // Still under the lock: the worker must not take the tables away for a plan that this one replaces.
            self.mailbox.put(Wanted::from(desired));
        }
        drop(tables);
        applied
    }

    /// Takes the channel of the worker's reports.
    ///
    /// # Panics
    ///
    /// When it is taken twice.
    pub fn take_reports(&mut self) -> UnboundedReceiver<Report> {
        self.reports.take().expect("the reports are taken once")
    }

    /// The program's events. One reader at a time: readers share the ring.
    #[must_use]
    pub fn events(&self) -> Events {
        Events::new(self.layout.clone(), self.mailbox.epoch())
    }

    /// State of the worker.
    #[must_use]
    pub fn progress(&self) -> Progress {
        self.mailbox.progress()
    }

    /// The Egress behind an index of [`FlowEvent::egress`].
    #[must_use]
    pub fn egress_of(&self, index: u32) -> Option<EgressName> {
        self.mailbox.tables().as_ref()?.egress_of(index)
    }

    /// What Cilium's maps hold in the slots of these services, and whether it has these addresses at all.
    ///
    /// # Errors
    ///
    /// When Cilium's maps are missing or have another layout; then no mark may be dropped.
    pub fn cilium_view(
        &self,
        services: &[ServiceAddress],
        addresses: &BTreeSet<IpAddr>,
    ) -> Result<CiliumView, CiliumError> {
        crate::cilium::view(CiliumMaps::open(&self.options.cilium_directory)?, services, addresses)
    }

    /// Counters, marks, attachments.
    ///
    /// # Errors
    ///
    /// When a pinned map cannot be read.
    pub fn snapshot(&self) -> Result<Snapshot, DatapathError> {
        Snapshot::read(&self.options.pin_directory)
    }
}

impl Drop for Datapath {
    fn drop(&mut self) {
        self.mailbox.stop();
        if let Some(worker) = self.worker.take() {
            // The lock must outlive the worker; one that panicked has said so itself.
            let _ = worker.join();
        }
    }
}
