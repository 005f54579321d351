//! Mode `reset`.

use anyhow::{Context as _, Result, ensure};
use coil_guard_common::{
    abi::{FOR_EVER, event, mark, mode},
    cilium::{BACKEND_ACTIVE, BACKEND_MAINTENANCE, BACKEND_QUARANTINED, BACKEND_TERMINATING},
    counters::Reason,
};
use coil_guard_tests::{
    cilium::CiliumVersion,
    fou::{FOU_PORT, tcp},
    program::{REV_NAT, Run, Scene, monotonic},
};

use crate::support::{
    OTHER_PORT, each_family, ensure_created, ensure_moved, ensure_same_packet, ensure_untouched, only_change,
    with_version,
};

/// A case's name, and what is changed for it.
type Setup = (&'static str, fn(&mut Scene) -> Result<()>);

/// The program's clock is up to a tick of the kernel's timer behind.
fn just_now() -> u64 {
    monotonic() - 20_000_000
}

const HOUR: u64 = 3_600_000_000_000;
const OTHER_REV_NAT: [u8; 2] = [0x02, 0x01];

fn send(scene: &mut Scene, port: u16) -> Result<(Vec<u8>, Run)> {
    let frame = scene.frame(port, &scene.tcp(1000, tcp::ACK));
    let run = scene.run(&frame)?;
    ensure_same_packet(&frame, &run)?;
    Ok((frame, run))
}

fn expect(run: &Run, reason: Reason) -> Result<()> {
    ensure!(run.reason == reason, "{:?}, expected {reason:?}: {run:?}", run.reason);
    Ok(())
}

#[test]
fn a_flow_on_a_leaving_backend_moves_with_its_next_packet() -> Result<()> {
    for version in [CiliumVersion::V1_14, CiliumVersion::V1_20] {
        with_version(version, |scene, family| {
            for affinity in [false, true] {
                for (port, what) in [(FOU_PORT, 0), (OTHER_PORT, 1), (FOU_PORT, 2)] {
                    scene.begin(family, mode::RESET)?;
                    scene.service(&[1, 2], affinity)?;
                    scene.entry(port, 1, REV_NAT)?;
                    if affinity {
                        scene.affinity(1)?;
                    }
                    match what {
                        // The agent's mark alone, Cilium's state alone, both.
                        0 => scene.leaving(1, 0)?,
                        1 => {
                            scene.agent_alive(false)?;
                            scene.unmark(1)?;
                            scene.unmark(2)?;
                            scene.backend(1, BACKEND_TERMINATING)?;
                            scene.service(&[2], affinity)?;
                        }
                        _ => {
                            scene.leaving(1, 0)?;
                            scene.backend(1, BACKEND_TERMINATING)?;
                        }
                    }
                    let (_, run) = send(scene, port)?;
                    expect(&run, Reason::Moved)?;
                    ensure_moved(scene, &run, port, 2)?;
                    ensure!(run.egress.moved == 1 && run.egress.packets == 1, "{:?}", run.egress);
                    let [event] = run.events.as_slice() else { anyhow::bail!("events: {:?}", run.events) };
                    ensure!(
                        (event.kind, event.from_id, event.to_id, event.mode)
                            == (event::MOVED, 1, 2, mode::RESET)
                            && event.client_port == port.to_be_bytes(),
                        "{event:?}"
                    );
                    let (frame, run) = send(scene, port)?;
                    expect(&run, Reason::Healthy)?;
                    ensure_untouched(&frame, &run)?;
                }
            }
            Ok(())
        })?;
    }
    Ok(())
}

#[test]
fn a_flow_that_its_backend_keeps_stays() -> Result<()> {
    each_family(|scene, family| {
        let cases: [Setup; 6] = [
            ("active and ready", |_| Ok(())),
            ("not ready for a moment", |scene| scene.mark(1, mark::NOT_READY, monotonic() + HOUR, 1)),
            ("not ready, never given up", |scene| scene.mark(1, mark::NOT_READY, FOR_EVER, 1)),
            ("in maintenance, unmarked, no agent", |scene| {
                scene.unmark(1)?;
                scene.agent_alive(false)?;
                scene.backend(1, BACKEND_MAINTENANCE)
            }),
            ("quarantined, unmarked, no agent", |scene| {
                scene.unmark(1)?;
                scene.agent_alive(false)?;
                scene.backend(1, BACKEND_QUARANTINED)
            }),
            ("active, nothing marked, no agent", |scene| {
                scene.unmark(1)?;
                scene.agent_alive(false)
            }),
        ];
        for (what, setup) in cases {
            for mode in [mode::RESET, mode::AUDIT] {
                scene.begin(family, mode)?;
                scene.entry(FOU_PORT, 1, REV_NAT)?;
                setup(scene)?;
                let (frame, run) = send(scene, FOU_PORT)?;
                expect(&run, Reason::Healthy).context(what)?;
                ensure_untouched(&frame, &run).context(what)?;
                ensure!(run.events.is_empty(), "{what}: {:?}", run.events);
            }
        }
        Ok(())
    })
}

#[test]
fn a_flow_that_nothing_keeps_moves() -> Result<()> {
    each_family(|scene, family| {
        let cases: [Setup; 6] = [
            ("leaving, marked for a drain that is refused to this pod", |scene| scene.leaving(1, 60)),
            ("not ready for too long", |scene| scene.mark(1, mark::NOT_READY, just_now(), 1)),
            ("gone", |scene| scene.mark(1, mark::GONE, 0, 1)),
            ("gone, whatever it says", |scene| scene.mark(1, mark::GONE, FOR_EVER, 1)),
            ("leaving, its time over", |scene| scene.mark(1, mark::LEAVING, just_now(), 1)),
            ("leaving without an agent", |scene| {
                scene.leaving(1, 0)?;
                scene.agent_alive(false)
            }),
        ];
        for (what, setup) in cases {
            scene.begin(family, mode::RESET)?;
            scene.entry(FOU_PORT, 1, REV_NAT)?;
            setup(scene)?;
            let (_, run) = send(scene, FOU_PORT)?;
            expect(&run, Reason::Moved).context(what)?;
            ensure_moved(scene, &run, FOU_PORT, 2).context(what)?;
        }
        Ok(())
    })
}

/// R2 and R3 for a packet that no entry binds.
#[test]
fn a_flow_without_an_entry_is_cilium_s_unless_cilium_could_choose_wrong() -> Result<()> {
    each_family(|scene, family| {
        for port in [FOU_PORT, OTHER_PORT] {
            scene.begin(family, mode::RESET)?;
            let (frame, run) = send(scene, port)?;
            expect(&run, Reason::LeftToCilium)?;
            ensure_untouched(&frame, &run)?;

            scene.leaving(1, 0)?;
            let (_, run) = send(scene, port)?;
            expect(&run, Reason::Created)?;
            ensure_created(scene, &run, port, 2)?;
            ensure!(run.egress.created == 1 && run.events.is_empty(), "{run:?}");

            // All slots are usable, but affinity names one that is not.
            scene.begin(family, mode::RESET)?;
            scene.service(&[2], true)?;
            scene.affinity(1)?;
            scene.leaving(1, 0)?;
            let (_, run) = send(scene, port)?;
            expect(&run, Reason::Created)?;
            ensure_created(scene, &run, port, 2)?;

            // Affinity is honoured while its backend is usable, and only where the service has affinity.
            scene.begin(family, mode::RESET)?;
            scene.service(&[1, 2, 3], true)?;
            scene.backend(3, BACKEND_ACTIVE)?;
            for (favourite, leaving) in [(2, 1), (3, 1)] {
                scene.affinity(favourite)?;
                scene.leaving(leaving, 0)?;
                scene.mark(3, mark::READY, FOR_EVER, 0)?;
                scene.forget(&scene.entry_key(port))?;
                let (_, run) = send(scene, port)?;
                ensure_created(scene, &run, port, u64::from(favourite))?;
            }
        }
        Ok(())
    })
}

#[test]
fn a_dangling_entry_is_repaired_only_when_cilium_could_choose_wrong() -> Result<()> {
    each_family(|scene, family| {
        for (id, index, what) in [
            (1, OTHER_REV_NAT, "another service's"),
            (9, REV_NAT, "a missing backend's"),
            (1 << 32 | 2, REV_NAT, "no id"),
        ] {
            scene.begin(family, mode::RESET)?;
            scene.entry(FOU_PORT, id, index)?;
            let (frame, run) = send(scene, FOU_PORT)?;
            expect(&run, Reason::LeftToCilium).context(what)?;
            ensure_untouched(&frame, &run).context(what)?;

            scene.leaving(1, 0)?;
            let (_, run) = send(scene, FOU_PORT)?;
            expect(&run, Reason::Repaired).context(what)?;
            let change = only_change(&run)?;
            let mut expected = change.before.clone().context("not there before")?;
            expected[8..16].copy_from_slice(&2u64.to_ne_bytes());
            expected[38..40].copy_from_slice(&REV_NAT);
            ensure!(change.after.as_ref() == Some(&expected), "{what}: {change:?}");
        }
        Ok(())
    })
}

#[test]
fn without_a_live_backend_nothing_changes() -> Result<()> {
    each_family(|scene, family| {
        for bound in [true, false] {
            for slots in [&[1, 2][..], &[]] {
                for mode in [mode::RESET, mode::AUDIT] {
                    scene.begin(family, mode)?;
                    if bound {
                        scene.entry(FOU_PORT, 1, REV_NAT)?;
                    }
                    scene.service(slots, false)?;
                    for id in [1, 2] {
                        scene.leaving(id, 0)?;
                        scene.backend(id, BACKEND_TERMINATING)?;
                    }
                    let (frame, run) = send(scene, FOU_PORT)?;
                    let reason =
                        if !bound && slots.is_empty() { Reason::LeftToCilium } else { Reason::NoLive };
                    expect(&run, reason)?;
                    ensure_untouched(&frame, &run)?;
                    ensure!((run.egress.no_live == 1) == (reason == Reason::NoLive), "{:?}", run.egress);
                }
            }
        }
        Ok(())
    })
}

/// A gone pod in stale slots, an active backend that the agent does not list: not for new flows while the agent lives.
#[test]
fn only_listed_backends_get_flows_while_the_agent_lives() -> Result<()> {
    each_family(|scene, family| {
        for alive in [true, false] {
            scene.begin(family, mode::RESET)?;
            scene.service(&[1, 2, 3], false)?;
            scene.backend(3, BACKEND_ACTIVE)?;
            scene.entry(FOU_PORT, 1, REV_NAT)?;
            scene.mark(2, mark::GONE, 0, 1)?;
            scene.unmark(3)?;
            scene.leaving(1, 0)?;
            scene.agent_alive(alive)?;
            let (_, run) = send(scene, FOU_PORT)?;
            if alive {
                expect(&run, Reason::NoLive)?;
            } else {
                expect(&run, Reason::Moved)?;
                ensure_moved(scene, &run, FOU_PORT, 3)?;
            }
        }
        Ok(())
    })
}

#[test]
fn packets_in_the_reserved_ports_cause_no_entry() -> Result<()> {
    each_family(|scene, family| {
        for port in [61_000, 61_001, 65_095, 65_096, 65_535] {
            scene.begin(family, mode::RESET)?;
            scene.leaving(1, 0)?;
            let (frame, run) = send(scene, port)?;
            expect(&run, Reason::ReservedPort)?;
            ensure_untouched(&frame, &run)?;
            scene.entry(port, 1, REV_NAT)?;
            let (frame, run) = send(scene, port)?;
            expect(&run, Reason::ReservedPort)?;
            ensure_untouched(&frame, &run)?;
        }
        scene.leaving(1, 0)?;
        let (_, run) = send(scene, 60_999)?;
        expect(&run, Reason::Created)
    })
}

#[test]
fn the_service_is_found_under_any_protocol() -> Result<()> {
    for version in CiliumVersion::ALL {
        with_version(version, |scene, family| {
            scene.begin(family, mode::RESET)?;
            scene.entry(OTHER_PORT, 1, REV_NAT)?;
            scene.leaving(1, 0)?;
            let (_, run) = send(scene, OTHER_PORT)?;
            expect(&run, Reason::Moved)?;
            ensure_moved(scene, &run, OTHER_PORT, 2)
        })?;
    }
    Ok(())
}

#[test]
fn clients_spread_over_the_live_backends() -> Result<()> {
    each_family(|scene, family| {
        scene.begin(family, mode::RESET)?;
        scene.service(&[1, 2, 3, 4], false)?;
        for id in [3, 4] {
            scene.backend(id, BACKEND_ACTIVE)?;
            scene.mark(id, mark::READY, FOR_EVER, 0)?;
        }
        scene.leaving(1, 0)?;
        let mut got = [0u32; 5];
        for port in 20_000..20_300 {
            send(scene, port)?;
            got[scene.bound(port)? as usize] += 1;
        }
        ensure!(got[0] == 0 && got[1] == 0 && got[2..].iter().all(|count| *count > 50), "{got:?}");
        Ok(())
    })
}

#[test]
fn one_kind_of_event_comes_once_a_second() -> Result<()> {
    each_family(|scene, family| {
        scene.begin(family, mode::RESET)?;
        scene.leaving(1, 0)?;
        let (mut events, mut moves) = (0, 0);
        let began = monotonic();
        for _ in 0..100 {
            for port in [FOU_PORT, OTHER_PORT] {
                scene.entry(port, 1, REV_NAT)?;
                let (_, run) = send(scene, port)?;
                expect(&run, Reason::Moved)?;
                events += run.events.len() as u64;
                moves += run.egress.moved;
            }
        }
        let seconds = (monotonic() - began) / 1_000_000_000;
        ensure!(moves == 200, "{moves} moves");
        ensure!((1..=seconds + 1).contains(&events), "{events} events in {seconds} s");
        // Another backend is another event.
        scene.begin(family, mode::RESET)?;
        scene.service(&[1, 2, 3], false)?;
        scene.backend(3, BACKEND_ACTIVE)?;
        scene.leaving(1, 0)?;
        scene.leaving(3, 0)?;
        for id in [1, 3] {
            scene.entry(FOU_PORT, id, REV_NAT)?;
            let (_, run) = send(scene, FOU_PORT)?;
            ensure!(run.events.len() == 1, "{:?}", run.events);
        }
        Ok(())
    })
}
