//! Conntrack: keys and entries.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::{CT_EGRESS, CT_SERVICE, PROTO_UDP};

layout! {
    /// Conntrack key, IPv4.
    CtKey4, 14, align 2 {
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
    CtKey6, 38, align 2 {
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
    CtEntry, 56, align 8 {
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
