//! `cargo xtask test`: builds everything once, then runs the three groups of tests and counts them.
//!
//! | group | what | needs |
//! | --- | --- | --- |
//! | unit | every crate's own tests, each binary as libtest runs it | nothing |
//! | lab | `tests/tests/*.rs`: one process and private namespaces for each test | root, the eBPF programs |
//! | vm | `tests/vm/*.rs`: in a guest with a kernel that has FoU, one boot for each kernel | root, qemu |

mod build;
mod lab;
mod outcome;
mod unit;

use std::{
    path::PathBuf,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};

pub(crate) use self::{
    build::{Built, Group, TestBinary, build, build_for_guests},
    outcome::{Outcome, Status, judge, report},
};
use crate::{machine, setup, vm};

#[derive(clap::Args)]
pub(crate) struct Options {
    /// Run only the tests whose name contains this text
    filter: Option<String>,
    /// Run only these groups; may be repeated
    #[arg(long, value_enum)]
    group: Vec<Group>,
    /// Lab tests at a time; each waits more than it works [default: the number of cores]
    #[arg(long)]
    jobs: Option<usize>,
    /// Seconds after which a lab test is ended and has failed
    #[arg(long, default_value_t = 180)]
    timeout: u64,
}

/// What the runners of the groups share.
pub(crate) struct Run {
    /// Only names that contain this.
    pub(crate) filter: Option<String>,
    /// The agent that the tests start.
    pub(crate) agent: PathBuf,
    /// Lab tests at a time.
    pub(crate) jobs: usize,
    /// Limit for one lab test.
    pub(crate) timeout: Duration,
}

impl Run {
    /// Whether a test of this name was asked for.
    pub(crate) fn wants(&self, name: &str) -> bool {
        self.filter.as_ref().is_none_or(|filter| name.contains(filter))
    }
}

pub(crate) fn run_verb(options: &Options) -> Result<()> {
    let started = Instant::now();
    let with_programs = setup::try_toolchain()?;
    let Built { agent, binaries } = build()?;
    eprintln!("test: built in {:.0?}", started.elapsed());
    let run = Run {
        filter: options.filter.clone(),
        agent,
        jobs: options.jobs.unwrap_or_else(machine::cores).max(1),
        timeout: Duration::from_secs(options.timeout),
    };
    let mut results = Vec::new();
    for group in [Group::Unit, Group::Lab, Group::Vm] {
        if !options.group.is_empty() && !options.group.contains(&group) {
            continue;
        }
        let members: Vec<&TestBinary> = binaries.iter().filter(|binary| binary.group == group).collect();
        let began = Instant::now();
        let outcomes = match obstacle(group, with_programs) {
            Some(reason) => skip_all(&run, &members, group, &reason)?,
            None => match group {
                Group::Unit => unit::run(&run, &members)?,
                Group::Lab => lab::run(&run, &members)?,
                Group::Vm => vm::run_group(&run, &members)?,
            },
        };
        results.push((group, outcomes, began.elapsed()));
    }
    summarise(&results, started.elapsed())
}

/// Why this machine cannot run a group, if it cannot.
fn obstacle(group: Group, with_programs: bool) -> Option<String> {
    match group {
        Group::Unit => None,
        Group::Lab | Group::Vm if !machine::is_root() => Some("needs root".to_owned()),
        Group::Lab | Group::Vm if !with_programs => {
            Some("needs the eBPF programs: run `cargo xtask setup` as root".to_owned())
        }
        Group::Lab | Group::Vm => None,
    }
}

/// Counts every test of a group as skipped; where nothing may be skipped, that is a failure.
fn skip_all(run: &Run, binaries: &[&TestBinary], group: Group, reason: &str) -> Result<Vec<Outcome>> {
    ensure!(!machine::is_ci(), "the {group} tests cannot run ({reason}), and CI must not skip tests");
    eprintln!("test: SKIPPED: all {group} tests: {reason}");
    let mut outcomes = Vec::new();
    for binary in binaries {
        for name in binary.list()?.into_iter().filter(|name| run.wants(name)) {
            outcomes.push(Outcome { name, status: Status::Skipped(reason.to_owned()), took: Duration::ZERO });
        }
    }
    Ok(outcomes)
}

fn summarise(results: &[(Group, Vec<Outcome>, Duration)], took: Duration) -> Result<()> {
    println!("\ngroup   passed  failed  skipped     time");
    for (group, outcomes, took) in results {
        let [passed, failed, skipped] = outcome::count(outcomes);
        println!(
            "{:<6} {passed:>7} {failed:>7} {skipped:>8} {:>7.1}s",
            group.to_string(),
            took.as_secs_f64()
        );
    }
    println!("total time {:.0}s", took.as_secs_f64());
    conclude(&results.iter().flat_map(|(_, outcomes, _)| outcomes).cloned().collect::<Vec<_>>())
}

/// Names what did not pass, ends with the counts, and fails when a test did or when none ran.
pub(crate) fn conclude(outcomes: &[Outcome]) -> Result<()> {
    for outcome in outcomes {
        match &outcome.status {
            Status::Failed(why) => println!("failed: {} ({why})", outcome.name),
            Status::Skipped(why) => println!("skipped: {} ({why})", outcome.name),
            Status::Passed => {}
        }
    }
    let [passed, failed, skipped] = outcome::count(outcomes);
    println!("{passed} passed, {failed} failed, {skipped} skipped");
    ensure!(failed == 0, "{failed} tests failed");
    ensure!(passed + skipped > 0, "no test matched");
    ensure!(skipped == 0 || !machine::is_ci(), "{skipped} tests were skipped, and CI must not skip tests");
    Ok(())
}
