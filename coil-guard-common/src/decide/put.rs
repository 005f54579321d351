//! Changing a service entry, and choosing what to change it to.

use super::{Entry, MAX_SLOTS, Master, Read, State, Unmarked, World, judge::judge_here};
use crate::counters::Reason;

/// Reads the service entry under `port`.
#[inline(never)]
pub(super) fn read(
    world: &mut impl World,
    master: &Master,
    port: [u8; 2],
    unmarked: Unmarked,
    out: &mut Read,
) {
    match world.entry(port) {
        Some(entry) => {
            out.entry = entry;
            out.exists = true;
            judge_here(world, entry.backend_id, unmarked, &mut out.backend, &mut out.address);
            out.valid = out.backend.present && out.entry.rev_nat_index == master.rev_nat_index;
        }
        None => {
            out.entry = Entry { backend_id: 0, rev_nat_index: [0; 2] };
            out.exists = false;
            out.valid = false;
            out.backend.clear(0);
        }
    }
}

/// Reads the service entry of the packet's flow into `state.read`. That its backend keeps nothing is not believed at once, as in
/// [`super::judge`]; the address is looked up again where it matters.
#[inline(always)]
pub(super) fn read_own(world: &mut impl World, state: &mut State, port: [u8; 2], unmarked: Unmarked) {
    read(world, &state.master, port, unmarked, &mut state.read);
    if state.read.exists && !state.read.backend.keeps {
        world.judge(state.read.entry.backend_id, unmarked, &mut state.read.backend);
        state.read.valid =
            state.read.backend.present && state.read.entry.rev_nat_index == state.master.rev_nat_index;
    }
}

/// What [`put`] did.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Put {
    Created,
    Repaired,
    Moved,
    /// The entry changed meanwhile: read again and decide again.
    Raced,
}

impl Put {
    #[inline(always)]
    pub(super) const fn reason(self) -> Reason {
        match self {
            Self::Created => Reason::Created,
            Self::Repaired => Reason::Repaired,
            Self::Moved => Reason::Moved,
            Self::Raced => Reason::Contended,
        }
    }
}

/// Makes the entry that was read under `port` name `id`.
#[inline(never)]
pub(super) fn put(world: &mut impl World, master: &Master, port: [u8; 2], read: &Read, id: u32) -> Put {
    let (done, what) = if !read.exists {
        (world.create(port, master, id), Put::Created)
    } else if !read.valid {
        (world.repair(port, &read.entry, master, id), Put::Repaired)
    } else {
        (world.swap(port, read.entry.backend_id, id), Put::Moved)
    };
    if done { what } else { Put::Raced }
}

/// Looks at the client's affinity and at the slots, for `live`, `present` and `all_usable`. Verdicts already made for this
/// packet are used again.
///
/// With `state.first_only` it stops at the first usable backend, and `all_usable` means nothing.
#[inline(always)]
pub fn select(world: &mut impl World, state: &mut State) {
    state.live.clear(0);
    state.present.clear(0);
    state.favourite.clear(0);
    // Of what is not looked at nothing is known.
    state.all_usable = state.master.count <= MAX_SLOTS;
    state.all_present = true;
    if state.master.affinity {
        look_at_affinity(world, state);
    }
    if state.master.count == 0 || (state.first_only && state.live.usable) {
        return;
    }
    // In 32 bits: start and step of a service with 65,535 slots sum to more than 16 hold.
    let count = u32::from(state.master.count);
    let start = world.spread(!state.master.affinity) % count;
    let mut step = 0;
    while step < u32::from(MAX_SLOTS) {
        // Read anew each time: a bound made of the two before the loop is one that the verifier loses sight of.
        if step >= u32::from(state.master.count) {
            return;
        }
        let mut slot = start + step;
        if slot >= count {
            slot -= count;
        }
        step += 1;
        look_at_slot(world, state, slot as u16 + 1);
        if state.first_only && state.live.usable {
            return;
        }
    }
}

#[inline(never)]
fn look_at_affinity(world: &mut impl World, state: &mut State) {
    let Some(id) = world.affinity(&state.master) else { return };
    if state.read.backend.present && state.read.backend.id == id {
        state.favourite = state.read.backend;
    } else {
        world.judge(u64::from(id), state.unmarked, &mut state.favourite);
    }
    if state.favourite.present {
        state.present = state.favourite;
        if state.favourite.usable {
            state.live = state.favourite;
        } else {
            state.all_usable = false;
        }
    }
}

#[inline(never)]
fn look_at_slot(world: &mut impl World, state: &mut State, slot: u16) {
    let Some(id) = world.slot(slot) else {
        // Cilium drops what it would send there.
        (state.all_usable, state.all_present) = (false, false);
        return;
    };
    if state.read.backend.present && state.read.backend.id == id {
        state.candidate = state.read.backend;
    } else if state.favourite.present && state.favourite.id == id {
        state.candidate = state.favourite;
    } else {
        world.judge(u64::from(id), state.unmarked, &mut state.candidate);
    }
    if !state.candidate.present {
        (state.all_usable, state.all_present) = (false, false);
    } else if !state.candidate.usable {
        state.all_usable = false;
    } else if !state.live.usable {
        state.live = state.candidate;
    }
    if state.candidate.present && (!state.present.present || (state.candidate.keeps && !state.present.keeps))
    {
        state.present = state.candidate;
    }
}
