//! What the datapath should look like: a pure function of the index, the pods that are attached, and the clock.

mod desired;
mod marks;
#[cfg(test)]
mod properties;
#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

pub use desired::*;

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

/// Plans the datapath. `attached` are the pods that have a program now; `complete` says that every watch is established
/// and listed.
#[must_use]
pub fn plan(
    index: &Index,
    settings: &Settings,
    attached: &BTreeSet<PodUid>,
    complete: bool,
    now: Monotonic,
) -> Desired {
    let guarded: Guarded<'_> = index
        .egresses()
        .iter()
        .filter_map(|(name, egress)| Some((name, (egress, settings.mode(egress)?))))
        .collect();
    let here = on_this_node(index, attached);

    let mut desired = Desired { complete, ..Desired::default() };
    let mut marks = marks::Marks::default();
    for (name, (egress, mode)) in &guarded {
        if here.as_ref().is_some_and(|here| !here.contains(*name)) {
            continue;
        }
        let Some(service) = index.service(name) else { continue };
        for address in &service.cluster_ips {
            let guarded =
                GuardedService { egress: (*name).clone(), mode: *mode, sport_auto: egress.sport_auto };
            desired.services.insert(ServiceAddress { address: *address, port: settings.fou_port }, guarded);
        }
        for (key, backend) in index.backends(name) {
            marks.add(key.address, marks::mark(name, egress, *mode, settings, backend, now));
        }
    }
    (desired.marks, desired.next_change) = marks.finish(now);
    let owners = owners(index);
    desired.pods = pods(index, &guarded, &owners, attached, !desired.services.is_empty());
    desired.egress_pods = egress_pods(index, &guarded, &owners);
    desired
}

/// The Egresses that are guarded, and how.
type Guarded<'a> = BTreeMap<&'a EgressName, (&'a Egress, Mode)>;

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

/// Which of the pods of this node has an address.
fn owners(index: &Index) -> BTreeMap<IpAddr, &Local> {
    let mut owners: BTreeMap<IpAddr, &Local> = BTreeMap::new();
    for local in index.local_pods().values().filter(|local| !local.pod.finished) {
        for address in &local.pod.addresses {
            let owner = owners.entry(*address).or_insert(local);
            if newer(local) > newer(owner) {
                *owner = local;
            }
        }
    }
    owners
}

/// Addresses that are the pod's and not those of another one that got them after it.
fn own_addresses(owners: &BTreeMap<IpAddr, &Local>, local: &Local) -> BTreeSet<IpAddr> {
    let owns = |address: &&IpAddr| owners.get(*address).is_some_and(|owner| owner.pod.uid == local.pod.uid);
    local.pod.addresses.iter().filter(owns).copied().collect()
}

fn egress_pods(
    index: &Index,
    guarded: &Guarded<'_>,
    owners: &BTreeMap<IpAddr, &Local>,
) -> BTreeMap<PodUid, LocalEgressPod> {
    let mut pods = BTreeMap::new();
    if !guarded.keys().any(|egress| is_symmetric(guarded, egress)) {
        return pods;
    }
    for (name, local) in index.local_pods().iter().filter(|(_, local)| !local.pod.finished) {
        let egress = index.egress_pod(&local.pod.uid).and_then(|(_, pod)| pod.egress.as_ref());
        let Some(egress) = egress.filter(|egress| is_symmetric(guarded, egress)) else { continue };
        let addresses = own_addresses(owners, local);
        if !addresses.is_empty() {
            let (namespace, name) = (name.namespace.clone(), name.name.clone());
            let pod = LocalEgressPod { namespace, name, addresses, egress: egress.clone() };
            pods.insert(local.pod.uid.clone(), pod);
        }
    }
    pods
}

fn pods(
    index: &Index,
    guarded: &Guarded<'_>,
    owners: &BTreeMap<IpAddr, &Local>,
    attached: &BTreeSet<PodUid>,
    any_service: bool,
) -> BTreeMap<PodUid, ClientPod> {
    let any_symmetric = guarded.keys().any(|egress| is_symmetric(guarded, egress));
    let mut pods = BTreeMap::new();
    for (name, local) in index.local_pods() {
        let pod = &local.pod;
        let addresses = own_addresses(owners, local);
        if pod.finished || addresses.is_empty() {
            continue;
        }
        let egresses: BTreeSet<EgressName> =
            pod.egresses.iter().filter(|egress| guarded.contains_key(egress)).cloned().collect();
        let writes = |name: &EgressName| guarded.get(name).is_some_and(|(_, mode)| mode.writes());
        let mut known = pod.egresses.iter().chain(&local.before).peekable();
        // Of a tunnel of which nothing is known any more, it may be anybody's.
        let read_only = if known.peek().is_some() {
            !known.any(writes)
        } else {
            !guarded.values().any(|(_, mode)| mode.writes())
        };
        let want = if !egresses.is_empty() {
            Want::Attached
        } else if any_service && attached.contains(&pod.uid) {
            Want::WhileTunnelled
        } else {
            continue;
        };
        // Taking the annotation away leaves the tunnel, and its flows at the ports that they were given.
        let symmetric = (want == Want::WhileTunnelled && any_symmetric)
            || pod.egresses.iter().chain(&local.before).any(|egress| is_symmetric(guarded, egress));
        let (namespace, name) = (name.namespace.clone(), name.name.clone());
        pods.insert(
            pod.uid.clone(),
            ClientPod { namespace, name, addresses, want, egresses, read_only, symmetric },
        );
    }
    pods
}

/// Of two pods with one address, the one that is not being deleted, or was made later, has it.
fn newer(local: &Local) -> (bool, i64, &str) {
    (!local.pod.deleting, local.pod.created, &local.pod.uid)
}
