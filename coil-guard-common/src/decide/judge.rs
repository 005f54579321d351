//! May a backend get new flows, may it keep the ones it has.

use super::World;
use crate::{
    abi::{BackendMark, mark},
    cilium::{BACKEND_ACTIVE, BACKEND_TERMINATING},
};

/// One verdict about one backend, made once per packet and used in every rule: two reads with a change in between would
/// let one packet be both on a leaving and on a live backend.
///
/// Small on purpose: several of them live in 512 bytes of stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Judgement {
    /// When it began to leave, 0 when it does not or when nobody needs to know.
    pub began: u64,
    /// Backend id.
    pub id: u32,
    /// In Cilium's map.
    pub present: bool,
    /// May get new flows.
    pub usable: bool,
    /// May keep the flows that it has.
    pub keeps: bool,
}

impl Judgement {
    /// Of a backend that Cilium does not have.
    #[inline(always)]
    #[must_use]
    pub const fn absent(id: u32) -> Self {
        Self { began: 0, id, present: false, usable: false, keeps: false }
    }
}

/// How long a backend whose leaving no agent has marked keeps its flows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Unmarked {
    /// Not at all (reset, audit).
    No,
    /// For a while after the program first saw it (drain).
    Awhile,
}

/// What the rules say about a backend, from everything that they look at.
#[derive(Clone, Copy)]
struct Circumstances {
    /// Of the mark, see [`mark`]; 0 when there is none.
    marked: u8,
    /// The mark is valid.
    believed: bool,
    /// The agent's heartbeat is fresh.
    fresh: bool,
    /// Backend state byte.
    state: u8,
    /// `keep_until` of the mark lies ahead.
    ahead: bool,
    /// See [`Unmarked::Awhile`].
    awhile: bool,
}

/// Bit of a verdict: may get new flows.
pub(super) const USABLE: u8 = 1;
/// Bit of a verdict: may keep the flows that it has.
pub(super) const KEEPS: u8 = 2;
/// Bit of a verdict: it leaves since the mark's `since`.
pub(super) const SINCE_MARK: u8 = 4;
/// Bit of a verdict: it leaves since the program first saw it so.
const SINCE_SEEN: u8 = 8;
/// Bit of a verdict: it keeps its flows for a while after that.
const KEEPS_AWHILE: u8 = 16;

impl Circumstances {
    /// * READY marks and the absence of a mark count only while the agent's heartbeat is fresh: a dead agent cannot know a
    ///   new backend, and Cilium's state then decides alone.
    /// * NOT_READY marks count only while it is fresh, too: the backend may come back after the agent's death.
    /// * A LEAVING mark's `keep_until` always counts: a pod never comes back from its deletion.
    const fn verdict(self) -> u8 {
        let explains = match self.marked {
            mark::LEAVING => true,
            mark::NOT_READY => self.believed && self.fresh,
            mark::GONE => self.believed,
            _ => false,
        };
        let listed = match self.marked {
            mark::READY if self.believed => true,
            mark::NOT_READY if self.believed && self.fresh => false,
            mark::LEAVING | mark::GONE if self.believed => false,
            _ => !self.fresh,
        };
        if listed && self.state == BACKEND_ACTIVE {
            USABLE | KEEPS
        } else if explains {
            // The time of a leaving backend is one for a drain. Where drain is refused to a pod the mark of a drain is there
            // all the same.
            let may_keep = match self.marked {
                mark::LEAVING => self.awhile,
                mark::GONE => false,
                _ => true,
            };
            SINCE_MARK | if may_keep && self.ahead { KEEPS } else { 0 }
        } else if self.awhile {
            SINCE_SEEN | if self.state == BACKEND_TERMINATING { KEEPS_AWHILE } else { KEEPS }
        } else if self.state == BACKEND_TERMINATING {
            0
        } else {
            // Nothing that the agent says explains it, and what Cilium does not call terminating keeps its flows.
            KEEPS
        }
    }

    /// Place in [`VERDICTS`]. A state byte that is none of the four counts as the last of them: what a later Cilium may mean
    /// by it, it is not ACTIVE.
    #[inline(always)]
    const fn index(marked: u8, believed: u64, fresh: u64, state: u8, ahead: u64, awhile: u64) -> usize {
        let unknown = 0u64.wrapping_sub(state as u64 >> 2) >> 62;
        let state = state as u64 & 3 | unknown;
        (marked as u64 & 7 | believed << 3 | fresh << 4 | state << 5 | ahead << 7 | awhile << 8) as usize
    }

    const fn from_index(index: usize) -> Self {
        Self {
            marked: index as u8 & 7,
            believed: index & 1 << 3 != 0,
            fresh: index & 1 << 4 != 0,
            state: (index >> 5) as u8 & 3,
            ahead: index & 1 << 7 != 0,
            awhile: index & 1 << 8 != 0,
        }
    }
}

const VERDICTS_LENGTH: usize = 512;

/// [`Circumstances::verdict`] of all circumstances. A table because each comparison is a fork to the verifier, and it would
/// follow all of them through everything that comes after.
static VERDICTS: [u8; VERDICTS_LENGTH] = {
    let mut table = [0; VERDICTS_LENGTH];
    let mut index = 0;
    while index < VERDICTS_LENGTH {
        table[index] = Circumstances::from_index(index).verdict();
        index += 1;
    }
    table
};

/// 1 when `time` is before `limit`, both below 2^63.
#[inline(always)]
const fn before(time: u64, limit: u64) -> u64 {
    time.wrapping_sub(limit) >> 63
}

/// `value`, of which the compiler forgets what it knew. In a register: `black_box` would leave a pointer into the stack in
/// the register of the result, which the verifier lets no function return.
#[inline(always)]
fn opaque(value: usize) -> usize {
    #[cfg(target_arch = "bpf")]
    {
        let mut value = value;
        // SAFETY: no instruction at all.
        unsafe { core::arch::asm!("", inout("r1") value, options(nomem, nostack, preserves_flags)) };
        value
    }
    #[cfg(not(target_arch = "bpf"))]
    value
}

/// The bits of the verdict about a backend with this state byte.
#[inline(always)]
pub(super) fn verdict_about(
    now: u64,
    fresh: u64,
    state: u8,
    mark: Option<&BackendMark>,
    unmarked: Unmarked,
) -> u8 {
    let (marked, keep_until, valid_until) =
        mark.map_or((0, 0, 0), |mark| (mark.state, mark.keep_until, mark.valid_until));
    let index = Circumstances::index(
        marked,
        before(now, valid_until),
        fresh,
        state,
        before(now, keep_until),
        unmarked as u64,
    );
    // The mask is for the verifier, and not to be spread over the parts that the compiler has proven small: kernels before
    // 6.11 do not see then that their sum is small too.
    let index = opaque(index) & (VERDICTS_LENGTH - 1);
    VERDICTS.get(index).copied().unwrap_or(0)
}

/// Judges the backend `id`, which is named by an entry of the packet's service.
///
/// A verdict that takes flows off it is made after a second look. The kernel's hash maps are read without a lock, and give the
/// memory of an element that is written anew to the next one at once: a look between the two can find another backend's state,
/// another mark, or nothing. Flows that are cut do not come back, so nothing of that kind is believed at once.
#[inline(always)]
pub fn judge(world: &mut impl World, id: u64, unmarked: Unmarked, out: &mut Judgement) {
    let mut address = [0; 16];
    judge_here(world, id, unmarked, out, &mut address);
    // Not a loop: the verifier of kernel 6.1 finds no end of one.
    if !out.keeps {
        judge_here(world, id, unmarked, out, &mut address);
    }
}

/// As [`judge`] with one look, inlined; tells the backend's address too when it is present.
#[inline(always)]
pub(super) fn judge_here(
    world: &mut impl World,
    id: u64,
    unmarked: Unmarked,
    out: &mut Judgement,
    address: &mut [u8; 16],
) {
    // Ids are 32 bits wide; an entry with more set names no backend.
    let (Ok(id), Some(backend)) = (u32::try_from(id), world.backend(id as u32)) else {
        out.clear(u32::try_from(id).unwrap_or(0));
        return;
    };
    *address = backend.address;
    let now = world.now();
    let mark = world.mark(&backend.address);
    let verdict = verdict_about(now, world.heartbeat_fresh(), backend.state, mark.as_ref(), unmarked);
    (out.id, out.present, out.began) = (id, true, 0);
    out.verdict(verdict);
    if verdict & SINCE_MARK != 0 {
        out.began = mark.map_or(0, |mark| mark.since);
    } else if verdict & SINCE_SEEN != 0 {
        let terminating = verdict & KEEPS_AWHILE != 0;
        let began = world.leaving_since(&backend.address, id, terminating);
        out.began = began;
        if terminating {
            out.keeps = before(now, began + world.unmarked_drain()) != 0;
        }
    }
}

impl Judgement {
    /// Makes it [`Self::absent`], field by field: as a whole it would be a call of memset.
    #[inline(always)]
    pub(super) fn clear(&mut self, id: u32) {
        (self.began, self.id) = (0, id);
        (self.present, self.usable, self.keeps) = (false, false, false);
    }

    #[inline(always)]
    fn verdict(&mut self, verdict: u8) {
        self.usable = verdict & USABLE != 0;
        self.keeps = verdict & KEEPS != 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::FOR_EVER;

    #[test]
    fn index_and_circumstances_are_inverse() {
        for index in 0..VERDICTS_LENGTH {
            let case = Circumstances::from_index(index);
            let back = Circumstances::index(
                case.marked,
                u64::from(case.believed),
                u64::from(case.fresh),
                case.state,
                u64::from(case.ahead),
                u64::from(case.awhile),
            );
            assert_eq!(back, index);
        }
    }

    #[test]
    fn times_compare_by_subtraction() {
        assert_eq!(before(1, 2), 1);
        assert_eq!(before(2, 2), 0);
        assert_eq!(before(3, 2), 0);
        assert_eq!(before(1 << 60, FOR_EVER), 1);
    }

    /// What the shortcut of mode reset relies on.
    #[test]
    fn an_active_backend_keeps_its_flows_when_no_mark_says_otherwise() {
        let circumstances = (0..VERDICTS_LENGTH).map(Circumstances::from_index);
        let mut seen = 0;
        for case in circumstances.filter(|case| {
            matches!(case.marked, 0 | mark::READY) && case.state == BACKEND_ACTIVE && !case.awhile
        }) {
            assert_ne!(case.verdict() & KEEPS, 0, "{:?} {} {}", case.marked, case.believed, case.fresh);
            seen += 1;
        }
        assert_eq!(seen, 16);
    }

    #[test]
    fn usable_backends_keep_and_only_active_ones_are_usable() {
        for index in 0..VERDICTS_LENGTH {
            let case = Circumstances::from_index(index);
            let verdict = case.verdict();
            if verdict & USABLE != 0 {
                assert_ne!(verdict & KEEPS, 0);
                assert_eq!(case.state, BACKEND_ACTIVE);
            }
        }
    }
}
