//! The memory of inner flows, and each client's share of it.
//!
//! All clients of a node share one LRU. One that opens flows without end, or makes them up, would push out everybody's: so a
//! client address has a share, which fills up again with time, and what it opens beyond goes to a second, smaller LRU. There
//! it competes with its like alone.

use coil_guard_common::abi::{FLOW_BURST, InnerFlow};

use crate::{
    maps::{self, copy},
    scratch::Scratch,
};

/// Written by the loader, see [`coil_guard_common::abi::flow_cost`]. Read volatile: the compiler must not fold the zero in.
#[unsafe(no_mangle)]
static FLOW_COST: u64 = 0;

/// [`Scratch::remembered`]
const NOWHERE: u64 = 0;
const IN_SHARE: u64 = 1;
const CROWDED: u64 = 2;

/// The memory of the packet's flow, of whatever pod.
#[inline(always)]
pub(crate) fn recall(scratch: &mut Scratch) -> Option<InnerFlow> {
    if let Some(flow) = copy!(maps::INNER_FLOWS, &scratch.flow) {
        scratch.remembered = IN_SHARE;
        return Some(flow);
    }
    scratch.remembered = NOWHERE;
    if coil_guard_recall_crowded() == 0 {
        return None;
    }
    scratch.remembered = CROWDED;
    Some(scratch.new_flow)
}

/// Only for flows that are new, or of a client beyond its share. Looked at once by the verifier, see `apart`.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn coil_guard_recall_crowded() -> i32 {
    let Some(scratch) = Scratch::get() else { return 0 };
    match copy!(maps::CROWDED_FLOWS, &scratch.flow) {
        Some(flow) => {
            scratch.new_flow = flow;
            1
        }
        None => 0,
    }
}

/// Remembers `new_flow` where it was found, or where its client's share allows.
#[inline(always)]
pub(crate) fn remember() {
    coil_guard_remember();
}

/// Looked at once by the verifier, see `apart`.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn coil_guard_remember() -> i32 {
    let Some(scratch) = Scratch::get() else { return 1 };
    if scratch.remembered == NOWHERE {
        scratch.remembered = if take_share(scratch) { IN_SHARE } else { CROWDED };
    }
    // A full LRU evicts; a flow that is not remembered is only not drained.
    let _: Result<(), i32> = if scratch.remembered == IN_SHARE {
        maps::INNER_FLOWS.insert(&scratch.flow, &scratch.new_flow, 0)
    } else {
        maps::CROWDED_FLOWS.insert(&scratch.flow, &scratch.new_flow, 0)
    };
    0
}

/// Takes one flow off the client's share, if there is one left. Two CPUs at once may take the same one.
#[inline(always)]
fn take_share(scratch: &Scratch) -> bool {
    // SAFETY: a static that never changes once the program is loaded.
    let cost = unsafe { (&raw const FLOW_COST).read_volatile() };
    let client = &scratch.flow.client;
    let Some(spent_until) = maps::FLOW_SHARES.get_ptr_mut(client) else {
        // Another CPU may have been first, which is as good.
        let _: Result<(), i32> = maps::FLOW_SHARES.insert(client, scratch.now + cost, 0);
        return true;
    };
    // SAFETY: a map value pointer to an aligned integer.
    unsafe {
        let before = spent_until.read_volatile();
        let from = if before > scratch.now { before } else { scratch.now };
        if from - scratch.now >= FLOW_BURST {
            return false;
        }
        spent_until.write_volatile(from + cost);
    }
    true
}
