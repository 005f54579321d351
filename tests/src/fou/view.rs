//! What is seen of a packet where it arrives.

use std::net::IpAddr;

use super::{checksum, inner::Tag};

/// Verdict on the outer UDP checksum of a packet on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChecksumState {
    /// 0.
    Zero,
    /// Correct.
    Correct,
    /// Not completed yet (left to a device), and what is there is as it should be.
    Pending,
    /// Wrong: a receiver drops the packet.
    Wrong,
}

/// An outer UDP packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OuterView<'a> {
    /// Source address and port.
    pub source: (IpAddr, u16),
    /// Destination address and port.
    pub destination: (IpAddr, u16),
    /// Checksum.
    pub checksum: ChecksumState,
    /// Whether IPv6 extension headers stand before UDP.
    pub extension_headers: bool,
    /// UDP payload.
    pub payload: &'a [u8],
}

impl<'a> OuterView<'a> {
    /// Reads an Ethernet frame; `None` when it is not UDP, or a later fragment, or cut off.
    ///
    /// `pending`: the kernel said that the checksum is not completed yet.
    #[must_use]
    pub fn of_frame(frame: &'a [u8], pending: bool) -> Option<Self> {
        let packet = frame.get(14..)?;
        let (source, destination, protocol, offset, extension_headers) = ip_header(packet)?;
        if protocol != 17 {
            return None;
        }
        let datagram = packet.get(offset..)?;
        let length = usize::from(word(datagram, 4)?);
        let datagram = datagram.get(..length)?;
        let field = word(datagram, 6)?;
        let checksum = if field == 0 {
            ChecksumState::Zero
        } else if checksum::transport(source, destination, 17, datagram) == 0 {
            ChecksumState::Correct
        } else if pending && field == checksum::pseudo_header(source, destination, 17, length) {
            ChecksumState::Pending
        } else {
            ChecksumState::Wrong
        };
        Some(Self {
            source: (source, word(datagram, 0)?),
            destination: (destination, word(datagram, 2)?),
            checksum,
            extension_headers,
            payload: datagram.get(8..)?,
        })
    }

    /// The tag, if the lab made this packet.
    #[must_use]
    pub fn tag(&self) -> Option<Tag> {
        Tag::at_end_of(self.payload)
    }
}

/// An inner packet, as far as it identifies a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct InnerView {
    /// Source.
    pub source: IpAddr,
    /// Destination.
    pub destination: IpAddr,
    /// Protocol.
    pub protocol: u8,
    /// Source port, or 0 where there is none.
    pub source_port: u16,
    /// Destination port, or 0 where there is none.
    pub destination_port: u16,
}

impl InnerView {
    /// Reads an inner IP packet; `None` when it is none.
    #[must_use]
    pub fn of_packet(packet: &[u8]) -> Option<Self> {
        let (source, destination, protocol, offset, _) = ip_header(packet)?;
        let ports = matches!(protocol, 6 | 17);
        let port = |at| if ports { word(packet, offset + at).unwrap_or(0) } else { 0 };
        Some(Self { source, destination, protocol, source_port: port(0), destination_port: port(2) })
    }
}

/// Source, destination, protocol, offset of what follows, and whether extension headers were passed.
fn ip_header(packet: &[u8]) -> Option<(IpAddr, IpAddr, u8, usize, bool)> {
    let first = *packet.first()?;
    if first >> 4 == 4 {
        let header: &[u8; 20] = packet.first_chunk()?;
        let address = |at: usize| IpAddr::from([header[at], header[at + 1], header[at + 2], header[at + 3]]);
        if word(packet, 6)? & 0x1fff != 0 {
            return None;
        }
        return Some((address(12), address(16), header[9], usize::from(first & 0xf) * 4, false));
    }
    if first >> 4 != 6 {
        return None;
    }
    let source: [u8; 16] = packet.get(8..24)?.try_into().ok()?;
    let destination: [u8; 16] = packet.get(24..40)?.try_into().ok()?;
    let (mut next, mut offset) = (*packet.get(6)?, 40);
    let mut extension_headers = false;
    while matches!(next, 0 | 43 | 60) {
        extension_headers = true;
        next = *packet.get(offset)?;
        offset += (usize::from(*packet.get(offset + 1)?) + 1) * 8;
    }
    (next != 44).then_some((source.into(), destination.into(), next, offset, extension_headers))
}

fn word(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}
