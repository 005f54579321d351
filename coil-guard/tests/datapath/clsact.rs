//! Attachment by a clsact filter, which has no link.

use coil_guard::{
    datapath::{AttachKind, Attachment, How, Report, cleanup},
    plan::Mode,
};

use crate::harness::{Agent, Node, can_run, desired, eventually, nothing};

const POD: &str = "10.0.0.1";

fn wait_attached(agent: &mut Agent) -> How {
    agent.report("the pod to be attached", |report| match report {
        Report::Attached { attachment: Attachment::Clsact, how, .. } => Some(*how),
        _ => None,
    })
}

#[test]
fn the_filter_is_kept_or_replaced_in_place_and_leaves_no_qdisc() {
    if !can_run() {
        return;
    }
    let mut node = Node::new(AttachKind::Clsact);
    node.cilium4();
    let pod = node.pod("a", &[POD]);
    let wanted = desired(Mode::Reset, &[("a", &[POD])]);
    let mut agent = node.open();
    agent.apply(&wanted);
    assert_eq!(wait_attached(&mut agent), How::Fresh);
    let first = agent.datapath.snapshot().unwrap();
    assert_eq!((pod.filters(), pod.has_qdisc()), (1, true));
    drop(agent);
    assert_eq!(pod.filters(), 1, "the filter went with the agent");

    let mut agent = node.open();
    agent.apply(&wanted);
    assert_eq!(wait_attached(&mut agent), How::Kept);
    assert_eq!(agent.datapath.snapshot().unwrap().pods, first.pods);
    drop(agent);

    node.options.unmarked_drain *= 2;
    let mut agent = node.open();
    agent.apply(&wanted);
    assert_eq!(wait_attached(&mut agent), How::Replaced);
    let second = agent.datapath.snapshot().unwrap();
    assert_eq!(pod.filters(), 1);
    assert_ne!(first.pods["a"].program_id, second.pods["a"].program_id);
    assert_eq!(first.pods["a"].guarded_since, second.pods["a"].guarded_since);

    agent.apply(&nothing());
    eventually("filter, qdisc and pins to be gone", || {
        let left = (pod.filters(), pod.has_qdisc(), node.pins());
        if left == (0, false, vec![]) { Ok(()) } else { Err(left) }
    });
}

#[test]
fn a_qdisc_of_somebody_else_stays() {
    if !can_run() {
        return;
    }
    let node = Node::new(AttachKind::Clsact);
    node.cilium4();
    let pod = node.pod("a", &[POD]);
    pod.run("tc qdisc add dev eth0 clsact");
    let mut agent = node.open();
    agent.apply(&desired(Mode::Reset, &[("a", &[POD])]));
    wait_attached(&mut agent);
    agent.apply(&nothing());
    eventually("the filter to be gone", || if pod.filters() == 0 { Ok(()) } else { Err(pod.filters()) });
    eventually("the pins to be gone", || if node.pins().is_empty() { Ok(()) } else { Err(node.pins()) });
    assert!(pod.has_qdisc(), "a qdisc that was there before was removed");
}

#[test]
fn our_qdisc_stays_while_somebody_else_has_a_filter_on_it() {
    if !can_run() {
        return;
    }
    let node = Node::new(AttachKind::Clsact);
    node.cilium4();
    let pod = node.pod("a", &[POD]);
    let mut agent = node.open();
    agent.apply(&desired(Mode::Reset, &[("a", &[POD])]));
    wait_attached(&mut agent);
    pod.run("tc filter add dev eth0 ingress prio 7 protocol all u32 match u32 0 0");
    agent.apply(&nothing());
    eventually("the filter to be gone", || if pod.filters() == 0 { Ok(()) } else { Err(pod.filters()) });
    eventually("the pins to be gone", || if node.pins().is_empty() { Ok(()) } else { Err(node.pins()) });
    assert!(pod.has_qdisc());
    assert!(pod.run("tc filter show dev eth0 ingress").contains("u32"));
}

#[test]
fn a_filter_that_the_pod_removed_is_restored() {
    if !can_run() {
        return;
    }
    let node = Node::new(AttachKind::Clsact);
    node.cilium4();
    let pod = node.pod("a", &[POD]);
    let mut agent = node.open();
    agent.apply(&desired(Mode::Reset, &[("a", &[POD])]));
    wait_attached(&mut agent);
    pod.run("tc qdisc del dev eth0 clsact");
    assert_eq!(wait_attached(&mut agent), How::Restored);
    assert_eq!(pod.filters(), 1);
}

#[test]
fn a_foreign_filter_at_our_place_is_named_and_left_alone() {
    if !can_run() {
        return;
    }
    let node = Node::new(AttachKind::Clsact);
    node.cilium4();
    let pod = node.pod("a", &[POD]);
    pod.run("tc qdisc add dev eth0 clsact");
    pod.run("tc filter add dev eth0 egress prio 1 protocol all u32 match u32 0 0");
    let mut agent = node.open();
    agent.apply(&desired(Mode::Reset, &[("a", &[POD])]));
    agent.report("a failure that says what is in the way", |report| match report {
        Report::Failed { error, .. } if error.contains("eth0") && error.contains("priority 1") => Some(()),
        _ => None,
    });
    assert!(pod.run("tc filter show dev eth0 egress").contains("u32"));
}

#[test]
fn a_changed_flag_moves_the_program_from_one_kind_to_the_other() {
    if !can_run() {
        return;
    }
    let mut node = Node::new(AttachKind::Clsact);
    node.cilium4();
    let pod = node.pod("a", &[POD]);
    let wanted = desired(Mode::Reset, &[("a", &[POD])]);
    let mut agent = node.open();
    agent.apply(&wanted);
    wait_attached(&mut agent);
    drop(agent);
    node.options.attach = AttachKind::Tcx;
    let mut agent = node.open();
    agent.apply(&wanted);
    eventually("TCX alone", || {
        let now = (pod.tcx().len(), pod.filters(), pod.has_qdisc());
        if now == (1, 0, false) { Ok(()) } else { Err(now) }
    });
}

#[test]
fn cleanup_finds_filters_without_a_record() {
    if !can_run() {
        return;
    }
    let node = Node::new(AttachKind::Clsact);
    node.cilium4();
    let pod = node.pod("a", &[POD]);
    let mut agent = node.open();
    agent.apply(&desired(Mode::Reset, &[("a", &[POD])]));
    wait_attached(&mut agent);
    drop(agent);
    std::fs::remove_file(node.layout().join("PODS")).unwrap();
    let done = cleanup(&node.options).unwrap();
    assert_eq!(done.errors, Vec::<String>::new());
    assert_eq!((pod.filters(), pod.has_qdisc()), (0, false), "{:?}", done.removed);
}
