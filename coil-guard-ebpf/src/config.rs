//! Whose packet it is, as the pod's stub says, and the clock.

use aya_ebpf::{helpers::generated::bpf_ktime_get_coarse_ns, macros::map, maps::PerCpuArray};
use coil_guard_common::abi::{POD_HAS_IPV4, POD_HAS_IPV6, PodConfig, same_address};

#[map]
static CLIENT: PerCpuArray<PodConfig> = PerCpuArray::with_max_entries(1, 0);

/// 1 in a core that must not write to Cilium's maps: the verifier then drops whatever does as dead code. Written by the
/// loader before the program is verified. Read volatile: the compiler must not fold the zero in.
#[unsafe(no_mangle)]
static READ_ONLY: u32 = 0;

/// Whether this core only reads Cilium's maps.
#[inline(always)]
pub(crate) fn read_only() -> bool {
    // SAFETY: a static that never changes once the program is loaded.
    unsafe { (&raw const READ_ONLY).read_volatile() != 0 }
}

/// The client pod that the packet at hand comes from: what the stub that this program was reached by wrote on this CPU.
///
/// By value: behind a reference, its addresses would be read byte by byte.
#[derive(Clone, Copy)]
pub(crate) struct Client(PodConfig);

impl Client {
    #[inline(always)]
    pub(crate) fn get() -> Option<Self> {
        // SAFETY: plain integers, written by this CPU before it came here; see the stub.
        CLIENT.get_ptr(0).map(|config| Self(unsafe { *config }))
    }

    #[inline(always)]
    pub(crate) fn fou_port(self) -> [u8; 2] {
        self.0.fou_port
    }

    #[inline(always)]
    pub(crate) fn flags(self) -> u32 {
        self.0.flags
    }

    /// Whether `address` is the pod's.
    #[inline(always)]
    pub(crate) fn is_address4(self, address: [u8; 4]) -> bool {
        self.flags() & POD_HAS_IPV4 != 0 && u32::from_ne_bytes(self.0.address4) == u32::from_ne_bytes(address)
    }

    /// As [`Self::is_address4`].
    #[inline(always)]
    pub(crate) fn is_address6(self, address: [u8; 16]) -> bool {
        self.flags() & POD_HAS_IPV6 != 0 && same_address(self.0.address6, address)
    }

    #[inline(always)]
    pub(crate) fn generation(self) -> u32 {
        self.0.generation
    }

    #[inline(always)]
    pub(crate) fn guarded_since(self) -> u64 {
        self.0.guarded_since
    }

    #[inline(always)]
    pub(crate) fn unmarked_drain(self) -> u64 {
        self.0.unmarked_drain
    }
}

/// CLOCK_MONOTONIC, ns, as of the last tick of the kernel's timer: up to 10 ms behind, which all times here bear, and at a
/// fraction of the exact clock's cost.
#[inline(always)]
pub(crate) fn now() -> u64 {
    // SAFETY: the helper has no preconditions.
    unsafe { bpf_ktime_get_coarse_ns() }
}
