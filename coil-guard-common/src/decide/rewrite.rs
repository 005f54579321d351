//! Mode `rewrite`: a flow on a leaving backend gets another outer source port. To Cilium that is a new flow, for which it
//! chooses anew. Its maps are only read.

use super::{
    State, Unmarked, World,
    put::{read, read_own},
};
use crate::{
    abi::{
        PIN_UNSEEN, PinnedPort, RETURN_PORT_FIRST, REWRITE_PORT_FIRST, REWRITE_PORTS, event, is_rewrite_port,
    },
    counters::Reason,
};

/// Ports looked at for one packet.
pub const PORT_PROBES: u16 = 16;
/// Ports tried in one go. While Cilium's slots lag behind, one of two choices may be the leaving backend again; that all of
/// eight are happens once in 256 times.
pub const PORT_TRIES: u8 = 8;
/// Pause after the first round of tries that was of no use, ns. It doubles with each one.
pub const ROUND_PAUSE: u64 = 500_000_000;
/// Bound on the doublings: the pause is at most 64 s.
const PAUSE_DOUBLINGS: u8 = 7;
/// For how long a flow is stuck before that is worth a word, ns: Cilium is often a moment behind the agent, in its slots
/// and in what its affinity may choose.
pub const STUCK_REPORT: u64 = 2_000_000_000;

/// Decides for one packet. It goes by the port that its flow was given, or by its own.
#[inline(always)]
pub(super) fn rewrite(world: &mut impl World, state: &mut State) {
    if is_rewrite_port(state.port) {
        // Not told from one that was given: whoever sends it means it.
        state.outcome.reason = Reason::ReservedPort;
        return;
    }
    recall(world, state);
    let port = effective_port(state);
    read_own(world, state, port, Unmarked::No);
    if state.read.valid && !state.read.backend.keeps {
        leave(world, state);
    } else {
        state.outcome.reason = if state.read.valid { Reason::Healthy } else { Reason::LeftToCilium };
        if state.read.valid && state.pin.stuck_since != 0 {
            arrived(world, state);
        }
    }
    go_by_given_port(state);
}

#[inline(always)]
fn recall(world: &mut impl World, state: &mut State) {
    match world.pin() {
        Some(pin) => state.pin = pin,
        None => state.pin.clear(),
    }
}

#[inline(always)]
fn effective_port(state: &State) -> [u8; 2] {
    if state.pin.given_at == 0 { state.port } else { state.pin.port }
}

#[inline(always)]
fn go_by_given_port(state: &mut State) {
    if state.pin.given_at == 0 {
        return;
    }
    state.outcome.source_port = Some(state.pin.port);
    if matches!(state.outcome.reason, Reason::Healthy | Reason::LeftToCilium) {
        state.outcome.reason = Reason::Rewritten;
    }
}

/// The flow is where it may be, for the first time since it had to leave.
#[inline(never)]
fn arrived(world: &mut impl World, state: &mut State) -> bool {
    let by_port = state.pin.flags & PIN_UNSEEN != 0;
    let moved = by_port && state.read.backend.id != state.pin.left;
    if moved {
        state.outcome.moved = true;
        world.set_previous(state.pin.left, state.pin.given_at);
        world.report(event::MOVED, state.pin.left, state.read.backend.id);
    }
    state.pin.calm();
    world.set_pin(&state.pin)
}

/// The flow is on a backend that keeps nothing: it gets another port, if that can help.
#[inline(never)]
fn leave(world: &mut impl World, state: &mut State) -> bool {
    let id = state.read.backend.id;
    state.first_only = false;
    world.select(state);
    if !state.live.usable || state.master.count == 0 {
        // Without a slot Cilium drops what is new to it, affinity or not.
        world.report(event::NO_LIVE, id, 0);
        state.outcome.reason = Reason::NoLive;
        return false;
    }
    let mut noted = look_where_it_landed(&mut state.pin, id, world.now());
    let mut held = 0;
    if is_held_by_affinity(world, state) {
        held = state.favourite.id;
        state.outcome.reason = Reason::HeldByAffinity;
    } else {
        state.outcome.reason = Reason::NotMoved;
        let turn = if state.all_present { turn(&mut state.pin, world.now()) } else { Turn::Wait };
        noted |= turn != Turn::Wait;
        if turn == Turn::Try {
            give_port(world, state);
        }
    }
    if state.outcome.reason != Reason::NewPort
        && world.now().saturating_sub(state.pin.stuck_since) >= STUCK_REPORT
    {
        world.report(event::CANNOT_MOVE, id, held);
    }
    noted && world.set_pin(&state.pin)
}

/// Keeps the record in step with the backend `id`, on which the flow is found. True when it changed.
#[inline(always)]
fn look_where_it_landed(pin: &mut PinnedPort, id: u32, now: u64) -> bool {
    let by_port = pin.flags & PIN_UNSEEN != 0;
    if pin.stuck_since != 0 && pin.left == id && !by_port {
        return false;
    }
    if pin.stuck_since == 0 || !by_port {
        // Cilium has sent it here, and not a port that it was given: all may be different now.
        (pin.stuck_since, pin.next_round) = (now, 0);
        (pin.tries, pin.rounds, pin.skips) = (0, 0, 0);
    }
    pin.left = id;
    pin.flags = 0;
    true
}

/// Whether Cilium would send a new flow of this client to a backend that keeps nothing, whatever its port: its affinity
/// names it, and may choose it.
#[inline(always)]
fn is_held_by_affinity(world: &mut impl World, state: &State) -> bool {
    state.master.affinity
        && state.favourite.present
        && !state.favourite.keeps
        && world.affinity_match(&state.master, state.favourite.id)
}

/// Whether another port may be tried.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Turn {
    Try,
    /// Not now; a pause begins.
    Pause,
    /// Not now.
    Wait,
}

/// A round of tries that was of no use is followed by a pause.
#[inline(always)]
fn turn(pin: &mut PinnedPort, now: u64) -> Turn {
    if pin.tries < PORT_TRIES {
        return Turn::Try;
    }
    if pin.next_round == 0 {
        let doublings = if pin.rounds < PAUSE_DOUBLINGS { pin.rounds } else { PAUSE_DOUBLINGS };
        pin.next_round = now + (ROUND_PAUSE << doublings);
        pin.rounds = pin.rounds.saturating_add(1);
        return Turn::Pause;
    }
    if now < pin.next_round {
        return Turn::Wait;
    }
    (pin.tries, pin.next_round) = (0, 0);
    Turn::Try
}

/// Gives the flow the next port of its range under which Cilium has no entry, or one that leads to a usable backend. Which
/// half of the ports it is tells the egress pod's node whether the client can have replies there; those of an Egress with
/// `fouSourcePortAuto` come from ports of their own, whatever theirs is.
#[inline(always)]
fn give_port(world: &mut impl World, state: &mut State) {
    state.pin.tries += 1;
    state.symmetric = u32::from(state.port == world.fou_port() && world.is_returning());
    let first = REWRITE_PORT_FIRST + (state.symmetric * HALF) as u16;
    let start = match state.pin.given_at {
        // Clients, and flows with a port of their own, begin at different ports.
        0 => world.spread(true),
        _ => u32::from(u16::from_be_bytes(state.pin.port).wrapping_sub(first)) + 1,
    };
    let start = start % HALF + u32::from(state.pin.skips) * u32::from(PORT_PROBES);
    let mut step = 0;
    while step < u32::from(PORT_PROBES) {
        let port = (first + ((start + step) % HALF) as u16).to_be_bytes();
        step += 1;
        if world.is_port_good(port, state) {
            if state.symmetric != 0 && !world.note_return(port) {
                break;
            }
            state.pin.port = port;
            state.pin.skips = 0;
            state.pin.flags = PIN_UNSEEN;
            // The clock is coarse, and what was given before the mode began does not count.
            let (now, since) = (world.now(), world.memory_since());
            state.pin.given_at = if now > since { now } else { since };
            state.outcome.reason = Reason::NewPort;
            return;
        }
    }
    state.pin.skips = state.pin.skips.wrapping_add(1);
}

const HALF: u32 = REWRITE_PORTS as u32 / 2;
const _: () = assert!(REWRITE_PORT_FIRST as u32 + HALF == RETURN_PORT_FIRST as u32);

/// Whether a flow that is given `port` leaves: there is no entry under it that Cilium would follow, be it expired or not,
/// or one that leads to a usable backend.
#[inline(always)]
pub fn is_port_good(world: &mut impl World, port: [u8; 2], state: &mut State) -> bool {
    read(world, &state.master, port, Unmarked::No, &mut state.drain_read);
    !state.drain_read.valid || state.drain_read.backend.usable
}

impl PinnedPort {
    /// Of no flow.
    pub(super) const NONE: Self = Self {
        given_at: 0,
        stuck_since: 0,
        next_round: 0,
        left: 0,
        generation: 0,
        port: [0; 2],
        tries: 0,
        rounds: 0,
        skips: 0,
        flags: 0,
        pad: [0; 2],
    };

    /// Makes it [`Self::NONE`], field by field: as a whole it would be a call of memset.
    #[inline(always)]
    fn clear(&mut self) {
        (self.given_at, self.port) = (0, [0; 2]);
        self.calm();
        (self.left, self.generation) = (0, 0);
    }

    /// Nothing is to be done for the flow.
    #[inline(always)]
    fn calm(&mut self) {
        (self.stuck_since, self.next_round) = (0, 0);
        (self.tries, self.rounds, self.skips, self.flags) = (0, 0, 0, 0);
    }
}
