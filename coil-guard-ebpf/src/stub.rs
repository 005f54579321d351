//! The program that is attached in each client pod: it says whose packet it is, and goes on in the core program.
//!
//! There is one core for all pods of a node, and this is loaded once for each of them, so it does nothing that could be
//! done there. It knows none of Cilium's maps. Where there is no core the packet passes.
#![no_std]
#![no_main]
#![expect(clippy::needless_pass_by_value, reason = "the entry point takes what the classifier macro gives")]

mod program;

use aya_ebpf::{
    macros::{classifier, map},
    maps::{PerCpuArray, ProgramArray},
    programs::TcContext,
};
use coil_guard_common::abi::{CORE_SLOTS, PodConfig};

use crate::program::PASS_ON;

/// A whole structure would be copied byte by byte.
const WORDS: usize = size_of::<PodConfig>() / size_of::<u64>();
const _: () = assert!(align_of::<PodConfig>() == align_of::<u64>() && WORDS * 8 == size_of::<PodConfig>());

/// Written by the loader before the program is verified. Read volatile: the compiler must not fold the zeros in.
#[unsafe(no_mangle)]
static POD_CONFIG: PodConfig = PodConfig {
    address6: [0; 16],
    address4: [0; 4],
    flags: 0,
    guarded_since: 0,
    generation: 0,
    fou_port: [0; 2],
    core: 0,
    pad: [0; 1],
    unmarked_drain: 0,
};

#[map]
static CLIENT: PerCpuArray<PodConfig> = PerCpuArray::with_max_entries(1, 0);
#[map]
static CORES: ProgramArray = ProgramArray::with_max_entries(CORE_SLOTS, 0);

/// See the module.
#[classifier]
pub(crate) fn coil_guard(context: TcContext) -> i32 {
    let Some(client) = CLIENT.get_ptr_mut(0) else { return PASS_ON };
    let (from, to) = ((&raw const POD_CONFIG).cast::<u64>(), client.cast::<u64>());
    for word in 0..WORDS {
        // SAFETY: in bounds and aligned of a static that never changes once the program is loaded, and of a map value of its
        // type. A classifier on egress runs with bottom halves off and is not re-entered, so this CPU's value stays until the
        // core has read it.
        unsafe { to.add(word).write(from.add(word).read_volatile()) };
    }
    // SAFETY: a classifier like this one, or nothing. The index is known to the verifier, which makes a direct jump of it.
    unsafe { CORES.tail_call(&context, u32::from((&raw const POD_CONFIG.core).read_volatile())) };
    PASS_ON
}
