//! The command line.

mod arguments;
mod status;
mod values;

use std::process::ExitCode;

use anyhow::Context as _;
pub use arguments::{
    ApiArguments, CheckArguments, CleanupArguments, Cli, Command, NodeArguments, RunArguments,
    StatusArguments,
};

use nix::sys::signal::{SigSet, Signal};
use tokio::task::LocalSet;

use crate::{
    check::Check,
    datapath::{self, Options},
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
        Command::Status(arguments) => status::show(arguments)?,
        Command::Check(arguments) => {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .context("cannot start the runtime")?;
            let findings = LocalSet::new().block_on(&runtime, Check::from(arguments.as_ref()).run());
            if arguments.json {
                println!("{:#}", serde_json::to_value(&findings).context("cannot print the findings")?);
            } else {
                print!("{}", findings.text());
            }
            return Ok(ExitCode::from(findings.exit_code()));
        }
        Command::Cleanup(arguments) => {
            let end = arguments.stay.then(EndSignal::hold).transpose()?;
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
            if let Some(end) = end {
                end.wait()?;
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// SIGTERM and SIGINT, held back until they are waited for. Left alone they would end the process in the middle of its
/// work, or, in the first process of a container, be ignored.
struct EndSignal(SigSet);

impl EndSignal {
    fn hold() -> anyhow::Result<Self> {
        let signals = SigSet::from_iter([Signal::SIGTERM, Signal::SIGINT]);
        signals.thread_block().context("cannot block signals")?;
        Ok(Self(signals))
    }

    fn wait(&self) -> anyhow::Result<()> {
        self.0.wait().context("cannot wait for a signal")?;
        Ok(())
    }
}
