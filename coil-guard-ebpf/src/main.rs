//! The core program. The stub of each client pod goes on here: it is attached on egress of the interface that holds the
//! pod's address, inside the pod's namespace.
//!
//! There it sees the complete outer FoU packet before Cilium does. It looks at Cilium's maps, may change the packet's own
//! service entry or outer source port, and always passes the packet on. The rules are in `coil_guard_common::decide`; this
//! crate holds the maps and the glue.
#![no_std]
#![no_main]
#![feature(asm_experimental_arch, core_intrinsics)]
#![expect(internal_features, reason = "the BPF target's core has no compare-and-exchange")]
#![expect(
    clippy::needless_borrows_for_generic_args,
    reason = "by value, keys and values would be copied to the stack"
)]
#![expect(clippy::needless_pass_by_value, reason = "the entry point takes what the classifier macro gives")]

mod apart;
mod atomic;
mod config;
mod family;
mod maps;
mod memory;
mod packet_client;
mod program;
mod recent;
mod report;
mod scratch;
mod skb;
mod world;

use core::mem::offset_of;

use aya_ebpf::{macros::classifier, programs::TcContext};
use coil_guard_common::{
    abi::{GuardedService, POD_PORTS_OVERLAP, SERVICE_SPORT_AUTO, mode},
    checksum,
    cilium::PROTO_UDP,
    counters::Reason,
    decide::{self, Outcome, Shortcut, drain_port, tracks_flows},
    inner::{self, Fragment},
    packet::{self, Address as _, ETHERTYPE_IPV4, ETHERTYPE_IPV6, Load},
};
use network_types::udp::UdpHdr;

use crate::{
    config::Client,
    family::{Family, V4, V6},
    packet_client::ClientWorld,
    program::PASS_ON,
    scratch::Scratch,
    skb::{LinearPacket, Packet},
};

/// See the crate's documentation.
#[classifier]
pub(crate) fn coil_guard_core(context: TcContext) -> i32 {
    let Some(client) = Client::get() else { return PASS_ON };
    let packet = Packet::new(&context);
    let parsed = match LinearPacket::of(&packet) {
        Some(linear) => parse(&linear, client.fou_port()),
        None => parse_anywhere(&packet, client.fou_port()),
    };
    let reason = match parsed {
        Parsed::V4 => guard::<V4>(&packet, client),
        Parsed::V6 => guard::<V6>(&packet, client),
        Parsed::Other(reason) => reason,
    };
    maps::count(reason);
    PASS_ON
}

/// What the outer headers are; of a FoU packet they stand in the scratch record.
enum Parsed {
    V4,
    V6,
    Other(Reason),
}

#[inline(always)]
fn parse(packet: &impl Load, fou_port: [u8; 2]) -> Parsed {
    // Family by family, so that each outcome goes straight to its place in the record.
    match packet::ether_type(packet) {
        ETHERTYPE_IPV4 => match packet::parse_v4(packet, fou_port) {
            Ok(outer) => {
                let Some(scratch) = Scratch::get() else { return Parsed::Other(Reason::NotGuarded) };
                scratch.outer4 = outer;
                Parsed::V4
            }
            Err(reason) => Parsed::Other(reason),
        },
        ETHERTYPE_IPV6 => match packet::parse_v6(packet, fou_port) {
            Ok(outer) => {
                let Some(scratch) = Scratch::get() else { return Parsed::Other(Reason::NotGuarded) };
                scratch.outer6 = outer;
                Parsed::V6
            }
            Err(reason) => Parsed::Other(reason),
        },
        _ => Parsed::Other(Reason::NotFou),
    }
}

/// Not inlined: rare.
#[inline(never)]
fn parse_anywhere(packet: &Packet<'_>, fou_port: [u8; 2]) -> Parsed {
    parse(packet, fou_port)
}

#[inline(always)]
fn guard<F: Family>(packet: &Packet<'_>, client: Client) -> Reason {
    let Some(scratch) = Scratch::get() else { return Reason::NotGuarded };
    let outer = F::outer(scratch);
    let (address, port) = (outer.destination.mapped(), outer.destination_port);
    (scratch.service.address, scratch.service.port) = (address, port);
    let now = config::now();
    let Some(recent) = recent::service(address, port, &scratch.service, now) else {
        return Reason::NotGuarded;
    };
    let service = &recent.guarded;
    if service.expires_at < now {
        return Reason::NotGuarded;
    }
    // A client with NET_RAW must not act on another pod's flows.
    if !F::is_own(client, F::outer(scratch).source) {
        return Reason::ForeignSource;
    }
    scratch.mode = effective_mode(service, client);
    scratch.prepare::<F>(now, service, client);
    if tracks_flows(scratch.mode) {
        scratch.flow_packet = inner_flow::<F>(packet, scratch);
    }
    let (egress, mode) = (service.egress, scratch.mode);
    let found = match recent.rev_nat_index(now) {
        Some(index) => decide::shortcut(&mut ClientWorld::<F>::new(scratch), index, mode),
        None => None,
    };
    match found {
        Some(Shortcut::Healthy) => {
            count_egress(egress, &HEALTHY);
            Reason::Healthy
        }
        Some(Shortcut::Drained(id)) => {
            let outcome = Outcome { reason: Reason::Drained, source_port: Some(drain_port(id)), ..HEALTHY };
            count_egress(egress, &outcome);
            rewrite::<F>(packet, drain_port(id));
            Reason::Drained
        }
        None => guard_in_full::<F>(packet, egress, recent),
    }
}

const HEALTHY: Outcome =
    Outcome { reason: Reason::Healthy, source_port: None, cut: false, would_drain: false, moved: false };

/// What is known so far stands in the scratch record.
#[inline(always)]
fn guard_in_full<F: Family>(packet: &Packet<'_>, egress: u32, recent: &mut recent::Service) -> Reason {
    if !F::decide() {
        return Reason::UnknownService;
    }
    let (Some(scratch), Some(state)) = (Scratch::get(), scratch::state()) else { return Reason::NotGuarded };
    recent.saw_master(scratch.now, state.master.rev_nat_index);
    let outcome = &state.outcome;
    count_egress(egress, outcome);
    if let Some(port) = outcome.source_port {
        rewrite::<F>(packet, port);
    }
    outcome.reason
}

#[inline(always)]
fn rewrite<F: Family>(packet: &Packet<'_>, port: [u8; 2]) {
    let Some(scratch) = Scratch::get() else { return };
    let udp = F::outer(scratch).udp;
    let Some(header) = packet.load::<UdpHdr>(udp) else { return };
    if header.check != [0; 2] {
        update_checksum::<F>(packet, scratch, &header, port);
    }
    packet.store(udp + offset_of!(UdpHdr, src) as u32, port);
}

/// Not inlined: Coil's own tunnels have no checksum.
#[inline(never)]
fn update_checksum<F: Family>(packet: &Packet<'_>, scratch: &Scratch, header: &UdpHdr, port: [u8; 2]) {
    let outer = F::outer(scratch);
    let pseudo = F::pseudo_header(outer).word([0, PROTO_UDP]).word(header.len);
    if let Some(checksum) = checksum::after_port_change(header.check, pseudo, header.src, port) {
        packet.store(outer.udp + offset_of!(UdpHdr, check) as u32, checksum);
    }
}

/// Where the pod's ephemeral ports reach into the drain ports, a flow that has a port of its own cannot be told from a
/// drained one.
#[inline(always)]
fn effective_mode(service: &GuardedService, client: Client) -> u8 {
    let auto = service.flags & SERVICE_SPORT_AUTO != 0 && client.flags() & POD_PORTS_OVERLAP != 0;
    if auto && service.mode == mode::DRAIN { mode::RESET } else { service.mode }
}

/// Reads the inner flow into the scratch key.
///
/// It has a result so that the register of results holds one: a function without may leave a pointer into its frame there,
/// which the verifier refuses.
#[inline(never)]
fn inner_flow<F: Family>(packet: &Packet<'_>, scratch: &mut Scratch) -> inner::FlowPacket {
    let offset = F::outer(scratch).inner();
    let client = F::outer(scratch).source.mapped();
    (scratch.flow.client, scratch.fragment.client) = (client, client);
    (scratch.flow.service, scratch.flow.service_port) = (scratch.service.address, scratch.service.port);
    // Nearly always of the outer packet's family.
    let window = F::window(packet, offset, &mut scratch.window);
    let (flow_packet, fragment) = inner::parse(&window, offset, &mut scratch.flow, &mut scratch.fragment);
    if fragment != Fragment::Whole {
        if fragment == Fragment::First {
            maps::remember_fragment(scratch);
        } else {
            maps::follow_fragment(scratch);
        }
    }
    flow_packet
}

#[inline(always)]
fn count_egress(egress: u32, outcome: &Outcome) {
    let Some(counters) = maps::egress_counters(egress) else { return };
    counters.packets += 1;
    match outcome.reason {
        Reason::Moved => counters.moved += 1,
        Reason::Created => counters.created += 1,
        Reason::Repaired => counters.repaired += 1,
        Reason::Drained => counters.drained += 1,
        Reason::NoLive => counters.no_live += 1,
        Reason::WouldMove => counters.would_move += 1,
        Reason::NotDrained => counters.not_drained += 1,
        Reason::Contended => counters.contended += 1,
        Reason::HeldByAffinity | Reason::NotMoved => counters.cannot_move += 1,
        Reason::NewPort => {
            counters.rewritten += 1;
            counters.new_ports += 1;
        }
        Reason::Rewritten => counters.rewritten += 1,
        _ => {}
    }
    if outcome.cut {
        counters.cut += 1;
    }
    if outcome.moved {
        counters.moved += 1;
    }
    if outcome.would_drain {
        counters.would_drain += 1;
    }
}
