//! `coil-guard status`: the datapath's state for a person or a program.

mod egress;
mod json;
mod problems;
mod replies;
mod text;

#[cfg(test)]
mod tests;

use std::{
    io::{self, ErrorKind, IsTerminal as _, Write as _},
    thread,
    time::Duration,
};

use anyhow::Context as _;

use super::StatusArguments;
use crate::{
    cilium::{Current, Sought, current},
    datapath::{GivenPort, LastMove, Snapshot},
    plan::MarkState,
};

/// Cursor to the top left, and everything cleared.
const CLEAR: &str = "\x1b[H\x1b[2J";

/// Everything that is shown, as it was read.
#[derive(Debug)]
struct Status {
    snapshot: Snapshot,
    moves: Vec<LastMove>,
    given: Vec<GivenPort>,
    /// What Cilium's maps hold, or why that is not known.
    cilium: Result<Current, String>,
}

impl Status {
    fn read(arguments: &StatusArguments) -> anyhow::Result<Self> {
        let snapshot = Snapshot::read(&arguments.node.pin_dir)?;
        let moves = LastMove::read(&arguments.node.pin_dir, &snapshot.pods)?;
        let given = GivenPort::read(&arguments.node.pin_dir, &snapshot)?;
        let sought = Sought {
            services: snapshot
                .services
                .iter()
                .map(|(address, service)| (*address, !service.sport_auto))
                .collect(),
            clients: snapshot.pods.values().flat_map(|pod| pod.addresses.iter().copied()).collect(),
            ports: given
                .iter()
                .filter(|given| given.client_port == given.service.port)
                .filter_map(|given| Some(((given.client, given.service), given.port?)))
                .collect(),
            backends: snapshot.marks.keys().copied().collect(),
        };
        let cilium = current(&arguments.node.cilium_maps, &sought).map_err(|error| error.to_string());
        Ok(Self { snapshot, moves, given, cilium })
    }
}

/// Shows it once, or again and again until the process is interrupted or nobody reads any more.
///
/// # Errors
///
/// When the first look fails: later ones may fail because an agent is just taking its maps down.
pub(super) fn show(arguments: &StatusArguments) -> anyhow::Result<()> {
    let mut first = true;
    loop {
        let shown = match Status::read(arguments) {
            Ok(status) => render(&status, arguments),
            Err(error) if first => return Err(error),
            Err(error) => {
                eprintln!("coil-guard: {error:#}");
                String::new()
            }
        };
        match print(&shown, arguments.watch.is_some() && !arguments.json, first) {
            Err(error) if error.kind() == ErrorKind::BrokenPipe => return Ok(()),
            other => other.context("cannot print the status")?,
        }
        let Some(interval) = arguments.watch else { return Ok(()) };
        first = false;
        thread::sleep(interval);
    }
}

fn render(status: &Status, arguments: &StatusArguments) -> String {
    match (arguments.json, arguments.watch) {
        (true, Some(_)) => format!("{}\n", json::json(status)),
        (true, None) => format!("{:#}\n", json::json(status)),
        (false, _) => text::text(status),
    }
}

fn print(shown: &str, redraw: bool, first: bool) -> io::Result<()> {
    if shown.is_empty() {
        return Ok(());
    }
    let mut out = io::stdout().lock();
    if redraw && out.is_terminal() {
        out.write_all(CLEAR.as_bytes())?;
    } else if redraw && !first {
        out.write_all(b"\n")?;
    }
    out.write_all(shown.as_bytes())?;
    out.flush()
}

fn state_of_mark(state: MarkState) -> &'static str {
    match state {
        MarkState::Ready => "ready",
        MarkState::NotReady => "not ready",
        MarkState::Leaving => "leaving",
        MarkState::Gone => "gone",
    }
}

/// A time that passed between a mark and a packet: often well below a second.
fn exact(duration: Duration) -> String {
    if duration < Duration::from_secs(10) {
        format!("{:.1} ms", duration.as_secs_f64() * 1000.0)
    } else {
        seconds(duration)
    }
}

fn seconds(duration: Duration) -> String {
    format!("{} s", duration.as_secs())
}
