//! The core program, which all pods share: it outlives the agent, comes back when somebody takes it away, and follows a layout.

use std::{fs, time::Duration};

use aya::maps::{Map, MapData, ProgramArray};
use coil_guard::{
    datapath::{AttachKind, How, Report, Snapshot, cleanup},
    plan::Mode,
};
use coil_guard_common::abi::{core_slot, maps};

use crate::harness::{Agent, Node, PodNamespace, can_run, desired, eventually};

const POD: &str = "10.0.0.1";
const PODS: [(&str, &[&str]); 3] = [("a", &["10.0.0.1"]), ("b", &["10.0.0.2"]), ("c", &["10.0.0.3"])];

fn wait_attached(agent: &mut Agent, uid: &str) -> How {
    agent.report("the pod to be attached", |report| match report {
        Report::Attached { pod, how, .. } if pod == uid => Some(*how),
        _ => None,
    })
}

fn core_of(node: &Node) -> Option<u32> {
    Snapshot::read(&node.options.pin_directory).expect("a snapshot").cores.get("guard").copied()
}

#[test]
fn all_pods_share_one_core_that_outlives_the_agent() {
    if !can_run() {
        return;
    }
    let node = Node::new(AttachKind::Auto);
    node.cilium4();
    let pods: Vec<_> = PODS.iter().map(|(name, addresses)| node.pod(name, addresses)).collect();
    let mut agent = node.open();
    agent.apply(&desired(Mode::Reset, &PODS));
    for (uid, _) in PODS {
        assert_eq!(wait_attached(&mut agent, uid), How::Fresh);
    }
    let stubs: Vec<u32> = pods.iter().flat_map(PodNamespace::tcx).collect();
    assert_eq!(stubs.len(), PODS.len());
    let core = core_of(&node).expect("a core");
    drop(agent);
    assert_eq!(core_of(&node), Some(core), "the core went with the agent");
    assert_eq!(pods.iter().flat_map(PodNamespace::tcx).collect::<Vec<_>>(), stubs);
    let done = cleanup(&node.options).unwrap();
    assert_eq!(done.errors, Vec::<String>::new());
    let gone = |id: u32| {
        let found = aya::programs::loaded_programs().filter_map(Result::ok).any(|info| info.id() == id);
        if found { Err(id) } else { Ok(()) }
    };
    eventually("the core to be gone after a cleanup", || gone(core));
}

#[test]
fn a_core_that_somebody_took_away_is_loaded_anew() {
    if !can_run() {
        return;
    }
    let node = Node::new(AttachKind::Auto);
    node.cilium4();
    let _pod = node.pod("a", &[POD]);
    let mut agent = node.open();
    agent.apply(&desired(Mode::Reset, &[("a", &[POD])]));
    wait_attached(&mut agent, "a");
    let map = Map::from_map_data(MapData::from_pin(node.layout().join(maps::CORES)).unwrap()).unwrap();
    ProgramArray::try_from(map).unwrap().clear_index(&u32::from(core_slot::GUARD)).unwrap();
    assert_eq!(core_of(&node), None);
    agent.report("a word about it", |report| match report {
        Report::Warning(text) if text.contains("core program \"guard\"") => Some(()),
        _ => None,
    });
    eventually("the core to be back", || core_of(&node).map(drop).ok_or(()));
}

fn cores(node: &Node) -> (Vec<&'static str>, &'static str) {
    let snapshot = Snapshot::read(&node.options.pin_directory).expect("a snapshot");
    (snapshot.cores.keys().copied().collect(), snapshot.pods["a"].core)
}

#[test]
fn pods_for_which_nothing_is_written_go_on_in_the_core_that_cannot() {
    if !can_run() {
        return;
    }
    let node = Node::new(AttachKind::Auto);
    node.cilium4();
    let _pod = node.pod("a", &[POD]);
    let mut agent = node.open();
    agent.apply(&desired(Mode::Rewrite, &[("a", &[POD])]));
    assert_eq!(wait_attached(&mut agent, "a"), How::Fresh);
    assert_eq!(cores(&node), (vec!["read-only"], "read-only"));
    agent.apply(&desired(Mode::Reset, &[("a", &[POD])]));
    assert_eq!(wait_attached(&mut agent, "a"), How::Replaced);
    assert_eq!(cores(&node).1, "guard");
    agent.apply(&desired(Mode::Audit, &[("a", &[POD])]));
    assert_eq!(wait_attached(&mut agent, "a"), How::Replaced);
    assert_eq!(cores(&node).1, "read-only");
}

#[test]
fn where_nothing_may_write_the_core_that_can_goes_at_once() {
    if !can_run() {
        return;
    }
    let mut node = Node::new(AttachKind::Auto);
    node.cilium4();
    let _pod = node.pod("a", &[POD]);
    let mut agent = node.open();
    agent.apply(&desired(Mode::Reset, &[("a", &[POD])]));
    wait_attached(&mut agent, "a");
    drop(agent);
    node.options.read_only = true;
    let mut agent = node.open();
    agent.apply(&desired(Mode::Rewrite, &[("a", &[POD])]));
    assert_eq!(wait_attached(&mut agent, "a"), How::Replaced);
    assert_eq!(cores(&node), (vec!["read-only"], "read-only"));
}

/// As it is for the new agent of an upgrade: the directory of the version before holds links, programs and maps.
#[test]
fn a_former_layout_guards_until_this_one_does_and_is_removed() {
    if !can_run() {
        return;
    }
    let node = Node::new(AttachKind::Auto);
    node.cilium4();
    let pod = node.pod("a", &[POD]);
    let wanted = desired(Mode::Reset, &[("a", &[POD])]);
    let mut agent = node.open();
    agent.apply(&wanted);
    wait_attached(&mut agent, "a");
    drop(agent);
    let (before, former) = (pod.tcx(), node.options.pin_directory.join("v1"));
    fs::rename(node.layout(), &former).unwrap();

    let mut agent = node.open();
    assert_eq!(pod.tcx(), before, "the former guard was taken away before the new one came");
    agent.apply(&wanted);
    assert_eq!(wait_attached(&mut agent, "a"), How::Fresh);
    eventually("the former layout to be gone", || {
        let left = (pod.tcx(), former.exists());
        if left.0.len() == 1 && left.0 != before && !left.1 { Ok(()) } else { Err(left) }
    });
}

/// Every pod's program is looked at, and none is loaded anew.
#[test]
fn an_agent_that_finds_many_pods_guarded_is_through_with_them_at_once() {
    const MANY: usize = 24;
    if !can_run() {
        return;
    }
    let node = Node::new(AttachKind::Auto);
    node.cilium4();
    let names: Vec<String> = (0..MANY).map(|number| format!("pod-{number}")).collect();
    let addresses: Vec<[String; 1]> = (0..MANY).map(|number| [format!("10.0.1.{number}")]).collect();
    let addresses: Vec<[&str; 1]> = addresses.iter().map(|[address]| [address.as_str()]).collect();
    let wanted: Vec<(&str, &[&str])> =
        names.iter().map(String::as_str).zip(addresses.iter().map(<[&str; 1]>::as_slice)).collect();
    let pods: Vec<_> = wanted.iter().map(|(name, addresses)| node.pod(name, addresses)).collect();
    let settle = || {
        let mut agent = node.open();
        let began = std::time::Instant::now();
        agent.apply(&desired(Mode::Reset, &wanted));
        eventually("all pods to be settled", || {
            let progress = agent.datapath.progress();
            if progress.settled && progress.attached == MANY { Ok(()) } else { Err(progress) }
        });
        began.elapsed()
    };
    let fresh = settle();
    let before = Snapshot::read(&node.options.pin_directory).unwrap();
    let again = settle();
    let after = Snapshot::read(&node.options.pin_directory).unwrap();
    eprintln!("{MANY} pods: {fresh:.0?} at first, {again:.0?} again");
    assert_eq!(before.pods, after.pods, "a program was loaded anew");
    assert_ne!(before.cores, after.cores);
    assert!(pods.iter().all(|pod| pod.tcx().len() == 1));
    assert!(again < Duration::from_secs(2), "took {again:?}");
}
