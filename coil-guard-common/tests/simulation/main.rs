//! Random schedules of everything that can happen around the guard, and what must hold whatever does.
//!
//! One seed, one schedule. `COIL_GUARD_SEEDS` sets the number of seeds (default 16), `COIL_GUARD_SEED` runs one alone,
//! `COIL_GUARD_STEPS` the steps of each. A failure prints the end of its schedule.

mod cilium;
mod cluster;
mod flows;
mod guard;
mod outcome;
mod own;
#[path = "../prose/mod.rs"]
mod prose;
mod rewrite;
mod schedule;
mod sim;

use std::{env, fmt::Debug, str::FromStr};

use coil_guard_common::abi::{FOR_EVER, mode};

use crate::{
    cilium::{SECOND, VERSIONS},
    sim::{Settings, Sim, Tally},
};

fn variable<T: FromStr<Err: Debug>>(name: &str, default: T) -> T {
    match env::var(name) {
        Ok(value) => {
            value.parse().unwrap_or_else(|error| panic!("{name} is {value:?}, not a number: {error:?}"))
        }
        Err(_) => default,
    }
}

fn settings(seed: u64, mode: Option<u8>, interleave: bool) -> Settings {
    let mut rng = fastrand::Rng::with_seed(seed ^ 0x5e77);
    Settings {
        mode,
        version: VERSIONS[seed as usize % VERSIONS.len()],
        affinity: seed >> 2 & 1 == 0,
        auto: seed >> 3 & 1 == 1,
        interleave,
        collisions: rng.u32(..4) == 0,
        faults: rng.bool(),
        not_ready_after: [30 * SECOND, 3 * SECOND, FOR_EVER][rng.usize(..3)],
        unmarked_drain: 5 * SECOND,
    }
}

fn run(seed: u64, settings: Settings, steps: u64, traced: bool) -> Sim {
    let mut sim = Sim::new(seed, settings, traced);
    // Every state the guard finds when it begins, it found in use.
    let unguarded = sim.schedule.u64(..300);
    for step in 0..steps {
        if step == unguarded {
            sim.guarding = true;
            sim.own.memory_since = sim.now;
            sim.note(|| "the guard begins".into());
        }
        sim.step();
        if !settings.interleave
            && step % 256 == 0
            && let Err(error) = sim.own.check_gauges()
        {
            sim.fail(error);
        }
        if sim.violation.is_some() {
            return sim;
        }
    }
    sim.settle_down();
    sim
}

fn check(seed: u64, settings: Settings, steps: u64) -> Tally {
    let sim = run(seed, settings, steps, false);
    if let Some(violation) = sim.violation {
        let again = run(seed, settings, steps, true);
        panic!("seed {seed}, {settings:?}\n{}{violation}", again.tail());
    }
    sim.tally
}

fn for_seeds(test: impl Fn(u64, u64) -> Tally) -> Tally {
    let steps = variable("COIL_GUARD_STEPS", 120_000);
    if let Ok(seed) = env::var("COIL_GUARD_SEED") {
        return test(seed.parse().expect("COIL_GUARD_SEED is a number"), steps);
    }
    let mut sum = Tally::default();
    for seed in 0..variable("COIL_GUARD_SEEDS", 16) {
        sum += test(seed, steps);
    }
    println!("{sum:?}");
    sum
}

#[test]
fn drain_cuts_no_flow_that_may_stay() {
    let sum = for_seeds(|seed, steps| check(seed, settings(seed, Some(mode::DRAIN), false), steps));
    assert!(
        sum.drained > 0
            && sum.settling > 0
            && sum.moved > 0
            && sum.repaired > 0
            && sum.no_live > 0
            && sum.shortcuts > 0,
        "{sum:?}"
    );
}

#[test]
fn drain_holds_when_two_cpus_run_into_each_other() {
    let sum = for_seeds(|seed, steps| check(seed, settings(seed, Some(mode::DRAIN), true), steps));
    assert!(sum.drained > 0 && sum.moved > 0, "{sum:?}");
}

#[test]
fn reset_leaves_no_flow_where_none_is_kept() {
    let sum = for_seeds(|seed, steps| check(seed, settings(seed, Some(mode::RESET), false), steps));
    assert!(sum.moved > 0 && sum.repaired > 0 && sum.no_live > 0 && sum.shortcuts > 0, "{sum:?}");
}

#[test]
fn reset_holds_when_two_cpus_run_into_each_other() {
    let sum = for_seeds(|seed, steps| check(seed, settings(seed, Some(mode::RESET), true), steps));
    assert!(sum.moved > 0, "{sum:?}");
}

#[test]
fn rewrite_moves_what_can_be_moved_and_nothing_else() {
    let sum = for_seeds(|seed, steps| check(seed, settings(seed, Some(mode::REWRITE), false), steps));
    assert!(
        sum.rewritten > 0 && sum.new_port > 0 && sum.held > 0 && sum.no_live > 0 && sum.moved > 0,
        "{sum:?}"
    );
}

#[test]
fn rewrite_holds_when_two_cpus_run_into_each_other() {
    let sum = for_seeds(|seed, steps| check(seed, settings(seed, Some(mode::REWRITE), true), steps));
    assert!(sum.rewritten > 0 && sum.moved > 0, "{sum:?}");
}

#[test]
fn audit_changes_nothing() {
    let sum = for_seeds(|seed, steps| {
        let audit = check(seed, settings(seed, Some(mode::AUDIT), false), steps);
        let none = check(seed, settings(seed, None, false), steps);
        assert_eq!(
            (audit.packets, audit.good, audit.lost, audit.cut),
            (none.packets, none.good, none.lost, none.cut),
            "seed {seed}"
        );
        audit
    });
    assert!(sum.would_move > 0 && sum.shortcuts > 0, "{sum:?}");
}

#[test]
fn no_mode_does_worse_than_cilium_alone() {
    let alone = for_seeds(|seed, steps| check(seed, settings(seed, None, false), steps));
    let reset = for_seeds(|seed, steps| check(seed, settings(seed, Some(mode::RESET), false), steps));
    let drain = for_seeds(|seed, steps| check(seed, settings(seed, Some(mode::DRAIN), false), steps));
    let rewrite = for_seeds(|seed, steps| check(seed, settings(seed, Some(mode::REWRITE), false), steps));
    assert!(reset.lost < alone.lost && drain.lost < alone.lost, "{reset:?}, {drain:?}, alone {alone:?}");
    assert!(rewrite.lost < alone.lost, "{rewrite:?}, alone {alone:?}");
    assert!(drain.cut_unduly < alone.cut_unduly, "{drain:?}, alone {alone:?}");
}
