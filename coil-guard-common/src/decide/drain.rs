//! Mode `drain`: existing inner connections stay, new ones leave.

use super::{
    COARSE, DRAIN_PORTS, DrainChange, Entry, IDLE, Judgement, PREVIOUS_MEMORY, RETRIES, SETTLE, State,
    Unmarked, World, drain_port, is_reserved_port,
    put::{Put, put, read, read_own},
    state::Memory,
};
use crate::{
    abi::{FLOW_DRAINED, FLOW_ENDED, InnerFlow, event, same_address},
    counters::Reason,
    inner::FlowPacket,
};

/// How a step ended.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Step {
    Done,
    /// The drain port belongs to another draining backend.
    Collision,
    /// An entry changed between reading and writing it.
    Raced,
}

/// Decides for one packet; see the rules D1 to D4 in the design.
///
/// After a lost race the entry is read again, at most twice. Where the flow belongs, and which backend is live, was found
/// out once and stays: one verdict per backend and packet.
#[inline(always)]
pub(super) fn drain(world: &mut impl World, state: &mut State) {
    read_own(world, state, state.port, Unmarked::Awhile);
    recall(world, state);
    if state.read.valid && state.read.backend.usable && state.flow_is_on(state.read.backend.id) {
        // D1 at its simplest, which is nearly every packet.
        state.outcome.reason = Reason::Healthy;
        note(world, state, state.read.backend.id, 0);
        return;
    }
    drain_further(world, state);
}

#[inline(never)]
fn drain_further(world: &mut impl World, state: &mut State) {
    find_home(world, state);
    if !state.home.keeps {
        find_target(world, state);
    }
    let mut collision = false;
    if state.home.keeps {
        let no_live = state.outcome.reason == Reason::NoLive;
        stay(world, state);
        collision = state.outcome.reason == Reason::NotDrained;
        if !collision {
            if no_live {
                state.outcome.reason = Reason::NoLive;
            }
            return;
        }
        find_target(world, state);
    }
    if state.outcome.reason == Reason::WouldMove {
        move_to_target(world, state);
    }
    if collision {
        state.outcome.reason = Reason::NotDrained;
    }
}

/// Looks the packet's tuple up in the memory of flows.
#[inline(always)]
fn recall(world: &mut impl World, state: &mut State) {
    let Some(flow) = world.flow() else { return };
    let anew = match world.flow_packet() {
        FlowPacket::Opening => true,
        FlowPacket::Stateless => world.now().saturating_sub(flow.last_seen) > IDLE,
        FlowPacket::Established | FlowPacket::Closing => false,
    };
    state.flow = flow;
    state.memory = if anew { Memory::Earlier } else { Memory::Known };
    let named = state.read.backend.present && state.read.backend.id == flow.backend_id;
    // Looked at twice before the flow is given up, as in `judge`.
    state.in_place = (named && same_address(state.read.address, flow.backend_address))
        || is_at(world, &flow)
        || is_at(world, &flow);
}

/// Whether the flow's backend still has the address that was remembered with it.
#[inline(always)]
fn is_at(world: &mut impl World, flow: &InnerFlow) -> bool {
    world.backend(flow.backend_id).is_some_and(|backend| same_address(backend.address, flow.backend_address))
}

/// Finds the backend that the packet's flow must stay on; `state.home.keeps` when there is one.
#[inline(never)]
fn find_home(world: &mut impl World, state: &mut State) {
    state.home.keeps = false;
    if state.memory == Memory::Known && state.in_place {
        judge_home(world, state, state.flow.backend_id);
        if state.home.keeps {
            return;
        }
    }
    let entry_keeps = state.read.valid && !state.read.backend.usable && state.read.backend.keeps;
    if state.memory == Memory::Nothing && may_be_old(world) {
        // D2: older than the guard's memory.
        find_previous(world, state);
        if state.home.keeps {
            return;
        }
        if entry_keeps {
            state.home = state.read.backend;
            return;
        }
    }
    state.home.keeps = false;
    if entry_keeps && settling(world, &state.read.backend) {
        // D3: packets that passed the guard just before are still queued in front of Cilium under this port.
        state.home = state.read.backend;
    }
}

/// Whether a packet of an unknown flow can belong to one that was there before the guard. What is not TCP and unknown
/// although everything of the last while is remembered is simply new.
#[inline(always)]
fn may_be_old(world: &mut impl World) -> bool {
    match world.flow_packet() {
        FlowPacket::Opening => false,
        FlowPacket::Stateless => world.now().saturating_sub(world.memory_since()) < IDLE,
        FlowPacket::Established | FlowPacket::Closing => true,
    }
}

/// The backend that the client was moved off, while it keeps flows. One that became usable again counts for a while only:
/// an unknown flow is then more likely one of the present backend.
#[inline(never)]
fn find_previous(world: &mut impl World, state: &mut State) {
    let Some(previous) = world.previous() else { return };
    let Some(backend) = world.backend(previous.backend_id) else { return };
    if !same_address(backend.address, previous.backend_address) {
        return;
    }
    judge_home(world, state, previous.backend_id);
    if state.home.usable && world.now().saturating_sub(previous.moved_at) >= PREVIOUS_MEMORY {
        state.home.keeps = false;
    }
}

/// The verdict about `id`, the one already made about the entry's backend if it is the same.
#[inline(never)]
fn judge_home(world: &mut impl World, state: &mut State, id: u32) {
    if state.read.backend.present && state.read.backend.id == id {
        state.home = state.read.backend;
    } else {
        world.judge(u64::from(id), Unmarked::Awhile, &mut state.home);
    }
}

#[inline(always)]
fn settling(world: &impl World, backend: &Judgement) -> bool {
    backend.began != 0 && world.now().saturating_sub(backend.began) < SETTLE
}

/// D1: keeps the packet on its home. The outcome is `NotDrained` when that cannot be, and then the packet is placed anew.
#[inline(never)]
fn stay(world: &mut impl World, state: &mut State) {
    let mut tries = 0;
    loop {
        match try_to_stay(world, state) {
            Step::Done => return,
            Step::Collision => {
                state.outcome.reason = Reason::NotDrained;
                return;
            }
            // No reason to give a flow up: in the end it passes as it came.
            Step::Raced => state.outcome.reason = Reason::Contended,
        }
        if tries == RETRIES {
            return;
        }
        tries += 1;
        read(world, &state.master, state.port, Unmarked::Awhile, &mut state.read);
    }
}

/// A home that is not usable is reached under its drain port even while the packet's own entry names it: a new flow on
/// another CPU may move that entry between this packet's pass here and in Cilium. What passed before the home began to
/// leave has [`SETTLE`] to get through.
#[inline(never)]
fn try_to_stay(world: &mut impl World, state: &mut State) -> Step {
    let id = state.home.id;
    let reserved = is_reserved_port(state.port);
    let named = state.read.valid && state.read.backend.id == id;
    if named && (state.home.usable || reserved) {
        state.outcome.reason = Reason::Healthy;
    } else if reserved {
        state.outcome.reason = Reason::ReservedPort;
        return Step::Done;
    } else if state.home.usable && !state.read.valid {
        let done = put(world, &state.master, state.port, &state.read, id);
        if done == Put::Raced {
            return Step::Raced;
        }
        state.outcome.reason = done.reason();
    } else {
        match claim(world, state, id) {
            Step::Done => go_by_drain_port(world, state, id),
            // The packet's own entry is as good for as long as it stays.
            Step::Collision if named => state.outcome.reason = Reason::Healthy,
            step => return step,
        }
        if !state.flow_is_on(id) && settling(world, &state.home) {
            state.outcome.reason = Reason::Settling;
        }
    }
    let drained = !state.home.usable || state.outcome.source_port.is_some();
    note(world, state, id, if drained { FLOW_DRAINED } else { 0 });
    Step::Done
}

#[inline(always)]
fn go_by_drain_port(world: &mut impl World, state: &mut State, id: u32) {
    if state.port == world.fou_port() {
        world.keep_replies(drain_port(id), &state.master, id);
    }
    state.outcome.source_port = Some(drain_port(id));
    state.outcome.reason = Reason::Drained;
}

/// Sees to it that the entry under the drain port of the backend `id` names it.
#[inline(always)]
fn claim(world: &mut impl World, state: &mut State, id: u32) -> Step {
    let port = drain_port(id);
    // As it is nearly always. The home is in Cilium's map: it was judged for this packet.
    let is_claimed = |entry: &Entry| {
        entry.backend_id == u64::from(id) && entry.rev_nat_index == state.master.rev_nat_index
    };
    if world.entry(port).as_ref().is_some_and(is_claimed) {
        return Step::Done;
    }
    read(world, &state.master, port, Unmarked::Awhile, &mut state.drain_read);
    let found = &state.drain_read;
    if found.valid && found.backend.id == id {
        return Step::Done;
    }
    if found.valid && found.backend.keeps && found.backend.id % DRAIN_PORTS == id % DRAIN_PORTS {
        world.report(event::DRAIN_PORT_COLLISION, id, found.backend.id);
        return Step::Collision;
    }
    match put(world, &state.master, port, found, id) {
        Put::Raced => Step::Raced,
        _ => Step::Done,
    }
}

/// D4: a new flow, or one whose backend keeps nothing, goes to a live backend, or where Cilium would send it if none is.
/// The outcome is `WouldMove` when its entry has to change to name `state.live`.
///
/// Where no backend is live but one keeps its flows, that becomes the home of this one as of any other: the first live
/// backend takes the entry at once, and the packet may still be on its way.
#[inline(never)]
fn find_target(world: &mut impl World, state: &mut State) {
    let collision = state.outcome.reason == Reason::NotDrained;
    if state.read.valid && state.read.backend.usable {
        state.outcome.reason = Reason::Healthy;
        settle(world, state, state.read.backend.id);
        return;
    }
    state.first_only = true;
    world.select(state);
    state.outcome.reason =
        if is_reserved_port(state.port) { Reason::ReservedPort } else { Reason::WouldMove };
    if state.live.usable {
        return;
    }
    world.report(event::NO_LIVE, state.read.backend.id, 0);
    state.live = if state.read.valid { state.read.backend } else { state.present };
    if state.live.keeps && !collision && state.outcome.reason == Reason::WouldMove {
        state.home = state.live;
        state.outcome.reason = Reason::NoLive;
    } else if state.read.valid {
        state.outcome.reason = Reason::NoLive;
        settle(world, state, state.read.backend.id);
    } else if !state.live.present {
        state.outcome.reason = Reason::NoLive;
    }
}

#[inline(never)]
fn move_to_target(world: &mut impl World, state: &mut State) {
    let id = state.live.id;
    let mut tries = 0;
    loop {
        let done = put(world, &state.master, state.port, &state.read, id);
        if done != Put::Raced {
            if state.read.valid {
                world.set_previous(state.read.backend.id, world.now());
                world.report(event::MOVED, state.read.backend.id, id);
            }
            state.outcome.reason = if state.live.usable { done.reason() } else { Reason::NoLive };
            settle(world, state, id);
            return;
        }
        state.outcome.reason = Reason::Contended;
        if tries == RETRIES {
            return;
        }
        tries += 1;
        read(world, &state.master, state.port, Unmarked::Awhile, &mut state.read);
        if state.read.valid && state.read.backend.usable {
            state.outcome.reason = Reason::Healthy;
            settle(world, state, state.read.backend.id);
            return;
        }
    }
}

/// Remembers the flow on the backend `id`, where it was placed anew.
#[inline(never)]
fn settle(world: &mut impl World, state: &mut State, id: u32) {
    note(world, state, id, 0);
    // One verdict a packet: that a flow was given up outweighs how its entry was made.
    if state.outcome.cut && state.outcome.reason != Reason::NoLive {
        state.outcome.reason = Reason::Cut;
    }
}

/// Takes the flow off the account of another backend that it was on, when it now goes to the backend `id`.
#[inline(always)]
fn leave_behind(world: &mut impl World, state: &mut State, id: u32) {
    if state.memory == Memory::Nothing || state.flow_is_on(id) || state.flow.flags & FLOW_ENDED != 0 {
        return;
    }
    let cut = state.memory == Memory::Known;
    state.outcome.cut = cut;
    if state.flow.flags & FLOW_DRAINED != 0 {
        let change = if cut { DrainChange::Cut } else { DrainChange::Ended };
        world.count_drain(&state.flow.backend_address, change);
    }
}

/// Remembers a packet of the flow on the backend `id`, and keeps count of the flows on a leaving one.
#[inline(always)]
fn note(world: &mut impl World, state: &mut State, id: u32, more_flags: u32) {
    let ended = if world.flow_packet() == FlowPacket::Closing { FLOW_ENDED } else { 0 };
    let more_flags = more_flags | ended;
    if state.flow_is_on(id)
        && state.flow.flags & more_flags == more_flags
        && world.now().saturating_sub(state.flow.last_seen) < COARSE
    {
        return;
    }
    note_anew(world, state, id, more_flags);
}

#[inline(never)]
fn note_anew(world: &mut impl World, state: &mut State, id: u32, more_flags: u32) {
    let before = if state.flow_is_on(id) { state.flow.flags } else { 0 };
    let flags = before | more_flags;
    leave_behind(world, state, id);
    if flags & FLOW_DRAINED != 0 {
        count_drained(world, id, before, flags);
    }
    world.remember(id, flags);
}

#[inline(always)]
fn count_drained(world: &mut impl World, id: u32, before: u32, flags: u32) {
    let Some(backend) = world.backend(id) else { return };
    let started = before & FLOW_DRAINED == 0;
    world.count_drain(&backend.address, if started { DrainChange::Started } else { DrainChange::Seen });
    if flags & FLOW_ENDED != 0 && (started || before & FLOW_ENDED == 0) {
        world.count_drain(&backend.address, DrainChange::Ended);
    }
}
