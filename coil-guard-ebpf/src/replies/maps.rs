//! The maps, all our own and shared through pins. Sizes given here are placeholders.

use aya_ebpf::{
    bindings::BPF_F_NO_PREALLOC,
    macros::map,
    maps::{HashMap, LruHashMap, PerCpuArray},
};
use coil_guard_common::{
    abi::{Answer, AnswerKey, BackendMark, Return, ReturnKey},
    counters::ReplyCount,
    packet::Outer,
};

#[map]
static ANSWERS: LruHashMap<AnswerKey, Answer> = LruHashMap::with_max_entries(1, 0);
#[map]
static RETURNS: LruHashMap<ReturnKey, Return> = LruHashMap::with_max_entries(1, 0);
#[map]
static BACKEND_MARKS: HashMap<[u8; 16], BackendMark> = HashMap::with_max_entries(1, BPF_F_NO_PREALLOC);
#[map]
static REPLY_COUNTERS: PerCpuArray<u64> = PerCpuArray::with_max_entries(ReplyCount::COUNT, 0);

/// Outer headers of the packet at hand.
#[repr(C)]
pub(crate) struct Headers {
    pub(crate) outer4: Outer<[u8; 4]>,
    pub(crate) outer6: Outer<[u8; 16]>,
}

#[map]
static HEADERS: PerCpuArray<Headers> = PerCpuArray::with_max_entries(1, 0);

/// This CPU's record.
#[inline(always)]
pub(crate) fn headers() -> Option<&'static mut Headers> {
    // SAFETY: one user at a time, as classifiers do not nest; the map lives as long as the program.
    HEADERS.get_ptr_mut(0).map(|headers| unsafe { &mut *headers })
}

#[inline(always)]
pub(crate) fn count(what: ReplyCount) {
    if let Some(counter) = REPLY_COUNTERS.get_ptr_mut(what as u32) {
        // SAFETY: this CPU's own counter, and classifiers do not nest.
        unsafe { *counter += 1 };
    }
}

/// What was learnt of a client.
#[inline(always)]
pub(crate) fn answer(key: &AnswerKey) -> Option<Answer> {
    // SAFETY: plain integers; a mixture of two values is a port of one of them, and the next packet puts it right.
    unsafe { ANSWERS.get(key).copied() }
}

/// Notes when a client was last seen.
#[inline(always)]
pub(crate) fn seen(key: &AnswerKey, now: u64) {
    if let Some(answer) = ANSWERS.get_ptr_mut(key) {
        // SAFETY: an aligned field of a map value. If the element is another client's by now, that one counts as seen.
        unsafe { (&raw mut (*answer).last_seen).write_volatile(now) };
    }
}

#[inline(always)]
pub(crate) fn learn(key: &AnswerKey, answer: &Answer) {
    // Where there is no room replies go to the FoU port, as without the guard.
    if ANSWERS.insert(key, answer, 0).is_ok() {
        count(ReplyCount::Learnt);
    }
}

#[inline(always)]
pub(crate) fn forget(key: &AnswerKey) {
    if ANSWERS.get_ptr(key).is_some() && ANSWERS.remove(key).is_ok() {
        count(ReplyCount::Forgotten);
    }
}

/// What a port was given for.
#[inline(always)]
pub(crate) fn given(key: &ReturnKey) -> Option<Return> {
    // SAFETY: plain integers; nobody changes them in place.
    unsafe { RETURNS.get(key).copied() }
}

/// Whether an address is that of a backend of a guarded Service, whatever its state.
#[inline(always)]
pub(crate) fn is_backend(address: &[u8; 16]) -> bool {
    BACKEND_MARKS.get_ptr(address).is_some()
}
