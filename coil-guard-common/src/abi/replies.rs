//! Symmetric replies of mode `rewrite`: what the programs on both sides of a tunnel agree on.
//!
//! The ports are a protocol between nodes: the guards at both ends may be of different versions. A client whose node can
//! turn the destination port of replies back is given ports of the upper half only, and any other client ports of the lower
//! half only. So the source port of a packet says whether its sender can have replies at it, and nothing else needs to.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// First outer source port of those that mode `rewrite` gives to clients which can have replies at them. All ports from here
/// on are such; those that it gives below are not.
pub const RETURN_PORT_FIRST: u16 = 65316;

/// Whether a port (network order) says that its client can have replies at it.
#[inline(always)]
#[must_use]
pub const fn is_return_port(port: [u8; 2]) -> bool {
    u16::from_be_bytes(port) >= RETURN_PORT_FIRST
}

/// How long a learnt port counts after the client's last packet, nanoseconds. It bounds what an egress pod can do wrong to
/// somebody who got the address of a client that is gone, and has never sent anything.
pub const ANSWER_VALID_FOR: u64 = 600 * 1_000_000_000;

shared! {
    /// An egress pod and a client of it. Addresses are v4-mapped.
    AnswerKey, 32 {
        /// The egress pod: one cannot disturb what another has learnt.
        egress_pod: [u8; 16],
        /// The client pod.
        client: [u8; 16],
    }
}

shared! {
    /// The port at which the client wants the egress pod's replies.
    Answer, 16 {
        /// The client's last packet, one second coarse.
        last_seen: u64,
        /// Network order.
        port: [u8; 2],
        /// Zero.
        pad: [u8; 6],
    }
}

shared! {
    /// A port that was given to a client.
    ReturnKey, 20 {
        /// The client pod, v4-mapped.
        client: [u8; 16],
        /// Network order.
        port: [u8; 2],
        /// Zero.
        pad: [u8; 2],
    }
}

shared! {
    /// For what it was given. It stays when the flow is given another one: replies may still be on their way.
    Return, 24 {
        /// ClusterIP, v4-mapped.
        service: [u8; 16],
        /// Generation of the client pod: another one with its address may have sockets of its own at the port.
        generation: u32,
        /// Zero.
        pad: u32,
    }
}

shared! {
    /// A client pod that has a program which turns replies back.
    Returning, 8 {
        /// Generation of the pod.
        generation: u32,
        /// Zero.
        pad: u32,
    }
}

/// Names of the cores for replies, in their object and in the kernel.
pub mod reply_program {
    /// Ingress of an egress pod: learns at which ports its clients want replies.
    pub const LEARN: &str = "coil_learn";
    /// Egress of an egress pod: sends replies there.
    pub const ANSWER: &str = "coil_answer";
    /// Ingress of a client pod: turns the port of replies back to the FoU port.
    pub const RETURN: &str = "coil_return";
}
