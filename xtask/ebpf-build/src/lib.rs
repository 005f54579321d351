//! Compiles an eBPF crate from a build script.
//!
//! Two toolchains can do it: a nightly one from rustup with the `rust-src` component, or Debian's `rustc-web`
//! linked into rustup as [`DEBIAN_TOOLCHAIN`] (a stable compiler that needs `RUSTC_BOOTSTRAP=1`). Where neither is
//! present the crate still builds, with an empty object in place of the program: unit tests then run without root and
//! without LLVM, and loading the program fails with a sentence that says what to do.

use std::{env, ffi::OsStr, path::Path, process::Command};

use anyhow::{Context as _, Result};
use aya_build::{Package, Toolchain};

/// Name under which `cargo xtask setup` links Debian's compiler into rustup.
pub const DEBIAN_TOOLCHAIN: &str = "coil-guard-bpf";

/// Overrides the toolchain that compiles the eBPF crates.
pub const TOOLCHAIN_VARIABLE: &str = "COIL_GUARD_EBPF_TOOLCHAIN";

/// The compiler that will build the eBPF crates.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EbpfToolchain {
    /// The name that `rustup run` takes.
    pub name: String,
    /// LLVM major version of its rustc; bpf-linker's must be at least this.
    pub llvm_major: u32,
}

/// Finds a toolchain that can build `core` for the BPF target, or `None`.
#[must_use]
pub fn find_toolchain() -> Option<EbpfToolchain> {
    if let Ok(name) = env::var(TOOLCHAIN_VARIABLE) {
        return usable_toolchain(&name);
    }
    [DEBIAN_TOOLCHAIN, "nightly"].iter().find_map(|name| usable_toolchain(name))
}

fn usable_toolchain(name: &str) -> Option<EbpfToolchain> {
    let run = |args: &[&str]| {
        let output = Command::new("rustup").args(["run", name, "rustc"]).args(args).output().ok()?;
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
    };
    let sysroot = run(&["--print", "sysroot"])?;
    if !Path::new(sysroot.trim()).join("lib/rustlib/src/rust/library/core/src/lib.rs").exists() {
        return None;
    }
    let llvm_major = parse_llvm_major(&run(&["-vV"])?)?;
    Some(EbpfToolchain { name: name.to_owned(), llvm_major })
}

fn parse_llvm_major(version: &str) -> Option<u32> {
    version.lines().find_map(|line| line.strip_prefix("LLVM version: "))?.split('.').next()?.parse().ok()
}

/// Whether `bpf-linker` is on the path.
#[must_use]
pub fn has_linker() -> bool {
    Command::new("bpf-linker").arg("--version").output().is_ok_and(|output| output.status.success())
}

/// Builds the binary target `binary` of the eBPF crate `package` at `directory` into the calling build script's `OUT_DIR`.
///
/// # Errors
///
/// When a toolchain was found and the build with it failed.
pub fn build(package: &str, directory: &str, binary: &str) -> Result<()> {
    println!("cargo:rerun-if-env-changed={TOOLCHAIN_VARIABLE}");
    println!("cargo:rerun-if-env-changed=PATH");
    let out = env::var_os("OUT_DIR").context("OUT_DIR is not set: call this from a build script")?;
    let object = Path::new(&out).join(binary);
    let skip = env::var_os("AYA_BUILD_SKIP").is_some_and(|value| value == OsStr::new("1"));
    let Some(toolchain) = find_toolchain().filter(|_| !skip && has_linker()) else {
        println!(
            "cargo:warning={package}: no eBPF toolchain found, the program is left out; run `cargo xtask setup` to get one"
        );
        std::fs::write(&object, []).with_context(|| format!("cannot write {}", object.display()))?;
        return Ok(());
    };
    // SAFETY: a build script's main thread, before any other thread exists. The variable reaches only the child build:
    // a stable compiler needs it for -Z build-std.
    unsafe { env::set_var("RUSTC_BOOTSTRAP", "1") };
    aya_build::build_ebpf(
        [Package { name: package, root_dir: directory, ..Package::default() }],
        Toolchain::Custom(&toolchain.name),
    )
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
