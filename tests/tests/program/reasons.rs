//! Every verdict can be reached.

use anyhow::{Context as _, Result, ensure};
use coil_guard_common::{
    abi::{mark, mode},
    cilium::BACKEND_TERMINATING,
    counters::Reason,
};
use coil_guard_tests::{
    cilium::IpFamily,
    fou::{FOU_PORT, tcp},
    program::{REV_NAT, Scene, monotonic},
};

use crate::support::each_family;

/// Not reached here, with the reason.
const ELSEWHERE: [(Reason, &str); 1] = [(
    Reason::Contended,
    "needs other CPUs that change the entry three times between a read and a write; see the property tests",
)];

type Setup = fn(&mut Scene, &mut Vec<u8>) -> Result<()>;

/// The scene that each starts from: mode drain, the FoU port bound to backend 1, everything healthy; `frame` opens a
/// connection.
const CASES: [(Reason, Setup); 23] = [
    (Reason::NotFou, |_, frame| {
        frame[12] = 0x86;
        frame[13] = 0x00;
        Ok(())
    }),
    (Reason::Malformed, |_, frame| {
        frame[14] ^= 0x10;
        Ok(())
    }),
    (Reason::OuterFragment, |scene, frame| {
        if scene.family == IpFamily::V4 {
            frame[21] = 1;
        } else {
            frame[20] = 44;
            frame[57] = 8;
        }
        Ok(())
    }),
    (Reason::ExtensionHeaders, |scene, frame| {
        if scene.family == IpFamily::V6 {
            for _ in 0..4 {
                frame.splice(54..54, [60, 0, 1, 4, 0, 0, 0, 0]);
            }
        }
        Ok(())
    }),
    (Reason::NotGuarded, |scene, _| scene.guarded_until(mode::DRAIN, 0, 1, 1)),
    (Reason::ForeignSource, |scene, frame| {
        frame[if scene.family == IpFamily::V4 { 29 } else { 37 }] ^= 1;
        Ok(())
    }),
    (Reason::UnknownService, |scene, _| scene.remove_service()),
    (Reason::Healthy, |_, _| Ok(())),
    (Reason::LeftToCilium, |scene, _| {
        scene.guarded(mode::RESET, 0)?;
        scene.forget(&scene.entry_key(FOU_PORT))
    }),
    (Reason::Moved, |scene, _| scene.leaving(1, 60)),
    (Reason::Created, |scene, _| scene.forget(&scene.entry_key(FOU_PORT))),
    (Reason::Repaired, |scene, _| scene.entry(FOU_PORT, 9, REV_NAT)),
    (Reason::NoLive, |scene, _| {
        scene.leaving(1, 0)?;
        scene.leaving(2, 0)
    }),
    (Reason::WouldMove, |scene, _| {
        scene.guarded(mode::AUDIT, 0)?;
        scene.leaving(1, 0)
    }),
    (Reason::Drained, |scene, frame| old_flow(scene, frame, 60)),
    (Reason::NotDrained, |scene, frame| {
        scene.backend(4097, BACKEND_TERMINATING)?;
        scene.leaving(4097, 60)?;
        scene.entry(61_001, 4097, REV_NAT)?;
        old_flow(scene, frame, 60)
    }),
    (Reason::Cut, |scene, frame| old_flow(scene, frame, 0)),
    (Reason::Settling, |scene, _| {
        let soon = monotonic() + 60_000_000_000;
        scene.mark(1, mark::LEAVING, soon, soon)
    }),
    (Reason::ReservedPort, |scene, frame| {
        *frame = scene.frame(61_002, &scene.tcp(1000, tcp::SYN));
        Ok(())
    }),
    (Reason::Rewritten, |scene, frame| {
        rewrite(scene)?;
        scene.run(frame).map(drop)
    }),
    (Reason::NewPort, |scene, _| rewrite(scene)),
    (Reason::HeldByAffinity, |scene, _| {
        rewrite(scene)?;
        scene.service(&[1, 2], true)?;
        scene.affinity(1)?;
        scene.affinity_match(1, true)
    }),
    (Reason::NotMoved, |scene, _| {
        rewrite(scene)?;
        scene.service(&[2, 9], false)
    }),
];

/// Mode rewrite, and backend 1 leaves.
fn rewrite(scene: &mut Scene) -> Result<()> {
    scene.guarded(mode::REWRITE, 0)?;
    scene.leaving(1, 0)
}

/// A flow of backend 1, which leaves, while the FoU port names backend 2.
fn old_flow(scene: &mut Scene, frame: &mut Vec<u8>, seconds: u64) -> Result<()> {
    scene.leaving(1, seconds)?;
    scene.entry(FOU_PORT, 2, REV_NAT)?;
    scene.remember(6, 1000, 443, &scene.memory(1, 1_000_000))?;
    *frame = scene.frame(FOU_PORT, &scene.tcp(1000, tcp::ACK));
    Ok(())
}

#[test]
fn every_reason_is_reached() -> Result<()> {
    for reason in Reason::ALL {
        let here = CASES.iter().filter(|(case, _)| case == reason).count();
        let elsewhere = ELSEWHERE.iter().filter(|(case, _)| case == reason).count();
        ensure!(here + elsewhere == 1, "{reason:?} has {here} cases here and {elsewhere} excuses");
    }
    each_family(|scene, family| {
        for (reason, setup) in CASES {
            if reason == Reason::ExtensionHeaders && family == IpFamily::V4 {
                continue;
            }
            scene.begin(family, mode::DRAIN)?;
            scene.entry(FOU_PORT, 1, REV_NAT)?;
            let mut frame = scene.frame(FOU_PORT, &scene.tcp(1000, tcp::SYN));
            setup(scene, &mut frame)?;
            let run = scene.run(&frame).with_context(|| format!("{reason:?}"))?;
            ensure!(run.reason == reason, "{:?}, expected {reason:?}: {run:?}", run.reason);
            let counted = u64::from(!matches!(
                reason,
                Reason::NotFou
                    | Reason::Malformed
                    | Reason::OuterFragment
                    | Reason::ExtensionHeaders
                    | Reason::NotGuarded
                    | Reason::ForeignSource
                    | Reason::UnknownService
            ));
            ensure!(run.egress.packets == counted, "{reason:?}: {:?}", run.egress);
        }
        Ok(())
    })
}
