//! What is known of each Egress, joined from the guard's maps and Cilium's.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    time::Duration,
};

use coil_guard_common::{
    abi::{DrainStats, EgressCounters},
    cilium::BACKEND_ACTIVE,
    decide::STUCK_REPORT,
};

use super::Status;
use crate::{
    cilium::CurrentBackend,
    clock::Monotonic,
    datapath::{GivenPort, LastMove, MarkSnapshot, ServiceSnapshot, Snapshot, draining},
    plan::{EgressName, MarkState, ServiceAddress},
};

/// One Egress, or the services whose Egress is not known.
#[derive(Debug)]
pub(super) struct Egress<'a> {
    pub(super) name: Option<&'a EgressName>,
    pub(super) services: BTreeMap<ServiceAddress, &'a ServiceSnapshot>,
    pub(super) clients: Clients,
    pub(super) backends: BTreeMap<IpAddr, Backend<'a>>,
    pub(super) counters: Option<&'a EgressCounters>,
    pub(super) cutovers: Vec<Cutover<'a>>,
    /// What mode rewrite remembers of its flows.
    pub(super) given: Vec<&'a GivenPort>,
}

/// A flow that has to leave for longer is said to be stuck.
const STUCK: Duration = Duration::from_nanos(STUCK_REPORT);

/// Attached pods with a flow to the Egress.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Clients {
    /// `namespace/name` of those with a service entry.
    Known(BTreeSet<String>),
    /// Every inner flow has an outer port of its own, so that there is no single entry to look up.
    PortEach,
    /// Cilium's maps do not tell.
    Unknown,
}

/// A backend as all sides see it.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Backend<'a> {
    pub(super) mark: Option<&'a MarkSnapshot>,
    pub(super) cilium: Option<CurrentBackend>,
    pub(super) drain: Option<&'a DrainStats>,
    /// Attached clients whose service entry names it.
    pub(super) clients: usize,
}

/// The last time that a flow of a service left a backend.
#[derive(Debug)]
pub(super) struct Cutover<'a> {
    pub(super) last: &'a LastMove,
    /// How long after the agent had marked the backend; `None` when it has marked it otherwise since, or not at all.
    pub(super) after_mark: Option<Duration>,
    /// Where the client is now.
    pub(super) now_on: Option<IpAddr>,
}

/// All Egresses with a guarded service.
pub(super) fn egresses(status: &Status) -> Vec<Egress<'_>> {
    let mut services: BTreeMap<Option<&EgressName>, BTreeMap<_, _>> = BTreeMap::new();
    for (address, service) in &status.snapshot.services {
        services.entry(service.egress.as_ref()).or_default().insert(*address, service);
    }
    services.into_iter().map(|(name, services)| egress(status, name, services)).collect()
}

fn egress<'a>(
    status: &'a Status,
    name: Option<&'a EgressName>,
    services: BTreeMap<ServiceAddress, &'a ServiceSnapshot>,
) -> Egress<'a> {
    let snapshot = &status.snapshot;
    let cilium = status.cilium.as_ref().ok();
    let found = || cilium.into_iter().flat_map(|current| &current.services);
    let found = || found().filter(|(address, _)| services.contains_key(address)).map(|(_, found)| found);
    let on: Vec<(IpAddr, Option<IpAddr>)> = found()
        .filter_map(|service| service.clients.as_ref())
        .flat_map(|clients| clients.iter().map(|(client, backend)| (*client, *backend)))
        .collect();
    let cutovers: Vec<_> = services.keys().filter_map(|address| cutover(status, *address)).collect();

    let mut addresses: BTreeSet<IpAddr> =
        found().flat_map(|service| service.backends.iter().copied()).collect();
    addresses.extend(on.iter().filter_map(|(_, backend)| *backend));
    // Out of Cilium's slots, but flows of this Egress were on it.
    let moves = status.moves.iter().filter(|last| services.contains_key(&last.service));
    addresses.extend(moves.map(|last| last.from).filter(|from| snapshot.marks.contains_key(from)));
    let backends = addresses
        .into_iter()
        .map(|address| {
            let clients = on.iter().filter(|(_, backend)| *backend == Some(address)).count();
            (address, Backend { clients, ..backend(status, address) })
        })
        .collect();

    let clients = if services.values().any(|service| service.sport_auto) {
        Clients::PortEach
    } else if found().any(|service| service.clients.is_some()) {
        Clients::Known(on.iter().map(|(client, _)| pod_name(snapshot, *client)).collect())
    } else {
        Clients::Unknown
    };
    let counters = name.and_then(|name| snapshot.egresses.get(name));
    let given = status.given.iter().filter(|given| services.contains_key(&given.service)).collect();
    Egress { name, services, clients, backends, counters, cutovers, given }
}

pub(super) fn backend(status: &Status, address: IpAddr) -> Backend<'_> {
    Backend {
        mark: status.snapshot.marks.get(&address),
        cilium: status.cilium.as_ref().ok().and_then(|current| current.backends.get(&address).copied()),
        drain: status.snapshot.drains.get(&address),
        clients: 0,
    }
}

/// Marked backends that are not known to belong to one of `egresses`.
pub(super) fn others<'a>(status: &'a Status, egresses: &[Egress<'_>]) -> BTreeMap<IpAddr, Backend<'a>> {
    let placed = |address: &IpAddr| egresses.iter().any(|egress| egress.backends.contains_key(address));
    let marks = status.snapshot.marks.keys().filter(|address| !placed(address));
    marks.map(|address| (*address, backend(status, *address))).collect()
}

fn pod_name(snapshot: &Snapshot, address: IpAddr) -> String {
    let pod = snapshot.pods.values().find(|pod| pod.addresses.contains(&address));
    pod.map_or_else(|| address.to_string(), |pod| pod.name.clone())
}

fn cutover(status: &Status, service: ServiceAddress) -> Option<Cutover<'_>> {
    let last = status.moves.iter().filter(|last| last.service == service).max_by_key(|last| last.at)?;
    let mark = status.snapshot.marks.get(&last.from).filter(|mark| mark.state != MarkState::Ready);
    let current = status.cilium.as_ref().ok().and_then(|current| current.services.get(&service));
    let clients = current.and_then(|service| service.clients.as_ref());
    Some(Cutover {
        last,
        after_mark: mark.filter(|mark| mark.since <= last.at).map(|mark| last.at.since(mark.since)),
        now_on: clients.and_then(|clients| clients.get(&last.client).copied()).flatten(),
    })
}

impl Egress<'_> {
    /// Inner flows that stay on leaving backends now.
    pub(super) fn draining(&self) -> u64 {
        self.backends.values().filter_map(|backend| backend.drain).map(draining).sum()
    }

    /// Flows that mode rewrite should have moved and has not.
    pub(super) fn stuck(&self, now: Monotonic) -> impl Iterator<Item = &GivenPort> {
        let is_stuck = move |since: Monotonic| now.since(since) >= STUCK;
        self.given.iter().copied().filter(move |given| given.stuck_since.is_some_and(is_stuck))
    }

    pub(super) fn title(&self) -> String {
        self.name.map_or_else(|| "(name unknown)".into(), ToString::to_string)
    }
}

impl Backend<'_> {
    /// Whether a new flow may go to it, as the program judges: only ACTIVE ones, and while the agent's word counts only those
    /// that it calls ready. Where Cilium's state is not known, the agent's word alone.
    pub(super) fn takes_flows(&self, now: Monotonic, heartbeat_until: Option<Monotonic>) -> bool {
        let fresh = heartbeat_until.is_some_and(|until| until > now);
        let believed = self.mark.filter(|mark| mark.valid_until > now).map(|mark| mark.state);
        let listed = match believed {
            Some(MarkState::Ready) => true,
            Some(MarkState::Leaving | MarkState::Gone) => false,
            Some(MarkState::NotReady) | None => !fresh,
        };
        listed && self.cilium.is_none_or(|backend| backend.state == BACKEND_ACTIVE)
    }
}
