//! Layouts of the Cilium maps that the guard reads and writes, identical from Cilium 1.14 to 1.20-dev.
//!
//! Every multi-byte field says its byte order. Fields in network order are byte arrays, so that they cannot be read as
//! host integers by mistake. Names are Cilium's; in conntrack keys they are those of the *reverse* tuple, see
//! [`CtKey4::service`].

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// `flags` of the conntrack key of a service entry.
pub const CT_SERVICE: u8 = 4;
/// `flags` of the conntrack key of an egress entry.
pub const CT_EGRESS: u8 = 0;
/// `flags` of the conntrack key of an ingress entry.
pub const CT_INGRESS: u8 = 1;
/// Bit of `flags` of the conntrack key of a related (ICMP error) entry.
pub const CT_RELATED: u8 = 2;

/// `flags` bit of a service's master: ClientIP session affinity.
pub const SERVICE_FLAG_AFFINITY: u8 = 0x10;

/// Backend state byte: takes new flows.
pub const BACKEND_ACTIVE: u8 = 0;
/// Backend state byte: its pod is terminating; keeps the flows it has.
pub const BACKEND_TERMINATING: u8 = 1;
/// Backend state byte: failed a health check.
pub const BACKEND_QUARANTINED: u8 = 2;
/// Backend state byte: not ready (1.19 and later), or taken out by an operator.
pub const BACKEND_MAINTENANCE: u8 = 3;

/// IP protocol number of UDP.
pub const PROTO_UDP: u8 = 17;

/// File names of the pins below `<bpffs>/tc/globals`, one set per IP family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MapNames {
    /// Conntrack of everything but TCP.
    pub conntrack: &'static str,
    /// Services and their slots.
    pub services: &'static str,
    /// Backends by id.
    pub backends: &'static str,
    /// Session affinity; may be absent before 1.19.
    pub affinity: &'static str,
}

/// Names of the IPv4 maps.
pub const MAPS4: MapNames = MapNames {
    conntrack: "cilium_ct_any4_global",
    services: "cilium_lb4_services_v2",
    backends: "cilium_lb4_backends_v3",
    affinity: "cilium_lb4_affinity",
};
/// Names of the IPv6 maps.
pub const MAPS6: MapNames = MapNames {
    conntrack: "cilium_ct_any6_global",
    services: "cilium_lb6_services_v2",
    backends: "cilium_lb6_backends_v3",
    affinity: "cilium_lb6_affinity",
};

/// Pin name of the reverse NAT map, IPv4. Read by Cilium only.
pub const REVERSE_NAT4: &str = "cilium_lb4_reverse_nat";
/// Pin name of the reverse NAT map, IPv6. Read by Cilium only.
pub const REVERSE_NAT6: &str = "cilium_lb6_reverse_nat";
/// Pin name of the map of backends that affinity may choose, both families. Read by Cilium only.
pub const AFFINITY_MATCH: &str = "cilium_lb_affinity_match";

macro_rules! layout {
    ($(#[$meta:meta])* $name:ident, $size:literal { $($(#[$field_meta:meta])* $field:ident: $type:ty,)+ }) => {
        $(#[$meta])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
        pub struct $name { $($(#[$field_meta])* pub $field: $type,)+ }
        const _: () = assert!(size_of::<$name>() == $size);
    };
}

layout! {
    /// Conntrack key, IPv4.
    CtKey4, 14 {
        /// Destination of the stored tuple.
        daddr: [u8; 4],
        /// Source of the stored tuple.
        saddr: [u8; 4],
        /// Network order; holds the *source* port of the packet in a service entry.
        dport: [u8; 2],
        /// Network order; holds the *destination* port of the packet in a service entry.
        sport: [u8; 2],
        /// IP protocol.
        nexthdr: u8,
        /// `CT_SERVICE`, `CT_EGRESS`, …
        flags: u8,
    }
}

layout! {
    /// Conntrack key, IPv6.
    CtKey6, 38 {
        /// Destination of the stored tuple.
        daddr: [u8; 16],
        /// Source of the stored tuple.
        saddr: [u8; 16],
        /// Network order; see [`CtKey4`].
        dport: [u8; 2],
        /// Network order; see [`CtKey4`].
        sport: [u8; 2],
        /// IP protocol.
        nexthdr: u8,
        /// `CT_SERVICE`, `CT_EGRESS`, …
        flags: u8,
    }
}

layout! {
    /// Conntrack entry, both families. In host order but for `rev_nat_index`.
    CtEntry, 56 {
        /// Receive counter or reserved, by version.
        reserved0: u64,
        /// In a service entry the chosen backend.
        backend_id: u64,
        /// From 1.16 in service entries too.
        packets: u64,
        /// From 1.16 in service entries too.
        bytes: u64,
        /// Seconds of CLOCK_MONOTONIC (or jiffies >> 8); looked at by the garbage collection only.
        lifetime: u32,
        /// Bit field: closing, see-non-syn, node port, …
        flags: u16,
        /// Network order.
        rev_nat_index: [u8; 2],
        /// Interface index, reserved or NAT port, by version.
        ifindex: u16,
        /// TCP flags seen.
        tx_flags_seen: u8,
        /// TCP flags seen.
        rx_flags_seen: u8,
        /// Security identity of the source.
        src_sec_id: u32,
        /// Time of the last monitor report.
        last_tx_report: u32,
        /// Time of the last monitor report.
        last_rx_report: u32,
    }
}

layout! {
    /// Service key, IPv4.
    ServiceKey4, 12 {
        /// ClusterIP.
        address: [u8; 4],
        /// Network order.
        dport: [u8; 2],
        /// Host order; 0 is the master.
        backend_slot: u16,
        /// 17 from 1.17, 0 (any) before.
        proto: u8,
        /// 0 for a ClusterIP.
        scope: u8,
        /// Zero.
        pad: [u8; 2],
    }
}

layout! {
    /// Service key, IPv6.
    ServiceKey6, 24 {
        /// ClusterIP.
        address: [u8; 16],
        /// Network order.
        dport: [u8; 2],
        /// Host order; 0 is the master.
        backend_slot: u16,
        /// 17 from 1.17, 0 (any) before.
        proto: u8,
        /// 0 for a ClusterIP.
        scope: u8,
        /// Zero.
        pad: [u8; 2],
    }
}

layout! {
    /// Service value, both families.
    Service, 12 {
        /// Host order: the backend id in a slot; in the master the affinity timeout in seconds (low 24 bits).
        word: u32,
        /// Host order; in the master the number of selectable slots.
        count: u16,
        /// Network order.
        rev_nat_index: [u8; 2],
        /// In the master `SERVICE_FLAG_AFFINITY`, …; a slot's differ between versions.
        flags: u8,
        /// More flags; differ between versions.
        flags2: u8,
        /// Host order: number of slots behind `count` that are never selected, from 1.17.
        qcount: u16,
    }
}

layout! {
    /// Backend value, IPv4 (v3).
    Backend4, 12 {
        /// Pod address.
        address: [u8; 4],
        /// Network order.
        port: [u8; 2],
        /// IP protocol or 0.
        proto: u8,
        /// `BACKEND_ACTIVE`, …
        state: u8,
        /// Host order.
        cluster_id: u16,
        /// From 1.16.
        zone: u8,
        /// Zero.
        pad: u8,
    }
}

layout! {
    /// Backend value, IPv6 (v3).
    Backend6, 24 {
        /// Pod address.
        address: [u8; 16],
        /// Network order.
        port: [u8; 2],
        /// IP protocol or 0.
        proto: u8,
        /// `BACKEND_ACTIVE`, …
        state: u8,
        /// Host order.
        cluster_id: u16,
        /// From 1.16.
        zone: u8,
        /// Zero.
        pad: u8,
    }
}

layout! {
    /// Affinity key, IPv4.
    AffinityKey4, 16 {
        /// Client pod address.
        client: [u8; 4],
        /// Zero.
        pad0: [u8; 4],
        /// Network order.
        rev_nat_index: [u8; 2],
        /// Zero: the client is an address and not a namespace cookie.
        pad: [u8; 6],
    }
}

layout! {
    /// Affinity key, IPv6.
    AffinityKey6, 24 {
        /// Client pod address.
        client: [u8; 16],
        /// Network order.
        rev_nat_index: [u8; 2],
        /// Zero: the client is an address and not a namespace cookie.
        pad: [u8; 6],
    }
}

layout! {
    /// Affinity value, both families.
    Affinity, 16 {
        /// Same clock and unit as `CtEntry::lifetime`.
        last_used: u64,
        /// Host order.
        backend_id: u32,
        /// Zero.
        pad: u32,
    }
}

layout! {
    /// Reverse NAT value, IPv4; the key is the rev_nat_index in network order.
    ReverseNat4, 6 {
        /// ClusterIP.
        address: [u8; 4],
        /// Network order.
        port: [u8; 2],
    }
}

layout! {
    /// Reverse NAT value, IPv6; the key is the rev_nat_index in network order.
    ReverseNat6, 18 {
        /// ClusterIP.
        address: [u8; 16],
        /// Network order.
        port: [u8; 2],
    }
}

layout! {
    /// Key of the affinity match map, both families; its value is one byte.
    AffinityMatchKey, 8 {
        /// Host order.
        backend_id: u32,
        /// Network order.
        rev_nat_index: [u8; 2],
        /// Zero.
        pad: [u8; 2],
    }
}

impl CtKey4 {
    /// Key of the service entry of a packet `client:client_port → service:service_port`, ports in network order.
    ///
    /// Addresses stand as in the packet; ports the other way round.
    #[inline(always)]
    #[must_use]
    pub const fn service(
        client: [u8; 4],
        client_port: [u8; 2],
        service: [u8; 4],
        service_port: [u8; 2],
    ) -> Self {
        Self {
            daddr: service,
            saddr: client,
            dport: client_port,
            sport: service_port,
            nexthdr: PROTO_UDP,
            flags: CT_SERVICE,
        }
    }

    /// Key of the egress entry of the same packet once it goes to `backend:backend_port`.
    #[inline(always)]
    #[must_use]
    pub const fn egress(
        client: [u8; 4],
        client_port: [u8; 2],
        backend: [u8; 4],
        backend_port: [u8; 2],
    ) -> Self {
        Self {
            daddr: client,
            saddr: backend,
            dport: backend_port,
            sport: client_port,
            nexthdr: PROTO_UDP,
            flags: CT_EGRESS,
        }
    }
}

impl CtKey6 {
    /// As [`CtKey4::service`].
    #[inline(always)]
    #[must_use]
    pub const fn service(
        client: [u8; 16],
        client_port: [u8; 2],
        service: [u8; 16],
        service_port: [u8; 2],
    ) -> Self {
        Self {
            daddr: service,
            saddr: client,
            dport: client_port,
            sport: service_port,
            nexthdr: PROTO_UDP,
            flags: CT_SERVICE,
        }
    }

    /// As [`CtKey4::egress`].
    #[inline(always)]
    #[must_use]
    pub const fn egress(
        client: [u8; 16],
        client_port: [u8; 2],
        backend: [u8; 16],
        backend_port: [u8; 2],
    ) -> Self {
        Self {
            daddr: client,
            saddr: backend,
            dport: backend_port,
            sport: client_port,
            nexthdr: PROTO_UDP,
            flags: CT_EGRESS,
        }
    }
}

impl CtEntry {
    /// A service entry that names `backend_id` and nothing else; Cilium fills in the lifetime with the next packet.
    #[inline(always)]
    #[must_use]
    pub const fn for_backend(backend_id: u32, rev_nat_index: [u8; 2]) -> Self {
        Self::minimal(backend_id as u64, rev_nat_index, 0)
    }

    /// An egress entry that only makes replies recognised and reverse-NATed until `lifetime`.
    #[inline(always)]
    #[must_use]
    pub const fn for_replies(rev_nat_index: [u8; 2], lifetime: u32) -> Self {
        Self::minimal(0, rev_nat_index, lifetime)
    }

    #[inline(always)]
    const fn minimal(backend_id: u64, rev_nat_index: [u8; 2], lifetime: u32) -> Self {
        Self {
            reserved0: 0,
            backend_id,
            packets: 0,
            bytes: 0,
            lifetime,
            flags: 0,
            rev_nat_index,
            ifindex: 0,
            tx_flags_seen: 0,
            rx_flags_seen: 0,
            src_sec_id: 0,
            last_tx_report: 0,
            last_rx_report: 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use zerocopy::IntoBytes as _;

    use super::*;

    #[test]
    fn service_and_egress_keys_have_ports_the_other_way_round() {
        let (client, service, backend) = ([10, 0, 0, 1], [10, 96, 0, 10], [10, 0, 1, 5]);
        let (client_port, service_port) = (5600u16.to_be_bytes(), 5555u16.to_be_bytes());
        assert_eq!(
            CtKey4::service(client, client_port, service, service_port).as_bytes(),
            [0x0a, 0x60, 0, 0x0a, 0x0a, 0, 0, 1, 0x15, 0xe0, 0x15, 0xb3, 0x11, 4]
        );
        assert_eq!(
            CtKey4::egress(client, client_port, backend, service_port).as_bytes(),
            [0x0a, 0, 0, 1, 0x0a, 0, 1, 5, 0x15, 0xb3, 0x15, 0xe0, 0x11, 0]
        );
    }

    #[test]
    fn conntrack_entry_fields_stand_where_the_datapath_reads_them() {
        assert_eq!(core::mem::offset_of!(CtEntry, backend_id), 8);
        assert_eq!(core::mem::offset_of!(CtEntry, lifetime), 32);
        assert_eq!(core::mem::offset_of!(CtEntry, rev_nat_index), 38);
    }
}
