//! The plan, kept up to date by what has changed.
//!
//! A change of one backend makes one mark anew, whatever the number of clients, backends and Egresses.
//! [`super::kept`] holds it against [`super::plan`], which makes everything anew.

use std::{
    collections::{BTreeMap, BTreeSet},
    mem,
    net::IpAddr,
};

use super::{
    Changes, Desired, EgressName, Guard, Mark, PodUid, Settings, Want, guarded, guards, is_symmetric,
    marks::{changes_at, join},
    pods::pods,
    services,
};
use crate::{clock::Monotonic, index::Index};

/// Makes plans.
#[derive(Debug)]
pub struct Planner {
    settings: Settings,
    /// Pods that have a program now.
    attached: BTreeSet<PodUid>,
    desired: Desired,
    guards: BTreeMap<EgressName, Guard>,
    /// The marks by each Egress of addresses that several have, or had one after the other.
    contested: BTreeMap<IpAddr, BTreeMap<EgressName, Mark>>,
    /// When the mark by an Egress of an address becomes another one by itself.
    settling: BTreeMap<(EgressName, IpAddr), Monotonic>,
    /// What is attached has changed in a way that matters.
    clients_changed: bool,
    /// Whether some Egress's replies can be made symmetric.
    any_symmetric: bool,
}

impl Planner {
    /// A planner, with an empty plan. `attached` are the pods that have a program.
    #[must_use]
    pub fn new(settings: Settings, attached: BTreeSet<PodUid>) -> Self {
        Self {
            settings,
            attached,
            desired: Desired::default(),
            guards: BTreeMap::new(),
            contested: BTreeMap::new(),
            settling: BTreeMap::new(),
            clients_changed: true,
            any_symmetric: false,
        }
    }

    /// The latest plan.
    #[must_use]
    pub fn desired(&self) -> &Desired {
        &self.desired
    }

    /// What the plan takes from the command line.
    #[must_use]
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// A pod has a program now.
    pub fn attached(&mut self, uid: PodUid) {
        self.clients_changed |= self.matters(&uid);
        self.attached.insert(uid);
    }

    /// A pod has none any more.
    pub fn detached(&mut self, uid: &PodUid) {
        self.clients_changed |= self.matters(uid);
        self.attached.remove(uid);
    }

    /// Whether the plan depends on whether this pod has a program: not where it names what is guarded.
    fn matters(&self, uid: &PodUid) -> bool {
        self.desired.pods.get(uid).is_none_or(|pod| pod.want != Want::Attached)
    }

    /// Takes in what has changed in the index since the last time, and the time. `complete` says that every watch is
    /// established and listed.
    pub fn update(&mut self, index: &mut Index, complete: bool, now: Monotonic) -> Changes {
        let touched = index.take_touched();
        let mut changes = Changes::default();
        let due = |(_, end): &(&(EgressName, IpAddr), &Monotonic)| **end <= now;
        let mut remade: BTreeSet<(EgressName, IpAddr)> =
            self.settling.iter().filter(due).map(|(key, _)| key.clone()).collect();
        let configured = touched.configuration || touched.local || mem::take(&mut self.clients_changed);
        let mut given_up = BTreeMap::new();
        if configured {
            let guarded = guarded(index, &self.settings);
            self.any_symmetric = guarded.keys().any(|egress| is_symmetric(&guarded, egress));
            let guards = guards(index, &self.settings, &guarded, &self.attached);
            let former = mem::replace(&mut self.guards, guards);
            let alike = |name: &EgressName| match (former.get(name), self.guards.get(name)) {
                (Some(former), Some(guard)) => former.marks_like(guard),
                (former, guard) => former.is_none() && guard.is_none(),
            };
            for name in former.keys().chain(self.guards.keys()).filter(|name| !alike(name)) {
                remade.extend(index.backends(name).map(|(key, _)| (name.clone(), key.address)));
            }
            let services = services(&self.guards, &self.settings);
            if services != self.desired.services {
                changes.services = Some(mem::replace(&mut self.desired.services, services));
            }
            given_up = former;
        }
        for (name, addresses) in touched.backends {
            if self.guards.contains_key(&name) || given_up.contains_key(&name) {
                remade.extend(addresses.into_iter().map(|address| (name.clone(), address)));
            }
        }
        if configured || touched.egress_pods && self.any_symmetric {
            let guarded = guarded(index, &self.settings);
            let any_service = !self.desired.services.is_empty();
            let (pods, egress_pods) = pods(index, &guarded, &self.attached, any_service);
            changes.pods = pods != self.desired.pods || egress_pods != self.desired.egress_pods;
            (self.desired.pods, self.desired.egress_pods) = (pods, egress_pods);
        }
        for (egress, address) in remade {
            self.remake(index, egress, address, now, &mut changes.marks);
        }
        if changes.marks.len() > self.desired.marks.len() / 2 {
            // As a whole, so that its nodes are full.
            self.desired.marks = mem::take(&mut self.desired.marks).into_iter().collect();
        }
        changes.marks.retain(|address, former| self.desired.marks.get(address) != former.as_ref());
        self.desired.complete = complete;
        self.desired.next_change = self.settling.values().min().copied();
        changes
    }

    /// Makes the mark by one Egress of one address anew.
    fn remake(
        &mut self,
        index: &Index,
        egress: EgressName,
        address: IpAddr,
        now: Monotonic,
        former: &mut BTreeMap<IpAddr, Option<Mark>>,
    ) {
        let mut mark = None;
        let mut change: Option<Monotonic> = None;
        if let Some(guard) = self.guards.get(&egress) {
            for (_, backend) in index.backends_at(&egress, address) {
                join(&mut mark, guard.mark(&egress, backend, now));
                change = change.into_iter().chain(changes_at(backend, now)).min();
            }
        }
        let key = (egress, address);
        match change {
            Some(change) => drop(self.settling.insert(key.clone(), change)),
            None => drop(self.settling.remove(&key)),
        }
        let (egress, _) = key;
        let present = self.desired.marks.remove(&address);
        former.entry(address).or_insert_with(|| present.clone());
        let mut all = self
            .contested
            .remove(&address)
            .unwrap_or_else(|| present.into_iter().map(|mark| (mark.egress.clone(), mark)).collect());
        match mark {
            Some(mark) => drop(all.insert(egress, mark)),
            None => drop(all.remove(&egress)),
        }
        let mut holds = None;
        for mark in all.values() {
            join(&mut holds, mark.clone());
        }
        self.desired.marks.extend(holds.map(|mark| (address, mark)));
        if all.len() > 1 {
            self.contested.insert(address, all);
        }
    }
}
