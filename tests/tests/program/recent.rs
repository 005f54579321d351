//! What the program looked up a moment ago, while maps change under it.

use anyhow::{Result, ensure};
use coil_guard_common::{
    abi::{FOR_EVER, mark, mode},
    counters::Reason,
};
use coil_guard_tests::{
    fou::{FOU_PORT, tcp},
    program::{REV_NAT, Run, Scene, await_tick},
};

use crate::support::{each_family, ensure_moved, ensure_untouched};

const OTHER_REV_NAT: [u8; 2] = [0x02, 0x01];

/// A packet of a known flow.
fn send(scene: &mut Scene, expected: &[Reason]) -> Result<(Vec<u8>, Run)> {
    let frame = scene.frame(FOU_PORT, &scene.tcp(1000, tcp::ACK));
    let run = scene.run(&frame)?;
    ensure!(expected.contains(&run.reason), "{:?}, expected {expected:?}: {run:?}", run.reason);
    Ok((frame, run))
}

/// A scene in which all was looked up a moment ago, and stays: the second of two packets took the shortcut.
fn begin(scene: &mut Scene, mode: u8) -> Result<()> {
    scene.guard.keeps_recent = false;
    let family = scene.family;
    scene.begin(family, mode)?;
    scene.entry(FOU_PORT, 1, REV_NAT)?;
    scene.guard.keeps_recent = true;
    for _ in 0..2 {
        let (frame, run) = send(scene, &[Reason::Healthy])?;
        ensure_untouched(&frame, &run)?;
    }
    Ok(())
}

#[test]
fn a_mark_counts_for_the_next_packet() -> Result<()> {
    each_family(|scene, family| {
        scene.family = family;
        for mode in [mode::RESET, mode::DRAIN] {
            begin(scene, mode)?;
            scene.leaving(1, 0)?;
            let (_, run) = send(scene, &[Reason::Moved, Reason::Cut])?;
            ensure_moved(scene, &run, FOU_PORT, 2)?;
        }
        Ok(())
    })
}

#[test]
fn ciliums_change_counts_for_the_next_packet() -> Result<()> {
    each_family(|scene, family| {
        scene.family = family;
        begin(scene, mode::RESET)?;
        scene.agent_alive(false)?;
        scene.backend(1, coil_guard_common::cilium::BACKEND_TERMINATING)?;
        let (_, run) = send(scene, &[Reason::Moved])?;
        ensure_moved(scene, &run, FOU_PORT, 2)
    })
}

#[test]
fn a_service_is_let_go_or_taken_on_with_the_next_tick() -> Result<()> {
    each_family(|scene, family| {
        scene.family = family;
        begin(scene, mode::RESET)?;
        for (mode, expected) in [(0, Reason::NotGuarded), (mode::RESET, Reason::Healthy)] {
            scene.guarded(mode, 0)?;
            send(scene, &[Reason::Healthy, Reason::NotGuarded])?;
            await_tick();
            let (frame, run) = send(scene, &[expected])?;
            ensure_untouched(&frame, &run)?;
        }
        Ok(())
    })
}

#[test]
fn a_mark_that_is_gone_counts_with_the_next_tick() -> Result<()> {
    each_family(|scene, family| {
        scene.family = family;
        begin(scene, mode::DRAIN)?;
        scene.unmark(1)?;
        await_tick();
        // Nobody lists it any more, and Cilium has it: it keeps the flows that it has.
        send(scene, &[Reason::Drained])?;
        scene.mark(1, mark::READY, FOR_EVER, 0)?;
        send(scene, &[Reason::Healthy])?;
        Ok(())
    })
}

/// A service that Cilium made anew has another index. What the program saw of it before must not go into an entry.
#[test]
fn the_index_of_a_service_before_is_written_nowhere() -> Result<()> {
    each_family(|scene, family| {
        scene.family = family;
        begin(scene, mode::RESET)?;
        scene.service_of(&[1, 2], OTHER_REV_NAT)?;
        // Until Cilium has seen a packet, its entry is of the service before. Cilium chooses anew, with this very packet.
        let (frame, run) = send(scene, &[Reason::Healthy])?;
        ensure_untouched(&frame, &run)?;
        scene.entry(FOU_PORT, 2, OTHER_REV_NAT)?;
        for _ in 0..2 {
            let (frame, run) = send(scene, &[Reason::Healthy])?;
            ensure_untouched(&frame, &run)?;
        }
        scene.leaving(2, 0)?;
        let (_, run) = send(scene, &[Reason::Moved])?;
        ensure_moved(scene, &run, FOU_PORT, 1)
    })
}
