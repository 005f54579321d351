//! What differs between IPv4 and IPv6: addresses, and the layouts of Cilium's keys and backends.

use core::mem::{MaybeUninit, offset_of};

use aya_ebpf::maps::{HashMap, LruHashMap};
use coil_guard_common::{
    checksum::Sum,
    cilium::{
        Affinity, AffinityKey4, AffinityKey6, Backend4, Backend6, CT_EGRESS, CT_SERVICE, CtEntry, CtKey4,
        CtKey6, PROTO_UDP, Service, ServiceKey4, ServiceKey6,
    },
    decide::{Judgement, State, Unmarked},
    packet::{Address, Outer},
};

use crate::{
    apart,
    config::Client,
    maps,
    scratch::Scratch,
    skb::{Packet, WINDOW, WINDOW4, WINDOW6, Window},
};

/// A backend of either family.
pub(crate) trait AnyBackend: Copy {
    type Address: Address;
    fn address(&self) -> Self::Address;
    fn state(&self) -> u8;
}

/// An address, read word by word: as a whole it would be a call of memmove.
#[inline(always)]
fn by_words<A: Copy>(address: &A) -> A {
    const { assert!(size_of::<A>().is_multiple_of(4)) };
    let (mut copy, from) = (MaybeUninit::<A>::uninit(), (&raw const *address).cast::<u32>());
    let to = copy.as_mut_ptr().cast::<u32>();
    let mut word = 0;
    while word < size_of::<A>() / 4 {
        // SAFETY: in bounds of both; addresses stand at the start of structures that are aligned to 4.
        unsafe { to.add(word).write_unaligned(from.add(word).read()) };
        word += 1;
    }
    // SAFETY: all of it is written, and it was a value before.
    unsafe { copy.assume_init() }
}

/// An IP family. The key functions change the record's keys and give them out.
pub(crate) trait Family {
    type Address: Address + 'static;
    type CtKey: 'static;
    type ServiceKey: 'static;
    type AffinityKey: 'static;
    type Backend: AnyBackend<Address = Self::Address> + 'static;

    fn is_own(client: Client, address: Self::Address) -> bool;
    fn outer(scratch: &Scratch) -> &Outer<Self::Address>;
    fn pseudo_header(outer: &Outer<Self::Address>) -> Sum;

    /// Copies the inner headers of a packet of the same family inside.
    fn window<'a>(packet: &'a Packet<'a>, offset: u32, bytes: &'a mut [u8; WINDOW]) -> Window<'a>;

    /// Fills the keys for the packet in the record.
    fn prepare(scratch: &mut Scratch);
    fn entry_key(scratch: &mut Scratch, client_port: [u8; 2]) -> &Self::CtKey;
    fn egress_key<'a>(scratch: &'a mut Scratch, backend: &Self::Backend) -> &'a Self::CtKey;
    fn service_key(scratch: &mut Scratch, slot: u16) -> &Self::ServiceKey;
    fn affinity_key(scratch: &mut Scratch, rev_nat_index: [u8; 2]) -> &Self::AffinityKey;

    /// Decides for the packet, into the record for that; false when Cilium does not know the service. A function of its own
    /// to the verifier.
    fn decide() -> bool;
    /// `decide::select` as a function of its own to the verifier.
    fn select(state: &mut State);
    /// `decide::judge`, likewise.
    fn judge(id: u64, unmarked: Unmarked, out: &mut Judgement);
    /// `World::report`, likewise.
    fn report(kind: u8, from: u32, to: u32);
    /// `World::is_port_good`, likewise.
    fn is_port_good(port: [u8; 2], state: &mut State) -> bool;

    fn conntrack() -> &'static LruHashMap<Self::CtKey, CtEntry>;
    fn services() -> &'static HashMap<Self::ServiceKey, Service>;
    fn backends() -> &'static HashMap<u32, Self::Backend>;
    fn affinities() -> &'static LruHashMap<Self::AffinityKey, Affinity>;
}

/// Writes both ports of a conntrack key at once: the kernel's hash reads them as one word, and a processor waits for its
/// stores where a load takes in more than one of them.
macro_rules! set_ports {
    ($key:ty, $place:ident, $dport:expr, $sport:expr) => {{
        const DPORT: usize = offset_of!($key, dport);
        const { assert!(DPORT.is_multiple_of(4) && offset_of!($key, sport) == DPORT + 2) };
        let ([d0, d1], [s0, s1]) = ($dport, $sport);
        // SAFETY: in bounds, and aligned: the key is that of an `Aligned`.
        unsafe {
            (&raw mut *$place).byte_add(DPORT).cast::<u32>().write(u32::from_ne_bytes([d0, d1, s0, s1]));
        }
    }};
}

macro_rules! family {
    (
        $(#[$meta:meta])* $name:ident, $address:ty, $outer:ident, $keys:ident, $own:ident, $sum:ident, $ct_key:ident,
        $service_key:ident, $affinity_key:ident, $backend:ident, $ct:ident, $services:ident, $backends:ident, $affinities:ident, $select:ident, $judge:ident, $report:ident, $port:ident, $window:ident, $decide:ident
    ) => {
        $(#[$meta])*
        pub(crate) struct $name;

        impl AnyBackend for $backend {
            type Address = $address;
            #[inline(always)]
            fn address(&self) -> $address {
                by_words(&self.address)
            }
            #[inline(always)]
            fn state(&self) -> u8 {
                self.state
            }
        }

        impl Family for $name {
            type Address = $address;
            type CtKey = $ct_key;
            type ServiceKey = $service_key;
            type AffinityKey = $affinity_key;
            type Backend = $backend;

            #[inline(always)]
            fn is_own(client: Client, address: $address) -> bool {
                client.$own(address)
            }
            #[inline(always)]
            fn outer(scratch: &Scratch) -> &Outer<$address> {
                &scratch.$outer
            }
            #[inline(always)]
            fn pseudo_header(outer: &Outer<$address>) -> Sum {
                Sum::new().$sum(outer.source).$sum(outer.destination)
            }
            #[inline(always)]
            fn window<'a>(packet: &'a Packet<'a>, offset: u32, bytes: &'a mut [u8; WINDOW]) -> Window<'a> {
                Window::copy::<$window>(packet, offset, bytes)
            }
            #[inline(always)]
            fn prepare(scratch: &mut Scratch) {
                let (outer, keys) = (&scratch.$outer, &mut scratch.$keys);
                let entry = &mut keys.entry.0;
                (entry.saddr, entry.daddr) = (outer.source, outer.destination);
                (entry.nexthdr, entry.flags) = (PROTO_UDP, CT_SERVICE);
                (keys.service.address, keys.service.dport) = (outer.destination, outer.destination_port);
            }
            #[inline(always)]
            fn entry_key(scratch: &mut Scratch, client_port: [u8; 2]) -> &$ct_key {
                let (outer, key) = (&scratch.$outer, &mut scratch.$keys.entry.0);
                set_ports!($ct_key, key, client_port, outer.destination_port);
                key
            }
            #[inline(always)]
            fn egress_key<'a>(scratch: &'a mut Scratch, backend: &$backend) -> &'a $ct_key {
                let (outer, key) = (&scratch.$outer, &mut scratch.$keys.egress.0);
                (key.daddr, key.saddr) = (outer.source, backend.address);
                (key.nexthdr, key.flags) = (PROTO_UDP, CT_EGRESS);
                set_ports!($ct_key, key, backend.port, outer.source_port);
                key
            }
            #[inline(always)]
            fn service_key(scratch: &mut Scratch, slot: u16) -> &$service_key {
                let proto = scratch.proto;
                let key = &mut scratch.$keys.service;
                (key.backend_slot, key.proto) = (slot, proto);
                key
            }
            #[inline(always)]
            fn affinity_key(scratch: &mut Scratch, rev_nat_index: [u8; 2]) -> &$affinity_key {
                let (outer, key) = (&scratch.$outer, &mut scratch.$keys.affinity);
                (key.client, key.rev_nat_index) = (outer.source, rev_nat_index);
                key
            }
            #[inline(always)]
            fn decide() -> bool {
                apart::$decide()
            }
            #[inline(always)]
            fn select(state: &mut State) {
                apart::$select(state);
            }
            #[inline(always)]
            fn judge(id: u64, unmarked: Unmarked, out: &mut Judgement) {
                apart::$judge(id, unmarked, out);
            }
            #[inline(always)]
            fn report(kind: u8, from: u32, to: u32) {
                apart::$report(kind, from, to);
            }
            #[inline(always)]
            fn is_port_good(port: [u8; 2], state: &mut State) -> bool {
                apart::$port(port, state)
            }
            #[inline(always)]
            fn conntrack() -> &'static LruHashMap<$ct_key, CtEntry> {
                &maps::$ct
            }
            #[inline(always)]
            fn services() -> &'static HashMap<$service_key, Service> {
                &maps::$services
            }
            #[inline(always)]
            fn backends() -> &'static HashMap<u32, $backend> {
                &maps::$backends
            }
            #[inline(always)]
            fn affinities() -> &'static LruHashMap<$affinity_key, Affinity> {
                &maps::$affinities
            }
        }
    };
}

family! {
    /// IPv4.
    V4, [u8; 4], outer4, keys4, is_address4, address4, CtKey4, ServiceKey4, AffinityKey4, Backend4, CT4, SERVICES4, BACKENDS4, AFFINITY4, select4, judge4, report4, port4, WINDOW4, decide4
}

family! {
    /// IPv6.
    V6, [u8; 16], outer6, keys6, is_address6, address6, CtKey6, ServiceKey6, AffinityKey6, Backend6, CT6, SERVICES6, BACKENDS6, AFFINITY6, select6, judge6, report6, port6, WINDOW6, decide6
}
