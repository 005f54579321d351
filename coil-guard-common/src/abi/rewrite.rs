//! Ports that mode `rewrite` gives to flows.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// First outer source port that mode `rewrite` gives to flows; the range ends with the last port there is. The drain ports
/// end below it.
pub const REWRITE_PORT_FIRST: u16 = 65096;
/// Number of these ports.
pub const REWRITE_PORTS: u16 = u16::MAX - REWRITE_PORT_FIRST + 1;

/// Whether a source port (network order) is one that mode `rewrite` gives.
#[inline(always)]
#[must_use]
pub const fn is_rewrite_port(port: [u8; 2]) -> bool {
    u16::from_be_bytes(port) >= REWRITE_PORT_FIRST
}

shared! {
    /// The outer tuple of a flow as the client pod sends it. Addresses are v4-mapped, ports in network order.
    PinnedPortKey, 36 {
        /// Outer destination, the ClusterIP.
        service: [u8; 16],
        /// Outer source, the client pod.
        client: [u8; 16],
        /// Outer destination port.
        service_port: [u8; 2],
        /// Outer source port: the FoU port, or one for each inner flow with `fouSourcePortAuto`.
        client_port: [u8; 2],
    }
}

shared! {
    /// The outer source port that such a flow was given instead, and what came of it. A record from before the mode was
    /// last turned on does not count.
    PinnedPort, 40 {
        /// When the port was given, 0 when none was.
        given_at: u64,
        /// Since when the flow should leave and has not been seen elsewhere; 0 when it is where it may be.
        stuck_since: u64,
        /// When ports are tried again after a round of them was of no use.
        next_round: u64,
        /// Id of the backend that the flow should leave, or left last.
        left: u32,
        /// Generation of the client pod: a reused client address does not match.
        generation: u32,
        /// Network order; 0 for the packet's own.
        port: [u8; 2],
        /// Ports tried in this round.
        tries: u8,
        /// Rounds of tries that were of no use.
        rounds: u8,
        /// Times that none of the ports looked at could be given.
        skips: u8,
        /// `PIN_UNSEEN`.
        flags: u8,
        /// Zero.
        pad: [u8; 2],
    }
}

/// [`PinnedPort::flags`]: what Cilium chose for the port was not seen yet.
pub const PIN_UNSEEN: u8 = 1;

const _: () = assert!(REWRITE_PORTS == 440);
