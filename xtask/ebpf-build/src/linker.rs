//! Finding bpf-linker, and telling whether its LLVM can read what the compiler writes.

use std::{
    env, fmt, fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, bail, ensure};

use crate::EbpfToolchain;

/// The bpf-linker that eBPF builds use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Linker {
    /// Where it is.
    pub path: PathBuf,
    /// Its own version, as in `0.13.0`.
    pub version: String,
    /// Major version of the LLVM inside; `None` where it is linked statically and cargo has no record of its features.
    pub llvm_major: Option<u32>,
}

impl fmt::Display for Linker {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "bpf-linker {} at {} (LLVM ", self.version, self.path.display())?;
        match self.llvm_major {
            Some(major) => write!(formatter, "{major})"),
            None => write!(formatter, "linked statically, version unknown)"),
        }
    }
}

/// Finds `bpf-linker` on the path, or `None`.
#[must_use]
pub fn find_linker() -> Option<Linker> {
    let path = env::split_paths(&env::var_os("PATH")?)
        .map(|dir| dir.join("bpf-linker"))
        .find(|path| path.is_file())?;
    let output =
        Command::new(&path).arg("--version").output().ok().filter(|output| output.status.success())?;
    let version = String::from_utf8_lossy(&output.stdout).trim().trim_start_matches("bpf-linker ").to_owned();
    let llvm_major = shared_llvm_major(&path).or_else(|| recorded_llvm_major(&path));
    Some(Linker { path, version, llvm_major })
}

/// The linker does not print its LLVM version; the library that it loads carries it in its name.
fn shared_llvm_major(path: &Path) -> Option<u32> {
    let output = Command::new("ldd").arg(path).output().ok()?;
    parse_shared_llvm(&String::from_utf8_lossy(&output.stdout))
}

fn parse_shared_llvm(ldd: &str) -> Option<u32> {
    // Both `libLLVM.so.22.1` and the older `libLLVM-17.so.1` are in use.
    let name = ldd.lines().find_map(|line| line.trim_start().strip_prefix("libLLVM"))?;
    let digits = name.trim_start_matches(".so.").trim_start_matches('-');
    digits.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
}

/// Cargo remembers the features of what it installed: `llvm-22` among them.
fn recorded_llvm_major(path: &Path) -> Option<u32> {
    let record = fs::read_to_string(path.parent()?.parent()?.join(".crates2.json")).ok()?;
    let entry = record.split("\"bpf-linker ").nth(1)?;
    let feature = entry.split("\"llvm-").nth(1)?;
    feature.split('"').next()?.parse().ok()
}

/// Checks that `linker` can read the bitcode of `toolchain`, by version where it is known and by linking a function.
///
/// # Errors
///
/// When it cannot, with what was found and what to install.
pub fn check_pair(toolchain: &EbpfToolchain, linker: &Linker) -> Result<()> {
    if let Some(found) = linker.llvm_major
        && found < toolchain.llvm_major
    {
        bail!(
            "bpf-linker's LLVM ({found}) is older than that of the compiler {} ({}), so it cannot read the compiler's \
             bitcode: install a bpf-linker with LLVM {} or later, as in `LLVM_PREFIX=/usr/lib/llvm-{major} cargo \
             install bpf-linker --locked --force --no-default-features --features llvm-{major}`",
            toolchain.name,
            toolchain.llvm_major,
            toolchain.llvm_major,
            major = toolchain.llvm_major,
        );
    }
    let directory = env::temp_dir().join(format!("coil-guard-link-probe-{}", std::process::id()));
    fs::create_dir_all(&directory).with_context(|| format!("cannot make {}", directory.display()))?;
    let outcome = link_one_function(toolchain, linker, &directory);
    let _unneeded = fs::remove_dir_all(&directory);
    outcome
}

fn link_one_function(toolchain: &EbpfToolchain, linker: &Linker, directory: &Path) -> Result<()> {
    let [source, bitcode, object] = ["probe.rs", "probe.bc", "probe.o"].map(|name| directory.join(name));
    fs::write(
        &source,
        "#![no_std]\n#[unsafe(no_mangle)]\npub extern \"C\" fn probe(a: u64) -> u64 { a + 1 }\n",
    )
    .with_context(|| format!("cannot write {}", source.display()))?;
    let run = |command: &mut Command| -> Result<()> {
        let output = command.output().with_context(|| format!("cannot run {command:?}"))?;
        ensure!(
            output.status.success(),
            "{command:?} failed, so {toolchain} and {linker} do not fit each other: {}",
            String::from_utf8_lossy(&output.stderr).trim()
        );
        Ok(())
    };
    run(toolchain
        .command("rustc")
        .args([
            "--edition",
            "2024",
            "--crate-type",
            "lib",
            "-O",
            "-C",
            "panic=abort",
            "--emit",
            "llvm-bc",
            "-o",
        ])
        .args([&bitcode, &source]))?;
    run(Command::new(&linker.path)
        .args(["--target", "bpfel-unknown-none", "--export", "probe", "-o"])
        .args([&object, &bitcode]))
}

#[cfg(test)]
mod tests {
    use super::parse_shared_llvm;

    #[test]
    fn llvm_major_is_read_from_the_library_name() {
        let now = "\tlinux-vdso.so.1\n\tlibLLVM.so.22.1 => /usr/lib/llvm-22/lib/libLLVM.so.22.1 (0x1)\n";
        let before = "\tlibLLVM-17.so.1 => /usr/lib/x86_64-linux-gnu/libLLVM-17.so.1 (0x1)\n";
        assert_eq!(parse_shared_llvm(now), Some(22));
        assert_eq!(parse_shared_llvm(before), Some(17));
        assert_eq!(parse_shared_llvm("\tlibc.so.6 => /lib/libc.so.6\n"), None);
    }
}
