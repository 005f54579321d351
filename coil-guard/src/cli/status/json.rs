//! The status for a program. Times are seconds before (negative) or after now.

use std::{collections::BTreeMap, net::IpAddr};

use coil_guard_common::abi::EgressCounters;
use serde_json::{Value, json};

use super::{
    Status,
    egress::{Backend, Clients, Cutover, Egress, backend, egresses},
    problems::problems,
    replies::{self, replies},
    state_of_mark,
};
use crate::{
    cilium::state_name,
    clock::Monotonic,
    datapath::{GivenPort, PodSnapshot, draining},
    plan::{Keep, PodUid},
};

pub(super) fn json(status: &Status) -> Value {
    let snapshot = &status.snapshot;
    let now = snapshot.time;
    let services = snapshot.services.iter().map(|(address, service)| {
        json!({
            "address": address.address, "port": address.port, "mode": service.mode.name(),
            "egress": service.egress.as_ref().map(ToString::to_string), "fouSourcePortAuto": service.sport_auto,
            "expires": from(now, service.expires_at),
        })
    });
    let marked = snapshot.marks.keys().map(|address| one_backend(now, *address, &backend(status, *address)));
    let pods = snapshot.pods.iter().map(|(uid, pod)| {
        json!({
            "uid": uid, "name": pod.name, "addresses": pod.addresses, "attachment": pod.attachment,
            "interfaceIndex": pod.interface_index, "programId": pod.program_id, "core": pod.core,
            "guardedSince": from(now, pod.guarded_since), "portsOverlap": pod.ports_overlap,
        })
    });
    let views = egresses(status);
    // An Egress that is off by now still has its counters.
    let mut by_name: BTreeMap<String, Value> = snapshot
        .egresses
        .iter()
        .map(|(name, counters)| (name.to_string(), json!({"counters": numbers(counters)})))
        .collect();
    by_name.extend(views.iter().map(|egress| (egress.title(), one_egress(status, egress))));
    json!({
        "heartbeat": snapshot.heartbeat_until.map(|until| from(now, until)),
        "problems": problems(status, &views),
        "services": services.collect::<Vec<_>>(),
        "backends": marked.collect::<Vec<_>>(),
        "pods": pods.collect::<Vec<_>>(),
        "egresses": by_name,
        "packets": snapshot.packets,
        "ciliumMaps": snapshot.bindings,
        "corePrograms": snapshot.cores,
        "replies": {
            "packets": snapshot.replies.packets, "learntClients": snapshot.replies.learnt,
            "clients": pod_names(&snapshot.replies.clients), "egressPods": pod_names(&snapshot.replies.egress_pods),
        },
        "ciliumError": status.cilium.as_ref().err(),
    })
}

fn pod_names(pods: &BTreeMap<PodUid, PodSnapshot>) -> Vec<&str> {
    pods.values().map(|pod| pod.name.as_str()).collect()
}

fn from(now: Monotonic, time: Monotonic) -> f64 {
    if time >= now { time.since(now).as_secs_f64() } else { -now.since(time).as_secs_f64() }
}

fn one_egress(status: &Status, egress: &Egress<'_>) -> Value {
    let now = status.snapshot.time;
    let services = egress.services.iter().map(|(address, service)| {
        json!({"address": address.address, "port": address.port, "mode": service.mode.name()})
    });
    let clients = match &egress.clients {
        Clients::Known(names) => json!(names),
        Clients::PortEach | Clients::Unknown => Value::Null,
    };
    let backends = egress.backends.iter().map(|(address, backend)| one_backend(now, *address, backend));
    let cutovers = egress.cutovers.iter().map(|cutover| one_cutover(now, cutover));
    json!({
        "services": services.collect::<Vec<_>>(),
        "clients": clients,
        "backends": backends.collect::<Vec<_>>(),
        "draining": egress.draining(),
        "lastCutovers": cutovers.collect::<Vec<_>>(),
        "givenPorts": egress.given.iter().map(|given| one_given(now, given)).collect::<Vec<_>>(),
        "replies": replies(status, egress).map(replies::json),
        "counters": egress.counters.map(numbers),
    })
}

fn one_backend(now: Monotonic, address: IpAddr, backend: &Backend<'_>) -> Value {
    let mark = backend.mark;
    let keeps = mark.map(|mark| match mark.keep {
        Keep::No => json!(0),
        Keep::Until(end) => json!(from(now, end)),
        Keep::ForEver => json!("forever"),
    });
    let drain = backend.drain.map(|drain| {
        json!({"flows": draining(drain), "started": drain.started, "ended": drain.ended, "cut": drain.cut})
    });
    json!({
        "address": address,
        "state": mark.map(|mark| state_of_mark(mark.state)),
        "since": mark.map(|mark| from(now, mark.since)),
        "keeps": keeps,
        "valid": mark.map(|mark| from(now, mark.valid_until)),
        "cilium": backend.cilium.map(|found| json!({
            "id": found.id, "state": state_name(found.state), "stateByte": found.state,
        })),
        "clients": backend.clients,
        "drain": drain,
    })
}

fn one_cutover(now: Monotonic, cutover: &Cutover<'_>) -> Value {
    let last = cutover.last;
    json!({
        "service": last.service.address, "port": last.service.port, "client": last.client, "pod": last.pod,
        "from": last.from, "at": from(now, last.at), "to": cutover.now_on,
        "secondsAfterMark": cutover.after_mark.map(|after| after.as_secs_f64()),
    })
}

fn one_given(now: Monotonic, given: &GivenPort) -> Value {
    json!({
        "service": given.service.address, "client": given.client, "pod": given.pod,
        "clientPort": given.client_port, "port": given.port, "leftBackendId": given.left,
        "stuckSince": given.stuck_since.map(|since| from(now, since)),
    })
}

fn numbers(counters: &EgressCounters) -> Value {
    json!({
        "packets": counters.packets, "moved": counters.moved, "created": counters.created,
        "repaired": counters.repaired, "drained": counters.drained, "cut": counters.cut,
        "noLive": counters.no_live, "wouldMove": counters.would_move, "wouldDrain": counters.would_drain,
        "notDrained": counters.not_drained, "contended": counters.contended,
        "rewritten": counters.rewritten, "newPorts": counters.new_ports, "cannotMove": counters.cannot_move,
    })
}
