//! `cargo xtask vm`: tests in small guests whose kernels make and receive the FoU packets themselves.

mod bzimage;
mod cpio;
pub(crate) mod guest;
mod initramfs;
mod kernel;
mod modules;
mod qemu;

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};

use self::guest::{Event, Job};
use crate::{
    machine::install_programs,
    process::target_directory,
    setup,
    test::{self, Outcome, Run, Status, TestBinary},
};

/// What fetches, unpacks and runs the guests' kernels, and the Debian packages that have it.
const TOOLS: [(&str, &str); 9] = [
    ("qemu-system-x86_64", "qemu-system-x86"),
    ("strip", "binutils"),
    ("depmod", "kmod"),
    ("dpkg", "dpkg"),
    ("apt-cache", "apt"),
    ("gzip", "gzip"),
    ("lz4", "lz4"),
    ("xz", "xz-utils"),
    ("zstd", "zstd"),
];

/// Limit for the boot of a guest, on a machine that does other things too.
const BOOT_LIMIT: Duration = Duration::from_secs(120);

/// Limit for one test in a guest.
const TEST_LIMIT: Duration = Duration::from_secs(240);

#[derive(clap::Args)]
pub(crate) struct Options {
    /// Kernel series to boot; may be repeated [default: all]
    #[arg(long, value_parser = kernel::SERIES)]
    kernel: Vec<String>,
    /// Run this shell command in the guest instead of tests, and show what it prints
    #[arg(long, conflicts_with = "tests")]
    command: Option<String>,
    /// Run only the tests whose names contain one of these
    tests: Vec<String>,
}

pub(crate) fn run_verb(options: &Options) -> Result<()> {
    setup::ensure_toolchain()?;
    let series: Vec<&str> = if options.kernel.is_empty() {
        kernel::SERIES.to_vec()
    } else {
        options.kernel.iter().map(String::as_str).collect()
    };
    if let Some(command) = &options.command {
        return run_command(&series, command);
    }
    let built = test::build_for_guests()?;
    let binaries: Vec<&TestBinary> = built.binaries.iter().filter(|b| b.group == test::Group::Vm).collect();
    let wants = |name: &str| options.tests.is_empty() || options.tests.iter().any(|test| name.contains(test));
    let outcomes = run_on(&series, &built.agent, &binaries, wants)?;
    test::conclude(&outcomes)
}

/// The virtual machines' part of `cargo xtask test`.
pub(crate) fn run_group(run: &Run, binaries: &[&TestBinary]) -> Result<Vec<Outcome>> {
    run_on(&kernel::SERIES, &run.agent, binaries, |name| run.wants(name))
}

fn run_on(
    series: &[&str],
    agent: &Path,
    binaries: &[&TestBinary],
    wants: impl Fn(&str) -> bool,
) -> Result<Vec<Outcome>> {
    let mut outcomes = Vec::new();
    for series in series {
        let mut jobs = Vec::new();
        for binary in binaries {
            for name in binary.list()? {
                let full_name = format!("{}::{name} [{series}]", binary.name);
                if wants(&full_name) {
                    jobs.push(job(binary, &name, full_name, series));
                }
            }
        }
        if jobs.is_empty() {
            continue;
        }
        let mut carried: Vec<(PathBuf, String)> =
            binaries.iter().map(|binary| (binary.path.clone(), binary.name.clone())).collect();
        carried.push((agent.to_owned(), "coil-guard".to_owned()));
        outcomes.append(&mut run_jobs_twice_if_they_fail(series, jobs, &carried)?);
    }
    Ok(outcomes)
}

fn job(binary: &TestBinary, test: &str, name: String, series: &str) -> Job {
    let program = format!("{}/{}", guest::BINARIES, binary.name);
    let arguments = ["--exact", test, "--nocapture", "--test-threads=1"];
    let agent = format!("{}/coil-guard", guest::BINARIES);
    Job {
        name,
        command: [program.as_str()].iter().chain(&arguments).map(|&word| word.to_owned()).collect(),
        environment: vec![
            ("COIL_GUARD_BINARY".to_owned(), agent),
            ("COIL_GUARD_REQUIRE_LAB".to_owned(), "1".to_owned()),
            ("COIL_GUARD_PATIENCE".to_owned(), "120".to_owned()),
            ("COIL_GUARD_VM_KERNEL".to_owned(), series.to_owned()),
        ],
        limit: TEST_LIMIT.as_secs(),
    }
}

/// Jobs that failed have one more try in a fresh guest, told loudly: an emulated guest on a busy machine misses deadlines,
/// and a test that fails twice has found something.
fn run_jobs_twice_if_they_fail(
    series: &str,
    jobs: Vec<Job>,
    carried: &[(PathBuf, String)],
) -> Result<Vec<Outcome>> {
    let mut outcomes = run_jobs(series, &jobs, carried)?;
    let failed = |name: &str, outcomes: &[Outcome]| {
        outcomes.iter().any(|outcome| outcome.name == name && matches!(outcome.status, Status::Failed(_)))
    };
    let again: Vec<Job> = jobs.into_iter().filter(|job| failed(&job.name, &outcomes)).collect();
    if again.is_empty() {
        return Ok(outcomes);
    }
    for job in &again {
        eprintln!("vm: UNSTABLE? {} failed: output above, trying once more", job.name);
    }
    outcomes.retain(|outcome| !again.iter().any(|job| job.name == outcome.name));
    outcomes.append(&mut run_jobs(series, &again, carried)?);
    Ok(outcomes)
}

/// The test that measures, and the word at the head of the line in which it says what it has found.
const BENCHMARK: (&str, &str) = ("throughput::traffic_is_as_fast_with_the_guard", "report: ");

/// Measures traffic through FoU in a guest; returns the report as JSON.
pub(crate) fn benchmark(series: &str, quick: bool) -> Result<String> {
    let built = test::build_for_guests()?;
    let binary = built.binaries.iter().find(|binary| binary.group == test::Group::Vm);
    let binary = binary.context("the build made no tests for guests")?;
    let (test, mark) = BENCHMARK;
    let mut job = job(binary, test, test.to_owned(), series);
    if !quick {
        job.environment.push(("COIL_GUARD_BENCH".to_owned(), "full".to_owned()));
    }
    let carried =
        [(binary.path.clone(), binary.name.clone()), (built.agent.clone(), "coil-guard".to_owned())];
    let mut found = None;
    boot(series, &[job], &carried, |_, success, _, output| {
        let report = output.lines().find_map(|line| line.split_once(mark).map(|(_, report)| report));
        match report.filter(|_| success) {
            Some(report) => found = Some(report.to_owned()),
            None => eprintln!("{output}"),
        }
    })?;
    found.with_context(|| format!("{test} did not report: its output is above"))
}

/// Boots one kernel and runs every job there; a job that the guest did not come to has failed.
fn run_jobs(series: &str, jobs: &[Job], carried: &[(PathBuf, String)]) -> Result<Vec<Outcome>> {
    let mut outcomes = Vec::new();
    let booted = boot(series, jobs, carried, |name, success, took, output| {
        let outcome = test::judge(name.to_owned(), output, success, took, TEST_LIMIT);
        test::report("vm", outcomes.len() + 1, jobs.len(), &outcome, output);
        outcomes.push(outcome);
    });
    if let Err(error) = booted {
        eprintln!("vm: {series}: {error:#}");
        for job in &jobs[outcomes.len()..] {
            let status = Status::Failed(format!("the {series} guest ended before it: see above"));
            outcomes.push(Outcome { name: job.name.clone(), status, took: Duration::ZERO });
        }
    }
    Ok(outcomes)
}

fn run_command(series: &[&str], command: &str) -> Result<()> {
    let mut all_succeeded = true;
    for series in series {
        let job = Job {
            name: command.to_owned(),
            command: ["/bin/sh", "-c", command].map(str::to_owned).to_vec(),
            environment: vec![("COIL_GUARD_VM_KERNEL".to_owned(), (*series).to_owned())],
            limit: TEST_LIMIT.as_secs(),
        };
        boot(series, &[job], &[], |_, success, took, output| {
            all_succeeded &= success;
            println!("{output}");
            eprintln!("vm: {series}: {} in {took:.1?}", if success { "succeeded" } else { "failed" });
        })?;
    }
    ensure!(all_succeeded, "the command failed");
    Ok(())
}

fn boot(
    series: &str,
    jobs: &[Job],
    carried: &[(PathBuf, String)],
    mut on_done: impl FnMut(&str, bool, Duration, &str),
) -> Result<()> {
    install_programs(&TOOLS, "the virtual machines")?;
    install_programs(&initramfs::PROGRAMS, "the guests")?;
    let cache = target_directory()?.join("vm");
    let kernel = kernel::prepare(series, &cache)?;
    let mut archive = initramfs::base(&kernel)?;
    archive.extend(initramfs::tests(jobs, carried, &cache.join("stripped"))?);
    let file = kernel.directory.join("initramfs.cpio");
    fs::write(&file, &archive)?;
    let jobs_limit: u64 = jobs.iter().map(|job| job.limit).sum();
    eprintln!("vm: {series}: booting with {} MiB of files", archive.len() >> 20);
    qemu::boot(&kernel, &file, BOOT_LIMIT + Duration::from_secs(jobs_limit), |event, elapsed| match event {
        Event::Up { release } => eprintln!("vm: {series}: {release} is up after {elapsed:.1?}"),
        Event::Done { name, success, milliseconds, output } => {
            on_done(&name, success, Duration::from_millis(milliseconds), &output);
        }
        Event::Finished | Event::Broken { .. } => {}
    })
}
