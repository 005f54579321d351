//! Acts 1 to 3, one stream: stuck without the guard, freed and moved by reset, moved without an agent.

use std::time::Duration;

use anyhow::Result;

use super::{
    Options, Screen,
    account::{Change, Packets, milliseconds},
    document::{Act, Check, EventKind, Move, Scene},
    story::{Story, Track},
};
use crate::{
    cilium::BackendState,
    fou::log::now,
    scenario::{EGRESS, NAMESPACE, Scenario},
};

const BACKENDS: usize = 4;
/// Between packets.
const PACE: Duration = Duration::from_millis(1);

/// Loading and attaching takes a moment, on a busy machine more.
const ATTACH_PATIENCE: Duration = Duration::from_secs(8);

/// What the director did, and when.
struct Played {
    stuck: Change,
    /// When the annotation was set: everything before belongs to act 1.
    annotated: Change,
    marked: Change,
    killed: u64,
    orphaned: Change,
    attached_without_annotation: bool,
    end: u64,
}

/// Plays them.
pub(super) fn play(options: Options, screen: &Screen) -> Result<Scene> {
    let mut scenario = Scenario::builder(options.lab(BACKENDS)).affinity(true).start()?;
    let names: Vec<String> =
        (0..BACKENDS).map(|index| Ok(scenario.backend_pod(index)?.name)).collect::<Result<_>>()?;
    let spec = scenario.lab.spec(0, options.family).interval(PACE);
    let stream = scenario.lab.stream(0, spec)?;
    let log = std::sync::Arc::clone(&scenario.lab.log);
    let tracks = vec![Track { flows: "flow".to_owned(), stays: false, stream: stream.number() }];
    let story = Story::begin(screen, &log, &names, tracks);
    let played = story.play(|| direct(&mut scenario, &story, options, stream.number()))?;
    let report = stream.finish(true)?;
    let packets = Packets::of(&report, scenario.lab.service(options.family));
    let length = played.end - story.start;
    Ok(Scene {
        title: "One FoU flow and the pods of its Egress".to_owned(),
        length_ms: milliseconds(length),
        acts: acts(&story, &packets, &played, &names),
        lanes: story.lanes("flow", &packets, played.end),
        events: story.events(),
    })
}

fn direct(scenario: &mut Scenario, story: &Story<'_>, options: Options, stream: u32) -> Result<Played> {
    let pause = |seconds| story.pause(options.span(seconds));
    let soon = options.span(2.0);

    story.note(story.start, EventKind::Act, "1. No annotation on the Egress: Cilium alone");
    pause(1.0);
    let stuck = mark(scenario, story, stream)?;
    pause(3.0);
    let attached_without_annotation = !scenario.lab.attachments(0)?.is_empty();

    let begun = now();
    story.note(begun, EventKind::Act, "2. The Egress is annotated with coil-guard.io/mode=reset");
    scenario.set_mode(Some(options.modes[0]))?;
    let annotated = Change { begun, done: now(), ..stuck };
    let text = format!(
        "egress {NAMESPACE}/{EGRESS} annotated: the stuck flow has been on {} for {:.1} s",
        story.name(stuck.backend),
        (begun - stuck.begun) as f64 / 1e9
    );
    story.note(begun, EventKind::Mode, &text);
    say_move(story, stream, annotated, "annotation", ATTACH_PATIENCE);
    pause(1.3);
    let marked = mark(scenario, story, stream)?;
    say_move(story, stream, marked, "mark", soon);
    pause(1.5);

    let killed = now();
    story.note(killed, EventKind::Act, "3. The agent is killed; its program stays in the kernel");
    scenario.kill_agent()?;
    story.note(now(), EventKind::Kill, "kill -9 of the agent");
    pause(1.0);
    let orphaned = mark(scenario, story, stream)?;
    say_move(story, stream, orphaned, "mark", soon);
    pause(1.5);
    Ok(Played { stuck, annotated, marked, killed, orphaned, attached_without_annotation, end: now() })
}

/// Marks the pod that the stream uses: its deletion begins in the API, and Cilium's agent writes what it makes of it.
fn mark(scenario: &mut Scenario, story: &Story<'_>, stream: u32) -> Result<Change> {
    let backend = story.current(stream, scenario.patience())?;
    let begun = now();
    scenario.cluster.terminate(&scenario.backend_pod(backend)?, None)?;
    scenario.lab.set_backend(backend, BackendState::Terminating)?;
    let done = now();
    story.leaving(backend, begun);
    let name = story.name(backend);
    let text = format!("pod {name}, which the flow uses, is Terminating (API, then Cilium)");
    story.note(begun, EventKind::Mark, &text);
    Ok(Change { backend, begun, done })
}

fn say_move(story: &Story<'_>, stream: u32, change: Change, what: &str, patience: Duration) {
    if let Some((at, to)) = story.wait_elsewhere(stream, change.backend, change.begun, patience) {
        let (name, took) = (story.name(to), milliseconds(at - change.begun));
        let text = format!("the flow is on {name}, {took} ms after the {what}");
        story.note(at, EventKind::Move, &text);
    }
}

fn acts(story: &Story<'_>, packets: &Packets, played: &Played, names: &[String]) -> Vec<Act> {
    let act = |name: &str, title: &str, from: u64, to: u64, moves: Vec<Move>, mut checks: Vec<Check>| {
        // The last packets of the scene were sent after its end was noted.
        let tally = packets.tally(packets.sent_between(from, if to == played.end { u64::MAX } else { to }));
        checks.push(Check::new(
            "nothing lost or doubled",
            tally.sent > 0 && tally.lost + tally.duplicated == 0,
            format!("{} sent, {} lost, {} doubled", tally.sent, tally.lost, tally.duplicated),
        ));
        checks.push(Check::new(
            "every packet answered from the Service's address",
            tally.unanswered + tally.foreign_answers == 0,
            format!("{} unanswered, {} from elsewhere", tally.unanswered, tally.foreign_answers),
        ));
        let (from_ms, to_ms) = (milliseconds(from - story.start), milliseconds(to - story.start));
        Act {
            name: name.to_owned(),
            title: title.to_owned(),
            from_ms,
            to_ms,
            packets: tally,
            moves,
            connections: None,
            checks,
        }
    };
    let departure = |change, to| packets.departure(change, to, names, story.start);

    let stuck = departure(played.stuck, played.annotated.begun);
    let freed = departure(played.annotated, played.marked.begun);
    let moved = departure(played.marked, played.killed);
    let orphaned = departure(played.orphaned, u64::MAX);
    let span = (played.annotated.begun - played.stuck.begun) as f64 / 1e9;
    let stuck_checks = vec![
        Check::new(
            "nothing of the guard is attached",
            !played.attached_without_annotation,
            "device of the client pod",
        ),
        Check::new(
            "the flow is stuck on the Terminating pod",
            stuck.to.is_none() && stuck.to_old_after_all_knew > 0,
            format!("{} packets to {} in {span:.1} s after the mark", stuck.to_old_after_change, stuck.from),
        ),
    ];
    vec![
        act("off", "1. No annotation", story.start, played.annotated.begun, vec![stuck], stuck_checks),
        act(
            "reset",
            "2. coil-guard.io/mode=reset",
            played.annotated.begun,
            played.killed,
            vec![freed.clone(), moved.clone()],
            vec![
                Check::new(
                    "the stuck flow leaves when the Egress is annotated",
                    freed.to.is_some(),
                    describe(&freed, "annotation"),
                ),
                left_at_once(&moved),
            ],
        ),
        act(
            "agent_killed",
            "3. Agent killed",
            played.killed,
            played.end,
            vec![orphaned.clone()],
            vec![left_at_once(&orphaned)],
        ),
    ]
}

/// The rule of reset: a packet sent after everybody knew never arrives at the leaving pod.
fn left_at_once(found: &Move) -> Check {
    let passed = found.to.is_some() && found.to_old_after_all_knew == 0;
    Check::new("the flow leaves with its next packet", passed, describe(found, "mark"))
}

fn describe(found: &Move, what: &str) -> String {
    let (from, after) = (&found.from, found.to_old_after_change);
    match (&found.to, found.took_ms) {
        (Some(to), Some(took)) => {
            format!("{from} → {to}, {took} ms after the {what}; packets to {from} in between: {after}")
        }
        _ => format!("it stayed on {from}: {after} packets after the {what}"),
    }
}
