//! When Cilium's maps are looked at for marks that can go and for backends that Kubernetes has forgotten, and for which.

use std::{
    collections::BTreeSet,
    mem,
    net::IpAddr,
    ops::Bound::{Excluded, Unbounded},
    time::Duration,
};

use crate::{
    clock::Monotonic,
    index::{Index, SUSPECT},
    plan::{Changes, Desired, ServiceAddress},
};

/// How soon after a backend has left its slices Cilium's maps are looked at for it; twice as long after each look that finds
/// nothing new.
const SOON: Duration = Duration::from_secs(2);
/// And that at the most.
const LATE: Duration = Duration::from_secs(16);
/// Within this all slots of all services are looked at once, for addresses that no slice lists.
const ROUND: Duration = Duration::from_secs(60);
/// Slots of one look, about: the loop does nothing else meanwhile.
const SLOTS: usize = 1000;

/// One look.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Look {
    /// Whose slots to look at.
    pub(super) services: Vec<ServiceAddress>,
    /// What to look for anywhere.
    pub(super) addresses: BTreeSet<IpAddr>,
}

/// What comes when.
#[derive(Debug)]
pub(super) struct Looks {
    /// Everything has been looked at once.
    began: bool,
    /// For backends that have left their slices, how long after the last time, and how many there had been in all.
    lingering_at: Option<Monotonic>,
    wait: Duration,
    lingered: u64,
    /// For services that are new, or had addresses that no slice lists.
    again_at: Option<Monotonic>,
    again: BTreeSet<ServiceAddress>,
    /// For the next services of the round, and the last one of those that were looked at.
    round_at: Monotonic,
    last: Option<ServiceAddress>,
}

impl Looks {
    pub(super) fn new(now: Monotonic) -> Self {
        Self {
            began: false,
            lingering_at: None,
            wait: SOON,
            lingered: 0,
            again_at: None,
            again: BTreeSet::new(),
            round_at: now,
            last: None,
        }
    }

    /// When the next look is due.
    pub(super) fn due(&self) -> Monotonic {
        [self.lingering_at, self.again_at].into_iter().flatten().fold(self.round_at, Monotonic::min)
    }

    /// Takes in what has changed.
    pub(super) fn changed(&mut self, index: &Index, desired: &Desired, changes: &Changes, now: Monotonic) {
        let soon = now.saturating_add(SOON);
        if index.lingered() != self.lingered {
            self.lingered = index.lingered();
            self.wait = SOON;
            self.lingering_at = self.lingering_at.into_iter().chain([soon]).min();
        }
        if let Some(before) = changes.services.as_ref().filter(|_| self.began) {
            let new = desired.services.keys().filter(|service| !before.contains_key(*service));
            self.again.extend(new.copied());
            if !self.again.is_empty() {
                self.again_at = self.again_at.into_iter().chain([soon]).min();
            }
        }
    }

    /// What to look at now. The first time that is everything.
    pub(super) fn next(&mut self, index: &Index, desired: &Desired, now: Monotonic) -> Look {
        if !mem::replace(&mut self.began, true) {
            self.round_at = now.saturating_add(ROUND);
            return Look {
                services: desired.services.keys().copied().collect(),
                addresses: index.lingering(),
            };
        }
        let mut services = BTreeSet::new();
        if self.again_at.is_some_and(|at| now >= at) {
            self.again_at = None;
            services = mem::take(&mut self.again);
            services.retain(|service| desired.services.contains_key(service));
        }
        if now >= self.round_at {
            services.extend(self.next_of_round(desired, now));
        }
        let addresses = match self.lingering_at {
            Some(at) if now >= at => index.lingering(),
            _ => BTreeSet::new(),
        };
        Look { services: services.into_iter().collect(), addresses }
    }

    fn next_of_round(&mut self, desired: &Desired, now: Monotonic) -> Vec<ServiceAddress> {
        let number = desired.services.len();
        let slots_of_each = (desired.marks.len() / number.max(1)).max(1);
        let part = (SLOTS / slots_of_each).max(1);
        let parts = u32::try_from(number.div_ceil(part)).unwrap_or(u32::MAX).max(1);
        self.round_at = now.saturating_add(ROUND / parts);
        let from = self.last.map_or(Unbounded, Excluded);
        let mut rest = desired.services.range((from, Unbounded)).map(|(service, _)| *service);
        let services: Vec<_> = rest.by_ref().take(part).collect();
        self.last = rest.next().and(services.last().copied());
        services
    }

    /// After a look, whose outcome the index has.
    pub(super) fn done(&mut self, index: &Index, desired: &Desired, now: Monotonic) {
        if index.lingering().is_empty() {
            self.lingering_at = None;
        } else if self.lingering_at.is_none_or(|at| now >= at) {
            self.lingering_at = Some(now.saturating_add(self.wait));
            self.wait = (self.wait * 2).min(LATE);
        }
        let suspected = index.suspected();
        let of_suspects = |service: &ServiceAddress| {
            desired.services.get(service).is_some_and(|guarded| suspected.contains(&guarded.egress))
        };
        if !suspected.is_empty() {
            self.again.extend(desired.services.keys().filter(|service| of_suspects(service)));
        }
        if !self.again.is_empty() && self.again_at.is_none() {
            self.again_at = Some(now.saturating_add(SUSPECT));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::{
        index::testing::*,
        plan::{CiliumView, EgressName, GuardedService, Mode, Settings, plan},
    };

    fn service(last: u8) -> ServiceAddress {
        ServiceAddress { address: [10, 96, 0, last].into(), port: FOU_PORT }
    }

    fn seconds(seconds: u64) -> Monotonic {
        at(seconds * 1000)
    }

    fn planned(index: &Index) -> Desired {
        plan(index, &Settings::default(), &BTreeSet::new(), true, at(0))
    }

    #[test]
    fn everything_is_looked_at_first_and_then_once_in_a_round() {
        let egress = EgressName { namespace: "net".into(), name: "nat".into() };
        let guarded = GuardedService { egress, mode: Mode::Reset, sport_auto: false };
        let services: BTreeMap<_, _> = (0..9).map(|last| (service(last), guarded.clone())).collect();
        let index = Index::default();
        let mark = planned(&running("reset")).marks.into_values().next().unwrap();
        // Three hundred slots each: three services in a look.
        let marks = (0..2700u32).map(|number| (IpAddr::from(number.to_be_bytes()), mark.clone())).collect();
        let desired = Desired { services, marks, ..Desired::default() };
        let mut looks = Looks::new(at(0));
        assert_eq!(looks.next(&index, &desired, at(0)).services.len(), 9);
        looks.done(&index, &desired, at(0));
        let mut seen = Vec::new();
        for turn in 0..6 {
            let due = looks.due();
            assert_eq!(due, seconds(60 + 20 * turn));
            let look = looks.next(&index, &desired, due);
            assert_eq!((look.services.len(), look.addresses.len()), (3, 0));
            seen.extend(look.services);
            looks.done(&index, &desired, due);
        }
        let all: Vec<_> = (0..9).map(service).collect();
        assert_eq!(seen, [all.clone(), all].concat());
    }

    #[test]
    fn what_lingers_is_looked_for_soon_and_then_less_and_less() {
        let mut index = running("reset");
        let mut looks = Looks::new(at(0));
        let desired = planned(&index);
        looks.next(&index, &desired, at(0));
        looks.done(&index, &desired, at(0));
        index.pod_is_gone("a", seconds(10));
        looks.changed(&index, &desired, &Changes::default(), seconds(10));
        let mut times = Vec::new();
        for _ in 0..5 {
            let due = looks.due();
            times.push(due);
            let look = looks.next(&index, &desired, due);
            assert_eq!((look.addresses, look.services), (BTreeSet::from([ip("10.0.1.1")]), vec![]));
            index.observe_cilium(&CiliumView::default(), true, due);
            looks.done(&index, &desired, due);
        }
        assert_eq!(times, [12, 14, 18, 26, 42].map(seconds));
        // Another one begins anew, and what Cilium has forgotten is looked for no more.
        index.pod_is_gone("b", seconds(43));
        looks.changed(&index, &desired, &Changes::default(), seconds(43));
        assert_eq!(looks.due(), seconds(45));
        let look = looks.next(&index, &desired, seconds(45));
        assert_eq!(look.addresses.len(), 2);
        index.observe_cilium(
            &CiliumView { forgotten: look.addresses, ..CiliumView::default() },
            true,
            seconds(45),
        );
        looks.done(&index, &desired, seconds(45));
        assert_eq!(looks.due(), seconds(60), "the next round");
    }

    #[test]
    fn new_services_and_suspects_are_looked_at_again() {
        let mut index = running("reset");
        let mut looks = Looks::new(at(0));
        let desired = planned(&index);
        looks.next(&index, &Desired::default(), at(0));
        looks.done(&index, &Desired::default(), at(0));
        let changes = Changes { services: Some(BTreeMap::new()), ..Changes::default() };
        looks.changed(&index, &desired, &changes, seconds(10));
        assert_eq!(looks.due(), seconds(12));
        let look = looks.next(&index, &desired, seconds(12));
        let of_egress = ServiceAddress { address: ip(CLUSTER_IP), port: FOU_PORT };
        assert_eq!(look.services, [of_egress]);
        let slots = BTreeMap::from([(of_egress, BTreeSet::from([ip("10.0.1.66")]))]);
        index.observe_cilium(&CiliumView { slots, ..CiliumView::default() }, true, seconds(12));
        looks.done(&index, &desired, seconds(12));
        assert_eq!(looks.due(), seconds(17), "when a suspect can be told from what is merely new");
        assert_eq!(looks.next(&index, &desired, seconds(17)).services, [of_egress]);
    }
}
