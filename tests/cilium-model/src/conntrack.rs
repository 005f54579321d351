//! Conntrack entries: what a packet refreshes, and what it makes.

use aya_ebpf::{bindings::BPF_ANY, helpers::generated::bpf_ktime_get_ns};
use coil_guard_common::cilium::{CT_EGRESS, CT_INGRESS, CT_RELATED, CtEntry};

use crate::{
    abi::Settings,
    family::{Family, Scratch},
    maps::add,
    packet::UDP,
};

/// A report is due when the last one is older than this.
const REPORT_INTERVAL: u32 = 5;

/// Direction of a packet as seen by the client pod.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    FromContainer,
    ToContainer,
}

/// Seconds of CLOCK_MONOTONIC.
#[inline(always)]
pub fn now() -> u32 {
    // SAFETY: no preconditions.
    (unsafe { bpf_ktime_get_ns() } / 1_000_000_000) as u32
}

/// What a packet does to the egress or ingress entry that it belongs to.
#[inline(always)]
pub fn refresh(entry: *mut CtEntry, settings: &Settings, direction: Direction, length: u64) {
    touch(entry, settings, direction);
    // SAFETY: `entry` points to a live map value; fields are aligned.
    unsafe {
        // Up to 1.15 both directions are counted apart, and the field of the backend id is the second of the receive
        // counters.
        if settings.minor <= 15 && direction == Direction::ToContainer {
            add(&raw mut (*entry).reserved0, 1);
            add(&raw mut (*entry).backend_id, length);
        } else {
            add(&raw mut (*entry).packets, 1);
            add(&raw mut (*entry).bytes, length);
        }
    }
}

/// What a packet does to the service entry that it belongs to.
#[inline(always)]
pub fn refresh_service(entry: *mut CtEntry, settings: &Settings, length: u64) {
    touch(entry, settings, Direction::FromContainer);
    if settings.minor >= 16 {
        // SAFETY: as in `refresh`.
        unsafe {
            add(&raw mut (*entry).packets, 1);
            add(&raw mut (*entry).bytes, length);
        }
    }
}

#[inline(always)]
fn touch(entry: *mut CtEntry, settings: &Settings, direction: Direction) {
    let now = now();
    // SAFETY: as in `refresh`; plain stores of a time, of which any is as good as another.
    unsafe {
        (&raw mut (*entry).lifetime).write_volatile(now + settings.lifetime);
        let report = match direction {
            Direction::FromContainer => &raw mut (*entry).last_tx_report,
            Direction::ToContainer => &raw mut (*entry).last_rx_report,
        };
        if report.read_volatile() + REPORT_INTERVAL < now {
            report.write_volatile(now);
        }
    }
}

/// Fills in a new entry without counters.
#[inline(always)]
fn blank(entry: &mut CtEntry, settings: &Settings, direction: Direction, rev_nat_index: [u8; 2]) {
    let now = now();
    *entry = CtEntry::for_replies(rev_nat_index, now + settings.lifetime);
    match direction {
        Direction::FromContainer => entry.last_tx_report = now,
        Direction::ToContainer => entry.last_rx_report = now,
    }
}

/// Fills in a new service entry.
#[inline(always)]
pub fn service_entry(
    entry: &mut CtEntry,
    settings: &Settings,
    backend_id: u32,
    rev_nat_index: [u8; 2],
    length: u64,
) {
    blank(entry, settings, Direction::FromContainer, rev_nat_index);
    entry.backend_id = backend_id.into();
    if settings.minor >= 16 {
        entry.packets = 1;
        entry.bytes = length;
    }
}

/// Makes the entry of the packet's flow, and the one for ICMP errors about it.
#[inline(always)]
pub fn create<F: Family>(
    scratch: &mut Scratch<F>,
    settings: &Settings,
    direction: Direction,
    rev_nat_index: [u8; 2],
    length: u64,
) {
    let Scratch { packet, key, entry } = scratch;
    let ports = [packet.destination_port, packet.source_port];
    let (flags, identity) = match direction {
        Direction::FromContainer => (CT_EGRESS, settings.identity),
        Direction::ToContainer => (CT_INGRESS, settings.remote_identity),
    };
    blank(entry, settings, direction, rev_nat_index);
    entry.src_sec_id = identity;
    if settings.minor <= 15 && direction == Direction::ToContainer {
        entry.reserved0 = 1;
        entry.backend_id = length;
    } else {
        entry.packets = 1;
        entry.bytes = length;
    }
    F::set_key(key, &packet.source, &packet.destination, ports, UDP, flags);
    // A full map leaves the flow untracked, as in any LRU that cannot evict in time.
    let _ = F::ct().insert(&*key, &*entry, BPF_ANY.into());

    if settings.minor >= 16 {
        entry.packets = 0;
        entry.bytes = 0;
    } else if settings.minor == 14 {
        // seen_non_syn
        entry.flags = 0x10;
    }
    F::set_key(key, &packet.source, &packet.destination, [[0; 2]; 2], F::ICMP, flags | CT_RELATED);
    let _ = F::ct().insert(&*key, &*entry, BPF_ANY.into());
}
