//! One build for all groups, and which of its products belongs to which group.

use std::{
    fmt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context as _, Result, bail, ensure};
use serde::Deserialize;

use crate::process::{capture, cargo};

/// A group of tests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Group {
    /// Needs nothing.
    Unit,
    /// In network namespaces; needs root and the eBPF programs.
    Lab,
    /// In virtual machines.
    Vm,
}

impl fmt::Display for Group {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Unit => "unit",
            Self::Lab => "lab",
            Self::Vm => "vm",
        })
    }
}

/// One binary with tests in it.
#[derive(Clone, Debug)]
pub(crate) struct TestBinary {
    /// Name of the cargo target.
    pub(crate) name: String,
    /// The file to run.
    pub(crate) path: PathBuf,
    /// The package's directory, where cargo runs tests.
    pub(crate) directory: PathBuf,
    /// Where it belongs.
    pub(crate) group: Group,
}

impl TestBinary {
    /// The names of its tests, without the binary's.
    pub(crate) fn list(&self) -> Result<Vec<String>> {
        let list = capture(self.command().args(["--list", "--format", "terse"]))?;
        Ok(list.lines().filter_map(|line| line.strip_suffix(": test")).map(str::to_owned).collect())
    }

    /// A command that runs it as cargo would.
    pub(crate) fn command(&self) -> Command {
        let mut command = Command::new(&self.path);
        self.place(&mut command);
        command
    }

    /// Gives `command` the directory and the variable that cargo gives to tests.
    pub(crate) fn place(&self, command: &mut Command) {
        command.current_dir(&self.directory).env("CARGO_MANIFEST_DIR", &self.directory);
    }
}

/// What one build made.
pub(crate) struct Built {
    /// The agent.
    pub(crate) agent: PathBuf,
    /// Every test binary of the workspace's host crates.
    pub(crate) binaries: Vec<TestBinary>,
}

#[derive(Deserialize)]
struct Message {
    reason: String,
    manifest_path: Option<PathBuf>,
    target: Option<Target>,
    profile: Option<Profile>,
    executable: Option<PathBuf>,
}

#[derive(Deserialize)]
struct Target {
    name: String,
    kind: Vec<String>,
    src_path: PathBuf,
}

#[derive(Deserialize)]
struct Profile {
    test: bool,
}

/// Builds the agent and every test binary in one go, so that each dependency is compiled once.
pub(crate) fn build() -> Result<Built> {
    build_selected(&["--bins", "--tests"])
}

/// Builds the agent and what runs in guests.
pub(crate) fn build_for_guests() -> Result<Built> {
    build_selected(&["-p", "coil-guard", "-p", "coil-guard-tests", "--bin", "coil-guard", "--test", "fou"])
}

fn build_selected(selection: &[&str]) -> Result<Built> {
    let mut command = cargo();
    command.arg("build").args(selection).args(["--message-format", "json-render-diagnostics"]);
    eprintln!("+ cargo build {}", selection.join(" "));
    let output = command.stderr(Stdio::inherit()).output().context("cannot run cargo")?;
    ensure!(output.status.success(), "the build failed");
    sort(&String::from_utf8_lossy(&output.stdout))
}

fn sort(messages: &str) -> Result<Built> {
    let mut agent = None;
    let mut binaries = Vec::new();
    for line in messages.lines() {
        let message: Message = serde_json::from_str(line)
            .with_context(|| format!("cargo printed something else than a message: {line}"))?;
        let ("compiler-artifact", Some(manifest), Some(target), Some(profile), Some(executable)) = (
            message.reason.as_str(),
            message.manifest_path,
            message.target,
            message.profile,
            message.executable,
        ) else {
            continue;
        };
        let directory = manifest.parent().unwrap_or(Path::new(".")).to_owned();
        if profile.test {
            let group = group(&target, &directory);
            binaries.push(TestBinary { name: target.name, path: executable, directory, group });
        } else if target.name == "coil-guard" && target.kind == ["bin"] {
            agent = Some(executable);
        }
    }
    let Some(agent) = agent else { bail!("the build made no binary named coil-guard") };
    Ok(Built { agent, binaries })
}

fn group(target: &Target, directory: &Path) -> Group {
    if target.src_path.starts_with(directory.join("vm")) {
        Group::Vm
    } else if target.kind == ["test"] && directory.ends_with("tests") {
        Group::Lab
    } else {
        Group::Unit
    }
}

#[cfg(test)]
mod tests {
    use super::{Group, sort};

    fn message(package: &str, name: &str, kind: &str, source: &str, test: bool) -> String {
        format!(
            r#"{{"reason":"compiler-artifact","manifest_path":"/w/{package}/Cargo.toml","target":{{"name":"{name}","kind":["{kind}"],"src_path":"/w/{package}/{source}"}},"profile":{{"test":{test}}},"executable":"/t/{name}"}}"#
        )
    }

    #[test]
    fn binaries_are_grouped_by_where_their_source_is() {
        let messages = [
            r#"{"reason":"build-script-executed"}"#.to_owned(),
            message("coil-guard", "coil-guard", "bin", "src/main.rs", false),
            message("coil-guard", "coil_guard", "lib", "src/lib.rs", true),
            message("coil-guard", "flags", "test", "tests/flags.rs", true),
            message("tests", "coil_guard_tests", "lib", "src/lib.rs", true),
            message("tests", "reset", "test", "tests/reset.rs", true),
            message("tests", "fou", "test", "vm/fou.rs", true),
            r#"{"reason":"build-finished","success":true}"#.to_owned(),
        ];
        let built = sort(&messages.join("\n")).unwrap();
        assert!(built.agent.ends_with("coil-guard"));
        let groups: Vec<_> =
            built.binaries.iter().map(|binary| (binary.name.as_str(), binary.group)).collect();
        let expected = [
            ("coil_guard", Group::Unit),
            ("flags", Group::Unit),
            ("coil_guard_tests", Group::Unit),
            ("reset", Group::Lab),
            ("fou", Group::Vm),
        ];
        assert_eq!(groups, expected);
    }

    #[test]
    fn a_build_without_the_agent_is_refused() {
        assert!(sort(r#"{"reason":"build-finished","success":true}"#).is_err());
    }
}
