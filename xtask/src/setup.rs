//! `cargo xtask setup`: finds or installs what the eBPF build needs, and says what it does.

use std::{path::Path, process::Command};

use anyhow::{Result, bail, ensure};
use ebpf_build::{
    DEBIAN_TOOLCHAIN, EbpfToolchain, Linker, check_pair, find_linker, find_toolchain, record_tools,
};

use crate::{
    machine::{has_apt, has_program, install_packages, is_root},
    process::{run, succeeds},
};

/// The version that is known to work with the aya in Cargo.lock.
const LINKER_VERSION: &str = "0.13.0";

/// LLVM majors that this bpf-linker can be built with.
const LINKER_LLVM: std::ops::RangeInclusive<u32> = 21..=23;

/// Debian's compiler that keeps up with upstream, its cargo, the sources of `core`, and its linter.
const DEBIAN_COMPILER: [&str; 4] = ["rustc-web", "cargo-web", "rust-web-src", "rust-web-clippy"];

#[derive(clap::Args)]
pub(crate) struct Options {
    /// Only report what is there; install nothing
    #[arg(long)]
    check: bool,
}

pub(crate) fn run_verb(options: &Options) -> Result<()> {
    if options.check { report() } else { install() }
}

/// For the verbs that can do without the eBPF programs: installs what is missing where that is possible, and otherwise
/// warns and goes on.
pub(crate) fn try_toolchain() -> Result<bool> {
    match install() {
        Ok(()) => Ok(true),
        Err(error) if crate::machine::is_ci() => Err(error),
        Err(error) => {
            eprintln!(
                "warning: {error:#}\nwarning: going on without the eBPF programs: only unit tests can run"
            );
            record_tools()?;
            Ok(false)
        }
    }
}

/// For the verbs that need the eBPF programs.
pub(crate) fn ensure_toolchain() -> Result<()> {
    install()
}

fn report() -> Result<()> {
    let (toolchain, linker) = (find_toolchain(), find_linker());
    match &toolchain {
        Some(toolchain) => println!("compiler: {toolchain}"),
        None => println!("compiler: none that can build core for the BPF target"),
    }
    match &linker {
        Some(linker) => println!("linker:   {linker}"),
        None => println!("linker:   no bpf-linker on the path"),
    }
    let (Some(toolchain), Some(linker)) = (toolchain, linker) else {
        bail!("the eBPF programs cannot be built here: run `cargo xtask setup`");
    };
    check_pair(&toolchain, &linker)?;
    println!("the eBPF programs can be built here");
    Ok(())
}

fn install() -> Result<()> {
    let toolchain = match find_toolchain() {
        Some(toolchain) => toolchain,
        None => install_toolchain()?,
    };
    let linker = match find_linker() {
        Some(linker) if check_pair(&toolchain, &linker).is_ok() => linker,
        unfit => install_linker(&toolchain, unfit.as_ref())?,
    };
    eprintln!("eBPF build: {toolchain}, {linker}");
    record_tools()
}

fn install_toolchain() -> Result<EbpfToolchain> {
    eprintln!("no compiler here can build core for the BPF target");
    if has_apt() && is_root() {
        eprintln!(
            "taking Debian's (rustc-web), linked into rustup as {DEBIAN_TOOLCHAIN} where rustup is present"
        );
        install_packages(&DEBIAN_COMPILER, "the eBPF compiler")?;
        if has_program("rustup") {
            run(Command::new("rustup").args(["toolchain", "link", DEBIAN_TOOLCHAIN, "/usr"]))?;
        }
    } else if has_program("rustup") {
        eprintln!("taking rustup's nightly with rust-src");
        let install = ["toolchain", "install", "nightly", "--profile", "minimal", "--component", "rust-src"];
        if let Err(error) = run(Command::new("rustup").args(install)) {
            bail!(
                "rustup cannot bring a nightly compiler ({error:#}): run `cargo xtask setup` once as root on Debian, which \
                 takes the compiler from Debian's packages, or link a compiler that has the sources of core with `rustup \
                 toolchain link {DEBIAN_TOOLCHAIN} <its prefix>`"
            );
        }
    } else {
        bail!(
            "no rustup and no root on Debian: install rustup, or run `cargo xtask setup` once as root on Debian; unit tests \
             work without it"
        );
    }
    match find_toolchain() {
        Some(toolchain) => Ok(toolchain),
        None => bail!(
            "a compiler was installed, but it still cannot build core for the BPF target: expected the sources below \
             `$(rustc --print sysroot)/lib/rustlib/src/rust/library`; see `cargo xtask setup --check`"
        ),
    }
}

fn install_linker(toolchain: &EbpfToolchain, unfit: Option<&Linker>) -> Result<Linker> {
    match unfit {
        Some(linker) => eprintln!("{linker} does not fit {toolchain}: building another"),
        None => eprintln!(
            "no bpf-linker on the path: building {LINKER_VERSION} with cargo install (about two minutes)"
        ),
    }
    let llvm = toolchain.llvm_major;
    ensure!(
        LINKER_LLVM.contains(&llvm),
        "the compiler {toolchain} has LLVM {llvm}, but bpf-linker {LINKER_VERSION} can be built with LLVM {} to {} only: \
         choose another compiler with {}",
        LINKER_LLVM.start(),
        LINKER_LLVM.end(),
        ebpf_build::TOOLCHAIN_VARIABLE
    );
    let prefix = format!("/usr/lib/llvm-{llvm}");
    if has_apt() && is_root() {
        let (llvm_dev, polly_dev) = (format!("llvm-{llvm}-dev"), format!("libpolly-{llvm}-dev"));
        install_packages(
            &[&llvm_dev, &polly_dev, "libzstd-dev", "zlib1g-dev", "libxml2-dev"],
            "building bpf-linker",
        )?;
    }
    let mut cargo = Command::new("cargo");
    cargo.args(["install", "bpf-linker", "--version", LINKER_VERSION, "--locked", "--force"]);
    cargo.args(["--no-default-features", "--features"]).arg(format!("llvm-{llvm}"));
    if Path::new(&prefix).join("bin/llvm-config").exists() {
        cargo.env("LLVM_PREFIX", &prefix);
    } else {
        let config = format!("llvm-config-{llvm}");
        ensure!(
            has_program(&config) || succeeds(Command::new("llvm-config").arg("--version")),
            "bpf-linker needs LLVM {llvm}'s development files, as in the Debian package llvm-{llvm}-dev: install them and \
             run this again"
        );
    }
    run(&mut cargo)?;
    let Some(linker) = find_linker() else {
        bail!("cargo installed bpf-linker, but it is not on the path: put cargo's bin directory on PATH");
    };
    check_pair(toolchain, &linker)?;
    Ok(linker)
}
