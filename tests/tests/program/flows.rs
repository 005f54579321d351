//! Which packets are of old flows and which of new ones.

use anyhow::{Context as _, Result, ensure};
use coil_guard_common::{
    abi::{POD_PORTS_OVERLAP, SERVICE_SPORT_AUTO, mark, mode},
    cilium::BACKEND_TERMINATING,
    counters::Reason,
    decide::{IDLE, PREVIOUS_MEMORY},
};
use coil_guard_tests::{
    cilium::{CiliumVersion, IpFamily},
    fou::{FOU_PORT, Fragment, Inner, InnerPacket, Tag, tcp},
    net::{Paths, lab_test},
    program::{CLIENT_GENERATION, Checksum, REV_NAT, Run, Scene, Sizes, monotonic, pod_config},
};

use crate::support::{FAMILIES, OTHER_PORT, each_family, ensure_moved, ensure_rewritten, ensure_untouched};

const TCP: u8 = 6;
const UDP: u8 = 17;
const HTTPS: u16 = 443;
const TAG: Tag = Tag { stream: 1, sequence: 1 };
const SECOND: u64 = 1_000_000_000;

fn expect(run: &Run, reason: Reason) -> Result<()> {
    ensure!(run.reason == reason, "{:?}, expected {reason:?}: {run:?}", run.reason);
    Ok(())
}

/// Backend 1 leaves and keeps its flows for a minute; the FoU port names `bound`. Nothing is remembered, and everything
/// has been for long.
fn leaving(scene: &mut Scene, family: IpFamily, bound: u64) -> Result<()> {
    scene.begin(family, mode::DRAIN)?;
    scene.backend(1, BACKEND_TERMINATING)?;
    scene.service(&[2], false)?;
    scene.entry(FOU_PORT, bound, REV_NAT)?;
    scene.leaving(1, 60)
}

#[test]
fn what_is_idle_for_long_or_another_pod_s_is_a_new_flow() -> Result<()> {
    each_family(|scene, family| {
        for (age, generation, reason) in [
            (IDLE - 20 * SECOND, CLIENT_GENERATION, Reason::Drained),
            (IDLE + SECOND, CLIENT_GENERATION, Reason::Healthy),
            (SECOND, CLIENT_GENERATION + 1, Reason::Healthy),
        ] {
            leaving(scene, family, 2)?;
            let mut memory = scene.memory(1, age);
            memory.generation = generation;
            scene.remember(UDP, 2000, 53, &memory)?;
            let run = scene.send(&scene.udp(2000))?;
            expect(&run, reason).with_context(|| format!("{age} ns, generation {generation}"))?;
            let id = if reason == Reason::Drained { 1 } else { 2 };
            let flow = scene.flow(UDP, 2000, 53)?.context("forgotten")?;
            ensure!((flow.backend_id, flow.generation) == (id, CLIENT_GENERATION), "{flow:?}");
        }
        // An idle TCP connection is not over.
        leaving(scene, family, 2)?;
        scene.remember(TCP, 1000, HTTPS, &scene.memory(1, IDLE * 10))?;
        expect(&scene.send(&scene.tcp(1000, tcp::ACK))?, Reason::Drained)
    })
}

#[test]
fn an_unknown_flow_that_cannot_be_new_stays() -> Result<()> {
    each_family(|scene, family| {
        // On the entry's backend, or on the one that the client was moved off.
        for (bound, previous) in
            [(1, None), (2, Some(CLIENT_GENERATION)), (2, Some(CLIENT_GENERATION + 1)), (2, None)]
        {
            leaving(scene, family, bound)?;
            if let Some(generation) = previous {
                scene.moved_off(1, generation, SECOND)?;
            }
            let run = scene.send(&scene.tcp(1000, tcp::ACK))?;
            let stays = bound == 1 || previous == Some(CLIENT_GENERATION);
            let (reason, home) = if stays { (Reason::Drained, 1) } else { (Reason::Healthy, 2) };
            expect(&run, reason).with_context(|| format!("bound to {bound}, moved off {previous:?}"))?;
            ensure!(scene.flow(TCP, 1000, HTTPS)?.is_some_and(|flow| flow.backend_id == home), "elsewhere");
            // A connection that opens is new, whatever stood there.
            let run = scene.send(&scene.tcp(1001, tcp::SYN))?;
            expect(&run, if bound == 1 { Reason::Moved } else { Reason::Healthy })?;
        }
        Ok(())
    })
}

#[test]
fn an_unknown_stateless_flow_is_old_only_while_memory_is_young() -> Result<()> {
    each_family(|scene, family| {
        for (age, reason) in [(IDLE / 2, Reason::Drained), (IDLE + SECOND, Reason::Moved)] {
            leaving(scene, family, 1)?;
            scene.guarded_until(mode::DRAIN, 0, u64::MAX >> 1, monotonic().saturating_sub(age).max(2))?;
            let run = scene.send(&scene.udp(2000))?;
            // A machine that has not been up for two minutes has no memory that is older.
            if monotonic() > IDLE + 2 * SECOND {
                expect(&run, reason).with_context(|| format!("memory of {age} ns"))?;
            }
        }
        Ok(())
    })
}

#[test]
fn a_backend_that_came_back_is_the_previous_one_for_a_while_only() -> Result<()> {
    each_family(|scene, family| {
        for (age, reason) in [(SECOND, Reason::Drained), (PREVIOUS_MEMORY + SECOND, Reason::Healthy)] {
            if age > monotonic() {
                continue;
            }
            scene.begin(family, mode::DRAIN)?;
            scene.entry(FOU_PORT, 2, REV_NAT)?;
            scene.moved_off(1, CLIENT_GENERATION, age)?;
            expect(&scene.send(&scene.tcp(1000, tcp::ACK))?, reason)
                .with_context(|| format!("{age} ns ago"))?;
        }
        Ok(())
    })
}

/// D3: packets under the FoU port may still be queued in front of Cilium.
#[test]
fn new_flows_join_a_backend_that_began_to_leave_just_now() -> Result<()> {
    each_family(|scene, family| {
        let now = monotonic();
        // A time ahead is "just now" for as long as the test takes.
        for (since, reason) in [(now + 60 * SECOND, Reason::Settling), (now - SECOND, Reason::Moved)] {
            leaving(scene, family, 1)?;
            scene.mark(1, mark::LEAVING, now + 60 * SECOND, since)?;
            let frame = scene.frame(FOU_PORT, &scene.tcp(1000, tcp::SYN));
            let run = scene.run(&frame)?;
            expect(&run, reason)?;
            if reason == Reason::Settling {
                let inner = scene.tcp(1000, tcp::SYN).build(TAG);
                ensure_rewritten(scene, &frame, &inner, Checksum::None, &run, 61_001)?;
                ensure!(scene.bound(FOU_PORT)? == 1 && scene.bound(61_001)? == 1, "{:?}", run.changes);
                ensure!(scene.flow(TCP, 1000, HTTPS)?.is_some_and(|flow| flow.backend_id == 1), "elsewhere");
            } else {
                ensure_moved(scene, &run, FOU_PORT, 2)?;
            }
        }
        Ok(())
    })
}

/// Replicas 1: what opens before the replacement is ready drains like anything else.
#[test]
fn flows_that_open_while_nothing_is_live_are_old_ones_later() -> Result<()> {
    each_family(|scene, family| {
        for bound in [true, false] {
            leaving(scene, family, 1)?;
            scene.service(&[1], false)?;
            scene.leaving(2, 0)?;
            if !bound {
                scene.forget(&scene.entry_key(FOU_PORT))?;
            }
            let frame = scene.frame(FOU_PORT, &scene.tcp(1000, tcp::SYN));
            let run = scene.run(&frame)?;
            expect(&run, Reason::NoLive)?;
            ensure!(run.egress.no_live == 1, "{:?}", run.egress);
            // At once under the drain port: a replacement may move the FoU port's entry at any moment.
            let inner = scene.tcp(1000, tcp::SYN).build(TAG);
            ensure_rewritten(scene, &frame, &inner, Checksum::None, &run, 61_001)?;
            ensure!(scene.bound(61_001)? == 1, "{:?}", run.changes);
            ensure!(scene.bound(FOU_PORT)? == u64::from(bound), "{:?}", run.changes);
            scene.backend(3, 0)?;
            scene.mark(3, mark::READY, u64::MAX >> 1, 0)?;
            scene.service(&[3], false)?;
            expect(
                &scene.send(&scene.tcp(1001, tcp::SYN))?,
                if bound { Reason::Moved } else { Reason::Created },
            )?;
            expect(&scene.send(&scene.tcp(1000, tcp::ACK))?, Reason::Drained)?;
        }
        // Nothing that Cilium would choose either.
        leaving(scene, family, 1)?;
        scene.forget(&scene.entry_key(FOU_PORT))?;
        scene.service(&[], false)?;
        let frame = scene.frame(FOU_PORT, &scene.tcp(1000, tcp::SYN));
        let run = scene.run(&frame)?;
        expect(&run, Reason::NoLive)?;
        ensure_untouched(&frame, &run)
    })
}

/// Every kind of inner packet of one flow goes the way of its first.
#[test]
fn fragments_errors_and_other_protocols_follow_their_flow() -> Result<()> {
    each_family(|scene, family| {
        let part = |offset, more| Fragment { identification: 0x0102, offset, more };
        let udp = scene.udp(2000);
        let (client, outside) = (scene.client(), scene.outside());
        let echo =
            |identifier, sequence| InnerPacket::new(client, outside, Inner::Echo { identifier, sequence });
        let other = InnerPacket::new(scene.client(), scene.outside(), Inner::Other { protocol: 132 });
        let opened = scene.tcp(1000, tcp::SYN);
        let about = Box::new(scene.tcp(1000, tcp::ACK).reversed());
        let error = InnerPacket::new(scene.client(), scene.outside(), Inner::TooBig { about });
        let cases: [(&str, InnerPacket, Vec<InnerPacket>); 4] = [
            (
                "fragments",
                udp.clone().fragment(part(0, true)),
                vec![
                    udp.clone().fragment(part(0, true)),
                    udp.clone().padded(64).fragment(part(100, false)),
                    udp.clone(),
                ],
            ),
            ("echo", echo(77, 1), vec![echo(77, 2)]),
            ("another protocol", other.clone(), vec![other.clone(), other.fragment(part(50, false))]),
            ("an error about it", opened, vec![error]),
        ];
        for (what, first, later) in cases {
            leaving(scene, family, 1)?;
            scene.service(&[1], false)?;
            scene.backend(1, 0)?;
            scene.mark(1, mark::READY, u64::MAX >> 1, 0)?;
            expect(&scene.send(&first)?, Reason::Healthy).context(what)?;
            scene.service(&[2], false)?;
            scene.leaving(1, 60)?;
            // An unknown flow is a new one: not a TCP connection, and everything is remembered.
            if monotonic() > IDLE + 2 * SECOND {
                expect(&scene.send(&scene.udp(2999))?, Reason::Moved).context(what)?;
                expect(&scene.send(&echo(78, 1))?, Reason::Healthy).context(what)?;
            } else {
                expect(&scene.send(&scene.tcp(2999, tcp::SYN))?, Reason::Moved).context(what)?;
            }
            for packet in later {
                expect(&scene.send(&packet)?, Reason::Drained)
                    .with_context(|| format!("{what}: {packet:?}"))?;
            }
        }
        Ok(())
    })
}

/// Where a pod may send from the drain ports by itself, its flows cannot be told from drained ones.
#[test]
fn ports_that_overlap_turn_drain_into_reset() -> Result<()> {
    lab_test(|| {
        let config = coil_guard_common::abi::PodConfig {
            flags: pod_config().flags | POD_PORTS_OVERLAP,
            ..pod_config()
        };
        let mut scene =
            Scene::load_for(Paths.cilium_maps(), CiliumVersion::V1_18, Sizes::default(), &config)?;
        for family in FAMILIES {
            for (flags, reason) in [(SERVICE_SPORT_AUTO, Reason::Healthy), (0, Reason::Drained)] {
                leaving(&mut scene, family, 2)?;
                scene.guarded(mode::DRAIN, flags)?;
                scene.entry(OTHER_PORT, 2, REV_NAT)?;
                scene.remember(TCP, 1000, HTTPS, &scene.memory(1, SECOND))?;
                let frame = scene.frame(OTHER_PORT, &scene.tcp(1000, tcp::ACK));
                let run = scene.run(&frame)?;
                expect(&run, reason)?;
            }
        }
        Ok(())
    })
}

/// A packet that comes from a drain port already is one that somebody else made.
#[test]
fn packets_in_the_reserved_ports_are_not_drained() -> Result<()> {
    each_family(|scene, family| {
        for port in [61_001, 65_535] {
            leaving(scene, family, 2)?;
            scene.entry(port, 2, REV_NAT)?;
            scene.remember(TCP, 1000, HTTPS, &scene.memory(1, SECOND))?;
            for flags in [tcp::ACK, tcp::SYN] {
                let frame = scene.frame(port, &scene.tcp(1000, flags));
                let run = scene.run(&frame)?;
                expect(&run, if flags == tcp::ACK { Reason::ReservedPort } else { Reason::Healthy })?;
                ensure_untouched(&frame, &run)?;
            }
            // Not even a first packet.
            scene.forget(&scene.entry_key(port))?;
            let frame = scene.frame(port, &scene.tcp(1002, tcp::SYN));
            let run = scene.run(&frame)?;
            expect(&run, Reason::ReservedPort)?;
            ensure_untouched(&frame, &run)?;
        }
        Ok(())
    })
}
