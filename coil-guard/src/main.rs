//! The `coil-guard` command.

use std::process::ExitCode;

use clap::Parser as _;
use coil_guard::cli::{self, Cli};

fn main() -> ExitCode {
    match cli::execute(&Cli::parse()) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("coil-guard: {error:#}");
            ExitCode::FAILURE
        }
    }
}
