//! Mode `drain`: a transfer that was there before goes on whole, new connections leave.

use std::{thread, time::Duration};

use anyhow::{Context as _, Result, ensure};
use coil_guard_common::{abi::mark, decide::SETTLE};
use coil_guard_tests::{cilium::IpFamily, net::lab_test, scenario::Scenario};

use crate::{
    coil::{Form, Tunnels, blackhole},
    ping::Pinger,
    tcp::{self, Bulk},
    world::{FAMILIES, PATIENCE, World, lab},
};

/// Throughput of a drained transfer, as a part of what it had before.
const KEPT: f64 = 0.8;

/// One figure of throughput, and how many there are of each of the two that are compared.
const WINDOW: Duration = Duration::from_secs(1);
const WINDOWS: usize = 3;

fn start(tunnels: Tunnels) -> Result<World> {
    World::start(Scenario::builder(lab().backends(2)).mode("drain"), tunnels)
}

/// After the mark, old packets may still be queued in front of Cilium: new flows join them for this long.
fn settle() {
    thread::sleep(Duration::from_nanos(SETTLE) + Duration::from_millis(5));
}

fn a_transfer_stays(tunnels: Tunnels, family: IpFamily, offload: bool) -> Result<()> {
    lab_test(|| {
        let mut world = start(tunnels)?;
        world.set_checksum_offload(offload)?;
        let bulk = Bulk::start(world.client(), family)?;
        let ping = Pinger::start(world.client(), family, Duration::from_millis(50), 56)?;
        // Until the sender's window is open, and the guest has warmed to it, the transfer is slower than it can be.
        bulk.wait_progress(4 << 20, PATIENCE)?;
        bulk.rate(WINDOW);
        let before = rate(&bulk)?;
        let home = world.index_of(bulk.via())?;
        world.begin_to_delete(home)?;
        settle();
        let during = rate(&bulk)?;
        for _ in 0..10 {
            let seen = tcp::short(world.client(), family, PATIENCE)?;
            ensure!(world.index_of(seen)? != home, "a new connection went to the leaving pod {seen}");
        }
        // No datagram says that it is the first of its flow, so these may stay (rule D2): here they must be answered.
        for length in [8, 1380, 4000] {
            tcp::datagram(world.client(), family, length, PATIENCE)?;
        }
        bulk.wait_progress(1 << 20, PATIENCE)?;
        let report = ping.finish()?;
        ensure!(report.lost().is_empty(), "lost echo requests {:?} of {}", report.lost(), report.sent.len());
        world.scenario.explain(bulk.finish())?;
        println!(
            "figure: {family:?} {tunnels:?} offload {offload}: {:.0} Mbit/s before, {:.0} drained ({:.2})",
            before * 8e-6,
            during * 8e-6,
            during / before
        );
        ensure!(during >= KEPT * before, "{during:.0} bytes/s while drained, {before:.0} before");
        world.ensure_no_checksum_errors()
    })
    .with_context(|| format!("{family:?} {tunnels:?}, checksum offload {offload}"))
}

/// The best of a few windows: other work on the machine takes from each, and only ever takes.
fn rate(bulk: &Bulk) -> Result<f64> {
    let best = (0..WINDOWS).map(|_| bulk.rate(WINDOW)).fold(0.0, f64::max);
    ensure!(best > 0.0, "the transfer stands still");
    Ok(best)
}

fn transfers_stay(tunnels: Tunnels) -> Result<()> {
    for family in FAMILIES {
        for offload in [true, false] {
            a_transfer_stays(tunnels, family, offload)?;
        }
    }
    Ok(())
}

#[test]
fn a_transfer_stays_whole_and_fast_while_new_connections_leave() -> Result<()> {
    transfers_stay(Tunnels::COIL)
}

#[test]
fn a_transfer_stays_with_source_ports_by_inner_flow() -> Result<()> {
    transfers_stay(Tunnels { sport_auto: true, ..Tunnels::COIL })
}

#[test]
fn a_transfer_stays_with_outer_checksums() -> Result<()> {
    transfers_stay(Tunnels { form: Form::Checksums, sport_auto: false })
}

#[test]
fn a_lost_node_costs_new_connections_nothing_after_the_mark() -> Result<()> {
    for family in FAMILIES {
        lab_test(|| {
            let builder = Scenario::builder(lab().backends(2))
                .mode("drain")
                .annotation("coil-guard.io/not-ready-after", "3s");
            let world = World::start(builder, Tunnels::COIL)?;
            let seen = tcp::short(world.client(), family, PATIENCE)?;
            let home = world.index_of(seen)?;
            blackhole(world.scenario.lab.backend(home))?;
            world.scenario.cluster.set_ready(&world.scenario.backend_pod(home)?, false)?;
            world.scenario.wait_mark(home, mark::NOT_READY)?;
            settle();
            for _ in 0..5 {
                let seen = tcp::short(world.client(), family, PATIENCE)?;
                ensure!(world.index_of(seen)? != home, "a new connection went to the lost pod {seen}");
            }
            Ok(())
        })
        .with_context(|| format!("{family:?}"))?;
    }
    Ok(())
}

#[test]
fn a_ping_of_a_lost_node_recovers_after_not_ready_after() -> Result<()> {
    lab_test(|| {
        let builder = Scenario::builder(lab().backends(2))
            .mode("reset")
            .annotation("coil-guard.io/not-ready-after", "2s");
        let world = World::start(builder, Tunnels::COIL)?;
        let family = IpFamily::V4;
        let home = world.index_of(tcp::short(world.client(), family, PATIENCE)?)?;
        let ping = Pinger::start(world.client(), family, Duration::from_millis(50), 56)?;
        blackhole(world.scenario.lab.backend(home))?;
        world.scenario.cluster.set_ready(&world.scenario.backend_pod(home)?, false)?;
        world.scenario.wait_mark(home, mark::NOT_READY)?;
        let marked = std::time::Instant::now();
        thread::sleep(Duration::from_secs(5));
        let report = ping.finish()?;
        let recovered = report.answered.iter().filter_map(|number| report.sent.get(usize::from(*number)));
        let first = recovered.filter(|sent| **sent > marked).map(|sent| *sent - marked).min();
        println!(
            "figure: recovered {first:?} after the mark, {} of {} lost",
            report.lost().len(),
            report.sent.len()
        );
        let first = first.context("no echo request was answered again")?;
        ensure!(
            first > Duration::from_millis(1500) && first < Duration::from_secs(4),
            "with not-ready-after 2s, the first answer was to a request sent {first:?} after the mark"
        );
        Ok(())
    })
}
