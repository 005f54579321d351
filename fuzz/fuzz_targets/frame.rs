//! Outer and inner headers of any frame, against another parser.
#![no_main]

#[path = "../../coil-guard-common/tests/fuzzing/frames.rs"]
mod frames;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    frames::frame(bytes);
    frames::check_inner(bytes, 0);
});
