//! Packets in a world that answers whatever the bytes say.
#![no_main]

#[path = "../../coil-guard-common/tests/fuzzing/decisions.rs"]
mod decisions;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| decisions::packets(bytes));
