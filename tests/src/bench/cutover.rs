//! From the leaving of a backend to the first packet at another one, with one, many and very many clients on the node.
//!
//! Every client has a flow on the backend that leaves. The first one sends often, to time the move; the others send now
//! and then. Either the API server alone says that the backend leaves, or Cilium's maps alone: who comes first in a real
//! cluster is a race, and each way has to do by itself.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use coil_guard_common::abi::mark;
use serde::Serialize;

use super::{Findings, Goal, Options, Spread, Table, measure::Extent};
use crate::{
    cilium::{BackendState, IpFamily},
    fou::{FOU_PORT, Place, Stream, StreamReport},
    lab::{Lab, eventually},
    net::isolated,
    program::monotonic,
    scenario::{EGRESS, NAMESPACE, Scenario, marks},
};

const FAMILY: IpFamily = IpFamily::V4;
/// The first client sends this often.
const PROBE: Duration = Duration::from_micros(500);
/// The others together send this often.
const OTHERS: Duration = Duration::from_millis(2);

/// One leaving of a backend.
#[derive(Clone, Copy, Debug)]
struct Leaving {
    from: usize,
    /// When it was said, ns of CLOCK_MONOTONIC.
    said: u64,
    /// From when on no packet may go there any more, ns.
    armed: u64,
    /// When the flows were free to come back, ns.
    over: u64,
    /// By the agent's clock, from the arrival of each event to the written mark, mean of this leaving's, ms.
    applied: Option<f64>,
    /// From the call to the API server to the mark, by the mark's own time, ms.
    marked: Option<f64>,
}

/// What was found with one number of clients.
#[derive(Debug, Serialize)]
struct Figures {
    clients: usize,
    /// From the event's arrival at the agent to the written maps, ms.
    applied: Spread,
    /// From the call that deletes the pod to the mark, ms.
    marked: Spread,
    /// From that call to the first packet at another backend, ms.
    api_moved: Spread,
    /// Packets of all clients that were sent after the mark and went to the leaving backend.
    api_late: usize,
    /// From Cilium's write to the first packet at another backend, ms.
    cilium_moved: Spread,
    /// Packets of all clients that were sent after that write and went to the leaving backend.
    cilium_late: usize,
    /// Packets that were lost in all of it.
    lost: usize,
    packets: usize,
}

pub(super) fn run(options: &Options) -> Result<Findings> {
    let extent = options.extent;
    let mut all = Vec::new();
    for clients in extent.pick([1, 100, 250].as_slice(), [1, 3].as_slice()) {
        let figures = isolated(|| measure(*clients, extent)).with_context(|| format!("{clients} clients"))?;
        eprintln!("{clients} clients: {figures:?}");
        all.push(figures);
    }
    Ok(Findings { tables: vec![table(&all)], goals: goals(&all), figures: serde_json::to_value(&all)? })
}

fn measure(clients: usize, extent: Extent) -> Result<Figures> {
    let lab = Lab::builder().families(&[FAMILY]).clients(clients).backends(2);
    let mut scenario = Scenario::builder(lab).mode("reset").arguments(&["--log-level", "info"]).start()?;
    let others = OTHERS * u32::try_from(clients).unwrap_or(u32::MAX);
    let streams: Vec<Stream> = (0..clients)
        .map(|client| {
            let interval = if client == 0 { PROBE } else { others };
            let spec = scenario.lab.spec(client, FAMILY).interval(interval);
            scenario.lab.stream(client, spec)
        })
        .collect::<Result<_>>()?;
    for client in 0..clients {
        scenario.bound(client, FAMILY, FOU_PORT)?;
    }
    let turns = extent.pick(15, 2);
    let (mut by_api, mut by_cilium) = (Vec::new(), Vec::new());
    for _ in 0..turns {
        by_api.push(leave_by_api(&mut scenario)?);
        by_cilium.push(leave_by_cilium(&mut scenario)?);
    }
    let reports = streams.into_iter().map(|stream| stream.finish(true)).collect::<Result<Vec<_>>>()?;
    let accounts: Vec<_> = reports.iter().map(account).collect();
    let milliseconds = |figures: Vec<Option<f64>>| Spread::of(figures.into_iter().flatten().collect());
    let moved = |leavings: &[Leaving]| {
        let first = |leaving: &Leaving| first_elsewhere(&reports[0], leaving);
        milliseconds(leavings.iter().map(first).collect())
    };
    let late = |leavings: &[Leaving]| {
        let of = |leaving| accounts.iter().map(|account| sent_late(account, leaving)).sum::<usize>();
        leavings.iter().map(of).sum()
    };
    let figures = Figures {
        clients,
        applied: milliseconds(by_api.iter().map(|leaving| leaving.applied).collect()),
        marked: milliseconds(by_api.iter().map(|leaving| leaving.marked).collect()),
        api_moved: moved(&by_api),
        api_late: late(&by_api),
        cilium_moved: moved(&by_cilium),
        cilium_late: late(&by_cilium),
        lost: reports.iter().map(|report| report.lost().len()).sum(),
        packets: reports.iter().map(|report| report.sent.len()).sum(),
    };
    ensure!(figures.applied.count == turns, "the agent's coil_guard_apply_seconds counted nothing");
    ensure!(
        figures.api_moved.count == turns && figures.cilium_moved.count == turns,
        "not every leaving was followed by a packet elsewhere: {figures:?}"
    );
    Ok(figures)
}

/// Sum and number of what the agent has measured of itself.
fn applied(scenario: &Scenario) -> Result<(f64, f64)> {
    let agent = scenario.agent()?;
    Ok((
        agent.metric("coil_guard_apply_seconds_sum", &[])?,
        agent.metric("coil_guard_apply_seconds_count", &[])?,
    ))
}

/// Kubernetes says it, Cilium does not know it yet.
fn leave_by_api(scenario: &mut Scenario) -> Result<Leaving> {
    let from = scenario.bound(0, FAMILY, FOU_PORT)?;
    let address = scenario.lab.backend(from).address(FAMILY);
    let pod = scenario.backend_pod(from)?;
    let before = applied(scenario)?;
    let said = monotonic();
    scenario.cluster.terminate(&pod, None)?;
    scenario.wait_mark(from, mark::LEAVING)?;
    let armed = monotonic();
    let since = marks::read(address)?.context("the mark is gone")?.since;
    wait_moved(scenario, from)?;
    let after = applied(scenario)?;
    let over = monotonic();
    // The pod goes, and another one comes in its place.
    scenario.cluster.force_delete(&pod)?;
    scenario.lab.remove_backend(from)?;
    scenario.lab.publish_backend(from)?;
    scenario.announce_backend(from)?;
    scenario.wait_mark(from, mark::READY)?;
    let (seconds, count) = (after.0 - before.0, after.1 - before.1);
    Ok(Leaving {
        from,
        said,
        armed,
        over,
        applied: (count > 0.0).then(|| 1e3 * seconds / count),
        marked: Some(since.saturating_sub(said) as f64 * 1e-6),
    })
}

/// Cilium's backends say it, and neither its slots nor Kubernetes do.
fn leave_by_cilium(scenario: &mut Scenario) -> Result<Leaving> {
    let from = scenario.bound(0, FAMILY, FOU_PORT)?;
    let said = monotonic();
    scenario.lab.set_backend_lagging(from, BackendState::Terminating)?;
    let armed = monotonic();
    wait_moved(scenario, from)?;
    let over = monotonic();
    scenario.lab.set_backend(from, BackendState::Active)?;
    Ok(Leaving { from, said, armed, over, applied: None, marked: None })
}

/// Waits until no client's flow names the backend any more.
fn wait_moved(scenario: &Scenario, from: usize) -> Result<()> {
    let moved = eventually("flows off the leaving backend", scenario.patience(), || {
        for client in 0..scenario.lab.topology.clients.len() {
            if scenario.lab.bound_backend(client, FAMILY, FOU_PORT)? == Some(from) {
                return Ok(Err(format!("client {client} of {NAMESPACE}/{EGRESS} is still on {from}")));
            }
        }
        Ok(Ok(()))
    });
    scenario.explain(moved)
}

/// After what time the first packet was elsewhere, ms.
fn first_elsewhere(report: &StreamReport, leaving: &Leaving) -> Option<f64> {
    let arrived =
        report.records.iter().filter(|record| record.at >= leaving.said && record.at < leaving.over);
    let elsewhere =
        arrived.filter(|record| matches!(record.place, Place::Backend(index) if index != leaving.from));
    elsewhere.map(|record| (record.at - leaving.said) as f64 * 1e-6).min_by(f64::total_cmp)
}

/// When each packet that arrived was sent, and at which backend it arrived.
fn account(report: &StreamReport) -> Vec<(u64, usize)> {
    let sent = |sequence: u64| report.sent.get(sequence as usize).copied();
    report.backends().into_iter().filter_map(|(sequence, backend)| Some((sent(sequence)?, backend))).collect()
}

/// Packets that were sent to the leaving backend when nobody had to send any there.
fn sent_late(account: &[(u64, usize)], leaving: &Leaving) -> usize {
    let late = |(sent, backend): &&(u64, usize)| {
        *backend == leaving.from && *sent >= leaving.armed && *sent < leaving.over
    };
    account.iter().filter(late).count()
}

fn table(all: &[Figures]) -> Table {
    let columns: Vec<String> = std::iter::once(String::new())
        .chain(all.iter().map(|figures| match figures.clients {
            1 => "1 client".to_owned(),
            clients => format!("{clients} clients"),
        }))
        .collect();
    let mut table = Table::new(
        "Milliseconds, median (and the middle half), over as many leavings",
        &columns.iter().map(String::as_str).collect::<Vec<_>>(),
    );
    let mut row = |what: &str, get: &dyn Fn(&Figures) -> String| {
        table.row(std::iter::once(what.to_owned()).chain(all.iter().map(get)));
    };
    row("the event's arrival at the agent to the armed datapath", &|f| f.applied.to_string());
    row("the pod's deletion at the API server to the armed datapath", &|f| f.marked.to_string());
    row("the pod's deletion to the first packet at another backend", &|f| f.api_moved.to_string());
    row("packets to the leaving backend after the mark", &|f| f.api_late.to_string());
    row("Cilium's own change to the first packet at another backend", &|f| f.cilium_moved.to_string());
    row("packets to the leaving backend after Cilium's change", &|f| f.cilium_late.to_string());
    row("packets lost, of all that were sent", &|f| format!("{} of {}", f.lost, f.packets));
    row("leavings of each kind", &|f| f.applied.count.to_string());
    table
}

fn goals(all: &[Figures]) -> Vec<Goal> {
    let (Some(few), Some(many)) = (all.first(), all.last()) else { return Vec::new() };
    let late: usize = all.iter().map(|figures| figures.cilium_late).sum();
    let what = format!("event's arrival to the armed datapath, {} clients, median", many.clients);
    let growth = format!("the same with {} clients over {}", many.clients, few.clients);
    vec![
        Goal::below(&what, 5.0, many.applied.median, "ms"),
        Goal::below(&growth, 2.0, many.applied.median / few.applied.median, "times"),
        Goal {
            what: "packets to the leaving backend after Cilium's own change".to_owned(),
            goal: "0".to_owned(),
            found: late.to_string(),
            met: late == 0,
        },
    ]
}
