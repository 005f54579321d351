//! What is wrong, as far as one look tells.

use coil_guard_common::counters::Reason;

use super::{
    Status,
    egress::{Clients, Egress},
    replies, seconds,
};
use crate::datapath::Snapshot;

/// One sentence each, the most serious first.
pub(super) fn problems(status: &Status, egresses: &[Egress<'_>]) -> Vec<String> {
    let snapshot = &status.snapshot;
    let mut problems = Vec::new();
    if snapshot.services.is_empty() {
        return problems;
    }
    problems.extend(agent(snapshot));
    problems.extend(cores(snapshot));
    match &status.cilium {
        Ok(_) => problems.extend(bindings(status)),
        Err(error) => problems.push(format!("Cilium's maps cannot be looked at: {error}")),
    }
    for egress in egresses {
        problems.extend(services(status, egress));
        problems.extend(backends(status, egress));
        problems.extend(stuck(snapshot, egress));
        problems.extend(replies::problem(status, egress));
        problems.extend(counters(egress));
    }
    let unknown = snapshot.packets.get(Reason::UnknownService.label()).copied().unwrap_or(0);
    if unknown > 0 {
        problems.push(format!(
            "{unknown} packets so far went to a service that Cilium did not know, and were left alone: see \
             whether this still grows"
        ));
    }
    problems.extend(pods(snapshot, egresses));
    problems
}

fn agent(snapshot: &Snapshot) -> Option<String> {
    let now = snapshot.time;
    match snapshot.heartbeat_until {
        Some(until) if until > now => None,
        Some(until) => Some(format!(
            "the agent is silent, its word ended {} ago (not running, or a watch is lost): Cilium's state alone guards",
            seconds(now.since(until))
        )),
        None => Some("the agent has not said anything yet: Cilium's state alone guards".into()),
    }
}

/// Pods whose programs lead nowhere.
fn cores(snapshot: &Snapshot) -> Option<String> {
    let missing = |core: &str| !snapshot.cores.contains_key(core);
    let names: Vec<_> =
        snapshot.pods.values().filter(|pod| missing(pod.core)).map(|pod| pod.name.as_str()).collect();
    let first = names.first()?;
    Some(format!(
        "the core program is not loaded, so {} attached pods ({first} for one) are not guarded: the agent loads it within \
         seconds, and its log says what keeps it from that",
        names.len()
    ))
}

/// What the programs use against what Cilium has.
fn bindings(status: &Status) -> Vec<String> {
    let Ok(current) = &status.cilium else { return Vec::new() };
    let snapshot = &status.snapshot;
    let mut problems = Vec::new();
    for map in &snapshot.bindings {
        let v6 = map.name.contains("lb6_") || map.name.contains("any6_");
        let mut services = snapshot.services.keys().filter(|service| service.address.is_ipv6() == v6);
        let name = &map.name;
        match (map.id, current.ids.get(name.as_str())) {
            (Some(used), Some(id)) if used != *id => problems.push(format!(
                "the programs use {name} id {used} and Cilium's is id {id} now: a running agent binds it within 5 s"
            )),
            (None, Some(id)) => problems.push(format!(
                "the programs use an empty map in place of {name}, and Cilium has one now (id {id}): a running agent binds it \
                 within 5 s"
            )),
            (Some(used), None) => problems.push(format!(
                "the programs use {name} id {used}, and Cilium's pin is gone: see whether Cilium's agent runs"
            )),
            (None, None) if name.contains("affinity") => {
                let is_affine = |service| current.services.get(service).is_some_and(|found| found.affinity);
                if services.any(is_affine) {
                    problems.push(format!(
                        "a guarded service has ClientIP affinity and Cilium has no {name}: an empty map stands in"
                    ));
                }
            }
            (None, None) => {
                if services.next().is_some() {
                    problems.push(format!(
                        "Cilium has no {name}, an empty map stands in: services of this family are not guarded"
                    ));
                }
            }
            (Some(_), Some(_)) => {}
        }
    }
    problems
}

fn services(status: &Status, egress: &Egress<'_>) -> Vec<String> {
    let now = status.snapshot.time;
    let name = egress.title();
    let mut problems = Vec::new();
    for (address, service) in &egress.services {
        let (ip, port) = (address.address, address.port);
        if service.expires_at <= now {
            let since = seconds(now.since(service.expires_at));
            problems.push(format!(
                "Egress {name}: {ip} port {port} has not been guarded for {since}, because no agent has renewed it"
            ));
        }
        if status.cilium.as_ref().is_ok_and(|current| !current.services.contains_key(address)) {
            problems.push(format!(
                "Egress {name}: Cilium on this node has no service at {ip} port {port}: its packets are left alone"
            ));
        }
    }
    problems
}

fn backends(status: &Status, egress: &Egress<'_>) -> Option<String> {
    let (now, heartbeat) = (status.snapshot.time, status.snapshot.heartbeat_until);
    // Without Cilium's maps it is not known which backends are this Egress's.
    let known = status.cilium.is_ok();
    let usable = egress.backends.values().any(|backend| backend.takes_flows(now, heartbeat));
    (known && !usable).then(|| {
        format!(
            "Egress {}: none of its {} backends takes new flows: flows stay where they are until one does",
            egress.title(),
            egress.backends.len()
        )
    })
}

fn stuck(snapshot: &Snapshot, egress: &Egress<'_>) -> Option<String> {
    let flows = egress.stuck(snapshot.time).count();
    (flows > 0).then(|| {
        format!(
            "Egress {}: {flows} flows stay on a backend that they should leave, because another source port is of no use: as a \
             rule Cilium's session affinity sends them back (Cilium up to 1.17); they leave when Cilium drops the backend. \
             `coil-guard check` says what to do",
            egress.title()
        )
    })
}

/// One look does not tell whether they grow.
fn counters(egress: &Egress<'_>) -> Vec<String> {
    let Some(counters) = egress.counters else { return Vec::new() };
    [
        (counters.no_live, "packets so far met no live backend and stayed where they were"),
        (counters.not_drained, "packets so far should have been drained and could not be: they were reset"),
        (
            counters.contended,
            "moves so far gave up because the entry changed each time; the next packet tries again",
        ),
    ]
    .into_iter()
    .filter(|(count, _)| *count > 0)
    .map(|(count, what)| format!("Egress {}: {count} {what}", egress.title()))
    .collect()
}

fn pods(snapshot: &Snapshot, egresses: &[Egress<'_>]) -> Vec<String> {
    if !egresses.iter().any(|egress| egress.clients == Clients::PortEach) {
        return Vec::new();
    }
    let overlapping = snapshot.pods.values().filter(|pod| pod.ports_overlap);
    overlapping
        .map(|pod| {
            format!(
                "pod {}: its ephemeral ports overlap the drain ports, so with fouSourcePortAuto it is reset, not drained",
                pod.name
            )
        })
        .collect()
}
