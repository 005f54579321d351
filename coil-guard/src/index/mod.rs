//! What the watches have said, joined. Pure and synchronous: changes in, state out, and the clock is an argument.
//!
//! Labels only narrow the watches; the joins are by name and by UID:
//!
//! * an Egress and its Service have the same namespace and name;
//! * a slice belongs to the Service that its `kubernetes.io/service-name` names, and counts when it serves the FoU port;
//! * an endpoint belongs to the pod with its `targetRef.uid`;
//! * a client pod names its Egresses in its annotations.

mod addresses;
mod annotations;
mod api;
mod backends;
mod cilium;
mod names;
mod objects;
mod parse;
#[cfg(test)]
mod properties;
mod refresh;
#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;
mod uid;

use std::{
    collections::{BTreeMap, BTreeSet},
    mem,
    net::IpAddr,
};

pub use addresses::Addresses;
pub use annotations::{
    DRAIN_TIMEOUT, EGRESS_PREFIX, MODE, NOT_READY_AFTER, parse_mode, parse_not_ready_after,
};
pub use api::*;
pub use backends::{Backend, BackendKey, BackendState, Backends, SETTLE};
pub use cilium::SUSPECT;
pub use objects::*;
pub use parse::*;
pub use uid::Uid;

use self::{
    names::Names,
    refresh::{Group, listed_differently},
};
use crate::{
    clock::Monotonic,
    plan::{EgressName, Recovered},
};

/// A local pod, and the Egresses that it named earlier: taking the annotation away leaves the tunnel in the pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Local {
    /// The pod as it is.
    pub pod: LocalPod,
    /// Egresses that it named before and does not now.
    pub before: BTreeSet<EgressName>,
}

/// What has changed, for the plan.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Touched {
    /// An Egress or a Service.
    pub configuration: bool,
    /// A pod of this node.
    pub local: bool,
    /// An egress pod: it came, went, or is another Egress's now.
    pub egress_pods: bool,
    /// Backends that came, changed or went: their addresses, by Egress.
    pub backends: BTreeMap<ObjectName, BTreeSet<IpAddr>>,
}

/// The joined state of the watches.
#[derive(Clone, Debug, Default)]
pub struct Index {
    names: Names,
    egresses: BTreeMap<ObjectName, Egress>,
    services: BTreeMap<ObjectName, Service>,
    slices: BTreeMap<ObjectName, Slice>,
    slices_of: BTreeMap<ObjectName, BTreeSet<ObjectName>>,
    pods: BTreeMap<ObjectName, EgressPod>,
    pods_by_uid: BTreeMap<Uid, ObjectName>,
    local: BTreeMap<ObjectName, Local>,
    backends: BTreeMap<ObjectName, Backends>,
    /// Of the backends, those that are in no slice any more: forgotten once Cilium has forgotten them.
    lingering: BTreeSet<(ObjectName, BackendKey)>,
    lingered: u64,
    /// Pods seen to go, whose endpoints a slice may still list. Kept for a while.
    deleted: BTreeMap<Uid, Monotonic>,
    recovered: BTreeMap<IpAddr, Recovered>,
    /// Addresses that Cilium has and no slice lists, and since when.
    suspects: BTreeMap<(ObjectName, IpAddr), Monotonic>,
    touched: Touched,
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
        // Made as a whole a map has full nodes, and the largest ones are made so.
        Change::Reset(objects) if map.is_empty() => {
            *map = objects.into_iter().filter_map(|(name, new)| Some((name, new?))).collect();
            for (name, new) in &*map {
                each(name, None, Some(new));
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
    pub fn update(&mut self, mut update: Update, now: Monotonic) {
        self.names.share(&mut update);
        let mut groups: BTreeMap<ObjectName, Group> = BTreeMap::new();
        let touched = &mut self.touched;
        match update {
            Update::Egress(egress) => {
                change(&mut self.egresses, egress, |_, _, _| touched.configuration = true);
            }
            Update::Service(service) => {
                change(&mut self.services, service, |_, _, _| touched.configuration = true);
            }
            Update::Slice(slice) => {
                let slices_of = &mut self.slices_of;
                change(&mut self.slices, slice, |name, old, new| {
                    listed_differently(old.as_ref(), new, &mut groups);
                    if let Some(old) = old
                        && let Some(slices) = slices_of.get_mut(&old.service)
                    {
                        slices.remove(name);
                        if slices.is_empty() {
                            slices_of.remove(&old.service);
                        }
                    }
                    if let Some(new) = new {
                        slices_of.entry(new.service.clone()).or_default().insert(name.clone());
                    }
                });
            }
            Update::EgressPod(pod) => self.update_pod(pod, &mut groups, now),
            Update::LocalPod(pod) => self.update_local(pod),
        }
        for (egress, group) in groups {
            self.refresh(egress, group, now);
        }
    }

    fn update_pod(
        &mut self,
        pod: Change<EgressPod>,
        groups: &mut BTreeMap<ObjectName, Group>,
        now: Monotonic,
    ) {
        let is_list = matches!(pod, Change::Reset(_));
        let (by_uid, deleted, backends) = (&mut self.pods_by_uid, &mut self.deleted, &self.backends);
        let touched = &mut self.touched;
        change(&mut self.pods, pod, |name, old, new| {
            let join = |pod: Option<&EgressPod>| pod.map(|pod| (pod.uid.clone(), pod.egress.clone()));
            touched.egress_pods |= join(old.as_ref()) != join(new);
            for pod in old.iter().chain(new) {
                let mut touch = |egress: &ObjectName| {
                    groups.entry(egress.clone()).or_default().add_pod(&pod.uid);
                };
                match &pod.egress {
                    Some(egress) => touch(egress),
                    // Without the label, whichever Service of the namespace selects it.
                    None => backends.keys().filter(|key| key.namespace == name.namespace).for_each(touch),
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
        if is_list {
            // As a whole, so that its nodes are full.
            self.pods_by_uid = self.pods.iter().map(|(name, pod)| (pod.uid.clone(), name.clone())).collect();
        }
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
        let touched = &mut self.touched;
        change(&mut self.local, with_past, |_, _, _| touched.local = true);
    }

    /// What has changed since this was last asked.
    pub fn take_touched(&mut self) -> Touched {
        mem::take(&mut self.touched)
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

    /// The backends of an Egress at one address: pods that had it one after the other.
    pub fn backends_at(
        &self,
        egress: &EgressName,
        address: IpAddr,
    ) -> impl Iterator<Item = (&BackendKey, &Backend)> {
        let from = BackendKey { address, pod: None };
        self.backends
            .get(egress)
            .into_iter()
            .flat_map(move |backends| backends.range(from.clone()..))
            .take_while(move |(key, _)| key.address == address)
    }

    /// An egress pod, by UID.
    #[must_use]
    pub fn egress_pod(&self, uid: &Uid) -> Option<(&ObjectName, &EgressPod)> {
        self.pods.get_key_value(self.pods_by_uid.get(uid)?)
    }

    /// The pods of this node.
    #[must_use]
    pub fn local_pods(&self) -> &BTreeMap<ObjectName, Local> {
        &self.local
    }
}
