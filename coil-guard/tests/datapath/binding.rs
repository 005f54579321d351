//! Cilium's maps: refusing what is not known, doing without what is absent, following what changes.

use aya::maps::{HashMap, Map, MapData, MapError, MapType};
use coil_guard::{
    cilium::{CiliumError, CiliumMaps, SPECS4, SPECS6},
    datapath::{AttachKind, BoundMap, Report},
    plan::Mode,
};

use crate::harness::{Agent, Node, can_run, desired, eventually};

const POD: &str = "10.0.0.1";

fn wait_bound(agent: &mut Agent) -> Vec<BoundMap> {
    agent.report("Cilium's maps to be bound", |report| match report {
        Report::Bound(maps) => Some(maps.clone()),
        _ => None,
    })
}

fn wait_unbound(agent: &mut Agent, text: &str) {
    agent.report("the maps to be refused", |report| match report {
        Report::Unbound(error) if error.to_string().contains(text) => Some(()),
        _ => None,
    });
}

fn wait_attached(agent: &mut Agent) {
    agent.report("the pod to be attached", |report| match report {
        Report::Attached { .. } => Some(()),
        _ => None,
    });
}

/// Ids of the maps of a program; none when there is no such program.
fn maps_of(program: u32) -> Option<Vec<u32>> {
    let info = aya::programs::loaded_programs().filter_map(Result::ok).find(|info| info.id() == program)?;
    info.map_ids().unwrap()
}

fn ids(maps: &[BoundMap]) -> Vec<(String, u32)> {
    maps.iter().filter_map(|map| Some((map.name.clone(), map.id?))).collect()
}

#[test]
fn each_map_of_another_layout_is_refused_by_name() {
    if !can_run() {
        return;
    }
    let node = Node::new(AttachKind::Auto);
    for spec in SPECS4.iter().chain(&SPECS6) {
        let other_kind = if spec.kind == MapType::Hash { MapType::LruHash } else { MapType::Hash };
        let changes = [
            (other_kind, spec.key_size, spec.value_size),
            (spec.kind, spec.key_size + 4, spec.value_size),
            (spec.kind, spec.key_size, spec.value_size + 8),
        ];
        for (kind, key, value) in changes {
            node.cilium4();
            node.cilium6();
            node.map(spec.pin_name, kind, key, value, 64, 0);
            let error =
                CiliumMaps::open(&node.options.cilium_directory).expect_err("another layout was accepted");
            let text = error.to_string();
            assert!(matches!(error, CiliumError::Layout { .. }) && !error.is_missing(), "{text}");
            let found = format!("found type {kind:?}, {key}-byte keys, {value}-byte values");
            let expected = format!("expected type {:?}", spec.kind);
            for part in [spec.pin_name, &found, &expected] {
                assert!(text.contains(part), "{text} does not say {part}");
            }
        }
    }
}

#[test]
fn descriptors_of_ciliums_maps_can_only_read() {
    if !can_run() {
        return;
    }
    let node = Node::new(AttachKind::Auto);
    node.cilium4();
    let maps = CiliumMaps::open(&node.options.cilium_directory).unwrap();
    let backends = maps.maps.into_iter().find(|open| open.spec.pin_name == "cilium_lb4_backends_v3").unwrap();
    let map = Map::from_map_data(backends.map.unwrap().0).unwrap();
    let mut map: HashMap<MapData, u32, [u8; 12]> = HashMap::try_from(map).unwrap();
    assert!(matches!(map.get(&1, 0), Err(MapError::KeyNotFound)));
    let error = map.insert(1, [0; 12], 0).unwrap_err();
    assert!(format!("{error:?}").contains("PermissionDenied"), "{error:?}");
}

#[test]
fn other_flags_and_sizes_are_accepted() {
    if !can_run() {
        return;
    }
    let node = Node::new(AttachKind::Auto);
    node.cilium4();
    let services = SPECS4[1];
    // Read-only for programs and not preallocated, as Cilium 1.20 makes it.
    node.map(services.pin_name, services.kind, services.key_size, services.value_size, 1000, 0x81);
    CiliumMaps::open(&node.options.cilium_directory).unwrap();
}

#[test]
fn the_backends_of_an_old_cilium_get_their_own_sentence() {
    if !can_run() {
        return;
    }
    let node = Node::new(AttachKind::Auto);
    node.cilium4();
    std::fs::remove_file(node.options.cilium_directory.join("cilium_lb4_backends_v3")).unwrap();
    node.map("cilium_lb4_backends_v2", MapType::Hash, 4, 8, 64, 0);
    let error = CiliumMaps::open(&node.options.cilium_directory).unwrap_err();
    assert!(matches!(error, CiliumError::TooOld { .. }), "{error}");
    assert!(error.to_string().contains("Upgrade Cilium to 1.14"), "{error}");
}

#[test]
fn a_family_or_an_affinity_map_that_is_absent_gets_a_stand_in_of_our_own() {
    if !can_run() {
        return;
    }
    let node = Node::new(AttachKind::Auto);
    node.cilium4();
    std::fs::remove_file(node.options.cilium_directory.join("cilium_lb4_affinity")).unwrap();
    let before = node.cilium_pins();
    let _pod = node.pod("a", &[POD]);
    let mut agent = node.open();
    agent.apply(&desired(Mode::Reset, &[("a", &[POD])]));
    let bound = wait_bound(&mut agent);
    let absent: Vec<_> = bound.iter().filter(|map| map.id.is_none()).map(|map| map.name.as_str()).collect();
    assert_eq!(
        absent,
        [
            "cilium_lb4_affinity",
            "cilium_ct_any6_global",
            "cilium_lb6_services_v2",
            "cilium_lb6_backends_v3",
            "cilium_lb6_affinity",
            "cilium_lb_affinity_match"
        ]
    );
    wait_attached(&mut agent);
    assert_eq!(agent.datapath.snapshot().unwrap().bindings, bound);
    assert_eq!(node.cilium_pins(), before, "a map was made in Cilium's directory");

    // IPv6 is switched on later.
    node.cilium6();
    let bound = wait_bound(&mut agent);
    assert_eq!(bound.iter().filter(|map| map.id.is_some()).count(), 7);
    assert_eq!(agent.datapath.snapshot().unwrap().bindings, bound);
}

#[test]
fn maps_that_are_made_anew_are_followed_by_another_core_under_the_same_stub() {
    if !can_run() {
        return;
    }
    let node = Node::new(AttachKind::Auto);
    node.cilium4();
    let pod = node.pod("a", &[POD]);
    let mut agent = node.open();
    agent.apply(&desired(Mode::Reset, &[("a", &[POD])]));
    let first = wait_bound(&mut agent);
    wait_attached(&mut agent);
    let (stub, core) = (pod.tcx(), agent.datapath.snapshot().unwrap().cores["guard"]);
    let conntrack = SPECS4[0];
    node.map(conntrack.pin_name, conntrack.kind, conntrack.key_size, conntrack.value_size, 512, 0);
    let changed = std::time::Instant::now();
    let second = wait_bound(&mut agent);
    assert!(changed.elapsed() < std::time::Duration::from_secs(5), "took {:?}", changed.elapsed());
    assert_ne!(ids(&first), ids(&second));
    assert_eq!(pod.tcx(), stub, "the stub was replaced, too");
    let now = agent.datapath.snapshot().unwrap().cores["guard"];
    assert_ne!(now, core);
    let id = node.cilium_pins()[conntrack.pin_name];
    let used = maps_of(now).unwrap();
    assert!(used.contains(&id), "the core uses {used:?} and not the new map {id}");
    // The one before is gone, and with it what it held of Cilium's.
    eventually("the former core to be gone", || maps_of(core).map_or(Ok(()), Err));
}

#[test]
fn missing_maps_leave_programs_attached_and_are_bound_when_they_come_back() {
    if !can_run() {
        return;
    }
    let node = Node::new(AttachKind::Auto);
    let pod = node.pod("a", &[POD]);
    let mut agent = node.open();
    agent.apply(&desired(Mode::Reset, &[("a", &[POD])]));
    wait_unbound(&mut agent, "does not exist");
    assert!(pod.tcx().is_empty());
    assert_eq!(agent.datapath.progress().bound, Some(false));
    node.cilium4();
    wait_bound(&mut agent);
    wait_attached(&mut agent);
    node.remove_cilium();
    wait_unbound(&mut agent, "does not exist");
    assert_eq!(pod.tcx().len(), 1);
    assert!(node.cilium_pins().is_empty(), "a map was made in Cilium's directory");
    let core = agent.datapath.snapshot().unwrap().cores["guard"];
    node.cilium4();
    wait_bound(&mut agent);
    assert_ne!(agent.datapath.snapshot().unwrap().cores["guard"], core);
    assert_eq!(pod.tcx().len(), 1);
}

#[test]
fn another_layout_detaches_and_the_known_one_attaches_again() {
    if !can_run() {
        return;
    }
    let node = Node::new(AttachKind::Auto);
    node.cilium4();
    let pod = node.pod("a", &[POD]);
    let mut agent = node.open();
    agent.apply(&desired(Mode::Reset, &[("a", &[POD])]));
    wait_attached(&mut agent);
    let backends = SPECS4[2];
    node.map(backends.pin_name, backends.kind, backends.key_size, 16, 64, 0);
    wait_unbound(&mut agent, backends.pin_name);
    eventually("the program to be gone", || {
        let cores = agent.datapath.snapshot().unwrap().cores.len();
        let left = (pod.tcx(), node.link("a").exists(), cores);
        if left == (vec![], false, 0) { Ok(()) } else { Err(left) }
    });
    node.cilium_map(&backends);
    wait_attached(&mut agent);
    assert_eq!(pod.tcx().len(), 1);
}
