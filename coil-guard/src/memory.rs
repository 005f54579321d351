//! The C library's allocator, told what this process is like: large texts that are read once and thrown away, among small
//! things that stay for days.

/// Keeps texts out of the heap, and threads in one arena.
///
/// A page of a list is mapped by itself and goes back to the kernel as a whole. Left alone, the allocator learns from the
/// first one to put the next into the heap, where what stays is scattered behind it. And each of the short-lived threads of
/// the datapath would begin an arena of its own.
#[cfg(target_env = "gnu")]
pub(crate) fn keep_small() {
    /// Bytes; the allocator's own first value, which setting it keeps from growing.
    const MAPPED_BY_ITSELF: libc::c_int = 128 * 1024;
    // SAFETY: sets two numbers of the allocator; a refusal changes nothing.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, MAPPED_BY_ITSELF);
        libc::mallopt(libc::M_ARENA_MAX, 1);
    }
}

/// Gives what is free back to the kernel, after a list has been taken in, programs have been loaded or maps
/// have been read. Takes some milliseconds.
#[cfg(target_env = "gnu")]
pub(crate) fn give_back() {
    // SAFETY: gives back pages that hold nothing.
    unsafe { libc::malloc_trim(0) };
}

/// Another C library has an allocator of another kind.
#[cfg(not(target_env = "gnu"))]
pub(crate) fn keep_small() {}

/// See above.
#[cfg(not(target_env = "gnu"))]
pub(crate) fn give_back() {}
