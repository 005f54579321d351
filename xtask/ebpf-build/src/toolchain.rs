//! Finding a compiler that can build `core` for the BPF target.

use std::{env, fmt, path::Path, process::Command};

/// Name under which `cargo xtask setup` links Debian's compiler into rustup.
pub const DEBIAN_TOOLCHAIN: &str = "coil-guard-bpf";

/// Stands for the compiler on the path, on a machine without rustup.
pub const SYSTEM_TOOLCHAIN: &str = "system";

/// Overrides the toolchain that compiles the eBPF crates.
pub const TOOLCHAIN_VARIABLE: &str = "COIL_GUARD_EBPF_TOOLCHAIN";

/// The compiler that will build the eBPF crates.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EbpfToolchain {
    /// The name that `rustup run` takes, or [`SYSTEM_TOOLCHAIN`].
    pub name: String,
    /// First line of `rustc -V`.
    pub version: String,
    /// LLVM major version of its rustc; bpf-linker's must be at least this.
    pub llvm_major: u32,
}

impl EbpfToolchain {
    /// A command that runs `program` (`rustc`, `cargo`) of this toolchain.
    #[must_use]
    pub fn command(&self, program: &str) -> Command {
        command(&self.name, program)
    }
}

impl fmt::Display for EbpfToolchain {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{} ({}, LLVM {})", self.name, self.version, self.llvm_major)
    }
}

/// Finds a toolchain that can build `core` for the BPF target, or `None`.
#[must_use]
pub fn find_toolchain() -> Option<EbpfToolchain> {
    if let Ok(name) = env::var(TOOLCHAIN_VARIABLE) {
        return usable_toolchain(&name);
    }
    if !has_rustup() {
        return usable_toolchain(SYSTEM_TOOLCHAIN);
    }
    [DEBIAN_TOOLCHAIN, "nightly"].iter().find_map(|name| usable_toolchain(name))
}

fn has_rustup() -> bool {
    Command::new("rustup").arg("--version").output().is_ok_and(|output| output.status.success())
}

fn command(toolchain: &str, program: &str) -> Command {
    if toolchain == SYSTEM_TOOLCHAIN {
        return Command::new(program);
    }
    let mut command = Command::new("rustup");
    command.args(["run", toolchain, program]);
    command
}

fn usable_toolchain(name: &str) -> Option<EbpfToolchain> {
    let run = |args: &[&str]| {
        let output = command(name, "rustc").args(args).output().ok()?;
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
    };
    let sysroot = run(&["--print", "sysroot"])?;
    if !Path::new(sysroot.trim()).join("lib/rustlib/src/rust/library/core/src/lib.rs").exists() {
        return None;
    }
    let verbose = run(&["-vV"])?;
    Some(EbpfToolchain {
        name: name.to_owned(),
        version: verbose.lines().next()?.to_owned(),
        llvm_major: parse_llvm_major(&verbose)?,
    })
}

/// Reads the LLVM major version out of `rustc -vV`.
#[must_use]
pub(crate) fn parse_llvm_major(version: &str) -> Option<u32> {
    version.lines().find_map(|line| line.strip_prefix("LLVM version: "))?.split('.').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::parse_llvm_major;

    #[test]
    fn llvm_major_is_read_from_the_compilers_version() {
        assert_eq!(parse_llvm_major("rustc 1.96.0\nLLVM version: 22.1.8\n"), Some(22));
        assert_eq!(parse_llvm_major("rustc 1.96.0\n"), None);
    }
}
