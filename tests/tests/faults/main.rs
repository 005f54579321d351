//! Keeping the guard through faults: each promise of `docs/reliability.md` has its tests here.

mod cilium;
mod cores;
mod drains;
mod flood;
mod kills;
mod kubernetes;
mod meddling;
mod pods;
mod refused;
mod soak;
mod support;
