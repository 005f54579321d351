//! Lab tests: one process for each, in namespaces of its own.
//!
//! The namespaces are made before the test starts, so that whatever it does, and however it ends, its interfaces,
//! mounts, pins and processes go with it.

use std::{
    process::{Command, Stdio},
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::Instant,
};

use anyhow::{Context as _, Result};

use super::{Outcome, Run, Status, TestBinary, judge, report};

/// Runs every wanted test, `run.jobs` at a time.
pub(crate) fn run(run: &Run, binaries: &[&TestBinary]) -> Result<Vec<Outcome>> {
    let mut tests = Vec::new();
    for binary in binaries {
        for name in binary.list()? {
            if run.wants(&format!("{}::{name}", binary.name)) {
                tests.push((*binary, name));
            }
        }
    }
    let next = AtomicUsize::new(0);
    let outcomes = Mutex::new(Vec::new());
    let failure = Mutex::new(None);
    thread::scope(|scope| {
        for _ in 0..run.jobs.min(tests.len()) {
            scope.spawn(|| {
                while let Some((binary, name)) = tests.get(next.fetch_add(1, Ordering::Relaxed)) {
                    match run_twice_if_it_fails(run, binary, name) {
                        Ok((outcome, output)) => {
                            let mut outcomes = lock(&outcomes);
                            report("lab", outcomes.len() + 1, tests.len(), &outcome, &output);
                            outcomes.push(outcome);
                        }
                        Err(error) => *lock(&failure) = Some(error),
                    }
                }
            });
        }
    });
    match lock(&failure).take() {
        Some(error) => Err(error),
        None => Ok(outcomes.into_inner().unwrap_or_default()),
    }
}

/// A test that failed has one more try, told loudly: lab tests wait for what happens on a machine that does other things too,
/// and one that fails twice has found something.
fn run_twice_if_it_fails(run: &Run, binary: &TestBinary, name: &str) -> Result<(Outcome, String)> {
    let (first, output) = run_one(run, binary, name)?;
    let Status::Failed(why) = &first.status else { return Ok((first, output)) };
    eprintln!("---- {}: first try\n{output}", first.name);
    eprintln!("lab: UNSTABLE? {} failed ({why}): output above, trying once more", first.name);
    run_one(run, binary, name)
}

fn run_one(run: &Run, binary: &TestBinary, name: &str) -> Result<(Outcome, String)> {
    let mut command = Command::new("timeout");
    // Killing unshare kills the whole process tree of the test with it (--kill-child, and its own pid namespace).
    command.args(["--signal=KILL", &run.timeout.as_secs().to_string()]);
    command.args(["unshare", "--net", "--mount", "--propagation=private", "--pid", "--fork", "--kill-child"]);
    command.args(["--mount-proc", "--"]).arg(&binary.path);
    command.args(["--exact", name, "--nocapture", "--test-threads=1"]);
    binary.place(&mut command);
    command.env("COIL_GUARD_BINARY", &run.agent).env("COIL_GUARD_REQUIRE_LAB", "1").stdin(Stdio::null());
    let began = Instant::now();
    let output = command.output().with_context(|| format!("cannot run {}", binary.path.display()))?;
    let took = began.elapsed();
    let printed = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    let full_name = format!("{}::{name}", binary.name);
    Ok((judge(full_name, &printed, output.status.success(), took, run.timeout), printed.into_owned()))
}

/// A panic of another worker does not make what it guarded unusable here.
fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
