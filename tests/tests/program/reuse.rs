//! Maps are written anew while the program looks at them.
//!
//! It reads without a lock, and the kernel gives the memory of an element that is written anew to the next one at once. A look
//! between the two finds the state of another backend, the mark of another address, or nothing at all. It is rare: beside a writer
//! that never rests, one packet in some millions has one, so that a program that believes it at once fails here within a run or two.

use std::{
    net::IpAddr,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, anyhow, ensure};
use coil_guard_common::{
    abi::{InnerFlow, maps, mark, mode, v4_mapped},
    cilium::BACKEND_TERMINATING,
};
use coil_guard_tests::{
    cilium::{Raw, RawMap},
    fou::{FOU_PORT, tcp},
    program::{EGRESS, REV_NAT, Scene, address_of},
};

use crate::support::each_family;

/// How long each case goes on at least, and how often the element has to be written while packets pass.
const LASTS: Duration = Duration::from_millis(1500);
const WRITES: u64 = 1_000_000;
const WRITES_AT_ONCE: usize = 1000;
const LIMIT: Duration = Duration::from_secs(60);
const BATCH: u32 = 2000;

/// Gives packets to the program, some at a time, while another thread writes.
fn beside(
    mut write: impl FnMut() -> Result<()> + Send,
    mut packets: impl FnMut() -> Result<()>,
) -> Result<u64> {
    let (ended, writes) = (AtomicBool::new(false), AtomicU64::new(0));
    thread::scope(|scope| {
        let writer = scope.spawn(|| {
            while !ended.load(Ordering::Relaxed) {
                write()?;
                writes.fetch_add(WRITES_AT_ONCE as u64, Ordering::Relaxed);
            }
            anyhow::Ok(())
        });
        let began = Instant::now();
        let mut result = Ok(());
        while result.is_ok()
            && !writer.is_finished()
            && (began.elapsed() < LASTS || writes.load(Ordering::Relaxed) < WRITES)
            && began.elapsed() < LIMIT
        {
            result = packets();
        }
        ended.store(true, Ordering::Relaxed);
        writer.join().map_err(|_| anyhow!("the writer panicked"))??;
        result
    })?;
    let writes = writes.into_inner();
    ensure!(writes >= WRITES, "only {writes} writes in {LIMIT:?}");
    Ok(writes)
}

/// An old connection on backend 1, which is healthy, while `write` writes: no packet may take it away.
fn stays<W: FnMut() -> Result<()> + Send>(
    scene: &mut Scene,
    what: &str,
    modes: &[u8],
    write: impl Fn() -> Result<W>,
) -> Result<()> {
    for mode in modes {
        scene.guarded(*mode, 0)?;
        let before = scene.guard.egress(EGRESS)?;
        let frame = scene.frame(FOU_PORT, &scene.tcp(1000, tcp::ACK));
        let writes = beside(write()?, || {
            scene.entry(FOU_PORT, 1, REV_NAT)?;
            let flow = InnerFlow { flags: 0, ..scene.memory(1, 0) };
            scene.remember(6, 1000, 443, &flow)?;
            scene.guard.repeat(&frame, BATCH)?;
            Ok(())
        })?;
        let now = scene.guard.egress(EGRESS)?;
        let packets = now.packets - before.packets;
        let (moved, repaired, cut) =
            (now.moved - before.moved, now.repaired - before.repaired, now.cut - before.cut);
        println!(
            "{what}, mode {mode}, {:?}: {packets} packets beside {writes} writes: {moved} moved, {repaired} repaired, {cut} cut",
            scene.family
        );
        ensure!((moved, repaired, cut) == (0, 0, 0), "{what}: a flow left a healthy backend");
    }
    Ok(())
}

const MODES: [u8; 2] = [mode::RESET, mode::DRAIN];

/// Writes these elements of a map as they are, over and over.
fn rewrite(map: &RawMap, keys: &[Vec<u8>]) -> Result<impl FnMut() -> Result<()> + Send + use<>> {
    let (map, mut elements) = (map.try_clone()?, Raw::default());
    for key in keys.iter().cycle().take(WRITES_AT_ONCE) {
        elements.keys.extend_from_slice(key);
        elements.values.extend(map.lookup_bytes(key)?.with_context(|| format!("no element {key:?}"))?);
    }
    Ok(move || map.update_batch(&elements))
}

fn mapped(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(address) => v4_mapped(address.octets()).to_vec(),
        IpAddr::V6(address) => address.octets().to_vec(),
    }
}

/// A backend that keeps nothing, so that a flow without a valid entry is not left to Cilium.
fn with_a_backend_that_is_gone(scene: &mut Scene) -> Result<()> {
    scene.backend(3, BACKEND_TERMINATING)?;
    scene.service(&[1, 2, 3], false)?;
    scene.mark(3, mark::GONE, 0, 1)
}

#[test]
fn a_mark_that_is_renewed_under_it_moves_no_flow() -> Result<()> {
    each_family(|scene, family| {
        scene.begin(family, mode::RESET)?;
        with_a_backend_that_is_gone(scene)?;
        let map = scene.guard.own_handle(maps::BACKEND_MARKS)?;
        let keys = [1, 3].map(|id| mapped(address_of(family, id)));
        stays(scene, "marks", &MODES, || rewrite(&map, &keys))
    })
}

#[test]
fn a_backend_that_cilium_writes_anew_under_it_loses_no_flow() -> Result<()> {
    each_family(|scene, family| {
        scene.begin(family, mode::RESET)?;
        with_a_backend_that_is_gone(scene)?;
        let map = scene.guard.cilium().get(family.names().backends)?.try_clone()?;
        let keys = [1u32, 3].map(|id| id.to_ne_bytes().to_vec());
        stays(scene, "backends", &MODES, || rewrite(&map, &keys))
    })
}
