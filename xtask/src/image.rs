//! `cargo xtask image`: the container image, from scratch, with the agent and the libraries it loads.

use std::{
    env, fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, ensure};

use crate::{
    libraries,
    machine::{install_programs, is_root},
    process::{capture, cargo, run, target_directory, workspace},
    setup,
};

/// Where the agent is in the image.
const BINARY: &str = "/usr/bin/coil-guard";

/// Largest image, in bytes, before compression.
const MAX_SIZE: u64 = 40_000_000;

#[derive(clap::Args)]
pub(crate) struct Options {
    /// Name and tag of the image inside the archive [default: coil-guard:<version>]
    #[arg(long)]
    tag: Option<String>,
    /// Where to write the OCI archive [default: image/coil-guard.oci.tar below the target directory]
    #[arg(long)]
    output: Option<PathBuf>,
    /// Only lay out the root file system, below the target directory in image/rootfs; the Dockerfile does that
    #[arg(long)]
    rootfs_only: bool,
}

pub(crate) fn run_verb(options: &Options) -> Result<()> {
    setup::ensure_toolchain()?;
    run(cargo().args(["build", "--release", "-p", "coil-guard", "--bin", "coil-guard"]))?;
    let target = target_directory()?;
    let directory = target.join("image");
    let rootfs = directory.join("rootfs");
    lay_out(&target.join("release/coil-guard"), &rootfs)?;
    let size = size_of(&rootfs)?;
    ensure!(
        size <= MAX_SIZE,
        "the image holds {size} bytes, more than {MAX_SIZE}: see what grew in {}",
        rootfs.display()
    );
    eprintln!("image: {:.1} MB in {}", size as f64 / 1e6, rootfs.display());
    if options.rootfs_only {
        return Ok(());
    }
    ensure!(
        is_root(),
        "`cargo xtask image` needs root for buildah; `--rootfs-only` and the Dockerfile do not"
    );
    install_programs(&[("buildah", "buildah")], "the image")?;
    let version = env!("CARGO_PKG_VERSION");
    let tag = options.tag.clone().unwrap_or_else(|| format!("coil-guard:{version}"));
    let archive = options.output.clone().unwrap_or_else(|| directory.join("coil-guard.oci.tar"));
    Builder { storage: directory.join("storage") }.build(&rootfs, &tag, version, &archive)
}

/// Copies the agent, what it loads, and the little that the C library reads, into an empty directory.
fn lay_out(binary: &Path, rootfs: &Path) -> Result<()> {
    if rootfs.exists() {
        fs::remove_dir_all(rootfs).with_context(|| format!("cannot empty {}", rootfs.display()))?;
    }
    let place = |inside: &Path, content: &[u8], mode: u32| -> Result<()> {
        let path = rootfs.join(inside.strip_prefix("/").unwrap_or(inside));
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent)?;
        }
        fs::write(&path, content).with_context(|| format!("cannot write {}", path.display()))?;
        fs::set_permissions(&path, fs::Permissions::from_mode(mode))?;
        Ok(())
    };
    let read = |path: &Path| fs::read(path).with_context(|| format!("cannot read {}", path.display()));
    place(Path::new(BINARY), &read(binary)?, 0o755)?;
    for library in libraries::of(binary) {
        place(&library, &read(&library)?, 0o755)?;
    }
    // The agent talks to the API server only, whose CA it is given; but its TLS does not start without system roots.
    place(Path::new(libraries::CA_BUNDLE), &read(Path::new(libraries::CA_BUNDLE))?, 0o644)?;
    // Without these the C library asks no DNS server, and `ps` and logs show a number for the user.
    place(Path::new("/etc/nsswitch.conf"), b"hosts: files dns\n", 0o644)?;
    place(Path::new("/etc/passwd"), b"root:x:0:0:root:/:/sbin/nologin\n", 0o644)?;
    place(Path::new("/etc/group"), b"root:x:0:\n", 0o644)
}

fn size_of(directory: &Path) -> Result<u64> {
    let mut size = 0;
    for entry in fs::read_dir(directory).with_context(|| format!("cannot list {}", directory.display()))? {
        let entry = entry?;
        let metadata = entry.metadata()?;
        size += if metadata.is_dir() { size_of(&entry.path())? } else { metadata.len() };
    }
    Ok(size)
}

/// buildah with storage of its own, so that nothing is left in the machine's.
struct Builder {
    storage: PathBuf,
}

impl Builder {
    fn buildah(&self) -> Command {
        let mut command = Command::new("buildah");
        command.arg("--root").arg(self.storage.join("root")).arg("--runroot").arg(self.storage.join("run"));
        // Works on every file system and needs no kernel module.
        command.args(["--storage-driver", "vfs"]);
        command
    }

    fn build(&self, rootfs: &Path, tag: &str, version: &str, archive: &Path) -> Result<()> {
        let container = capture(self.buildah().args(["from", "scratch"]))?.trim().to_owned();
        let outcome = self.commit(&container, rootfs, tag, version, archive);
        // The storage is scratch: the archive is what counts.
        run(self.buildah().args(["rm", &container]))?;
        outcome
    }

    fn commit(&self, container: &str, rootfs: &Path, tag: &str, version: &str, archive: &Path) -> Result<()> {
        run(self.buildah().args(["copy", "--quiet", container]).arg(rootfs).arg("/"))?;
        let label = |name: &str, value: &str| format!("org.opencontainers.image.{name}={value}");
        run(self
            .buildah()
            .args(["config", "--entrypoint", &format!("[\"{BINARY}\"]"), "--cmd", "run"])
            .args(["--label", &label("title", "coil-guard"), "--label", &label("version", version)])
            .args(["--label", &label("licenses", "Apache-2.0 OR MIT"), container]))?;
        // Seen from inside the image, before it is packed: whatever is missing shows here.
        let mounted = capture(self.buildah().args(["mount", container]))?;
        let started = try_out(Path::new(mounted.trim()), version);
        run(self.buildah().args(["umount", container]))?;
        started?;
        run(self.buildah().args(["commit", "--quiet", "--timestamp", &timestamp(), container, tag]))?;
        if archive.exists() {
            fs::remove_file(archive)?;
        }
        run(self.buildah().args([
            "push",
            "--quiet",
            tag,
            &format!("oci-archive:{}:{tag}", archive.display()),
        ]))?;
        run(self.buildah().args(["rmi", tag]))?;
        let size = fs::metadata(archive)?.len();
        eprintln!("image: {tag}, {:.1} MB compressed, in {}", size as f64 / 1e6, archive.display());
        Ok(())
    }
}

/// Runs the agent with nothing but the image's files.
fn try_out(root: &Path, version: &str) -> Result<()> {
    let inside = |argument: &str| capture(chroot(root).args([BINARY, argument]));
    let printed = inside("--version")?;
    ensure!(
        printed.trim().ends_with(version),
        "the agent in the image should call itself {version}, but printed {printed:?}"
    );
    let help = inside("--help")?;
    ensure!(help.contains("Usage"), "the agent in the image printed no help: {help:?}");
    ensure_tls(root)?;
    eprintln!("image: {} runs from the image's files alone", printed.trim());
    Ok(())
}

/// Runs what follows inside of `root`, with nothing in the environment but the path on which chroot is found.
fn chroot(root: &Path) -> Command {
    let mut command = Command::new("chroot");
    command.env_clear().env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").arg(root);
    command
}

/// Lets the agent make its client for an API server that is not there: it must get as far as the connection.
fn ensure_tls(root: &Path) -> Result<()> {
    const KUBECONFIG: &str = "/probe.kubeconfig";
    let probe = root.join(KUBECONFIG.trim_start_matches('/'));
    fs::write(
        &probe,
        r#"{"apiVersion":"v1","kind":"Config","current-context":"c",
            "contexts":[{"name":"c","context":{"cluster":"c","user":"u"}}],"users":[{"name":"u","user":{}}],
            "clusters":[{"name":"c","cluster":{"server":"https://127.0.0.1:1"}}]}"#,
    )?;
    let output =
        chroot(root).args([BINARY, "check", "--node-name", "probe", "--kubeconfig", KUBECONFIG]).output();
    fs::remove_file(&probe)?;
    let output = output.context("cannot run the agent in the image")?;
    let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    ensure!(
        said.contains("127.0.0.1:1") || said.to_lowercase().contains("connect"),
        "the agent in the image should say that it cannot connect to https://127.0.0.1:1, but said: {said}"
    );
    Ok(())
}

/// The same sources make the same image: seconds since 1970 of the last commit, or what SOURCE_DATE_EPOCH says.
fn timestamp() -> String {
    env::var("SOURCE_DATE_EPOCH").unwrap_or_else(|_| {
        capture(Command::new("git").current_dir(workspace()).args(["log", "-1", "--format=%ct"]))
            .map_or_else(|_| "0".to_owned(), |seconds| seconds.trim().to_owned())
    })
}
