//! A model of Cilium's per-packet service load balancer: a test double for one node's client pods.
//!
//! It follows what was observed of Cilium 1.14 to 1.20-dev for UDP services, per version where they differ, and knows
//! nothing else of Cilium. `tests/README.md` says what it covers.
#![no_std]
#![no_main]
// For the atomic addition only.
#![feature(asm_experimental_arch)]
#![expect(
    missing_docs,
    unreachable_pub,
    reason = "a program, not a library: nothing uses its items from outside"
)]
#![expect(
    clippy::needless_borrows_for_generic_args,
    reason = "by value, entries would be copied to the stack"
)]
#![expect(clippy::needless_pass_by_value, reason = "the entry points take what the classifier macro gives")]

mod abi;
mod conntrack;
mod family;
mod maps;
mod packet;
mod service;

use aya_ebpf::{
    bindings::{TC_ACT_OK, TC_ACT_SHOT},
    macros::classifier,
    programs::TcContext,
};
use coil_guard_common::cilium::{CT_EGRESS, CT_INGRESS};

use crate::{
    abi::{Settings, Stat},
    conntrack::{Direction, create, refresh},
    family::{Family, Scratch, V4, V6},
    maps::{count, settings},
    packet::{End, Packet, UDP, translate},
};

const ETH_P_IP: u16 = 0x0800;
const ETH_P_IPV6: u16 = 0x86dd;

/// Ingress of the host side: packets that a client pod sends.
#[classifier]
pub fn model_from_container(ctx: TcContext) -> i32 {
    let Some(settings) = settings() else { return TC_ACT_SHOT };
    match ethertype(&ctx) {
        ETH_P_IP => from_container::<V4>(&ctx, settings),
        ETH_P_IPV6 => from_container::<V6>(&ctx, settings),
        _ => TC_ACT_OK,
    }
}

/// Egress of the host side: packets that a client pod gets.
#[classifier]
pub fn model_to_container(ctx: TcContext) -> i32 {
    let Some(settings) = settings() else { return TC_ACT_SHOT };
    match ethertype(&ctx) {
        ETH_P_IP => to_container::<V4>(&ctx, settings),
        ETH_P_IPV6 => to_container::<V6>(&ctx, settings),
        _ => TC_ACT_OK,
    }
}

#[inline(always)]
fn ethertype(ctx: &TcContext) -> u16 {
    ctx.load(12).map_or(0, u16::from_be_bytes)
}

// One frame per family: both together do not fit the stack.
#[inline(never)]
fn from_container<F: Family>(ctx: &TcContext, settings: &Settings) -> i32 {
    let Some(scratch) = F::scratch() else { return TC_ACT_SHOT };
    if F::parse(ctx, &mut scratch.packet).is_none() {
        return TC_ACT_OK;
    }
    let length = u64::from(ctx.len());
    let mut rev_nat_index = [0; 2];
    let service =
        service::lookup::<F>(settings, &scratch.packet.destination, scratch.packet.destination_port);
    if let Some((service, protocol)) = service {
        count(Stat::ToService);
        let slots = service.count;
        let Some((address, port)) = service::balance::<F>(scratch, settings, service, protocol, length)
        else {
            count(if service.count == 0 { Stat::DropNoService } else { Stat::DropNoBackend });
            let Packet { destination, destination_port, .. } = &scratch.packet;
            let now = service::lookup::<F>(settings, destination, *destination_port);
            if now.is_none_or(|(now, _)| !core::ptr::eq(now, service) || now.count != slots) {
                count(Stat::ServiceChanged);
            }
            return TC_ACT_SHOT;
        };
        if translate::<F>(ctx, &scratch.packet, End::Destination, address, port).is_none() {
            count(Stat::DropUntranslated);
            return TC_ACT_SHOT;
        }
        scratch.packet.destination = *address;
        scratch.packet.destination_port = port;
        rev_nat_index = service.rev_nat_index;
    } else {
        count(Stat::Direct);
    }
    // Up to 1.16 a packet to a service, too, may turn out to be a reply within a flow that the backend opened.
    if service.is_none() || settings.minor <= 16 {
        let Scratch { packet, key, .. } = scratch;
        let ports = [packet.source_port, packet.destination_port];
        F::set_key(key, &packet.destination, &packet.source, ports, UDP, CT_INGRESS);
        if let Some(entry) = F::ct().get_ptr_mut(&*key) {
            refresh(entry, settings, Direction::FromContainer, length);
            return TC_ACT_OK;
        }
    }
    track(scratch, settings, Direction::FromContainer, rev_nat_index, length);
    TC_ACT_OK
}

#[inline(never)]
fn to_container<F: Family>(ctx: &TcContext, settings: &Settings) -> i32 {
    let Some(scratch) = F::scratch() else { return TC_ACT_SHOT };
    if F::parse(ctx, &mut scratch.packet).is_none() {
        return TC_ACT_OK;
    }
    let length = u64::from(ctx.len());
    let Scratch { packet, key, .. } = scratch;
    let ports = [packet.source_port, packet.destination_port];
    F::set_key(key, &packet.destination, &packet.source, ports, UDP, CT_EGRESS);
    if let Some(entry) = F::ct().get_ptr_mut(&*key) {
        count(Stat::Reply);
        refresh(entry, settings, Direction::ToContainer, length);
        // SAFETY: a live map value.
        let rev_nat_index = unsafe { (*entry).rev_nat_index };
        if rev_nat_index != [0; 2]
            && let Some((address, port)) = F::reverse_nat(rev_nat_index)
        {
            count(Stat::ReverseNat);
            if translate::<F>(ctx, packet, End::Source, address, port).is_none() {
                return TC_ACT_SHOT;
            }
        }
        return TC_ACT_OK;
    }
    // Policy decides about every packet of a flow that the other side opened.
    if settings.default_deny != 0 {
        count(Stat::DropPolicy);
        return TC_ACT_SHOT;
    }
    track(scratch, settings, Direction::ToContainer, [0; 2], length);
    TC_ACT_OK
}

/// Refreshes or makes the entry of a flow in the direction that it was opened in.
#[inline(always)]
fn track<F: Family>(
    scratch: &mut Scratch<F>,
    settings: &Settings,
    direction: Direction,
    rev_nat_index: [u8; 2],
    length: u64,
) {
    let flags = if matches!(direction, Direction::FromContainer) { CT_EGRESS } else { CT_INGRESS };
    let Scratch { packet, key, .. } = scratch;
    let ports = [packet.destination_port, packet.source_port];
    F::set_key(key, &packet.source, &packet.destination, ports, UDP, flags);
    match F::ct().get_ptr_mut(&*key) {
        Some(entry) => refresh(entry, settings, direction, length),
        None => create(scratch, settings, direction, rev_nat_index, length),
    }
}

#[cfg(not(test))]
#[panic_handler]
fn panic(_info: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}

#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";
