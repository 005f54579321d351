//! What the datapath should look like: a pure function of the index, the pods that are attached, and the clock.

mod desired;
#[cfg(test)]
mod kept;
mod marks;
mod planner;
mod pods;
#[cfg(test)]
mod properties;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};

pub use desired::*;
pub use planner::Planner;

use self::marks::Guard;
use crate::{
    clock::Monotonic,
    index::{Egress, Index, Local, NotReadyAfter},
};

/// What the plan takes from the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// UDP port of Coil's tunnels, host order.
    pub fou_port: u16,
    /// For an Egress without the mode annotation; `None` is off.
    pub default_mode: Option<Mode>,
    /// For an Egress without the annotation.
    pub not_ready_after: NotReadyAfter,
    /// Nothing on this node may write to Cilium's maps: modes that do are refused.
    pub read_only: bool,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            fou_port: 5555,
            default_mode: None,
            not_ready_after: NotReadyAfter::default(),
            read_only: false,
        }
    }
}

impl Settings {
    /// What is done for an Egress. An annotation that is there wins, even one that is not understood: it means off, as one
    /// does that is refused here.
    #[must_use]
    pub fn mode(&self, egress: &Egress) -> Option<Mode> {
        self.asked(egress).filter(|_| self.refused(egress).is_none())
    }

    /// The mode that is asked for and refused, because it writes to Cilium's maps.
    #[must_use]
    pub fn refused(&self, egress: &Egress) -> Option<Mode> {
        self.asked(egress).filter(|mode| self.read_only && mode.writes())
    }

    fn asked(&self, egress: &Egress) -> Option<Mode> {
        egress.mode.unwrap_or(self.default_mode)
    }
}

/// Plans the datapath from nothing. `attached` are the pods that have a program now; `complete` says that every watch is
/// established and listed. [`Planner`] comes to the same by what has changed.
#[must_use]
pub fn plan(
    index: &Index,
    settings: &Settings,
    attached: &BTreeSet<PodUid>,
    complete: bool,
    now: Monotonic,
) -> Desired {
    let guarded = guarded(index, settings);
    let guards = guards(index, settings, &guarded, attached);
    let mut desired = Desired { complete, services: services(&guards, settings), ..Desired::default() };
    for (name, guard) in &guards {
        for (key, backend) in index.backends(name) {
            let mut mark = desired.marks.remove(&key.address);
            marks::join(&mut mark, guard.mark(name, backend, now));
            desired.marks.extend(mark.map(|mark| (key.address, mark)));
            let change = marks::changes_at(backend, now);
            desired.next_change = desired.next_change.into_iter().chain(change).min();
        }
    }
    (desired.pods, desired.egress_pods) = pods::pods(index, &guarded, attached, !desired.services.is_empty());
    desired
}

/// The Egresses that are guarded, and how.
type Guarded<'a> = BTreeMap<&'a EgressName, (&'a Egress, Mode)>;

fn guarded<'a>(index: &'a Index, settings: &Settings) -> Guarded<'a> {
    let egresses = index.egresses().iter();
    egresses.filter_map(|(name, egress)| Some((name, (egress, settings.mode(egress)?)))).collect()
}

/// Those of them that matter on this node and have a Service.
fn guards(
    index: &Index,
    settings: &Settings,
    guarded: &Guarded<'_>,
    attached: &BTreeSet<PodUid>,
) -> BTreeMap<EgressName, Guard> {
    let here = on_this_node(index, attached);
    let of = |name: &EgressName, (egress, mode): (&Egress, Mode)| {
        Some((name.clone(), Guard::new(egress, mode, index.service(name)?, settings)))
    };
    guarded
        .iter()
        .filter(|(name, _)| here.as_ref().is_none_or(|here| here.contains(**name)))
        .filter_map(|(name, egress)| of(name, *egress))
        .collect()
}

fn services(
    guards: &BTreeMap<EgressName, Guard>,
    settings: &Settings,
) -> BTreeMap<ServiceAddress, GuardedService> {
    let mut services = BTreeMap::new();
    for (name, guard) in guards {
        for address in &guard.cluster_ips {
            let service =
                GuardedService { egress: name.clone(), mode: guard.mode, sport_auto: guard.sport_auto };
            services.insert(ServiceAddress { address: *address, port: settings.fou_port }, service);
        }
    }
    services
}

/// Whether replies of this Egress can be made symmetric: with `fouSourcePortAuto` they come from a port of their own.
fn is_symmetric(guarded: &Guarded<'_>, egress: &EgressName) -> bool {
    guarded.get(egress).is_some_and(|(egress, mode)| *mode == Mode::Rewrite && !egress.sport_auto)
}

/// The Egresses that matter on this node; `None` for all of them. A thousand Egresses of which ten have clients here cost
/// what ten do.
fn on_this_node<'a>(index: &'a Index, attached: &BTreeSet<PodUid>) -> Option<BTreeSet<&'a EgressName>> {
    let named = |local: &'a Local| local.pod.egresses.iter().chain(&local.before);
    // A pod that names nothing and has a program got it from a predecessor, when it named what is not known any more: its
    // tunnel may lead to any Egress.
    let is_strange = |local: &'a Local| attached.contains(&local.pod.uid) && named(local).next().is_none();
    let pods = index.local_pods();
    (!pods.values().any(is_strange)).then(|| pods.values().flat_map(named).collect())
}
