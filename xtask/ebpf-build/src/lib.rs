//! Compiles an eBPF crate from a build script.
//!
//! Two toolchains can do it: a nightly one from rustup with the `rust-src` component, or Debian's `rustc-web`
//! linked into rustup as [`DEBIAN_TOOLCHAIN`] (a stable compiler that needs `RUSTC_BOOTSTRAP=1`). Where neither is
//! present the crate still builds, with an empty object in place of the program: unit tests then run without root and
//! without LLVM, and loading the program fails with a sentence that says what to do.

mod linker;
mod strip;
mod toolchain;

use std::{env, ffi::OsStr, fs, path::Path};

use anyhow::{Context as _, Result};
use aya_build::{Package, Toolchain};

pub use self::{
    linker::{Linker, check_pair, find_linker},
    toolchain::{DEBIAN_TOOLCHAIN, EbpfToolchain, SYSTEM_TOOLCHAIN, TOOLCHAIN_VARIABLE, find_toolchain},
};

/// What the last set-up found, in the workspace's own `target` whatever `CARGO_TARGET_DIR` says. The build scripts
/// watch it: a toolchain that arrives, changes or goes rebuilds the programs, and nothing else about the machine does
/// (PATH differs between `cargo build` and a build under another cargo).
const STAMP: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../target/ebpf-toolchain");

/// Records the tools that eBPF builds use, so that builds made with other tools, or with none, are made again.
///
/// # Errors
///
/// When the stamp file cannot be written.
pub fn record_tools() -> Result<()> {
    let found = match (find_toolchain(), find_linker()) {
        (Some(toolchain), Some(linker)) => format!("{toolchain}\n{linker}\n"),
        _ => "none\n".to_owned(),
    };
    if fs::read_to_string(STAMP).is_ok_and(|recorded| recorded == found) {
        return Ok(());
    }
    let stamp = Path::new(STAMP);
    stamp
        .parent()
        .map_or(Ok(()), fs::create_dir_all)
        .and_then(|()| fs::write(stamp, found))
        .with_context(|| format!("cannot write {STAMP}"))
}

/// Builds the binary targets `binaries` of the eBPF crate `package` at `directory` into the calling build script's `OUT_DIR`.
///
/// # Errors
///
/// When a toolchain was found and the build with it failed.
pub fn build(package: &str, directory: &str, binaries: &[&str]) -> Result<()> {
    println!("cargo:rerun-if-env-changed={TOOLCHAIN_VARIABLE}");
    println!("cargo:rerun-if-changed={STAMP}");
    // A missing stamp would rerun the build script, and all that depends on it, every time.
    if !Path::new(STAMP).exists() {
        record_tools()?;
    }
    let out = env::var_os("OUT_DIR").context("OUT_DIR is not set: call this from a build script")?;
    let skip = env::var_os("AYA_BUILD_SKIP").is_some_and(|value| value == OsStr::new("1"));
    let Some(toolchain) = find_toolchain().filter(|_| !skip && find_linker().is_some()) else {
        println!(
            "cargo:warning={package}: no eBPF toolchain found, the program is left out; run `cargo xtask setup` to get one"
        );
        return binaries.iter().try_for_each(|binary| {
            let object = Path::new(&out).join(binary);
            fs::write(&object, []).with_context(|| format!("cannot write {}", object.display()))
        });
    };
    // SAFETY: a build script's main thread, before any other thread exists. The variable reaches only the child build:
    // a stable compiler needs it for -Z build-std.
    unsafe { env::set_var("RUSTC_BOOTSTRAP", "1") };
    // The agent is built to be small. What runs for each packet is built to be fast.
    // SAFETY: as above; the variable takes the place of what the workspace's profile says, in the child build alone.
    unsafe { env::set_var("CARGO_PROFILE_RELEASE_OPT_LEVEL", "3") };
    aya_build::build_ebpf(
        [Package { name: package, root_dir: directory, ..Package::default() }],
        Toolchain::Custom(&toolchain.name),
    )?;
    binaries.iter().try_for_each(|binary| strip::strip(&Path::new(&out).join(binary)))
}
