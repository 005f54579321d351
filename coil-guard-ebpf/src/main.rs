//! The TC program, on egress of the interface that holds a client pod's address, inside the pod's namespace.
//!
//! There it sees the complete outer FoU packet before Cilium does. It looks at Cilium's maps, may change the packet's own
//! service entry or outer source port, and always passes the packet on. The rules are in `coil_guard_common::decide`; this
//! crate holds the maps and the glue.
#![no_std]
#![no_main]
#![feature(core_intrinsics)]
#![expect(internal_features, reason = "the BPF target's core has no compare-and-exchange")]

mod atomic;
mod config;
mod family;
mod maps;
mod packet;
mod report;
mod scratch;
mod world;

use aya_ebpf::{macros::classifier, programs::TcContext};
use coil_guard_common::{
    abi::{EgressCounters, GuardedService, POD_PORTS_OVERLAP, SERVICE_SPORT_AUTO, mode},
    counters::Reason,
    decide::{self, Outcome, tracks_flows},
    inner::{self, Fragment},
    packet::{Address as _, FouPacket},
};

use crate::{
    config::Config,
    family::{Family, V4, V6},
    packet::Packet,
    scratch::Scratch,
    world::ClientWorld,
};

/// Both TCX_NEXT and TC_ACT_UNSPEC: whatever runs next decides.
const PASS_ON: i32 = -1;

/// See the crate's documentation.
#[classifier]
pub(crate) fn coil_guard(context: TcContext) -> i32 {
    let packet = Packet::new(&context);
    let reason = match Scratch::get() {
        Some(scratch) => match parse(&packet, scratch) {
            Parsed::V4 => guard::<V4>(&packet, scratch),
            Parsed::V6 => guard::<V6>(&packet, scratch),
            Parsed::Other(reason) => reason,
        },
        None => Reason::NotGuarded,
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

#[inline(never)]
fn parse(packet: &Packet<'_>, scratch: &mut Scratch) -> Parsed {
    match coil_guard_common::packet::parse(packet, Config::fou_port()) {
        Ok(FouPacket::V4(outer)) => {
            scratch.outer4 = outer;
            Parsed::V4
        }
        Ok(FouPacket::V6(outer)) => {
            scratch.outer6 = outer;
            Parsed::V6
        }
        Err(reason) => Parsed::Other(reason),
    }
}

#[inline(never)]
fn guard<F: Family>(packet: &Packet<'_>, scratch: &'static mut Scratch) -> Reason {
    let outer = F::outer(scratch);
    (scratch.service.address, scratch.service.port) = (outer.destination.mapped(), outer.destination_port);
    let Some(service) = maps::guarded_service(&scratch.service) else { return Reason::NotGuarded };
    let now = config::now();
    if service.expires_at < now {
        return Reason::NotGuarded;
    }
    if !is_own::<F>(scratch) {
        return Reason::ForeignSource;
    }
    scratch.mode = effective_mode(service);
    let Some(state) = scratch::state() else { return Reason::NotGuarded };
    let mut world = ClientWorld::<F>::new(scratch, now, service);
    if !world.find_master(&mut state.master) {
        return Reason::UnknownService;
    }
    if tracks_flows(world.scratch.mode) {
        let offset = F::outer(world.scratch).inner();
        inner_flow(packet, world.scratch, offset);
    }
    let mode = world.scratch.mode;
    decide::decide(&mut world, state, mode);
    let outcome = &state.outcome;
    if let Some(counters) = maps::egress_counters(service.egress) {
        count_egress(counters, outcome);
    }
    if let Some(port) = outcome.source_port {
        rewrite::<F>(packet, world.scratch, port);
    }
    outcome.reason
}

#[inline(never)]
fn rewrite<F: Family>(packet: &Packet<'_>, scratch: &Scratch, port: [u8; 2]) {
    let outer = F::outer(scratch);
    packet.set_source_port(outer.udp, F::pseudo_header(outer), port);
}

/// Whether the packet's source is this pod: a client with NET_RAW must not act on another pod's flows.
#[inline(never)]
fn is_own<F: Family>(scratch: &Scratch) -> bool {
    F::is_own(F::outer(scratch).source)
}

/// Where the pod's ephemeral ports reach into the drain ports, a flow that has a port of its own cannot be told from a
/// drained one.
#[inline(always)]
fn effective_mode(service: &GuardedService) -> u8 {
    let auto = service.flags & SERVICE_SPORT_AUTO != 0 && Config::flags() & POD_PORTS_OVERLAP != 0;
    if auto && service.mode == mode::DRAIN { mode::RESET } else { service.mode }
}

/// Reads the inner flow at `offset` into the scratch key.
#[inline(never)]
fn inner_flow(packet: &Packet<'_>, scratch: &mut Scratch, offset: u32) {
    scratch.flow.client = scratch.client_service.client;
    scratch.flow.service = scratch.client_service.service;
    scratch.flow.service_port = scratch.client_service.service_port;
    let (flow_packet, fragment) = inner::parse(packet, offset, &mut scratch.flow, &mut scratch.fragment);
    scratch.flow_packet = flow_packet;
    if fragment != Fragment::Whole {
        scratch.fragment.client = scratch.client_service.client;
        if fragment == Fragment::First {
            maps::remember_fragment(scratch);
        } else {
            maps::follow_fragment(scratch);
        }
    }
}

#[inline(always)]
fn count_egress(counters: &mut EgressCounters, outcome: &Outcome) {
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
        _ => {}
    }
    if outcome.cut {
        counters.cut += 1;
    }
    if outcome.would_drain {
        counters.would_drain += 1;
    }
}

#[cfg(not(test))]
#[panic_handler]
fn panic(_info: &core::panic::PanicInfo<'_>) -> ! {
    // Unreachable: nothing here indexes, formats or unwraps. The verifier would refuse the loop.
    loop {}
}

#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";
