//! What cilium-agent writes into the service maps, in the encoding and order of its version.
//!
//! Every change is made in the plan first ([`ControlPlane::set_state`], [`ControlPlane::remove_backend`], …) and reaches
//! the maps with [`ControlPlane::sync`], or in parts ([`ControlPlane::write_states`], [`ControlPlane::write_slots`], …)
//! for an agent that lags behind.

use std::{net::IpAddr, time::Duration};

use anyhow::{Context as _, Result};
use coil_guard_common::cilium::{
    AFFINITY_MATCH, Backend4, Backend6, ReverseNat4, ReverseNat6, Service, ServiceKey4, ServiceKey6,
};

use super::{
    maps::CiliumMaps,
    plan::{Backend, BackendState, Endpoint, ServiceId, ServicePlan},
    raw_map::RawMap,
    version::{CiliumVersion, MatchPolicy},
};

/// The agent's side of the service maps.
#[derive(Debug)]
pub struct ControlPlane {
    version: CiliumVersion,
    /// Protocol of the service keys: 17, or 0 for any.
    pub service_protocol: u8,
    /// All services.
    pub services: Vec<ServicePlan>,
    next_backend: u32,
    next_rev_nat: u16,
}

const UDP: u8 = 17;
/// `flags2` of a slot that is never selected, as 1.17 writes it.
const SLOT_INACTIVE: u8 = 0x40;

impl ControlPlane {
    /// An agent of this version that knows no service. The first service gets rev_nat_index 7, the first backend id 1.
    #[must_use]
    pub fn new(version: CiliumVersion) -> Self {
        Self {
            version,
            service_protocol: version.service_protocol(),
            services: Vec::new(),
            next_backend: 1,
            next_rev_nat: 7,
        }
    }

    /// Plans a service; it reaches the maps with [`Self::sync`].
    pub fn add_service(&mut self, address: IpAddr, port: u16, affinity: Option<Duration>) -> ServiceId {
        let rev_nat = self.next_rev_nat;
        self.next_rev_nat += 1;
        self.services.push(ServicePlan {
            address,
            port,
            rev_nat,
            affinity,
            backends: Vec::new(),
            match_policy: self.version.match_policy(),
            removed: Vec::new(),
            written_slots: 0,
        });
        ServiceId(self.services.len() - 1)
    }

    /// Plans a backend and says its id.
    pub fn add_backend(&mut self, service: ServiceId, address: IpAddr, port: u16) -> u32 {
        let id = self.next_backend;
        self.next_backend += 1;
        self.services[service.0].backends.push(Backend {
            id,
            address,
            port,
            state: BackendState::Active,
            serving: true,
        });
        id
    }

    /// Gives the next backend this id, as on a node where the agent has given out many.
    ///
    /// # Panics
    ///
    /// When the id may be in use.
    pub fn skip_ids_to(&mut self, id: u32) {
        assert!(id >= self.next_backend, "backend id {id} was given out already");
        self.next_backend = id;
    }

    /// The plan of a service.
    #[must_use]
    pub fn service(&self, service: ServiceId) -> &ServicePlan {
        &self.services[service.0]
    }

    /// The plan of a service, to change.
    pub fn service_mut(&mut self, service: ServiceId) -> &mut ServicePlan {
        &mut self.services[service.0]
    }

    /// The services of which `address` is a backend, and its id in each.
    #[must_use]
    pub fn backends_at(&self, address: IpAddr) -> Vec<(ServiceId, u32)> {
        let services = self.services.iter().enumerate();
        services
            .flat_map(|(index, plan)| {
                plan.backends.iter().filter(|b| b.address == address).map(move |b| (ServiceId(index), b.id))
            })
            .collect()
    }

    /// Plans a state.
    ///
    /// # Errors
    ///
    /// When the service has no such backend.
    pub fn set_state(&mut self, service: ServiceId, id: u32, state: BackendState) -> Result<()> {
        self.backend_mut(service, id)?.state = state;
        Ok(())
    }

    /// Plans what this version's agent makes of an endpoint's conditions. One that comes back after it was removed gets
    /// another id.
    pub fn set_endpoint(&mut self, service: ServiceId, address: IpAddr, port: u16, endpoint: Endpoint) {
        let outcome = endpoint.outcome(self.version);
        let sticky = self.version.minor() <= 17;
        let backends = &mut self.services[service.0].backends;
        let position = backends.iter().position(|backend| backend.address == address);
        match (position, outcome) {
            (Some(index), Some(state)) => {
                let backend = &mut backends[index];
                // Up to 1.17 a backend that once terminated does not become active again while it exists.
                if !(sticky && backend.state == BackendState::Terminating) {
                    backend.state = state;
                }
                backend.serving = endpoint != Endpoint::TerminatingNotServing;
            }
            (Some(index), None) => {
                let backend = backends.remove(index);
                self.services[service.0].removed.push(backend);
            }
            (None, Some(state)) => {
                let id = self.add_backend(service, address, port);
                if let Some(backend) =
                    self.services[service.0].backends.iter_mut().find(|backend| backend.id == id)
                {
                    backend.state = state;
                }
            }
            (None, None) => {}
        }
    }

    /// Plans the removal of a backend: its endpoint has left the slices.
    ///
    /// # Errors
    ///
    /// When the service has no such backend.
    pub fn remove_backend(&mut self, service: ServiceId, id: u32) -> Result<()> {
        let plan = &mut self.services[service.0];
        let index = plan.backends.iter().position(|backend| backend.id == id);
        let index = index.with_context(|| format!("service {service:?} has no backend {id}"))?;
        let backend = plan.backends.remove(index);
        plan.removed.push(backend);
        Ok(())
    }

    /// Writes everything that is planned, in the order of this version's agent.
    ///
    /// # Errors
    ///
    /// When a map is missing or refuses.
    pub fn sync(&mut self, maps: &CiliumMaps) -> Result<()> {
        for index in 0..self.services.len() {
            let service = ServiceId(index);
            self.write_states(maps, service)?;
            // Since 1.18 the master comes last, so that its count never runs ahead of the matches.
            if self.version.minor() >= 18 {
                self.write_slots(maps, service)?;
                self.write_matches(maps, service)?;
                self.write_master(maps, service)?;
            } else {
                self.write_slots(maps, service)?;
                self.write_master(maps, service)?;
                self.write_matches(maps, service)?;
            }
            self.delete_removed(maps, service)?;
        }
        Ok(())
    }

    /// Writes the backends map only: states are new, slots, count and matches still old.
    ///
    /// # Errors
    ///
    /// When a map is missing or refuses.
    pub fn write_states(&self, maps: &CiliumMaps, service: ServiceId) -> Result<()> {
        let plan = self.service(service);
        let map = maps.get(plan.family().names().backends)?;
        plan.backends.iter().try_for_each(|backend| self.write_backend(map, backend))
    }

    /// Writes slots 1 to count and those behind them.
    ///
    /// # Errors
    ///
    /// When a map is missing or refuses.
    pub fn write_slots(&mut self, maps: &CiliumMaps, service: ServiceId) -> Result<()> {
        let plan = self.service(service);
        let map = maps.get(plan.family().names().services)?;
        let (selectable, others) = plan.slots();
        let total = (selectable.len() + others.len()) as u16;
        for (index, id) in selectable.iter().chain(&others).enumerate() {
            // Up to 1.16 only the master has flags, 1.17 marks what is not selected, and later the master's are repeated.
            let (flags, flags2) = match self.version.minor() {
                ..=16 => (0, 0),
                17 => (0, if index >= selectable.len() { SLOT_INACTIVE } else { 0 }),
                _ => (plan.master_flags(), 0),
            };
            let value = Service {
                word: *id,
                count: 0,
                rev_nat_index: plan.rev_nat.to_be_bytes(),
                flags,
                flags2,
                qcount: 0,
            };
            self.write_service(map, plan, index as u16 + 1, &value)?;
        }
        for slot in total + 1..=plan.written_slots {
            self.delete_service(map, plan, slot)?;
        }
        self.service_mut(service).written_slots = total;
        Ok(())
    }

    /// Writes the master: count, flags, affinity timeout; and the reverse NAT entry.
    ///
    /// # Errors
    ///
    /// When a map is missing or refuses.
    pub fn write_master(&self, maps: &CiliumMaps, service: ServiceId) -> Result<()> {
        let plan = self.service(service);
        let (selectable, others) = plan.slots();
        let reverse = maps.get(plan.family().reverse_nat())?;
        let (index, port) = (plan.rev_nat.to_be_bytes(), plan.port.to_be_bytes());
        match plan.address {
            IpAddr::V4(address) => {
                reverse.insert_if_other(&index, &ReverseNat4 { address: address.octets(), port })?;
            }
            IpAddr::V6(address) => {
                reverse.insert_if_other(&index, &ReverseNat6 { address: address.octets(), port })?;
            }
        }
        let value = Service {
            word: plan.affinity.map_or(0, |timeout| timeout.as_secs() as u32),
            count: selectable.len() as u16,
            rev_nat_index: index,
            flags: plan.master_flags(),
            flags2: 0,
            qcount: if self.version.minor() >= 17 { others.len() as u16 } else { 0 },
        };
        self.write_service(maps.get(plan.family().names().services)?, plan, 0, &value)
    }

    /// Writes and deletes affinity matches.
    ///
    /// # Errors
    ///
    /// When a map is missing or refuses.
    pub fn write_matches(&self, maps: &CiliumMaps, service: ServiceId) -> Result<()> {
        let plan = self.service(service);
        let Ok(map) = maps.get(AFFINITY_MATCH) else { return Ok(()) };
        if plan.affinity.is_none() {
            return Ok(());
        }
        for backend in &plan.backends {
            let keep = match backend.state {
                BackendState::Active => true,
                // From 1.19 on the agent steps over these before it comes to the match.
                BackendState::Maintenance => continue,
                BackendState::Terminating | BackendState::Quarantined => {
                    plan.match_policy == MatchPolicy::Kept
                }
            };
            if keep {
                map.insert_if_other(&plan.match_key(backend.id), &0u8)?;
            } else {
                map.remove(&plan.match_key(backend.id))?;
            }
        }
        Ok(())
    }

    /// Deletes what removed backends leave behind; nothing in conntrack.
    ///
    /// # Errors
    ///
    /// When a map is missing or refuses.
    pub fn delete_removed(&mut self, maps: &CiliumMaps, service: ServiceId) -> Result<()> {
        let plan = &mut self.services[service.0];
        for backend in std::mem::take(&mut plan.removed) {
            maps.get(plan.family().names().backends)?.remove(&backend.id)?;
            if let Ok(map) = maps.get(AFFINITY_MATCH) {
                map.remove(&plan.match_key(backend.id))?;
            }
        }
        Ok(())
    }

    /// Deletes the service itself from the maps and empties its plan.
    ///
    /// # Errors
    ///
    /// When a map is missing or refuses.
    pub fn delete_service_entries(&mut self, maps: &CiliumMaps, service: ServiceId) -> Result<()> {
        let plan = self.service(service);
        let map = maps.get(plan.family().names().services)?;
        for slot in 0..=plan.written_slots {
            self.delete_service(map, plan, slot)?;
        }
        maps.get(plan.family().reverse_nat())?.remove(&plan.rev_nat.to_be_bytes())?;
        let plan = self.service_mut(service);
        plan.written_slots = 0;
        let backends = std::mem::take(&mut plan.backends);
        plan.removed.extend(backends);
        self.delete_removed(maps, service)
    }

    fn write_backend(&self, map: &RawMap, backend: &Backend) -> Result<()> {
        let port = backend.port.to_be_bytes();
        let proto = if self.service_protocol == UDP { UDP } else { 0 };
        let state = backend.state as u8;
        match backend.address {
            IpAddr::V4(address) => {
                let address = address.octets();
                map.insert_if_other(
                    &backend.id,
                    &Backend4 { address, port, proto, state, cluster_id: 0, zone: 0, pad: 0 },
                )
            }
            IpAddr::V6(address) => {
                let address = address.octets();
                map.insert_if_other(
                    &backend.id,
                    &Backend6 { address, port, proto, state, cluster_id: 0, zone: 0, pad: 0 },
                )
            }
        }
    }

    fn write_service(&self, map: &RawMap, plan: &ServicePlan, slot: u16, value: &Service) -> Result<()> {
        match plan.address {
            IpAddr::V4(_) => map.insert_if_other(&self.key4(plan, slot)?, value),
            IpAddr::V6(_) => map.insert_if_other(&self.key6(plan, slot)?, value),
        }
    }

    fn delete_service(&self, map: &RawMap, plan: &ServicePlan, slot: u16) -> Result<()> {
        match plan.address {
            IpAddr::V4(_) => map.remove(&self.key4(plan, slot)?)?,
            IpAddr::V6(_) => map.remove(&self.key6(plan, slot)?)?,
        };
        Ok(())
    }

    fn key4(&self, plan: &ServicePlan, backend_slot: u16) -> Result<ServiceKey4> {
        let IpAddr::V4(address) = plan.address else { anyhow::bail!("{} is not IPv4", plan.address) };
        let (address, dport) = (address.octets(), plan.port.to_be_bytes());
        Ok(ServiceKey4 { address, dport, backend_slot, proto: self.service_protocol, scope: 0, pad: [0; 2] })
    }

    fn key6(&self, plan: &ServicePlan, backend_slot: u16) -> Result<ServiceKey6> {
        let IpAddr::V6(address) = plan.address else { anyhow::bail!("{} is not IPv6", plan.address) };
        let (address, dport) = (address.octets(), plan.port.to_be_bytes());
        Ok(ServiceKey6 { address, dport, backend_slot, proto: self.service_protocol, scope: 0, pad: [0; 2] })
    }

    fn backend_mut(&mut self, service: ServiceId, id: u32) -> Result<&mut Backend> {
        let backend = self.services[service.0].backends.iter_mut().find(|backend| backend.id == id);
        backend.with_context(|| format!("service {service:?} has no backend {id}"))
    }
}
