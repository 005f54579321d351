//! Atomic operations on map values.
//!
//! The compiler's BPF target declares no compare-and-exchange, so that `core::sync::atomic` has none; the instruction
//! exists since kernel 5.12 and the code generator knows it.

use core::intrinsics::{AtomicOrdering, atomic_cxchg, atomic_xadd};

/// Makes `*field` `to` if it is `from`; whether it was.
///
/// # Safety
///
/// `field` points to an aligned u64 in a map value.
#[inline(always)]
pub(crate) unsafe fn exchange(field: *mut u64, from: u64, to: u64) -> bool {
    // SAFETY: the caller's promise.
    unsafe { atomic_cxchg::<u64, { AtomicOrdering::SeqCst }, { AtomicOrdering::SeqCst }>(field, from, to).1 }
}

/// Adds to `*field`, wrapping.
///
/// # Safety
///
/// As [`exchange`].
#[inline(always)]
pub(crate) unsafe fn add(field: *mut u64, value: u64) {
    // SAFETY: the caller's promise.
    unsafe { atomic_xadd::<u64, u64, { AtomicOrdering::Relaxed }>(field, value) };
}
