//! What `cargo xtask bench` runs.

use std::{fs, path::PathBuf};

use anyhow::{Context as _, Result};
use clap::Parser;
use coil_guard_tests::{
    bench::{Effort, datapath},
    net::{Paths, isolated},
};

/// Measures what the program costs per packet, and what an instance of it costs.
///
/// Every figure is taken in turns with an empty classifier and with one that does a single lookup in a conntrack map.
#[derive(Parser)]
#[command(name = "bench")]
struct Arguments {
    /// Packets of each case that repeats one packet, per turn
    #[arg(long, default_value_t = 2_000_000)]
    packets: u32,
    /// Packets of each case that is run one packet at a time
    #[arg(long, default_value_t = 50_000)]
    singles: u32,
    /// How often each case is measured, in turns with what it is compared with; the best counts
    #[arg(long, default_value_t = 5)]
    turns: u32,
    /// Object file of another build of the program, to compare with in the same run
    #[arg(long, value_name = "FILE")]
    against: Option<PathBuf>,
    /// Where the figures go as JSON
    #[arg(long, value_name = "FILE", default_value = "target/bench.json")]
    json: PathBuf,
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let effort = Effort { packets: arguments.packets, singles: arguments.singles, turns: arguments.turns };
    let other = match &arguments.against {
        Some(path) => Some(fs::read(path).with_context(|| format!("cannot read {}", path.display()))?),
        None => None,
    };
    let report = isolated(|| datapath(Paths.cilium_maps(), &effort, other.as_deref()))?;
    print!("{report}");
    if let Some(directory) = arguments.json.parent() {
        fs::create_dir_all(directory).with_context(|| format!("cannot create {}", directory.display()))?;
    }
    fs::write(&arguments.json, serde_json::to_string_pretty(&report)?)
        .with_context(|| format!("cannot write {}", arguments.json.display()))?;
    println!("\nWritten to {}.", arguments.json.display());
    Ok(())
}
