//! The guard's own program, loaded from the agent's object and run packet by packet with `BPF_PROG_TEST_RUN`.
//!
//! Nothing is attached: an instance gets maps of its own, and maps of Cilium's names, layouts and flags in a private
//! bpffs, so that whatever a packet made it do can be compared byte for byte. What `BPF_PROG_TEST_RUN` cannot show is left
//! to the lab and the virtual machines: GSO, checksum offload, data beyond the linear part, and other CPUs.

mod clock;
mod conntrack;
mod counters;
mod instance;
mod loading;
mod memory;
mod packets;
mod recent;
pub mod replies;
mod rng;
mod run;
mod scene;

pub use self::{
    clock::{await_tick, monotonic, processor_time},
    counters::Counters,
    instance::{Instance, Sizes},
    loading::Load,
    packets::{Checksum, bytes, udp_offset},
    replies::{Replies, frame_between},
    rng::Rng,
    run::Run,
    scene::{CLIENT_GENERATION, EGRESS, REV_NAT, Scene, address_of, pod_config},
};
