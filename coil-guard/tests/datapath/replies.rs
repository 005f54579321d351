//! The programs for symmetric replies: on both hooks of client and egress pods, beside the one that guards.

use std::collections::BTreeMap;

use aya::{
    maps::{HashMap, Map, MapData},
    programs::TcAttachType,
};
use coil_guard::{
    datapath::{AttachKind, How, Part, Report, cleanup},
    plan::{Desired, LocalEgressPod, Mode},
};
use coil_guard_common::abi::{Returning, maps};

use crate::harness::{Agent, Node, PodNamespace, can_run, desired, egress, eventually, ip, nothing};

const CLIENT: &str = "10.0.0.1";
const EGRESS_POD: &str = "10.0.1.1";
const KINDS: [AttachKind; 2] = [AttachKind::Tcx, AttachKind::Clsact];

fn local_egress_pod() -> LocalEgressPod {
    LocalEgressPod {
        namespace: "internet".into(),
        name: "egress-1".into(),
        addresses: [ip(EGRESS_POD)].into(),
        egress: egress(),
    }
}

/// A client whose replies are turned back, and an egress pod that sends them.
fn symmetric() -> Desired {
    let mut wanted = desired(Mode::Rewrite, &[("c", &[CLIENT])]);
    wanted.pods.get_mut("c").unwrap().symmetric = true;
    wanted.egress_pods = BTreeMap::from([("e".to_owned(), local_egress_pod())]);
    wanted
}

/// Programs of ours on ingress and on egress.
fn hooks(pod: &PodNamespace) -> (usize, usize) {
    let tc = |hook: &str| {
        pod.run(&format!("tc filter show dev eth0 {hook}")).matches(" coil_guard direct-action").count()
    };
    (
        tc("ingress") + pod.tcx_on(TcAttachType::Ingress).len(),
        tc("egress") + pod.tcx_on(TcAttachType::Egress).len(),
    )
}

fn wait_hooks(what: &str, pods: [&PodNamespace; 2], wanted: [(usize, usize); 2]) {
    eventually(what, || {
        let found = pods.map(hooks);
        if found == wanted { Ok(()) } else { Err(found) }
    });
}

/// Addresses of the clients that are said to have replies at other ports.
fn returning(node: &Node) -> Vec<[u8; 16]> {
    let data = MapData::from_pin(node.layout().join(maps::RETURNING)).expect("the pinned map");
    let map = Map::from_map_data(data).expect("a map");
    let map: HashMap<_, [u8; 16], Returning> = map.try_into().expect("a hash map");
    map.keys().collect::<Result<_, _>>().expect("keys")
}

fn wait_attached(agent: &mut Agent, wanted: Part) -> How {
    agent.report(&format!("{wanted:?} to be attached"), |report| match report {
        Report::Attached { part, how, .. } if *part == wanted => Some(*how),
        _ => None,
    })
}

/// Runs a test for each way of attaching, on a node with a client pod and an egress pod. On a thread: a node changes the
/// namespaces of the one that made it.
fn on_each_kind(test: fn(AttachKind, &Node, [&PodNamespace; 2])) {
    if !can_run() {
        return;
    }
    for kind in KINDS {
        std::thread::spawn(move || {
            let node = Node::new(kind);
            node.cilium4();
            let (client, egress_pod) = (node.pod("c", &[CLIENT]), node.pod("e", &[EGRESS_POD]));
            test(kind, &node, [&client, &egress_pod]);
        })
        .join()
        .unwrap_or_else(|_| panic!("{kind:?}"));
    }
}

#[test]
fn both_ends_get_their_programs_and_lose_them_with_the_mode() {
    on_each_kind(|kind, node, pods @ [client, egress_pod]| {
        let mut agent = node.open();
        agent.apply(&symmetric());
        wait_hooks("programs on both hooks", pods, [(1, 1), (1, 1)]);
        eventually("the client to be announced", || match returning(node).len() {
            1 => Ok(()),
            other => Err(other),
        });
        let snapshot = agent.datapath.snapshot().unwrap();
        assert_eq!(snapshot.pods.keys().collect::<Vec<_>>(), ["c"], "of the guard alone");
        assert_eq!(snapshot.replies.clients.keys().collect::<Vec<_>>(), ["c"]);
        assert_eq!(snapshot.replies.egress_pods.keys().collect::<Vec<_>>(), ["e"]);
        assert_eq!(agent.datapath.progress().wanted, 1);
        let ids = pods.map(|pod| (pod.tcx_on(TcAttachType::Ingress), pod.tcx_on(TcAttachType::Egress)));
        drop(agent);
        wait_hooks("programs without the agent", pods, [(1, 1), (1, 1)]);

        let mut agent = node.open();
        agent.apply(&symmetric());
        assert_eq!(wait_attached(&mut agent, Part::Return), How::Kept);
        assert_eq!(
            pods.map(|pod| (pod.tcx_on(TcAttachType::Ingress), pod.tcx_on(TcAttachType::Egress))),
            ids
        );

        agent.apply(&desired(Mode::Reset, &[("c", &[CLIENT])]));
        wait_hooks("the guard alone", pods, [(0, 1), (0, 0)]);
        assert_eq!(returning(node), [] as [[u8; 16]; 0]);
        assert!(!egress_pod.has_qdisc(), "our qdisc is left");
        assert_eq!(client.has_qdisc(), kind == AttachKind::Clsact);

        agent.apply(&symmetric());
        wait_hooks("programs on both hooks again", pods, [(1, 1), (1, 1)]);
        agent.apply(&nothing());
        wait_hooks("nothing", pods, [(0, 0), (0, 0)]);
        eventually("pins and qdiscs to be gone", || {
            let left = (node.pins(), client.has_qdisc(), egress_pod.has_qdisc());
            if left == (vec![], false, false) { Ok(()) } else { Err(left) }
        });
    });
}

#[test]
fn a_node_with_egress_pods_alone_is_served_and_cleaned_up() {
    on_each_kind(|_, node, pods @ [client, egress_pod]| {
        let mut agent = node.open();
        let egress_pods = symmetric().egress_pods;
        agent.apply(&Desired { egress_pods, ..nothing() });
        wait_hooks("programs of the egress pod", pods, [(0, 0), (1, 1)]);
        agent.apply(&nothing());
        wait_hooks("nothing", pods, [(0, 0), (0, 0)]);
        eventually("the pins to be gone", || match node.pins() {
            pins if pins.is_empty() => Ok(()),
            pins => Err(pins),
        });
        agent.apply(&symmetric());
        wait_hooks("programs on both hooks", pods, [(1, 1), (1, 1)]);
        drop(agent);
        let done = cleanup(&node.options).unwrap();
        assert_eq!(done.errors, [] as [String; 0]);
        for part in ["guard", "return", "answer", "learn"] {
            let said = done.removed.iter().any(|line| line.starts_with(&format!("program {part:?} of pod ")));
            assert!(said, "{part}: {:?}", done.removed);
        }
        assert_eq!(pods.map(hooks), [(0, 0), (0, 0)]);
        assert!(!client.has_qdisc() && !egress_pod.has_qdisc());
    });
}

#[test]
fn what_somebody_removed_on_ingress_is_restored() {
    if !can_run() {
        return;
    }
    let node = Node::new(AttachKind::Clsact);
    node.cilium4();
    let (client, egress_pod) = (node.pod("c", &[CLIENT]), node.pod("e", &[EGRESS_POD]));
    let mut agent = node.open();
    agent.apply(&symmetric());
    wait_hooks("programs on both hooks", [&client, &egress_pod], [(1, 1), (1, 1)]);
    client.run("tc filter del dev eth0 ingress");
    egress_pod.run("tc qdisc del dev eth0 clsact");
    for part in [Part::Learn, Part::Answer, Part::Return] {
        agent.report(&format!("{part:?} to be restored"), |report| match report {
            Report::Attached { part: found, how: How::Restored, .. } if *found == part => Some(()),
            _ => None,
        });
    }
    wait_hooks("programs on both hooks again", [&client, &egress_pod], [(1, 1), (1, 1)]);
    assert_eq!(returning(&node).len(), 1);
    agent.apply(&nothing());
    eventually("pins and qdiscs to be gone", || {
        let left = (node.pins(), client.has_qdisc(), egress_pod.has_qdisc());
        if left == (vec![], false, false) { Ok(()) } else { Err(left) }
    });
}
