//! A bounded run of the fuzz targets that needs no special toolchain: seeded, so that a failure comes again.
//!
//! `COIL_GUARD_INPUTS` sets the number of inputs for each (default 1,000,000), `COIL_GUARD_SEED` the seed.

mod build;
#[path = "fuzzing/decisions.rs"]
mod decisions;
#[path = "fuzzing/frames.rs"]
mod frames;

use std::env;

use crate::build::{DESTINATION, Extension, HOP_BY_HOP, ROUTING, fou4, fou6, inners};

fn variable(name: &str, default: u64) -> u64 {
    env::var(name).map_or(default, |value| {
        value.parse().unwrap_or_else(|_| panic!("{name} is {value:?}, not a number"))
    })
}

fn mutate(bytes: &mut Vec<u8>, rng: &mut fastrand::Rng) {
    /// Values that parsers trip over, or that lead somewhere.
    const INTERESTING: [u8; 20] = [
        0, 1, 2, 4, 6, 7, 0x0f, 0x11, 0x15, 0x1f, 0x20, 0x2b, 0x2c, 0x33, 0x3c, 0x45, 0x60, 0x7f, 0xb3, 0xff,
    ];
    for _ in 0..rng.u32(..6) {
        let at = rng.usize(..bytes.len().max(1));
        match (rng.u32(..8), bytes.get_mut(at)) {
            (0, _) => bytes.truncate(at),
            (1 | 2, Some(byte)) => *byte = rng.u8(..),
            (3 | 4, Some(byte)) => *byte = INTERESTING[rng.usize(..INTERESTING.len())],
            (5, Some(byte)) => *byte ^= 1 << rng.u32(..8),
            (6, Some(_)) => bytes.insert(at, rng.u8(..)),
            (_, Some(_)) => drop(bytes.remove(at)),
            (_, None) => bytes.push(rng.u8(..)),
        }
    }
}

/// Frames to begin with.
fn corpus() -> Vec<Vec<u8>> {
    let coil = [Extension::Options(DESTINATION, 0)];
    let many = [
        Extension::Options(HOP_BY_HOP, 0),
        Extension::Options(ROUTING, 1),
        Extension::Fragment(0),
        Extension::Options(DESTINATION, 0),
    ];
    let forms = |inner: &Vec<u8>| {
        [fou4(5555, inner), fou6(5555, &coil, inner), fou6(40000, &[], inner), fou6(5555, &many, inner)]
    };
    inners().iter().flat_map(forms).collect()
}

#[test]
fn mutated_frames() {
    let mut rng = fastrand::Rng::with_seed(variable("COIL_GUARD_SEED", 1));
    let corpus = corpus();
    for _ in 0..variable("COIL_GUARD_INPUTS", 1_000_000) {
        let mut bytes = corpus[rng.usize(..corpus.len())].clone();
        mutate(&mut bytes, &mut rng);
        frames::frame(&bytes);
    }
}

#[test]
fn decisions_in_any_world() {
    let mut rng = fastrand::Rng::with_seed(variable("COIL_GUARD_SEED", 1));
    let mut bytes = Vec::new();
    for _ in 0..variable("COIL_GUARD_INPUTS", 1_000_000) {
        bytes.resize(rng.usize(2..48), 0);
        rng.fill(&mut bytes);
        decisions::packets(&bytes);
    }
}

#[test]
fn random_bytes() {
    let mut rng = fastrand::Rng::with_seed(variable("COIL_GUARD_SEED", 1));
    for _ in 0..variable("COIL_GUARD_INPUTS", 1_000_000) / 4 {
        let mut bytes = vec![0; rng.usize(..120)];
        rng.fill(&mut bytes);
        frames::frame(&bytes);
        frames::check_inner(&bytes, 0);
    }
}
