//! The verbs that are programs of the tests crate.

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
    /// Passed on: see `cargo xtask demo --help`, `cargo xtask bench --help`
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<String>,
}

/// Runs the demonstration with a debug build: it shows behaviour, not speed.
pub(crate) fn demo(arguments: &Arguments) -> Result<()> {
    run_program("demo", &[], "debug", arguments)
}

/// Runs the benchmarks with a release build.
pub(crate) fn bench(arguments: &Arguments) -> Result<()> {
    run_program("bench", &["--release"], "release", arguments)
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

fn run_program(name: &str, profile: &[&str], directory: &str, arguments: &Arguments) -> Result<()> {
    let wants_help = arguments.arguments.iter().any(|argument| argument == "--help" || argument == "-h");
    ensure!(
        is_root() || wants_help,
        "`cargo xtask {name}` makes network namespaces and loads eBPF programs, which needs root: run it as root, as in \
         `sudo -E env PATH=\"$PATH\" cargo xtask {name}`"
    );
    setup::ensure_toolchain()?;
    run(cargo()
        .args([
            "build",
            "--quiet",
            "-p",
            "coil-guard",
            "-p",
            "coil-guard-tests",
            "--bin",
            "coil-guard",
            "--bin",
            name,
        ])
        .args(profile))?;
    let built = target_directory()?.join(directory);
    run(Command::new(built.join(name))
        .args(&arguments.arguments)
        .env("COIL_GUARD_BINARY", built.join("coil-guard")))
}
