//! Working out backends anew after a change: those that it can have an effect on, and no others.
//!
//! [`observe`](super::backends::observe) looks at a pod's endpoints together, and at the pods that have had one address
//! together. So what a change touches is a group that is closed under both. It is worked out by the very rules by which all
//! would be, and comes out as it would among all: [`super::properties`] holds the two against each other.

use std::{
    collections::{BTreeMap, BTreeSet},
    mem,
    net::IpAddr,
};

use super::{
    Backends, Index, Uid,
    backends::{BackendKey, BackendState, Pods, observe},
    objects::{Endpoint, ObjectName, Slice},
};
use crate::clock::Monotonic;

/// With more members than this a group is all there is of the Egress: looking for members would take longer.
const LARGEST: usize = 32;

/// Pods and addresses that belong together.
#[derive(Debug, Default)]
pub(super) struct Group {
    pods: Vec<Uid>,
    addresses: Vec<IpAddr>,
}

impl Group {
    /// Everything that there is of the Egress.
    #[cfg(test)]
    pub(super) fn everything() -> Self {
        let addresses = (0..=LARGEST as u32).map(|number| IpAddr::from(number.to_be_bytes())).collect();
        Self { addresses, ..Self::default() }
    }

    pub(super) fn add_pod(&mut self, uid: &Uid) {
        if self.pods.len() <= LARGEST && !self.pods.contains(uid) {
            self.pods.push(uid.clone());
        }
    }

    fn add_address(&mut self, address: IpAddr) {
        if self.addresses.len() <= LARGEST && !self.addresses.contains(&address) {
            self.addresses.push(address);
        }
    }

    fn add(&mut self, endpoint: &Endpoint) {
        match &endpoint.pod {
            Some(uid) => self.add_pod(uid),
            None => endpoint.addresses.iter().for_each(|address| self.add_address(*address)),
        }
    }

    fn is_everything(&self) -> bool {
        self.pods.len().max(self.addresses.len()) > LARGEST
    }

    fn has(&self, pod: Option<&Uid>, addresses: &[IpAddr]) -> bool {
        pod.is_some_and(|uid| self.pods.contains(uid))
            || addresses.iter().any(|address| self.addresses.contains(address))
    }

    fn has_endpoint(&self, endpoint: &Endpoint) -> bool {
        self.is_everything() || self.has(endpoint.pod.as_ref(), &endpoint.addresses)
    }

    fn has_key(&self, key: &BackendKey) -> bool {
        self.is_everything() || self.has(key.pod.as_ref(), &[key.address])
    }

    /// Takes in whatever belongs to what is in it, until there is no more of that.
    #[expect(single_use_lifetimes, reason = "an anonymous lifetime in impl Trait is not stable")]
    fn close<'a>(
        &mut self,
        endpoints: &(impl Iterator<Item = &'a Endpoint> + Clone),
        backends: &Backends,
        pods: &Pods<'_>,
    ) {
        let mut before = None;
        while !self.is_everything() && before != Some((self.pods.len(), self.addresses.len())) {
            before = Some((self.pods.len(), self.addresses.len()));
            for uid in self.pods.clone() {
                let pod = pods.get(Some(&uid)).into_iter();
                pod.flat_map(|pod| pod.addresses.iter()).for_each(|address| self.add_address(*address));
            }
            for endpoint in endpoints.clone() {
                if self.has_endpoint(endpoint) {
                    endpoint.pod.iter().for_each(|uid| self.add_pod(uid));
                    endpoint.addresses.iter().for_each(|address| self.add_address(*address));
                }
            }
            for key in backends.keys() {
                if self.has_key(key) {
                    key.pod.iter().for_each(|uid| self.add_pod(uid));
                    self.add_address(key.address);
                }
            }
        }
    }
}

/// Adds what of a slice is listed otherwise than before, by Service.
pub(super) fn listed_differently(
    old: Option<&Slice>,
    new: Option<&Slice>,
    groups: &mut BTreeMap<ObjectName, Group>,
) {
    let of = |slice: Option<&Slice>| -> BTreeSet<Endpoint> {
        slice.into_iter().flat_map(|slice| slice.endpoints.iter().cloned()).collect()
    };
    match (old, new) {
        (Some(old), Some(new)) if old.service == new.service => {
            let group = groups.entry(new.service.clone()).or_default();
            of(Some(old)).symmetric_difference(&of(Some(new))).for_each(|endpoint| group.add(endpoint));
        }
        _ => {
            for slice in [old, new].into_iter().flatten() {
                let group = groups.entry(slice.service.clone()).or_default();
                slice.endpoints.iter().for_each(|endpoint| group.add(endpoint));
            }
        }
    }
}

impl Index {
    /// Works out anew those backends of a Service that belong to `group`.
    pub(super) fn refresh(&mut self, egress: ObjectName, mut group: Group, now: Monotonic) {
        let slices =
            self.slices_of.get(&egress).into_iter().flatten().filter_map(|name| self.slices.get(name));
        let endpoints = slices.flat_map(|slice| &slice.endpoints);
        let pods = Pods { by_uid: &self.pods_by_uid, by_name: &self.pods, deleted: &self.deleted };
        let mut backends = self.backends.remove(&egress).unwrap_or_default();
        group.close(&endpoints, &backends, &pods);
        let previous = take(&mut backends, &group);
        let endpoints = endpoints.filter(|endpoint| group.has_endpoint(endpoint));
        let present = observe(&egress, &previous, endpoints, &pods, &self.recovered, now);
        self.note(&egress, &previous, &present);
        if backends.is_empty() {
            backends = present;
        } else {
            backends.extend(present);
        }
        if !backends.is_empty() {
            self.backends.insert(egress, backends);
        }
    }

    /// Tells the plan and the looks at Cilium's maps what has become of backends.
    pub(super) fn note(&mut self, egress: &ObjectName, before: &Backends, now: &Backends) {
        let lingers = |backends: &Backends, key: &BackendKey| {
            backends
                .get(key)
                .is_some_and(|backend| matches!(backend.state, BackendState::Gone | BackendState::Settling))
        };
        let keys = before.keys().chain(now.keys().filter(|key| !before.contains_key(*key)));
        for key in keys.filter(|key| before.get(*key) != now.get(*key)) {
            if !self.touched.backends.contains_key(egress) {
                self.touched.backends.insert(egress.clone(), BTreeSet::new());
            }
            if let Some(addresses) = self.touched.backends.get_mut(egress) {
                addresses.insert(key.address);
            }
            match (lingers(before, key), lingers(now, key)) {
                (false, true) => {
                    self.lingering.insert((egress.clone(), key.clone()));
                    self.lingered += 1;
                }
                (true, false) => drop(self.lingering.remove(&(egress.clone(), key.clone()))),
                _ => {}
            }
        }
    }
}

/// Takes the group's members out.
fn take(backends: &mut Backends, group: &Group) -> Backends {
    if group.is_everything() {
        return mem::take(backends);
    }
    let keys: Vec<BackendKey> = backends.keys().filter(|key| group.has_key(key)).cloned().collect();
    keys.iter().filter_map(|key| backends.remove_entry(key)).collect()
}
