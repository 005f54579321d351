//! What the program tells the agent: counters and events.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

shared! {
    /// Packets and moves of one Egress; one record per CPU.
    EgressCounters, 112 {
        /// FoU packets to the guarded service.
        packets: u64,
        /// Flows moved from an unusable backend to a live one.
        moved: u64,
        /// Service entries made for a first packet.
        created: u64,
        /// Dangling service entries repaired.
        repaired: u64,
        /// Packets sent under a drain port.
        drained: u64,
        /// Inner flows reset because their backend stopped keeping them.
        cut: u64,
        /// Packets that met no live backend.
        no_live: u64,
        /// Audit: packets that reset would have moved.
        would_move: u64,
        /// Audit: of these, packets of flows that drain would have kept.
        would_drain: u64,
        /// Packets that should have been drained and could not be.
        not_drained: u64,
        /// `put` gave up after losing races.
        contended: u64,
        /// Packets sent under a port that rewrite gave.
        rewritten: u64,
        /// Ports that rewrite gave.
        new_ports: u64,
        /// Packets of flows that rewrite should have moved and could not.
        cannot_move: u64,
    }
}

/// [`Event::kind`].
pub mod event {
    /// A client's flow was moved to a live backend.
    pub const MOVED: u8 = 1;
    /// A flow should have been moved, and no backend was live.
    pub const NO_LIVE: u8 = 2;
    /// Audit: a flow would have been moved.
    pub const WOULD_MOVE: u8 = 3;
    /// A drain port was taken by another draining backend.
    pub const DRAIN_PORT_COLLISION: u8 = 4;
    /// Rewrite: a flow should leave and stays. `to` is the backend to which Cilium's affinity would send it back, or none
    /// where other ports were of no use.
    pub const CANNOT_MOVE: u8 = 5;
}

shared! {
    /// Something that happened, for the agent's log, metrics and Kubernetes events.
    Event, 96 {
        /// When.
        time: u64,
        /// Client pod.
        client: [u8; 16],
        /// ClusterIP.
        service: [u8; 16],
        /// Address of the backend that the flow was on, or zeros.
        from: [u8; 16],
        /// Address of the backend that it went to, or zeros.
        to: [u8; 16],
        /// Id of the former, or 0.
        from_id: u32,
        /// Id of the latter, or 0.
        to_id: u32,
        /// Index of the Egress.
        egress: u32,
        /// Outer destination port, network order.
        service_port: [u8; 2],
        /// Outer source port, network order.
        client_port: [u8; 2],
        /// See [`event`].
        kind: u8,
        /// See [`mode`].
        mode: u8,
        /// Zero.
        pad: [u8; 6],
    }
}

shared! {
    /// What an event is about; bounds the rate of each.
    ReportKey, 40 {
        /// ClusterIP.
        service: [u8; 16],
        /// Client pod.
        client: [u8; 16],
        /// Backend id that the flow was on.
        from_id: u32,
        /// Outer destination port, network order.
        service_port: [u8; 2],
        /// See [`event`].
        kind: u8,
        /// Zero.
        pad: u8,
    }
}
