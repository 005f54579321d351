//! Mode `reset`: new connections and pings go on through a rolling restart of every egress pod.

use std::{
    fmt,
    net::IpAddr,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use coil_guard_tests::{
    cilium::IpFamily,
    lab::LabBuilder,
    net::lab_test,
    scenario::{Scenario, ScenarioBuilder},
};

use crate::{
    coil::{Form, Tunnels, blackhole},
    ping::Pinger,
    tcp,
    world::{FAMILIES, PATIENCE, World, lab},
};

/// Egress pods before the restart; as many new ones take their places.
const PODS: usize = 3;

/// Often enough for some echo requests in each phase of a roll that takes a second, and seldom enough for one that takes
/// half a minute.
const PING_EVERY: Duration = Duration::from_millis(8);

/// What a rolling restart did to a client.
#[derive(Default)]
struct Figures {
    /// Connections that came about.
    connections: usize,
    /// Connections that did not, each with the reason.
    failed: Vec<String>,
    /// Echo requests sent.
    pings: usize,
    /// Numbers of those without an answer.
    lost: Vec<usize>,
    /// Connections and echo requests that went to a pod after it had been marked.
    to_leaving: Vec<String>,
}

impl fmt::Display for Figures {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            formatter,
            "{} connections, {} failed (first: {:?}); {} echo requests, {} lost (first: {:?}); {} to a leaving pod (first: \
             {:?})",
            self.connections,
            self.failed.len(),
            self.failed.first(),
            self.pings,
            self.lost.len(),
            self.lost.first(),
            self.to_leaving.len(),
            self.to_leaving.first()
        )
    }
}

/// Replaces every egress pod: a new one is Ready, the old one gets its deletionTimestamp, its network goes, its object
/// goes. A steady ping and short connections meanwhile, with `patience` for each connection.
fn roll(world: &mut World, family: IpFamily, patience: Duration) -> Result<Figures> {
    let mut figures = Figures::default();
    // Binds the client: two first packets of one outer tuple on two CPUs may be sent to two backends by Cilium itself.
    tcp::short(world.client(), family, PATIENCE)?;
    let ping = Pinger::start(world.client(), family, PING_EVERY, 56)?;
    let mut marked: Vec<(IpAddr, Instant)> = Vec::new();
    for old in 0..PODS {
        connect(world, family, patience, &mut figures, &marked, (old, "before it leaves"));
        world.bring_up(PODS + old)?;
        world.begin_to_delete(old)?;
        marked.push((world.scenario.lab.backend(old).address(family), Instant::now()));
        connect(world, family, patience, &mut figures, &marked, (old, "while it serves"));
        blackhole(world.scenario.lab.backend(old))?;
        connect(world, family, patience, &mut figures, &marked, (old, "while it is dead"));
        world.finish_deletion(old)?;
        connect(world, family, patience, &mut figures, &marked, (old, "when it is gone"));
    }
    let report = ping.finish()?;
    figures.pings = report.sent.len();
    figures.lost = report.lost();
    for (number, source) in world.outside.pings() {
        let sent = report.sent.get(usize::from(number));
        let too_late = |(pod, at): &&(IpAddr, Instant)| *pod == source && sent.is_some_and(|sent| sent > at);
        if let Some((pod, _)) = marked.iter().find(too_late) {
            figures.to_leaving.push(format!("echo request {number} by {pod}"));
        }
    }
    Ok(figures)
}

fn connect(
    world: &World,
    family: IpFamily,
    patience: Duration,
    figures: &mut Figures,
    marked: &[(IpAddr, Instant)],
    (old, when): (usize, &str),
) {
    for number in 0..6 {
        match tcp::short(world.client(), family, patience) {
            Ok(seen) => {
                figures.connections += 1;
                if marked.iter().any(|(pod, _)| *pod == seen) {
                    figures.to_leaving.push(format!("connection by {seen}"));
                }
            }
            Err(error) => figures.failed.push(format!("{number} of pod {old} {when}: {error:#}")),
        }
    }
}

/// Rolls a cluster with each family inside in `mode`, and expects that nothing is lost.
pub(crate) fn nothing_stalls(mode: &str, lab: fn() -> LabBuilder, tunnels: Tunnels) -> Result<()> {
    let mode = mode.to_owned();
    nothing_stalls_in(&|lab| Scenario::builder(lab).mode(&mode), lab, tunnels)
}

/// As [`nothing_stalls`], in a cluster made by `builder`.
pub(crate) fn nothing_stalls_in(
    builder: &(dyn Fn(LabBuilder) -> ScenarioBuilder + Sync),
    lab: fn() -> LabBuilder,
    tunnels: Tunnels,
) -> Result<()> {
    for family in FAMILIES {
        lab_test(|| {
            let mut world = World::start(builder(lab().backends(2 * PODS).published(PODS)), tunnels)?;
            let figures = roll(&mut world, family, PATIENCE)?;
            println!("figure: {family:?} {tunnels:?}: {figures}");
            let good = figures.failed.is_empty() && figures.lost.is_empty() && figures.to_leaving.is_empty();
            world.scenario.explain(if good { Ok(()) } else { Err(anyhow::anyhow!("{figures}")) })?;
            ensure!(figures.connections > 50 && figures.pings > 50, "too little was tried: {figures}");
            world.ensure_no_checksum_errors()
        })
        .with_context(|| format!("{family:?} {tunnels:?}"))?;
    }
    Ok(())
}

#[test]
fn nothing_stalls_while_every_egress_pod_is_replaced() -> Result<()> {
    nothing_stalls("reset", lab, Tunnels::COIL)
}

#[test]
fn nothing_stalls_with_source_ports_by_inner_flow() -> Result<()> {
    nothing_stalls("reset", lab, Tunnels { sport_auto: true, ..Tunnels::COIL })
}

#[test]
fn nothing_stalls_with_outer_checksums() -> Result<()> {
    nothing_stalls("reset", lab, Tunnels { form: Form::Checksums, sport_auto: false })
}

#[test]
fn without_the_guard_the_same_restart_stalls() -> Result<()> {
    for mode in [None, Some("audit")] {
        lab_test(|| {
            let builder = Scenario::builder(lab().backends(2 * PODS).published(PODS));
            let builder = match mode {
                Some(mode) => builder.mode(mode),
                None => builder.no_agent(),
            };
            let mut world = World::start(builder, Tunnels::COIL)?;
            let figures = roll(&mut world, IpFamily::V4, Duration::from_millis(1500))?;
            println!("figure: {mode:?}: {figures}");
            ensure!(
                !figures.failed.is_empty() && !figures.lost.is_empty() && !figures.to_leaving.is_empty(),
                "{mode:?}: this restart should have stalled: {figures}"
            );
            Ok(())
        })?;
    }
    Ok(())
}
