//! Functions that the verifier looks at once, and not again for each way that leads to them.
//!
//! It does so for functions that are visible outside of the object. Of what they are given it knows nothing but the type;
//! everything else they find in the scratch record.

use coil_guard_common::decide::{self, Judgement, State, Unmarked};

use crate::{
    family::{V4, V6},
    packet_client::ClientWorld,
    scratch::{self, Scratch},
};

macro_rules! apart {
    (
        $family:ident, $select:ident, $select_symbol:ident, $judge:ident, $judge_symbol:ident, $report:ident,
        $report_symbol:ident, $port:ident, $port_symbol:ident, $decide:ident, $decide_symbol:ident
    ) => {
        #[inline(always)]
        pub(crate) fn $decide() -> bool {
            $decide_symbol() != 0
        }

        #[unsafe(no_mangle)]
        #[inline(never)]
        extern "C" fn $decide_symbol() -> i32 {
            let (Some(state), Some(scratch)) = (scratch::state(), Scratch::get()) else { return 0 };
            let mode = scratch.mode;
            let mut world = ClientWorld::<$family>::new(scratch);
            if !world.find_master(&mut state.master) {
                return 0;
            }
            decide::decide(&mut world, state, mode);
            1
        }

        #[inline(always)]
        pub(crate) fn $select(state: &mut State) {
            $select_symbol(state);
        }

        #[unsafe(no_mangle)]
        #[inline(never)]
        extern "C" fn $select_symbol(state: *mut State) -> i32 {
            // SAFETY: the caller's record, or null as far as the verifier knows.
            let (Some(state), Some(scratch)) = (unsafe { state.as_mut() }, Scratch::get()) else { return 1 };
            decide::select(&mut ClientWorld::<$family>::new(scratch), state);
            0
        }

        #[inline(always)]
        pub(crate) fn $judge(id: u64, unmarked: Unmarked, out: &mut Judgement) {
            $judge_symbol(id, u32::from(unmarked == Unmarked::Awhile), out);
        }

        #[unsafe(no_mangle)]
        #[inline(never)]
        extern "C" fn $judge_symbol(id: u64, awhile: u32, out: *mut Judgement) -> i32 {
            // SAFETY: as above.
            let (Some(out), Some(scratch)) = (unsafe { out.as_mut() }, Scratch::get()) else { return 1 };
            let unmarked = if awhile != 0 { Unmarked::Awhile } else { Unmarked::No };
            decide::judge(&mut ClientWorld::<$family>::new(scratch), id, unmarked, out);
            0
        }

        #[inline(always)]
        pub(crate) fn $report(kind: u8, from: u32, to: u32) {
            $report_symbol(u32::from(kind), from, to);
        }

        #[unsafe(no_mangle)]
        #[inline(never)]
        extern "C" fn $report_symbol(kind: u32, from: u32, to: u32) -> i32 {
            let Some(scratch) = Scratch::get() else { return 1 };
            ClientWorld::<$family>::new(scratch).send_report(kind as u8, from, to);
            0
        }

        #[inline(always)]
        pub(crate) fn $port(port: [u8; 2], state: &mut State) -> bool {
            $port_symbol(u32::from(u16::from_be_bytes(port)), state) != 0
        }

        #[unsafe(no_mangle)]
        #[inline(never)]
        extern "C" fn $port_symbol(port: u32, state: *mut State) -> i32 {
            // SAFETY: as above.
            let (Some(state), Some(scratch)) = (unsafe { state.as_mut() }, Scratch::get()) else { return 0 };
            let mut world = ClientWorld::<$family>::new(scratch);
            i32::from(decide::is_port_good(&mut world, (port as u16).to_be_bytes(), state))
        }
    };
}

apart!(
    V4,
    select4,
    coil_guard_select4,
    judge4,
    coil_guard_judge4,
    report4,
    coil_guard_report4,
    port4,
    coil_guard_port4,
    decide4,
    coil_guard_decide4
);
apart!(
    V6,
    select6,
    coil_guard_select6,
    judge6,
    coil_guard_judge6,
    report6,
    coil_guard_report6,
    port6,
    coil_guard_port6,
    decide6,
    coil_guard_decide6
);
