//! Act 4: an old connection stays on the leaving pod and ends by itself, new ones go elsewhere at once.

use std::{net::IpAddr, time::Duration};

use anyhow::Result;
use coil_guard_common::{abi::mark, decide::SETTLE};
use nix::time::{ClockId, clock_getres};

use super::{
    Options, Screen,
    account::{Change, Packets, milliseconds},
    document::{Act, Check, Connections, EventKind, Scene, Tally},
    story::{Story, Track},
};
use crate::{
    cilium::BackendState,
    fou::{InnerPacket, log::now, tcp},
    scenario::{Scenario, marks},
};

const BACKENDS: usize = 2;
/// Between packets of either stream.
const PACE: Duration = Duration::from_millis(2);
/// Packets of each new connection: SYN, data, FIN.
const SEGMENTS: [u8; 4] = [tcp::SYN, tcp::ACK, tcp::PSH | tcp::ACK, tcp::FIN | tcp::ACK];
const OLD: &str = "old";
const NEW: &str = "new";

struct Played {
    marked: Change,
    /// When the agent wrote its mark.
    marked_by_agent: u64,
    end: u64,
}

/// Both kinds of connections, as packets.
struct Seen<'a> {
    old: &'a Packets,
    new: &'a Packets,
}

/// Plays it.
pub(super) fn play(options: Options, screen: &Screen) -> Result<Scene> {
    let mut scenario =
        Scenario::builder(options.lab(BACKENDS)).affinity(true).mode(options.modes[1]).grace(600).start()?;
    let names: Vec<String> =
        (0..BACKENDS).map(|index| Ok(scenario.backend_pod(index)?.name)).collect::<Result<_>>()?;
    let (client, outside) = (
        scenario.lab.client(0).address(options.family),
        outside(scenario.lab.client(0).address(options.family)),
    );
    let connection = |port, flags| InnerPacket::tcp((client, port), (outside, 443), flags);

    // A SYN, data, and at last a FIN: as many packets as fit until it is to end.
    let count = (options.span(4.0).as_nanos() / PACE.as_nanos()) as u64;
    let flags = |number| match number {
        0 => tcp::SYN,
        number if number + 1 == count => tcp::FIN | tcp::ACK,
        _ => tcp::PSH | tcp::ACK,
    };
    let spec = scenario.lab.spec(0, options.family).interval(PACE);
    let old =
        spec.clone().count(count).inner((0..count).map(|number| connection(40_000, flags(number))).collect());
    let ports = 1024..10_000;
    let new = spec.inner(ports.flat_map(|port| SEGMENTS.map(|flags| connection(port, flags))).collect());

    let (old, new) = (scenario.lab.stream(0, old)?, scenario.lab.stream(0, new)?);
    let log = std::sync::Arc::clone(&scenario.lab.log);
    let track = |flows: &str, stream| Track { flows: flows.to_owned(), stays: flows == OLD, stream };
    let tracks = vec![track(OLD, old.number()), track(NEW, new.number())];
    let story = Story::begin(screen, &log, &names, tracks);
    let played =
        story.play(|| direct(&mut scenario, &story, options, (old.number(), count), new.number()))?;
    let service = scenario.lab.service(options.family);
    // Whole connections only: the last one may have been cut off by the end of the play.
    let (old, new) = (Packets::of(&old.finish(true)?, service), Packets::of(&new.finish(true)?, service));

    let seen = Seen { old: &old, new: &new };
    let mut lanes = story.lanes(OLD, &old, played.end);
    lanes.extend(story.lanes(NEW, &new, played.end));
    Ok(Scene {
        title: "One old TCP connection and many new ones inside the same tunnel".to_owned(),
        length_ms: milliseconds(played.end - story.start),
        acts: vec![act(&story, &seen, &played, &names)],
        lanes,
        events: story.events(),
    })
}

/// A server outside of the cluster.
const fn outside(client: IpAddr) -> IpAddr {
    match client {
        IpAddr::V4(_) => IpAddr::V4(std::net::Ipv4Addr::new(198, 51, 100, 1)),
        IpAddr::V6(_) => IpAddr::V6(std::net::Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1)),
    }
}

fn direct(
    scenario: &mut Scenario,
    story: &Story<'_>,
    options: Options,
    (old, count): (u32, u64),
    new: u32,
) -> Result<Played> {
    let pause = |seconds| story.pause(options.span(seconds));
    let patience = scenario.patience();
    story.note(
        story.start,
        EventKind::Act,
        "4. coil-guard.io/mode=drain: an old connection, and new ones every 8 ms",
    );
    pause(1.0);
    let backend = story.current(old, patience)?;
    let name = story.name(backend).to_owned();
    let begun = now();
    scenario.cluster.terminate(&scenario.backend_pod(backend)?, None)?;
    scenario.lab.set_backend(backend, BackendState::Terminating)?;
    let marked = Change { backend, begun, done: now() };
    story.leaving(backend, begun);
    let text = format!("pod {name}, which all connections use, is Terminating (API, then Cilium)");
    story.note(begun, EventKind::Mark, &text);
    if let Some((at, to)) = story.wait_elsewhere(new, backend, begun, patience) {
        let (to, took) = (story.name(to), milliseconds(at - begun));
        let text =
            format!("a new connection is on {to}, {took} ms after the mark; the old one is still on {name}");
        story.note(at, EventKind::Move, &text);
    }
    scenario.wait_mark(backend, mark::LEAVING)?;
    let marked_by_agent =
        marks::read(scenario.lab.backend(backend).address(options.family))?.map_or(0, |mark| mark.since);
    let over = scenario.lab.log.wait(options.span(4.0) + patience, |state| {
        state.streams.get(&old).is_some_and(|stream| stream.at_backends >= count)
    });
    if over {
        let ended = now();
        story.note(
            ended,
            EventKind::End,
            &format!("the old connection ends by itself: its FIN has arrived at {name}"),
        );
    }
    pause(0.7);
    let pod = scenario.backend_pod(backend)?;
    let gone = now();
    scenario.cluster.force_delete(&pod)?;
    scenario.lab.remove_backend(backend)?;
    story.gone(backend, gone);
    story.note(gone, EventKind::End, &format!("pod {name} is gone"));
    pause(1.0);
    Ok(Played { marked, marked_by_agent, end: now() })
}

fn act(story: &Story<'_>, seen: &Seen<'_>, played: &Played, names: &[String]) -> Act {
    let found = connections(story, seen, played, names);
    let whole = |packets: &Packets| packets.tally(0..packets.sent.len());
    let (old, new) = (whole(seen.old), whole(seen.new));
    let tally = Tally {
        sent: old.sent + new.sent,
        lost: old.lost + new.lost,
        duplicated: old.duplicated + new.duplicated,
        unanswered: old.unanswered + new.unanswered,
        foreign_answers: old.foreign_answers + new.foreign_answers,
    };
    let leaving = &found.leaving;
    let checks = vec![
        Check::new(
            "the old connection stays on the leaving pod and ends by itself",
            found.old_sent_after_mark > 0
                && found.old_stayed_after_mark == found.old_sent_after_mark
                && found.old_ended_at_ms.is_some(),
            format!(
                "{} of {} packets after the mark arrived at {leaving}, {}; outer source ports {:?}",
                found.old_stayed_after_mark,
                found.old_sent_after_mark,
                if found.old_ended_at_ms.is_some() { "the FIN too" } else { "no FIN" },
                found.old_source_ports
            ),
        ),
        Check::new(
            "new connections move at once",
            found.new_moved_after_ms.is_some() && late_joiners(seen, played) == 0,
            describe_new(&found),
        ),
        Check::new("no connection is on two pods", found.torn == 0, format!("{} torn", found.torn)),
        Check::new(
            "nothing lost or doubled",
            tally.sent > 0 && tally.lost + tally.duplicated == 0,
            format!("{} sent, {} lost, {} doubled", tally.sent, tally.lost, tally.duplicated),
        ),
        Check::new(
            "every packet answered from the Service's address",
            tally.unanswered + tally.foreign_answers == 0,
            format!("{} unanswered, {} from elsewhere", tally.unanswered, tally.foreign_answers),
        ),
    ];
    Act {
        name: "drain".to_owned(),
        title: "4. coil-guard.io/mode=drain".to_owned(),
        from_ms: 0.0,
        to_ms: milliseconds(played.end - story.start),
        packets: tally,
        moves: Vec::new(),
        connections: Some(found),
        checks,
    }
}

fn connections(story: &Story<'_>, seen: &Seen<'_>, played: &Played, names: &[String]) -> Connections {
    let Change { backend, begun, .. } = played.marked;
    let after = seen.old.sent_between(begun, u64::MAX);
    let mut ports: Vec<u16> = Vec::new();
    for arrival in seen.old.arrivals.iter().flatten() {
        if !ports.contains(&arrival.source_port) {
            ports.push(arrival.source_port);
        }
    }
    let fin = seen.old.arrivals.last().into_iter().flatten().find(|arrival| arrival.backend == backend);
    let opened_after: Vec<_> = opened(seen.new).filter(|(sent, _)| *sent >= begun).collect();
    let elsewhere = seen.new.arrivals[seen.new.sent_between(begun, u64::MAX)].iter().flatten();
    let first = elsewhere.filter(|arrival| arrival.backend != backend).map(|arrival| arrival.at).min();
    let joined = || opened_after.iter().filter(|(_, at)| *at == Some(backend));
    Connections {
        leaving: names[backend].clone(),
        old_sent_after_mark: after.len() as u64,
        old_stayed_after_mark: seen.old.count_at(after, backend),
        old_source_ports: ports,
        old_ended_at_ms: fin.map(|arrival| milliseconds(arrival.at - story.start)),
        new_after_mark: opened_after.len() as u64,
        new_joined_leaving: joined().count() as u64,
        new_last_joined_after_ms: joined().map(|(sent, _)| milliseconds(sent - begun)).next_back(),
        new_moved_after_ms: first.map(|at| milliseconds(at.saturating_sub(begun))),
        torn: torn(seen.new, SEGMENTS.len()) + torn(seen.old, seen.old.sent.len().max(1)),
    }
}

fn describe_new(found: &Connections) -> String {
    let leaving = &found.leaving;
    let first = match found.new_moved_after_ms {
        Some(took) => format!("the first is elsewhere {took} ms after the mark"),
        None => "none is elsewhere".to_owned(),
    };
    let joined = format!("{} of {} joined {leaving}", found.new_joined_leaving, found.new_after_mark);
    match found.new_last_joined_after_ms {
        Some(last) => format!("{first}; {joined}, the last {last} ms after the mark"),
        None => format!("{first}; {joined}"),
    }
}

/// When each new connection was opened, and at which backend.
fn opened(new: &Packets) -> impl Iterator<Item = (u64, Option<usize>)> {
    (0..new.sent.len()).step_by(SEGMENTS.len()).map(|number| (new.sent[number], new.backend(number)))
}

/// Connections that joined the leaving backend later than the rule allows.
fn late_joiners(seen: &Seen<'_>, played: &Played) -> u64 {
    let limit = played.marked.done.max(played.marked_by_agent) + SETTLE + tick();
    let late = opened(seen.new).filter(|(sent, at)| *sent > limit && *at == Some(played.marked.backend));
    late.count() as u64
}

/// By how much the program's clock may be behind: it reads the coarse one.
fn tick() -> u64 {
    clock_getres(ClockId::CLOCK_MONOTONIC_COARSE).map_or(0, |tick| Duration::from(tick).as_nanos() as u64)
}

/// Connections of `length` packets each that were seen at more than one backend.
fn torn(packets: &Packets, length: usize) -> u64 {
    let on_two = |connection: &&[Vec<super::account::Arrival>]| {
        let mut backends = connection.iter().flatten().map(|arrival| arrival.backend);
        backends.next().is_some_and(|first| backends.any(|other| other != first))
    };
    packets.arrivals.chunks(length).filter(on_two).count() as u64
}
