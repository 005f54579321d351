//! The agent by the size of the cluster: start, memory, processor time, and what it asks of the API server.

mod population;

use std::{
    collections::BTreeMap,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use coil_guard_common::abi::mark;
use serde::Serialize;

use self::population::{
    EndpointState, NAMESPACE, Size, announce_clients, create_pod, endpoint, pod_address, pod_name, populate,
    set_endpoints,
};
use super::{
    Findings, Goal, Options, Table,
    process::{Memory, mebibytes, memory, processor_time},
    short,
};
use crate::{
    cilium::IpFamily,
    kube_api::{Kind, KubeApi},
    lab::{Lab, eventually},
    net::isolated,
    scenario::{Agent, marks},
};

const PATIENCE: Duration = Duration::from_secs(60);

/// Egress pods that a roll replaces, one after the other.
const ROLLED: usize = 10;

/// What one size of the cluster costs.
#[derive(Debug, Serialize)]
struct Figures {
    egresses: usize,
    endpoints: usize,
    clients: usize,
    /// From the start of the process until /readyz says so, with every client still to be attached, seconds.
    first_start: f64,
    /// The same where the programs of an agent that was killed are pinned, seconds.
    restart: f64,
    /// When it had become ready.
    at_start: Memory,
    /// After the idle time.
    idle: Memory,
    /// After the roll.
    rolled: Memory,
    /// Of one processor, idle.
    idle_percent: f64,
    /// Processor time for each egress pod that was replaced, ms.
    roll_milliseconds: f64,
    /// Requests and bytes of answers until it was ready, by resource.
    requests: BTreeMap<String, Traffic>,
}

/// What went over the wire.
#[derive(Clone, Copy, Debug, Default, Serialize)]
struct Traffic {
    requests: usize,
    bytes: u64,
}

/// Measures every size.
pub(super) fn run(options: &Options) -> Result<Findings> {
    let extent = options.extent;
    let (endpoints, clients) = extent.pick((10_000, 250), (100, 3));
    let idle = Duration::from_secs(extent.pick(20, 1));
    let mut all = Vec::new();
    for egresses in extent.pick([10, 100, 1000].as_slice(), [10].as_slice()) {
        let size = Size { egresses: *egresses, endpoints };
        // A node of its own for each.
        let figures =
            isolated(|| measure(size, clients, idle)).with_context(|| format!("with {egresses} Egresses"))?;
        eprintln!("{egresses} Egresses: {figures:?}");
        all.push(figures);
    }
    Ok(Findings {
        tables: vec![costs(&all), traffic(&all)],
        goals: goals(&all),
        figures: serde_json::to_value(&all)?,
    })
}

fn measure(size: Size, clients: usize, idle_for: Duration) -> Result<Figures> {
    let mut lab = Lab::builder().families(&[IpFamily::V4]).clients(clients).backends(1).start()?;
    let api = KubeApi::start()?;
    populate(&mut lab, &api, size)?;
    announce_clients(&lab, &api, size)?;

    let (agent, first_start) = start(&api)?;
    wait_attached(&agent, clients)?;
    let at_start = memory(agent.pid())?;
    let requests = requests(&api);

    let (began, used) = (Instant::now(), processor_time(agent.pid())?);
    thread::sleep(idle_for);
    let idle_used = processor_time(agent.pid())? - used;
    let idle_percent = 100.0 * idle_used.as_secs_f64() / began.elapsed().as_secs_f64();
    let idle = memory(agent.pid())?;

    let used = processor_time(agent.pid())?;
    let replaced = roll(&api, size)?;
    let roll_used = processor_time(agent.pid())? - used;
    let rolled = memory(agent.pid())?;
    ensure!(!agent.log().contains(" ERROR "), "the agent has logged an error\n{}", agent.log_tail());

    agent.kill()?;
    let (agent, restart) = start(&api)?;
    wait_attached(&agent, clients)?;
    Ok(Figures {
        egresses: size.egresses,
        endpoints: size.endpoints,
        clients,
        first_start,
        restart,
        at_start,
        idle,
        rolled,
        idle_percent,
        roll_milliseconds: 1e3 * roll_used.as_secs_f64() / replaced as f64,
        requests,
    })
}

/// Starts an agent as it is shipped, and says after how many seconds it was ready.
fn start(api: &KubeApi) -> Result<(Agent, f64)> {
    let began = Instant::now();
    let mut agent = Agent::start(api, &["--log-level".to_owned(), "info".to_owned()])?;
    agent.wait_ready(PATIENCE)?;
    Ok((agent, began.elapsed().as_secs_f64()))
}

fn wait_attached(agent: &Agent, clients: usize) -> Result<()> {
    let attached = eventually("attached client pods", PATIENCE, || {
        let attached = agent.metric("coil_guard_pods", &["state=\"attached\""])?;
        Ok(if attached == clients as f64 { Ok(()) } else { Err(attached) })
    });
    attached.with_context(|| agent.log_tail())
}

/// Replaces egress pods of an Egress that has clients here, as a rolling update does. Says how many.
fn roll(api: &KubeApi, size: Size) -> Result<usize> {
    const EGRESS: usize = 0;
    let mut pods: Vec<usize> = size.pods_of(EGRESS).take(100).collect();
    let write = |pods: &[usize], leaving: Option<usize>| {
        let state =
            |pod: usize| if leaving == Some(pod) { EndpointState::Terminating } else { EndpointState::Ready };
        let endpoints: Vec<_> = pods.iter().map(|pod| endpoint(*pod, state(*pod))).collect();
        set_endpoints(api, EGRESS, 0, &endpoints)
    };
    let count = ROLLED.min(pods.len());
    for number in 0..count {
        let (old, new) = (pods[0], size.endpoints + number);
        create_pod(api, EGRESS, new)?;
        pods.push(new);
        write(&pods, None)?;
        wait_mark(new, mark::READY)?;
        api.delete(Kind::Pod, NAMESPACE, &pod_name(old), None)?;
        write(&pods, Some(old))?;
        wait_mark(old, mark::LEAVING)?;
        api.delete(Kind::Pod, NAMESPACE, &pod_name(old), Some(0))?;
        pods.remove(0);
        write(&pods, None)?;
        wait_mark(old, mark::GONE)?;
    }
    Ok(count)
}

fn wait_mark(pod: usize, state: u8) -> Result<()> {
    let address = pod_address(pod);
    eventually(&format!("mark {state} of {address}"), PATIENCE, || {
        let mark = marks::read(address)?;
        Ok(if mark.is_some_and(|mark| mark.state == state) { Ok(()) } else { Err(format!("{mark:?}")) })
    })
}

fn requests(api: &KubeApi) -> BTreeMap<String, Traffic> {
    let mut traffic: BTreeMap<String, Traffic> = BTreeMap::new();
    for call in api.calls() {
        // The two watches of pods differ in what they select.
        let local = if call.uri.contains("spec.nodeName") { " of the node" } else { "" };
        let of = traffic.entry(format!("{}{local}", call.attributes.resource)).or_default();
        of.requests += 1;
        of.bytes += call.response_bytes + call.request_bytes;
    }
    traffic
}

fn costs(all: &[Figures]) -> Table {
    let clients = all.first().map_or(0, |figures| figures.clients);
    let endpoints = all.first().map_or(0, |figures| figures.endpoints);
    let columns: Vec<String> = std::iter::once(String::new())
        .chain(all.iter().map(|figures| format!("{} Egresses", figures.egresses)))
        .collect();
    let title = format!(
        "The agent with {endpoints} egress pods in the cluster and {clients} client pods on the node"
    );
    let mut table = Table::new(&title, &columns.iter().map(String::as_str).collect::<Vec<_>>());
    let mut row = |what: &str, get: &dyn Fn(&Figures) -> f64| {
        let figures = all.iter().map(|figures| short(get(figures)));
        table.row(std::iter::once(what.to_owned()).chain(figures));
    };
    row("first start until ready, every pod to be attached, s", &|f| f.first_start);
    row("restart until ready, every pod guarded, s", &|f| f.restart);
    row("resident after the start, MiB (VmRSS)", &|f| mebibytes(f.at_start.resident));
    row("resident after the idle time, MiB (VmRSS)", &|f| mebibytes(f.idle.resident));
    row("of that its own, MiB (RssAnon)", &|f| mebibytes(f.idle.anonymous));
    row("resident after the roll, MiB (VmRSS)", &|f| mebibytes(f.rolled.resident));
    row("processor, idle, %", &|f| f.idle_percent);
    row("processor for an egress pod that is replaced, ms", &|f| f.roll_milliseconds);
    table
}

fn traffic(all: &[Figures]) -> Table {
    let columns: Vec<String> = std::iter::once("resource".to_owned())
        .chain(all.iter().map(|figures| format!("{} Egresses", figures.egresses)))
        .collect();
    let mut table = Table::new(
        "Requests and KiB at the API server for one node, from the start until ready",
        &columns.iter().map(String::as_str).collect::<Vec<_>>(),
    );
    let cell = |traffic: Traffic| format!("{} / {:.0}", traffic.requests, traffic.bytes as f64 / 1024.0);
    let resources: std::collections::BTreeSet<&String> = all.iter().flat_map(|f| f.requests.keys()).collect();
    for resource in resources {
        let cells = all.iter().map(|f| cell(f.requests.get(resource).copied().unwrap_or_default()));
        table.row(std::iter::once(resource.clone()).chain(cells));
    }
    let totals = all.iter().map(|figures| {
        let total = figures.requests.values().fold(Traffic::default(), |sum, of| Traffic {
            requests: sum.requests + of.requests,
            bytes: sum.bytes + of.bytes,
        });
        cell(total)
    });
    table.row(std::iter::once("all".to_owned()).chain(totals));
    let per_egress = all.iter().map(|figures| {
        let own = figures
            .requests
            .iter()
            .filter(|(resource, _)| ["egresses", "services"].contains(&resource.as_str()));
        let bytes: u64 = own.map(|(_, traffic)| traffic.bytes).sum();
        format!("{:.2}", bytes as f64 / 1024.0 / figures.egresses as f64)
    });
    table.row(std::iter::once("KiB for each Egress and its Service".to_owned()).chain(per_egress));
    let per_pod = all.iter().map(|figures| {
        let own = figures
            .requests
            .iter()
            .filter(|(resource, _)| ["pods", "endpointslices"].contains(&resource.as_str()));
        let bytes: u64 = own.map(|(_, traffic)| traffic.bytes).sum();
        format!("{:.2}", bytes as f64 / 1024.0 / figures.endpoints as f64)
    });
    table.row(std::iter::once("KiB for each egress pod and its endpoint".to_owned()).chain(per_pod));
    table
}

fn goals(all: &[Figures]) -> Vec<Goal> {
    let Some(largest) = all.last() else { return Vec::new() };
    let with = format!("{} Egresses, {} clients", largest.egresses, largest.clients);
    let most_idle = all.iter().map(|figures| figures.idle_percent).fold(0.0, f64::max);
    vec![
        Goal::below(&format!("resident (VmRSS), {with}"), 20.0, mebibytes(largest.idle.resident), "MiB"),
        Goal::below("processor, idle, any number of Egresses", 0.1, most_idle, "%"),
        Goal::below(&format!("restart until ready, {with}"), 1.0, largest.restart, "s"),
    ]
}
