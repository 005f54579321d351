//! The verbs that are programs of other crates.

use std::process::Command;

use anyhow::{Result, ensure};

use crate::{
    machine::is_root,
    process::{cargo, run, target_directory},
    setup,
};

/// What the program is given as it stands.
#[derive(clap::Args)]
#[command(disable_help_flag = true)]
pub(crate) struct Arguments {
    /// Passed on: see `cargo xtask demo --help`
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<String>,
}

/// Writes the agent's manual pages and shell completions below the target directory.
pub(crate) fn docs() -> Result<()> {
    let directory = target_directory()?.join("docs");
    run(cargo()
        .args(["run", "--quiet", "-p", "coil-guard", "--example", "generate_docs", "--"])
        .arg(&directory))?;
    println!("manual pages and completions are in {}", directory.display());
    Ok(())
}

/// Runs the demonstration with a debug build: it shows behaviour, not speed.
pub(crate) fn demo(arguments: &Arguments) -> Result<()> {
    let wants_help = arguments.arguments.iter().any(|argument| argument == "--help" || argument == "-h");
    ensure!(
        is_root() || wants_help,
        "`cargo xtask demo` makes network namespaces and loads eBPF programs, which needs root: run it as root, as in \
         `sudo -E env PATH=\"$PATH\" cargo xtask demo`"
    );
    setup::ensure_toolchain()?;
    let programs = ["--bin", "coil-guard", "--bin", "demo"];
    run(cargo().args(["build", "--quiet", "-p", "coil-guard", "-p", "coil-guard-tests"]).args(programs))?;
    let built = target_directory()?.join("debug");
    run(Command::new(built.join("demo"))
        .args(&arguments.arguments)
        .env("COIL_GUARD_BINARY", built.join("coil-guard")))
}
