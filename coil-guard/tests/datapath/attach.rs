//! TCX attachment: pins, replacing, faults, and leaving nothing.

use aya::programs::links::{FdLink, PinnedLink};
use coil_guard::{
    datapath::{AttachKind, Attachment, Datapath, How, Opened, Report, Snapshot, cleanup},
    plan::{Mode, Want},
};

use crate::harness::{Agent, Node, can_run, client, desired, eventually, nothing};

const POD: &str = "10.0.0.1";

fn link_id(node: &Node, uid: &str) -> u32 {
    FdLink::from(PinnedLink::from_pin(node.link(uid)).expect("a pinned link")).info().expect("link info").id()
}

fn wait_attached(agent: &mut Agent, uid: &str) -> (How, Attachment) {
    agent.report("the pod to be attached", |report| match report {
        Report::Attached { pod, how, attachment, .. } if pod == uid => Some((*how, *attachment)),
        _ => None,
    })
}

#[test]
fn a_pod_is_attached_ahead_of_others_and_detached_without_a_trace() {
    if !can_run() {
        return;
    }
    let node = Node::new(AttachKind::Auto);
    node.cilium4();
    let before = node.cilium_pins();
    let pod = node.pod("a", &[POD]);
    let mut agent = node.open();
    agent.apply(&desired(Mode::Reset, &[("a", &[POD])]));
    assert_eq!(wait_attached(&mut agent, "a"), (How::Fresh, Attachment::Tcx));
    let snapshot = agent.datapath.snapshot().unwrap();
    assert_eq!(pod.tcx(), [snapshot.pods["a"].program_id]);
    assert_eq!(snapshot.pods["a"].name, "default/client-a");

    agent.apply(&desired(Mode::Reset, &[]));
    eventually("program, pin and record to be gone", || {
        let left = (pod.tcx(), node.link("a").exists(), agent.datapath.snapshot().unwrap().pods.len());
        if left == (vec![], false, 0) { Ok(()) } else { Err(left) }
    });
    assert_eq!(node.cilium_pins(), before, "Cilium's directory was changed");
}

#[test]
fn when_no_egress_is_guarded_nothing_is_pinned() {
    if !can_run() {
        return;
    }
    let node = Node::new(AttachKind::Auto);
    node.cilium4();
    let pod = node.pod("a", &[POD]);
    let mut agent = node.open();
    assert!(node.pins().is_empty(), "pinned before anything is guarded: {:?}", node.pins());
    for _ in 0..3 {
        agent.apply(&desired(Mode::Drain, &[("a", &[POD])]));
        wait_attached(&mut agent, "a");
        agent.apply(&nothing());
        eventually("an empty pin directory", || {
            let left = (node.pins(), pod.tcx());
            if left == (vec![], vec![]) { Ok(()) } else { Err(left) }
        });
    }
}

#[test]
fn an_agent_that_starts_again_keeps_the_pods_and_replaces_the_core() {
    if !can_run() {
        return;
    }
    let mut node = Node::new(AttachKind::Auto);
    node.cilium4();
    let pod = node.pod("a", &[POD]);
    let wanted = desired(Mode::Reset, &[("a", &[POD])]);
    let mut agent = node.open();
    agent.apply(&wanted);
    wait_attached(&mut agent, "a");
    let (link, first) = (link_id(&node, "a"), agent.datapath.snapshot().unwrap());
    drop(agent);
    assert_eq!(pod.tcx().len(), 1, "the program went with the agent");

    let mut agent = node.open();
    assert_eq!(agent.datapath.remembered().services.len(), 1);
    agent.apply(&wanted);
    assert_eq!(wait_attached(&mut agent, "a").0, How::Kept);
    let second = agent.datapath.snapshot().unwrap();
    assert_eq!(link_id(&node, "a"), link, "the link was made anew");
    assert_eq!(first.pods, second.pods);
    assert_eq!(pod.tcx(), [second.pods["a"].program_id]);
    assert_ne!(first.cores["guard"], second.cores["guard"], "the core is the one of the agent before");
    drop(agent);

    // Other constants are another stub, in the same link.
    node.options.unmarked_drain *= 2;
    let mut agent = node.open();
    agent.apply(&wanted);
    assert_eq!(wait_attached(&mut agent, "a").0, How::Replaced);
    let third = agent.datapath.snapshot().unwrap();
    assert_eq!(link_id(&node, "a"), link, "the link was made anew");
    assert_ne!(second.pods["a"].program_id, third.pods["a"].program_id);
    assert_eq!(second.pods["a"].guarded_since, third.pods["a"].guarded_since);
    assert_eq!(pod.tcx(), [third.pods["a"].program_id]);
}

#[test]
fn what_was_switched_off_while_no_agent_ran_is_taken_down() {
    if !can_run() {
        return;
    }
    let node = Node::new(AttachKind::Auto);
    node.cilium4();
    let pod = node.pod("a", &[POD]);
    let mut agent = node.open();
    agent.apply(&desired(Mode::Reset, &[("a", &[POD])]));
    wait_attached(&mut agent, "a");
    drop(agent);

    let mut agent = node.open();
    let incomplete = coil_guard::plan::Desired::default();
    agent.apply(&incomplete);
    assert_eq!(pod.tcx().len(), 1, "taken down by a plan that is not complete");
    agent.apply(&nothing());
    eventually("an empty pin directory", || {
        let left = (node.pins(), pod.tcx());
        if left == (vec![], vec![]) { Ok(()) } else { Err(left) }
    });
}

#[test]
fn a_link_whose_interface_was_replaced_is_made_anew() {
    if !can_run() {
        return;
    }
    let node = Node::new(AttachKind::Auto);
    node.cilium4();
    let pod = node.pod("a", &[POD]);
    let mut agent = node.open();
    agent.apply(&desired(Mode::Reset, &[("a", &[POD])]));
    wait_attached(&mut agent, "a");
    pod.run("ip link del eth0");
    pod.add_interface(&[POD]);
    assert_eq!(wait_attached(&mut agent, "a").0, How::Restored);
    assert_eq!(pod.tcx().len(), 1);
}

#[test]
fn a_link_that_died_while_no_agent_ran_is_made_anew() {
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
    pod.run("ip link del eth0");
    pod.add_interface(&[POD]);
    let mut agent = node.open();
    agent.apply(&wanted);
    wait_attached(&mut agent, "a");
    assert_eq!(pod.tcx().len(), 1);
}

#[test]
fn a_second_agent_waits_for_the_first() {
    if !can_run() {
        return;
    }
    let node = Node::new(AttachKind::Auto);
    let first = node.open();
    assert!(matches!(Datapath::try_open(&node.options).unwrap(), Opened::Busy(_)));
    let error = cleanup(&node.options).unwrap_err();
    assert!(error.to_string().contains("stop it first"), "{error}");
    drop(first);
    node.open();
}

#[test]
fn a_pod_that_appears_after_its_plan_is_attached_within_a_second() {
    if !can_run() {
        return;
    }
    let node = Node::new(AttachKind::Auto);
    node.cilium4();
    let mut agent = node.open();
    agent.apply(&desired(Mode::Reset, &[("a", &[POD])]));
    agent.report("a failure that names the address", |report| match report {
        Report::Failed { error, .. } if error.contains(POD) => Some(()),
        _ => None,
    });
    let pod = node.pod("a", &[POD]);
    let up = std::time::Instant::now();
    wait_attached(&mut agent, "a");
    assert!(up.elapsed() < std::time::Duration::from_secs(1), "took {:?}", up.elapsed());
    assert_eq!(pod.tcx().len(), 1);
}

#[test]
fn a_pod_that_lost_its_annotation_and_has_no_tunnel_is_detached() {
    if !can_run() {
        return;
    }
    let node = Node::new(AttachKind::Auto);
    node.cilium4();
    let pod = node.pod("a", &[POD]);
    let mut agent = node.open();
    let mut wanted = desired(Mode::Reset, &[("a", &[POD])]);
    agent.apply(&wanted);
    wait_attached(&mut agent, "a");
    wanted.pods.insert("a".into(), client("a", &[POD], Want::WhileTunnelled));
    agent.apply(&wanted);
    // There is no tunnel, so it goes with the next look.
    eventually("the program to be gone", || {
        let left = pod.tcx();
        if left.is_empty() { Ok(()) } else { Err(left) }
    });
}

#[test]
fn cleanup_removes_everything_and_tells_it() {
    if !can_run() {
        return;
    }
    let node = Node::new(AttachKind::Auto);
    node.cilium4();
    let pod = node.pod("a", &[POD]);
    let mut agent = node.open();
    agent.apply(&desired(Mode::Reset, &[("a", &[POD])]));
    wait_attached(&mut agent, "a");
    drop(agent);
    assert_eq!(Snapshot::read(&node.options.pin_directory).unwrap().pods.len(), 1, "status needs no agent");
    let done = cleanup(&node.options).unwrap();
    assert_eq!(done.errors, Vec::<String>::new());
    assert!(done.removed.iter().any(|line| line.contains("default/client-a")), "{:?}", done.removed);
    assert!(pod.tcx().is_empty());
    assert!(!node.options.pin_directory.exists());
    assert_eq!(cleanup(&node.options).unwrap().removed, Vec::<String>::new());
    assert!(node.path().exists());
}

#[test]
fn many_pods_come_and_go_and_leave_nothing() {
    if !can_run() {
        return;
    }
    let node = Node::new(AttachKind::Auto);
    node.cilium4();
    let names: Vec<String> = (0..16).map(|number| format!("pod-{number}")).collect();
    let addresses: Vec<String> = (0..16).map(|number| format!("10.0.1.{number}")).collect();
    let namespaces: Vec<_> =
        names.iter().zip(&addresses).map(|(name, address)| node.pod(name, &[address.as_str()])).collect();
    let mut agent = node.open();
    let mut wanted = desired(Mode::Reset, &[]);
    let started = std::time::Instant::now();
    for (name, address) in names.iter().zip(&addresses) {
        wanted.pods.insert(name.clone(), client(name, &[address], Want::Attached));
        agent.apply(&wanted);
    }
    eventually("all pods to be attached", || {
        let progress = agent.datapath.progress();
        if progress.settled && progress.attached == names.len() { Ok(()) } else { Err(progress) }
    });
    eprintln!("{} pods attached in {:?}", names.len(), started.elapsed());
    assert!(namespaces.iter().all(|pod| pod.tcx().len() == 1));
    // Half of them lose their namespace before the plan says so.
    for pod in namespaces.iter().take(8) {
        nix::mount::umount2(&pod.path, nix::mount::MntFlags::MNT_DETACH).unwrap();
        std::fs::remove_file(&pod.path).unwrap();
    }
    for name in &names {
        wanted.pods.remove(name);
        agent.apply(&wanted);
    }
    eventually("no links", || {
        let left = agent.datapath.snapshot().unwrap().pods.len();
        if left == 0 { Ok(()) } else { Err(left) }
    });
    assert_eq!(std::fs::read_dir(node.layout().join("links")).unwrap().count(), 0);
    assert!(namespaces.iter().skip(8).all(|pod| pod.tcx().is_empty()));
}

#[test]
fn namespaces_that_are_kept_nowhere_are_found_by_their_processes() {
    if !can_run() {
        return;
    }
    let mut node = Node::new(AttachKind::Auto);
    node.cilium4();
    let pod = node.pod("a", &[POD]);
    let mut process = pod.within(|| std::process::Command::new("sleep").arg("60").spawn().unwrap());
    node.options.namespace_directory = "/proc".into();
    let mut agent = node.open();
    agent.apply(&desired(Mode::Reset, &[("a", &[POD])]));
    wait_attached(&mut agent, "a");
    assert_eq!(pod.tcx().len(), 1);
    process.kill().unwrap();
    process.wait().unwrap();
}
