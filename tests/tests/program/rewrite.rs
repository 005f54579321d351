//! Mode `rewrite`.

use std::collections::BTreeSet;

use anyhow::{Context as _, Result, ensure};
use coil_guard_common::{
    abi::{PinnedPort, RETURN_PORT_FIRST, REWRITE_PORT_FIRST, SERVICE_SPORT_AUTO, event, mode},
    cilium::BACKEND_TERMINATING,
    counters::Reason,
    decide::{PORT_PROBES, PORT_TRIES},
};
use coil_guard_tests::{
    cilium::{CiliumVersion, IpFamily},
    fou::{FOU_PORT, Tag, tcp},
    program::{CLIENT_GENERATION, Checksum, REV_NAT, Run, Scene, monotonic, udp_offset},
};

use crate::support::{
    OTHER_PORT, each_family, ensure_moved, ensure_rewritten, ensure_same_packet, ensure_untouched,
    with_version,
};

const SECOND: u64 = 1_000_000_000;
const TAG: Tag = Tag { stream: 1, sequence: 1 };

fn expect(run: &Run, reason: Reason) -> Result<()> {
    ensure!(run.reason == reason, "{:?}, expected {reason:?}: {run:?}", run.reason);
    ensure!(run.changes.is_empty(), "{reason:?} wrote to Cilium's maps: {:?}", run.changes);
    Ok(())
}

/// The client's flow on backend 1, which leaves; 2 is live.
fn stuck(scene: &mut Scene, family: IpFamily, port: u16, affinity: bool) -> Result<()> {
    scene.begin(family, mode::REWRITE)?;
    scene.backend(1, BACKEND_TERMINATING)?;
    scene.service(&[2], affinity)?;
    scene.entry(port, 1, REV_NAT)?;
    scene.leaving(1, 0)?;
    if affinity {
        scene.affinity(1)?;
    }
    Ok(())
}

fn send(scene: &mut Scene, port: u16) -> Result<(Vec<u8>, Run)> {
    let frame = scene.frame(port, &scene.tcp(1000, tcp::ACK));
    let run = scene.run(&frame)?;
    Ok((frame, run))
}

/// Sends a packet that has to leave under a port of the range, whole but for that; gives the port.
fn send_rewritten(scene: &mut Scene, port: u16, reason: Reason) -> Result<(u16, Run)> {
    let inner = scene.tcp(1000, tcp::ACK).build(TAG);
    let (frame, run) = send(scene, port)?;
    expect(&run, reason)?;
    let udp = udp_offset(&frame, &inner);
    let given = u16::from_be_bytes([run.output[udp], run.output[udp + 1]]);
    ensure!(given >= REWRITE_PORT_FIRST, "sent from port {given}");
    ensure_rewritten(scene, &frame, &inner, Checksum::None, &run, given)?;
    ensure!(run.egress.rewritten == 1, "{:?}", run.egress);
    Ok((given, run))
}

fn pinned(scene: &Scene, port: u16) -> Result<PinnedPort> {
    scene.pinned(port)?.context("no port is remembered for the flow")
}

#[test]
fn a_flow_on_a_leaving_backend_gets_another_port_and_stays_on_it() -> Result<()> {
    for version in [CiliumVersion::V1_14, CiliumVersion::V1_20] {
        with_version(version, |scene, family| {
            for affinity in [false, true] {
                for port in [FOU_PORT, OTHER_PORT] {
                    stuck(scene, family, port, affinity)?;
                    let (given, run) = send_rewritten(scene, port, Reason::NewPort)?;
                    ensure!(run.egress.new_ports == 1 && run.egress.moved == 0, "{:?}", run.egress);
                    ensure!(run.events.is_empty(), "told before it is known: {:?}", run.events);
                    // Not yet through Cilium: the next one goes the same way.
                    let (again, run) = send_rewritten(scene, port, Reason::Rewritten)?;
                    ensure!(again == given && run.events.is_empty(), "{again}, {:?}", run.events);
                    // Cilium has chosen the live one.
                    scene.entry(given, 2, REV_NAT)?;
                    let (again, run) = send_rewritten(scene, port, Reason::Rewritten)?;
                    ensure!(again == given && run.egress.moved == 1, "{again} {:?}", run.egress);
                    let [event] = run.events.as_slice() else { anyhow::bail!("events: {:?}", run.events) };
                    ensure!(
                        (event.kind, event.from_id, event.to_id, event.mode)
                            == (event::MOVED, 1, 2, mode::REWRITE)
                            && event.client_port == port.to_be_bytes(),
                        "{event:?}"
                    );
                    let pin = pinned(scene, port)?;
                    ensure!((pin.left, pin.tries, pin.stuck_since) == (1, 0, 0), "{pin:?}");
                    for _ in 0..3 {
                        let (again, run) = send_rewritten(scene, port, Reason::Rewritten)?;
                        ensure!(again == given && run.egress.moved == 0 && run.events.is_empty(), "{run:?}");
                    }
                    ensure!(pinned(scene, port)? == pin, "a packet of a healthy flow wrote");
                }
            }
            Ok(())
        })?;
    }
    Ok(())
}

#[test]
fn a_healthy_flow_keeps_its_own_port() -> Result<()> {
    each_family(|scene, family| {
        for port in [FOU_PORT, OTHER_PORT] {
            scene.begin(family, mode::REWRITE)?;
            scene.entry(port, 1, REV_NAT)?;
            let (frame, run) = send(scene, port)?;
            expect(&run, Reason::Healthy)?;
            ensure_untouched(&frame, &run)?;
            scene.forget(&scene.entry_key(port))?;
            let (frame, run) = send(scene, port)?;
            expect(&run, Reason::LeftToCilium)?;
            ensure_untouched(&frame, &run)?;
            ensure!(scene.pinned(port)?.is_none(), "a port was given to a flow that needs none");
        }
        Ok(())
    })
}

#[test]
fn each_time_that_it_has_to_leave_it_moves_on_and_goes_round() -> Result<()> {
    each_family(|scene, family| {
        stuck(scene, family, FOU_PORT, false)?;
        let mut ports = BTreeSet::new();
        for leave in 0..300 {
            let (old, new) = if leave % 2 == 0 { (1, 2) } else { (2, 1) };
            scene.backend(new, 0)?;
            scene.mark(new, coil_guard_common::abi::mark::READY, coil_guard_common::abi::FOR_EVER, 0)?;
            scene.service(&[new], false)?;
            scene.backend(old, BACKEND_TERMINATING)?;
            scene.leaving(old, 0)?;
            let (given, _) = send_rewritten(scene, FOU_PORT, Reason::NewPort)?;
            scene.entry(given, u64::from(new), REV_NAT)?;
            send_rewritten(scene, FOU_PORT, Reason::Rewritten)?;
            ports.insert(given);
        }
        ensure!(ports.len() == 220, "{} ports were given in 300 moves", ports.len());
        ensure!(ports.iter().all(|port| *port < RETURN_PORT_FIRST), "its replies are not turned back");
        Ok(())
    })
}

#[test]
fn affinity_that_would_send_it_back_is_seen_beforehand() -> Result<()> {
    for version in [CiliumVersion::V1_14, CiliumVersion::V1_20] {
        with_version(version, |scene, family| {
            stuck(scene, family, FOU_PORT, true)?;
            scene.affinity_match(1, true)?;
            let (frame, run) = send(scene, FOU_PORT)?;
            expect(&run, Reason::HeldByAffinity)?;
            ensure_same_packet(&frame, &run)?;
            ensure!(run.egress.cannot_move == 1 && run.events.is_empty(), "{run:?}");
            // It has lasted for a while: that is worth a word.
            let pin = PinnedPort { stuck_since: monotonic() - 3 * SECOND, ..pinned(scene, FOU_PORT)? };
            scene.pin(FOU_PORT, &pin)?;
            let (_, run) = send(scene, FOU_PORT)?;
            expect(&run, Reason::HeldByAffinity)?;
            let [event] = run.events.as_slice() else { anyhow::bail!("events: {:?}", run.events) };
            ensure!((event.kind, event.from_id, event.to_id) == (event::CANNOT_MOVE, 1, 1), "{event:?}");
            ensure!(pinned(scene, FOU_PORT)? == pin, "a packet of a flow that cannot be moved wrote");
            // As soon as nothing holds it any more it goes.
            scene.affinity_match(1, false)?;
            send_rewritten(scene, FOU_PORT, Reason::NewPort)?;
            // And affinity to a live backend holds nobody.
            stuck(scene, family, FOU_PORT, true)?;
            scene.affinity(2)?;
            scene.affinity_match(2, true)?;
            send_rewritten(scene, FOU_PORT, Reason::NewPort).map(drop)
        })?;
    }
    Ok(())
}

#[test]
fn ports_of_no_use_are_few_and_tried_again_after_a_pause() -> Result<()> {
    each_family(|scene, family| {
        stuck(scene, family, FOU_PORT, false)?;
        for _ in 0..PORT_TRIES {
            let (given, _) = send_rewritten(scene, FOU_PORT, Reason::NewPort)?;
            // Cilium's slots lag: it chooses the leaving one again.
            scene.entry(given, 1, REV_NAT)?;
        }
        let given = u16::from_be_bytes(pinned(scene, FOU_PORT)?.port);
        for _ in 0..3 {
            let (stays, run) = send_rewritten_still(scene)?;
            ensure!(stays == given && run.egress.cannot_move == 1, "{stays}: {run:?}");
        }
        let pin = pinned(scene, FOU_PORT)?;
        ensure!(pin.next_round > monotonic() && pin.rounds == 1, "{pin:?}");
        scene.pin(FOU_PORT, &PinnedPort { next_round: monotonic() - SECOND, ..pin })?;
        let (next, _) = send_rewritten(scene, FOU_PORT, Reason::NewPort)?;
        ensure!(next != given, "the same port again");
        Ok(())
    })
}

/// A packet of a flow that stays under the port that it has.
fn send_rewritten_still(scene: &mut Scene) -> Result<(u16, Run)> {
    let inner = scene.tcp(1000, tcp::ACK).build(TAG);
    let (frame, run) = send(scene, FOU_PORT)?;
    expect(&run, Reason::NotMoved)?;
    let udp = udp_offset(&frame, &inner);
    Ok((u16::from_be_bytes([run.output[udp], run.output[udp + 1]]), run))
}

#[test]
fn another_choice_of_ciliums_ends_the_pause() -> Result<()> {
    each_family(|scene, family| {
        stuck(scene, family, FOU_PORT, false)?;
        let (given, _) = send_rewritten(scene, FOU_PORT, Reason::NewPort)?;
        scene.entry(given, 1, REV_NAT)?;
        let pin = pinned(scene, FOU_PORT)?;
        let later = monotonic() + 60 * SECOND;
        let pin = PinnedPort { tries: PORT_TRIES, rounds: 5, next_round: later, flags: 0, ..pin };
        scene.pin(FOU_PORT, &pin)?;
        send_rewritten_still(scene)?;
        // Cilium itself has sent it to another one, which leaves too.
        scene.backend(3, BACKEND_TERMINATING)?;
        scene.leaving(3, 0)?;
        scene.entry(given, 3, REV_NAT)?;
        send_rewritten(scene, FOU_PORT, Reason::NewPort)?;
        Ok(())
    })
}

#[test]
fn ports_with_an_entry_are_passed_over_unless_it_leads_to_a_live_backend() -> Result<()> {
    each_family(|scene, family| {
        stuck(scene, family, FOU_PORT, false)?;
        let (first, _) = send_rewritten(scene, FOU_PORT, Reason::NewPort)?;
        let port = |offset: u16| REWRITE_PORT_FIRST + (first - REWRITE_PORT_FIRST + offset) % 220;
        for (entry, expected) in [(Some(2), 0), (Some(9), 0), (Some(1), 1)] {
            stuck(scene, family, FOU_PORT, false)?;
            if let Some(id) = entry {
                scene.entry(first, id, REV_NAT)?;
            }
            let (given, _) = send_rewritten(scene, FOU_PORT, Reason::NewPort)?;
            ensure!(given == port(expected), "{entry:?}: {given}, expected {}", port(expected));
        }
        // None of those looked at will do: the next packet looks further.
        stuck(scene, family, FOU_PORT, false)?;
        for offset in 0..PORT_PROBES {
            scene.entry(port(offset), 1, REV_NAT)?;
        }
        let (frame, run) = send(scene, FOU_PORT)?;
        expect(&run, Reason::NotMoved)?;
        ensure_same_packet(&frame, &run)?;
        let (given, _) = send_rewritten(scene, FOU_PORT, Reason::NewPort)?;
        ensure!(given == port(PORT_PROBES), "{given}, expected {}", port(PORT_PROBES));
        Ok(())
    })
}

#[test]
fn nothing_is_tried_where_cilium_would_drop_or_none_is_live() -> Result<()> {
    each_family(|scene, family| {
        stuck(scene, family, FOU_PORT, false)?;
        scene.service(&[2, 9], false)?;
        let (frame, run) = send(scene, FOU_PORT)?;
        expect(&run, Reason::NotMoved).context("a slot names no backend")?;
        ensure_same_packet(&frame, &run)?;
        for affinity in [false, true] {
            stuck(scene, family, FOU_PORT, affinity)?;
            scene.affinity(2)?;
            scene.service(&[], affinity)?;
            let (frame, run) = send(scene, FOU_PORT)?;
            expect(&run, Reason::NoLive).context("no slot")?;
            ensure_same_packet(&frame, &run)?;
        }
        stuck(scene, family, FOU_PORT, false)?;
        let (given, _) = send_rewritten(scene, FOU_PORT, Reason::NewPort)?;
        scene.entry(given, 1, REV_NAT)?;
        scene.leaving(2, 0)?;
        let (_, run) = send(scene, FOU_PORT)?;
        expect(&run, Reason::NoLive)?;
        ensure!(run.events.iter().any(|event| event.kind == event::NO_LIVE), "{:?}", run.events);
        Ok(())
    })
}

#[test]
fn a_port_of_the_range_passes_as_it_came() -> Result<()> {
    each_family(|scene, family| {
        for port in [REWRITE_PORT_FIRST, 65_300, u16::MAX] {
            stuck(scene, family, port, false)?;
            let (frame, run) = send(scene, port)?;
            expect(&run, Reason::ReservedPort)?;
            ensure_untouched(&frame, &run)?;
        }
        // Drain ports mean nothing in this mode.
        stuck(scene, family, REWRITE_PORT_FIRST - 1, false)?;
        send_rewritten(scene, REWRITE_PORT_FIRST - 1, Reason::NewPort).map(drop)
    })
}

#[test]
fn ports_given_to_another_pod_or_before_the_mode_began_do_not_count() -> Result<()> {
    each_family(|scene, family| {
        let given = PinnedPort {
            given_at: monotonic() - SECOND,
            stuck_since: 0,
            next_round: 0,
            left: 2,
            generation: CLIENT_GENERATION,
            port: 65_200u16.to_be_bytes(),
            tries: 0,
            rounds: 0,
            skips: 0,
            flags: 0,
            pad: [0; 2],
        };
        for (pin, since, counts) in [
            (given, 1, true),
            (PinnedPort { generation: CLIENT_GENERATION + 1, ..given }, 1, false),
            (given, given.given_at + 1, false),
        ] {
            scene.begin(family, mode::REWRITE)?;
            scene.guarded_until(mode::REWRITE, 0, u64::MAX >> 1, since)?;
            scene.entry(FOU_PORT, 1, REV_NAT)?;
            scene.pin(FOU_PORT, &pin)?;
            if counts {
                let (port, _) = send_rewritten(scene, FOU_PORT, Reason::Rewritten)?;
                ensure!(port == 65_200, "{port}");
            } else {
                let (frame, run) = send(scene, FOU_PORT)?;
                expect(&run, Reason::Healthy)?;
                ensure_untouched(&frame, &run)?;
            }
        }
        Ok(())
    })
}

#[test]
fn other_modes_go_by_the_packets_own_port_again() -> Result<()> {
    each_family(|scene, family| {
        stuck(scene, family, FOU_PORT, false)?;
        let (given, _) = send_rewritten(scene, FOU_PORT, Reason::NewPort)?;
        scene.entry(given, 2, REV_NAT)?;
        scene.guarded(mode::RESET, 0)?;
        let (frame, run) = send(scene, FOU_PORT)?;
        ensure!(run.reason == Reason::Moved, "{run:?}");
        ensure_same_packet(&frame, &run)?;
        ensure_moved(scene, &run, FOU_PORT, 2)
    })
}

#[test]
fn flows_with_a_port_each_move_each_by_itself() -> Result<()> {
    each_family(|scene, family| {
        stuck(scene, family, FOU_PORT, false)?;
        scene.guarded(mode::REWRITE, SERVICE_SPORT_AUTO)?;
        let mut given = BTreeSet::new();
        for port in 40_000..40_100 {
            scene.entry(port, 1, REV_NAT)?;
            let (to, _) = send_rewritten(scene, port, Reason::NewPort)?;
            scene.entry(to, 2, REV_NAT)?;
            given.insert(to);
        }
        ensure!(given.len() > 50, "100 flows share {} ports", given.len());
        let (frame, run) = send(scene, 39_999)?;
        expect(&run, Reason::LeftToCilium)?;
        ensure_untouched(&frame, &run)
    })
}

#[test]
fn checksum_is_right_under_the_given_port_in_every_state() -> Result<()> {
    each_family(|scene, family| {
        for options in [true, false] {
            for state in Checksum::ALL {
                for padding in [0, 1, 1333] {
                    stuck(scene, family, FOU_PORT, false)?;
                    let inner = scene.tcp(1000, tcp::ACK).padded(padding).build(TAG);
                    let frame = scene.frame_with(FOU_PORT, &inner, state, options);
                    let run = scene.run(&frame)?;
                    expect(&run, Reason::NewPort)?;
                    let given = u16::from_be_bytes(pinned(scene, FOU_PORT)?.port);
                    ensure_rewritten(scene, &frame, &inner, state, &run, given)?;
                }
            }
        }
        Ok(())
    })
}
