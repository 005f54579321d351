//! The maps that the agent writes: services, marks, heartbeat.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    net::IpAddr,
    time::Duration,
};

use aya::maps::{Array, HashMap, IterableMap as _, MapData, MapError, PerCpuArray, PerCpuValues};
use coil_guard_common::abi::{self, maps};
use zerocopy::{FromZeros, IntoBytes};

use super::{
    Applied, DatapathError, MarkSnapshot, Remembered, ServiceSnapshot, Sizes,
    diff::{
        HEARTBEAT_RENEWAL, HEARTBEAT_VALIDITY, MARK_RENEWAL, MarkKey, READY_RENEWAL, Renewal,
        SERVICE_RENEWAL, mark_changes, same_service, service_entry, service_key,
    },
    layout::Layout,
    own_maps::{map_error, own_maps},
    records::{EGRESSES, Egresses, full_or, is_absent, typed},
    report::{from_mapped, mode_from_abi, to_mapped},
    snapshot::entries,
};
use crate::{
    clock::Monotonic,
    plan::{Changes, Desired, EgressName, Keep, MarkState, ServiceAddress},
};

/// Index of an Egress for which there is no room: its flows are guarded and not counted.
const UNCOUNTED: u32 = u32::MAX;

/// The open maps, and a copy of what they hold: nobody else writes them.
pub(crate) struct Tables {
    services: HashMap<MapData, abi::ServiceKey, abi::GuardedService>,
    marks: HashMap<MapData, MarkKey, abi::BackendMark>,
    agent: Array<MapData, abi::AgentState>,
    egress_counters: PerCpuArray<MapData, abi::EgressCounters>,
    egresses: Egresses,
    have_services: BTreeMap<[u8; 20], abi::GuardedService>,
    have_marks: BTreeMap<MarkKey, abi::BackendMark>,
    /// Of these, those that say something else than READY.
    others: BTreeSet<MarkKey>,
    sizes: (u32, u32),
    /// What is here was compared with a whole plan, and everything that differed was written.
    as_planned: bool,
    ready_renewed: Option<Monotonic>,
    others_renewed: Option<Monotonic>,
    services_renewed: Option<Monotonic>,
    heartbeat_sent: Option<Monotonic>,
    /// As it was last written.
    agent_state: abi::AgentState,
}

impl fmt::Debug for Tables {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tables")
            .field("services", &self.have_services.len())
            .field("marks", &self.have_marks.len())
            .finish_non_exhaustive()
    }
}

impl Tables {
    /// Opens what is pinned and makes what is not. The second value holds warnings.
    pub(crate) fn open(layout: &Layout, sizes: &Sizes) -> Result<(Self, Vec<String>), DatapathError> {
        layout.make()?;
        let mut warnings = Vec::new();
        let mut maps = BTreeMap::new();
        for map in own_maps(sizes) {
            let (data, warning) = map.open_or_create(layout)?;
            warnings.extend(warning);
            maps.insert(map.name, data);
        }
        let mut take = |name: &'static str| maps.remove(name).expect("own_maps lists every map");
        let size = |map: &MapData, name| {
            map.info().map(|info| info.max_entries()).map_err(map_error("inspect", name))
        };
        let (services, marks) = (take(maps::GUARDED_SERVICES), take(maps::BACKEND_MARKS));
        let sizes = (size(&services, maps::GUARDED_SERVICES)?, size(&marks, maps::BACKEND_MARKS)?);
        let mut tables = Self {
            services: typed(services, maps::GUARDED_SERVICES)?,
            marks: typed(marks, maps::BACKEND_MARKS)?,
            agent: typed(take(maps::AGENT), maps::AGENT)?,
            egress_counters: typed(take(maps::EGRESS_COUNTERS), maps::EGRESS_COUNTERS)?,
            egresses: Egresses::new(take(EGRESSES))?,
            have_services: BTreeMap::new(),
            have_marks: BTreeMap::new(),
            others: BTreeSet::new(),
            sizes,
            as_planned: false,
            ready_renewed: None,
            others_renewed: None,
            services_renewed: None,
            heartbeat_sent: None,
            agent_state: abi::AgentState::new_zeroed(),
        };
        tables.agent_state = tables.agent.get(&0, 0).map_err(map_error("read", maps::AGENT))?;
        let have = entries(tables.services.map(), maps::GUARDED_SERVICES)?;
        tables.have_services = have.into_iter().map(|(key, value)| (key_bytes(&key), value)).collect();
        for (key, value) in entries(tables.marks.map(), maps::BACKEND_MARKS)? {
            tables.have_mark(key, Some(value));
        }
        Ok((tables, warnings))
    }

    pub(crate) fn egress_of(&self, index: u32) -> Option<EgressName> {
        self.egresses.names().iter().find(|(_, i)| **i == index).map(|(name, _)| name.clone())
    }

    /// What was there when the tables were opened.
    pub(crate) fn remembered(&self) -> Remembered {
        Remembered {
            marks: self
                .have_marks
                .iter()
                .filter_map(|(key, mark)| Some((from_mapped(*key), mark_snapshot(mark)?)))
                .collect(),
            services: self
                .have_services
                .iter()
                .filter_map(|(key, entry)| {
                    Some((service_address(key), service_snapshot(entry, self.egress_of(entry.egress))?))
                })
                .collect(),
        }
    }

    /// Writes what differs. The order is such that at no time a flow is worse off than before or after: backends are
    /// known before the service that makes the program look at them, READY ones first, and forgotten after it; the
    /// heartbeat, which says that the READY marks are complete, comes when they are, and is taken back when they are not.
    ///
    /// `changes` are what differs from the last plan, or none where everything is to be looked at.
    pub(crate) fn apply(&mut self, desired: &Desired, changes: Option<&Changes>, now: Monotonic) -> Applied {
        let mut applied = Applied::default();
        let changes_only = changes.filter(|_| self.as_planned);
        let renewal = Renewal {
            ready: desired.complete && due(self.ready_renewed, READY_RENEWAL, now),
            others: desired.complete && due(self.others_renewed, MARK_RENEWAL, now),
        };
        let mut among: BTreeSet<IpAddr> = match changes_only {
            Some(changes) if !renewal.ready => changes.marks.keys().copied().collect(),
            _ => desired
                .marks
                .keys()
                .copied()
                .chain(self.have_marks.keys().map(|key| from_mapped(*key)))
                .collect(),
        };
        if renewal.others {
            among.extend(self.others.iter().map(|key| from_mapped(*key)));
        }
        let changes = mark_changes(&self.have_marks, &desired.marks, &among, renewal, now);
        let mut complete = true;
        // Before the first other mark: the program does not look for one while this stands.
        let others = changes.put.iter().any(|(_, entry)| entry.state != abi::mark::READY);
        let told = if others { self.set_only_ready(false) } else { Ok(()) };
        let put = told.map_or_else(
            |error| {
                complete = false;
                applied.errors.push(error);
                Vec::new()
            },
            |()| changes.put,
        );
        for (address, entry) in put {
            match self.put_mark(address, entry) {
                Ok(()) => applied.writes += 1,
                Err(error) => {
                    complete = false;
                    applied.errors.push(error);
                }
            }
        }
        if !complete {
            self.take_back_heartbeat(&mut applied);
        }
        let renew_services = desired.complete && due(self.services_renewed, SERVICE_RENEWAL, now);
        if renew_services || changes_only.is_none_or(|changes| changes.services.is_some()) {
            self.apply_services(desired, renew_services, now, &mut applied);
        }
        for key in changes.remove {
            match self.marks.remove(&key) {
                Err(error) if !is_absent(&error) => {
                    applied.errors.push(map_error("remove from", maps::BACKEND_MARKS)(error));
                }
                _ => {
                    self.have_mark(key, None);
                    applied.writes += 1;
                }
            }
        }
        if let Err(error) = self.set_only_ready(self.others.is_empty()) {
            applied.errors.push(error);
        }
        if renewal.ready && complete {
            self.ready_renewed = Some(now);
        }
        if renewal.others && complete {
            self.others_renewed = Some(now);
        }
        if desired.complete && complete && due(self.heartbeat_sent, HEARTBEAT_RENEWAL, now) {
            match self.set_heartbeat(now.saturating_add(HEARTBEAT_VALIDITY)) {
                Ok(()) => {
                    self.heartbeat_sent = Some(now);
                    applied.writes += 1;
                }
                Err(error) => applied.errors.push(error),
            }
        }
        if changes_only.is_none() {
            // As a whole, so that its nodes are full.
            self.have_marks = std::mem::take(&mut self.have_marks).into_iter().collect();
        }
        self.as_planned = applied.errors.is_empty();
        applied.renew_by = now.saturating_add(HEARTBEAT_RENEWAL);
        applied
    }

    /// Remembers what a mark's place holds.
    fn have_mark(&mut self, key: MarkKey, entry: Option<abi::BackendMark>) {
        match entry {
            Some(entry) if entry.state != abi::mark::READY => drop(self.others.insert(key)),
            _ => drop(self.others.remove(&key)),
        }
        match entry {
            Some(entry) => drop(self.have_marks.insert(key, entry)),
            None => drop(self.have_marks.remove(&key)),
        }
    }

    fn put_mark(&mut self, address: IpAddr, entry: abi::BackendMark) -> Result<(), DatapathError> {
        let key = to_mapped(address);
        self.marks.insert(key, entry, 0).map_err(|error| {
            let what = || format!("the mark of backend {address}");
            full_or(error, maps::BACKEND_MARKS, self.sizes.1, what, "--map-marks")
        })?;
        self.have_mark(key, Some(entry));
        Ok(())
    }

    fn apply_services(&mut self, desired: &Desired, renew: bool, now: Monotonic, applied: &mut Applied) {
        let mut wanted = BTreeMap::new();
        for (address, service) in &desired.services {
            let key = service_key(*address);
            let bytes = key_bytes(&key);
            wanted.insert(bytes, ());
            let egress = self.egress_index(&service.egress, desired, applied);
            let old = self.have_services.get(&bytes).copied();
            let entry = service_entry(old.as_ref(), service, egress, now);
            let changed = !old.is_some_and(|old| same_service(&old, &entry));
            if !changed && !renew {
                continue;
            }
            match self.services.insert(key, entry, 0) {
                Ok(()) => {
                    self.have_services.insert(bytes, entry);
                    applied.writes += 1;
                    if changed {
                        applied.services.push((*address, service.egress.clone()));
                    }
                }
                Err(error) => {
                    let what = || {
                        format!("service {}:{} of Egress {}", address.address, address.port, service.egress)
                    };
                    let map = maps::GUARDED_SERVICES;
                    applied.errors.push(full_or(error, map, self.sizes.0, what, "--map-services"));
                }
            }
        }
        let stale: Vec<_> =
            self.have_services.keys().filter(|key| !wanted.contains_key(*key)).copied().collect();
        for bytes in stale {
            match self.services.remove(&service_key(service_address(&bytes))) {
                Err(error) if !is_absent(&error) => {
                    applied.errors.push(map_error("remove from", maps::GUARDED_SERVICES)(error));
                }
                _ => {
                    self.have_services.remove(&bytes);
                    applied.writes += 1;
                }
            }
        }
        if renew {
            self.services_renewed = Some(now);
        }
    }

    fn egress_index(&mut self, name: &EgressName, desired: &Desired, applied: &mut Applied) -> u32 {
        let in_use = |name: &EgressName| desired.services.values().any(|service| service.egress == *name);
        let given = match self.egresses.index(name, in_use) {
            Ok(given) => given,
            Err(error) => {
                applied.errors.push(error);
                return UNCOUNTED;
            }
        };
        if given.reused
            && let Err(error) = self.clear_counters(given.index)
        {
            applied.errors.push(error);
        }
        given.index
    }

    fn clear_counters(&mut self, index: u32) -> Result<(), DatapathError> {
        let failed = map_error("clear", maps::EGRESS_COUNTERS);
        let mut zero = || {
            let cpus = self.egress_counters.get(&index, 0)?.len();
            let zeros = vec![abi::EgressCounters::new_zeroed(); cpus];
            let values = PerCpuValues::try_from(zeros)
                .map_err(|error| MapError::IoError(std::io::Error::other(error.to_string())))?;
            self.egress_counters.set(index, values, 0)
        };
        zero().map_err(failed)
    }

    fn set_heartbeat(&mut self, until: Monotonic) -> Result<(), DatapathError> {
        self.set_agent(abi::AgentState { heartbeat_until: until.0, ..self.agent_state })
    }

    fn set_only_ready(&mut self, only_ready: bool) -> Result<(), DatapathError> {
        let only_ready = u64::from(only_ready);
        if self.agent_state.only_ready == only_ready {
            return Ok(());
        }
        self.set_agent(abi::AgentState { only_ready, ..self.agent_state })
    }

    fn set_agent(&mut self, state: abi::AgentState) -> Result<(), DatapathError> {
        self.agent.set(0, state, 0).map_err(map_error("write to", maps::AGENT))?;
        self.agent_state = state;
        Ok(())
    }

    fn take_back_heartbeat(&mut self, applied: &mut Applied) {
        match self.set_heartbeat(Monotonic(0)) {
            Ok(()) => self.heartbeat_sent = None,
            Err(error) => applied.errors.push(error),
        }
    }
}

/// Whether it is time to renew; a timer that fires a little early counts.
fn due(last: Option<Monotonic>, interval: Duration, now: Monotonic) -> bool {
    last.is_none_or(|last| now.since(last) >= interval.mul_f32(0.9))
}

fn key_bytes(key: &abi::ServiceKey) -> [u8; 20] {
    let mut bytes = [0; 20];
    bytes.copy_from_slice(key.as_bytes());
    bytes
}

pub(crate) fn service_address(key: &[u8; 20]) -> ServiceAddress {
    let mut address = [0; 16];
    address.copy_from_slice(&key[..16]);
    ServiceAddress { address: from_mapped(address), port: u16::from_be_bytes([key[16], key[17]]) }
}

pub(crate) fn service_snapshot(
    entry: &abi::GuardedService,
    egress: Option<EgressName>,
) -> Option<ServiceSnapshot> {
    Some(ServiceSnapshot {
        egress,
        mode: mode_from_abi(entry.mode)?,
        sport_auto: entry.flags & abi::SERVICE_SPORT_AUTO != 0,
        tracked_since: (entry.tracked_since != 0).then_some(Monotonic(entry.tracked_since)),
        expires_at: Monotonic(entry.expires_at),
    })
}

pub(crate) fn mark_snapshot(mark: &abi::BackendMark) -> Option<MarkSnapshot> {
    Some(MarkSnapshot {
        state: match mark.state {
            abi::mark::READY => MarkState::Ready,
            abi::mark::NOT_READY => MarkState::NotReady,
            abi::mark::LEAVING => MarkState::Leaving,
            abi::mark::GONE => MarkState::Gone,
            _ => return None,
        },
        keep: match mark.keep_until {
            0 => Keep::No,
            abi::FOR_EVER => Keep::ForEver,
            time => Keep::Until(Monotonic(time)),
        },
        since: Monotonic(mark.since.saturating_sub(u64::from(mark.seen_before) * 1000)),
        valid_until: Monotonic(mark.valid_until),
    })
}
