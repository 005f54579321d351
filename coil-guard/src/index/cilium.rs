//! What Cilium's maps say against the slices: addresses that it still has and Kubernetes has not.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    time::Duration,
};

use super::{Backend, BackendKey, BackendState, Index, ObjectName};
use crate::{clock::Monotonic, plan::CiliumView};

/// Cilium's own watch can be ahead of ours: an address that it knows and no slice lists is gone only after this long.
/// Until then it is listed as nothing, and so gets no new flows.
const SUSPECT: Duration = Duration::from_secs(5);

/// How long a deleted pod is remembered for slices that still list it.
const REMEMBER_DELETED: Duration = Duration::from_secs(60);

impl Index {
    /// Takes in what Cilium's maps hold as of `now`. Addresses that are in none of a Service's slices count as gone, provided that
    /// the watches are `complete`; those that neither side has any more are forgotten.
    pub fn observe_cilium(&mut self, view: &CiliumView, complete: bool, now: Monotonic) {
        let held = self.held(view);
        self.find_suspects(&held, complete, now);
        for (egress, backends) in &mut self.backends {
            let held = held.get(egress);
            backends.retain(|key, backend| {
                !matches!(backend.state, BackendState::Gone | BackendState::Settling)
                    || held.is_some_and(|held| held.contains(&key.address))
            });
        }
        self.backends.retain(|_, backends| !backends.is_empty());
        let backends = &self.backends;
        self.deleted.retain(|uid, since| {
            now.since(*since) < REMEMBER_DELETED
                || backends
                    .values()
                    .flat_map(|of_egress| of_egress.keys())
                    .any(|key| key.pod.as_ref() == Some(uid))
        });
        if complete {
            // From here on the index itself knows since when.
            self.recovered.clear();
        }
    }

    fn held(&self, view: &CiliumView) -> BTreeMap<ObjectName, BTreeSet<IpAddr>> {
        let mut held: BTreeMap<ObjectName, BTreeSet<IpAddr>> = BTreeMap::new();
        let by_address: BTreeMap<IpAddr, &ObjectName> = self
            .services
            .iter()
            .flat_map(|(name, service)| service.cluster_ips.iter().map(move |address| (*address, name)))
            .collect();
        for (service, addresses) in &view.backends {
            if let Some(egress) = by_address.get(&service.address) {
                held.entry((*egress).clone()).or_default().extend(addresses);
            }
        }
        held
    }

    fn find_suspects(
        &mut self,
        held: &BTreeMap<ObjectName, BTreeSet<IpAddr>>,
        complete: bool,
        now: Monotonic,
    ) {
        let mut suspects = BTreeMap::new();
        if complete {
            for (egress, addresses) in held {
                let known: BTreeSet<IpAddr> =
                    self.backends.get(egress).into_iter().flatten().map(|(key, _)| key.address).collect();
                for address in addresses.difference(&known) {
                    let suspect = (egress.clone(), *address);
                    let first = self.suspects.get(&suspect).copied().unwrap_or(now);
                    // What a predecessor had marked was a backend, and has gone while no agent was looking.
                    if self.recovered.contains_key(address) || now.since(first) >= SUSPECT {
                        let gone = Backend {
                            state: BackendState::Gone,
                            since: now,
                            serving: false,
                            grace: Duration::ZERO,
                        };
                        let key = BackendKey { address: *address, pod: None };
                        self.backends.entry(egress.clone()).or_default().insert(key, gone);
                    } else {
                        suspects.insert(suspect, first);
                    }
                }
            }
        }
        self.suspects = suspects;
    }
}
