//! What this machine is and has, and installing Debian's packages where that is possible.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Result, ensure};

use crate::process::{capture, run};

/// Whether this process may do what only root may.
pub(crate) fn is_root() -> bool {
    nix::unistd::geteuid().is_root()
}

/// Whether a missing prerequisite must fail the run instead of skipping tests.
pub(crate) fn is_ci() -> bool {
    env::var_os("CI").is_some_and(|value| value == "true" || value == "1")
}

/// Whether Debian's package manager is here.
pub(crate) fn has_apt() -> bool {
    Path::new("/usr/bin/apt-get").exists()
}

/// Whether `program` is where programs are.
pub(crate) fn has_program(program: &str) -> bool {
    find_program(program).is_some()
}

/// Where `program` is: on the path, or where a user's path does not lead.
pub(crate) fn find_program(program: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let system = ["/usr/sbin", "/sbin"].map(PathBuf::from);
    env::split_paths(&path).chain(system).map(|dir| dir.join(program)).find(|file| file.is_file())
}

/// Installs the Debian packages of those programs that are not here. A program that came by another way is as good.
pub(crate) fn install_programs(programs: &[(&str, &str)], what_for: &str) -> Result<()> {
    let mut packages: Vec<&str> =
        programs.iter().filter(|(program, _)| !has_program(program)).map(|(_, package)| *package).collect();
    packages.dedup();
    if packages.is_empty() { Ok(()) } else { install_packages(&packages, what_for) }
}

/// Those of `packages` that are not installed.
fn missing_packages<'a>(packages: &[&'a str]) -> Vec<&'a str> {
    let installed = |name: &&str| {
        capture(Command::new("dpkg-query").args(["-W", "-f=${db:Status-Status}", name]))
            .is_ok_and(|s| s == "installed")
    };
    packages.iter().copied().filter(|name| !installed(name)).collect()
}

/// Installs those of Debian's `packages` that are missing; `what_for` completes "needed for …".
pub(crate) fn install_packages(packages: &[&str], what_for: &str) -> Result<()> {
    let missing = missing_packages(packages);
    if missing.is_empty() {
        return Ok(());
    }
    ensure!(
        has_apt() && is_root(),
        "{what_for} needs the Debian packages {}: install them, or run this as root on Debian",
        missing.join(" ")
    );
    eprintln!("{what_for}: installing {}", missing.join(" "));
    update_package_lists()?;
    run(apt().args(["install", "-y", "-q", "--no-install-recommends"]).args(&missing))
}

/// Refreshes the package lists once in the life of this process.
pub(crate) fn update_package_lists() -> Result<()> {
    static DONE: std::sync::OnceLock<()> = std::sync::OnceLock::new();
    if DONE.set(()).is_ok() {
        run(apt().args(["update", "-q"]))?;
    }
    Ok(())
}

fn apt() -> Command {
    let mut command = Command::new("apt-get");
    command.env("DEBIAN_FRONTEND", "noninteractive");
    command
}

/// Where `cargo install` puts binaries.
fn cargo_bin() -> Option<PathBuf> {
    let home = env::var_os("CARGO_HOME")
        .map(PathBuf::from)
        .or_else(|| env::var_os("HOME").map(|home| PathBuf::from(home).join(".cargo")))?;
    Some(home.join("bin"))
}

/// Makes what `cargo install` brings reachable by this process and its children.
pub(crate) fn put_cargo_bin_on_path() {
    let Some(bin) = cargo_bin() else { return };
    let path = env::var_os("PATH").unwrap_or_default();
    if env::split_paths(&path).any(|dir| dir == bin) {
        return;
    }
    let dirs = env::split_paths(&path).chain([bin]);
    if let Ok(joined) = env::join_paths(dirs) {
        // SAFETY: called first in main, before any other thread exists.
        unsafe { env::set_var("PATH", joined) };
    }
}

/// The cores that this process may use.
pub(crate) fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Whether the processor has hardware virtualisation that a guest can use. `/dev/kvm` alone says nothing: where the
/// processor shows neither flag, an unmodified kernel runs under it far slower than under software emulation.
pub(crate) fn has_hardware_virtualisation() -> bool {
    let flags = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    Path::new("/dev/kvm").exists() && flags.split_whitespace().any(|flag| flag == "vmx" || flag == "svm")
}
