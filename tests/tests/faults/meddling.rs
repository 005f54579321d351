//! Somebody or something else interferes with the agent, its pins, or what it attached.

use std::{
    fs,
    path::Path,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use coil_guard_common::abi::{LAYOUT_VERSION, maps, mark};
use coil_guard_tests::{
    bpf::detach_link,
    cilium::{BackendState, IpFamily},
    fou::{FOU_PORT, Stream},
    lab::{Lab, eventually},
    net::{Netlink, Paths, lab_test, topology::POD_DEVICE},
    scenario::{Agent, Scenario},
};
use nix::{
    mount::{MsFlags, mount},
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use crate::support::{
    counted, finish, guard_pins, guards, leaves_nothing, sent, setting, streams, wait_left,
};

const EVERY: Duration = Duration::from_millis(2);

/// Waits until what was taken away has been missed and is attached anew.
fn wait_restored(scenario: &Scenario) -> Result<()> {
    let since = Instant::now();
    let restored = eventually("restored attachment", scenario.patience(), || {
        let now = scenario.agent()?.metric("coil_guard_attachments_total", &["outcome=\"restored\""])?;
        Ok(if now as u64 >= 1 { Ok(()) } else { Err(now) })
    });
    scenario.explain(restored)?;
    eprintln!("attached anew after {:.1?}", since.elapsed());
    scenario.wait_attached(0)
}

fn signal(agent: &Agent, signal: Signal) -> Result<()> {
    kill(Pid::from_raw(i32::try_from(agent.pid())?), signal).with_context(|| format!("cannot send {signal}"))
}

/// As a node that hangs, or a container that is frozen or throttled: the agent's word ages, and when it goes on it is the last
/// to know.
#[test]
fn an_agent_that_stood_still_leaves_it_to_ciliums_state_and_follows_again() -> Result<()> {
    lab_test(|| {
        let still = Duration::from_secs(setting("COIL_GUARD_STILL_SECONDS", 20));
        let mut scenario = Scenario::builder(Lab::builder().backends(4)).mode("reset").start()?;
        let running = streams(&scenario, &[0], EVERY)?;
        signal(scenario.agent()?, Signal::SIGSTOP)?;
        let began = Instant::now();
        let mut rolled = 0;
        while began.elapsed() < still || rolled < 4 {
            let index = rolled % 4;
            // Kubernetes goes on as well: what the agent believes in is replaced behind its back.
            let pod = scenario.backend_pod(index)?;
            scenario.cluster.terminate(&pod, None)?;
            scenario.lab.set_backend(index, BackendState::Terminating)?;
            wait_left(&scenario, &[0], index)?;
            scenario.cluster.force_delete(&pod)?;
            scenario.lab.remove_backend(index)?;
            scenario.announce_backend(index)?;
            scenario.lab.publish_backend(index)?;
            rolled += 1;
            thread::sleep(Duration::from_millis(50));
        }
        signal(scenario.agent()?, Signal::SIGCONT)?;
        for index in 0..4 {
            scenario.wait_mark(index, mark::READY)?;
        }
        for family in [IpFamily::V4, IpFamily::V6] {
            guards(&mut scenario, family)?;
        }
        let reports = finish(running)?;
        eprintln!("{rolled} backends replaced in {:.0?} without the agent", began.elapsed());
        counted(&scenario, sent(&reports))?;
        leaves_nothing(&scenario, &[0])
    })
}

#[test]
fn a_link_that_somebody_detaches_is_made_anew() -> Result<()> {
    lab_test(|| {
        let mut scenario =
            Scenario::builder(Lab::builder()).mode("reset").arguments(&["--attach", "tcx"]).start()?;
        let running = streams(&scenario, &[0], EVERY)?;
        let pin = guard_pins().join(LAYOUT_VERSION).join("links").join(&scenario.clients[0].uid);
        detach_link(&pin).with_context(|| format!("cannot detach {}", pin.display()))?;
        ensure!(scenario.lab.attachments(0)?.egress_programs() == 0, "the link is still in place");
        wait_restored(&scenario)?;
        guards(&mut scenario, IpFamily::V4)?;
        finish(running)?;
        leaves_nothing(&scenario, &[0])
    })
}

#[test]
fn a_qdisc_that_somebody_removes_comes_back_with_the_filter() -> Result<()> {
    lab_test(|| {
        let mut scenario =
            Scenario::builder(Lab::builder()).mode("reset").arguments(&["--attach", "clsact"]).start()?;
        let running = streams(&scenario, &[0], EVERY)?;
        scenario.lab.client(0).namespace.run(|| Netlink::here()?.delete_clsact(POD_DEVICE))?;
        ensure!(scenario.lab.attachments(0)?.is_empty(), "{:?}", scenario.lab.attachments(0)?);
        wait_restored(&scenario)?;
        guards(&mut scenario, IpFamily::V4)?;
        finish_where_a_qdisc_changed(running, 2)?;
        leaves_nothing(&scenario, &[0])
    })
}

/// Each way of attaching takes over from the other.
#[test]
fn an_agent_that_is_started_with_the_other_kind_of_attachment_takes_over() -> Result<()> {
    lab_test(|| {
        let mut scenario =
            Scenario::builder(Lab::builder()).mode("reset").arguments(&["--attach", "tcx"]).start()?;
        let running = streams(&scenario, &[0], EVERY)?;
        for attach in ["clsact", "tcx", "clsact"] {
            scenario.kill_agent()?;
            let mut agent = Agent::start(&scenario.api, &["--attach".to_owned(), attach.to_owned()])?;
            agent.wait_ready(scenario.patience())?;
            scenario.agent = Some(agent);
            let there = eventually("the other kind alone", scenario.patience(), || {
                let now = scenario.lab.attachments(0)?;
                let counts = (now.tcx_egress.len(), now.egress_filters.len());
                Ok(if counts == if attach == "tcx" { (1, 0) } else { (0, 1) } { Ok(()) } else { Err(now) })
            });
            scenario.explain(there)?;
            guards(&mut scenario, IpFamily::V4)?;
        }
        finish_where_a_qdisc_changed(running, 3)?;
        leaves_nothing(&scenario, &[0])
    })
}

/// Ends the streams. The kernel drops what a device sends while a clsact qdisc comes or goes there, some milliseconds each time.
fn finish_where_a_qdisc_changed(running: Vec<Stream>, times: usize) -> Result<()> {
    const EACH: usize = 500;
    for stream in running {
        let report = stream.finish(true)?;
        ensure!(report.duplicated().is_empty(), "packets arrived more than once: {report:?}");
        eprintln!("{} of {} packets lost", report.lost().len(), report.sent.len());
        ensure!(report.lost().len() < times * EACH, "{report:?}");
    }
    Ok(())
}

/// Waits until the guard works with the agent's marks: whatever was removed, agent and programs have the same maps again.
fn works_again(scenario: &mut Scenario, what: &str) -> Result<()> {
    let since = Instant::now();
    scenario.wait_attached(0).with_context(|| what.to_owned())?;
    guards(scenario, IpFamily::V4).with_context(|| what.to_owned())?;
    guards(scenario, IpFamily::V6).with_context(|| what.to_owned())?;
    eprintln!("{what}: guarded again after {:.1?}", since.elapsed());
    Ok(())
}

fn remove_all(directory: &Path) -> Result<()> {
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        if path.is_dir() {
            remove_all(&path)?;
            fs::remove_dir(&path)?;
        } else {
            fs::remove_file(&path)?;
        }
    }
    Ok(())
}

#[test]
fn an_agent_misses_pins_that_somebody_removes_and_the_next_one_makes_them_anew() -> Result<()> {
    lab_test(|| {
        let mut scenario = Scenario::builder(Lab::builder()).mode("reset").start()?;
        let running = streams(&scenario, &[0], EVERY)?;
        let directory = guard_pins().join(LAYOUT_VERSION);
        for name in [maps::BACKEND_MARKS, maps::CLIENT, maps::GUARDED_SERVICES, maps::CORES] {
            fs::remove_file(directory.join(name))
                .with_context(|| format!("cannot remove the pin of {name}"))?;
            scenario.kill_agent()?;
            scenario.start_agent()?;
            works_again(&mut scenario, &format!("an agent that is started without the pin of {name}"))?;
        }
        remove_all(&guard_pins())?;
        scenario.kill_agent()?;
        scenario.start_agent()?;
        works_again(&mut scenario, "an agent that is started without any pin")?;
        // Under the running agent: it cannot tell its programs anything any more that are loaded from now on, and says so.
        for all in [false, true] {
            if all {
                remove_all(&guard_pins())?;
            } else {
                fs::remove_file(directory.join(maps::BACKEND_MARKS))?;
            }
            scenario
                .agent
                .take()
                .context("the agent")?
                .wait_end(&["somebody has removed the pin"], scenario.patience())?;
            scenario.start_agent()?;
            works_again(&mut scenario, "the agent after one that missed its pins")?;
        }
        finish(running)?;
        leaves_nothing(&scenario, &[0])
    })
}

fn remount(read_only: bool) -> Result<()> {
    let flags = MsFlags::MS_REMOUNT | if read_only { MsFlags::MS_RDONLY } else { MsFlags::empty() };
    mount(None::<&str>, Paths.bpffs(), None::<&str>, flags, None::<&str>).context("cannot mount bpffs anew")
}

#[test]
fn a_bpffs_that_cannot_be_written_is_told_and_the_pods_come_later() -> Result<()> {
    lab_test(|| {
        let mut scenario = Scenario::builder(Lab::builder()).mode("reset").start()?;
        let running = streams(&scenario, &[0], EVERY)?;
        remount(true)?;
        let client = scenario.lab.add_client_pod()?;
        scenario.announce_client(client)?;
        scenario.agent()?.wait_log(&["WARN", "cannot attach", "client-1"], scenario.patience())?;
        // Who is attached is guarded all the same, by the agent's word.
        let bound = scenario.bound(0, IpFamily::V4, FOU_PORT)?;
        scenario.cluster.terminate(&scenario.backend_pod(bound)?, None)?;
        wait_left(&scenario, &[0], bound)?;
        ensure!(scenario.lab.attachments(client)?.egress_programs() == 0, "attached without a pin");
        remount(false)?;
        scenario.wait_attached(client)?;
        let bound = scenario.bound(0, IpFamily::V6, FOU_PORT)?;
        scenario.terminate(bound)?;
        wait_left(&scenario, &[0, client], bound)?;
        finish(running)?;
        leaves_nothing(&scenario, &[0, client])
    })
}
