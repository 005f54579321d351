//! The verdict about a backend, against the design's prose, in every combination of what it looks at.

mod prose;

use coil_guard_common::{
    abi::{BackendMark, FOR_EVER, InnerFlow, PinnedPort, Previous, mark},
    cilium::BACKEND_TERMINATING,
    decide::{Backend, DrainChange, Entry, Judgement, Master, Unmarked, World, judge},
    inner::FlowPacket,
};

use crate::prose::Facts;

const ID: u32 = 7;
const NOW: u64 = 1_000_000_000_000;
const ADDRESS: [u8; 16] = [9; 16];

/// A world that has one backend and no packet.
struct One {
    facts: Facts,
    present: bool,
    noted: bool,
    /// What the first look finds instead, because the element's memory is just given to another one.
    misread: Misread,
    looks: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Misread {
    Nothing,
    BackendMissing,
    BackendTerminating,
    MarkGone,
}

impl One {
    fn misreads(&self, what: Misread) -> bool {
        self.looks == 1 && self.misread == what
    }
}

impl World for One {
    fn now(&self) -> u64 {
        self.facts.now
    }
    fn backend(&mut self, id: u32) -> Option<Backend> {
        assert_eq!(id, ID);
        self.looks += 1;
        let state =
            if self.misreads(Misread::BackendTerminating) { BACKEND_TERMINATING } else { self.facts.state };
        let present = self.present && !self.misreads(Misread::BackendMissing);
        present.then_some(Backend { address: ADDRESS, state })
    }
    fn mark(&mut self, address: &[u8; 16]) -> Option<BackendMark> {
        assert_eq!(*address, ADDRESS);
        let gone = BackendMark {
            keep_until: 0,
            valid_until: FOR_EVER,
            since: 1,
            state: mark::GONE,
            pad: [0; 3],
            seen_before: 0,
        };
        if self.misreads(Misread::MarkGone) { Some(gone) } else { self.facts.mark }
    }
    fn only_ready_marks(&mut self) -> bool {
        unreachable!()
    }
    fn heartbeat_fresh(&mut self) -> u64 {
        u64::from(self.facts.fresh)
    }
    fn leaving_since(&mut self, address: &[u8; 16], id: u32, terminating: bool) -> u64 {
        assert_eq!(terminating, self.facts.state == BACKEND_TERMINATING);
        assert_eq!((*address, id), (ADDRESS, ID));
        self.noted = true;
        self.facts.first_seen
    }
    fn unmarked_drain(&self) -> u64 {
        self.facts.unmarked_drain
    }

    fn client_port(&self) -> [u8; 2] {
        unreachable!()
    }
    fn fou_port(&self) -> [u8; 2] {
        unreachable!()
    }
    fn spread(&self, _: bool) -> u32 {
        unreachable!()
    }
    fn slot(&mut self, _: u16) -> Option<u32> {
        unreachable!()
    }
    fn affinity(&mut self, _: &Master) -> Option<u32> {
        unreachable!()
    }
    fn affinity_match(&mut self, _: &Master, _: u32) -> bool {
        unreachable!()
    }
    fn pin(&mut self) -> Option<PinnedPort> {
        unreachable!()
    }
    fn is_returning(&mut self) -> bool {
        unreachable!()
    }
    fn note_return(&mut self, _: [u8; 2]) -> bool {
        unreachable!()
    }
    fn set_pin(&mut self, _: &PinnedPort) -> bool {
        unreachable!()
    }
    fn entry(&mut self, _: [u8; 2]) -> Option<Entry> {
        unreachable!()
    }
    fn create(&mut self, _: [u8; 2], _: &Master, _: u32) -> bool {
        unreachable!()
    }
    fn repair(&mut self, _: [u8; 2], _: &Entry, _: &Master, _: u32) -> bool {
        unreachable!()
    }
    fn swap(&mut self, _: [u8; 2], _: u64, _: u32) -> bool {
        unreachable!()
    }
    fn keep_replies(&mut self, _: [u8; 2], _: &Master, _: u32) {
        unreachable!()
    }
    fn replies_are_kept(&mut self, _: [u8; 2], _: u32) -> bool {
        unreachable!()
    }
    fn previous(&mut self) -> Option<Previous> {
        unreachable!()
    }
    fn set_previous(&mut self, _: u32, _: u64) {
        unreachable!()
    }
    fn report(&mut self, _: u8, _: u32, _: u32) {
        unreachable!()
    }
    fn flow_packet(&self) -> FlowPacket {
        unreachable!()
    }
    fn flow(&mut self) -> Option<InnerFlow> {
        unreachable!()
    }
    fn remember(&mut self, _: u32, _: u32) {
        unreachable!()
    }
    fn memory_since(&self) -> u64 {
        unreachable!()
    }
    fn count_drain(&mut self, _: &[u8; 16], _: DrainChange) {
        unreachable!()
    }
}

fn judged(facts: Facts, id: u64, present: bool) -> (Judgement, bool) {
    let mut world = One { facts, present, noted: false, misread: Misread::Nothing, looks: 0 };
    let mut judgement = Judgement { began: 99, id: 99, present: !present, usable: true, keeps: true };
    let unmarked = if facts.drain { Unmarked::Awhile } else { Unmarked::No };
    judge(&mut world, id, unmarked, &mut judgement);
    (judgement, world.noted)
}

/// Times around the one that decides: before it, at it, after it, and the ends of the scale.
const TIMES: [u64; 5] = [0, NOW - 1, NOW, NOW + 1, FOR_EVER];
const UNMARKED_DRAIN: u64 = 5_000_000_000;
const FIRST_SEEN: [u64; 4] = [NOW, NOW - UNMARKED_DRAIN + 1, NOW - UNMARKED_DRAIN, NOW - 2 * UNMARKED_DRAIN];

fn marks() -> Vec<Option<BackendMark>> {
    let mut all = vec![None];
    for state in 0..=mark::GONE + 1 {
        for keep_until in TIMES {
            for valid_until in TIMES {
                all.push(Some(BackendMark {
                    keep_until,
                    valid_until,
                    since: NOW - 77,
                    state,
                    pad: [0; 3],
                    seen_before: 0,
                }));
            }
        }
    }
    all
}

fn for_all(mut check: impl FnMut(Facts)) {
    let states = [0, 1, 2, 3, 4, 5, 8, 0x7f, 0x80, 0xff];
    for mark in marks() {
        for state in states {
            for first_seen in FIRST_SEEN {
                for (fresh, drain) in [(false, false), (false, true), (true, false), (true, true)] {
                    check(Facts {
                        now: NOW,
                        state,
                        mark,
                        fresh,
                        drain,
                        first_seen,
                        unmarked_drain: UNMARKED_DRAIN,
                    });
                }
            }
        }
    }
}

#[test]
fn verdict_is_the_one_of_the_prose() {
    let mut cases = 0;
    for_all(|facts| {
        let (judgement, _) = judged(facts, u64::from(ID), true);
        let expected = facts.verdict();
        assert_eq!(
            (judgement.id, judgement.present, judgement.usable, judgement.keeps),
            (ID, true, expected.usable, expected.keeps),
            "{facts:?}"
        );
        cases += 1;
    });
    assert_eq!(cases, (1 + 6 * 25) * 10 * 4 * 4);
}

#[test]
fn leaving_begins_with_the_mark_that_explains_it_or_when_it_was_first_seen() {
    for_all(|facts| {
        let (judgement, noted) = judged(facts, u64::from(ID), true);
        let explained = facts.explained();
        let expected = match (judgement.usable, explained, facts.drain) {
            (true, ..) | (false, false, false) => 0,
            (false, true, _) => NOW - 77,
            (false, false, true) => facts.first_seen,
        };
        assert_eq!(judgement.began, expected, "{facts:?}");
        assert_eq!(noted, !judgement.usable && !explained && facts.drain, "{facts:?}");
    });
}

#[test]
fn missing_backend_and_impossible_id_are_absent() {
    for_all(|facts| {
        assert_eq!(judged(facts, u64::from(ID), false).0, Judgement::absent(ID));
        assert_eq!(judged(facts, u64::from(ID) | 1 << 32, true).0, Judgement::absent(0));
    });
}

/// Elements of a hash map are read without a lock; what takes a flow off a backend is looked at twice.
#[test]
fn one_look_that_finds_another_element_takes_no_flow_off_a_healthy_backend() {
    let ready = BackendMark {
        keep_until: 0,
        valid_until: FOR_EVER,
        since: 1,
        state: mark::READY,
        pad: [0; 3],
        seen_before: 0,
    };
    for misread in [Misread::BackendMissing, Misread::BackendTerminating, Misread::MarkGone] {
        // With the agent's word, and by Cilium's state alone.
        for mark in [Some(ready), None] {
            let facts = Facts {
                now: NOW,
                mark,
                fresh: mark.is_some(),
                state: 0,
                drain: false,
                first_seen: NOW,
                unmarked_drain: UNMARKED_DRAIN,
            };
            let mut world = One { facts, present: true, noted: false, misread, looks: 0 };
            let mut judgement = Judgement::absent(0);
            judge(&mut world, u64::from(ID), Unmarked::No, &mut judgement);
            assert!(judgement.present && judgement.usable && judgement.keeps, "{misread:?}: {judgement:?}");
        }
    }
}
