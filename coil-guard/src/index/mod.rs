//! What the watches have said, joined. Pure and synchronous: changes in, state out, and the clock is an argument.
//!
//! Labels only narrow the watches; the joins are by name and by UID:
//!
//! * an Egress and its Service have the same namespace and name;
//! * a slice belongs to the Service that its `kubernetes.io/service-name` names, and counts when it serves the FoU port;
//! * an endpoint belongs to the pod with its `targetRef.uid`;
//! * a client pod names its Egresses in its annotations.

mod annotations;
mod backends;
mod cilium;
mod objects;
mod parse;
#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

pub use annotations::{
    DRAIN_TIMEOUT, EGRESS_PREFIX, MODE, NOT_READY_AFTER, parse_mode, parse_not_ready_after,
};
pub use backends::{Backend, BackendKey, BackendState, Backends, SETTLE};
pub use objects::*;
pub use parse::*;

use crate::{
    clock::Monotonic,
    plan::{EgressName, PodUid, Recovered},
};

/// A local pod, and the Egresses that it named earlier: taking the annotation away leaves the tunnel in the pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Local {
    /// The pod as it is.
    pub pod: LocalPod,
    /// Egresses that it named before and does not now.
    pub before: BTreeSet<EgressName>,
}

/// The joined state of the watches.
#[derive(Debug, Default)]
pub struct Index {
    egresses: BTreeMap<ObjectName, Egress>,
    services: BTreeMap<ObjectName, Service>,
    slices: BTreeMap<ObjectName, Slice>,
    slices_of: BTreeMap<ObjectName, BTreeSet<ObjectName>>,
    pods: BTreeMap<ObjectName, EgressPod>,
    pods_by_uid: BTreeMap<PodUid, ObjectName>,
    local: BTreeMap<ObjectName, Local>,
    backends: BTreeMap<ObjectName, Backends>,
    /// Pods seen to go, whose endpoints a slice may still list. Kept for a while.
    deleted: BTreeMap<PodUid, Monotonic>,
    recovered: BTreeMap<IpAddr, Recovered>,
    /// Addresses that Cilium has and no slice lists, and since when.
    suspects: BTreeMap<(ObjectName, IpAddr), Monotonic>,
}

/// Applies a change to a map and tells `each` of every object that came, changed or went.
fn change<T: PartialEq>(
    map: &mut BTreeMap<ObjectName, T>,
    change: Change<T>,
    mut each: impl FnMut(&ObjectName, Option<T>, Option<&T>),
) {
    let mut put = |map: &mut BTreeMap<ObjectName, T>, name: ObjectName, new: T| {
        if map.get(&name) == Some(&new) {
            return;
        }
        let old = map.remove(&name);
        each(&name, old, Some(&new));
        map.insert(name, new);
    };
    match change {
        Change::Apply(name, new) => put(map, name, new),
        Change::Delete(name) => {
            if let Some(old) = map.remove(&name) {
                each(&name, Some(old), None);
            }
        }
        Change::Reset(objects) => {
            let listed: BTreeSet<ObjectName> = objects.iter().map(|(name, _)| name.clone()).collect();
            for (name, new) in objects {
                if let Some(new) = new {
                    put(map, name, new);
                }
            }
            let left: Vec<ObjectName> = map.keys().filter(|name| !listed.contains(*name)).cloned().collect();
            for name in left {
                let old = map.remove(&name);
                each(&name, old, None);
            }
        }
    }
}

impl Index {
    /// An index that knows what a predecessor had marked, so that times go on from there.
    #[must_use]
    pub fn recover(recovered: BTreeMap<IpAddr, Recovered>) -> Self {
        Self { recovered, ..Self::default() }
    }

    /// Takes in a change.
    pub fn update(&mut self, update: Update, now: Monotonic) {
        let mut touched = BTreeSet::new();
        match update {
            Update::Egress(egress) => change(&mut self.egresses, egress, |_, _, _| {}),
            Update::Service(service) => change(&mut self.services, service, |_, _, _| {}),
            Update::Slice(slice) => {
                let slices_of = &mut self.slices_of;
                change(&mut self.slices, slice, |name, old, new| {
                    if let Some(old) = old {
                        if let Some(slices) = slices_of.get_mut(&old.service) {
                            slices.remove(name);
                            if slices.is_empty() {
                                slices_of.remove(&old.service);
                            }
                        }
                        touched.insert(old.service);
                    }
                    if let Some(new) = new {
                        slices_of.entry(new.service.clone()).or_default().insert(name.clone());
                        touched.insert(new.service.clone());
                    }
                });
            }
            Update::EgressPod(pod) => self.update_pod(pod, &mut touched, now),
            Update::LocalPod(pod) => self.update_local(pod),
        }
        for egress in touched {
            self.refresh(egress, now);
        }
    }

    fn update_pod(&mut self, pod: Change<EgressPod>, touched: &mut BTreeSet<ObjectName>, now: Monotonic) {
        let (by_uid, deleted, backends) = (&mut self.pods_by_uid, &mut self.deleted, &self.backends);
        change(&mut self.pods, pod, |name, old, new| {
            for pod in old.iter().chain(new) {
                match &pod.egress {
                    Some(egress) => drop(touched.insert(egress.clone())),
                    // Without the label, whichever Service of the namespace selects it.
                    None => {
                        touched
                            .extend(backends.keys().filter(|key| key.namespace == name.namespace).cloned());
                    }
                }
            }
            if let Some(old) = old.filter(|old| new.is_none_or(|new| new.uid != old.uid)) {
                by_uid.remove(&old.uid);
                deleted.insert(old.uid, now);
            }
            if let Some(new) = new {
                by_uid.insert(new.uid.clone(), name.clone());
                deleted.remove(&new.uid);
            }
        });
    }

    fn update_local(&mut self, pod: Change<LocalPod>) {
        let local = &self.local;
        let with_past = |name: ObjectName, pod: LocalPod| {
            let known = local.get(&name).filter(|known| known.pod.uid == pod.uid);
            let named = known.into_iter().flat_map(|known| known.pod.egresses.iter().chain(&known.before));
            let before = named.filter(|egress| !pod.egresses.contains(*egress)).cloned().collect();
            (name, Local { pod, before })
        };
        let with_past = match pod {
            Change::Apply(name, pod) => {
                let (name, local) = with_past(name, pod);
                Change::Apply(name, local)
            }
            Change::Delete(name) => Change::Delete(name),
            Change::Reset(pods) => Change::Reset(
                pods.into_iter()
                    .map(|(name, pod)| match pod {
                        Some(pod) => {
                            let (name, local) = with_past(name, pod);
                            (name, Some(local))
                        }
                        None => (name, None),
                    })
                    .collect(),
            ),
        };
        change(&mut self.local, with_past, |_, _, _| {});
    }

    /// Works out the backends of a Service anew.
    fn refresh(&mut self, egress: ObjectName, now: Monotonic) {
        let slices =
            self.slices_of.get(&egress).into_iter().flatten().filter_map(|name| self.slices.get(name));
        let endpoints = slices.flat_map(|slice| &slice.endpoints);
        let pods = backends::Pods { by_uid: &self.pods_by_uid, by_name: &self.pods, deleted: &self.deleted };
        let none = Backends::new();
        let previous = self.backends.get(&egress).unwrap_or(&none);
        let backends = backends::observe(&egress, previous, endpoints, &pods, &self.recovered, now);
        if backends.is_empty() {
            self.backends.remove(&egress);
        } else {
            self.backends.insert(egress, backends);
        }
    }

    /// Every Egress.
    #[must_use]
    pub fn egresses(&self) -> &BTreeMap<ObjectName, Egress> {
        &self.egresses
    }

    /// The Service of an Egress.
    #[must_use]
    pub fn service(&self, egress: &EgressName) -> Option<&Service> {
        self.services.get(egress)
    }

    /// The backends of an Egress.
    pub fn backends(&self, egress: &EgressName) -> impl Iterator<Item = (&BackendKey, &Backend)> {
        self.backends.get(egress).into_iter().flatten()
    }

    /// An egress pod, by UID.
    #[must_use]
    pub fn egress_pod(&self, uid: &PodUid) -> Option<(&ObjectName, &EgressPod)> {
        self.pods.get_key_value(self.pods_by_uid.get(uid)?)
    }

    /// The pods of this node.
    #[must_use]
    pub fn local_pods(&self) -> &BTreeMap<ObjectName, Local> {
        &self.local
    }
}
