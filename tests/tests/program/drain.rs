//! Mode `drain`.

use anyhow::{Context as _, Result, ensure};
use coil_guard_common::{
    abi::{FLOW_DRAINED, FOR_EVER, SERVICE_SPORT_AUTO, event, mark, mode},
    cilium::{BACKEND_ACTIVE, BACKEND_MAINTENANCE, BACKEND_TERMINATING, CtEntry},
    counters::Reason,
};
use coil_guard_tests::{
    cilium::IpFamily,
    fou::{FOU_PORT, InnerPacket, Tag, tcp},
    program::{CLIENT_GENERATION, Checksum, REV_NAT, Run, Scene, udp_offset},
};

use crate::support::{
    OTHER_PORT, each_family, ensure_created, ensure_moved, ensure_rewritten, ensure_same_packet,
    ensure_untouched, minimal_entry,
};

const MINUTE: u64 = 60_000_000_000;
const TCP: u8 = 6;
const UDP: u8 = 17;
const HTTPS: u16 = 443;
const TAG: Tag = Tag { stream: 1, sequence: 1 };

fn expect(run: &Run, reason: Reason) -> Result<()> {
    ensure!(run.reason == reason, "{:?}, expected {reason:?}: {run:?}", run.reason);
    Ok(())
}

/// A client whose FoU port went from the leaving backend `old` to backend 2; TCP connection 1000 and UDP flow 2000 are
/// remembered on `old`, which keeps them for a minute.
fn draining(scene: &mut Scene, family: IpFamily, old: u32) -> Result<()> {
    scene.begin(family, mode::DRAIN)?;
    scene.backend(old, BACKEND_TERMINATING)?;
    scene.service(&[2], false)?;
    scene.entry(FOU_PORT, 2, REV_NAT)?;
    scene.leaving(old, 60)?;
    scene.remember(TCP, 1000, HTTPS, &scene.memory(old, 1_000_000))?;
    scene.remember(UDP, 2000, 53, &scene.memory(old, 1_000_000))
}

/// The packet left under the drain port of `id`, and is otherwise what it was.
fn ensure_drained(scene: &Scene, frame: &[u8], run: &Run, inner: &[u8], id: u32) -> Result<()> {
    expect(run, Reason::Drained)?;
    ensure!(run.egress.drained == 1, "{:?}", run.egress);
    ensure_rewritten(scene, frame, inner, Checksum::None, run, drain_port(id))
}

fn drain_port(id: u32) -> u16 {
    61_000 + (id % 4096) as u16
}

fn send(scene: &mut Scene, inner: &InnerPacket) -> Result<(Vec<u8>, Run)> {
    let frame = scene.frame(FOU_PORT, inner);
    let run = scene.run(&frame)?;
    Ok((frame, run))
}

/// The whole life of a drain, as it happens.
#[test]
fn old_flows_stay_and_new_ones_leave() -> Result<()> {
    each_family(|scene, family| {
        scene.begin(family, mode::DRAIN)?;
        scene.service(&[1], false)?;
        // First packet of all: the guard makes the choice and remembers it.
        let syn = scene.tcp(1000, tcp::SYN);
        let (frame, run) = send(scene, &syn)?;
        expect(&run, Reason::Created)?;
        ensure_same_packet(&frame, &run)?;
        ensure_created(scene, &run, FOU_PORT, 1)?;
        let flow = scene.flow(TCP, 1000, HTTPS)?.context("the new flow is not remembered")?;
        ensure!((flow.backend_id, flow.generation, flow.flags) == (1, CLIENT_GENERATION, 0), "{flow:?}");
        let ack = scene.tcp(1000, tcp::ACK);
        let (frame, run) = send(scene, &ack)?;
        expect(&run, Reason::Healthy)?;
        ensure_untouched(&frame, &run)?;
        ensure!(
            scene.flow(TCP, 1000, HTTPS)? == Some(flow),
            "a second packet within the second wrote to the memory"
        );

        // It leaves; another one is there.
        scene.service(&[2], false)?;
        scene.backend(1, BACKEND_TERMINATING)?;
        scene.leaving(1, 60)?;
        // Its flows take the drain port at once, before any new flow moves the FoU port's entry.
        let (frame, run) = send(scene, &ack)?;
        ensure_drained(scene, &frame, &run, &ack.build(TAG), 1)?;
        ensure!(run.changes.len() == 2, "{:?}", run.changes);
        let stats = scene.drains(1)?;
        ensure!((stats.flows, stats.started, stats.ended, stats.cut) == (1, 1, 0, 0), "{stats:?}");

        let (frame, run) = send(scene, &scene.tcp(1001, tcp::SYN))?;
        expect(&run, Reason::Moved)?;
        ensure_same_packet(&frame, &run)?;
        ensure_moved(scene, &run, FOU_PORT, 2)?;
        ensure!(run.events.len() == 1 && run.events[0].kind == event::MOVED, "{:?}", run.events);

        let (frame, run) = send(scene, &ack)?;
        ensure_drained(scene, &frame, &run, &ack.build(TAG), 1)?;
        ensure!(run.changes.is_empty(), "{:?}", run.changes);
        let (frame, run) = send(scene, &scene.tcp(1001, tcp::ACK))?;
        expect(&run, Reason::Healthy)?;
        ensure_untouched(&frame, &run)?;

        // The old connection ends by itself.
        let fin = scene.tcp(1000, tcp::FIN | tcp::ACK);
        let (frame, run) = send(scene, &fin)?;
        ensure_drained(scene, &frame, &run, &fin.build(TAG), 1)?;
        let stats = scene.drains(1)?;
        ensure!((stats.flows, stats.started, stats.ended, stats.cut) == (0, 1, 1, 0), "{stats:?}");
        // The same tuple again is a new connection.
        let (frame, run) = send(scene, &syn)?;
        expect(&run, Reason::Healthy)?;
        ensure_untouched(&frame, &run)?;
        ensure!(
            scene.flow(TCP, 1000, HTTPS)?.is_some_and(|flow| flow.backend_id == 2),
            "the new flow is elsewhere"
        );
        Ok(())
    })
}

#[test]
fn checksum_is_right_after_the_rewrite_in_every_state() -> Result<()> {
    each_family(|scene, family| {
        for options in [true, false] {
            for state in Checksum::ALL {
                // Ids whose port carries in the sum and ones that do not; odd and even lengths.
                for (id, padding) in [(1, 0), (4095, 1), (4096 + 777, 2), (u32::MAX, 1333)] {
                    draining(scene, family, id)?;
                    let inner = scene.tcp(1000, tcp::ACK).padded(padding).build(TAG);
                    let frame = scene.frame_with(FOU_PORT, &inner, state, options);
                    let run = scene.run(&frame)?;
                    expect(&run, Reason::Drained)?;
                    ensure_rewritten(scene, &frame, &inner, state, &run, drain_port(id))?;
                }
            }
        }
        Ok(())
    })
}

/// A finished checksum that the new port would turn into 0 must be sent as 0xffff: 0 says that there is none.
#[test]
fn a_checksum_never_becomes_none() -> Result<()> {
    each_family(|scene, family| {
        draining(scene, family, 1)?;
        let mut inner = scene.tcp(1000, tcp::ACK).build(TAG);
        // Choose the last word so that the sum under the new port is all ones.
        let last = inner.len() - 2;
        inner[last..].fill(0);
        let drained = scene.frame_with(drain_port(1), &inner, Checksum::Finished, true);
        let at = udp_offset(&drained, &inner) + 6;
        inner[last..].copy_from_slice(&drained[at..at + 2]);
        let frame = scene.frame_with(FOU_PORT, &inner, Checksum::Finished, true);
        let run = scene.run(&frame)?;
        expect(&run, Reason::Drained)?;
        ensure!(run.output[at..at + 2] == [0xff, 0xff], "{:02x?}", &run.output[at..at + 2]);
        ensure_rewritten(scene, &frame, &inner, Checksum::Finished, &run, drain_port(1))
    })
}

/// Replies of a drained flow match the egress entry of the original port. It must live as long as the drain entry, which
/// Cilium refreshes.
#[test]
fn reply_entry_lives_as_long_as_the_drain_entry() -> Result<()> {
    each_family(|scene, family| {
        draining(scene, family, 1)?;
        // Another port than the client's, so that a key with the ports the wrong way round is seen.
        scene.backend_port = 5600;
        scene.backend(1, BACKEND_TERMINATING)?;
        let ack = scene.tcp(1000, tcp::ACK);
        let (drain_key, reply_key) = (scene.entry_key(drain_port(1)), scene.egress_key(FOU_PORT, 1));
        let (_, run) = send(scene, &ack)?;
        let mut created: Vec<_> =
            run.changes.iter().map(|change| (change.key.clone(), change.after.clone())).collect();
        created.sort();
        let mut replies = minimal_entry(0);
        let mut expected =
            vec![(drain_key.clone(), Some(minimal_entry(1))), (reply_key.clone(), Some(replies.clone()))];
        expected.sort();
        ensure!(
            created == expected && run.changes.iter().all(|change| change.before.is_none()),
            "{:?}",
            run.changes
        );

        // Cilium refreshes the drain entry: the reply entry follows, and only its lifetime.
        for lifetime in [5000u32, 6000] {
            let entry = CtEntry { lifetime, ..CtEntry::for_backend(1, REV_NAT) };
            scene.set_conntrack(&drain_key, &entry)?;
            let (_, run) = send(scene, &ack)?;
            expect(&run, Reason::Drained)?;
            let [change] = run.changes.as_slice() else { anyhow::bail!("{:?}", run.changes) };
            ensure!(change.key == reply_key && change.before.as_ref() == Some(&replies), "{change:?}");
            replies[32..36].copy_from_slice(&lifetime.to_ne_bytes());
            ensure!(change.after.as_ref() == Some(&replies), "{change:?}");
        }
        // It never gets shorter.
        let longer = CtEntry { lifetime: 9000, src_sec_id: 5, ..CtEntry::for_replies(REV_NAT, 0) };
        scene.set_conntrack(&reply_key, &longer)?;
        let (_, run) = send(scene, &ack)?;
        expect(&run, Reason::Drained)?;
        ensure!(run.changes.is_empty(), "{:?}", run.changes);
        // Collected: made again, with the drain entry's lifetime.
        scene.forget(&reply_key)?;
        let (_, run) = send(scene, &ack)?;
        let [change] = run.changes.as_slice() else { anyhow::bail!("{:?}", run.changes) };
        ensure!(change.key == reply_key && change.after.as_ref() == Some(&replies), "{change:?}");
        Ok(())
    })
}

/// With fouSourcePortAuto replies come from a port of their own: no entry of the client's stands for them.
#[test]
fn a_flow_with_a_port_of_its_own_gets_no_reply_entry() -> Result<()> {
    each_family(|scene, family| {
        draining(scene, family, 1)?;
        scene.guarded(mode::DRAIN, SERVICE_SPORT_AUTO)?;
        scene.entry(OTHER_PORT, 2, REV_NAT)?;
        let egress = scene.egress_key(OTHER_PORT, 1);
        scene.set_conntrack(&egress, &CtEntry::for_replies(REV_NAT, 1))?;
        let inner = scene.tcp(1000, tcp::ACK);
        let frame = scene.frame(OTHER_PORT, &inner);
        let run = scene.run(&frame)?;
        ensure_drained(scene, &frame, &run, &inner.build(TAG), 1)?;
        ensure_created(scene, &run, drain_port(1), 1)
    })
}

#[test]
fn a_stale_drain_entry_is_taken_over() -> Result<()> {
    each_family(|scene, family| {
        let id = 4097;
        let cases: [(&str, u64, [u8; 2]); 5] = [
            ("another service's", 4097, [9, 9]),
            ("a missing backend's", 4096 + 4097, REV_NAT),
            ("a backend that keeps nothing", 1, REV_NAT),
            ("a backend with another drain port", 2, REV_NAT),
            ("no id", 1 << 32 | 4097, REV_NAT),
        ];
        for (what, holder, index) in cases {
            draining(scene, family, id)?;
            scene.leaving(1, 0)?;
            scene.backend(1, BACKEND_TERMINATING)?;
            scene.entry(drain_port(id), holder, index)?;
            let inner = scene.tcp(1000, tcp::ACK);
            let (frame, run) = send(scene, &inner)?;
            ensure_drained(scene, &frame, &run, &inner.build(TAG), id).context(what)?;
            let entry = scene.entry_at(drain_port(id))?.context("no entry")?;
            ensure!((entry.backend_id, entry.rev_nat_index) == (u64::from(id), REV_NAT), "{what}: {entry:?}");
            ensure!(entry.packets == 0x1111, "{what}: the entry was made anew");
        }
        Ok(())
    })
}

#[test]
fn a_drain_port_of_another_draining_backend_is_never_taken() -> Result<()> {
    each_family(|scene, family| {
        draining(scene, family, 1)?;
        scene.backend(4097, BACKEND_TERMINATING)?;
        scene.leaving(4097, 60)?;
        scene.entry(drain_port(1), 4097, REV_NAT)?;
        let (frame, run) = send(scene, &scene.tcp(1000, tcp::ACK))?;
        expect(&run, Reason::NotDrained)?;
        ensure_untouched(&frame, &run)?;
        ensure!(run.egress.not_drained == 1 && run.egress.cut == 1, "{:?}", run.egress);
        let [event] = run.events.as_slice() else { anyhow::bail!("{:?}", run.events) };
        ensure!(
            (event.kind, event.from_id, event.to_id) == (event::DRAIN_PORT_COLLISION, 1, 4097),
            "{event:?}"
        );
        // From now on it lives where it was sent.
        ensure!(scene.flow(TCP, 1000, HTTPS)?.is_some_and(|flow| flow.backend_id == 2), "not remembered");
        Ok(())
    })
}

#[test]
fn a_flow_is_cut_when_its_backend_keeps_nothing_any_more() -> Result<()> {
    each_family(|scene, family| {
        type End = (&'static str, fn(&mut Scene) -> Result<()>);
        let ends: [End; 4] = [
            ("deadline", |scene| scene.leaving(1, 0)),
            ("gone from Cilium's map", |scene| scene.remove_backend(1)),
            ("gone from the slices", |scene| scene.mark(1, mark::GONE, FOR_EVER, 1)),
            ("id given to another backend", |scene| {
                let address = coil_guard_tests::program::address_of(scene.family, 77);
                scene.backend_at(1, address, BACKEND_ACTIVE)
            }),
        ];
        for (what, end) in ends {
            draining(scene, family, 1)?;
            let (_, run) = send(scene, &scene.tcp(1000, tcp::ACK))?;
            expect(&run, Reason::Drained).context(what)?;
            end(scene)?;
            let (frame, run) = send(scene, &scene.tcp(1000, tcp::ACK))?;
            expect(&run, Reason::Cut).context(what)?;
            ensure_untouched(&frame, &run).context(what)?;
            ensure!(run.egress.cut == 1, "{what}: {:?}", run.egress);
            let stats = scene.drains(1)?;
            ensure!((stats.flows, stats.started, stats.cut) == (0, 1, 1), "{what}: {stats:?}");
            let (frame, run) = send(scene, &scene.tcp(1000, tcp::ACK))?;
            expect(&run, Reason::Healthy).context(what)?;
            ensure_untouched(&frame, &run).context(what)?;
        }
        Ok(())
    })
}

#[test]
fn a_backend_that_cilium_alone_calls_terminating_is_drained_for_a_while() -> Result<()> {
    each_family(|scene, family| {
        draining(scene, family, 1)?;
        scene.agent_alive(false)?;
        for id in [1, 2] {
            scene.unmark(id)?;
        }
        for (age, reason) in
            [(0, Reason::Drained), (4_000_000_000, Reason::Drained), (5_050_000_000, Reason::Cut)]
        {
            if age > 0 {
                scene.seen_leaving(1, age)?;
            }
            let (_, run) = send(scene, &scene.tcp(1000, tcp::ACK))?;
            expect(&run, reason).with_context(|| format!("seen leaving {age} ns ago"))?;
        }
        // In maintenance it may come back: no end.
        draining(scene, family, 1)?;
        scene.agent_alive(false)?;
        scene.unmark(1)?;
        scene.backend(1, BACKEND_MAINTENANCE)?;
        scene.seen_leaving(1, 50_000_000_000)?;
        let (_, run) = send(scene, &scene.tcp(1000, tcp::ACK))?;
        expect(&run, Reason::Drained)
    })
}

/// D1 with no valid entry; and a backend that came back while the FoU port names another one.
#[test]
fn a_flow_never_leaves_a_backend_that_is_usable() -> Result<()> {
    each_family(|scene, family| {
        for dangling in [false, true] {
            scene.begin(family, mode::DRAIN)?;
            scene.service(&[2, 2, 2, 1], false)?;
            scene.remember(TCP, 1000, HTTPS, &scene.memory(1, MINUTE))?;
            if dangling {
                scene.entry(FOU_PORT, 9, REV_NAT)?;
            }
            let (frame, run) = send(scene, &scene.tcp(1000, tcp::ACK))?;
            expect(&run, if dangling { Reason::Repaired } else { Reason::Created })?;
            ensure_same_packet(&frame, &run)?;
            ensure!(scene.bound(FOU_PORT)? == 1, "bound to {}", scene.bound(FOU_PORT)?);
        }
        draining(scene, family, 1)?;
        scene.backend(1, BACKEND_ACTIVE)?;
        scene.mark(1, mark::READY, FOR_EVER, 0)?;
        let inner = scene.tcp(1000, tcp::ACK);
        let (frame, run) = send(scene, &inner)?;
        ensure_drained(scene, &frame, &run, &inner.build(TAG), 1)?;
        let flow = scene.flow(TCP, 1000, HTTPS)?.context("forgotten")?;
        ensure!(flow.flags == FLOW_DRAINED, "{flow:?}");
        Ok(())
    })
}

/// Each leaving backend has a port of its own.
#[test]
fn two_backends_drain_side_by_side() -> Result<()> {
    each_family(|scene, family| {
        draining(scene, family, 1)?;
        scene.backend(7, BACKEND_TERMINATING)?;
        scene.leaving(7, 60)?;
        scene.remember(TCP, 1007, HTTPS, &scene.memory(7, 1_000_000))?;
        for (port, id) in [(1000, 1), (1007, 7), (1000, 1)] {
            let inner = scene.tcp(port, tcp::ACK);
            let (frame, run) = send(scene, &inner)?;
            ensure_drained(scene, &frame, &run, &inner.build(TAG), id)?;
        }
        Ok(())
    })
}
