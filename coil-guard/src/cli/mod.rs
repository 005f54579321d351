//! The command line.

mod arguments;
mod status;
mod values;

use std::process::ExitCode;

use anyhow::Context as _;
pub use arguments::{
    ApiArguments, CleanupArguments, Cli, Command, NodeArguments, RunArguments, StatusArguments,
};

use nix::sys::signal::{SigSet, Signal};

use crate::{
    datapath::{self, Options, Snapshot},
    run,
};

/// Does what the command line says.
///
/// # Errors
///
/// What the operator has to put right.
pub fn execute(cli: &Cli) -> anyhow::Result<ExitCode> {
    match &cli.command {
        Command::Run(arguments) => run::run(arguments)?,
        Command::Status(arguments) => {
            let snapshot = Snapshot::read(&arguments.node.pin_dir)?;
            if arguments.json {
                println!("{:#}", status::json(&snapshot));
            } else {
                print!("{}", status::text(&snapshot));
            }
        }
        Command::Cleanup(arguments) => {
            let cleanup = datapath::cleanup(&Options::from(&arguments.node))?;
            for line in &cleanup.removed {
                println!("removed {line}");
            }
            for error in &cleanup.errors {
                eprintln!("coil-guard: cannot remove {error}");
            }
            if !cleanup.errors.is_empty() {
                return Ok(ExitCode::FAILURE);
            }
            if cleanup.removed.is_empty() {
                println!("nothing of coil-guard's on this node");
            }
            if arguments.stay {
                wait_for_the_end()?;
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Blocks until SIGTERM or SIGINT. A handler is needed: the first process of a container ignores signals without one.
fn wait_for_the_end() -> anyhow::Result<()> {
    let signals = SigSet::from_iter([Signal::SIGTERM, Signal::SIGINT]);
    signals.thread_block().context("cannot block signals")?;
    signals.wait().context("cannot wait for a signal")?;
    Ok(())
}
