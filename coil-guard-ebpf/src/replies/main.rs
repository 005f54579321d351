//! The cores for symmetric replies of mode `rewrite`, reached by stubs inside the pods' namespaces on the interface that holds
//! a pod's address: two on an egress pod and one on a client pod.
//!
//! ```text
//! client pod                                                            egress pod
//!   egress:  FoU port -> given port (the client's program)   ------>    ingress: learns the port      (learn)
//!   ingress: given port -> FoU port (return)                 <------    egress:  FoU port -> the port (answer)
//! ```
//!
//! The rules are in `coil_guard_common::replies`. An object of its own: it needs none of Cilium's maps and few of our own.
#![no_std]
#![no_main]
#![feature(asm_experimental_arch)]
#![expect(clippy::needless_pass_by_value, reason = "the entry points take what the classifier macro gives")]

#[path = "../config.rs"]
#[expect(dead_code, reason = "shared with the client's core, which needs more of it")]
mod config;
mod maps;
#[path = "../program.rs"]
mod program;
#[path = "../skb.rs"]
#[expect(dead_code, reason = "shared with the client's core, which needs more of it")]
mod skb;
mod summed;

use core::mem::offset_of;

use aya_ebpf::{macros::classifier, programs::TcContext};
use coil_guard_common::{
    abi::{Answer, AnswerKey, ReturnKey},
    checksum::{self, Sum},
    cilium::PROTO_UDP,
    counters::ReplyCount,
    packet::{self, Address, ETHERTYPE_IPV4, ETHERTYPE_IPV6, Load, Outer},
    replies::{self, Heard},
};
use network_types::udp::UdpHdr;

use crate::{
    config::{Client, now},
    program::PASS_ON,
    skb::{LinearPacket, Packet},
};

/// How exactly "last seen" is known.
const COARSE: u64 = 1_000_000_000;

/// Ingress of an egress pod.
#[classifier]
pub(crate) fn coil_learn(context: TcContext) -> i32 {
    each_packet::<Learn>(&Packet::new(&context))
}

/// Egress of an egress pod.
#[classifier]
pub(crate) fn coil_answer(context: TcContext) -> i32 {
    each_packet::<Reply>(&Packet::new(&context))
}

/// Ingress of a client pod.
#[classifier]
pub(crate) fn coil_return(context: TcContext) -> i32 {
    each_packet::<GiveBack>(&Packet::new(&context))
}

/// What one of the programs does with a UDP packet. Most packets are none of tunnels, and are known by their ports.
trait Task {
    fn concerns(source_port: [u8; 2], destination_port: [u8; 2], fou_port: [u8; 2]) -> bool;
    /// Does its work, and gives the port that the packet is to be sent to instead.
    fn work<A: Family>(pod: Client, outer: &Outer<A>) -> Option<[u8; 2]>;
}

/// An address family.
trait Family: Address {
    fn is_of(self, pod: Client) -> bool;
    fn add(self, sum: Sum) -> Sum;
}

impl Family for [u8; 4] {
    #[inline(always)]
    fn is_of(self, pod: Client) -> bool {
        pod.is_address4(self)
    }
    #[inline(always)]
    fn add(self, sum: Sum) -> Sum {
        sum.address4(self)
    }
}

impl Family for [u8; 16] {
    #[inline(always)]
    fn is_of(self, pod: Client) -> bool {
        pod.is_address6(self)
    }
    #[inline(always)]
    fn add(self, sum: Sum) -> Sum {
        sum.address6(self)
    }
}

#[inline(always)]
fn each_packet<T: Task>(packet: &Packet<'_>) -> i32 {
    let parsed = match LinearPacket::of(packet) {
        Some(linear) => parse(&linear),
        None => parse_anywhere(packet),
    };
    // In a map and not on the stack, of which both ways of parsing would need a part.
    let Some(headers) = maps::headers() else { return PASS_ON };
    match parsed {
        Parsed::V4 => known::<T, _>(packet, &headers.outer4),
        Parsed::V6 => known::<T, _>(packet, &headers.outer6),
        Parsed::Other => {}
    }
    PASS_ON
}

/// Which of the records holds the headers of a UDP packet.
enum Parsed {
    V4,
    V6,
    Other,
}

#[inline(always)]
fn parse(packet: &impl Load) -> Parsed {
    let Some(headers) = maps::headers() else { return Parsed::Other };
    match packet::ether_type(packet) {
        ETHERTYPE_IPV4 => match packet::parse_udp_v4(packet) {
            Ok(outer) => {
                headers.outer4 = outer;
                Parsed::V4
            }
            Err(_) => Parsed::Other,
        },
        ETHERTYPE_IPV6 => match packet::parse_udp_v6(packet) {
            Ok(outer) => {
                headers.outer6 = outer;
                Parsed::V6
            }
            Err(_) => Parsed::Other,
        },
        _ => Parsed::Other,
    }
}

/// Not inlined: rare.
#[inline(never)]
fn parse_anywhere(packet: &Packet<'_>) -> Parsed {
    parse(packet)
}

#[inline(always)]
fn known<T: Task, A: Family>(packet: &Packet<'_>, outer: &Outer<A>) {
    let Some(pod) = Client::get() else { return };
    if T::concerns(outer.source_port, outer.destination_port, pod.fou_port())
        && let Some(port) = T::work(pod, outer)
    {
        redirect(packet, outer, port);
    }
}

/// Writes the destination port, and the checksum that it then has.
#[inline(always)]
fn redirect<A: Family>(packet: &Packet<'_>, outer: &Outer<A>, port: [u8; 2]) {
    let Some(header) = packet.load::<UdpHdr>(outer.udp) else { return };
    if header.check != [0; 2] {
        update_checksum(packet, outer, &header, port);
    }
    packet.store_summed(outer.udp + offset_of!(UdpHdr, dst) as u32, port);
}

/// Not inlined: Coil's own tunnels have no checksum.
#[inline(never)]
fn update_checksum<A: Family>(packet: &Packet<'_>, outer: &Outer<A>, header: &UdpHdr, port: [u8; 2]) -> u32 {
    let addresses = outer.destination.add(outer.source.add(Sum::new()));
    let pseudo = addresses.word([0, PROTO_UDP]).word(header.len);
    if let Some(checksum) = checksum::after_port_change(header.check, pseudo, header.dst, port) {
        packet.store_summed(outer.udp + offset_of!(UdpHdr, check) as u32, checksum);
    }
    0
}

struct Learn;

impl Task for Learn {
    #[inline(always)]
    fn concerns(_source_port: [u8; 2], destination_port: [u8; 2], fou_port: [u8; 2]) -> bool {
        destination_port == fou_port
    }

    #[inline(always)]
    fn work<A: Family>(pod: Client, outer: &Outer<A>) -> Option<[u8; 2]> {
        if !outer.destination.is_of(pod) {
            return None;
        }
        let key = AnswerKey { egress_pod: outer.destination.mapped(), client: outer.source.mapped() };
        match replies::heard(outer.source_port, outer.destination_port, pod.fou_port()) {
            Heard::Port => learn(&key, outer.source_port),
            Heard::FouPort => maps::forget(&key),
            Heard::Nothing => {}
        }
        None
    }
}

#[inline(always)]
fn learn(key: &AnswerKey, port: [u8; 2]) {
    let now = now();
    if let Some(known) = maps::answer(key)
        && known.port == port
    {
        if now.saturating_sub(known.last_seen) >= COARSE {
            maps::seen(key, now);
        }
        return;
    }
    // Never a new port in place: the element could be another client's by now.
    maps::learn(key, &Answer { last_seen: now, port, pad: [0; 6] });
}

struct Reply;

impl Task for Reply {
    #[inline(always)]
    fn concerns(source_port: [u8; 2], destination_port: [u8; 2], fou_port: [u8; 2]) -> bool {
        replies::is_answer(source_port, destination_port, fou_port)
    }

    #[inline(always)]
    fn work<A: Family>(pod: Client, outer: &Outer<A>) -> Option<[u8; 2]> {
        if !outer.source.is_of(pod) {
            return None;
        }
        let key = AnswerKey { egress_pod: outer.source.mapped(), client: outer.destination.mapped() };
        let port = replies::answer_port(maps::answer(&key)?, now())?;
        maps::count(ReplyCount::Answered);
        Some(port)
    }
}

struct GiveBack;

impl Task for GiveBack {
    #[inline(always)]
    fn concerns(source_port: [u8; 2], destination_port: [u8; 2], fou_port: [u8; 2]) -> bool {
        replies::may_be_returned(source_port, destination_port, fou_port)
    }

    #[inline(always)]
    fn work<A: Family>(pod: Client, outer: &Outer<A>) -> Option<[u8; 2]> {
        if !outer.destination.is_of(pod) {
            return None;
        }
        let key = ReturnKey { client: outer.destination.mapped(), port: outer.destination_port, pad: [0; 2] };
        let source = outer.source.mapped();
        let returned = maps::given(&key).is_some_and(|given| {
            replies::is_returned(&given, pod.generation(), &source, || maps::is_backend(&source))
        });
        if returned {
            maps::count(ReplyCount::Returned);
            return Some(pod.fou_port());
        }
        maps::count(ReplyCount::NotReturned);
        None
    }
}
