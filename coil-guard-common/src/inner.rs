//! Inner headers: which flow of the client a FoU packet carries.
//!
//! Nothing here fails: what cannot be read further belongs to the flow of what was read, in the end to the one flow of
//! the client that has no inner addresses.

use core::mem::offset_of;

use network_types::ip::{Ipv4Hdr, Ipv6Hdr};

use crate::{
    abi::{FragmentKey, FragmentPorts, InnerFlowKey, v4_mapped},
    cilium::PROTO_UDP,
    packet::{Load, MAX_EXTENSION_HEADERS, NEXT_DESTINATION, NEXT_FRAGMENT, NEXT_HOP_BY_HOP, NEXT_ROUTING},
};

const PROTO_ICMP: u8 = 1;
const PROTO_TCP: u8 = 6;
const PROTO_ICMPV6: u8 = 58;

const TCP_FLAGS_OFFSET: u32 = 13;
const TCP_FIN: u8 = 0x01;
const TCP_SYN: u8 = 0x02;
const TCP_RST: u8 = 0x04;
const TCP_ACK: u8 = 0x10;

/// Length of an ICMP header before the packet that an error quotes.
const ICMP_HEADER: u32 = 8;

/// What an inner packet says about the life of its flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlowPacket {
    /// TCP SYN without ACK: opens a connection.
    Opening,
    /// TCP FIN or RST.
    Closing,
    /// Any other TCP segment: the connection exists.
    Established,
    /// Not TCP: nothing but time tells a new flow.
    Stateless,
}

/// Where a packet stands among the fragments of its datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fragment {
    /// Not a fragment.
    Whole,
    /// Carries the ports.
    First,
    /// Carries none.
    Later,
}

/// Where and what the inner transport header is.
struct Transport {
    offset: u32,
    fragment: Fragment,
}

/// Reads the inner packet at `offset` into `key` (all fields but the outer ones) and, for a fragment, into `fragment_key`.
#[inline(always)]
pub fn parse(
    packet: &impl Load,
    offset: u32,
    key: &mut InnerFlowKey,
    fragment_key: &mut FragmentKey,
) -> (FlowPacket, Fragment) {
    key.source_port = [0; 2];
    key.destination_port = [0; 2];
    key.protocol = 0;
    let Some(transport) = network(packet, offset, key, fragment_key) else {
        return (FlowPacket::Stateless, Fragment::Whole);
    };
    if transport.fragment != Fragment::Whole {
        fragment_key.source = key.source;
        fragment_key.destination = key.destination;
        fragment_key.protocol = key.protocol;
    }
    if transport.fragment == Fragment::Later {
        let packet = if key.protocol == PROTO_TCP { FlowPacket::Established } else { FlowPacket::Stateless };
        return (packet, Fragment::Later);
    }
    // Where it nearly always is, at offsets that the compiler knows.
    const V4: u32 = Ipv4Hdr::LEN as u32;
    const V6: u32 = Ipv6Hdr::LEN as u32;
    let first = if transport.offset == offset + V4 {
        packet.load_near(offset + V4)
    } else if transport.offset == offset + V6 {
        packet.load_near(offset + V6)
    } else {
        None
    };
    (ports(packet, transport.offset, first, key), transport.fragment)
}

/// Puts the ports that the first fragment carried into the key of a later one.
#[inline(always)]
pub fn follow_first(key: &mut InnerFlowKey, ports: &FragmentPorts) {
    key.source_port = ports.source_port;
    key.destination_port = ports.destination_port;
}

/// Reads the network header at `offset`: addresses and protocol into `key`.
#[inline(always)]
fn network(
    packet: &impl Load,
    offset: u32,
    key: &mut InnerFlowKey,
    fragment_key: &mut FragmentKey,
) -> Option<Transport> {
    let version = packet.load_near::<[u8; 1]>(offset).map_or(0, |[version]| version >> 4);
    if version == 4
        && let Some(ip) = packet.load_near::<Ipv4Hdr>(offset)
    {
        network_v4(&ip, offset, key, fragment_key)
    } else if version == 6
        && let Some(ip) = packet.load_near::<Ipv6Hdr>(offset)
    {
        network_v6(packet, &ip, offset, key, fragment_key)
    } else {
        (key.source, key.destination) = ([0; 16], [0; 16]);
        None
    }
}

#[inline(always)]
fn network_v4(
    ip: &Ipv4Hdr,
    offset: u32,
    key: &mut InnerFlowKey,
    fragment_key: &mut FragmentKey,
) -> Option<Transport> {
    key.source = v4_mapped(ip.src_addr);
    key.destination = v4_mapped(ip.dst_addr);
    key.protocol = ip.proto;
    let bits = u16::from_be_bytes(ip.frags);
    let fragment = match (bits & 0x1fff, bits & 0x2000) {
        (0, 0) => Fragment::Whole,
        (0, _) => Fragment::First,
        _ => Fragment::Later,
    };
    let [high, low] = ip.id;
    fragment_key.identification = [0, 0, high, low];
    let length = u32::from(ip.ihl());
    (length >= Ipv4Hdr::LEN as u32).then_some(Transport { offset: offset + length, fragment })
}

#[inline(always)]
fn network_v6(
    packet: &impl Load,
    ip: &Ipv6Hdr,
    offset: u32,
    key: &mut InnerFlowKey,
    fragment_key: &mut FragmentKey,
) -> Option<Transport> {
    key.source = ip.src_addr;
    key.destination = ip.dst_addr;
    let mut next = ip.next_hdr;
    let mut at = offset + Ipv6Hdr::LEN as u32;
    let mut fragment = Fragment::Whole;
    let mut left = MAX_EXTENSION_HEADERS;
    while left > 0 && matches!(next, NEXT_HOP_BY_HOP | NEXT_ROUTING | NEXT_FRAGMENT | NEXT_DESTINATION) {
        left -= 1;
        key.protocol = next;
        let [following, length, high, low] = packet.load::<[u8; 4]>(at)?;
        if next == NEXT_FRAGMENT {
            fragment_key.identification = packet.load(at + 4)?;
            let bits = u16::from_be_bytes([high, low]);
            fragment = match (bits & 0xfff8, bits & 1) {
                (0, 0) => Fragment::Whole,
                (0, _) => Fragment::First,
                _ => Fragment::Later,
            };
            at += 8;
        } else {
            at += (u32::from(length) + 1) * 8;
        }
        next = following;
        if fragment == Fragment::Later {
            break;
        }
    }
    key.protocol = next;
    Some(Transport { offset: at, fragment })
}

/// The first bytes of a transport header, up to the flags of TCP.
type First = [u8; TCP_FLAGS_OFFSET as usize + 1];

/// Reads ports (or what stands for them) of a packet with a transport header. `first` are its first bytes, where they
/// were read already; a header can be shorter.
#[inline(always)]
fn ports(packet: &impl Load, offset: u32, first: Option<First>, key: &mut InnerFlowKey) -> FlowPacket {
    match key.protocol {
        PROTO_TCP => {
            read_ports(packet, offset, first, key);
            let flags = match first {
                Some([.., flags]) => Some([flags]),
                None => packet.load::<[u8; 1]>(offset + TCP_FLAGS_OFFSET),
            };
            match flags {
                Some([flags]) if flags & (TCP_SYN | TCP_ACK) == TCP_SYN => FlowPacket::Opening,
                Some([flags]) if flags & (TCP_FIN | TCP_RST) != 0 => FlowPacket::Closing,
                _ => FlowPacket::Established,
            }
        }
        PROTO_UDP => {
            read_ports(packet, offset, first, key);
            FlowPacket::Stateless
        }
        PROTO_ICMP | PROTO_ICMPV6 => icmp(packet, offset, key),
        _ => FlowPacket::Stateless,
    }
}

#[inline(always)]
fn read_ports(packet: &impl Load, offset: u32, first: Option<First>, key: &mut InnerFlowKey) {
    let ports = match first {
        Some([s0, s1, d0, d1, ..]) => Some([s0, s1, d0, d1]),
        None => packet.load::<[u8; 4]>(offset),
    };
    if let Some([s0, s1, d0, d1]) = ports {
        key.source_port = [s0, s1];
        key.destination_port = [d0, d1];
    }
}

#[inline(always)]
fn icmp(packet: &impl Load, offset: u32, key: &mut InnerFlowKey) -> FlowPacket {
    let Some([kind]) = packet.load::<[u8; 1]>(offset) else {
        return FlowPacket::Stateless;
    };
    let v6 = key.protocol == PROTO_ICMPV6;
    if is_echo(kind, v6) {
        read_echo_identifier(packet, offset, key);
        return FlowPacket::Stateless;
    }
    if is_error(kind, v6) {
        return quoted(packet, offset + ICMP_HEADER, key);
    }
    FlowPacket::Stateless
}

/// An error belongs to the flow whose packet it quotes. That packet came *to* the client, so the flow's tuple is the
/// quoted one turned round.
#[inline(always)]
fn quoted(packet: &impl Load, offset: u32, key: &mut InnerFlowKey) -> FlowPacket {
    let Some([version]) = packet.load::<[u8; 1]>(offset) else {
        return FlowPacket::Stateless;
    };
    // Options of a quoted IPv4 header are followed, extension headers of a quoted IPv6 header are not: such an error goes
    // by addresses and protocol.
    let transport = if version >> 4 == 4 {
        let Some(ip) = packet.load::<Ipv4Hdr>(offset) else { return FlowPacket::Stateless };
        key.source = v4_mapped(ip.dst_addr);
        key.destination = v4_mapped(ip.src_addr);
        key.protocol = ip.proto;
        if u16::from_be_bytes(ip.frags) & 0x1fff != 0 {
            return established(key);
        }
        offset + u32::from(ip.ihl())
    } else {
        if version >> 4 != 6 {
            return FlowPacket::Stateless;
        }
        let Some(ip) = packet.load::<Ipv6Hdr>(offset) else { return FlowPacket::Stateless };
        key.source = ip.dst_addr;
        key.destination = ip.src_addr;
        key.protocol = ip.next_hdr;
        offset + Ipv6Hdr::LEN as u32
    };
    match key.protocol {
        PROTO_TCP | PROTO_UDP => {
            if let Some([s0, s1, d0, d1]) = packet.load::<[u8; 4]>(transport) {
                key.source_port = [d0, d1];
                key.destination_port = [s0, s1];
            }
        }
        PROTO_ICMP | PROTO_ICMPV6 => read_echo_identifier(packet, transport, key),
        _ => {}
    }
    established(key)
}

#[inline(always)]
fn established(key: &InnerFlowKey) -> FlowPacket {
    if key.protocol == PROTO_TCP { FlowPacket::Established } else { FlowPacket::Stateless }
}

#[inline(always)]
fn read_echo_identifier(packet: &impl Load, offset: u32, key: &mut InnerFlowKey) {
    if let Some(identifier) = packet.load::<[u8; 2]>(offset + 4) {
        key.source_port = identifier;
    }
}

#[inline(always)]
const fn is_echo(kind: u8, v6: bool) -> bool {
    if v6 { matches!(kind, 128 | 129) } else { matches!(kind, 8 | 0) }
}

#[inline(always)]
const fn is_error(kind: u8, v6: bool) -> bool {
    if v6 { matches!(kind, 1..=4) } else { matches!(kind, 3 | 4 | 5 | 11 | 12) }
}

const _: () = assert!(offset_of!(Ipv4Hdr, frags) == 6);
