//! Writes the manual pages and shell completions of `coil-guard` into a directory: `cargo xtask docs`.

use std::{env, fs, path::PathBuf};

use anyhow::{Context as _, Result};
use clap::CommandFactory as _;
use clap_complete::Shell;
use coil_guard::cli::Cli;

fn main() -> Result<()> {
    let directory = env::args_os().nth(1).map(PathBuf::from).context("expected the directory to write to")?;
    let (manual, completions) = (directory.join("man"), directory.join("completions"));
    for path in [&manual, &completions] {
        fs::create_dir_all(path).with_context(|| format!("cannot create {}", path.display()))?;
    }
    clap_mangen::generate_to(Cli::command(), &manual).context("cannot write the manual pages")?;
    for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
        let written = clap_complete::generate_to(shell, &mut Cli::command(), "coil-guard", &completions);
        written.with_context(|| format!("cannot write the completions for {shell}"))?;
    }
    Ok(())
}
