//! Changing a service entry, and choosing what to change it to.

use super::{Entry, Judgement, MAX_SLOTS, Master, Read, State, Unmarked, World, judge};
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
            judge(world, entry.backend_id, unmarked, &mut out.backend);
            out.valid = out.backend.present && out.entry.rev_nat_index == master.rev_nat_index;
        }
        None => {
            out.entry = Entry { backend_id: 0, rev_nat_index: [0; 2] };
            out.exists = false;
            out.valid = false;
            out.backend = Judgement::absent(0);
        }
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
#[inline(never)]
pub(super) fn select(world: &mut impl World, state: &mut State) {
    state.live = Judgement::absent(0);
    state.present = Judgement::absent(0);
    state.favourite = Judgement::absent(0);
    // Of what is not looked at nothing is known.
    state.all_usable = state.master.count <= MAX_SLOTS;
    if state.master.affinity {
        look_at_affinity(world, state);
    }
    if state.master.count == 0 || (state.first_only && state.live.usable) {
        return;
    }
    let start = (world.spread(!state.master.affinity) % u32::from(state.master.count)) as u16;
    let mut step = 0;
    while step < MAX_SLOTS && step < state.master.count {
        // Where the sum wraps, of 65,521 slots and more, it is still one of them.
        let mut slot = start.wrapping_add(step);
        if slot >= state.master.count {
            slot -= state.master.count;
        }
        step += 1;
        look_at_slot(world, state, slot + 1);
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
        judge(world, u64::from(id), state.unmarked, &mut state.favourite);
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
        state.all_usable = false;
        return;
    };
    if state.read.backend.present && state.read.backend.id == id {
        state.candidate = state.read.backend;
    } else if state.favourite.present && state.favourite.id == id {
        state.candidate = state.favourite;
    } else {
        judge(world, u64::from(id), state.unmarked, &mut state.candidate);
    }
    if !state.candidate.usable {
        state.all_usable = false;
    } else if !state.live.usable {
        state.live = state.candidate;
    }
    if state.candidate.present && (!state.present.present || (state.candidate.keeps && !state.present.keeps))
    {
        state.present = state.candidate;
    }
}
