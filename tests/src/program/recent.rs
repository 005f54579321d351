//! What the core looked up a moment ago, see `recent.rs` in its sources.

use anyhow::{Context as _, Result};
use aya::{
    Ebpf, Pod,
    maps::{PerCpuArray, PerCpuValues},
    util::nr_cpus,
};

/// Makes it look again.
pub(super) fn forget(core: &mut Ebpf) -> Result<()> {
    zero::<[u64; 8]>(core, "RECENT_SERVICES", [0; 8])?;
    zero::<[u64; 4]>(core, "RECENT_READY", [0; 4])?;
    zero::<[u64; 4]>(core, "RECENT_KEPT", [0; 4])
}

fn zero<V: Pod>(core: &mut Ebpf, name: &str, zeros: V) -> Result<()> {
    // An older core, which the benchmark compares with, has none.
    let Some(map) = core.map_mut(name) else { return Ok(()) };
    let mut map =
        PerCpuArray::<_, V>::try_from(map).with_context(|| format!("map {name} has other types"))?;
    let cpus = nr_cpus().map_err(|(_, error)| error).context("cannot count the CPUs")?;
    for index in 0..map.len() {
        let values = PerCpuValues::try_from(vec![zeros; cpus]).context("cannot clear a record")?;
        map.set(index, values, 0).with_context(|| format!("cannot clear record {index} of {name}"))?;
    }
    Ok(())
}
