//! The node: kernel, bpffs, program, namespaces.

use std::path::Path;

use nix::sys::{
    statfs::{BPF_FS_MAGIC, statfs},
    utsname::uname,
};

use super::Finding;
use crate::datapath::{self, AttachKind, Options};

/// The program's compare-and-exchange needs BPF instruction set v3.
const OLDEST_KERNEL: (u32, u32) = (5, 12);
/// TCX.
const TCX_KERNEL: (u32, u32) = (6, 6);

pub(super) fn check(options: &Options) -> Vec<Finding> {
    let release = uname().map(|name| name.release().to_string_lossy().into_owned()).unwrap_or_default();
    let mut findings = vec![kernel(&release, options.attach), bpffs(&options.pin_directory)];
    findings.push(program());
    findings.push(namespaces(&options.namespace_directory));
    findings
}

fn version(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

/// What a kernel's release says.
pub(super) fn kernel(release: &str, attach: AttachKind) -> Finding {
    const ID: &str = "kernel";
    let Some(version) = version(release) else {
        return Finding::warning(
            ID,
            format!("the kernel's release {release:?} is not understood"),
            "Whether it is new enough cannot be told by it.",
            "See whether the program loads, below.",
        );
    };
    if version < OLDEST_KERNEL {
        return Finding::cannot(
            ID,
            format!("Linux {release}"),
            "The program needs Linux 5.12 or later (atomic compare-and-exchange in BPF).",
            "Upgrade the node's kernel.",
        );
    }
    if version >= TCX_KERNEL {
        return Finding::good(
            ID,
            format!("Linux {release}, with TCX"),
            "Programs are attached by TCX links.",
        );
    }
    if attach == AttachKind::Tcx {
        return Finding::cannot(
            ID,
            format!("Linux {release}, without TCX"),
            "--attach tcx needs Linux 6.6 or later.",
            "Use --attach auto or --attach clsact, or upgrade the node's kernel.",
        );
    }
    Finding::good(ID, format!("Linux {release}, without TCX"), "Programs are attached by clsact filters.")
}

fn bpffs(directory: &Path) -> Finding {
    const ID: &str = "bpffs";
    let nearest = directory.ancestors().find(|path| path.exists()).unwrap_or(Path::new("/"));
    match statfs(nearest) {
        Ok(stat) if stat.filesystem_type() == BPF_FS_MAGIC => Finding::good(
            ID,
            format!("{} is on a bpf file system", directory.display()),
            "Pins outlive the agent.",
        ),
        Ok(_) => Finding::cannot(
            ID,
            format!("{} is not on a bpf file system", directory.display()),
            "Programs and maps cannot be pinned, and would go with the agent.",
            "Mount one (mount -t bpf bpf /sys/fs/bpf), or mount the host's /sys/fs/bpf into the container, or name \
             another directory with --pin-dir.",
        ),
        Err(errno) => Finding::cannot(
            ID,
            format!("{} cannot be looked at: {errno}", nearest.display()),
            "Programs and maps cannot be pinned.",
            "See the rights and the mounts of this container.",
        ),
    }
}

fn program() -> Finding {
    const ID: &str = "program";
    match datapath::try_load() {
        Ok(instructions) => Finding::good(
            ID,
            format!("the kernel accepts the program ({instructions} instructions verified)"),
            "The kernel has every BPF feature that it needs.",
        ),
        Err(error) => Finding::cannot(
            ID,
            error.to_string(),
            "The program cannot be loaded here.",
            "It needs root with CAP_SYS_ADMIN (or CAP_BPF, CAP_PERFMON and CAP_NET_ADMIN) and a kernel with BPF, its JIT \
             and ring buffers.",
        ),
    }
}

fn namespaces(directory: &Path) -> Finding {
    const ID: &str = "namespaces";
    match datapath::count_namespaces(directory) {
        Ok(0) => Finding::warning(
            ID,
            format!("no network namespace of a pod in {}", directory.display()),
            "Pods are found by the namespace that holds their address; either no pod runs on this node, or the directory is \
             another one.",
            "Name the runtime's directory with --netns-dir, and mount it with HostToContainer propagation.",
        ),
        Ok(number) => Finding::good(
            ID,
            format!("{number} network namespaces in {}", directory.display()),
            "Pods are found by the namespace that holds their address.",
        ),
        Err(error) => Finding::cannot(
            ID,
            error,
            "No pod can be found.",
            "Name the runtime's directory with --netns-dir, and mount it with HostToContainer propagation.",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::Level;

    #[test]
    fn a_kernel_that_is_too_old_is_told_by_its_release() {
        for (release, attach, level) in [
            ("5.10.0-30-amd64", AttachKind::Auto, Level::CannotWork),
            ("5.12.1", AttachKind::Auto, Level::Good),
            ("6.1.0-40-cloud-amd64", AttachKind::Auto, Level::Good),
            ("6.1.0-40-cloud-amd64", AttachKind::Tcx, Level::CannotWork),
            ("6.12.117+deb13", AttachKind::Tcx, Level::Good),
            ("unknown", AttachKind::Auto, Level::Warning),
        ] {
            assert_eq!(kernel(release, attach).level, level, "{release} {attach:?}");
        }
    }

    #[test]
    fn a_directory_that_is_not_on_a_bpffs_says_how_to_mount_one() {
        let directory = tempfile::tempdir().unwrap();
        let finding = bpffs(&directory.path().join("coil-guard"));
        assert_eq!(finding.level, Level::CannotWork);
        assert!(finding.action.contains("mount -t bpf"), "{}", finding.action);
    }
}
