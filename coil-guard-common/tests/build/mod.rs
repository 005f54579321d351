//! Packets, written down byte by byte.

/// The client pod.
pub(crate) const CLIENT4: [u8; 4] = [10, 0, 0, 1];
/// The ClusterIP.
pub(crate) const SERVICE4: [u8; 4] = [10, 96, 0, 10];
/// The client pod, IPv6.
pub(crate) const CLIENT6: [u8; 16] = [0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1];
/// The ClusterIP, IPv6.
pub(crate) const SERVICE6: [u8; 16] = [0xfd, 0, 0, 0x96, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x10];
/// Somewhere outside.
pub(crate) const OUTSIDE4: [u8; 4] = [203, 0, 113, 9];
/// Somewhere outside, IPv6.
pub(crate) const OUTSIDE6: [u8; 16] = [0x20, 1, 0xd, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 9];

pub(crate) const ICMP: u8 = 1;
pub(crate) const TCP: u8 = 6;
pub(crate) const UDP: u8 = 17;
pub(crate) const ICMPV6: u8 = 58;
pub(crate) const HOP_BY_HOP: u8 = 0;
pub(crate) const ROUTING: u8 = 43;
pub(crate) const FRAGMENT: u8 = 44;
pub(crate) const DESTINATION: u8 = 60;

/// IPv4 `flags and offset` of a first fragment.
pub(crate) const MORE: u16 = 0x2000;

fn concat(parts: &[&[u8]]) -> Vec<u8> {
    parts.concat()
}

pub(crate) fn ethernet(ether_type: u16, payload: &[u8]) -> Vec<u8> {
    concat(&[&[2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2], &ether_type.to_be_bytes(), payload])
}

/// `options` in bytes, a multiple of four.
pub(crate) fn ipv4(
    source: [u8; 4],
    destination: [u8; 4],
    protocol: u8,
    fragment: u16,
    options: &[u8],
    payload: &[u8],
) -> Vec<u8> {
    let header = 20 + options.len();
    let length = (header + payload.len()) as u16;
    let mut ip = vec![0x40 | (header / 4) as u8, 0];
    ip.extend(length.to_be_bytes());
    ip.extend([0x12, 0x34]);
    ip.extend(fragment.to_be_bytes());
    ip.extend([225, protocol, 0, 0]);
    concat(&[&ip, &source, &destination, options, payload])
}

pub(crate) fn ipv6(source: [u8; 16], destination: [u8; 16], next: u8, payload: &[u8]) -> Vec<u8> {
    let length = (payload.len() as u16).to_be_bytes();
    concat(&[&[0x60, 0, 0, 0], &length, &[next, 225], &source, &destination, payload])
}

/// Extension headers in front of `payload`; gives the number that names the first of them too.
pub(crate) fn extensions(headers: &[Extension], last: u8, payload: &[u8]) -> (u8, Vec<u8>) {
    headers.iter().rev().fold((last, payload.to_vec()), |(next, rest), header| match *header {
        Extension::Options(kind, units) => {
            let mut bytes = vec![0; 8 + 8 * usize::from(units)];
            (bytes[0], bytes[1]) = (next, units);
            // PadN over the rest.
            (bytes[2], bytes[3]) = (1, (bytes.len() - 4).min(255) as u8);
            bytes.extend(rest);
            (kind, bytes)
        }
        Extension::Fragment(bits) => {
            let mut bytes = vec![next, 0];
            bytes.extend(bits.to_be_bytes());
            bytes.extend([0xca, 0xfe, 0xba, 0xbe]);
            bytes.extend(rest);
            (FRAGMENT, bytes)
        }
    })
}

/// An IPv6 extension header.
#[derive(Clone, Copy)]
pub(crate) enum Extension {
    /// Of this kind, with so many eight bytes beyond the first.
    Options(u8, u8),
    /// Offset and flags as in the header.
    Fragment(u16),
}

pub(crate) fn udp(source: u16, destination: u16, payload: &[u8]) -> Vec<u8> {
    let length = (8 + payload.len()) as u16;
    concat(&[&source.to_be_bytes(), &destination.to_be_bytes(), &length.to_be_bytes(), &[0, 0], payload])
}

pub(crate) fn tcp(source: u16, destination: u16, flags: u8) -> Vec<u8> {
    let ports = [source.to_be_bytes(), destination.to_be_bytes()].concat();
    concat(&[&ports, &[0; 8], &[0x50, flags], &[0xff, 0xff, 0, 0, 0, 0]])
}

/// An ICMP message; `rest` is what follows the checksum.
pub(crate) fn icmp(kind: u8, rest: &[u8]) -> Vec<u8> {
    concat(&[&[kind, 0, 0, 0], rest])
}

/// A FoU frame over IPv4.
pub(crate) fn fou4(source_port: u16, inner: &[u8]) -> Vec<u8> {
    ethernet(0x0800, &ipv4(CLIENT4, SERVICE4, UDP, 0x4000, &[], &udp(source_port, 5555, inner)))
}

/// A FoU frame over IPv6 with extension headers.
pub(crate) fn fou6(source_port: u16, headers: &[Extension], inner: &[u8]) -> Vec<u8> {
    let (next, payload) = extensions(headers, UDP, &udp(source_port, 5555, inner));
    ethernet(0x86dd, &ipv6(CLIENT6, SERVICE6, next, &payload))
}

/// Inner packets of every kind that is told apart.
pub(crate) fn inners() -> Vec<Vec<u8>> {
    let v4 = |protocol, payload: &[u8]| ipv4(CLIENT4, OUTSIDE4, protocol, 0, &[], payload);
    let v6 = |protocol, payload: &[u8]| ipv6(CLIENT6, OUTSIDE6, protocol, payload);
    let quoted4 = ipv4(OUTSIDE4, CLIENT4, TCP, 0, &[], &tcp(443, 40000, 0x10));
    let quoted6 = ipv6(OUTSIDE6, CLIENT6, UDP, &udp(53, 40001, &[]));
    let (next, long) = extensions(&[Extension::Options(DESTINATION, 2)], TCP, &tcp(40000, 443, 2));
    let (fragment, piece) = extensions(&[Extension::Fragment(1)], UDP, &udp(40001, 53, &[1; 16]));
    vec![
        v4(TCP, &tcp(40000, 443, 0x02)),
        v4(TCP, &tcp(40000, 443, 0x11)),
        v4(UDP, &udp(40001, 53, b"question")),
        v4(ICMP, &icmp(8, &[0x77, 0x88, 0, 1])),
        v4(ICMP, &icmp(3, &concat(&[&[0; 4], &quoted4]))),
        v4(47, &[0; 16]),
        ipv4(CLIENT4, OUTSIDE4, UDP, MORE, &[1; 8], &udp(40001, 53, &[0; 16])),
        ipv4(CLIENT4, OUTSIDE4, UDP, 100, &[], &[0; 16]),
        v6(TCP, &tcp(40000, 443, 0x10)),
        v6(ICMPV6, &icmp(128, &[0x77, 0x88, 0, 1])),
        v6(ICMPV6, &icmp(1, &concat(&[&[0; 4], &quoted6]))),
        v6(next, &long),
        v6(fragment, &piece),
    ]
}
