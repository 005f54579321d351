//! What the overlays make the agent do on a node.

use std::{
    io::{BufRead as _, BufReader},
    process::{Child, Stdio},
};

use anyhow::{Context as _, Result, ensure};
use coil_guard_tests::{
    lab::{Lab, command, eventually},
    net::{Paths, lab_test},
    scenario::{Scenario, binary},
};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

/// Killed when a test ends early.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn namespaces_are_found_by_the_processes_in_them() -> Result<()> {
    lab_test(|| {
        let mut scenario = Scenario::builder(Lab::builder())
            .mode("reset")
            .no_agent()
            .arguments(&["--netns-dir", "/proc"])
            .start()?;
        let namespace = scenario.lab.topology.clients[0].namespace.path();
        let mut inside = command("nsenter");
        inside.arg(format!("--net={}", namespace.display())).args(["sleep", "infinity"]);
        let _inside = Process(inside.spawn().context("cannot run nsenter")?);
        scenario.start_agent()?;
        scenario.wait_attached(0)
    })
}

fn cleanup_removes_everything_and_stays(attach: &'static str) -> Result<()> {
    lab_test(move || {
        let mut scenario =
            Scenario::builder(Lab::builder()).mode("reset").arguments(&["--attach", attach]).start()?;
        // The agent is stopped, as by the update of the DaemonSet; what it attached goes on guarding.
        let agent = scenario.agent.take().context("no agent")?;
        agent.stop(scenario.patience())?;
        scenario.wait_attached(0)?;

        let mut cleanup = command(binary()?);
        cleanup.args(["cleanup", "--stay"]).stdout(Stdio::piped());
        let mut cleanup = Process(cleanup.spawn()?);
        // Kept open: it goes on printing.
        let mut output = BufReader::new(cleanup.0.stdout.take().context("no output")?).lines();
        let first = output.next().context("it printed nothing")??;
        ensure!(first.starts_with("removed "), "{attach}: {first}");
        scenario.wait_detached(0)?;
        eventually("empty pin directory", scenario.patience(), || {
            let pins = std::fs::read_dir(Paths.bpffs().join("coil-guard")).into_iter().flatten().flatten();
            let pins: Vec<_> = pins.map(|entry| entry.path()).collect();
            Ok(if pins.is_empty() { Ok(()) } else { Err(pins) })
        })?;
        ensure!(cleanup.0.try_wait()?.is_none(), "{attach}: it did not stay");
        kill(Pid::from_raw(i32::try_from(cleanup.0.id())?), Signal::SIGTERM)?;
        let status = eventually("end", scenario.patience(), || Ok(cleanup.0.try_wait()?.ok_or("running")))?;
        ensure!(status.success(), "{attach}: {status}");
        Ok(())
    })
}

#[test]
fn cleanup_removes_everything_and_stays_until_it_is_told_to_end_tcx() -> Result<()> {
    cleanup_removes_everything_and_stays("tcx")
}

#[test]
fn cleanup_removes_everything_and_stays_until_it_is_told_to_end_clsact() -> Result<()> {
    cleanup_removes_everything_and_stays("clsact")
}
