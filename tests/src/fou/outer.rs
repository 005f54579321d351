//! Outer packets, as complete Ethernet frames.

use std::net::IpAddr;

use super::checksum;

/// The outer UDP checksum.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum ChecksumKind {
    /// 0, which is what Coil's devices send.
    #[default]
    Zero,
    /// Correct.
    Correct,
    /// Wrong by one.
    Wrong,
}

/// The outer header of a FoU packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outer {
    /// Source and its port.
    pub source: (IpAddr, u16),
    /// Destination and its port.
    pub destination: (IpAddr, u16),
    /// UDP checksum.
    pub checksum: ChecksumKind,
    /// IPv6: the 8-byte Destination Options header (tunnel encapsulation limit) that Coil's devices send.
    pub destination_options: bool,
}

/// Hop limit of Coil's devices.
const TTL: u8 = 225;
const UDP: u8 = 17;
const DESTINATION_OPTIONS: u8 = 60;

impl Outer {
    /// Zero checksum; in IPv6 with the Destination Options header: exactly what Coil's devices send.
    #[must_use]
    pub fn coil(source: (IpAddr, u16), destination: (IpAddr, u16)) -> Self {
        Self { source, destination, checksum: ChecksumKind::Zero, destination_options: true }
    }

    /// The IP packet with this payload.
    ///
    /// # Panics
    ///
    /// When source and destination are not of one family.
    #[must_use]
    pub fn packet(&self, payload: &[u8]) -> Vec<u8> {
        let ((source, source_port), (destination, destination_port)) = (self.source, self.destination);
        let length = (8 + payload.len()) as u16;
        let mut datagram = Vec::with_capacity(usize::from(length));
        datagram.extend(source_port.to_be_bytes());
        datagram.extend(destination_port.to_be_bytes());
        datagram.extend(length.to_be_bytes());
        datagram.extend([0, 0]);
        datagram.extend(payload);
        if self.checksum != ChecksumKind::Zero {
            let correct = checksum::transport(source, destination, UDP, &datagram);
            let sent = if self.checksum == ChecksumKind::Wrong { correct.wrapping_add(1) } else { correct };
            datagram[6..8].copy_from_slice(&(if sent == 0 { 0xffff } else { sent }).to_be_bytes());
        }
        match (source, destination) {
            (IpAddr::V4(source), IpAddr::V4(destination)) => {
                let mut packet = vec![0x45, 0];
                packet.extend((20 + length).to_be_bytes());
                packet.extend([0, 0, 0x40, 0, TTL, UDP, 0, 0]);
                packet.extend(source.octets());
                packet.extend(destination.octets());
                let checksum = !checksum::sum(&[&packet]);
                packet[10..12].copy_from_slice(&checksum.to_be_bytes());
                packet.extend(datagram);
                packet
            }
            (IpAddr::V6(source), IpAddr::V6(destination)) => {
                // Tunnel encapsulation limit 0, padded to 8 bytes (RFC 2473, section 4.1.1).
                let options = [UDP, 0, 4, 1, 0, 1, 1, 0];
                let extension: &[u8] = if self.destination_options { &options } else { &[] };
                let next = if self.destination_options { DESTINATION_OPTIONS } else { UDP };
                let mut packet = vec![0x60, 0, 0, 0];
                packet.extend((length + extension.len() as u16).to_be_bytes());
                packet.extend([next, TTL]);
                packet.extend(source.octets());
                packet.extend(destination.octets());
                packet.extend(extension);
                packet.extend(datagram);
                packet
            }
            (source, destination) => panic!("{source} and {destination} are not of one family"),
        }
    }
}

/// An Ethernet frame around an IP packet.
#[must_use]
pub fn frame(source: [u8; 6], destination: [u8; 6], packet: &[u8]) -> Vec<u8> {
    let ethertype: u16 = if packet.first().is_some_and(|first| first >> 4 == 6) { 0x86dd } else { 0x0800 };
    [&destination[..], &source, &ethertype.to_be_bytes(), packet].concat()
}
