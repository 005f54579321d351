//! The core programs: what all stubs of the node go on in.
//!
//! They stand in a pinned program array. A program array is emptied when its last file and pin have gone, so with the pin
//! the core outlives the agent, and without it every stub passes its packets.

use std::{
    collections::BTreeMap,
    fmt,
    os::fd::AsFd as _,
    time::{Duration, Instant},
};

use aya::maps::{Map, MapData, MapInfo, ProgramArray};
use coil_guard_common::abi::{self, core_slot, maps, reply_program};

use super::{
    DatapathError,
    layout::{Layout, file_error},
    own_maps::{map_error, open_own},
    part::Part,
    program::{self, Binding, Pins, load_error, load_program, new_loader},
    records::is_absent,
    replies::REPLIES_OBJECT,
    sys,
};
use crate::plan::ClientPod;

/// Wait after a refusal: it does not come good by itself, and each attempt costs the verifier's time.
const AFTER_REFUSAL: Duration = Duration::from_secs(10);
/// Wait after any other failure.
const AFTER_FAILURE: Duration = Duration::from_secs(1);

/// A core program. All are one object; what one differs in are constants.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Core {
    /// The program that guards.
    Guard,
    /// The same without what writes to Cilium's maps: by a constant it is dead code, which the kernel's verifier leaves out.
    ReadOnly,
    /// Of [`Part::Learn`].
    Learn,
    /// Of [`Part::Answer`].
    Answer,
    /// Of [`Part::Return`].
    Return,
}

impl Core {
    /// All of them.
    pub(crate) const ALL: [Self; 5] = [Self::Guard, Self::ReadOnly, Self::Learn, Self::Answer, Self::Return];

    /// The one that the packets of a client pod need.
    pub(crate) fn of(pod: &ClientPod) -> Self {
        if pod.read_only { Self::ReadOnly } else { Self::Guard }
    }

    /// The one that the packets at a part of a pod need; of a client's guard, the most usual.
    pub(crate) fn of_part(part: Part) -> Self {
        match part {
            Part::Guard => Self::Guard,
            Part::Learn => Self::Learn,
            Part::Answer => Self::Answer,
            Part::Return => Self::Return,
        }
    }

    /// Its object, and its name there.
    fn program(self) -> (&'static [u8], &'static str) {
        match self {
            Self::Guard | Self::ReadOnly => (program::OBJECT, abi::CORE_PROGRAM),
            Self::Learn => (REPLIES_OBJECT, reply_program::LEARN),
            Self::Answer => (REPLIES_OBJECT, reply_program::ANSWER),
            Self::Return => (REPLIES_OBJECT, reply_program::RETURN),
        }
    }

    /// Its place in the array, which stands in stubs and records.
    pub(crate) fn slot(self) -> u8 {
        match self {
            Self::Guard => core_slot::GUARD,
            Self::ReadOnly => core_slot::READ_ONLY,
            Self::Learn => core_slot::LEARN,
            Self::Answer => core_slot::ANSWER,
            Self::Return => core_slot::RETURN,
        }
    }

    /// The one at `slot`; of a slot that a later version filled, the one that guards.
    pub(crate) fn at(slot: u8) -> Self {
        Self::ALL.into_iter().find(|core| core.slot() == slot).unwrap_or(Self::Guard)
    }

    /// Its name in status and messages.
    pub(crate) fn label(self) -> &'static str {
        match self {
            Self::Guard => "guard",
            Self::ReadOnly => "read-only",
            Self::Learn => "learn",
            Self::Answer => "answer",
            Self::Return => "return",
        }
    }
}

/// How it is with one core.
#[derive(Clone, Debug)]
enum State {
    /// Nothing is there.
    Absent,
    /// This program, loaded over the present binding.
    Loaded(u32),
    Failed {
        error: String,
        refused: bool,
        retry_at: Instant,
    },
}

/// The array, and what this agent put there over the present binding.
pub(crate) struct Cores {
    array: ProgramArray<MapData>,
    states: BTreeMap<Core, State>,
}

impl fmt::Debug for Cores {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cores").field("states", &self.states).finish_non_exhaustive()
    }
}

impl Cores {
    /// Opens the pinned array; `None` when there is none.
    pub(crate) fn open(layout: &Layout) -> Result<Option<Self>, DatapathError> {
        let Some(map) = open_own(layout, maps::CORES)? else { return Ok(None) };
        let array = Map::from_map_data(map)
            .and_then(ProgramArray::try_from)
            .map_err(map_error("open", maps::CORES))?;
        Ok(Some(Self { array, states: BTreeMap::new() }))
    }

    /// Whether this agent has put the core there, over the present binding.
    pub(crate) fn is_loaded(&self, core: Core) -> bool {
        matches!(self.states.get(&core), Some(State::Loaded(_)))
    }

    /// Why the core is not there, and whether the kernel refuses it.
    pub(crate) fn problem(&self, core: Core) -> Option<(&str, bool)> {
        match self.states.get(&core) {
            Some(State::Failed { error, refused, .. }) => Some((error, *refused)),
            _ => None,
        }
    }

    /// Why the kernel refuses one of them, while it does.
    pub(crate) fn refusal(&self) -> Option<&str> {
        Core::ALL
            .into_iter()
            .find_map(|core| self.problem(core).filter(|(_, refused)| *refused))
            .map(|(error, _)| error)
    }

    /// There is a new binding: what stands in the array goes on until it is replaced.
    pub(crate) fn outdated(&mut self) {
        self.states.clear();
    }

    /// When to try again what failed.
    pub(crate) fn retry_at(&self) -> Option<Instant> {
        self.states
            .values()
            .filter_map(|state| match state {
                State::Failed { retry_at, .. } => Some(*retry_at),
                State::Absent | State::Loaded(_) => None,
            })
            .min()
    }

    /// Whether the core has to be loaded now if it is needed, or else cleared away.
    pub(crate) fn is_due(&self, core: Core, needed: bool) -> bool {
        match self.states.get(&core) {
            None => true,
            Some(State::Absent) => needed,
            Some(State::Loaded(_)) => false,
            Some(State::Failed { retry_at, .. }) => Instant::now() >= *retry_at,
        }
    }

    /// Loads the core over what `binding` holds and puts it into the array: from then on it is what every stub goes on in, and
    /// no packet meets neither it nor the one before. It takes a tenth of a second, most of it in the kernel's verifier.
    ///
    /// # Errors
    ///
    /// What a new failure says, with the time until it is tried again.
    pub(crate) fn load(
        &mut self,
        layout: &Layout,
        binding: &Binding,
        core: Core,
    ) -> Result<(), Option<(String, Duration)>> {
        let error = match self.replace(layout, binding, core) {
            Ok(id) => {
                self.states.insert(core, State::Loaded(id));
                return Ok(());
            }
            Err(error) => error,
        };
        let refused = matches!(error, DatapathError::Refused { .. });
        let wait = if refused { AFTER_REFUSAL } else { AFTER_FAILURE };
        let text = error.to_string();
        let is_new = self.problem(core).is_none_or(|(known, _)| known != text);
        let state = State::Failed { error: text.clone(), refused, retry_at: Instant::now() + wait };
        self.states.insert(core, state);
        Err(is_new.then_some((text, wait)))
    }

    fn replace(&mut self, layout: &Layout, binding: &Binding, core: Core) -> Result<u32, DatapathError> {
        let mut pins = Pins::default();
        for name in maps::ALL {
            pins.own(layout, name)?;
        }
        pins.bound(binding);
        let (object, name) = core.program();
        let flows = MapInfo::from_pin(layout.map(maps::INNER_FLOWS))
            .map_err(map_error("inspect", maps::INNER_FLOWS))?;
        let flow_cost = abi::flow_cost(flows.max_entries());
        let mut loader = new_loader();
        // The programs for replies remember no flows.
        loader.override_global(abi::FLOW_COST, &flow_cost, matches!(core, Core::Guard | Core::ReadOnly));
        if core == Core::ReadOnly {
            loader.override_global(abi::READ_ONLY, &1u32, true);
        }
        let mut ebpf = pins.load(&mut loader, object)?;
        let program = load_program(&mut ebpf, name)?;
        let id = program.info().map_err(load_error)?.id();
        let fd = program.fd().map_err(load_error)?;
        self.array.set(u32::from(core.slot()), fd, 0).map_err(map_error("write to", maps::CORES))?;
        Ok(id)
    }

    /// Takes a core away: pods that would get it are not guarded any more, at once.
    pub(crate) fn clear(&mut self, core: Core) -> Result<(), DatapathError> {
        self.states.insert(core, State::Absent);
        match self.array.clear_index(&u32::from(core.slot())) {
            Err(error) if !is_absent(&error) => Err(map_error("remove from", maps::CORES)(error)),
            _ => Ok(()),
        }
    }

    /// Forgets of each core that was put there what is not there any more. Gives their names.
    pub(crate) fn check(&mut self, layout: &Layout) -> Result<Vec<&'static str>, DatapathError> {
        let found = Self::pinned(layout)?;
        let mut lost = Vec::new();
        self.states.retain(|core, state| match state {
            State::Loaded(id) if found.get(core.label()) != Some(id) => {
                lost.push(core.label());
                false
            }
            _ => true,
        });
        Ok(lost)
    }

    /// Kernel ids of the core programs that are pinned, by name.
    pub(crate) fn pinned(layout: &Layout) -> Result<BTreeMap<&'static str, u32>, DatapathError> {
        let mut found = BTreeMap::new();
        let Some(array) = open_own(layout, maps::CORES)? else { return Ok(found) };
        for core in Core::ALL {
            let id = sys::program_at(array.fd().as_fd(), u32::from(core.slot()))
                .map_err(file_error("read", &layout.map(maps::CORES)))?;
            found.extend(id.map(|id| (core.label(), id)));
        }
        Ok(found)
    }
}
