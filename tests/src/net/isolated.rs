//! A thread with its own node: private mounts and a private network namespace.

use std::{
    env, fs,
    panic::resume_unwind,
    path::{Path, PathBuf},
    thread,
};

use anyhow::{Context as _, Result};
use nix::{
    errno::Errno,
    mount::{MsFlags, mount},
    sched::{CloneFlags, unshare},
};

use super::netlink::Netlink;

/// Set (to anything) by runs that must not skip: a lab test then fails where it cannot run.
pub const REQUIRE_LAB: &str = "COIL_GUARD_REQUIRE_LAB";

/// Where things are inside of [`isolated`]; the defaults of the agent.
#[derive(Clone, Copy, Debug)]
pub struct Paths;

impl Paths {
    /// The node's bpffs, private and empty at first.
    #[must_use]
    pub fn bpffs(self) -> &'static Path {
        Path::new("/sys/fs/bpf")
    }

    /// Where Cilium pins its maps.
    #[must_use]
    pub fn cilium_maps(self) -> &'static Path {
        Path::new("/sys/fs/bpf/tc/globals")
    }

    /// The runtime's directory of network namespaces.
    #[must_use]
    pub fn namespaces(self) -> &'static Path {
        Path::new("/run/netns")
    }

    /// Scratch files of the test: kubeconfig, sockets, logs of children.
    #[must_use]
    pub fn scratch(self) -> &'static Path {
        Path::new("/run/lab")
    }

    /// A scratch file.
    #[must_use]
    pub fn scratch_file(self, name: &str) -> PathBuf {
        self.scratch().join(name)
    }
}

/// Runs `body` on a new thread that is alone on a node of its own: `/run` is an empty tmpfs, `/sys/fs/bpf` an empty
/// bpffs, and the network namespace is the node's, with only `lo`.
///
/// Threads and processes that `body` starts are on the same node. When the thread is over and they are too, the kernel
/// removes every namespace, mount, device, pin and program in it, also after a panic or a `kill -9`.
///
/// # Errors
///
/// Without root, where mounting is forbidden, and whatever `body` returns.
///
/// # Panics
///
/// When `body` panics.
pub fn isolated<T: Send>(body: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    thread::scope(|scope| {
        let node = thread::Builder::new().name("node".to_owned()).spawn_scoped(scope, || {
            enter_private_node()?;
            body()
        });
        node.context("cannot start a thread")?.join().unwrap_or_else(|panic| resume_unwind(panic))
    })
}

/// As [`isolated`], for tests: skipped, with a printed reason, where it cannot run, unless [`REQUIRE_LAB`] is set.
///
/// # Errors
///
/// Whatever `body` returns.
///
/// # Panics
///
/// When `body` panics.
pub fn lab_test(body: impl FnOnce() -> Result<()> + Send) -> Result<()> {
    if !nix::unistd::geteuid().is_root() && env::var_os(REQUIRE_LAB).is_none() {
        eprintln!("skipped: the lab needs root for namespaces and eBPF (set {REQUIRE_LAB} to fail instead)");
        return Ok(());
    }
    isolated(body)
}

fn enter_private_node() -> Result<()> {
    unshare(CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_NEWNET).map_err(|error| match error {
        Errno::EPERM => anyhow::anyhow!("the lab needs root (CAP_SYS_ADMIN) to make namespaces"),
        error => anyhow::anyhow!("cannot make namespaces: {error}"),
    })?;
    let none: Option<&str> = None;
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)
        .context("cannot make mounts private")?;
    mount(Some("tmpfs"), "/run", Some("tmpfs"), MsFlags::empty(), Some("mode=0755"))
        .context("cannot mount a tmpfs on /run")?;
    mount(Some("bpf"), Paths.bpffs(), Some("bpf"), MsFlags::empty(), Some("mode=0700"))
        .with_context(|| format!("cannot mount a bpffs on {}", Paths.bpffs().display()))?;
    for directory in [Paths.namespaces(), Paths.scratch()] {
        fs::create_dir_all(directory).with_context(|| format!("cannot create {}", directory.display()))?;
    }
    Netlink::here()?.up("lo")
}
