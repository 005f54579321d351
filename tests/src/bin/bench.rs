//! What `cargo xtask bench` runs, a part at a time: each in a process of its own, so that nothing of one is left for the
//! next.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};
use clap::{Parser, Subcommand};
use coil_guard_tests::bench::{self, Extent, Options, Part, Report, document};

/// Measures coil-guard. `cargo xtask bench` builds what is needed and runs every part.
#[derive(Parser)]
#[command(name = "bench")]
struct Arguments {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Measure one part, print what was found, and write it as JSON
    Run {
        /// Which
        part: Part,
        /// Only see whether everything works
        #[arg(long)]
        quick: bool,
        /// Object file of another build of the program, to compare with in the same run (part datapath)
        #[arg(long, value_name = "FILE")]
        against: Option<PathBuf>,
        /// Where the figures go
        #[arg(long, value_name = "FILE")]
        json: PathBuf,
    },
    /// Print what was found before
    Show {
        /// Where the figures are
        json: Vec<PathBuf>,
    },
    /// Put what was found before into a document
    Write {
        /// Markdown with a block for each part
        document: PathBuf,
        /// Where the figures are
        json: Vec<PathBuf>,
    },
}

fn main() -> Result<()> {
    match Arguments::parse().verb {
        Verb::Run { part, quick, against, json } => {
            let extent = if quick { Extent::Quick } else { Extent::Full };
            let report = bench::run(part, &Options { extent, against })?;
            println!("{report}");
            if let Some(directory) = json.parent() {
                fs::create_dir_all(directory)
                    .with_context(|| format!("cannot create {}", directory.display()))?;
            }
            fs::write(&json, serde_json::to_string_pretty(&report)?)
                .with_context(|| format!("cannot write {}", json.display()))
        }
        Verb::Show { json } => {
            for report in read(&json)? {
                println!("{report}");
            }
            Ok(())
        }
        Verb::Write { document, json } => {
            let old = fs::read_to_string(&document)
                .with_context(|| format!("cannot read {}", document.display()))?;
            let new = document::fill(&old, &read(&json)?)?;
            fs::write(&document, new).with_context(|| format!("cannot write {}", document.display()))
        }
    }
}

fn read(files: &[PathBuf]) -> Result<Vec<Report>> {
    let read = |path: &Path| -> Result<Report> {
        let text = fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        serde_json::from_str(&text).with_context(|| format!("{} holds no report", path.display()))
    };
    files.iter().map(|path| read(path)).collect()
}
