//! The status for a person.

use std::{
    fmt::{Result, Write as _},
    net::IpAddr,
};

use coil_guard_common::counters::Reason;

use super::{
    Status,
    egress::{Backend, Clients, Cutover, Egress, egresses, others},
    exact,
    problems::problems,
    replies::{self, replies},
    seconds, state_of_mark,
};
use crate::{
    cilium::state_name,
    clock::Monotonic,
    datapath::{MarkSnapshot, Snapshot, draining},
    plan::{Keep, MarkState},
};

pub(super) fn text(status: &Status) -> String {
    let mut out = String::new();
    // Writing to a String cannot fail.
    let _ = write_text(&mut out, status);
    out
}

fn write_text(out: &mut String, status: &Status) -> Result {
    let snapshot = &status.snapshot;
    let now = snapshot.time;
    if snapshot.services.is_empty() && snapshot.pods.is_empty() && snapshot.heartbeat_until.is_none() {
        return writeln!(out, "Nothing is guarded on this node.");
    }
    match snapshot.heartbeat_until {
        Some(until) if until > now => {
            writeln!(out, "Agent: its word counts for another {}", seconds(until.since(now)))?;
        }
        Some(until) => writeln!(out, "Agent: silent, its word ended {} ago", seconds(now.since(until)))?,
        None => writeln!(out, "Agent: has not said anything yet")?,
    }
    let egresses = egresses(status);
    let problems = problems(status, &egresses);
    if problems.is_empty() {
        writeln!(out, "Nothing wrong is seen.")?;
    } else {
        writeln!(out, "\nWhat is wrong: {}", problems.len())?;
        problems.iter().try_for_each(|problem| writeln!(out, "  {problem}"))?;
    }
    if egresses.is_empty() {
        writeln!(out, "\nNo Egress is guarded.")?;
    }
    for egress in &egresses {
        write_egress(out, status, egress)?;
    }
    let others = others(status, &egresses);
    if !others.is_empty() {
        match &status.cilium {
            Ok(_) => writeln!(out, "\nOther backends that the agent has marked: {}", others.len())?,
            Err(_) => {
                writeln!(out, "\nBackends (which Egress has them is in Cilium's maps): {}", others.len())?;
            }
        }
        write_backends(out, status, &others)?;
    }
    write_pods(out, snapshot)?;
    writeln!(out, "\nCilium's maps in use: {}", snapshot.bindings.len())?;
    for map in &snapshot.bindings {
        match map.id {
            Some(id) => writeln!(out, "  {} (id {id})", map.name)?,
            None => writeln!(out, "  {} (Cilium has none; an empty one stands in)", map.name)?,
        }
    }
    writeln!(out, "\nCore programs: {}", snapshot.cores.len())?;
    snapshot.cores.iter().try_for_each(|(name, id)| writeln!(out, "  {name} (id {id})"))?;
    writeln!(out, "\nPackets:")?;
    for reason in Reason::ALL {
        let packets = snapshot.packets.get(reason.label()).copied().unwrap_or(0);
        if packets > 0 {
            writeln!(out, "  {packets:>12}  {}: {}", reason.label(), reason.describe())?;
        }
    }
    Ok(())
}

fn write_egress(out: &mut String, status: &Status, egress: &Egress<'_>) -> Result {
    writeln!(out, "\nEgress {}", egress.title())?;
    for (address, service) in &egress.services {
        let auto = if service.sport_auto { ", fouSourcePortAuto" } else { "" };
        let (ip, port, mode) = (address.address, address.port, service.mode.name());
        writeln!(out, "  Service {ip} port {port}: {mode}{auto}")?;
    }
    let pods = status.snapshot.pods.len();
    match &egress.clients {
        Clients::Known(names) => {
            writeln!(out, "  Clients: {} of {pods} attached pods have a flow", names.len())?;
        }
        Clients::PortEach => {
            writeln!(
                out,
                "  Clients: not told apart, every inner flow has a port of its own ({pods} attached pods)"
            )?;
        }
        Clients::Unknown => {
            writeln!(out, "  Clients: not known, Cilium's maps do not tell ({pods} attached pods)")?;
        }
    }
    if let Some(counters) = egress.counters {
        let (packets, moved, cut) = (counters.packets, counters.moved, counters.cut);
        let draining = egress.draining();
        write!(out, "  Flows: {moved} moved, {draining} draining now, {cut} cut; of {packets} packets")?;
        if counters.would_move > 0 {
            let (moved, drained) = (counters.would_move, counters.would_drain);
            write!(out, "; {moved} packets would have moved, {drained} of them drained")?;
        }
        writeln!(out)?;
    }
    write_given(out, egress)?;
    if let Some(found) = replies(status, egress) {
        writeln!(out, "  Replies: {}", replies::text(found))?;
    }
    writeln!(out, "  Backends: {}", egress.backends.len())?;
    write_backends(out, status, &egress.backends)?;
    for cutover in &egress.cutovers {
        write_cutover(out, cutover, status.snapshot.time)?;
    }
    Ok(())
}

/// The ports of the first few flows: with `fouSourcePortAuto` there are thousands.
fn write_given(out: &mut String, egress: &Egress<'_>) -> Result {
    const SHOWN: usize = 8;
    let given: Vec<_> = egress.given.iter().filter_map(|given| Some((given, given.port?))).collect();
    if given.is_empty() {
        return Ok(());
    }
    writeln!(out, "  Source ports given: {}", given.len())?;
    for (flow, port) in given.iter().take(SHOWN) {
        let (pod, client, own) = (&flow.pod, flow.client, flow.client_port);
        writeln!(out, "    {pod} ({client}) to {}: {own} goes by {port}", flow.service.address)?;
    }
    if given.len() > SHOWN {
        writeln!(out, "    and {} more (see --json)", given.len() - SHOWN)?;
    }
    Ok(())
}

fn write_backends<'a>(
    out: &mut String,
    status: &Status,
    backends: impl IntoIterator<Item = (&'a IpAddr, &'a Backend<'a>)>,
) -> Result {
    let now = status.snapshot.time;
    for (address, backend) in backends {
        let mark = backend.mark.map_or_else(
            || "not marked".into(),
            |mark| {
                let (state, since) = (state_of_mark(mark.state), seconds(now.since(mark.since)));
                format!("{state} since {since}, {}{}", keeps(mark, now), stale(mark, now))
            },
        );
        let cilium = match (&status.cilium, backend.cilium) {
            (Err(_), _) => "not known".into(),
            (Ok(_), None) => "not in its map".into(),
            (Ok(_), Some(found)) => format!("{} (id {})", state_name(found.state), found.id),
        };
        let clients = match backend.clients {
            0 => String::new(),
            1 => "; 1 client is on it".into(),
            clients => format!("; {clients} clients are on it"),
        };
        writeln!(out, "    {address}  agent: {mark}; Cilium: {cilium}{clients}")?;
        if let Some(drain) = backend.drain.filter(|drain| drain.started > 0) {
            let (flows, started, ended, cut) = (draining(drain), drain.started, drain.ended, drain.cut);
            writeln!(
                out,
                "      drained flows: {flows} now, {started} ever, {ended} ended by themselves, {cut} cut"
            )?;
        }
    }
    Ok(())
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

fn stale(mark: &MarkSnapshot, now: Monotonic) -> String {
    if mark.valid_until > now {
        String::new()
    } else {
        format!(" (not renewed, no longer believed since {})", seconds(now.since(mark.valid_until)))
    }
}

fn write_cutover(out: &mut String, cutover: &Cutover<'_>, now: Monotonic) -> Result {
    let last = cutover.last;
    let (address, port) = (last.service.address, last.service.port);
    let client = match &last.pod {
        Some(pod) => format!("{pod} ({})", last.client),
        None => format!("{} (no pod that is attached now)", last.client),
    };
    let ago = seconds(now.since(last.at));
    write!(out, "  Last cutover, {address} port {port}: {client} left {} {ago} ago", last.from)?;
    if let Some(after) = cutover.after_mark {
        write!(out, ", {} after the mark", exact(after))?;
    }
    if let Some(backend) = cutover.now_on {
        write!(out, "; it is on {backend} now")?;
    }
    writeln!(out)
}

fn write_pods(out: &mut String, snapshot: &Snapshot) -> Result {
    writeln!(out, "\nAttached pods: {}", snapshot.pods.len())?;
    for (uid, pod) in &snapshot.pods {
        let addresses: Vec<String> = pod.addresses.iter().map(ToString::to_string).collect();
        let (name, since) = (&pod.name, seconds(snapshot.time.since(pod.guarded_since)));
        let attachment = format!("{:?}", pod.attachment).to_lowercase();
        let interface = pod.interface_index;
        writeln!(
            out,
            "  {name}  {}  {attachment} on interface {interface}, guarded since {since} ({uid})",
            addresses.join(" ")
        )?;
        if pod.ports_overlap {
            writeln!(
                out,
                "    its ephemeral ports overlap the drain ports: with fouSourcePortAuto it is reset, not drained"
            )?;
        }
    }
    Ok(())
}
