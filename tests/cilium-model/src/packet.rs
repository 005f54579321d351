//! Headers in, headers out.

use aya_ebpf::programs::TcContext;

use crate::family::Family;

pub const ETHERNET: usize = 14;
pub const UDP: u8 = 17;

/// A UDP packet whose ports can be read.
pub struct Packet<A> {
    pub source: A,
    pub destination: A,
    pub source_port: [u8; 2],
    pub destination_port: [u8; 2],
    /// Offset of the UDP header.
    pub udp: usize,
    pub length: [u8; 2],
    pub checksum: [u8; 2],
}

impl<A> Packet<A> {
    /// Reads ports, length and checksum of the UDP header at `udp`.
    #[inline(always)]
    pub fn read_udp(&mut self, ctx: &TcContext, udp: usize) -> Option<()> {
        let [s0, s1, d0, d1, l0, l1, c0, c1] = ctx.load::<[u8; 8]>(udp).ok()?;
        self.udp = udp;
        self.source_port = [s0, s1];
        self.destination_port = [d0, d1];
        self.length = [l0, l1];
        self.checksum = [c0, c1];
        Some(())
    }
}

/// Which end of the packet is translated.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum End {
    Source,
    Destination,
}

/// Writes another address and port into one end of the packet and makes the checksums fit.
#[inline(always)]
pub fn translate<F: Family>(
    ctx: &TcContext,
    packet: &Packet<F::Address>,
    end: End,
    address: &F::Address,
    port: [u8; 2],
) -> Option<()> {
    let (old_address, old_port, port_offset) = match end {
        End::Source => (&packet.source, packet.source_port, packet.udp),
        End::Destination => (&packet.destination, packet.destination_port, packet.udp + 2),
    };
    if packet.checksum != [0, 0] {
        let removed = F::sum(old_address) + word(old_port);
        let added = F::sum(address) + word(port);
        let checksum = if awaits_completion::<F>(ctx, packet)? {
            // Holds the sum of the pseudo header; whoever completes it adds the ports.
            fold(pseudo_header::<F>(packet) + F::sum(address) + complement(F::sum(old_address)))
        } else {
            let sum = !fold(u64::from(!word16(packet.checksum)) + added + complement(removed));
            if sum == 0 { 0xffff } else { sum }
        };
        ctx.store(packet.udp + 6, &checksum.to_be_bytes(), 0).ok()?;
    }
    F::store_address(ctx, end, old_address, address)?;
    if port != old_port {
        ctx.store(port_offset, &port, 0).ok()?;
    }
    Some(())
}

/// Whether the outer checksum is still to be completed by whoever sends the packet on.
///
/// The kernel's helper changes the field only of packets whose checksum nobody completes later, so a change by it tells
/// a complete checksum. Where it changes nothing, the checksum that is completed later is the inner header's or the outer
/// one's, and only the outer one's field holds the sum of the pseudo header.
#[inline(always)]
fn awaits_completion<F: Family>(ctx: &TcContext, packet: &Packet<F::Address>) -> Option<bool> {
    const MARK_MANGLED_0: u64 = 0x20;
    ctx.l4_csum_replace(packet.udp + 6, 0, 1, MARK_MANGLED_0 | 2).ok()?;
    let probed: [u8; 2] = ctx.load(packet.udp + 6).ok()?;
    Some(probed == packet.checksum && fold(pseudo_header::<F>(packet)) == word16(packet.checksum))
}

#[inline(always)]
fn pseudo_header<F: Family>(packet: &Packet<F::Address>) -> u64 {
    F::sum(&packet.source) + F::sum(&packet.destination) + u64::from(UDP) + word(packet.length)
}

#[inline(always)]
pub const fn word16(bytes: [u8; 2]) -> u16 {
    u16::from_be_bytes(bytes)
}

#[inline(always)]
pub const fn word(bytes: [u8; 2]) -> u64 {
    word16(bytes) as u64
}

/// One's complement negation of a sum.
#[inline(always)]
const fn complement(sum: u64) -> u64 {
    !fold(sum) as u64 & 0xffff
}

#[inline(always)]
const fn fold(sum: u64) -> u16 {
    let sum = (sum & 0xffff) + (sum >> 16 & 0xffff) + (sum >> 32 & 0xffff);
    let sum = (sum & 0xffff) + (sum >> 16);
    let sum = (sum & 0xffff) + (sum >> 16);
    sum as u16
}
