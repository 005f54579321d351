//! `kill -9` of the agent at any instant.

use std::{
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use coil_guard_tests::{
    fou::FOU_PORT,
    lab::{Lab, eventually},
    net::lab_test,
    program::Rng,
    scenario::{Agent, Scenario},
};

use crate::support::{
    Roll, counted, finish, kill_time, leaves_nothing, link_id, open_namespaces, pins, sent, setting, streams,
};

const CLIENTS: [usize; 2] = [0, 1];
/// Kills, however long they take.
const AT_LEAST: u32 = 20;

/// Kills the agent again and again, at a random point between its start and half as long again as it needs to be ready, while
/// one backend after the other is replaced.
fn killed_at_any_instant(attach: &'static str) -> Result<()> {
    lab_test(move || {
        let kills: u32 = setting("COIL_GUARD_KILLS", 200) / 2;
        let seed = setting("COIL_GUARD_SEED", 1);
        let mut random = Rng::new(seed);
        let began = Instant::now();
        let mut scenario = Scenario::builder(Lab::builder().clients(2))
            .mode("reset")
            .arguments(&["--attach", attach])
            .start()?;
        let has_links = attach == "tcx";
        let links = || -> Result<Vec<u32>> {
            if has_links {
                CLIENTS.iter().map(|client| link_id(&scenario, *client)).collect()
            } else {
                Ok(vec![])
            }
        };
        let first_links = links()?;
        let first_pins = pins();
        let streams = streams(&scenario, &CLIENTS, Duration::from_millis(2))?;
        let mut roll = Roll::default();
        let (mut ready, mut slowest) = (Duration::from_millis(500), Duration::ZERO);
        let mut killed_before_ready = 0;
        let (longest, mut done) = (kill_time(), 0);
        while done < kills && (done < AT_LEAST || began.elapsed() < longest) {
            let kill = done;
            done += 1;
            scenario.kill_agent()?;
            // Every tenth one may live until it is ready: that says how long it takes here and now.
            let started = Instant::now();
            if kill % 10 == 0 {
                scenario.start_agent()?;
                ready = started.elapsed();
                slowest = slowest.max(ready);
            } else {
                scenario.agent = Some(Agent::start(&scenario.api, &arguments(attach))?);
            }
            let lives = ready.mul_f64(1.5 * random.below(1000) as f64 / 1000.0);
            let step_at = lives.mul_f64(random.below(1000) as f64 / 1000.0);
            thread::sleep(step_at.saturating_sub(started.elapsed()));
            roll.step(&mut scenario, &CLIENTS).with_context(|| format!("seed {seed}, kill {kill}"))?;
            thread::sleep(lives.saturating_sub(started.elapsed()));
            killed_before_ready += u32::from(started.elapsed() < ready);
            for client in CLIENTS {
                let there = scenario.lab.attachments(client)?;
                ensure!(there.egress_programs() == 1, "seed {seed}, kill {kill}: {there:?}");
            }
        }
        scenario.kill_agent()?;
        scenario.start_agent()?;
        roll.finish(&mut scenario, &CLIENTS)?;
        let reports = finish(streams)?;
        for client in CLIENTS {
            for family in scenario.lab.families().to_vec() {
                let bound = scenario.bound(client, family, FOU_PORT)?;
                ensure!(scenario.backend_pod(bound).is_ok(), "stuck on backend {bound}");
            }
            scenario.wait_attached(client)?;
        }
        let now = if has_links {
            CLIENTS.iter().map(|client| link_id(&scenario, *client)).collect::<Result<Vec<_>>>()?
        } else {
            vec![]
        };
        ensure!(now == first_links, "other links: {first_links:?} became {now:?}");
        eventually("same pins as before", scenario.patience(), || {
            let now = pins();
            Ok(if now == first_pins { Ok(()) } else { Err(now) })
        })?;
        counted(&scenario, sent(&reports))?;
        eventually("agent without open namespaces", scenario.patience(), || {
            let open = open_namespaces(&scenario)?;
            Ok(if open == 0 { Ok(()) } else { Err(open) })
        })?;
        eprintln!(
            "{attach}: {done} kills ({killed_before_ready} before ready), {} backends replaced, {} packets, 0 lost, ready \
             after {slowest:.0?} at most, {:.0?} in all",
            roll.marked,
            sent(&reports),
            began.elapsed()
        );
        leaves_nothing(&scenario, &CLIENTS)
    })
}

fn arguments(attach: &str) -> [String; 2] {
    ["--attach".to_owned(), attach.to_owned()]
}

#[test]
fn an_agent_killed_at_any_instant_loses_no_packet_and_leaks_nothing_tcx() -> Result<()> {
    killed_at_any_instant("tcx")
}

#[test]
fn an_agent_killed_at_any_instant_loses_no_packet_and_leaks_nothing_clsact() -> Result<()> {
    killed_at_any_instant("clsact")
}

/// Two agents leapfrog: the second waits, not ready, and takes over when the first dies.
fn the_second_takes_over(attach: &'static str) -> Result<()> {
    lab_test(move || {
        let mut scenario =
            Scenario::builder(Lab::builder()).mode("reset").arguments(&["--attach", attach]).start()?;
        let streams = streams(&scenario, &[0], Duration::from_millis(2))?;
        let mut roll = Roll::default();
        for round in 0..4 {
            let port = if round % 2 == 0 { 9498 } else { 9398 };
            let second = Agent::start_at(&scenario.api, &arguments(attach), port)?;
            eventually("second agent that waits", scenario.patience(), || {
                Ok(match second.ready() {
                    Ok((false, body)) if body.contains("[-]lock another agent holds") => Ok(()),
                    other => Err(format!("{other:?}")),
                })
            })?;
            roll.step(&mut scenario, &[0])?;
            scenario.kill_agent()?;
            let died = Instant::now();
            scenario.agent = Some(second);
            roll.step(&mut scenario, &[0])?;
            let patience = scenario.patience();
            scenario.agent.as_mut().context("the second agent")?.wait_ready(patience)?;
            let ready = died.elapsed();
            eprintln!("{attach}: ready {ready:.0?} after the death of the first");
            ensure!(ready < Duration::from_secs(10), "ready only {ready:?} after the death of the first");
            let log = scenario.agent()?.log();
            ensure!(!log.contains("how=Fresh"), "what is attached is taken over in place:\n{log}");
            scenario.wait_attached(0)?;
        }
        roll.finish(&mut scenario, &[0])?;
        let reports = finish(streams)?;
        counted(&scenario, sent(&reports))?;
        leaves_nothing(&scenario, &[0])
    })
}

#[test]
fn a_second_agent_takes_over_from_one_that_was_killed_tcx() -> Result<()> {
    the_second_takes_over("tcx")
}

#[test]
fn a_second_agent_takes_over_from_one_that_was_killed_clsact() -> Result<()> {
    the_second_takes_over("clsact")
}
