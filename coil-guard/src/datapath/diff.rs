//! What to write, as pure functions of what is there and what is wanted.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    time::Duration,
};

use coil_guard_common::abi;

use super::report::{mode_to_abi, to_mapped};
use crate::{
    clock::Monotonic,
    plan::{GuardedService, Keep, Mark, MarkState, ServiceAddress},
};

/// How long a mark is to be believed without being renewed.
pub(crate) const MARK_VALIDITY: Duration = Duration::from_secs(60);
/// How often marks are renewed.
pub(crate) const MARK_RENEWAL: Duration = Duration::from_secs(10);
/// The same of READY marks. They mean nothing without a heartbeat, which bounds them much closer; and there can be ten
/// thousand of them.
pub(crate) const READY_VALIDITY: Duration = Duration::from_secs(10 * 60);
/// The same.
pub(crate) const READY_RENEWAL: Duration = Duration::from_secs(2 * 60);
/// How long a heartbeat counts.
pub(crate) const HEARTBEAT_VALIDITY: Duration = Duration::from_secs(15);
/// How often it is sent. Two can be late before it is missed.
pub(crate) const HEARTBEAT_RENEWAL: Duration = Duration::from_secs(5);
/// How long a dead agent's word on what is guarded holds.
pub(crate) const SERVICE_VALIDITY: Duration = Duration::from_secs(24 * 60 * 60);
/// How often it is renewed.
pub(crate) const SERVICE_RENEWAL: Duration = Duration::from_secs(60 * 60);

/// Key of a mark.
pub(crate) type MarkKey = [u8; 16];

pub(crate) fn service_key(address: ServiceAddress) -> abi::ServiceKey {
    abi::ServiceKey { address: to_mapped(address.address), port: address.port.to_be_bytes(), pad: [0; 2] }
}

/// What is remembered in a mode.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Memory {
    Nothing,
    InnerFlows,
    GivenPorts,
}

const fn memory(mode: u8) -> Memory {
    match mode {
        abi::mode::AUDIT | abi::mode::DRAIN => Memory::InnerFlows,
        abi::mode::REWRITE => Memory::GivenPorts,
        _ => Memory::Nothing,
    }
}

/// The entry of a service. What a mode remembers counts as remembered since the mode last began to do so.
pub(crate) fn service_entry(
    old: Option<&abi::GuardedService>,
    wanted: &GuardedService,
    egress: u32,
    now: Monotonic,
) -> abi::GuardedService {
    let mode = mode_to_abi(wanted.mode);
    let remembered = memory(mode);
    let tracked_since = match old {
        _ if remembered == Memory::Nothing => 0,
        Some(old) if memory(old.mode) == remembered && old.tracked_since != 0 => old.tracked_since,
        _ => now.0,
    };
    abi::GuardedService {
        expires_at: now.saturating_add(SERVICE_VALIDITY).0,
        tracked_since,
        egress,
        mode,
        flags: if wanted.sport_auto { abi::SERVICE_SPORT_AUTO } else { 0 },
        pad: [0; 2],
    }
}

/// Whether an entry says the same, its expiry aside.
pub(crate) fn same_service(a: &abi::GuardedService, b: &abi::GuardedService) -> bool {
    abi::GuardedService { expires_at: 0, ..*a } == abi::GuardedService { expires_at: 0, ..*b }
}

/// The entry of a mark. Its `since` is when its state is first written, and not when it was seen: the program counts from
/// it how long packets that passed before may still be on their way.
pub(crate) fn mark_entry(mark: &Mark, old: Option<&abi::BackendMark>, now: Monotonic) -> abi::BackendMark {
    let validity = if mark.state == MarkState::Ready { READY_VALIDITY } else { MARK_VALIDITY };
    let since = old.filter(|old| old.state == state_to_abi(mark.state)).map_or(now.0, |old| old.since);
    // Rounded up: a successor that counts from it ends no later.
    let seen_before = since.saturating_sub(mark.since.0).div_ceil(1000);
    abi::BackendMark {
        keep_until: match mark.keep {
            Keep::No => 0,
            Keep::Until(time) => time.0,
            Keep::ForEver => abi::FOR_EVER,
        },
        valid_until: now.saturating_add(validity).0,
        since,
        state: state_to_abi(mark.state),
        pad: [0; 3],
        seen_before: u32::try_from(seen_before).unwrap_or(u32::MAX),
    }
}

const fn state_to_abi(state: MarkState) -> u8 {
    match state {
        MarkState::Ready => abi::mark::READY,
        MarkState::NotReady => abi::mark::NOT_READY,
        MarkState::Leaving => abi::mark::LEAVING,
        MarkState::Gone => abi::mark::GONE,
    }
}

fn same_mark(a: &abi::BackendMark, b: &abi::BackendMark) -> bool {
    abi::BackendMark { valid_until: 0, ..*a } == abi::BackendMark { valid_until: 0, ..*b }
}

/// Marks to write, in order, and marks to remove.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct MarkChanges {
    pub(crate) put: Vec<(IpAddr, abi::BackendMark)>,
    pub(crate) remove: Vec<MarkKey>,
}

/// Which marks are written although they have not changed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Renewal {
    pub(crate) ready: bool,
    pub(crate) others: bool,
}

/// Compares the marks of the addresses `among`. READY ones come first, so that a flow never meets a leaving backend before its
/// replacement is known.
pub(crate) fn mark_changes(
    have: &BTreeMap<MarkKey, abi::BackendMark>,
    want: &BTreeMap<IpAddr, Mark>,
    among: &BTreeSet<IpAddr>,
    renewal: Renewal,
    now: Monotonic,
) -> MarkChanges {
    let mut changes = MarkChanges::default();
    for address in among {
        let key = to_mapped(*address);
        let old = have.get(&key);
        let Some(mark) = want.get(address) else {
            changes.remove.extend(old.map(|_| key));
            continue;
        };
        let entry = mark_entry(mark, old, now);
        let renew = if mark.state == MarkState::Ready { renewal.ready } else { renewal.others };
        if renew || !old.is_some_and(|old| same_mark(old, &entry)) {
            changes.put.push((*address, entry));
        }
    }
    changes.put.sort_by_key(|(_, entry)| entry.state != abi::mark::READY);
    changes
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{super::report::from_mapped, *};
    use crate::{
        datapath::tables::mark_snapshot,
        plan::{EgressName, Mode},
    };

    fn egress() -> EgressName {
        EgressName { namespace: "internet".into(), name: "egress".into() }
    }

    fn service(mode: Mode) -> GuardedService {
        GuardedService { egress: egress(), mode, sport_auto: false }
    }

    fn mark(state: MarkState, keep: Keep) -> Mark {
        Mark { egress: egress(), state, keep, since: Monotonic(5) }
    }

    #[test]
    fn flows_stay_remembered_from_audit_to_drain_and_anew_after_reset() {
        let audit = service_entry(None, &service(Mode::Audit), 0, Monotonic(100));
        assert_eq!(audit.tracked_since, 100);
        let drain = service_entry(Some(&audit), &service(Mode::Drain), 0, Monotonic(200));
        assert_eq!(drain.tracked_since, 100);
        let reset = service_entry(Some(&drain), &service(Mode::Reset), 0, Monotonic(300));
        assert_eq!(reset.tracked_since, 0);
        let again = service_entry(Some(&reset), &service(Mode::Drain), 0, Monotonic(400));
        assert_eq!(again.tracked_since, 400);
    }

    /// Else a drain would end later with each restart, by what lay between the event and the mark.
    #[test]
    fn a_successor_counts_from_when_its_predecessor_saw_the_state() {
        let (seen, written) = (Monotonic(5_000_123), Monotonic(17_000_456));
        let leaving = Mark { since: seen, ..mark(MarkState::Leaving, Keep::Until(Monotonic(6_000_000_000))) };
        let first = mark_entry(&leaving, None, written);
        let recovered = mark_snapshot(&first).unwrap().since;
        assert!(recovered <= seen && seen.0 - recovered.0 < 1000, "{recovered:?}");
        let again =
            mark_entry(&Mark { since: recovered, ..leaving }, Some(&first), Monotonic(900_000_000_000));
        assert_eq!((again.since, again.seen_before), (written.0, first.seen_before));
    }

    #[test]
    fn given_ports_count_since_rewrite_was_last_turned_on() {
        let drain = service_entry(None, &service(Mode::Drain), 0, Monotonic(100));
        let rewrite = service_entry(Some(&drain), &service(Mode::Rewrite), 0, Monotonic(200));
        let restarted = service_entry(Some(&rewrite), &service(Mode::Rewrite), 0, Monotonic(300));
        let drain = service_entry(Some(&restarted), &service(Mode::Drain), 0, Monotonic(400));
        assert_eq!([rewrite, restarted, drain].map(|entry| entry.tracked_since), [200, 200, 400]);
    }

    #[test]
    fn a_later_expiry_alone_is_no_change() {
        let first = service_entry(None, &service(Mode::Drain), 0, Monotonic(100));
        let second = service_entry(Some(&first), &service(Mode::Drain), 0, Monotonic(200));
        assert_ne!(first, second);
        assert!(same_service(&first, &second));
    }

    /// All that there are.
    fn changes(
        have: &BTreeMap<MarkKey, abi::BackendMark>,
        want: &BTreeMap<IpAddr, Mark>,
        now: Monotonic,
    ) -> MarkChanges {
        let among = want.keys().copied().chain(have.keys().map(|key| from_mapped(*key))).collect();
        mark_changes(have, want, &among, Renewal::default(), now)
    }

    #[test]
    fn ready_backends_are_written_before_leaving_ones() {
        let leaving: IpAddr = "10.0.0.1".parse().unwrap();
        let ready: IpAddr = "10.0.0.2".parse().unwrap();
        let want =
            [(leaving, mark(MarkState::Leaving, Keep::No)), (ready, mark(MarkState::Ready, Keep::ForEver))]
                .into();
        let found = changes(&BTreeMap::new(), &want, Monotonic(0));
        assert_eq!(found.put.iter().map(|(address, _)| *address).collect::<Vec<_>>(), [ready, leaving]);
    }

    fn marks() -> impl Strategy<Value = BTreeMap<IpAddr, Mark>> {
        let state = prop_oneof![
            Just(MarkState::Ready),
            Just(MarkState::NotReady),
            Just(MarkState::Leaving),
            Just(MarkState::Gone)
        ];
        let keep = prop_oneof![
            Just(Keep::No),
            Just(Keep::ForEver),
            (1u64..9).prop_map(|t| Keep::Until(Monotonic(t)))
        ];
        proptest::collection::btree_map(
            (0u8..12).prop_map(|last| IpAddr::from([10, 0, 0, last])),
            (state, keep).prop_map(|(state, keep)| mark(state, keep)),
            0..12,
        )
    }

    proptest! {
        #[test]
        fn applying_the_changes_gives_what_is_wanted_and_then_nothing_is_left(old in marks(), new in marks()) {
            let now = Monotonic(1000);
            let mut have = BTreeMap::new();
            for wanted in [&old, &new] {
                let found = changes(&have, wanted, now);
                for key in found.remove {
                    have.remove(&key);
                }
                have.extend(found.put.iter().map(|(address, entry)| (to_mapped(*address), *entry)));
                let expected: BTreeMap<_, _> =
                    wanted.iter().map(|(address, mark)| (to_mapped(*address), mark_entry(mark, None, now))).collect();
                prop_assert_eq!(&have, &expected);
                prop_assert_eq!(changes(&have, wanted, now), MarkChanges::default());
            }
        }

        #[test]
        fn what_is_among_them_alone_is_looked_at(old in marks(), new in marks(), picked in any::<u16>()) {
            let now = Monotonic(1000);
            let have: BTreeMap<_, _> =
                old.iter().map(|(address, mark)| (to_mapped(*address), mark_entry(mark, None, now))).collect();
            let all: Vec<IpAddr> = old.keys().chain(new.keys()).copied().collect();
            let among: BTreeSet<IpAddr> =
                all.into_iter().enumerate().filter(|(at, _)| picked >> (at % 16) & 1 == 1).map(|(_, ip)| ip).collect();
            let whole = changes(&have, &new, now);
            let part = mark_changes(&have, &new, &among, Renewal::default(), now);
            let put: Vec<_> = whole.put.into_iter().filter(|(address, _)| among.contains(address)).collect();
            let remove: Vec<_> = whole.remove.into_iter().filter(|key| among.contains(&from_mapped(*key))).collect();
            prop_assert_eq!((part.put, part.remove), (put, remove));
        }

        #[test]
        fn a_mark_says_since_when_its_state_is_written(first in mark_strategy(), second in mark_strategy()) {
            let before = mark_entry(&first, None, Monotonic(1000));
            let after = mark_entry(&second, Some(&before), Monotonic(2000));
            prop_assert_eq!(before.since, 1000);
            prop_assert_eq!(after.since, if before.state == after.state { 1000 } else { 2000 });
        }

        #[test]
        fn one_changed_backend_is_one_write(old in marks(), change in mark_strategy()) {
            let now = Monotonic(1000);
            let have: BTreeMap<_, _> =
                old.iter().map(|(address, mark)| (to_mapped(*address), mark_entry(mark, None, now))).collect();
            let mut new = old.clone();
            new.insert("10.9.9.9".parse().unwrap(), change);
            let found = changes(&have, &new, now);
            prop_assert_eq!((found.put.len(), found.remove.len()), (1, 0));
        }
    }

    fn mark_strategy() -> impl Strategy<Value = Mark> {
        prop_oneof![Just(mark(MarkState::Ready, Keep::ForEver)), Just(mark(MarkState::Gone, Keep::No))]
    }
}
