//! The benchmarks work: each part is run just long enough to see that. Their figures are worth nothing here.

use anyhow::{Result, ensure};
use coil_guard_tests::{
    bench::{self, Extent, Options, Part, document},
    net::lab_test,
};

fn smoke(part: Part) -> Result<()> {
    lab_test(|| {
        let report = bench::run(part, &Options { extent: Extent::Quick, against: None })?;
        ensure!(report.quick, "a smoke run must say that it is one");
        ensure!(!report.tables.is_empty(), "nothing was found");
        for table in &report.tables {
            ensure!(!table.rows.is_empty(), "nothing in {:?}", table.title);
        }
        ensure!(!report.figures.is_null(), "no figures");
        println!("{report}");
        Ok(())
    })
}

#[test]
fn the_datapath_is_measured() -> Result<()> {
    smoke(Part::Datapath)
}

#[test]
fn loading_is_measured() -> Result<()> {
    smoke(Part::Load)
}

#[test]
fn throughput_is_measured() -> Result<()> {
    smoke(Part::Throughput)
}

#[test]
fn the_cutover_is_measured() -> Result<()> {
    smoke(Part::Cutover)
}

#[test]
fn the_agent_is_measured() -> Result<()> {
    smoke(Part::Agent)
}

#[test]
fn the_document_has_a_block_for_each_part() -> Result<()> {
    let document = include_str!("../../docs/performance.md");
    let mut wanted: Vec<String> =
        <Part as clap::ValueEnum>::value_variants().iter().map(ToString::to_string).collect();
    wanted.extend([document::GOALS, "vm"].map(str::to_owned));
    let mut found = document::blocks(document);
    wanted.sort();
    found.sort();
    ensure!(found == wanted, "docs/performance.md has blocks for {found:?}, the parts are {wanted:?}");
    Ok(())
}
