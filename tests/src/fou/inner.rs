//! Inner packets.

use std::net::IpAddr;

use super::checksum;

/// What the lab writes at the end of each inner packet: which stream it belongs to, and which of its packets it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Tag {
    /// Number of the stream.
    pub stream: u32,
    /// Number of the packet in its stream.
    pub sequence: u64,
}

impl Tag {
    /// Bytes of a tag.
    pub const SIZE: usize = 16;
    const MAGIC: [u8; 4] = *b"FoU#";

    /// As bytes.
    #[must_use]
    pub fn to_bytes(self) -> [u8; Self::SIZE] {
        let mut bytes = [0; Self::SIZE];
        bytes[..4].copy_from_slice(&Self::MAGIC);
        bytes[4..8].copy_from_slice(&self.stream.to_be_bytes());
        bytes[8..].copy_from_slice(&self.sequence.to_be_bytes());
        bytes
    }

    /// The tag at the end of `packet`, if there is one.
    #[must_use]
    pub fn at_end_of(packet: &[u8]) -> Option<Self> {
        let (_, tag) = packet.split_last_chunk::<{ Self::SIZE }>()?;
        let (magic, rest) = tag.split_first_chunk::<4>()?;
        let (stream, sequence) = rest.split_first_chunk::<4>()?;
        (magic == &Self::MAGIC).then_some(Self {
            stream: u32::from_be_bytes(*stream),
            sequence: u64::from_be_bytes(sequence.try_into().ok()?),
        })
    }
}

/// TCP flags.
pub mod tcp {
    /// FIN
    pub const FIN: u8 = 0x01;
    /// SYN
    pub const SYN: u8 = 0x02;
    /// RST
    pub const RST: u8 = 0x04;
    /// PSH
    pub const PSH: u8 = 0x08;
    /// ACK
    pub const ACK: u8 = 0x10;
}

/// What an inner IP packet carries.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Inner {
    /// A TCP segment.
    Tcp {
        /// Source port.
        source_port: u16,
        /// Destination port.
        destination_port: u16,
        /// See [`tcp`].
        flags: u8,
        /// Sequence number.
        sequence: u32,
    },
    /// A UDP datagram.
    Udp {
        /// Source port.
        source_port: u16,
        /// Destination port.
        destination_port: u16,
    },
    /// ICMP or ICMPv6 echo request.
    Echo {
        /// Identifier.
        identifier: u16,
        /// Number.
        sequence: u16,
    },
    /// ICMP "fragmentation needed" or ICMPv6 "packet too big" about a packet that came the other way.
    TooBig {
        /// The packet it is about.
        about: Box<InnerPacket>,
    },
    /// Another protocol, opaque.
    Other {
        /// Its number.
        protocol: u8,
    },
}

/// Makes the packet a fragment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fragment {
    /// Identification (16 bits are used in IPv4).
    pub identification: u32,
    /// In units of 8 bytes; anything but 0 means that the transport header is in another fragment.
    pub offset: u16,
    /// Whether more fragments follow.
    pub more: bool,
}

/// An inner IP packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InnerPacket {
    /// Source.
    pub source: IpAddr,
    /// Destination, of the same family.
    pub destination: IpAddr,
    /// What it carries.
    pub payload: Inner,
    /// Fragment or whole.
    pub fragment: Option<Fragment>,
    /// Bytes between the transport header and the tag.
    pub padding: usize,
}

impl InnerPacket {
    /// A whole packet without padding.
    #[must_use]
    pub fn new(source: IpAddr, destination: IpAddr, payload: Inner) -> Self {
        Self { source, destination, payload, fragment: None, padding: 0 }
    }

    /// A TCP segment.
    #[must_use]
    pub fn tcp(source: (IpAddr, u16), destination: (IpAddr, u16), flags: u8) -> Self {
        let (source_port, destination_port) = (source.1, destination.1);
        Self::new(source.0, destination.0, Inner::Tcp { source_port, destination_port, flags, sequence: 1 })
    }

    /// A UDP datagram.
    #[must_use]
    pub fn udp(source: (IpAddr, u16), destination: (IpAddr, u16)) -> Self {
        Self::new(
            source.0,
            destination.0,
            Inner::Udp { source_port: source.1, destination_port: destination.1 },
        )
    }

    /// With padding.
    #[must_use]
    pub fn padded(self, padding: usize) -> Self {
        Self { padding, ..self }
    }

    /// As a fragment.
    #[must_use]
    pub fn fragment(self, fragment: Fragment) -> Self {
        Self { fragment: Some(fragment), ..self }
    }

    /// The packet that the other end would send back: ports and addresses exchanged.
    #[must_use]
    pub fn reversed(&self) -> Self {
        let payload = match self.payload.clone() {
            Inner::Tcp { source_port, destination_port, flags, sequence } => {
                Inner::Tcp { source_port: destination_port, destination_port: source_port, flags, sequence }
            }
            Inner::Udp { source_port, destination_port } => {
                Inner::Udp { source_port: destination_port, destination_port: source_port }
            }
            other => other,
        };
        Self { source: self.destination, destination: self.source, payload, ..self.clone() }
    }

    /// Its bytes, with correct checksums, ending with the tag.
    ///
    /// # Panics
    ///
    /// When source and destination are not of one family.
    #[must_use]
    pub fn build(&self, tag: Tag) -> Vec<u8> {
        let is_v4 = self.source.is_ipv4();
        let (protocol, mut segment, checksum_at) = self.transport_header(is_v4);
        if self.fragment.is_some_and(|fragment| fragment.offset > 0) {
            segment.clear();
        }
        let has_header = !segment.is_empty();
        segment.resize(segment.len() + self.padding, 0);
        segment.extend(tag.to_bytes());
        let length = segment.len() as u16;
        if let (Inner::Udp { .. }, true) = (&self.payload, has_header) {
            segment[4..6].copy_from_slice(&length.to_be_bytes());
        }
        // Of a fragmented packet the checksum covers more than this part; receivers of the lab do not verify it.
        if let (Some(at), true, None) = (checksum_at, has_header, self.fragment) {
            let checksum = match (&self.payload, is_v4) {
                (Inner::Echo { .. } | Inner::TooBig { .. }, true) => !checksum::sum(&[&segment]),
                _ => checksum::transport(self.source, self.destination, protocol, &segment),
            };
            segment[at..at + 2].copy_from_slice(&checksum.to_be_bytes());
        }
        match (self.source, self.destination) {
            (IpAddr::V4(source), IpAddr::V4(destination)) => {
                let fragment =
                    self.fragment.unwrap_or(Fragment { identification: 0, offset: 0, more: false });
                let mut packet = vec![0x45, 0];
                packet.extend((20 + length).to_be_bytes());
                packet.extend((fragment.identification as u16).to_be_bytes());
                packet.extend((u16::from(fragment.more) << 13 | fragment.offset & 0x1fff).to_be_bytes());
                packet.extend([64, protocol, 0, 0]);
                packet.extend(source.octets());
                packet.extend(destination.octets());
                let checksum = !checksum::sum(&[&packet]);
                packet[10..12].copy_from_slice(&checksum.to_be_bytes());
                packet.extend(segment);
                packet
            }
            (IpAddr::V6(source), IpAddr::V6(destination)) => {
                let extension = self.fragment.map(|fragment| {
                    let mut header = vec![protocol, 0];
                    header.extend((fragment.offset << 3 | u16::from(fragment.more)).to_be_bytes());
                    header.extend(fragment.identification.to_be_bytes());
                    header
                });
                let mut packet = vec![0x60, 0, 0, 0];
                packet.extend(
                    (length + extension.as_ref().map_or(0, |header| header.len() as u16)).to_be_bytes(),
                );
                packet.extend([if extension.is_some() { 44 } else { protocol }, 64]);
                packet.extend(source.octets());
                packet.extend(destination.octets());
                packet.extend(extension.unwrap_or_default());
                packet.extend(segment);
                packet
            }
            (source, destination) => panic!("{source} and {destination} are not of one family"),
        }
    }

    /// Protocol, header and offset of the checksum in it.
    fn transport_header(&self, is_v4: bool) -> (u8, Vec<u8>, Option<usize>) {
        let ports =
            |source: u16, destination: u16| [source.to_be_bytes(), destination.to_be_bytes()].concat();
        let icmp = if is_v4 { 1 } else { 58 };
        match &self.payload {
            Inner::Tcp { source_port, destination_port, flags, sequence } => {
                let mut header = ports(*source_port, *destination_port);
                header.extend(sequence.to_be_bytes());
                header.extend([0, 0, 0, 0, 0x50, *flags, 0xff, 0xff, 0, 0, 0, 0]);
                (6, header, Some(16))
            }
            Inner::Udp { source_port, destination_port } => {
                let mut header = ports(*source_port, *destination_port);
                header.extend([0; 4]);
                (17, header, Some(6))
            }
            Inner::Echo { identifier, sequence } => {
                let mut header = vec![if is_v4 { 8 } else { 128 }, 0, 0, 0];
                header.extend(identifier.to_be_bytes());
                header.extend(sequence.to_be_bytes());
                (icmp, header, Some(2))
            }
            Inner::TooBig { about } => {
                let kind: [u8; 2] = if is_v4 { [3, 4] } else { [2, 0] };
                let mut header = vec![kind[0], kind[1], 0, 0, 0, 0, 0x05, 0x00];
                // Without the tag: only the header of the packet is quoted, and 8 bytes behind it in IPv4.
                let quoted = about.build(Tag { stream: 0, sequence: 0 });
                header.extend(&quoted[..quoted.len() - Tag::SIZE]);
                (icmp, header, Some(2))
            }
            Inner::Other { protocol } => (*protocol, Vec::new(), None),
        }
    }
}
