//! Mode `audit`.

use anyhow::{Result, ensure};
use coil_guard_common::{
    abi::{event, mode},
    counters::Reason,
};
use coil_guard_tests::{
    fou::{FOU_PORT, tcp},
    program::{Checksum, REV_NAT, Run},
};

use crate::support::{each_family, ensure_untouched};

fn expect(run: &Run, reason: Reason) -> Result<()> {
    ensure!(run.reason == reason, "{:?}, expected {reason:?}: {run:?}", run.reason);
    Ok(())
}

#[test]
fn audit_tells_what_reset_and_drain_would_do_and_does_nothing() -> Result<()> {
    each_family(|scene, family| {
        for (flags, would_drain) in [(tcp::ACK, 1), (tcp::SYN, 0)] {
            scene.begin(family, mode::AUDIT)?;
            scene.entry(FOU_PORT, 1, REV_NAT)?;
            scene.leaving(1, 0)?;
            let frame = scene.frame(FOU_PORT, &scene.tcp(1000, flags));
            let run = scene.run(&frame)?;
            expect(&run, Reason::WouldMove)?;
            ensure_untouched(&frame, &run)?;
            ensure!(run.egress.would_move == 1 && run.egress.would_drain == would_drain, "{:?}", run.egress);
            let [event] = run.events.as_slice() else { anyhow::bail!("events: {:?}", run.events) };
            ensure!((event.kind, event.from_id, event.to_id) == (event::WOULD_MOVE, 1, 2), "{event:?}");
            // A first packet and a dangling entry would be put right, too; no flow is cut by that.
            scene.forget(&scene.entry_key(FOU_PORT))?;
            let run = scene.run(&frame)?;
            expect(&run, Reason::WouldMove)?;
            ensure_untouched(&frame, &run)?;
        }
        Ok(())
    })
}

/// A flow that was there while its backend was healthy is one that drain would have kept.
#[test]
fn audit_remembers_stateless_flows() -> Result<()> {
    each_family(|scene, family| {
        scene.begin(family, mode::AUDIT)?;
        scene.entry(FOU_PORT, 1, REV_NAT)?;
        let known = scene.frame_with(FOU_PORT, &scene.udp(1).build(TAG), Checksum::None, true);
        let unknown = scene.frame_with(FOU_PORT, &scene.udp(2).build(TAG), Checksum::None, true);
        expect(&scene.run(&known)?, Reason::Healthy)?;
        scene.leaving(1, 0)?;
        for (frame, would_drain) in [(known, 1), (unknown, 0)] {
            let run = scene.run(&frame)?;
            expect(&run, Reason::WouldMove)?;
            ensure!(run.egress.would_drain == would_drain, "{:?}", run.egress);
            ensure_untouched(&frame, &run)?;
        }
        Ok(())
    })
}

const TAG: coil_guard_tests::fou::Tag = coil_guard_tests::fou::Tag { stream: 0, sequence: 0 };
