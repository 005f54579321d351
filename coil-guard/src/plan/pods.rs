//! The pods of this node that get a program.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use super::{ClientPod, EgressName, Guarded, LocalEgressPod, PodUid, Want, is_symmetric};
use crate::index::{Index, Local};

/// Client pods, and egress pods that send symmetric replies.
pub(super) fn pods(
    index: &Index,
    guarded: &Guarded<'_>,
    attached: &BTreeSet<PodUid>,
    any_service: bool,
) -> (BTreeMap<PodUid, ClientPod>, BTreeMap<PodUid, LocalEgressPod>) {
    let owners = owners(index);
    (client_pods(index, guarded, &owners, attached, any_service), egress_pods(index, guarded, &owners))
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
        let egress =
            index.egress_pod(&local.pod.uid.as_str().into()).and_then(|(_, pod)| pod.egress.as_ref());
        let Some(egress) = egress.filter(|egress| is_symmetric(guarded, egress)) else { continue };
        let addresses = own_addresses(owners, local);
        if !addresses.is_empty() {
            let (namespace, name) = (name.namespace.to_string(), name.name.to_string());
            let pod = LocalEgressPod { namespace, name, addresses, egress: egress.clone() };
            pods.insert(local.pod.uid.clone(), pod);
        }
    }
    pods
}

fn client_pods(
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
        let (namespace, name) = (name.namespace.to_string(), name.name.to_string());
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
