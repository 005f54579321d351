//! What Cilium's maps say against the slices: addresses that it still has and Kubernetes has not.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    time::Duration,
};

use super::{Backend, BackendKey, BackendState, Backends, Index, ObjectName, Uid};
use crate::{clock::Monotonic, plan::CiliumView};

/// Cilium's own watch can be ahead of ours: an address that it knows and no slice lists is gone only after this long.
/// Until then it is listed as nothing, and so gets no new flows.
pub const SUSPECT: Duration = Duration::from_secs(5);

/// How long a deleted pod is remembered for slices that still list it.
const REMEMBER_DELETED: Duration = Duration::from_secs(60);

impl Index {
    /// Addresses of backends that are in no slice any more: to be looked for in Cilium's maps.
    #[must_use]
    pub fn lingering(&self) -> BTreeSet<IpAddr> {
        self.lingering.iter().map(|(_, key)| key.address).collect()
    }

    /// How many there have been in all.
    #[must_use]
    pub fn lingered(&self) -> u64 {
        self.lingered
    }

    /// Egresses in whose Service Cilium has addresses that no slice lists. Another look at them is due after [`SUSPECT`].
    #[must_use]
    pub fn suspected(&self) -> BTreeSet<&ObjectName> {
        self.suspects.keys().map(|(egress, _)| egress).collect()
    }

    /// Takes in what was found in Cilium's maps as of `now`. Addresses that are in none of a Service's slices count as gone,
    /// provided that the watches are `complete`; those that neither side has any more are forgotten.
    pub fn observe_cilium(&mut self, view: &CiliumView, complete: bool, now: Monotonic) {
        let held = self.held(view);
        self.find_suspects(&held, complete, now);
        let forgotten: Vec<_> = self
            .lingering
            .iter()
            .filter(|(egress, key)| {
                view.forgotten.contains(&key.address)
                    && held.get(egress).is_none_or(|held| !held.contains(&key.address))
            })
            .cloned()
            .collect();
        for (egress, key) in forgotten {
            let Some(backends) = self.backends.get_mut(&egress) else { continue };
            let before: Backends = backends.remove_entry(&key).into_iter().collect();
            if backends.is_empty() {
                self.backends.remove(&egress);
            }
            self.note(&egress, &before, &Backends::new());
        }
        self.forget_deleted(now);
        if complete {
            // From here on the index itself knows since when.
            self.recovered.clear();
        }
    }

    /// Forgets pods that went long ago and that nothing names any more.
    fn forget_deleted(&mut self, now: Monotonic) {
        let is_old = |since: &Monotonic| now.since(*since) >= REMEMBER_DELETED;
        if !self.deleted.values().any(is_old) {
            return;
        }
        let listed = self.slices.values().flat_map(|slice| &slice.endpoints).filter_map(|e| e.pod.as_ref());
        let backends = self.backends.values().flatten().filter_map(|(key, _)| key.pod.as_ref());
        let named: BTreeSet<&Uid> =
            listed.chain(backends).filter(|uid| self.deleted.contains_key(*uid)).collect();
        self.deleted.retain(|uid, since| !is_old(since) || named.contains(uid));
    }

    fn held(&self, view: &CiliumView) -> BTreeMap<ObjectName, BTreeSet<IpAddr>> {
        let mut held: BTreeMap<ObjectName, BTreeSet<IpAddr>> = BTreeMap::new();
        if view.slots.is_empty() {
            return held;
        }
        let by_address: BTreeMap<IpAddr, &ObjectName> = self
            .services
            .iter()
            .flat_map(|(name, service)| service.cluster_ips.iter().map(move |address| (*address, name)))
            .collect();
        for (service, addresses) in &view.slots {
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
        if !complete {
            self.suspects.clear();
            return;
        }
        for (egress, addresses) in held {
            let mut suspects = BTreeMap::new();
            for address in addresses {
                if self.backends_at(egress, *address).next().is_some() {
                    continue;
                }
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
                    let new = Backends::from([(BackendKey { address: *address, pod: None }, gone)]);
                    self.note(egress, &Backends::new(), &new);
                    self.backends.entry(egress.clone()).or_default().extend(new);
                } else {
                    suspects.insert(suspect, first);
                }
            }
            // Those of services that were not looked at now stay what they are.
            self.suspects.retain(|(of, _), _| of != egress);
            self.suspects.append(&mut suspects);
        }
    }
}
