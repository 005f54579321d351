//! Coil's tunnels as the kernel makes them, through the guard, in a guest: `cargo xtask vm`.
//!
//! The lab's node, the model of Cilium, the Kubernetes API and the agent are those of the lab tests. What differs is
//! where the packets come from: here they are pings, TCP and UDP of real sockets, put into FoU by the kernel's own
//! devices, and egress pods that decapsulate, forward and masquerade them to a host outside.

mod coil;
mod drain;
mod kernel;
mod outside;
mod ping;
mod reset;
mod rewrite;
mod tcp;
mod throughput;
mod world;
