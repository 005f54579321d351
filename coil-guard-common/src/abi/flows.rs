//! What the program remembers of flows, clients and leaving backends.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

shared! {
    /// An inner flow of a client. Addresses are v4-mapped, ports in network order.
    InnerFlowKey, 72 {
        /// Outer destination, the ClusterIP.
        service: [u8; 16],
        /// Outer source, the client pod.
        client: [u8; 16],
        /// Inner source.
        source: [u8; 16],
        /// Inner destination.
        destination: [u8; 16],
        /// Outer destination port.
        service_port: [u8; 2],
        /// Inner source port, ICMP identifier, or 0.
        source_port: [u8; 2],
        /// Inner destination port or 0.
        destination_port: [u8; 2],
        /// Inner protocol.
        protocol: u8,
        /// Zero.
        pad: u8,
    }
}

/// A client address that has remembered nothing for this long may have an eighth of the flows at once, nanoseconds.
pub const FLOW_BURST: u64 = 16_000_000_000;

/// The time that one remembered flow takes off its client's share, nanoseconds: a client alone cannot turn over a memory of
/// `inner_flows` within less than 112 s.
#[must_use]
pub const fn flow_cost(inner_flows: u32) -> u64 {
    8 * FLOW_BURST / if inner_flows == 0 { 1 } else { inner_flows as u64 }
}

/// [`InnerFlow::flags`]: counted in [`DrainStats::flows`] of its backend.
pub const FLOW_DRAINED: u32 = 1;
/// [`InnerFlow::flags`]: a FIN or RST was seen.
pub const FLOW_ENDED: u32 = 2;

shared! {
    /// Where an inner flow lives.
    InnerFlow, 40 {
        /// Address of its backend: an id that was reused for another one does not match.
        backend_address: [u8; 16],
        /// Time of its last packet, one second coarse.
        last_seen: u64,
        /// Its backend.
        backend_id: u32,
        /// Generation of the client pod: a reused client address does not match.
        generation: u32,
        /// `FLOW_DRAINED`, `FLOW_ENDED`.
        flags: u32,
        /// Zero.
        pad: u32,
    }
}

shared! {
    /// Inner fragments of one packet.
    FragmentKey, 56 {
        /// The client pod.
        client: [u8; 16],
        /// Inner source.
        source: [u8; 16],
        /// Inner destination.
        destination: [u8; 16],
        /// IPv4 identification (network order, zero-extended) or IPv6 fragment identification.
        identification: [u8; 4],
        /// Inner protocol.
        protocol: u8,
        /// Zero.
        pad: [u8; 3],
    }
}

shared! {
    /// Ports of the flow that a fragment belongs to, network order.
    FragmentPorts, 4 {
        /// See [`InnerFlowKey::source_port`].
        source_port: [u8; 2],
        /// See [`InnerFlowKey::destination_port`].
        destination_port: [u8; 2],
    }
}

shared! {
    /// A client and a service.
    ClientServiceKey, 36 {
        /// ClusterIP.
        service: [u8; 16],
        /// Client pod.
        client: [u8; 16],
        /// Outer destination port, network order.
        service_port: [u8; 2],
        /// Zero.
        pad: [u8; 2],
    }
}

shared! {
    /// The backend that a client was last moved off.
    Previous, 32 {
        /// Its address.
        backend_address: [u8; 16],
        /// When.
        moved_at: u64,
        /// Its id.
        backend_id: u32,
        /// Generation of the client pod.
        generation: u32,
    }
}

shared! {
    /// A backend that the program saw leaving in Cilium's maps.
    LeavingKey, 24 {
        /// Its address.
        address: [u8; 16],
        /// Its id.
        backend_id: u32,
        /// 1 when Cilium calls it terminating: that is a leaving of its own, whatever it was before.
        terminating: u8,
        /// Zero.
        pad: [u8; 3],
    }
}

shared! {
    /// When the program saw it.
    LeavingSeen, 16 {
        /// First packet that met it so.
        first: u64,
        /// Last one.
        last: u64,
    }
}

shared! {
    /// Drained inner flows of a leaving backend. Written with atomic additions.
    DrainStats, 48 {
        /// Flows now being drained. Flows that fell out of the LRU or never said goodbye stay counted.
        flows: u64,
        /// Flows that ever were.
        started: u64,
        /// Of these, flows that ended by themselves.
        ended: u64,
        /// Of these, flows that were reset when the backend stopped keeping them.
        cut: u64,
        /// When the last one ended or was cut.
        last_end: u64,
        /// Last drained packet, one second coarse.
        last_packet: u64,
    }
}
