//! What differs between IPv4 and IPv6: header layout and map layouts, not logic.

use aya_ebpf::{maps::LruHashMap, programs::TcContext};
use coil_guard_common::cilium::{
    Affinity, AffinityKey4, AffinityKey6, CtEntry, CtKey4, CtKey6, Service, ServiceKey4, ServiceKey6,
};

use crate::{
    maps,
    packet::{ETHERNET, End, Packet, UDP},
};

/// What one packet needs while it is looked at. IPv6's does not fit the stack, so that it lives in a per-CPU map: programs
/// of this hook do not interrupt each other on a CPU.
pub struct Scratch<F: Family> {
    pub packet: Packet<F::Address>,
    pub key: F::CtKey,
    pub entry: CtEntry,
}

/// One IP family.
pub trait Family: Sized + 'static {
    type Address: Copy + PartialEq + 'static;
    type CtKey: 'static;
    type AffinityKey: 'static;
    /// ICMP of this family.
    const ICMP: u8;

    fn scratch() -> Option<&'static mut Scratch<Self>>;
    fn parse(ctx: &TcContext, packet: &mut Packet<Self::Address>) -> Option<()>;
    /// Sum of the address's 16-bit words.
    fn sum(address: &Self::Address) -> u64;
    fn store_address(ctx: &TcContext, end: End, old: &Self::Address, new: &Self::Address) -> Option<()>;

    fn ct() -> &'static LruHashMap<Self::CtKey, CtEntry>;
    fn set_key(
        key: &mut Self::CtKey,
        destination: &Self::Address,
        source: &Self::Address,
        ports: [[u8; 2]; 2],
        protocol: u8,
        flags: u8,
    );
    fn service(address: &Self::Address, port: [u8; 2], slot: u16, protocol: u8) -> Option<&'static Service>;
    /// Address and port of a backend that exists; its state is not looked at.
    fn backend(id: u32) -> Option<(&'static Self::Address, [u8; 2])>;
    fn reverse_nat(index: [u8; 2]) -> Option<(&'static Self::Address, [u8; 2])>;
    fn affinity() -> &'static LruHashMap<Self::AffinityKey, Affinity>;
    fn affinity_key(client: &Self::Address, rev_nat_index: [u8; 2]) -> Self::AffinityKey;
}

pub struct V4;
pub struct V6;

impl Family for V4 {
    type Address = [u8; 4];
    type CtKey = CtKey4;
    type AffinityKey = AffinityKey4;
    const ICMP: u8 = 1;

    #[inline(always)]
    fn scratch() -> Option<&'static mut Scratch<Self>> {
        // SAFETY: the only reference to this CPU's element while the program runs.
        maps::SCRATCH4.get_ptr_mut(0).map(|scratch| unsafe { &mut *scratch })
    }

    #[inline(always)]
    fn parse(ctx: &TcContext, packet: &mut Packet<[u8; 4]>) -> Option<()> {
        let [version_ihl, _, _, _, _, _, frag_high, frag_low, _, protocol] =
            ctx.load::<[u8; 10]>(ETHERNET).ok()?;
        let header = usize::from(version_ihl & 0xf) * 4;
        // Later fragments carry no ports; the lab does not send them through the model.
        if version_ihl >> 4 != 4 || header < 20 || protocol != UDP || (frag_high & 0x1f) | frag_low != 0 {
            return None;
        }
        packet.source = ctx.load(ETHERNET + 12).ok()?;
        packet.destination = ctx.load(ETHERNET + 16).ok()?;
        packet.read_udp(ctx, ETHERNET + header)
    }

    #[inline(always)]
    fn sum(&[a, b, c, d]: &[u8; 4]) -> u64 {
        u64::from(u16::from_be_bytes([a, b])) + u64::from(u16::from_be_bytes([c, d]))
    }

    #[inline(always)]
    fn store_address(ctx: &TcContext, end: End, old: &[u8; 4], new: &[u8; 4]) -> Option<()> {
        let offset = ETHERNET + if matches!(end, End::Source) { 12 } else { 16 };
        let (from, to) = (u32::from_ne_bytes(*old), u32::from_ne_bytes(*new));
        ctx.l3_csum_replace(ETHERNET + 10, from.into(), to.into(), 4).ok()?;
        ctx.store(offset, new, 0).ok()
    }

    #[inline(always)]
    fn ct() -> &'static LruHashMap<CtKey4, CtEntry> {
        &maps::CT4
    }

    #[inline(always)]
    fn set_key(
        key: &mut CtKey4,
        daddr: &[u8; 4],
        saddr: &[u8; 4],
        [dport, sport]: [[u8; 2]; 2],
        nexthdr: u8,
        flags: u8,
    ) {
        key.daddr = *daddr;
        key.saddr = *saddr;
        key.dport = dport;
        key.sport = sport;
        key.nexthdr = nexthdr;
        key.flags = flags;
    }

    #[inline(always)]
    fn service(address: &[u8; 4], dport: [u8; 2], backend_slot: u16, proto: u8) -> Option<&'static Service> {
        let key = ServiceKey4 { address: *address, dport, backend_slot, proto, scope: 0, pad: [0; 2] };
        // SAFETY: an element of a hash map without preallocation is freed only after the program has ended.
        unsafe { maps::SERVICES4.get(key) }
    }

    #[inline(always)]
    fn backend(id: u32) -> Option<(&'static [u8; 4], [u8; 2])> {
        // SAFETY: as in `service`.
        unsafe { maps::BACKENDS4.get(id) }.map(|backend| (&backend.address, backend.port))
    }

    #[inline(always)]
    fn reverse_nat(index: [u8; 2]) -> Option<(&'static [u8; 4], [u8; 2])> {
        // SAFETY: as in `service`.
        unsafe { maps::REVERSE_NAT4.get(index) }.map(|service| (&service.address, service.port))
    }

    #[inline(always)]
    fn affinity() -> &'static LruHashMap<AffinityKey4, Affinity> {
        &maps::AFFINITY4
    }

    #[inline(always)]
    fn affinity_key(client: &[u8; 4], rev_nat_index: [u8; 2]) -> AffinityKey4 {
        AffinityKey4 { client: *client, pad0: [0; 4], rev_nat_index, pad: [0; 6] }
    }
}

impl Family for V6 {
    type Address = [u8; 16];
    type CtKey = CtKey6;
    type AffinityKey = AffinityKey6;
    const ICMP: u8 = 58;

    #[inline(always)]
    fn scratch() -> Option<&'static mut Scratch<Self>> {
        // SAFETY: the only reference to this CPU's element while the program runs.
        maps::SCRATCH6.get_ptr_mut(0).map(|scratch| unsafe { &mut *scratch })
    }

    #[inline(always)]
    fn parse(ctx: &TcContext, packet: &mut Packet<[u8; 16]>) -> Option<()> {
        const HOP_BY_HOP: u8 = 0;
        const DESTINATION_OPTIONS: u8 = 60;
        let [version, _, _, _, _, _, mut next] = ctx.load::<[u8; 7]>(ETHERNET).ok()?;
        if version >> 4 != 6 {
            return None;
        }
        packet.source = ctx.load(ETHERNET + 8).ok()?;
        packet.destination = ctx.load(ETHERNET + 24).ok()?;
        let mut offset = ETHERNET + 40;
        for _ in 0..4 {
            if next != HOP_BY_HOP && next != DESTINATION_OPTIONS {
                break;
            }
            let [following, length] = ctx.load::<[u8; 2]>(offset).ok()?;
            next = following;
            offset += (usize::from(length) + 1) * 8;
        }
        if next != UDP {
            return None;
        }
        packet.read_udp(ctx, offset)
    }

    #[inline(always)]
    fn sum(address: &[u8; 16]) -> u64 {
        let [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p] = *address;
        let high = u64::from(u32::from_be_bytes([a, b, c, d])) + u64::from(u32::from_be_bytes([e, f, g, h]));
        let low = u64::from(u32::from_be_bytes([i, j, k, l])) + u64::from(u32::from_be_bytes([m, n, o, p]));
        // Words of 32 bits fold to the same sum as words of 16.
        high + low
    }

    #[inline(always)]
    fn store_address(ctx: &TcContext, end: End, _: &[u8; 16], new: &[u8; 16]) -> Option<()> {
        ctx.store(ETHERNET + if matches!(end, End::Source) { 8 } else { 24 }, new, 0).ok()
    }

    #[inline(always)]
    fn ct() -> &'static LruHashMap<CtKey6, CtEntry> {
        &maps::CT6
    }

    #[inline(always)]
    fn set_key(
        key: &mut CtKey6,
        daddr: &[u8; 16],
        saddr: &[u8; 16],
        [dport, sport]: [[u8; 2]; 2],
        nexthdr: u8,
        flags: u8,
    ) {
        key.daddr = *daddr;
        key.saddr = *saddr;
        key.dport = dport;
        key.sport = sport;
        key.nexthdr = nexthdr;
        key.flags = flags;
    }

    #[inline(always)]
    fn service(address: &[u8; 16], dport: [u8; 2], backend_slot: u16, proto: u8) -> Option<&'static Service> {
        let key = ServiceKey6 { address: *address, dport, backend_slot, proto, scope: 0, pad: [0; 2] };
        // SAFETY: as for IPv4.
        unsafe { maps::SERVICES6.get(key) }
    }

    #[inline(always)]
    fn backend(id: u32) -> Option<(&'static [u8; 16], [u8; 2])> {
        // SAFETY: as for IPv4.
        unsafe { maps::BACKENDS6.get(id) }.map(|backend| (&backend.address, backend.port))
    }

    #[inline(always)]
    fn reverse_nat(index: [u8; 2]) -> Option<(&'static [u8; 16], [u8; 2])> {
        // SAFETY: as for IPv4.
        unsafe { maps::REVERSE_NAT6.get(index) }.map(|service| (&service.address, service.port))
    }

    #[inline(always)]
    fn affinity() -> &'static LruHashMap<AffinityKey6, Affinity> {
        &maps::AFFINITY6
    }

    #[inline(always)]
    fn affinity_key(client: &[u8; 16], rev_nat_index: [u8; 2]) -> AffinityKey6 {
        AffinityKey6 { client: *client, rev_nat_index, pad: [0; 6] }
    }
}
