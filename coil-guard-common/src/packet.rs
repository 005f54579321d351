//! Outer headers: is this a FoU packet, from whom, to which service.
//!
//! Assumptions, each with its answer when it does not hold: Ethernet without VLAN tags (veth and netkit in a pod; anything
//! else is not FoU), at most [`MAX_EXTENSION_HEADERS`] IPv6 extension headers of the kinds that have a length (else
//! counted and passed), ports in the first fragment only (later ones are counted and passed; Cilium follows them by the
//! first).

use core::mem::{MaybeUninit, offset_of};

use network_types::{
    eth::EthHdr,
    ip::{Ipv4Hdr, Ipv6Hdr},
    udp::UdpHdr,
};

use crate::{cilium::PROTO_UDP, counters::Reason};

/// Bound on the IPv6 extension headers that are walked; Coil's own packets have one.
pub const MAX_EXTENSION_HEADERS: u32 = 4;

/// IPv4.
pub const ETHERTYPE_IPV4: u16 = 0x0800;
/// IPv6.
pub const ETHERTYPE_IPV6: u16 = 0x86dd;

pub(crate) const NEXT_HOP_BY_HOP: u8 = 0;
pub(crate) const NEXT_ROUTING: u8 = 43;
pub(crate) const NEXT_FRAGMENT: u8 = 44;
pub(crate) const NEXT_DESTINATION: u8 = 60;
const NEXT_AUTHENTICATION: u8 = 51;
const NEXT_MOBILITY: u8 = 135;
const NEXT_HOST_IDENTITY: u8 = 139;
const NEXT_SHIM6: u8 = 140;

/// A header that is nothing but bytes.
///
/// # Safety
///
/// Alignment 1, no padding, every bit pattern valid.
pub unsafe trait Header: Copy {}

// SAFETY: arrays of bytes.
unsafe impl<const N: usize> Header for [u8; N] {}
// SAFETY: repr(C), made of bytes and byte arrays only.
unsafe impl Header for Ipv4Hdr {}
// SAFETY: as above.
unsafe impl Header for Ipv6Hdr {}
// SAFETY: as above.
unsafe impl Header for UdpHdr {}
const _: () = assert!(align_of::<Ipv4Hdr>() == 1 && align_of::<Ipv6Hdr>() == 1 && align_of::<UdpHdr>() == 1);

/// A packet whose bytes can be read, starting at the Ethernet header.
pub trait Load {
    /// The header at `offset`, or `None` where the packet ends before its end.
    fn load<T: Header>(&self, offset: u32) -> Option<T>;

    /// As [`Self::load`], for an `offset` that lies a distance which the compiler knows behind the start of what is parsed,
    /// and can be read at less cost when it is near.
    #[inline(always)]
    fn load_near<T: Header>(&self, offset: u32) -> Option<T> {
        self.load(offset)
    }
}

/// End of the outer headers that Coil makes: Ethernet, IPv6, 8 bytes of options, UDP.
pub const NEAR: u32 = 70;

impl Load for &[u8] {
    fn load<T: Header>(&self, offset: u32) -> Option<T> {
        let bytes = self.get(offset as usize..)?.get(..size_of::<T>())?;
        let mut header = MaybeUninit::<T>::uninit();
        // SAFETY: `bytes` has the size of T, and Header promises that any bytes are a valid T.
        unsafe {
            core::ptr::copy_nonoverlapping(bytes.as_ptr(), header.as_mut_ptr().cast::<u8>(), size_of::<T>());
            Some(header.assume_init())
        }
    }
}

/// An IP address as it stands in the header.
pub trait Address: Copy + Eq {
    /// As a 16-byte address, IPv4 v4-mapped.
    fn mapped(self) -> [u8; 16];
    /// A hash that spreads clients over backends; not a secret.
    fn spread(self) -> u32;
}

impl Address for [u8; 4] {
    #[inline(always)]
    fn mapped(self) -> [u8; 16] {
        crate::abi::v4_mapped(self)
    }
    #[inline(always)]
    fn spread(self) -> u32 {
        mix(u32::from_ne_bytes(self))
    }
}

impl Address for [u8; 16] {
    #[inline(always)]
    fn mapped(self) -> [u8; 16] {
        self
    }
    #[inline(always)]
    fn spread(self) -> u32 {
        let word = u128::from_ne_bytes(self);
        mix((word ^ (word >> 32) ^ (word >> 64) ^ (word >> 96)) as u32)
    }
}

/// A bijection of 32 bits whose low bits depend on all of them.
#[inline(always)]
pub(crate) const fn mix(mut word: u32) -> u32 {
    word ^= word >> 16;
    word = word.wrapping_mul(0x7feb_352d);
    word ^= word >> 15;
    word = word.wrapping_mul(0x846c_a68b);
    word ^ (word >> 16)
}

/// The outer headers of a FoU packet. Ports in network order. Aligned to be copied by words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C, align(8))]
pub struct Outer<A> {
    /// IP source.
    pub source: A,
    /// IP destination.
    pub destination: A,
    /// UDP source port.
    pub source_port: [u8; 2],
    /// UDP destination port.
    pub destination_port: [u8; 2],
    /// Offset of the UDP header from the start of the Ethernet header.
    pub udp: u32,
}

impl<A> Outer<A> {
    /// Offset of the inner IP header.
    #[inline(always)]
    pub const fn inner(&self) -> u32 {
        self.udp + UdpHdr::LEN as u32
    }
}

/// The outer headers, by family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FouPacket {
    /// IPv4.
    V4(Outer<[u8; 4]>),
    /// IPv6.
    V6(Outer<[u8; 16]>),
}

/// Parses the outer headers of a packet that may be FoU to `fou_port` (network order).
///
/// # Errors
///
/// The reason for letting it pass.
#[inline(always)]
pub fn parse(packet: &impl Load, fou_port: [u8; 2]) -> Result<FouPacket, Reason> {
    match ether_type(packet) {
        ETHERTYPE_IPV4 => parse_v4(packet, fou_port).map(FouPacket::V4),
        ETHERTYPE_IPV6 => parse_v6(packet, fou_port).map(FouPacket::V6),
        _ => Err(Reason::NotFou),
    }
}

/// The protocol behind the Ethernet header, [`ETHERTYPE_IPV4`], [`ETHERTYPE_IPV6`] or another, 0 when it is cut off.
#[inline(always)]
pub fn ether_type(packet: &impl Load) -> u16 {
    packet.load_near(offset_of!(EthHdr, ether_type) as u32).map_or(0, u16::from_be_bytes)
}

/// [`parse`] of a packet that is said to be IPv4.
///
/// # Errors
///
/// The reason for letting it pass.
#[inline(always)]
pub fn parse_v4(packet: &impl Load, fou_port: [u8; 2]) -> Result<Outer<[u8; 4]>, Reason> {
    to_port(parse_udp_v4(packet)?, fou_port)
}

/// The outer headers of a UDP packet that is said to be IPv4, whatever its ports.
///
/// # Errors
///
/// The reason for letting it pass.
#[inline(always)]
pub fn parse_udp_v4(packet: &impl Load) -> Result<Outer<[u8; 4]>, Reason> {
    let start = EthHdr::LEN as u32;
    let ip: Ipv4Hdr = packet.load_near(start).ok_or(Reason::Malformed)?;
    if ip.proto != PROTO_UDP {
        return Err(Reason::NotFou);
    }
    let header_length = u32::from(ip.ihl());
    if ip.version() != 4 || header_length < Ipv4Hdr::LEN as u32 {
        return Err(Reason::Malformed);
    }
    if u16::from_be_bytes(ip.frags) & 0x1fff != 0 {
        return Err(Reason::OuterFragment);
    }
    if u32::from(u16::from_be_bytes(ip.tot_len)) < header_length + UdpHdr::LEN as u32 {
        return Err(Reason::Malformed);
    }
    const PLAIN: u32 = (EthHdr::LEN + Ipv4Hdr::LEN) as u32;
    let (udp, offset) = if header_length == Ipv4Hdr::LEN as u32 {
        (packet.load_near(PLAIN), PLAIN)
    } else {
        (packet.load(start + header_length), start + header_length)
    };
    outer(udp, offset, ip.src_addr, ip.dst_addr)
}

/// [`parse`] of a packet that is said to be IPv6.
///
/// # Errors
///
/// The reason for letting it pass.
#[inline(always)]
pub fn parse_v6(packet: &impl Load, fou_port: [u8; 2]) -> Result<Outer<[u8; 16]>, Reason> {
    to_port(parse_udp_v6(packet)?, fou_port)
}

/// As [`parse_udp_v4`], IPv6.
///
/// # Errors
///
/// The reason for letting it pass.
#[inline(always)]
pub fn parse_udp_v6(packet: &impl Load) -> Result<Outer<[u8; 16]>, Reason> {
    let start = EthHdr::LEN as u32;
    let ip: Ipv6Hdr = packet.load_near(start).ok_or(Reason::Malformed)?;
    if ip.version() != 6 {
        return Err(Reason::Malformed);
    }
    // The two forms that tunnels make, at offsets that the compiler knows; anything else is walked.
    const PLAIN: u32 = (EthHdr::LEN + Ipv6Hdr::LEN) as u32;
    const WITH_OPTIONS: u32 = PLAIN + 8;
    let options = if ip.next_hdr == NEXT_DESTINATION { packet.load_near::<[u8; 2]>(PLAIN) } else { None };
    let (udp, offset) = if ip.next_hdr == PROTO_UDP {
        (packet.load_near(PLAIN), PLAIN)
    } else if options == Some([PROTO_UDP, 0]) {
        (packet.load_near(WITH_OPTIONS), WITH_OPTIONS)
    } else {
        let offset = walk(packet, ip.next_hdr, PLAIN)?;
        (packet.load(offset), offset)
    };
    // 0 is that of a packet of more than 64 KiB, which has it elsewhere or will be cut into segments that have one.
    let length = u32::from(u16::from_be_bytes(ip.payload_len));
    if length != 0 && start + Ipv6Hdr::LEN as u32 + length < offset + UdpHdr::LEN as u32 {
        return Err(Reason::Malformed);
    }
    outer(udp, offset, ip.src_addr, ip.dst_addr)
}

/// Offset of the UDP header behind the extension headers at `offset`, the first of them of the kind `next`.
#[inline(always)]
fn walk(packet: &impl Load, mut next: u8, mut offset: u32) -> Result<u32, Reason> {
    let mut left = MAX_EXTENSION_HEADERS;
    while next != PROTO_UDP {
        match next {
            NEXT_HOP_BY_HOP | NEXT_ROUTING | NEXT_DESTINATION | NEXT_FRAGMENT => {}
            NEXT_AUTHENTICATION | NEXT_MOBILITY | NEXT_HOST_IDENTITY | NEXT_SHIM6 => {
                return Err(Reason::ExtensionHeaders);
            }
            _ => return Err(Reason::NotFou),
        }
        if left == 0 {
            return Err(Reason::ExtensionHeaders);
        }
        left -= 1;
        let header: [u8; 4] = packet.load(offset).ok_or(Reason::Malformed)?;
        let [following, length, high, low] = header;
        if next == NEXT_FRAGMENT {
            if u16::from_be_bytes([high, low]) & 0xfff8 != 0 {
                return Err(Reason::OuterFragment);
            }
            offset += 8;
        } else {
            offset += (u32::from(length) + 1) * 8;
        }
        next = following;
    }
    Ok(offset)
}

#[inline(always)]
fn outer<A>(udp: Option<UdpHdr>, offset: u32, source: A, destination: A) -> Result<Outer<A>, Reason> {
    let udp = udp.ok_or(Reason::Malformed)?;
    Ok(Outer { source, destination, source_port: udp.src, destination_port: udp.dst, udp: offset })
}

#[inline(always)]
fn to_port<A>(outer: Outer<A>, port: [u8; 2]) -> Result<Outer<A>, Reason> {
    if outer.destination_port == port { Ok(outer) } else { Err(Reason::NotFou) }
}
