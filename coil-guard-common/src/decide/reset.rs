//! Modes `reset` and `audit`.

use super::{
    COARSE, IDLE, RETRIES, State, Unmarked, World, is_reserved_port,
    put::{Put, put, read, read_own},
};
use crate::{abi::event, counters::Reason, inner::FlowPacket};

/// Every flow leaves a backend that keeps nothing, with this packet, if there is a live one. In audit, that is only
/// counted and reported, along with whether drain would have kept the flow; nothing of Cilium's is written.
#[inline(always)]
pub(super) fn reset(world: &mut impl World, state: &mut State) {
    look(world, state);
    if state.outcome.reason == Reason::Healthy && !state.act {
        remember(world, state.read.backend.id);
    }
    if state.outcome.reason != Reason::WouldMove {
        return;
    }
    if state.act {
        move_to_live(world, state);
        return;
    }
    if state.read.valid {
        state.outcome.would_drain = is_old(world);
        world.report(event::WOULD_MOVE, state.read.backend.id, state.live.id);
    }
}

/// Finds out whether the packet's entry has to name `state.live` instead: the outcome is then `WouldMove`.
#[inline(always)]
fn look(world: &mut impl World, state: &mut State) {
    read_own(world, state, state.port, Unmarked::No);
    if state.read.valid && state.read.backend.keeps {
        state.outcome.reason = Reason::Healthy;
        return;
    }
    if is_reserved_port(state.port) {
        state.outcome.reason = Reason::ReservedPort;
        return;
    }
    // A flow that is bound needs one live backend; one that is not is left to Cilium if all of them are.
    state.first_only = state.read.valid;
    world.select(state);
    if !state.read.valid && state.all_usable {
        state.outcome.reason = Reason::LeftToCilium;
    } else if state.live.usable {
        state.outcome.reason = Reason::WouldMove;
    } else {
        world.report(event::NO_LIVE, state.read.backend.id, 0);
        state.outcome.reason = Reason::NoLive;
    }
}

#[inline(never)]
fn move_to_live(world: &mut impl World, state: &mut State) {
    let mut tries = 0;
    loop {
        let done = put(world, &state.master, state.port, &state.read, state.live.id);
        state.outcome.reason = done.reason();
        if done != Put::Raced {
            if state.read.valid {
                world.set_previous(state.read.backend.id, world.now());
                world.report(event::MOVED, state.read.backend.id, state.live.id);
            }
            return;
        }
        if tries == RETRIES {
            return;
        }
        tries += 1;
        read(world, &state.master, state.port, Unmarked::No, &mut state.read);
        if state.read.valid && state.read.backend.keeps {
            state.outcome.reason = Reason::Healthy;
            return;
        }
    }
}

/// Whether the packet belongs to a flow that was there before.
#[inline(never)]
fn is_old(world: &mut impl World) -> bool {
    match world.flow_packet() {
        FlowPacket::Opening => false,
        FlowPacket::Established | FlowPacket::Closing => true,
        FlowPacket::Stateless => {
            let now = world.now();
            world.flow().is_some_and(|flow| now.saturating_sub(flow.last_seen) <= IDLE)
        }
    }
}

#[inline(always)]
fn remember(world: &mut impl World, id: u32) {
    let now = world.now();
    let known =
        world.flow().is_some_and(|flow| flow.backend_id == id && now.saturating_sub(flow.last_seen) < COARSE);
    if !known {
        world.remember(id, 0);
    }
}
