//! `kill -9` of the agent at any instant of a drain.

use std::{
    collections::BTreeSet,
    net::IpAddr,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use coil_guard_common::abi::mark;
use coil_guard_tests::{
    cilium::IpFamily,
    fou::{InnerPacket, Place, Stream, StreamReport, StreamSpec, inner::tcp, log::now},
    lab::{Lab, eventually},
    net::lab_test,
    program::Rng,
    scenario::{Agent, Scenario, check, marks},
};

use crate::support::{kill_time, leaves_nothing, setting};

const CLIENT: usize = 0;
/// Kills, however long they take.
const AT_LEAST: u32 = 10;
/// Inner connections of each family that are old when their backend leaves.
const OLD: u16 = 6;
const DRAIN: Duration = Duration::from_secs(6);
/// How much earlier a successor's deadline may be: it is told in microseconds when its predecessor saw the pod leave.
const ROUNDED: u64 = 1_000;
/// How far the program's clock may be behind.
const TICK: u64 = 10_000_000;

fn segments(
    scenario: &Scenario,
    family: IpFamily,
    ports: std::ops::Range<u16>,
    flags: u8,
) -> Result<StreamSpec> {
    let source = scenario.lab.client(CLIENT).address(family);
    let outside: IpAddr = if family == IpFamily::V4 { "198.51.100.7" } else { "2001:db8::7" }.parse()?;
    let inner = ports.map(|port| InnerPacket::tcp((source, port), (outside, 443), flags)).collect();
    Ok(scenario.lab.spec(CLIENT, family).inner(inner))
}

/// Opens connections and says the backend that all of them are on.
fn open(scenario: &Scenario, family: IpFamily, ports: std::ops::Range<u16>) -> Result<BTreeSet<usize>> {
    let count = u64::from(ports.end - ports.start);
    let spec = segments(scenario, family, ports, tcp::SYN)?.count(count);
    let report = scenario.lab.stream(CLIENT, spec)?.finish(false)?;
    report.ensure_exactly_once()?;
    Ok(report.backends().into_values().collect())
}

/// Before the deadline every packet is at its old home, afterwards none; none is lost. What lies between is the deadline's
/// resolution.
fn stayed_until(report: &StreamReport, home: usize, (first, last): (u64, u64)) -> Result<()> {
    report.ensure_exactly_once()?;
    let (mut before, mut after) = (0, 0);
    for (sequence, records) in report.arrivals() {
        let there = records.iter().all(|record| record.place == Place::Backend(home));
        let sent = report.sent[usize::try_from(sequence)?];
        if records.iter().all(|record| record.at < first) {
            before += 1;
            ensure!(there, "packet {sequence} left {} ms too early: {records:?}", (first - sent) / 1_000_000);
        } else if sent > last + TICK {
            after += 1;
            ensure!(!there, "packet {sequence} stayed {} ms too long", (sent - last) / 1_000_000);
        }
    }
    ensure!(before > 0 && after > 0, "{before} packets before the deadline, {after} after it: {report:?}");
    Ok(())
}

/// The deadline of a drain, when the agent has told it.
fn deadline(scenario: &Scenario, home: usize) -> Result<Option<u64>> {
    let address = scenario.lab.backend(home).address(scenario.lab.families()[0]);
    let mark = marks::read(address)?.filter(|mark| mark.state == mark::LEAVING);
    Ok(mark.map(|mark| mark.keep_until))
}

struct Kills {
    attach: &'static str,
    random: Rng,
    done: u32,
    before_ready: u32,
    ready: Duration,
}

impl Kills {
    fn arguments(&self) -> [String; 4] {
        ["--attach", self.attach, "--unmarked-drain", "60s"].map(str::to_owned)
    }

    /// Kills the agent, starts another, and lets it live for a random part of what it needs to be ready, and half of that more.
    fn next(&mut self, scenario: &mut Scenario) -> Result<()> {
        scenario.kill_agent()?;
        let started = Instant::now();
        if self.done.is_multiple_of(10) {
            scenario.start_agent()?;
            self.ready = started.elapsed();
        } else {
            scenario.agent = Some(Agent::start(&scenario.api, &self.arguments())?);
        }
        self.done += 1;
        let lives = self.ready.mul_f64(1.5 * self.random.below(1000) as f64 / 1000.0);
        thread::sleep(lives.saturating_sub(started.elapsed()));
        self.before_ready += u32::from(started.elapsed() < self.ready);
        let there = scenario.lab.attachments(CLIENT)?;
        ensure!(there.egress_programs() == 1, "after kill {}: {there:?}", self.done);
        Ok(())
    }
}

/// One backend leaves with old connections on it, and is gone in the end.
fn one_drain(scenario: &mut Scenario, kills: &mut Kills, ports: u16) -> Result<u64> {
    let families = scenario.lab.families().to_vec();
    let mut old = Vec::new();
    for family in &families {
        let there = open(scenario, *family, ports..ports + OLD)?;
        ensure!(there.len() == 1, "{family:?}: new connections went to {there:?}");
        let home = *there.first().context("an arrival")?;
        let spec =
            segments(scenario, *family, ports..ports + OLD, tcp::ACK)?.interval(Duration::from_millis(1));
        old.push((home, scenario.lab.stream(CLIENT, spec)?));
    }
    for (_, stream) in &old {
        stream.wait_arrived(50, scenario.patience())?;
    }
    let leaving: BTreeSet<usize> = old.iter().map(|(home, _)| *home).collect();
    for home in &leaving {
        scenario.terminate(*home)?;
    }
    // The agent may die before it has heard of it.
    let mut deadlines = Vec::new();
    for home in &leaving {
        let began = Instant::now();
        let told = loop {
            kills.next(scenario)?;
            if let Some(told) = deadline(scenario, *home)? {
                break told;
            }
            ensure!(began.elapsed() < scenario.patience(), "backend {home} is not marked as leaving");
        };
        deadlines.push((*home, (told, told)));
    }
    let last = deadlines.iter().map(|(_, (first, _))| *first).max().unwrap_or(0);
    check::wait_settled();
    let mut new = ports + OLD;
    while now() < last {
        kills.next(scenario)?;
        for (home, (first, last)) in &mut deadlines {
            let told =
                deadline(scenario, *home)?.with_context(|| format!("backend {home} has no deadline"))?;
            ensure!(
                told <= *last,
                "the deadline of backend {home} was {last}, and is {} ns later",
                told - *last
            );
            ensure!(*last - told <= ROUNDED, "the deadline of backend {home} was {last}, and is {told}");
            *first = told.min(*first);
        }
        for family in &families {
            let there = open(scenario, *family, new..new + 2)?;
            ensure!(
                there.is_disjoint(&leaving),
                "{family:?}: new connections on {there:?}, {leaving:?} leave"
            );
        }
        new += 2;
    }
    let mut packets = 0;
    for (home, stream) in old {
        let told = deadlines.iter().find(|(leaving, _)| *leaving == home).context("a deadline")?.1;
        wait_elsewhere(scenario, &stream, home)?;
        let report = stream.finish(true)?;
        stayed_until(&report, home, told).with_context(|| format!("kill {}", kills.done))?;
        packets += report.sent.len() as u64;
    }
    for home in leaving {
        scenario.cluster.force_delete(&scenario.backend_pod(home)?)?;
        scenario.lab.remove_backend(home)?;
        scenario.announce_backend(home)?;
        scenario.lab.publish_backend(home)?;
    }
    Ok(packets)
}

/// Waits until the connections have gone on elsewhere for a moment.
fn wait_elsewhere(scenario: &Scenario, stream: &Stream, home: usize) -> Result<()> {
    let left = eventually("end of the drain", scenario.patience(), || {
        let elsewhere = scenario.lab.log.with(|state| {
            let records = state.streams.get(&stream.number()).map(|stream| stream.records.as_slice());
            let other = |place| matches!(place, Place::Backend(index) if index != home);
            records.unwrap_or_default().iter().rev().take(1000).filter(|record| other(record.place)).count()
        });
        Ok(if elsewhere > 50 { Ok(()) } else { Err(elsewhere) })
    });
    scenario.explain(left)
}

fn killed_while_draining(attach: &'static str) -> Result<()> {
    lab_test(move || {
        let number: u32 = setting("COIL_GUARD_KILLS", 200) / 8;
        let seed = setting("COIL_GUARD_SEED", 1);
        let timeout = format!("{}s", DRAIN.as_secs());
        let mut kills = Kills {
            attach,
            random: Rng::new(seed),
            done: 0,
            before_ready: 0,
            ready: Duration::from_millis(500),
        };
        let arguments = kills.arguments();
        let began = Instant::now();
        let mut scenario = Scenario::builder(Lab::builder().backends(4))
            .mode("drain")
            .annotation("coil-guard.io/drain-timeout", &timeout)
            .grace(600)
            .arguments(&arguments.each_ref().map(String::as_str))
            .start()?;
        let (mut packets, mut drains) = (0, 0);
        while kills.done < number && (kills.done < AT_LEAST || began.elapsed() < kill_time()) {
            let ports = 20_000 + drains * 500;
            packets += one_drain(&mut scenario, &mut kills, ports)
                .with_context(|| format!("seed {seed}, drain {drains}, kill {}", kills.done))?;
            drains += 1;
        }
        eprintln!(
            "{attach}: {} kills ({} before ready) in {drains} drains, {packets} packets of drained connections, 0 lost, all on \
             their backend to the deadline and none after it, {:.0?}",
            kills.done,
            kills.before_ready,
            began.elapsed()
        );
        scenario.kill_agent()?;
        scenario.start_agent()?;
        leaves_nothing(&scenario, &[CLIENT])
    })
}

#[test]
fn drained_connections_stay_to_the_deadline_whenever_the_agent_is_killed_tcx() -> Result<()> {
    killed_while_draining("tcx")
}

#[test]
fn drained_connections_stay_to_the_deadline_whenever_the_agent_is_killed_clsact() -> Result<()> {
    killed_while_draining("clsact")
}
