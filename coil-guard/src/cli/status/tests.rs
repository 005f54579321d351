//! What a person and a program see of states that were made up.

use std::{collections::BTreeMap, net::IpAddr};

use coil_guard_common::{
    abi::{DrainStats, EgressCounters},
    cilium::{BACKEND_ACTIVE, BACKEND_QUARANTINED, BACKEND_TERMINATING},
};
use zerocopy::FromZeros as _;

use super::{json::json, text::text, *};
use crate::{
    cilium::{CurrentBackend, CurrentService},
    clock::Monotonic,
    datapath::{Attachment, BoundMap, MarkSnapshot, PodSnapshot, ReplySnapshot, ServiceSnapshot},
    plan::{EgressName, Keep, Mode, ServiceAddress},
};

const SERVICE: ServiceAddress =
    ServiceAddress { address: IpAddr::V4(std::net::Ipv4Addr::new(10, 96, 0, 10)), port: 5555 };
const MAP: &str = "cilium_ct_any4_global";

fn at(seconds: u64) -> Monotonic {
    Monotonic(seconds * 1_000_000_000)
}

fn ip(last: u8) -> IpAddr {
    [10, 0, 1, last].into()
}

fn client() -> IpAddr {
    [10, 0, 0, 1].into()
}

fn snapshot() -> Snapshot {
    let egress = EgressName { namespace: "net".into(), name: "nat".into() };
    let mark = |state, keep| MarkSnapshot { state, keep, since: at(90), valid_until: at(150) };
    let service = ServiceSnapshot {
        egress: Some(egress.clone()),
        mode: Mode::Drain,
        sport_auto: false,
        tracked_since: None,
        expires_at: at(1000),
    };
    let pod = PodSnapshot {
        name: "default/client".into(),
        addresses: vec![client()],
        attachment: Attachment::Tcx,
        interface_index: 2,
        guarded_since: at(40),
        program_id: 17,
        core: "guard",
        ports_overlap: false,
    };
    Snapshot {
        time: at(100),
        packets: BTreeMap::from([("moved", 3), ("healthy", 0)]),
        egresses: BTreeMap::from([(
            egress,
            EgressCounters { packets: 50, moved: 3, cut: 1, ..EgressCounters::new_zeroed() },
        )]),
        drains: BTreeMap::from([(
            ip(1),
            DrainStats { flows: 2, started: 5, ended: 2, cut: 1, ..DrainStats::new_zeroed() },
        )]),
        services: BTreeMap::from([(SERVICE, service)]),
        marks: BTreeMap::from([
            (ip(1), mark(MarkState::Leaving, Keep::Until(at(130)))),
            (ip(2), mark(MarkState::Ready, Keep::ForEver)),
            (ip(3), mark(MarkState::NotReady, Keep::Until(at(95)))),
        ]),
        replies: ReplySnapshot::default(),
        pods: BTreeMap::from([("uid-1".to_owned(), pod)]),
        bindings: vec![BoundMap { name: MAP.into(), id: Some(7) }],
        cores: [("guard", 18)].into(),
        heartbeat_until: Some(at(112)),
    }
}

fn status() -> Status {
    let service = CurrentService {
        affinity: false,
        backends: [ip(1), ip(2)].into(),
        clients: Some([(client(), Some(ip(2)))].into()),
    };
    let current = Current {
        services: [(SERVICE, service)].into(),
        backends: [
            (ip(1), CurrentBackend { id: 11, state: BACKEND_TERMINATING }),
            (ip(2), CurrentBackend { id: 12, state: BACKEND_ACTIVE }),
        ]
        .into(),
        ids: [(MAP, 7)].into(),
    };
    let last = LastMove {
        service: SERVICE,
        client: client(),
        pod: Some("default/client".into()),
        from: ip(1),
        at: Monotonic(at(90).0 + 3_250_000),
    };
    let earlier =
        LastMove { from: ip(3), at: at(50), client: [10, 0, 0, 9].into(), pod: None, ..last.clone() };
    Status { snapshot: snapshot(), moves: vec![last, earlier], given: Vec::new(), cilium: Ok(current) }
}

fn given(client_port: u16, port: Option<u16>, stuck_since: Option<Monotonic>) -> GivenPort {
    GivenPort {
        service: SERVICE,
        client: client(),
        pod: "default/client".into(),
        client_port,
        port,
        left: 11,
        stuck_since,
    }
}

#[test]
fn given_ports_are_shown_and_flows_that_cannot_leave_are_a_problem() {
    let mut status = status();
    status.given = vec![given(5555, Some(65_100), None), given(40_000, None, Some(at(99)))];
    let shown = text(&status);
    assert_lines(
        &shown,
        &["  Source ports given: 1", "    default/client (10.0.0.1) to 10.96.0.10: 5555 goes by 65100"],
    );
    assert_eq!(problem(&status), [] as [&str; 0], "a second is not worth a word");
    status.given[1].stuck_since = Some(at(98));
    assert_problem(&status, "1 flows stay on a backend that they should leave");
    let json = json(&status);
    let ports = &json["egresses"]["net/nat"]["givenPorts"];
    assert_eq!(
        (&ports[0]["port"], &ports[1]["stuckSince"]),
        (&serde_json::json!(65_100), &serde_json::json!(-2.0))
    );
    status.given = (0..20).map(|nth| given(40_000 + nth, Some(65_100 + nth), None)).collect();
    assert_lines(&text(&status), &["  Source ports given: 20", "    and 12 more (see --json)"]);
}

fn assert_lines(text: &str, lines: &[&str]) {
    for line in lines {
        assert!(text.lines().any(|found| found == *line), "{line:?} is not in\n{text}");
    }
}

fn problem(status: &Status) -> Vec<String> {
    problems::problems(status, &egress::egresses(status))
}

#[track_caller]
fn assert_problem(status: &Status, part: &str) {
    let problems = problem(status);
    assert!(problems.len() == 1 && problems[0].contains(part), "{part:?} alone is expected: {problems:#?}");
}

#[test]
fn a_person_sees_each_egress_with_its_backends_from_both_sides_and_the_last_cutover() {
    let text = text(&status());
    assert_lines(
        &text,
        &[
            "Agent: its word counts for another 12 s",
            "Nothing wrong is seen.",
            "Egress net/nat",
            "  Service 10.96.0.10 port 5555: drain",
            "  Clients: 1 of 1 attached pods have a flow",
            "  Flows: 3 moved, 2 draining now, 1 cut; of 50 packets",
            "  Backends: 3",
            "    10.0.1.1  agent: leaving since 10 s, keeps its flows for 30 s; Cilium: TERMINATING (id 11)",
            "      drained flows: 2 now, 5 ever, 2 ended by themselves, 1 cut",
            "    10.0.1.2  agent: ready since 10 s, gets new flows; Cilium: ACTIVE (id 12); 1 client is on it",
            "    10.0.1.3  agent: not ready since 10 s, keeps no flows since 5 s; Cilium: not in its map",
            "  Last cutover, 10.96.0.10 port 5555: default/client (10.0.0.1) left 10.0.1.1 9 s ago, 3.2 ms after the mark; \
             it is on 10.0.1.2 now",
            "  default/client  10.0.0.1  tcx on interface 2, guarded since 60 s (uid-1)",
            "             3  moved: The service entry was moved to a live backend.",
        ],
    );
    assert!(!text.contains("healthy"), "{text}");
}

#[test]
fn a_move_before_the_present_mark_is_not_timed_by_it() {
    let mut status = status();
    status.moves[0].at = at(89);
    assert_lines(
        &text(&status),
        &[
            "  Last cutover, 10.96.0.10 port 5555: default/client (10.0.0.1) left 10.0.1.1 11 s ago; it is on 10.0.1.2 now",
        ],
    );
    assert_eq!(
        json(&status)["egresses"]["net/nat"]["lastCutovers"][0]["secondsAfterMark"],
        serde_json::Value::Null
    );
}

#[test]
fn without_cilium_s_maps_that_is_said_and_the_agent_s_marks_are_still_shown() {
    let mut status = status();
    status.cilium = Err("the map is not there".into());
    status.moves.clear();
    let text = text(&status);
    assert_lines(
        &text,
        &[
            "  Cilium's maps cannot be looked at: the map is not there",
            "  Clients: not known, Cilium's maps do not tell (1 attached pods)",
            "Backends (which Egress has them is in Cilium's maps): 3",
            "    10.0.1.2  agent: ready since 10 s, gets new flows; Cilium: not known",
        ],
    );
    assert_eq!(json(&status)["ciliumError"], "the map is not there");
}

#[test]
fn a_gauge_below_zero_is_shown_as_zero() {
    let mut status = status();
    status.snapshot.drains.get_mut(&ip(1)).unwrap().flows = (-3i64).cast_unsigned();
    assert_lines(
        &text(&status),
        &[
            "  Flows: 3 moved, 0 draining now, 1 cut; of 50 packets",
            "      drained flows: 0 now, 5 ever, 2 ended by themselves, 1 cut",
        ],
    );
    assert_eq!(json(&status)["backends"][0]["drain"]["flows"], 0);
}

#[test]
fn an_untouched_node_says_so() {
    let status = Status {
        snapshot: Snapshot::default(),
        moves: Vec::new(),
        given: Vec::new(),
        cilium: Err("none".into()),
    };
    assert_eq!(text(&status), "Nothing is guarded on this node.\n");
    assert!(problem(&status).is_empty());
}

#[test]
fn a_program_sees_the_same() {
    let json = json(&status());
    assert_eq!(json["services"][0]["mode"], "drain");
    assert_eq!(json["backends"][0]["keeps"], 30.0);
    assert_eq!(json["backends"][1]["keeps"], "forever");
    assert_eq!(json["heartbeat"], 12.0);
    assert_eq!(json["packets"]["moved"], 3);
    assert_eq!(json["problems"], serde_json::json!([]));
    let egress = &json["egresses"]["net/nat"];
    assert_eq!(egress["clients"], serde_json::json!(["default/client"]));
    assert_eq!(egress["backends"][0]["cilium"]["state"], "TERMINATING");
    assert_eq!(egress["backends"][1]["clients"], 1);
    assert_eq!(egress["counters"]["moved"], 3);
    assert_eq!(egress["lastCutovers"][0]["secondsAfterMark"], 0.003_25);
    assert_eq!(egress["lastCutovers"][0]["to"], "10.0.1.2");
}

#[test]
fn each_fault_that_one_look_shows_has_its_sentence() {
    let change = |change: &dyn Fn(&mut Status)| {
        let mut status = status();
        change(&mut status);
        status
    };
    // Cilium's word goes on, so that backends are still usable.
    assert_problem(
        &change(&|s| s.snapshot.heartbeat_until = Some(at(40))),
        "silent, its word ended 60 s ago",
    );
    assert_problem(&change(&|s| s.snapshot.heartbeat_until = None), "not said anything");
    let service =
        |s: &mut Status, expires| s.snapshot.services.get_mut(&SERVICE).unwrap().expires_at = expires;
    assert_problem(&change(&|s| service(s, at(70))), "has not been guarded for 30 s");
    assert_problem(&change(&|s| s.snapshot.bindings[0].id = Some(6)), "id 6 and Cilium's is id 7 now");
    assert_problem(&change(&|s| s.snapshot.bindings[0].id = None), "Cilium has one now (id 7)");
    assert_problem(
        &change(&|s| s.snapshot.cores.clear()),
        "1 attached pods (default/client for one) are not",
    );
    let unmapped = change(&|s| {
        s.snapshot.bindings[0].id = None;
        s.cilium.as_mut().unwrap().ids.clear();
    });
    assert_problem(&unmapped, "services of this family are not guarded");
    let left = change(&|s| s.snapshot.packets.extend([("unknown_service", 4)]));
    assert_problem(&left, "4 packets so far went to a service that Cilium did not know");
    let counted = change(&|s| s.snapshot.egresses.values_mut().for_each(|counters| counters.no_live = 9));
    assert_problem(&counted, "9 packets so far met no live backend");
    let unusable = change(&|s| {
        let current = s.cilium.as_mut().unwrap();
        current.backends.get_mut(&ip(2)).unwrap().state = BACKEND_QUARANTINED;
    });
    assert_problem(&unusable, "none of its 3 backends takes new flows");
    let overlap = change(&|s| {
        s.snapshot.services.get_mut(&SERVICE).unwrap().sport_auto = true;
        s.snapshot.pods.values_mut().for_each(|pod| pod.ports_overlap = true);
    });
    assert_problem(&overlap, "overlap the drain ports");
}

#[test]
fn a_stand_in_that_no_guarded_service_needs_is_not_wrong() {
    let mut status = status();
    for name in ["cilium_ct_any6_global", "cilium_lb4_affinity"] {
        status.snapshot.bindings.push(BoundMap { name: name.into(), id: None });
    }
    assert!(problem(&status).is_empty());
    status.cilium.as_mut().unwrap().services.get_mut(&SERVICE).unwrap().affinity = true;
    assert_problem(&status, "ClientIP affinity and Cilium has no cilium_lb4_affinity");
}
