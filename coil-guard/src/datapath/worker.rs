//! The thread that does everything slow: namespaces, loading, attaching, watching Cilium's maps.
//!
//! [`binding`] keeps the core programs on Cilium's present maps, [`attaching`] does what the plan wants, [`watching`] looks at
//! what others can change in the pods, and this is the loop around them. It
//! sleeps until there is a new plan, a file appears among the namespaces, or one of its own times comes.

mod attaching;
mod binding;
mod watching;

use std::{
    collections::BTreeMap,
    fs,
    os::fd::AsFd as _,
    sync::Arc,
    time::{Duration, Instant},
};

use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::inotify::{AddWatchFlags, InitFlags, Inotify},
};
use tokio::sync::mpsc::UnboundedSender;

use super::{
    Attachment, DatapathError, Options, Progress, Report,
    cores::{Core, Cores},
    layout::{Layout, remove_tree},
    mailbox::{Mailbox, Wanted},
    namespaces::Namespaces,
    own_maps::open_own,
    part::{Key, Part},
    program::Binding,
    records::{Attached, PODS, Pods},
    replies::Returning,
    stub::Stubs,
};
use crate::{clock::Monotonic, plan::Want};

/// How often the ids behind Cilium's pins are compared.
const BINDING_INTERVAL: Duration = Duration::from_secs(2);
/// How often attachments are looked at.
const CHECK_INTERVAL: Duration = Duration::from_secs(5);
/// First wait after a failed attempt; doubled with each further one.
const FIRST_RETRY: Duration = Duration::from_millis(50);
/// A namespace's file appears before the namespace is mounted on it, and that before the pod has its address.
const AFTER_NEW_FILE: Duration = Duration::from_millis(20);

/// What is known of a part of a pod.
#[derive(Debug, Default)]
struct Pod {
    attached: Option<Attached>,
    /// It was attached and somebody took that away.
    lost: bool,
    /// This agent has seen that its stub is the one that is wanted.
    stands: bool,
    attempts: u32,
    retry_at: Option<Instant>,
    last_error: Option<String>,
    /// It waits for its core.
    no_core: bool,
    /// The kernel refused its stub the last time.
    refused: bool,
}

/// State of the binding, as last reported.
#[derive(Debug, PartialEq, Eq)]
enum Bound {
    Unknown,
    Yes,
    /// With the text of the error.
    No(String),
}

/// The worker.
#[derive(Debug)]
pub(crate) struct Worker {
    mailbox: Arc<Mailbox>,
    options: Options,
    layout: Layout,
    reports: UnboundedSender<Report>,
    namespaces: Namespaces,
    files: Option<Inotify>,
    records: Option<Pods>,
    cores: Option<Cores>,
    stubs: Option<Stubs>,
    pods: BTreeMap<Key, Pod>,
    returning: Option<Returning>,
    binding: Option<Binding>,
    bound: Bound,
    /// The binding is one of which it was told.
    told_bound: bool,
    binding_at: Instant,
    check_at: Instant,
    no_tcx: bool,
    others_retired: bool,
    /// An own map that had no pin at the last look.
    unpinned: Option<&'static str>,
    /// The last plan of which it was told that everything in it was looked at.
    told_settled: u64,
    /// What the last step failed of, told once.
    problem: Option<String>,
}

impl Worker {
    pub(crate) fn new(mailbox: Arc<Mailbox>, options: Options, reports: UnboundedSender<Report>) -> Self {
        let now = Instant::now();
        Self {
            layout: Layout::new(&options.pin_directory),
            namespaces: Namespaces::new(&options.namespace_directory),
            mailbox,
            options,
            reports,
            files: None,
            records: None,
            cores: None,
            stubs: None,
            pods: BTreeMap::new(),
            returning: None,
            binding: None,
            bound: Bound::Unknown,
            told_bound: false,
            binding_at: now,
            check_at: now,
            no_tcx: false,
            others_retired: false,
            unpinned: None,
            told_settled: 0,
            problem: None,
        }
    }

    /// Works until the mailbox says stop.
    pub(crate) fn run(mut self) {
        let mut looked_at = 0;
        while let Some((version, wanted)) = self.mailbox.latest() {
            if version != 0 {
                let problem =
                    self.step(version, &wanted, version != looked_at).err().map(|error| error.to_string());
                if let Some(text) = problem.as_ref().filter(|text| self.problem.as_ref() != Some(text)) {
                    self.warn(text.clone());
                }
                self.problem = problem;
                looked_at = version;
            }
            self.sleep(version, &wanted);
        }
    }

    fn report(&self, report: Report) {
        // Nobody listens while the agent is ending.
        let _ = self.reports.send(report);
    }

    fn warn(&self, text: String) {
        self.report(Report::Warning(text));
    }

    fn step(&mut self, version: u64, wanted: &Wanted, is_new: bool) -> Result<(), DatapathError> {
        if !self.recall()? {
            // Nothing is pinned, or only the rest of what could not be removed.
            if !wanted.guarding {
                self.tear_down(version)?;
                self.retire_other_versions(wanted)?;
            }
            self.mailbox
                .set_progress(version, Progress { settled: !wanted.guarding, ..self.progress(wanted) });
            return Ok(());
        }
        // What could not be detached is tried again with each look at the attachments, and there are none without a guard.
        if is_new || !wanted.guarding {
            self.detach_unwanted(wanted);
        }
        if !wanted.guarding {
            if self.pods.values().all(|pod| pod.attached.is_none()) {
                self.tear_down(version)?;
                self.retire_other_versions(wanted)?;
            }
            self.mailbox.set_progress(version, Progress { settled: true, ..self.progress(wanted) });
            return Ok(());
        }
        if Instant::now() >= self.binding_at {
            self.binding_at = Instant::now() + BINDING_INTERVAL;
            self.bind()?;
        }
        if Instant::now() >= self.check_at {
            self.check_at = Instant::now() + CHECK_INTERVAL;
            self.check(wanted);
            self.detach_unwanted(wanted);
        }
        // Loading takes a while: what is known already is told before.
        let settled = self.told_settled == version;
        self.mailbox.set_progress(version, Progress { settled, ..self.progress(wanted) });
        self.load_cores(wanted)?;
        let finished = self.attach_wanted(version, wanted);
        if finished {
            self.retire_other_versions(wanted)?;
        }
        self.mailbox.set_progress(version, Progress { settled: finished, ..self.progress(wanted) });
        if finished && !settled {
            self.told_settled = version;
            self.report(Report::Settled);
        }
        Ok(())
    }

    fn progress(&self, wanted: &Wanted) -> Progress {
        // Without its reply parts a pod is guarded all the same.
        let guards = || wanted.targets.keys().filter(|key| key.part == Part::Guard);
        let wanted_pods = || guards().filter_map(|key| self.pods.get(key));
        Progress {
            wanted: guards().count(),
            attached: wanted_pods().filter(|pod| pod.attached.is_some()).count(),
            failing: wanted_pods().filter(|pod| pod.last_error.is_some()).count(),
            bound: match self.bound {
                Bound::Unknown => None,
                Bound::Yes => Some(true),
                Bound::No(_) => Some(false),
            },
            refused: wanted_pods()
                .find(|pod| pod.refused)
                .and_then(|pod| pod.last_error.clone())
                .or_else(|| self.cores.as_ref()?.refusal().map(str::to_owned)),
            settled: false,
        }
    }

    /// Opens the records, with what an earlier agent attached. `false` when there are none, because nothing is guarded.
    fn recall(&mut self) -> Result<bool, DatapathError> {
        if self.records.is_some() {
            return Ok(true);
        }
        let Some(map) = open_own(&self.layout, PODS)? else { return Ok(false) };
        let records = Pods::new(map)?;
        self.cores = Cores::open(&self.layout)?;
        self.stubs = Some(Stubs::new(&self.layout)?);
        self.returning = Returning::open(&self.layout)?;
        for (key, attached) in records.load()? {
            self.pods.insert(key, Pod { attached: Some(attached), ..Pod::default() });
        }
        for key in self.layout.pinned_links()? {
            // Pinned by an agent that died before it wrote the record.
            let core = Core::of_part(key.part);
            self.pods.entry(key).or_insert_with(|| Pod {
                attached: Some(Attached {
                    name: String::new(),
                    attachment: Attachment::Tcx,
                    namespace: 0,
                    interface_index: 0,
                    program_id: 0,
                    guarded_since: Monotonic::now(),
                    qdisc_added: false,
                    ports_overlap: false,
                    addresses: Vec::new(),
                    core,
                    stub: 0,
                }),
                ..Pod::default()
            });
        }
        self.records = Some(records);
        Ok(true)
    }

    /// Removes the maps and the directory of this layout, unless an Egress is guarded again by now.
    fn tear_down(&mut self, version: u64) -> Result<(), DatapathError> {
        let mailbox = Arc::clone(&self.mailbox);
        let mut tables = mailbox.tables();
        if mailbox.is_newer(version) {
            return Ok(());
        }
        *tables = None;
        mailbox.maps_changed();
        self.records = None;
        self.cores = None;
        self.stubs = None;
        self.binding = None;
        self.bound = Bound::Unknown;
        self.binding_at = Instant::now();
        self.returning = None;
        self.unpinned = None;
        self.pods.clear();
        remove_tree(self.layout.directory(), &mut Vec::new())
    }

    /// Removes what agents of other layout versions left, once everything wanted is attached by this one: until then theirs
    /// go on guarding.
    fn retire_other_versions(&mut self, wanted: &Wanted) -> Result<(), DatapathError> {
        let attached = |key: &Key| self.pods.get(key).is_some_and(|pod| pod.attached.is_some());
        let missing =
            wanted.targets.iter().any(|(key, target)| target.want == Want::Attached && !attached(key));
        if self.others_retired || missing {
            return Ok(());
        }
        self.others_retired = true;
        for directory in self.layout.other_versions()? {
            remove_tree(&directory, &mut Vec::new())?;
            self.warn(format!("removed {}, left by another version", directory.display()));
        }
        Ok(())
    }

    fn sleep(&mut self, version: u64, wanted: &Wanted) {
        let now = Instant::now();
        let mut until = now + CHECK_INTERVAL;
        if version != 0 && wanted.guarding {
            // A step that failed half-way has not come to these; nothing that it failed of comes good at once.
            let failed = self.problem.is_some() || self.records.is_none();
            let earliest = if failed { now + BINDING_INTERVAL } else { now };
            until = until.min(self.binding_at.min(self.check_at).max(earliest));
            // Without a binding nothing is attached, however long it has been due.
            if self.bound == Bound::Yes {
                let cores = self.cores.as_ref().and_then(Cores::retry_at);
                until = [self.next_retry(wanted), cores].into_iter().flatten().fold(until, Instant::min);
            }
        }
        if self.mailbox.is_newer(version) {
            until = now;
        }
        self.watch_files();
        let timeout = until.saturating_duration_since(now);
        // Rounded up: a wait that ends a little early would come back here with nothing to do.
        let millis = u16::try_from(timeout.as_millis() + 1).unwrap_or(u16::MAX);
        let timeout = if timeout.is_zero() { PollTimeout::ZERO } else { PollTimeout::from(millis) };
        let mut fds = vec![PollFd::new(self.mailbox.wake.as_fd(), PollFlags::POLLIN)];
        fds.extend(self.files.as_ref().map(|files| PollFd::new(files.as_fd(), PollFlags::POLLIN)));
        // An interrupted wait is as good as one that ended.
        let _ = poll(&mut fds, timeout);
        let new_files = fds.get(1).and_then(PollFd::any).unwrap_or(false);
        drop(fds);
        let _ = self.mailbox.wake.read();
        if new_files {
            if let Some(files) = &self.files {
                while files.read_events().is_ok_and(|events| !events.is_empty()) {}
            }
            self.retry_soon();
        }
    }

    fn next_retry(&self, wanted: &Wanted) -> Option<Instant> {
        let retries = wanted.targets.iter().filter_map(|(key, target)| {
            let pod = self.pods.get(key)?;
            if pod.attached.is_none() && target.want == Want::WhileTunnelled { None } else { pod.retry_at }
        });
        retries.min()
    }

    /// A new namespace may be that of a pod that could not be found.
    fn retry_soon(&mut self) {
        let soon = Instant::now() + AFTER_NEW_FILE;
        for pod in self.pods.values_mut().filter(|pod| pod.attached.is_none() && pod.retry_at.is_some()) {
            pod.attempts = pod.attempts.min(1);
            pod.retry_at = pod.retry_at.min(Some(soon));
        }
    }

    fn watch_files(&mut self) {
        if self.files.is_some() || fs::metadata(&self.options.namespace_directory).is_err() {
            return;
        }
        let flags = InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK;
        let events = AddWatchFlags::IN_CREATE | AddWatchFlags::IN_MOVED_TO | AddWatchFlags::IN_ATTRIB;
        self.files = Inotify::init(flags)
            .and_then(|inotify| inotify.add_watch(&self.options.namespace_directory, events).map(|_| inotify))
            .ok();
    }
}
