//! `cargo xtask bench`: every part of the benchmarks in a process and namespaces of its own, and the virtual machine's.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, ensure};

use crate::{
    machine::is_root,
    process::{cargo, run, target_directory, workspace},
    setup, vm,
};

/// The document that `--write-docs` fills in.
const DOCUMENT: &str = "docs/performance.md";

/// The kernel of the virtual machine's part: the newer one, with TCX.
const KERNEL: &str = "6.12";

/// Seconds after which a part is ended and has failed.
const LIMIT: u32 = 240;

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Part {
    /// What the program costs per packet
    Datapath,
    /// What attaching 250 client pods costs
    Load,
    /// Packets through the lab, with and without the guard
    Throughput,
    /// From the leaving of a backend to the first packet at another
    Cutover,
    /// The agent's memory, processor time and requests, by the size of the cluster
    Agent,
    /// Traffic through FoU as the kernel makes it, with and without the guard, in a virtual machine
    Vm,
}

impl Part {
    fn name(self) -> &'static str {
        match self {
            Self::Datapath => "datapath",
            Self::Load => "load",
            Self::Throughput => "throughput",
            Self::Cutover => "cutover",
            Self::Agent => "agent",
            Self::Vm => "vm",
        }
    }
}

#[derive(clap::Args)]
pub(crate) struct Options {
    /// Only these parts [default: all, in about six minutes]
    #[arg(value_enum)]
    parts: Vec<Part>,
    /// Only see whether everything works: the figures are worth nothing
    #[arg(long)]
    quick: bool,
    /// Object file of another build of the program, to compare with in the same run (part datapath)
    #[arg(long, value_name = "FILE")]
    against: Option<PathBuf>,
    /// Put the figures of these parts into docs/performance.md
    #[arg(long, conflicts_with = "quick")]
    write_docs: bool,
}

pub(crate) fn run_verb(options: &Options) -> Result<()> {
    ensure!(
        is_root(),
        "`cargo xtask bench` makes network namespaces and loads eBPF programs, which needs root: run it as root, as in \
         `sudo -E env PATH=\"$PATH\" cargo xtask bench`"
    );
    setup::ensure_toolchain()?;
    let programs = ["--bin", "coil-guard", "--bin", "bench"];
    run(cargo()
        .args(["build", "--quiet", "--release", "-p", "coil-guard", "-p", "coil-guard-tests"])
        .args(programs))?;
    let target = target_directory()?;
    let bench = Bench { built: target.join("release"), figures: target.join("bench") };
    fs::create_dir_all(&bench.figures)
        .with_context(|| format!("cannot create {}", bench.figures.display()))?;
    let all = <Part as clap::ValueEnum>::value_variants();
    let parts = if options.parts.is_empty() { all } else { options.parts.as_slice() };
    let mut failed = Vec::new();
    for part in parts {
        // What an earlier run has left must not be taken for this one's.
        fs::remove_file(bench.json(*part)).or_else(|error| match error.kind() {
            std::io::ErrorKind::NotFound => Ok(()),
            _ => Err(error),
        })?;
        if let Err(error) = bench.run(*part, options) {
            eprintln!("bench: {}: {error:#}", part.name());
            failed.push(part.name());
        }
    }
    eprintln!("bench: the figures are in {}", bench.figures.display());
    if options.write_docs {
        ensure!(failed.is_empty(), "{DOCUMENT} is left as it was, because these parts failed: {failed:?}");
        // Whatever has been measured, so that the goals of parts that were measured before stay among them.
        let measured = all.iter().map(|part| bench.json(*part)).filter(|path| path.exists());
        run(bench.program().arg("write").arg(workspace().join(DOCUMENT)).args(measured))?;
    }
    ensure!(failed.is_empty(), "these parts failed: {}", failed.join(", "));
    Ok(())
}

/// Where everything is.
struct Bench {
    built: PathBuf,
    figures: PathBuf,
}

impl Bench {
    fn program(&self) -> Command {
        Command::new(self.built.join("bench"))
    }

    fn json(&self, part: Part) -> PathBuf {
        self.figures.join(part.name()).with_extension("json")
    }

    fn run(&self, part: Part, options: &Options) -> Result<()> {
        let json = self.json(part);
        if part == Part::Vm {
            fs::write(&json, vm::benchmark(KERNEL, options.quick)?)
                .with_context(|| format!("cannot write {}", json.display()))?;
            return run(self.program().arg("show").arg(json));
        }
        let mut command = isolated(&self.built.join("bench"));
        command.args(["run", part.name(), "--json"]).arg(json);
        command.env("COIL_GUARD_BINARY", self.built.join("coil-guard"));
        if options.quick {
            command.arg("--quick");
        }
        if let Some(other) = options.against.as_ref().filter(|_| part == Part::Datapath) {
            command.arg("--against").arg(other);
        }
        run(&mut command)
    }
}

/// A program whose processes, interfaces, mounts and pins end with it, however it ends, and that ends in time.
fn isolated(program: &Path) -> Command {
    let mut command = Command::new("timeout");
    command.args([
        "--signal=KILL",
        &LIMIT.to_string(),
        "unshare",
        "--net",
        "--mount",
        "--propagation=private",
    ]);
    command.args(["--pid", "--fork", "--kill-child", "--mount-proc", "--"]).arg(program);
    command
}
