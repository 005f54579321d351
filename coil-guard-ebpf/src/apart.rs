//! Functions that the verifier looks at once, and not again for each way that leads to them.
//!
//! It does so for functions that are visible outside of the object. Of what they are given it knows nothing but the type;
//! everything else they find in the scratch record.

use coil_guard_common::decide::{self, State};

use crate::{
    family::{V4, V6},
    scratch::Scratch,
    world::ClientWorld,
};

macro_rules! apart {
    ($name:ident, $symbol:ident, $family:ident) => {
        #[inline(always)]
        pub(crate) fn $name(state: &mut State) {
            $symbol(state);
        }

        #[unsafe(no_mangle)]
        #[inline(never)]
        extern "C" fn $symbol(state: *mut State) -> i32 {
            // SAFETY: the caller's record, or null as far as the verifier knows.
            let (Some(state), Some(scratch)) = (unsafe { state.as_mut() }, Scratch::get()) else { return 1 };
            decide::select(&mut ClientWorld::<$family>::resume(scratch), state);
            0
        }
    };
}

apart!(select4, coil_guard_select4, V4);
apart!(select6, coil_guard_select6, V6);
