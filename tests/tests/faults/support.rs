//! Rolling updates in steps, and what the agent holds and pins.

use std::{
    env, fs,
    path::{Path, PathBuf},
    str::FromStr,
    time::Duration,
};

use anyhow::{Context as _, Result};
use aya::programs::links::{FdLink, PinnedLink};
use coil_guard_common::abi::{LAYOUT_VERSION, mark};
use coil_guard_tests::{
    cilium::IpFamily,
    fou::{FOU_PORT, Stream, StreamReport},
    lab::eventually,
    net::{Paths, PodRole},
    scenario::Scenario,
};

/// A size or a length of a test: from the environment, else the default that suits CI.
pub(crate) fn setting<T: FromStr>(name: &str, default: T) -> T {
    env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

/// How long to go on with kills of the agent: a start takes a fraction of a second, or many on a machine that is busy.
pub(crate) fn kill_time() -> Duration {
    Duration::from_secs(setting("COIL_GUARD_KILL_SECONDS", 75))
}

/// The directory of the guard's pins.
pub(crate) fn guard_pins() -> PathBuf {
    Paths.bpffs().join("coil-guard")
}

/// Every file below the directory of the guard's pins, in order.
pub(crate) fn pins() -> Vec<PathBuf> {
    fn walk(directory: &Path, found: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
            if entry.path().is_dir() {
                walk(&entry.path(), found);
            } else {
                found.push(entry.path());
            }
        }
    }
    let mut found = Vec::new();
    walk(&guard_pins(), &mut found);
    found.sort();
    found
}

/// Kernel id of the pinned link of a client pod.
pub(crate) fn link_id(scenario: &Scenario, client: usize) -> Result<u32> {
    let path = guard_pins().join(LAYOUT_VERSION).join("links").join(&scenario.clients[client].uid);
    let link = PinnedLink::from_pin(&path).with_context(|| format!("no link at {}", path.display()))?;
    Ok(FdLink::from(link).info().context("cannot ask for the link's id")?.id())
}

/// Namespaces that the running agent holds open, its own not counted.
pub(crate) fn open_namespaces(scenario: &Scenario) -> Result<usize> {
    let directory = format!("/proc/{}/fd", scenario.agent()?.pid());
    let targets = fs::read_dir(&directory)?.flatten().filter_map(|fd| fs::read_link(fd.path()).ok());
    Ok(targets.filter(|target| target.to_string_lossy().starts_with("net:[")).count())
}

/// Resident memory of the running agent, KiB.
pub(crate) fn resident_kib(scenario: &Scenario) -> Result<u64> {
    let status = fs::read_to_string(format!("/proc/{}/status", scenario.agent()?.pid()))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("no VmRSS")?;
    line.trim().trim_end_matches(" kB").parse().with_context(|| format!("VmRSS is {line:?}"))
}

/// Where each flow of these clients is bound, by client and family.
fn bindings(scenario: &Scenario, clients: &[usize]) -> Result<Vec<(usize, IpFamily, usize)>> {
    let mut found = Vec::new();
    for client in clients {
        for family in scenario.lab.families() {
            if let Some(backend) = scenario.lab.bound_backend(*client, *family, FOU_PORT)? {
                found.push((*client, *family, backend));
            }
        }
    }
    Ok(found)
}

/// Waits until no flow of these clients is bound to a backend. The flows send all the time, so one packet of each is enough.
pub(crate) fn wait_left(scenario: &Scenario, clients: &[usize], backend: usize) -> Result<()> {
    let left = eventually(&format!("end of backend {backend}'s flows"), scenario.patience(), || {
        let stuck: Vec<_> =
            bindings(scenario, clients)?.into_iter().filter(|(.., bound)| *bound == backend).collect();
        Ok(if stuck.is_empty() { Ok(()) } else { Err(stuck) })
    });
    scenario.explain(left)
}

/// A rolling update without end over the lab's backends, one step at a time: one is marked Terminating, goes when every flow
/// has left it, and is replaced by a new pod (another UID, another backend id) at the same address.
#[derive(Debug, Default)]
pub(crate) struct Roll {
    leaving: Option<usize>,
    gone: Option<usize>,
    next: usize,
    /// Backends that were marked so far.
    pub(crate) marked: u64,
}

impl Roll {
    /// Takes the next step. `clients` are those whose flows have to leave.
    pub(crate) fn step(&mut self, scenario: &mut Scenario, clients: &[usize]) -> Result<()> {
        if let Some(index) = self.gone.take() {
            scenario.announce_backend(index)?;
            return scenario.lab.publish_backend(index);
        }
        if let Some(index) = self.leaving.take() {
            wait_left(scenario, clients, index)?;
            scenario.cluster.force_delete(&scenario.backend_pod(index)?)?;
            scenario.lab.remove_backend(index)?;
            self.gone = Some(index);
            return Ok(());
        }
        let index = self.next;
        self.next = (self.next + 1) % scenario.lab.topology.backends.len();
        self.marked += 1;
        scenario.terminate(index)?;
        self.leaving = Some(index);
        Ok(())
    }

    /// Goes on until nothing is leaving or gone.
    pub(crate) fn finish(&mut self, scenario: &mut Scenario, clients: &[usize]) -> Result<()> {
        while self.leaving.is_some() || self.gone.is_some() {
            self.step(scenario, clients)?;
        }
        Ok(())
    }
}

/// One backend leaves, by the agent's mark alone, so that only a program that is bound to the present maps can move its flow;
/// then it comes back as another pod.
pub(crate) fn guards(scenario: &mut Scenario, family: IpFamily) -> Result<()> {
    let bound = scenario.bound(0, family, 5555)?;
    let pod = scenario.backend_pod(bound)?;
    scenario.cluster.terminate(&pod, None)?;
    scenario.wait_mark(bound, mark::LEAVING)?;
    wait_left(scenario, &[0], bound)?;
    scenario.cluster.force_delete(&pod)?;
    scenario.announce_backend(bound)?;
    scenario.wait_mark(bound, mark::READY)
}

/// One stream for each client and family, with this time between packets.
pub(crate) fn streams(scenario: &Scenario, clients: &[usize], every: Duration) -> Result<Vec<Stream>> {
    let mut streams = Vec::new();
    for client in clients {
        for family in scenario.lab.families() {
            let spec = scenario.lab.spec(*client, *family).interval(every);
            streams.push(scenario.lab.stream(*client, spec)?);
        }
    }
    for stream in &streams {
        stream.wait_arrived(5, scenario.patience())?;
    }
    Ok(streams)
}

/// Ends the streams; each packet must have arrived once. Gives the account of each.
pub(crate) fn finish(streams: Vec<Stream>) -> Result<Vec<StreamReport>> {
    let mut reports = Vec::new();
    for stream in streams {
        let report = stream.finish(true)?;
        report.ensure_exactly_once()?;
        reports.push(report);
    }
    Ok(reports)
}

/// Packets of all streams.
pub(crate) fn sent(reports: &[StreamReport]) -> u64 {
    reports.iter().map(|report| report.sent.len() as u64).sum()
}

/// Checks that the counters of the Egress have seen each packet: as many as were sent, whoever read the counters meanwhile.
pub(crate) fn counted(scenario: &Scenario, packets: u64) -> Result<()> {
    let counted = eventually("count of every packet", scenario.patience(), || {
        let seen = scenario.agent()?.metric("coil_guard_egress_packets_total", &["egress=\"nat\""])?;
        Ok(if seen as u64 == packets { Ok(()) } else { Err(format!("{seen} of {packets}")) })
    });
    scenario.explain(counted)
}

/// Switches the Egress off and checks that nothing of ours is left, in any pod and below the pin directory.
pub(crate) fn leaves_nothing(scenario: &Scenario, clients: &[usize]) -> Result<()> {
    scenario.set_mode(None)?;
    for client in clients {
        scenario.wait_detached(*client)?;
    }
    let empty = eventually("empty pin directory", scenario.patience(), || {
        let pins = pins();
        Ok(if pins.is_empty() { Ok(()) } else { Err(pins) })
    });
    scenario.explain(empty)
}

/// Removes a client pod from Kubernetes and from the node.
pub(crate) fn remove_client(scenario: &mut Scenario, client: usize) -> Result<()> {
    let pod = scenario.clients.get(client).cloned().context("a client that Kubernetes knows")?;
    scenario.cluster.force_delete(&pod)?;
    scenario.lab.topology.remove_pod(PodRole::Client, client)
}
