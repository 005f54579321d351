//! What nearly every packet comes to, found with few lookups.
//!
//! A shortcut says what [`decide`](super::decide) would say, and changes nothing; where it says nothing, that decides. It is
//! given the reverse NAT index of the service's master entry as it was seen a moment ago. Were it another one by now, Cilium
//! would take an entry with the old one for dangling and make it valid with the packet at hand: the next one finds out.

use super::{
    COARSE, IDLE, World, drain_port, is_reserved_port,
    judge::Unmarked,
    judge::{KEEPS, SINCE_MARK, USABLE, verdict_about},
};
use crate::{
    abi::{FLOW_DRAINED, FLOW_ENDED, InnerFlow, mark, mode, same_address},
    cilium::BACKEND_ACTIVE,
    inner::FlowPacket,
};

/// The end of a shortcut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shortcut {
    /// The packet's entry names a backend that keeps its flows.
    Healthy,
    /// A drained flow of which all is noted goes on under the drain port of this backend id.
    Drained(u32),
}

/// See the module.
#[inline(always)]
pub fn shortcut(world: &mut impl World, rev_nat_index: [u8; 2], mode: u8) -> Option<Shortcut> {
    match mode {
        mode::RESET => on_active(world, rev_nat_index).map(|_| Shortcut::Healthy),
        mode::AUDIT => {
            let id = on_active(world, rev_nat_index)?;
            let flow = world.flow()?;
            (flow.backend_id == id && is_recent(world, &flow)).then_some(Shortcut::Healthy)
        }
        mode::DRAIN => of_known_flow(world, rev_nat_index),
        _ => None,
    }
}

/// The ACTIVE backend that the packet's valid entry names. Without a mark that says otherwise such a backend keeps its
/// flows, listed or not, so that while all marks are READY its own need not be looked up.
#[inline(always)]
fn on_active(world: &mut impl World, rev_nat_index: [u8; 2]) -> Option<u32> {
    let id = named(world, world.client_port(), rev_nat_index)?;
    let backend = world.backend(id)?;
    if backend.state != BACKEND_ACTIVE {
        return None;
    }
    if !world.only_ready_marks()
        && let Some(found) = world.mark(&backend.address)
        && found.state != mark::READY
    {
        return None;
    }
    Some(id)
}

/// The backend id in the entry under `port`, if the entry is of the service.
#[inline(always)]
fn named(world: &mut impl World, port: [u8; 2], rev_nat_index: [u8; 2]) -> Option<u32> {
    let entry = world.entry(port)?;
    // Ids are 32 bits wide; an entry with more set names no backend.
    (entry.rev_nat_index == rev_nat_index && entry.backend_id >> 32 == 0).then_some(entry.backend_id as u32)
}

#[inline(always)]
fn is_recent(world: &impl World, flow: &InnerFlow) -> bool {
    world.now().saturating_sub(flow.last_seen) < COARSE
}

/// A packet of a known flow of which nothing is to be noted: its home is in place, and the entry that leads there too.
#[inline(always)]
fn of_known_flow(world: &mut impl World, rev_nat_index: [u8; 2]) -> Option<Shortcut> {
    let flow = world.flow()?;
    let nothing_to_note = match world.flow_packet() {
        FlowPacket::Opening => false,
        FlowPacket::Closing => flow.flags & FLOW_ENDED != 0,
        FlowPacket::Established | FlowPacket::Stateless => true,
    };
    if !nothing_to_note || !is_recent(world, &flow) {
        return None;
    }
    let id = flow.backend_id;
    let backend = world.backend(id)?;
    if !same_address(backend.address, flow.backend_address) {
        return None;
    }
    let mark = world.mark(&backend.address);
    let verdict =
        verdict_about(world.now(), world.heartbeat_fresh(), backend.state, mark.as_ref(), Unmarked::Awhile);
    if verdict & USABLE != 0 {
        return (named(world, world.client_port(), rev_nat_index)? == id).then_some(Shortcut::Healthy);
    }
    // One that leaves without a mark does so since a time that has to be looked up.
    let stays = verdict & (KEEPS | SINCE_MARK) == KEEPS | SINCE_MARK && flow.flags & FLOW_DRAINED != 0;
    if !stays || is_reserved_port(world.client_port()) {
        return None;
    }
    if named(world, drain_port(id), rev_nat_index)? != id {
        return None;
    }
    let has_replies = world.client_port() != world.fou_port() || world.replies_are_kept(drain_port(id), id);
    has_replies.then_some(Shortcut::Drained(id))
}

const _: () = assert!(COARSE <= IDLE, "a flow that is recent is not idle");
