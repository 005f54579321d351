//! `coil-guard status`: the datapath's state for a person or a program.

use std::{collections::BTreeMap, fmt::Write as _, time::Duration};

use coil_guard_common::counters::Reason;
use serde_json::{Value, json};

use crate::{
    clock::Monotonic,
    datapath::{MarkSnapshot, Snapshot},
    plan::{Keep, MarkState, Mode},
};

fn mode(mode: Mode) -> &'static str {
    match mode {
        Mode::Audit => "audit",
        Mode::Reset => "reset",
        Mode::Drain => "drain",
    }
}

fn state(state: MarkState) -> &'static str {
    match state {
        MarkState::Ready => "ready",
        MarkState::NotReady => "not ready",
        MarkState::Leaving => "leaving",
        MarkState::Gone => "gone",
    }
}

fn seconds(duration: Duration) -> String {
    format!("{} s", duration.as_secs())
}

fn keeps(mark: &MarkSnapshot, now: Monotonic) -> String {
    match mark.keep {
        _ if mark.state == MarkState::Ready => "gets new flows".into(),
        Keep::No => "keeps no flows".into(),
        Keep::ForEver => "keeps its flows".into(),
        Keep::Until(end) if end > now => format!("keeps its flows for {}", seconds(end.since(now))),
        Keep::Until(end) => format!("keeps no flows since {}", seconds(now.since(end))),
    }
}

/// For a person.
pub(super) fn text(snapshot: &Snapshot) -> String {
    let mut out = String::new();
    // Writing to a String cannot fail.
    let _ = write_text(&mut out, snapshot);
    out
}

fn write_text(out: &mut String, snapshot: &Snapshot) -> std::fmt::Result {
    let now = snapshot.time;
    if snapshot.services.is_empty() && snapshot.pods.is_empty() && snapshot.heartbeat_until.is_none() {
        return writeln!(out, "Nothing is guarded on this node.");
    }
    match snapshot.heartbeat_until {
        Some(until) if until > now => {
            writeln!(out, "Agent: its word counts for another {}", seconds(until.since(now)))?;
        }
        Some(until) => writeln!(
            out,
            "Agent: silent, its word ended {} ago (not running, or a watch is lost): Cilium's state alone guards",
            seconds(now.since(until))
        )?,
        None => writeln!(out, "Agent: has not said anything yet")?,
    }
    writeln!(out, "\nGuarded Services: {}", snapshot.services.len())?;
    for (address, service) in &snapshot.services {
        let egress = service.egress.as_ref().map_or_else(|| "(name unknown)".into(), ToString::to_string);
        let auto = if service.sport_auto { ", fouSourcePortAuto" } else { "" };
        writeln!(out, "  {egress}  {}:{}  {}{auto}", address.address, address.port, mode(service.mode))?;
    }
    writeln!(out, "\nBackends: {}", snapshot.marks.len())?;
    for (address, mark) in &snapshot.marks {
        let (state, since) = (state(mark.state), seconds(now.since(mark.since)));
        writeln!(out, "  {address}  {state} since {since}, {}", keeps(mark, now))?;
        if let Some(drain) = snapshot.drains.get(address).filter(|drain| drain.started > 0) {
            let (flows, started, ended, cut) = (drain.flows, drain.started, drain.ended, drain.cut);
            writeln!(
                out,
                "    drained flows: {flows} now, {started} ever, {ended} ended by themselves, {cut} cut"
            )?;
        }
    }
    writeln!(out, "\nAttached pods: {}", snapshot.pods.len())?;
    for (uid, pod) in &snapshot.pods {
        let addresses: Vec<String> = pod.addresses.iter().map(ToString::to_string).collect();
        let (name, since) = (&pod.name, seconds(now.since(pod.guarded_since)));
        let attachment = format!("{:?}", pod.attachment).to_lowercase();
        writeln!(out, "  {name}  {}  {attachment}, guarded since {since} ({uid})", addresses.join(" "))?;
        if pod.ports_overlap {
            writeln!(
                out,
                "    its ephemeral ports overlap the drain ports: with fouSourcePortAuto it is reset, not drained"
            )?;
        }
    }
    writeln!(out, "\nCilium's maps in use: {}", snapshot.bindings.len())?;
    for map in &snapshot.bindings {
        match map.id {
            Some(id) => writeln!(out, "  {} (id {id})", map.name)?,
            None => writeln!(out, "  {} (Cilium has none; an empty one stands in)", map.name)?,
        }
    }
    writeln!(out, "\nPackets:")?;
    for reason in Reason::ALL {
        let packets = snapshot.packets.get(reason.label()).copied().unwrap_or(0);
        if packets > 0 {
            writeln!(out, "  {packets:>12}  {}: {}", reason.label(), reason.describe())?;
        }
    }
    Ok(())
}

/// For a program. Times are seconds before (negative) or after now.
pub(super) fn json(snapshot: &Snapshot) -> Value {
    let now = snapshot.time;
    let from_now = |time: Monotonic| -> f64 {
        if time >= now { time.since(now).as_secs_f64() } else { -now.since(time).as_secs_f64() }
    };
    let services = snapshot.services.iter().map(|(address, service)| {
        json!({
            "address": address.address, "port": address.port, "mode": mode(service.mode),
            "egress": service.egress.as_ref().map(ToString::to_string), "fouSourcePortAuto": service.sport_auto,
            "expires": from_now(service.expires_at),
        })
    });
    let marks = snapshot.marks.iter().map(|(address, mark)| {
        let keep = match mark.keep {
            Keep::No => json!(0),
            Keep::Until(end) => json!(from_now(end)),
            Keep::ForEver => json!("forever"),
        };
        let drain = snapshot.drains.get(address).map(|drain| {
            json!({"flows": drain.flows, "started": drain.started, "ended": drain.ended, "cut": drain.cut})
        });
        json!({
            "address": address, "state": state(mark.state), "since": from_now(mark.since), "keeps": keep,
            "valid": from_now(mark.valid_until), "drain": drain,
        })
    });
    let pods = snapshot.pods.iter().map(|(uid, pod)| {
        json!({
            "uid": uid, "name": pod.name, "addresses": pod.addresses, "attachment": pod.attachment,
            "interfaceIndex": pod.interface_index, "programId": pod.program_id,
            "guardedSince": from_now(pod.guarded_since), "portsOverlap": pod.ports_overlap,
        })
    });
    let egresses: BTreeMap<String, Value> = snapshot
        .egresses
        .iter()
        .map(|(name, counters)| {
            let counters = json!({
                "packets": counters.packets, "moved": counters.moved, "created": counters.created,
                "repaired": counters.repaired, "drained": counters.drained, "cut": counters.cut,
                "noLive": counters.no_live, "wouldMove": counters.would_move, "wouldDrain": counters.would_drain,
                "notDrained": counters.not_drained, "contended": counters.contended,
            });
            (name.to_string(), counters)
        })
        .collect();
    json!({
        "heartbeat": snapshot.heartbeat_until.map(from_now),
        "services": services.collect::<Vec<_>>(),
        "backends": marks.collect::<Vec<_>>(),
        "pods": pods.collect::<Vec<_>>(),
        "egresses": egresses,
        "packets": snapshot.packets,
        "ciliumMaps": snapshot.bindings,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{EgressName, ServiceAddress};

    fn at(seconds: u64) -> Monotonic {
        Monotonic(seconds * 1_000_000_000)
    }

    fn snapshot() -> Snapshot {
        let egress = EgressName { namespace: "net".into(), name: "nat".into() };
        let mark = |state, keep| MarkSnapshot { state, keep, since: at(90), valid_until: at(150) };
        Snapshot {
            time: at(100),
            packets: BTreeMap::from([("moved", 3), ("healthy", 0)]),
            services: BTreeMap::from([(
                ServiceAddress { address: [10, 96, 0, 10].into(), port: 5555 },
                crate::datapath::ServiceSnapshot {
                    egress: Some(egress),
                    mode: Mode::Drain,
                    sport_auto: true,
                    tracked_since: None,
                    expires_at: at(1000),
                },
            )]),
            marks: BTreeMap::from([
                ([10, 0, 1, 1].into(), mark(MarkState::Leaving, Keep::Until(at(130)))),
                ([10, 0, 1, 2].into(), mark(MarkState::Ready, Keep::ForEver)),
                ([10, 0, 1, 3].into(), mark(MarkState::NotReady, Keep::Until(at(95)))),
            ]),
            heartbeat_until: Some(at(112)),
            ..Snapshot::default()
        }
    }

    #[test]
    fn a_person_sees_what_is_guarded_and_for_how_long_backends_keep_flows() {
        let text = text(&snapshot());
        for line in [
            "Agent: its word counts for another 12 s",
            "  net/nat  10.96.0.10:5555  drain, fouSourcePortAuto",
            "  10.0.1.1  leaving since 10 s, keeps its flows for 30 s",
            "  10.0.1.2  ready since 10 s, gets new flows",
            "  10.0.1.3  not ready since 10 s, keeps no flows since 5 s",
            "             3  moved: The service entry was moved to a live backend.",
        ] {
            assert!(text.lines().any(|found| found == line), "{line:?} is not in\n{text}");
        }
        assert!(!text.contains("healthy"), "{text}");
    }

    #[test]
    fn an_untouched_node_says_so() {
        assert_eq!(text(&Snapshot::default()), "Nothing is guarded on this node.\n");
    }

    #[test]
    fn a_program_sees_the_same() {
        let json = json(&snapshot());
        assert_eq!(json["services"][0]["mode"], "drain");
        assert_eq!(json["backends"][0]["keeps"], 30.0);
        assert_eq!(json["backends"][1]["keeps"], "forever");
        assert_eq!(json["heartbeat"], 12.0);
        assert_eq!(json["packets"]["moved"], 3);
    }
}
