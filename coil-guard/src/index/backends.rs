//! What is known of each backend of an Egress, from its slices and its pods together.
//!
//! The two watches are independent streams: either may be the first to say that a pod is leaving, one event can carry
//! several changes, and an intermediate state may never be seen. So the state is worked out afresh from what both say
//! now; only since when it has been so is carried over.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    time::Duration,
};

use super::{
    Uid,
    objects::{EgressPod, Endpoint, ObjectName},
};
use crate::{
    clock::Monotonic,
    plan::{MarkState, Recovered},
};

/// An endpoint that moves from one slice to another may be in neither for a moment. A pod that is alive and selected is
/// given this long to turn up again before its address counts as gone; it gets no new flows meanwhile.
pub const SETTLE: Duration = Duration::from_secs(1);

/// What the API server fills in when a pod spec names none.
const DEFAULT_GRACE: Duration = Duration::from_secs(30);

/// An address, and the pod that has it: an address can pass from one pod to another.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BackendKey {
    /// The address.
    pub address: IpAddr,
    /// UID of the pod; `None` for an endpoint without one, and for an address that only Cilium knows.
    pub pod: Option<Uid>,
}

/// State of a backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum BackendState {
    /// A ready endpoint.
    Ready,
    /// An endpoint that is not ready.
    NotReady,
    /// Its pod is being deleted.
    Leaving,
    /// In no slice, while its pod is alive and selected. Gone after [`SETTLE`].
    Settling,
    /// In no slice, or its pod has ended.
    Gone,
}

/// A backend.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Backend {
    /// Its state.
    pub state: BackendState,
    /// When the agent first saw it so.
    pub since: Monotonic,
    /// Of a leaving one: whether it still passes its readiness probe.
    pub serving: bool,
    /// Of a leaving one: how long it may take from `since`.
    pub grace: Duration,
}

/// The backends of one Egress.
pub type Backends = BTreeMap<BackendKey, Backend>;

/// Egress pods by UID, and those that are known to be no more.
pub(super) struct Pods<'a> {
    pub(super) by_uid: &'a BTreeMap<Uid, ObjectName>,
    pub(super) by_name: &'a BTreeMap<ObjectName, EgressPod>,
    pub(super) deleted: &'a BTreeMap<Uid, Monotonic>,
}

impl Pods<'_> {
    pub(super) fn get(&self, uid: Option<&Uid>) -> Option<&EgressPod> {
        self.by_name.get(self.by_uid.get(uid?)?)
    }

    fn has_ended(&self, uid: Option<&Uid>) -> bool {
        uid.is_some_and(|uid| self.deleted.contains_key(uid)) || self.get(uid).is_some_and(|pod| pod.finished)
    }
}

/// Conditions of one pod over all its endpoints. Slices lag behind one another, so ready in any is ready; and a pod's
/// deletion is never taken back, so terminating in any is terminating.
#[derive(Clone, Copy, Default)]
struct Conditions {
    ready: bool,
    serving: bool,
    terminating: bool,
}

/// The backends of `egress` as of `now`.
#[expect(single_use_lifetimes, reason = "an anonymous lifetime in impl Trait is not stable")]
pub(super) fn observe<'a>(
    egress: &ObjectName,
    previous: &Backends,
    endpoints: impl Iterator<Item = &'a Endpoint>,
    pods: &Pods<'_>,
    recovered: &BTreeMap<IpAddr, Recovered>,
    now: Monotonic,
) -> Backends {
    let mut listed: BTreeMap<BackendKey, Conditions> = BTreeMap::new();
    let mut by_pod: BTreeMap<&Uid, Conditions> = BTreeMap::new();
    let join = |conditions: &mut Conditions, endpoint: &Endpoint| {
        conditions.ready |= endpoint.ready;
        conditions.serving |= endpoint.serving;
        conditions.terminating |= endpoint.terminating;
    };
    for endpoint in endpoints {
        for address in endpoint.addresses.iter() {
            join(
                listed.entry(BackendKey { address: *address, pod: endpoint.pod.clone() }).or_default(),
                endpoint,
            );
        }
        if let Some(uid) = &endpoint.pod {
            join(by_pod.entry(uid).or_default(), endpoint);
        }
    }
    for (uid, conditions) in &by_pod {
        // The slices of the two families are written one after the other: what one of them says of a leaving pod holds
        // for every address of the pod. Of one that has ended only what it was known to have counts.
        let is_leaving = |pod: &&EgressPod| !pod.finished && (pod.deleting || conditions.terminating);
        if let Some(pod) = pods.get(Some(uid)).filter(is_leaving) {
            for address in pod.addresses.iter() {
                listed.entry(BackendKey { address: *address, pod: Some((*uid).clone()) }).or_default();
            }
        }
    }
    for (key, of_key) in &mut listed {
        if let Some(conditions) = key.pod.as_ref().and_then(|uid| by_pod.get(uid)) {
            *of_key = *conditions;
        }
    }

    let keys: BTreeSet<&BackendKey> = listed.keys().chain(previous.keys()).collect();
    // Collected, and not inserted one by one, so that the map's nodes are full.
    let of_key = |key: &BackendKey| {
        let pod = pods.get(key.pod.as_ref());
        let before = previous.get(key);
        let state = match listed.get(key) {
            _ if pods.has_ended(key.pod.as_ref()) => BackendState::Gone,
            Some(conditions) if conditions.terminating || pod.is_some_and(|pod| pod.deleting) => {
                BackendState::Leaving
            }
            Some(conditions) if conditions.ready => BackendState::Ready,
            Some(_) => BackendState::NotReady,
            None if may_come_back(egress, key, before, pod) => BackendState::Settling,
            None => BackendState::Gone,
        };
        let backend = Backend {
            state,
            since: since(key, state, before, recovered, now),
            serving: listed.get(key).is_some_and(|conditions| conditions.serving),
            grace: pod.map_or_else(|| before.map_or(DEFAULT_GRACE, |before| before.grace), |pod| pod.grace),
        };
        (key.clone(), backend)
    };
    let mut backends: Backends = keys.into_iter().map(of_key).collect();
    align_leaving(&mut backends);
    drop_superseded(&mut backends);
    backends
}

fn may_come_back(
    egress: &ObjectName,
    key: &BackendKey,
    before: Option<&Backend>,
    pod: Option<&EgressPod>,
) -> bool {
    before.is_some_and(|before| !matches!(before.state, BackendState::Leaving | BackendState::Gone))
        && pod.is_some_and(|pod| {
            !pod.deleting
                && pod.ready
                && pod.addresses.contains(&key.address)
                && pod.egress.as_ref().is_none_or(|of_pod| of_pod == egress)
        })
}

fn since(
    key: &BackendKey,
    state: BackendState,
    before: Option<&Backend>,
    recovered: &BTreeMap<IpAddr, Recovered>,
    now: Monotonic,
) -> Monotonic {
    if let Some(before) = before.filter(|before| before.state == state) {
        return before.since;
    }
    // A restarted agent goes on counting where its predecessor stopped: a drain is not made longer by it.
    let same = |recovered: &&Recovered| match state {
        BackendState::Leaving => recovered.state == MarkState::Leaving,
        BackendState::NotReady => recovered.state == MarkState::NotReady,
        _ => false,
    };
    recovered.get(&key.address).filter(same).map_or(now, |recovered| recovered.since.min(now))
}

/// All addresses of a leaving pod began to leave with the first of them.
fn align_leaving(backends: &mut Backends) {
    let mut first: BTreeMap<Uid, Monotonic> = BTreeMap::new();
    let is_leaving = |backend: &Backend| backend.state == BackendState::Leaving;
    for (key, backend) in backends.iter().filter(|(_, backend)| is_leaving(backend)) {
        if let Some(uid) = &key.pod {
            let since = first.entry(uid.clone()).or_insert(backend.since);
            *since = backend.since.min(*since);
        }
    }
    for (key, backend) in backends.iter_mut().filter(|(_, backend)| is_leaving(backend)) {
        if let Some(since) = key.pod.as_ref().and_then(|uid| first.get(uid)) {
            backend.since = *since;
        }
    }
}

/// Forgets who had an address before, once a newer pod is ready at it.
fn drop_superseded(backends: &mut Backends) {
    let ready: BTreeSet<IpAddr> = backends
        .iter()
        .filter(|(_, backend)| backend.state == BackendState::Ready)
        .map(|(key, _)| key.address)
        .collect();
    backends.retain(|key, backend| {
        !matches!(backend.state, BackendState::Gone | BackendState::Settling) || !ready.contains(&key.address)
    });
}
