//! What the caller and the worker share: the latest plan, and how far the worker is with it.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use nix::sys::eventfd::{EfdFlags, EventFd};
use tokio::sync::watch;

use super::{
    DatapathError, Progress,
    cores::Core,
    layout::file_error,
    part::{Key, Part},
    pods::Target,
    tables::Tables,
};
use crate::plan::{Desired, Want};

/// The worker's part of the plan.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Wanted {
    /// Whether there is anything to do on this node.
    pub(crate) guarding: bool,
    /// What is to be attached.
    pub(crate) targets: BTreeMap<Key, Target>,
    /// ClusterIPs, to see which pods have a tunnel to one.
    pub(crate) services: BTreeSet<IpAddr>,
}

impl From<&Desired> for Wanted {
    fn from(desired: &Desired) -> Self {
        let mut targets = BTreeMap::new();
        let guarding = desired.is_guarding();
        for (uid, client) in desired.pods.iter().filter(|_| guarding) {
            let target = Target {
                name: format!("{}/{}", client.namespace, client.name),
                addresses: client.addresses.clone(),
                core: Core::of(client),
                want: client.want,
            };
            if client.symmetric {
                let target = Target { core: Core::of_part(Part::Return), ..target.clone() };
                targets.insert(Key::new(uid, Part::Return), target);
            }
            targets.insert(Key::new(uid, Part::Guard), target);
        }
        for (uid, pod) in &desired.egress_pods {
            for part in [Part::Learn, Part::Answer] {
                let target = Target {
                    name: format!("{}/{}", pod.namespace, pod.name),
                    addresses: pod.addresses.clone(),
                    core: Core::of_part(part),
                    want: Want::Attached,
                };
                targets.insert(Key::new(uid, part), target);
            }
        }
        Self { guarding, targets, services: desired.services.keys().map(|service| service.address).collect() }
    }
}

#[derive(Debug, Default)]
struct Slot {
    /// 0 before the first plan.
    version: u64,
    wanted: Arc<Wanted>,
    stop: bool,
}

/// Latest plan wins: one that was not looked at yet is replaced.
#[derive(Debug)]
pub(crate) struct Mailbox {
    slot: Mutex<Slot>,
    progress: Mutex<Progress>,
    /// The own maps; none while nothing is guarded. The worker takes them away when the last pod is detached.
    tables: Mutex<Option<Tables>>,
    /// Counts the times that the own maps were made or removed.
    epoch: watch::Sender<u64>,
    pub(crate) wake: EventFd,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Each value is replaced as a whole, so one left by a panic is as good as any.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Mailbox {
    pub(crate) fn new(tables: Option<Tables>) -> Result<Self, DatapathError> {
        let wake = EventFd::from_value_and_flags(0, EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)
            .map_err(|errno| file_error("make", "an eventfd".as_ref())(errno.into()))?;
        Ok(Self {
            slot: Mutex::default(),
            progress: Mutex::default(),
            tables: Mutex::new(tables),
            epoch: watch::Sender::new(0),
            wake,
        })
    }

    pub(crate) fn tables(&self) -> MutexGuard<'_, Option<Tables>> {
        lock(&self.tables)
    }

    /// Says that the own maps were made or removed.
    pub(crate) fn maps_changed(&self) {
        self.epoch.send_modify(|epoch| *epoch += 1);
    }

    pub(crate) fn epoch(&self) -> watch::Receiver<u64> {
        self.epoch.subscribe()
    }

    /// Leaves a plan for the worker, if it differs from the last one.
    pub(crate) fn put(&self, wanted: Wanted) {
        let mut slot = lock(&self.slot);
        if slot.version != 0 && *slot.wanted == wanted {
            return;
        }
        slot.version += 1;
        let mut progress = lock(&self.progress);
        progress.settled = false;
        progress.wanted = wanted.targets.keys().filter(|key| key.part == Part::Guard).count();
        slot.wanted = Arc::new(wanted);
        drop((slot, progress));
        self.wake();
    }

    /// The latest plan and its number, or `None` when the worker should end.
    pub(crate) fn latest(&self) -> Option<(u64, Arc<Wanted>)> {
        let slot = lock(&self.slot);
        (!slot.stop).then(|| (slot.version, Arc::clone(&slot.wanted)))
    }

    /// Whether there is something newer than `version`.
    pub(crate) fn is_newer(&self, version: u64) -> bool {
        let slot = lock(&self.slot);
        slot.stop || slot.version != version
    }

    pub(crate) fn stop(&self) {
        lock(&self.slot).stop = true;
        self.wake();
    }

    fn wake(&self) {
        // It can only fail when the counter is about to overflow, and then the worker is awake already.
        let _ = self.wake.write(1);
    }

    pub(crate) fn progress(&self) -> Progress {
        lock(&self.progress).clone()
    }

    /// Says how far the worker is with plan `version`; ignored when there is a newer one.
    pub(crate) fn set_progress(&self, version: u64, progress: Progress) {
        let slot = lock(&self.slot);
        if slot.version == version {
            *lock(&self.progress) = progress;
        }
    }
}
