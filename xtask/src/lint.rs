//! `cargo xtask lint`: everything that is judged without running the product.

mod files;

use std::process::Command;

use anyhow::{Result, ensure};
use ebpf_build::{EbpfToolchain, find_toolchain};

use crate::{
    machine::has_program,
    process::{capture, cargo, run, succeeds, target_directory},
    setup,
};

/// The version that deny.toml is written for.
const DENY_VERSION: &str = "0.20.2";

/// The crates that build for the BPF target only.
const EBPF_CRATES: [&str; 2] = ["coil-guard-ebpf", "cilium-model"];

/// Name and body of one check.
type Check = (&'static str, fn() -> Result<()>);

/// Runs every check, also after one has failed, and fails with all that did.
pub(crate) fn run_verb() -> Result<()> {
    setup::try_toolchain()?;
    let checks: [Check; 5] = [
        ("repository", files::check),
        ("format", format),
        ("clippy", clippy),
        ("clippy, eBPF", clippy_ebpf),
        ("dependencies", dependencies),
    ];
    let mut failed = Vec::new();
    for (name, check) in checks {
        eprintln!("lint: {name}");
        if let Err(error) = check() {
            eprintln!("lint: {name}: {error:#}");
            failed.push(name);
        }
    }
    ensure!(failed.is_empty(), "lint failed: {}", failed.join(", "));
    eprintln!("lint: all {} checks passed", checks.len());
    Ok(())
}

fn format() -> Result<()> {
    run(cargo().args(["fmt", "--all", "--check"]))
}

fn clippy() -> Result<()> {
    run(cargo().args(["clippy", "--quiet", "--all-targets", "--", "-D", "warnings"]))
}

/// The eBPF crates are judged for their own target, as they are built.
fn clippy_ebpf() -> Result<()> {
    let Some(toolchain) = find_toolchain() else {
        eprintln!("lint: SKIPPED: no compiler for the BPF target; run `cargo xtask setup`");
        return Ok(());
    };
    let with_clippy = succeeds(toolchain.command("cargo").args(["clippy", "--version"]));
    if !with_clippy {
        eprintln!("lint: {toolchain} has no clippy: compiling with warnings denied instead");
    }
    for package in EBPF_CRATES {
        run(&mut ebpf_check(&toolchain, package, with_clippy)?)?;
    }
    Ok(())
}

fn ebpf_check(toolchain: &EbpfToolchain, package: &str, with_clippy: bool) -> Result<Command> {
    let mut command = toolchain.command("cargo");
    command.current_dir(crate::process::workspace());
    command.args([if with_clippy { "clippy" } else { "check" }, "--quiet", "--release", "-p", package]);
    command.args(["--target", "bpfel-unknown-none", "-Z", "build-std=core"]);
    // Apart from the host's builds: another compiler would throw away what they have cached.
    command.arg("--target-dir").arg(target_directory()?.join("ebpf-lint"));
    // What aya-build passes, so that the same code is seen.
    let mut flags = format!("--cfg=bpf_target_arch=\"{}\"", std::env::consts::ARCH);
    if with_clippy {
        command.args(["--", "-D", "warnings"]);
    } else {
        flags.push_str("\x1f-Dwarnings");
    }
    command.env("CARGO_ENCODED_RUSTFLAGS", flags).env("RUSTC_BOOTSTRAP", "1");
    // Set by the cargo that runs this; they would name the host's compiler.
    for variable in ["RUSTC", "RUSTC_WORKSPACE_WRAPPER", "RUSTUP_TOOLCHAIN", "CARGO"] {
        command.env_remove(variable);
    }
    Ok(command)
}

fn dependencies() -> Result<()> {
    let found = has_program("cargo-deny").then(|| capture(Command::new("cargo-deny").arg("--version")));
    match found {
        Some(Ok(version)) if version.trim().ends_with(DENY_VERSION) => {}
        Some(Ok(version)) => {
            eprintln!("lint: using the {} that is here; {DENY_VERSION} is what CI uses", version.trim());
        }
        Some(Err(_)) | None => {
            eprintln!("lint: building cargo-deny {DENY_VERSION} with cargo install (some minutes, once)");
            run(Command::new("cargo").args([
                "install",
                "cargo-deny",
                "--version",
                DENY_VERSION,
                "--locked",
            ]))?;
        }
    }
    // The advisory database is not fetched: a lint that fails by the day's news cannot be repeated.
    run(cargo().args(["deny", "--log-level", "warn", "check", "bans", "licenses", "sources"]))
}
