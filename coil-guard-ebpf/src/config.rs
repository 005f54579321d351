//! Constants of this instance, and the clock.

use aya_ebpf::helpers::generated::bpf_ktime_get_coarse_ns;
use coil_guard_common::abi::{POD_HAS_IPV4, POD_HAS_IPV6, PodConfig};

/// Written by the loader before the program is verified. Read volatile: the compiler must not fold the zeros in.
#[unsafe(no_mangle)]
static POD_CONFIG: PodConfig = PodConfig {
    address6: [0; 16],
    address4: [0; 4],
    flags: 0,
    guarded_since: 0,
    generation: 0,
    fou_port: [0; 2],
    pad: [0; 2],
    unmarked_drain: 0,
};

/// 1 in an instance that must not write to Cilium's maps: the verifier then drops whatever does as dead code. Written and
/// read as the other constant.
#[unsafe(no_mangle)]
static READ_ONLY: u32 = 0;

macro_rules! read {
    ($field:ident) => {
        // SAFETY: a valid, aligned field of a static that never changes once the program is loaded.
        unsafe { (&raw const POD_CONFIG.$field).read_volatile() }
    };
}

/// Access to the constants.
pub(crate) struct Config;

impl Config {
    #[inline(always)]
    pub(crate) fn fou_port() -> [u8; 2] {
        read!(fou_port)
    }

    /// Whether this instance only reads Cilium's maps.
    #[inline(always)]
    pub(crate) fn read_only() -> bool {
        // SAFETY: as for the other constant.
        unsafe { (&raw const READ_ONLY).read_volatile() != 0 }
    }

    #[inline(always)]
    pub(crate) fn flags() -> u32 {
        read!(flags)
    }

    /// Whether `address` is the pod's. No `Option` of the pod's address: where the constants say that there is none, the
    /// compiler still compares what would be in it, and the verifier refuses to read what was never written.
    #[inline(always)]
    pub(crate) fn is_address4(address: [u8; 4]) -> bool {
        Self::flags() & POD_HAS_IPV4 != 0 && read!(address4) == address
    }

    /// As [`Self::is_address4`].
    #[inline(always)]
    pub(crate) fn is_address6(address: [u8; 16]) -> bool {
        Self::flags() & POD_HAS_IPV6 != 0 && read!(address6) == address
    }

    #[inline(always)]
    pub(crate) fn generation() -> u32 {
        read!(generation)
    }

    #[inline(always)]
    pub(crate) fn guarded_since() -> u64 {
        read!(guarded_since)
    }

    #[inline(always)]
    pub(crate) fn unmarked_drain() -> u64 {
        read!(unmarked_drain)
    }
}

/// CLOCK_MONOTONIC, ns, as of the last tick of the kernel's timer: up to 10 ms behind, which all times here bear, and at a
/// fraction of the exact clock's cost.
#[inline(always)]
pub(crate) fn now() -> u64 {
    // SAFETY: the helper has no preconditions.
    unsafe { bpf_ktime_get_coarse_ns() }
}
