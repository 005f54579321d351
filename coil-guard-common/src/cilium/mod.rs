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
    ($(#[$meta:meta])* $name:ident, $size:literal, align $align:literal { $($(#[$field_meta:meta])* $field:ident: $type:ty,)+ }) => {
        $(#[$meta])*
        // As far as the size allows, so that the program copies by words and not by bytes; the kernel aligns keys and values
        // to 8.
        #[repr(C, align($align))]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
        pub struct $name { $($(#[$field_meta])* pub $field: $type,)+ }
        const _: () = assert!(size_of::<$name>() == $size);
    };
}

mod conntrack;

pub use self::conntrack::{CtEntry, CtKey4, CtKey6};

layout! {
    /// Service key, IPv4.
    ServiceKey4, 12, align 4 {
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
    ServiceKey6, 24, align 4 {
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
    Service, 12, align 4 {
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
    Backend4, 12, align 4 {
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
    Backend6, 24, align 4 {
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
    AffinityKey4, 16, align 4 {
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
    AffinityKey6, 24, align 4 {
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
    Affinity, 16, align 8 {
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
    ReverseNat4, 6, align 2 {
        /// ClusterIP.
        address: [u8; 4],
        /// Network order.
        port: [u8; 2],
    }
}

layout! {
    /// Reverse NAT value, IPv6; the key is the rev_nat_index in network order.
    ReverseNat6, 18, align 2 {
        /// ClusterIP.
        address: [u8; 16],
        /// Network order.
        port: [u8; 2],
    }
}

layout! {
    /// Key of the affinity match map, both families; its value is one byte.
    AffinityMatchKey, 8, align 4 {
        /// Host order.
        backend_id: u32,
        /// Network order.
        rev_nat_index: [u8; 2],
        /// Zero.
        pad: [u8; 2],
    }
}
