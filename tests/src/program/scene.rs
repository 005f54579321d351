//! One client, one guarded service, some backends: what the guard's own maps say about them.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    path::Path,
};

use anyhow::Result;
use coil_guard_common::abi::{
    AgentState, BackendMark, FOR_EVER, GuardedService, POD_HAS_IPV4, POD_HAS_IPV6, PodConfig, ServiceKey,
    core_slot, maps, mark, v4_mapped,
};

use super::{
    clock::monotonic,
    instance::{Instance, Sizes},
};
use crate::{
    cilium::{CiliumVersion, IpFamily},
    fou::FOU_PORT,
};

/// `rev_nat_index` of the scene's service, network order.
pub const REV_NAT: [u8; 2] = [0x01, 0x02];
/// Generation of the client pod.
pub const CLIENT_GENERATION: u32 = 7;
/// Index of the scene's Egress.
pub const EGRESS: u32 = 3;

const SECOND: u64 = 1_000_000_000;

/// Constants of the scene's client pod, which has an address of each family.
#[must_use]
pub fn pod_config() -> PodConfig {
    PodConfig {
        address6: Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 0x11).octets(),
        address4: [10, 0, 0, 0x11],
        flags: POD_HAS_IPV4 | POD_HAS_IPV6,
        guarded_since: 1,
        generation: CLIENT_GENERATION,
        fou_port: FOU_PORT.to_be_bytes(),
        core: core_slot::GUARD,
        pad: [0; 1],
        unmarked_drain: 5 * SECOND,
    }
}

/// Address of the backend `id`.
#[must_use]
pub fn address_of(family: IpFamily, id: u32) -> IpAddr {
    let [a, b, c, d] = id.to_be_bytes();
    match family {
        IpFamily::V4 => Ipv4Addr::new(10, 64 ^ a ^ b, c, d).into(),
        IpFamily::V6 => Ipv6Addr::from(0xfd01_u128 << 112 | u128::from(id)).into(),
    }
}

/// See the module.
#[derive(Debug)]
pub struct Scene {
    /// The program and its maps.
    pub guard: Instance,
    /// Family of the outer packets.
    pub family: IpFamily,
    /// Port of backends that are written from now on.
    pub backend_port: u16,
    pub(super) version: CiliumVersion,
    agent: AgentState,
}

impl Scene {
    /// Loads an instance for [`pod_config`], with Cilium's maps in `directory`.
    ///
    /// # Errors
    ///
    /// As [`Instance::load`].
    pub fn load(directory: &Path, version: CiliumVersion, sizes: Sizes) -> Result<Self> {
        Self::load_for(directory, version, sizes, &pod_config())
    }

    /// Loads an instance for another pod.
    ///
    /// # Errors
    ///
    /// As [`Instance::load`].
    pub fn load_for(
        directory: &Path,
        version: CiliumVersion,
        sizes: Sizes,
        config: &PodConfig,
    ) -> Result<Self> {
        Ok(Self::new(Instance::load(directory, version, config, sizes)?, version))
    }

    /// A scene on an instance that was loaded over the maps of `version`.
    #[must_use]
    pub fn new(guard: Instance, version: CiliumVersion) -> Self {
        let agent = AgentState { heartbeat_until: 0, only_ready: 0 };
        Self { guard, family: IpFamily::V4, backend_port: FOU_PORT, version, agent }
    }

    /// Starts anew: the service guarded in `mode` by a living agent, backends 1 and 2 active, ready and in the slots, no
    /// affinity, no entry.
    ///
    /// # Errors
    ///
    /// When a map cannot be written.
    pub fn begin(&mut self, family: IpFamily, mode: u8) -> Result<()> {
        self.guard.clear()?;
        self.family = family;
        self.backend_port = FOU_PORT;
        // No mark says otherwise yet.
        self.agent.only_ready = 1;
        self.agent_alive(true)?;
        self.guarded(mode, 0)?;
        self.service(&[1, 2], false)?;
        for id in [1, 2] {
            self.backend(id, 0)?;
            self.mark(id, mark::READY, FOR_EVER, 0)?;
        }
        Ok(())
    }

    /// The client pod's address.
    #[must_use]
    pub fn client(&self) -> IpAddr {
        let config = pod_config();
        match self.family {
            IpFamily::V4 => config.address4.into(),
            IpFamily::V6 => config.address6.into(),
        }
    }

    /// The service's ClusterIP.
    #[must_use]
    pub fn cluster_ip(&self) -> IpAddr {
        match self.family {
            IpFamily::V4 => Ipv4Addr::new(10, 96, 0, 10).into(),
            IpFamily::V6 => Ipv6Addr::new(0xfd96, 0, 0, 0, 0, 0, 0, 10).into(),
        }
    }

    /// Whether the agent's heartbeat is fresh.
    ///
    /// # Errors
    ///
    /// When the map cannot be written.
    pub fn agent_alive(&mut self, alive: bool) -> Result<()> {
        let heartbeat_until = if alive { monotonic() + 3600 * SECOND } else { 1 };
        self.set_agent(AgentState { heartbeat_until, ..self.agent })
    }

    fn set_agent(&mut self, state: AgentState) -> Result<()> {
        self.agent = state;
        self.guard.set_agent(state)
    }

    /// Guards the service in `mode` with `flags`.
    ///
    /// # Errors
    ///
    /// When the map cannot be written.
    pub fn guarded(&mut self, mode: u8, flags: u8) -> Result<()> {
        self.guarded_until(mode, flags, FOR_EVER, 1)
    }

    /// Guards the service until a time, its flows remembered since another.
    ///
    /// # Errors
    ///
    /// When the map cannot be written.
    pub fn guarded_until(&mut self, mode: u8, flags: u8, expires_at: u64, tracked_since: u64) -> Result<()> {
        let key =
            ServiceKey { address: mapped(self.cluster_ip()), port: FOU_PORT.to_be_bytes(), pad: [0; 2] };
        let value = GuardedService { expires_at, tracked_since, egress: EGRESS, mode, flags, pad: [0; 2] };
        self.guard.set(maps::GUARDED_SERVICES, &key, &value)
    }

    /// Marks a backend as the agent does; valid for an hour.
    ///
    /// # Errors
    ///
    /// When the map cannot be written.
    pub fn mark(&mut self, id: u32, state: u8, keep_until: u64, since: u64) -> Result<()> {
        let valid_until = monotonic() + 3600 * SECOND;
        let value = BackendMark { keep_until, valid_until, since, state, pad: [0; 3], seen_before: 0 };
        if state != mark::READY {
            self.set_agent(AgentState { only_ready: 0, ..self.agent })?;
        }
        let key = mapped(address_of(self.family, id));
        self.guard.set(maps::BACKEND_MARKS, &key, &value)
    }

    /// Marks a backend as leaving since a second, keeping its flows for `seconds`.
    ///
    /// # Errors
    ///
    /// When the map cannot be written.
    pub fn leaving(&mut self, id: u32, seconds: u64) -> Result<()> {
        let now = monotonic();
        let keep_until = if seconds == 0 { 0 } else { now + seconds * SECOND };
        self.mark(id, mark::LEAVING, keep_until, now - SECOND)
    }

    /// Removes a mark.
    ///
    /// # Errors
    ///
    /// When the map cannot be written.
    pub fn unmark(&mut self, id: u32) -> Result<()> {
        let key = mapped(address_of(self.family, id));
        self.guard.unset::<[u8; 16], BackendMark>(maps::BACKEND_MARKS, &key)
    }
}

/// v4-mapped.
pub(crate) fn mapped(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(address) => v4_mapped(address.octets()),
        IpAddr::V6(address) => address.octets(),
    }
}
