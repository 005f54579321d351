//! What the maps hold right now, read from the pins alone: it needs no running agent.

use std::{collections::BTreeMap, net::IpAddr, path::Path};

use aya::maps::{Array, MapData, PerCpuArray};
use coil_guard_common::{
    abi::{self, DrainStats, EgressCounters, maps},
    counters::Reason,
};
use zerocopy::{FromZeros as _, IntoBytes as _};

use super::{
    Attachment, BoundMap, DatapathError,
    cores::Cores,
    layout::Layout,
    own_maps::{map_error, open_own},
    part::Part,
    program::Binding,
    records::{EGRESSES, Egresses, PODS, Pods, generation, typed},
    replies::ReplySnapshot,
    report::from_mapped,
    sys::elements,
    tables::{mark_snapshot, service_address, service_snapshot},
};
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
    /// Attached client pods.
    pub pods: BTreeMap<PodUid, PodSnapshot>,
    /// Symmetric replies.
    pub replies: ReplySnapshot,
    /// Maps of Cilium's that the core programs use.
    pub bindings: Vec<BoundMap>,
    /// Kernel ids of the core programs, by name. Without one attached pods are not guarded.
    pub cores: BTreeMap<&'static str, u32>,
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
    /// Kernel id of its program, the stub.
    pub program_id: u32,
    /// Name of the core program that the stub goes on in, see [`Snapshot::cores`].
    pub core: &'static str,
    /// Drain is refused for it with `fouSourcePortAuto`.
    pub ports_overlap: bool,
}

/// The last time that a client was moved off a backend of a service. The program remembers one for each pair.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LastMove {
    /// The service.
    pub service: ServiceAddress,
    /// Address of the client pod.
    pub client: IpAddr,
    /// `namespace/name` of the client pod, while it is attached. The address may be another pod's by now.
    pub pod: Option<String>,
    /// Address of the backend that it was moved off.
    pub from: IpAddr,
    /// When.
    pub at: Monotonic,
}

impl LastMove {
    /// Reads them from the pins below `pin_directory`, in no order. Not part of a [`Snapshot`], because there are up to as
    /// many as clients times services, and metrics do without them.
    ///
    /// # Errors
    ///
    /// When the pinned map cannot be opened or read.
    pub fn read(
        pin_directory: &Path,
        pods: &BTreeMap<PodUid, PodSnapshot>,
    ) -> Result<Vec<Self>, DatapathError> {
        let Some(map) = open_own(&Layout::new(pin_directory), maps::PREVIOUS)? else { return Ok(Vec::new()) };
        let mut names = BTreeMap::new();
        for (uid, pod) in pods {
            names.extend(pod.addresses.iter().map(|address| ((*address, generation(uid)), &pod.name)));
        }
        let moves = entries::<abi::ClientServiceKey, abi::Previous>(&map, maps::PREVIOUS)?;
        Ok(moves
            .into_iter()
            .map(|(key, previous)| {
                let client = from_mapped(key.client);
                Self {
                    service: ServiceAddress {
                        address: from_mapped(key.service),
                        port: u16::from_be_bytes(key.service_port),
                    },
                    client,
                    pod: names.get(&(client, previous.generation)).map(|name| (*name).clone()),
                    from: from_mapped(previous.backend_address),
                    at: Monotonic(previous.moved_at),
                }
            })
            .collect())
    }
}

/// Inner flows that stay on the leaving backend now. The record of a backend may have been evicted while flows of it were
/// still to end, and what ended since then stands below zero.
#[must_use]
pub fn draining(drain: &DrainStats) -> u64 {
    drain.flows.cast_signed().max(0).cast_unsigned()
}

impl Snapshot {
    /// Reads the pins below `pin_directory`. Nothing pinned gives an empty snapshot.
    ///
    /// # Errors
    ///
    /// When a pinned map cannot be opened or read.
    pub fn read(pin_directory: &Path) -> Result<Self, DatapathError> {
        let layout = Layout::new(pin_directory);
        let mut snapshot = Self { time: Monotonic::now(), ..Self::default() };
        snapshot.packets = Reason::ALL.iter().map(|reason| (reason.label(), 0)).collect();
        if let Some(map) = open_own(&layout, maps::COUNTERS)? {
            snapshot.packets = packets(&typed(map, maps::COUNTERS)?)?;
        }
        let mut names = BTreeMap::new();
        if let Some(map) = open_own(&layout, EGRESSES)? {
            names = Egresses::new(map)?.names().clone();
        }
        if let Some(map) = open_own(&layout, maps::EGRESS_COUNTERS)? {
            let counters: PerCpuArray<_, EgressCounters> = typed(map, maps::EGRESS_COUNTERS)?;
            for (name, index) in &names {
                let values = counters.get(index, 0).map_err(map_error("read", maps::EGRESS_COUNTERS))?;
                snapshot.egresses.insert(name.clone(), values.iter().fold(EgressCounters::new_zeroed(), sum));
            }
        }
        if let Some(map) = open_own(&layout, maps::DRAINS)? {
            snapshot.drains = entries::<[u8; 16], DrainStats>(&map, maps::DRAINS)?
                .into_iter()
                .map(|(address, stats)| (from_mapped(address), stats))
                .collect();
        }
        if let Some(map) = open_own(&layout, maps::GUARDED_SERVICES)? {
            for (key, entry) in entries::<abi::ServiceKey, abi::GuardedService>(&map, maps::GUARDED_SERVICES)?
            {
                let egress =
                    names.iter().find(|(_, index)| **index == entry.egress).map(|(name, _)| name.clone());
                let mut bytes = [0; 20];
                bytes.copy_from_slice(key.as_bytes());
                snapshot.services.extend(
                    service_snapshot(&entry, egress).map(|service| (service_address(&bytes), service)),
                );
            }
        }
        if let Some(map) = open_own(&layout, maps::BACKEND_MARKS)? {
            snapshot.marks = entries::<[u8; 16], abi::BackendMark>(&map, maps::BACKEND_MARKS)?
                .into_iter()
                .filter_map(|(address, mark)| Some((from_mapped(address), mark_snapshot(&mark)?)))
                .collect();
        }
        if let Some(map) = open_own(&layout, PODS)? {
            let parts = Pods::new(map)?.load()?;
            let guards = parts.iter().filter(|(key, _)| key.part == Part::Guard);
            snapshot.pods = guards.map(|(key, attached)| (key.uid.clone(), attached.into())).collect();
            snapshot.replies = ReplySnapshot::read(&layout, &parts)?;
        }
        if let Some(map) = open_own(&layout, maps::AGENT)? {
            let agent: Array<_, abi::AgentState> = typed(map, maps::AGENT)?;
            let state = agent.get(&0, 0).map_err(map_error("read", maps::AGENT))?;
            snapshot.heartbeat_until =
                (state.heartbeat_until != 0).then_some(Monotonic(state.heartbeat_until));
        }
        snapshot.bindings = Binding::pinned(&layout)?;
        snapshot.cores = Cores::pinned(&layout)?;
        Ok(snapshot)
    }
}

/// The map may have been made by a version with fewer reasons.
fn packets(counters: &PerCpuArray<MapData, u64>) -> Result<BTreeMap<&'static str, u64>, DatapathError> {
    let known = counters.len();
    Reason::ALL
        .iter()
        .map(|reason| {
            let index = *reason as u32;
            let total = if index < known {
                let values = counters.get(&index, 0).map_err(map_error("read", maps::COUNTERS))?;
                values.iter().fold(0, |total: u64, value| total.wrapping_add(*value))
            } else {
                0
            };
            Ok((reason.label(), total))
        })
        .collect()
}

fn sum(mut total: EgressCounters, one: &EgressCounters) -> EgressCounters {
    macro_rules! add { ($($field:ident),+) => { $(total.$field = total.$field.wrapping_add(one.$field);)+ } }
    add!(
        packets,
        moved,
        created,
        repaired,
        drained,
        cut,
        no_live,
        would_move,
        would_drain,
        not_drained,
        contended,
        rewritten,
        new_ports,
        cannot_move
    );
    total
}

/// All elements.
pub(super) fn entries<K: aya::Pod, V: aya::Pod>(
    map: &MapData,
    name: &'static str,
) -> Result<Vec<(K, V)>, DatapathError> {
    let mut entries = Vec::new();
    elements(map, |key: &K, value: &V| entries.push((*key, *value))).map_err(map_error("read", name))?;
    Ok(entries)
}
