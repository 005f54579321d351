//! What the maps hold right now, read from the pins alone: it needs no running agent.

use std::{collections::BTreeMap, net::IpAddr, path::Path};

use coil_guard_common::{
    abi::{DrainStats, EgressCounters},
    counters::Reason,
};

use super::{Attachment, BoundMap, DatapathError};
use crate::{
    clock::Monotonic,
    plan::{EgressName, Keep, MarkState, Mode, PodUid, ServiceAddress},
};

/// State of the datapath at one time.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Snapshot {
    /// When it was taken.
    pub time: Monotonic,
    /// Packets by reason, summed over the processors, every reason present.
    pub packets: BTreeMap<&'static str, u64>,
    /// By Egress, summed over the processors.
    pub egresses: BTreeMap<EgressName, EgressCounters>,
    /// By address of the leaving backend.
    pub drains: BTreeMap<IpAddr, DrainStats>,
    /// Guarded services.
    pub services: BTreeMap<ServiceAddress, ServiceSnapshot>,
    /// Marks.
    pub marks: BTreeMap<IpAddr, MarkSnapshot>,
    /// Attached pods.
    pub pods: BTreeMap<PodUid, PodSnapshot>,
    /// Maps of Cilium's that the programs use.
    pub bindings: Vec<BoundMap>,
    /// Until when the agent's word on ready backends counts; `None` when it never said anything.
    pub heartbeat_until: Option<Monotonic>,
}

/// A guarded service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceSnapshot {
    /// Its Egress, when its name is known.
    pub egress: Option<EgressName>,
    /// What is done.
    pub mode: Mode,
    /// `fouSourcePortAuto`.
    pub sport_auto: bool,
    /// Since when its inner flows are remembered.
    pub tracked_since: Option<Monotonic>,
    /// When it stops being guarded if no agent renews it.
    pub expires_at: Monotonic,
}

/// What the agent said of a backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MarkSnapshot {
    /// State.
    pub state: MarkState,
    /// Until when it keeps its flows.
    pub keep: Keep,
    /// Since when.
    pub since: Monotonic,
    /// Until when the state is to be believed.
    pub valid_until: Monotonic,
}

/// An attached pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodSnapshot {
    /// Kubernetes namespace and name, as `namespace/name`.
    pub name: String,
    /// Its addresses.
    pub addresses: Vec<IpAddr>,
    /// How it is attached.
    pub attachment: Attachment,
    /// Interface index in the pod's namespace.
    pub interface_index: u32,
    /// Since when it is guarded without a break.
    pub guarded_since: Monotonic,
    /// Kernel id of its program.
    pub program_id: u32,
    /// Drain is refused for it with `fouSourcePortAuto`.
    pub ports_overlap: bool,
}

impl Snapshot {
    /// Reads the pins below `pin_directory`. Nothing pinned gives an empty snapshot.
    ///
    /// # Errors
    ///
    /// When a pinned map cannot be opened or read.
    pub fn read(pin_directory: &Path) -> Result<Self, DatapathError> {
        let _ = (pin_directory, Reason::ALL);
        todo!()
    }
}
