//! What another parser says of a packet.

use coil_guard_common::{abi::v4_mapped, inner::FlowPacket, packet::MAX_EXTENSION_HEADERS};
use etherparse::{
    Ethernet2HeaderSlice, IpNumber, Ipv4HeaderSlice, Ipv6FragmentHeaderSlice, Ipv6HeaderSlice,
    Ipv6RawExtHeaderSlice, TcpHeaderSlice, UdpHeaderSlice,
    ether_type::{IPV4, IPV6},
    ip_number::{IPV6_DEST_OPTIONS, IPV6_FRAG, IPV6_HOP_BY_HOP, IPV6_ROUTE, TCP, UDP},
};

/// Outer headers.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Outer {
    /// A FoU packet.
    Fou { source: [u8; 16], destination: [u8; 16], source_port: [u8; 2], udp: u32 },
    /// Something else.
    Not,
}

/// The outer headers of a frame.
pub(crate) fn outer(frame: &[u8], fou_port: [u8; 2]) -> Outer {
    let Ok(ethernet) = Ethernet2HeaderSlice::from_slice(frame) else { return Outer::Not };
    match ethernet.ether_type() {
        IPV4 => outer_v4(frame, fou_port).unwrap_or(Outer::Not),
        IPV6 => outer_v6(frame, fou_port).unwrap_or(Outer::Not),
        _ => Outer::Not,
    }
}

fn outer_v4(frame: &[u8], fou_port: [u8; 2]) -> Option<Outer> {
    let ip = Ipv4HeaderSlice::from_slice(&frame[14..]).ok()?;
    let length = ip.slice().len();
    let fits = usize::from(ip.total_len()) >= length + 8;
    if ip.protocol() != UDP || ip.fragments_offset().value() != 0 || !fits {
        return None;
    }
    udp(frame, 14 + length, fou_port, v4_mapped(ip.source()), v4_mapped(ip.destination()))
}

fn outer_v6(frame: &[u8], fou_port: [u8; 2]) -> Option<Outer> {
    let ip = Ipv6HeaderSlice::from_slice(&frame[14..]).ok()?;
    let walked = walk(ip.next_header(), &frame[54..])?;
    let at = frame.len() - walked.rest.len();
    let fits = ip.payload_length() == 0 || usize::from(ip.payload_length()) >= at - 54 + 8;
    if walked.next != UDP || walked.later_fragment || !fits {
        return None;
    }
    udp(frame, at, fou_port, ip.source(), ip.destination())
}

fn udp(frame: &[u8], at: usize, fou_port: [u8; 2], source: [u8; 16], destination: [u8; 16]) -> Option<Outer> {
    let udp = UdpHeaderSlice::from_slice(frame.get(at..)?).ok()?;
    (udp.destination_port() == u16::from_be_bytes(fou_port)).then(|| Outer::Fou {
        source,
        destination,
        source_port: udp.source_port().to_be_bytes(),
        udp: at as u32,
    })
}

/// What stands behind IPv6 extension headers.
struct Walked<'a> {
    next: IpNumber,
    rest: &'a [u8],
    fragmented: bool,
    later_fragment: bool,
}

/// Walks the extension headers, one by one: as a list the other parser hands them out past the end of the packet.
fn walk(mut next: IpNumber, mut rest: &[u8]) -> Option<Walked<'_>> {
    let (mut fragmented, mut later_fragment) = (false, false);
    for _ in 0..=MAX_EXTENSION_HEADERS {
        let length = match next {
            IPV6_HOP_BY_HOP | IPV6_ROUTE | IPV6_DEST_OPTIONS => {
                let header = Ipv6RawExtHeaderSlice::from_slice(rest).ok()?;
                next = header.next_header();
                header.slice().len()
            }
            IPV6_FRAG => {
                let header = Ipv6FragmentHeaderSlice::from_slice(rest).ok()?;
                next = header.next_header();
                fragmented |= header.is_fragmenting_payload();
                later_fragment |= header.fragment_offset().value() != 0;
                header.slice().len()
            }
            _ => return Some(Walked { next, rest, fragmented, later_fragment }),
        };
        rest = rest.get(length..)?;
    }
    None
}

/// An inner flow.
#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) source: [u8; 16],
    pub(crate) destination: [u8; 16],
    pub(crate) source_port: [u8; 2],
    pub(crate) destination_port: [u8; 2],
    pub(crate) protocol: u8,
    pub(crate) packet: FlowPacket,
}

/// The flow of an inner packet that is TCP or UDP and no fragment.
pub(crate) fn inner(packet: &[u8]) -> Option<Inner> {
    let (source, destination, next, rest) = if packet.first()? >> 4 == 4 {
        let ip = Ipv4HeaderSlice::from_slice(packet).ok()?;
        if ip.is_fragmenting_payload() {
            return None;
        }
        let rest = &packet[ip.slice().len()..];
        (v4_mapped(ip.source()), v4_mapped(ip.destination()), ip.protocol(), rest)
    } else {
        let ip = Ipv6HeaderSlice::from_slice(packet).ok()?;
        let walked = walk(ip.next_header(), &packet[40..])?;
        if walked.fragmented {
            return None;
        }
        (ip.source(), ip.destination(), walked.next, walked.rest)
    };
    let (source_port, destination_port, packet) = match next {
        TCP => {
            let tcp = TcpHeaderSlice::from_slice(rest).ok()?;
            let packet = match (tcp.syn() && !tcp.ack(), tcp.fin() || tcp.rst()) {
                (true, _) => FlowPacket::Opening,
                (false, true) => FlowPacket::Closing,
                (false, false) => FlowPacket::Established,
            };
            (tcp.source_port(), tcp.destination_port(), packet)
        }
        UDP => {
            let udp = UdpHeaderSlice::from_slice(rest).ok()?;
            (udp.source_port(), udp.destination_port(), FlowPacket::Stateless)
        }
        _ => return None,
    };
    Some(Inner {
        source,
        destination,
        source_port: source_port.to_be_bytes(),
        destination_port: destination_port.to_be_bytes(),
        protocol: next.0,
        packet,
    })
}
