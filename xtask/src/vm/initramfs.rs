//! The guest's root file system: programs of this machine with the libraries they load, the kernel's modules, the tests.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result};

use super::{
    cpio::{Archive, DATA, EXECUTABLE},
    guest::{self, Job},
    kernel::Kernel,
};
use crate::{
    libraries,
    machine::find_program,
    process::{run, succeeds},
};

/// Programs that tests may run, and the Debian packages that have them. busybox comes under its own name only: its applets would shadow the real ones.
pub(crate) const PROGRAMS: [(&str, &str); 15] = [
    ("ip", "iproute2"),
    ("tc", "iproute2"),
    ("bridge", "iproute2"),
    ("ss", "iproute2"),
    ("nstat", "iproute2"),
    ("nft", "nftables"),
    ("conntrack", "conntrack"),
    ("ethtool", "ethtool"),
    ("ping", "iputils-ping"),
    ("iperf3", "iperf3"),
    ("tcpdump", "tcpdump"),
    ("sysctl", "procps"),
    ("unshare", "util-linux"),
    ("nsenter", "util-linux"),
    ("busybox", "busybox"),
];

/// The part that is the same for every run on one kernel.
pub(crate) fn base(kernel: &Kernel) -> Result<Vec<u8>> {
    let mut archive = Archive::default();
    for directory in ["/proc", "/sys", "/dev", "/tmp", "/run", "/etc", "/root", "/var/tmp"] {
        archive.directory(Path::new(directory));
    }
    // The guest's first process has no other way to complain before it has mounted anything.
    archive.character_device(Path::new("/dev/console"), 5, 1);
    archive.file(Path::new("/etc/passwd"), DATA, b"root:x:0:0:root:/:/bin/sh\n");
    archive.file(Path::new("/etc/group"), DATA, b"root:x:0:\n");
    archive.file(Path::new("/etc/hosts"), DATA, b"127.0.0.1 localhost\n::1 localhost\n");
    archive.file(Path::new("/etc/nsswitch.conf"), DATA, b"hosts: files\n");
    // kube's TLS refuses to start without any system root, also where the API's own CA is all that it needs.
    let roots = Path::new(libraries::CA_BUNDLE);
    archive.file(roots, DATA, &read(roots)?);
    for (program, _) in PROGRAMS {
        let path = find(program)?;
        archive.file(&Path::new("/usr/bin").join(program), EXECUTABLE, &read(&path)?);
        add_libraries(&mut archive, &path)?;
    }
    let busybox = find("busybox")?;
    archive.file(Path::new("/bin/sh"), EXECUTABLE, &read(&busybox)?);
    let mut order = String::new();
    for module in &kernel.modules {
        let name = module.file_name().context("a module without a name")?;
        let place = Path::new(guest::MODULES).join(name);
        archive.file(&place, DATA, &read(module)?);
        order.push_str(&format!("{}\n", place.display()));
    }
    archive.file(Path::new(guest::MODULE_ORDER), DATA, order.as_bytes());
    Ok(archive.finish())
}

/// The part of one run: the tests, the agent, and this program, which is the guest's first process.
pub(crate) fn tests(jobs: &[Job], binaries: &[(PathBuf, String)], scratch: &Path) -> Result<Vec<u8>> {
    let mut archive = Archive::default();
    fs::create_dir_all(scratch).with_context(|| format!("cannot create {}", scratch.display()))?;
    // Not by its path: cargo may have replaced the file since this program was started from it.
    let init = scratch.join("init");
    fs::copy("/proc/self/exe", &init)
        .with_context(|| format!("cannot copy this program to {}", init.display()))?;
    let stripped = strip(&init, scratch)?;
    archive.file(Path::new("/init"), EXECUTABLE, &read(&stripped)?);
    add_libraries(&mut archive, &init)?;
    for (path, name) in binaries {
        let stripped = strip(path, scratch)?;
        archive.file(&Path::new(guest::BINARIES).join(name), EXECUTABLE, &read(&stripped)?);
        add_libraries(&mut archive, path)?;
    }
    archive.file(Path::new(guest::JOBS), DATA, &serde_json::to_vec(jobs)?);
    Ok(archive.finish())
}

/// Debug information is most of a debug build; unpacking it would cost the guest seconds.
fn strip(binary: &Path, scratch: &Path) -> Result<PathBuf> {
    let name = binary.file_name().context("a binary without a name")?;
    let stripped = scratch.join(name);
    if succeeds(Command::new("strip").arg("--strip-debug").arg("-o").arg(&stripped).arg(binary)) {
        return Ok(stripped);
    }
    run(Command::new("cp").arg(binary).arg(&stripped))?;
    Ok(stripped)
}

fn add_libraries(archive: &mut Archive, binary: &Path) -> Result<()> {
    for library in libraries::of(binary) {
        archive.file(&library, EXECUTABLE, &read(&library)?);
    }
    Ok(())
}

fn find(program: &str) -> Result<PathBuf> {
    find_program(program).with_context(|| format!("{program} is not here, and the guests need it"))
}

fn read(path: &Path) -> Result<Vec<u8>> {
    fs::read(path).with_context(|| format!("cannot read {}", path.display()))
}
