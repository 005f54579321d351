//! What the agent writes for the program.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use aya::maps::{HashMap, Map, MapData};
use coil_guard::{
    clock::Monotonic,
    datapath::{AttachKind, DatapathError, Options, Sizes, cleanup},
    plan::{CiliumView, Keep, MarkState, Mode},
};

use crate::harness::{Node, can_run, desired, egress, eventually, ip, mark, nothing, service};

#[test]
fn services_marks_and_heartbeat_are_what_the_plan_says() {
    if !can_run() {
        return;
    }
    let node = Node::new(AttachKind::Auto);
    let mut agent = node.open();
    let mut wanted = desired(Mode::Drain, &[]);
    let deadline = Monotonic::now().saturating_add(Duration::from_secs(30));
    wanted.marks = [
        (ip("10.1.0.1"), mark(MarkState::Ready, Keep::ForEver)),
        (ip("10.1.0.2"), mark(MarkState::Leaving, Keep::Until(deadline))),
        (ip("fd00::3"), mark(MarkState::Gone, Keep::No)),
    ]
    .into();
    let now = Monotonic::now();
    wanted.marks.get_mut(&ip("10.1.0.1")).unwrap().since = now;
    let applied = agent.datapath.apply(&wanted, now);
    assert!(applied.errors.is_empty(), "{:?}", applied.errors);
    assert_eq!(applied.services, [(service(), egress())]);
    let snapshot = agent.datapath.snapshot().unwrap();
    let marks: BTreeMap<_, _> =
        snapshot.marks.iter().map(|(address, mark)| (*address, (mark.state, mark.keep))).collect();
    assert_eq!(
        marks,
        [
            (ip("10.1.0.1"), (MarkState::Ready, Keep::ForEver)),
            (ip("10.1.0.2"), (MarkState::Leaving, Keep::Until(deadline))),
            (ip("fd00::3"), (MarkState::Gone, Keep::No)),
        ]
        .into()
    );
    assert_eq!(snapshot.marks[&ip("10.1.0.1")].since, now, "since when it was seen so");
    let guarded = &snapshot.services[&service()];
    assert_eq!((guarded.mode, guarded.egress.clone()), (Mode::Drain, Some(egress())));
    assert_eq!(guarded.tracked_since, Some(now));
    assert_eq!(snapshot.heartbeat_until, Some(now.saturating_add(Duration::from_secs(15))));
    assert_eq!(snapshot.egresses.len(), 1);

    assert_eq!(agent.datapath.apply(&wanted, now).writes, 0, "an unchanged plan was written again");
    wanted.marks.get_mut(&ip("10.1.0.1")).unwrap().state = MarkState::NotReady;
    assert_eq!(agent.datapath.apply(&wanted, now).writes, 1, "one changed backend is one write");

    let later = now.saturating_add(Duration::from_secs(11));
    agent.datapath.apply(&wanted, later);
    let snapshot = agent.datapath.snapshot().unwrap();
    assert_eq!(snapshot.marks[&ip("10.1.0.2")].valid_until, later.saturating_add(Duration::from_secs(60)));
    assert_eq!(snapshot.heartbeat_until, Some(later.saturating_add(Duration::from_secs(15))));
}

fn only_ready(node: &Node) -> u64 {
    let map = Map::from_map_data(MapData::from_pin(node.layout().join("AGENT")).unwrap()).unwrap();
    let agent: aya::maps::Array<_, coil_guard_common::abi::AgentState> = map.try_into().unwrap();
    agent.get(&0, 0).unwrap().only_ready
}

/// The program does not look for the mark of an ACTIVE backend while every mark is said to be READY.
#[test]
fn other_marks_than_ready_are_announced_before_they_are_written() {
    if !can_run() {
        return;
    }
    let node = Node::new(AttachKind::Auto);
    let mut agent = node.open();
    let mut wanted = desired(Mode::Reset, &[]);
    let ready = (ip("10.1.0.1"), mark(MarkState::Ready, Keep::ForEver));
    for state in [MarkState::Leaving, MarkState::NotReady, MarkState::Gone] {
        wanted.marks = [ready.clone()].into();
        agent.apply(&wanted);
        assert_eq!(only_ready(&node), 1, "before {state:?}");
        wanted.marks.insert(ip("10.1.0.2"), mark(state, Keep::No));
        agent.apply(&wanted);
        assert_eq!(only_ready(&node), 0, "with {state:?}");
        // Another agent takes it over as it is.
        drop(agent);
        agent = node.open();
        assert_eq!(only_ready(&node), 0, "with {state:?}, a new agent");
        agent.apply(&wanted);
        assert_eq!(only_ready(&node), 0, "with {state:?}, a new agent's plan");
    }
    wanted.marks = [ready].into();
    agent.apply(&wanted);
    assert_eq!(only_ready(&node), 1, "after all");
}

#[test]
fn nothing_is_renewed_while_a_watch_is_down() {
    if !can_run() {
        return;
    }
    let node = Node::new(AttachKind::Auto);
    let mut agent = node.open();
    let mut wanted = desired(Mode::Reset, &[]);
    wanted.marks = [(ip("10.1.0.1"), mark(MarkState::Ready, Keep::ForEver))].into();
    let now = Monotonic::now();
    agent.datapath.apply(&wanted, now);
    wanted.complete = false;
    wanted.marks.insert(ip("10.1.0.2"), mark(MarkState::Leaving, Keep::No));
    let later = now.saturating_add(Duration::from_secs(30));
    agent.datapath.apply(&wanted, later);
    let snapshot = agent.datapath.snapshot().unwrap();
    assert_eq!(snapshot.heartbeat_until, Some(now.saturating_add(Duration::from_secs(15))));
    assert_eq!(snapshot.marks[&ip("10.1.0.1")].valid_until, now.saturating_add(Duration::from_secs(600)));
    assert_eq!(snapshot.marks[&ip("10.1.0.2")].state, MarkState::Leaving, "news is written all the same");
}

#[test]
fn a_full_map_is_reported_and_takes_the_heartbeat_back() {
    if !can_run() {
        return;
    }
    let mut node = Node::new(AttachKind::Auto);
    node.options = Options { sizes: Sizes { marks: 2, ..Sizes::default() }, ..node.options.clone() };
    let mut agent = node.open();
    let mut wanted = desired(Mode::Reset, &[]);
    let now = Monotonic::now();
    wanted.marks =
        (1..=2).map(|last| (ip(&format!("10.1.0.{last}")), mark(MarkState::Ready, Keep::ForEver))).collect();
    assert!(agent.datapath.apply(&wanted, now).errors.is_empty());
    wanted.marks.insert(ip("10.1.0.3"), mark(MarkState::Ready, Keep::ForEver));
    let applied = agent.datapath.apply(&wanted, now);
    let [DatapathError::Full { what, max_entries: 2, flag, .. }] = &applied.errors[..] else {
        panic!("{:?}", applied.errors);
    };
    assert!(what.contains("10.1.0.3") && flag.contains("marks"), "{what} {flag}");
    let snapshot = agent.datapath.snapshot().unwrap();
    assert_eq!(snapshot.heartbeat_until, None, "the READY marks are not complete, and the heartbeat says so");
    assert_eq!(snapshot.marks.len(), 2, "what was there is lost");
}

#[test]
fn a_pinned_map_keeps_its_size_and_the_flags_are_warned_of() {
    if !can_run() {
        return;
    }
    let mut node = Node::new(AttachKind::Auto);
    let mut agent = node.open();
    agent.apply(&desired(Mode::Reset, &[]));
    drop(agent);
    node.options.sizes.inner_flows = 1024;
    let mut agent = node.open();
    agent.report("a warning that names the map and both sizes", |report| {
        let text = format!("{report:?}");
        (text.contains("INNER_FLOWS") && text.contains("131072") && text.contains("1024")).then_some(())
    });
}

#[test]
fn a_map_of_another_build_is_refused_and_cleanup_helps() {
    if !can_run() {
        return;
    }
    let node = Node::new(AttachKind::Auto);
    let mut agent = node.open();
    agent.apply(&desired(Mode::Reset, &[]));
    drop(agent);
    let path = node.layout().join("BACKEND_MARKS");
    std::fs::remove_file(&path).unwrap();
    let definition = aya_obj::Map::new_from_params(1, 16, 8, 16, 0);
    MapData::create(definition, "other", None).unwrap().pin(&path).unwrap();
    let error = coil_guard::datapath::Datapath::try_open(&node.options).unwrap_err().to_string();
    assert!(error.contains("BACKEND_MARKS") && error.contains("coil-guard cleanup"), "{error}");
    assert_eq!(cleanup(&node.options).unwrap().errors, Vec::<String>::new());
    node.open();
}

#[test]
fn an_egress_keeps_its_counters_over_a_restart() {
    if !can_run() {
        return;
    }
    let node = Node::new(AttachKind::Auto);
    let mut agent = node.open();
    agent.apply(&desired(Mode::Audit, &[]));
    let index = (0..9).find(|index| agent.datapath.egress_of(*index) == Some(egress())).unwrap();
    drop(agent);
    let mut agent = node.open();
    agent.apply(&desired(Mode::Drain, &[]));
    assert_eq!(agent.datapath.egress_of(index), Some(egress()));
}

#[test]
fn ciliums_view_holds_slots_and_backends_that_have_left_them() {
    if !can_run() {
        return;
    }
    let node = Node::new(AttachKind::Auto);
    node.cilium4();
    let pin = |name: &str| {
        Map::from_map_data(MapData::from_pin(node.options.cilium_directory.join(name)).unwrap()).unwrap()
    };
    let mut services: HashMap<_, [u8; 12], [u8; 12]> = pin("cilium_lb4_services_v2").try_into().unwrap();
    let mut backends: HashMap<_, u32, [u8; 12]> = pin("cilium_lb4_backends_v3").try_into().unwrap();
    let key = |slot: u8| [10, 96, 0, 10, 0x15, 0xb3, slot, 0, 17, 0, 0, 0];
    // Two selectable slots and one behind them.
    services.insert(key(0), [0, 0, 0, 0, 2, 0, 0, 1, 0, 0, 1, 0], 0).unwrap();
    for slot in 1..=3u8 {
        services.insert(key(slot), [slot, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0], 0).unwrap();
    }
    for id in 1..=4u8 {
        backends.insert(u32::from(id), [10, 1, 0, id, 0x15, 0xb3, 17, 0, 0, 0, 0, 0], 0).unwrap();
    }
    let agent = node.open();
    let view = |services: &[_], addresses: &[&str]| {
        agent.datapath.cilium_view(services, &addresses.iter().map(|text| ip(text)).collect())
    };
    let slots = [ip("10.1.0.1"), ip("10.1.0.2"), ip("10.1.0.3")].into();
    let expected = CiliumView { slots: [(service(), slots)].into(), forgotten: BTreeSet::new() };
    assert_eq!(view(&[service()], &["10.1.0.2"]).unwrap(), expected);
    // Out of the slots and still in the backends map, flows can be bound to 10.1.0.4.
    let expected = CiliumView { forgotten: [ip("10.1.0.5"), ip("fd00::5")].into(), ..CiliumView::default() };
    assert_eq!(view(&[], &["10.1.0.4", "10.1.0.5", "fd00::5"]).unwrap(), expected);
    node.remove_cilium();
    assert!(view(&[service()], &[]).unwrap_err().is_missing());
}

#[test]
fn switching_off_while_a_plan_is_being_carried_out_leaves_nothing() {
    if !can_run() {
        return;
    }
    let node = Node::new(AttachKind::Auto);
    node.cilium4();
    let mut agent = node.open();
    for _ in 0..20 {
        agent.apply(&desired(Mode::Reset, &[]));
        agent.apply(&nothing());
    }
    eventually("an empty pin directory", || if node.pins().is_empty() { Ok(()) } else { Err(node.pins()) });
    agent.apply(&desired(Mode::Reset, &[]));
    assert_eq!(agent.datapath.snapshot().unwrap().services.len(), 1);
}
