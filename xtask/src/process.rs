//! Running other programs: each is shown before it runs, and its failure names it.

use std::{
    fmt::Write as _,
    path::PathBuf,
    process::{Command, Stdio},
};

use anyhow::{Context as _, Result, bail, ensure};

/// Runs `command` with this process's output, after showing it.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let shown = show(command);
    eprintln!("+ {shown}");
    let status = command.status().with_context(|| format!("cannot run `{shown}`"))?;
    ensure!(status.success(), "`{shown}` failed ({status})");
    Ok(())
}

/// Runs `command` without showing it and returns what it printed; its standard error is part of the failure.
pub(crate) fn capture(command: &mut Command) -> Result<String> {
    let shown = show(command);
    let output = command.stdin(Stdio::null()).output().with_context(|| format!("cannot run `{shown}`"))?;
    if !output.status.success() {
        bail!("`{shown}` failed ({}): {}", output.status, String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Whether `command` runs and succeeds; nothing is shown.
pub(crate) fn succeeds(command: &mut Command) -> bool {
    command.stdin(Stdio::null()).output().is_ok_and(|output| output.status.success())
}

fn show(command: &Command) -> String {
    let mut shown = String::new();
    for (name, value) in command.get_envs() {
        if let Some(value) = value {
            let _infallible = write!(shown, "{}={} ", name.display(), value.display());
        }
    }
    shown.push_str(&command.get_program().to_string_lossy());
    for argument in command.get_args() {
        let argument = argument.to_string_lossy();
        if argument.is_empty() || argument.contains([' ', '"', '\'']) {
            let _infallible = write!(shown, " '{argument}'");
        } else {
            let _infallible = write!(shown, " {argument}");
        }
    }
    shown
}

/// The cargo that runs this, at the root of the workspace.
pub(crate) fn cargo() -> Command {
    let mut command = Command::new("cargo");
    command.current_dir(workspace());
    // What `cargo run` tells this program about its own package. Build scripts that look at the same names would run
    // again, with all that depends on them, whenever builds from here and from a shell alternate.
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if ["CARGO_PKG_", "CARGO_MANIFEST_", "CARGO_BIN_", "CARGO_CRATE_"]
            .iter()
            .any(|prefix| text.starts_with(prefix))
        {
            command.env_remove(&name);
        }
    }
    command
}

/// The root of the workspace.
pub(crate) fn workspace() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
}

/// Where builds go, whatever `CARGO_TARGET_DIR` or a cargo configuration says.
pub(crate) fn target_directory() -> Result<PathBuf> {
    #[derive(serde::Deserialize)]
    struct Metadata {
        target_directory: PathBuf,
    }
    let json = capture(cargo().args(["metadata", "--format-version", "1", "--no-deps"]))?;
    let metadata: Metadata =
        serde_json::from_str(&json).context("cargo metadata printed something else than JSON")?;
    Ok(metadata.target_directory)
}
