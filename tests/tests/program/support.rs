//! What the tests here share.

use anyhow::{Context as _, Result, ensure};
use coil_guard_tests::{
    cilium::{Change, CiliumVersion, IpFamily, hex},
    fou::checksum,
    net::{Paths, lab_test},
    program::{Checksum, Run, Scene, Sizes},
};

pub(crate) const FAMILIES: [IpFamily; 2] = [IpFamily::V4, IpFamily::V6];

/// A source port that is not the FoU port: keys with the two ports the wrong way round then differ.
pub(crate) const OTHER_PORT: u16 = 40_001;

/// Runs `test` once for each family on one instance over the maps of the newest Cilium, whose services programs cannot
/// write.
pub(crate) fn each_family(test: impl Fn(&mut Scene, IpFamily) -> Result<()> + Send + Sync) -> Result<()> {
    with_version(CiliumVersion::V1_20, test)
}

/// As [`each_family`], over the maps of another version.
pub(crate) fn with_version(
    version: CiliumVersion,
    test: impl Fn(&mut Scene, IpFamily) -> Result<()> + Send + Sync,
) -> Result<()> {
    lab_test(|| {
        let mut scene = Scene::load(Paths.cilium_maps(), version, Sizes::default())?;
        for family in FAMILIES {
            test(&mut scene, family).with_context(|| format!("{family:?}, maps of Cilium {version}"))?;
        }
        Ok(())
    })
}

/// The packet is what it was, and nothing of Cilium's changed.
pub(crate) fn ensure_untouched(frame: &[u8], run: &Run) -> Result<()> {
    ensure_same_packet(frame, run)?;
    ensure!(run.changes.is_empty(), "{:?} changed Cilium's maps: {:?}", run.reason, run.changes);
    Ok(())
}

/// The packet is what it was.
pub(crate) fn ensure_same_packet(frame: &[u8], run: &Run) -> Result<()> {
    ensure!(
        run.output == frame,
        "{:?} changed the packet:\n{}\n{}",
        run.reason,
        hex(frame),
        hex(&run.output)
    );
    Ok(())
}

/// Exactly one element changed, by creation or otherwise.
pub(crate) fn only_change(run: &Run) -> Result<&Change> {
    match run.changes.as_slice() {
        [change] => Ok(change),
        changes => anyhow::bail!("{:?}: expected one change, found {changes:?}", run.reason),
    }
}

/// Of the entry under `port`, nothing but the backend id changed, to `id`.
pub(crate) fn ensure_moved(scene: &Scene, run: &Run, port: u16, id: u64) -> Result<()> {
    let change = only_change(run)?;
    ensure!(
        change.map == scene.family.names().conntrack && change.key == scene.entry_key(port),
        "{change:?}"
    );
    let before = change.before.as_ref().context("the entry was not there before")?;
    let mut expected = before.clone();
    expected[8..16].copy_from_slice(&id.to_ne_bytes());
    ensure!(change.after.as_ref() == Some(&expected), "{change:?}");
    Ok(())
}

/// Exactly the entry under `port` came into being: backend id, reverse NAT index and zeros.
pub(crate) fn ensure_created(scene: &Scene, run: &Run, port: u16, id: u64) -> Result<()> {
    let change = only_change(run)?;
    ensure!(
        change.map == scene.family.names().conntrack && change.key == scene.entry_key(port),
        "{change:?}"
    );
    ensure!(change.before.is_none(), "{change:?}");
    ensure!(change.after.as_ref() == Some(&minimal_entry(id)), "{change:?}");
    Ok(())
}

/// Bytes of an entry made from scratch.
pub(crate) fn minimal_entry(id: u64) -> Vec<u8> {
    let mut bytes = vec![0; 56];
    bytes[8..16].copy_from_slice(&id.to_ne_bytes());
    bytes[38..40].copy_from_slice(&coil_guard_tests::program::REV_NAT);
    bytes
}

/// The packet differs from `frame` by its outer source port, now `port`, and a checksum that is right for it.
pub(crate) fn ensure_rewritten(
    scene: &Scene,
    frame: &[u8],
    inner: &[u8],
    state: Checksum,
    run: &Run,
    port: u16,
) -> Result<()> {
    let udp = coil_guard_tests::program::udp_offset(frame, inner);
    let mut expected = frame.to_vec();
    expected[udp..udp + 2].copy_from_slice(&port.to_be_bytes());
    if state == Checksum::Finished {
        expected[udp + 6..udp + 8].fill(0);
        let sum = checksum::transport(scene.client(), scene.cluster_ip(), 17, &expected[udp..]);
        let sum = if sum == 0 { 0xffff } else { sum };
        expected[udp + 6..udp + 8].copy_from_slice(&sum.to_be_bytes());
    }
    ensure!(run.output == expected, "{state:?}:\n{}\n{}", hex(&expected), hex(&run.output));
    Ok(())
}
