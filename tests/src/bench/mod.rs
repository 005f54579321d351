//! The benchmarks: `cargo xtask bench`.
//!
//! Machines are noisy and differ: whatever is compared is measured in turns within one run, and it is the ratios and
//! differences that say something. Every part gives a [`Report`]: tables, goals, and the figures behind them.

mod agent;
mod cutover;
mod datapath;
pub mod document;
mod load;
mod measure;
mod process;
mod report;
mod throughput;

use std::{fmt, path::PathBuf, time::Instant};

use anyhow::Result;

pub use self::{
    measure::{Extent, Spread},
    report::{Goal, Machine, Report, Table, goals, short},
};
use crate::net::isolated;

/// A part of the benchmarks that runs on this machine, in namespaces of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Part {
    /// What the program costs per packet
    Datapath,
    /// What attaching 250 client pods costs
    Load,
    /// Packets through the lab, with and without the guard
    Throughput,
    /// From the leaving of a backend to the first packet at another
    Cutover,
    /// The agent's memory, processor time and requests, by the size of the cluster
    Agent,
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Datapath => "datapath",
            Self::Load => "load",
            Self::Throughput => "throughput",
            Self::Cutover => "cutover",
            Self::Agent => "agent",
        })
    }
}

/// What a part has found, before it is known how long it took.
struct Findings {
    tables: Vec<Table>,
    goals: Vec<Goal>,
    figures: serde_json::Value,
}

/// How to run.
#[derive(Clone, Debug)]
pub struct Options {
    /// How long to measure.
    pub extent: Extent,
    /// Object file of another build of the program, to compare with in the same run.
    pub against: Option<PathBuf>,
}

/// Runs a part.
///
/// # Errors
///
/// When something cannot be started, or does not do what is to be measured.
pub fn run(part: Part, options: &Options) -> Result<Report> {
    let machine = Machine::here();
    let began = Instant::now();
    let findings = isolated(|| match part {
        Part::Datapath => datapath::run(options),
        Part::Load => load::run(options),
        Part::Throughput => throughput::run(options),
        Part::Cutover => cutover::run(options),
        Part::Agent => agent::run(options),
    })?;
    Ok(Report {
        part: part.to_string(),
        machine,
        seconds: began.elapsed().as_secs_f64(),
        quick: options.extent == Extent::Quick,
        tables: findings.tables,
        goals: findings.goals,
        figures: findings.figures,
    })
}
