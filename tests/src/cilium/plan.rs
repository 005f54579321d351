//! What the agent knows of services and backends.

use std::{net::IpAddr, time::Duration};

use coil_guard_common::cilium::{AffinityMatchKey, SERVICE_FLAG_AFFINITY};

use super::{
    maps::IpFamily,
    version::{CiliumVersion, MatchPolicy},
};

/// Conditions of an endpoint in its slice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Endpoint {
    /// Ready.
    Ready,
    /// Terminating, and still serving.
    TerminatingServing,
    /// Terminating, and not serving any more.
    TerminatingNotServing,
    /// Neither ready nor terminating.
    NotReady,
    /// In no slice.
    Gone,
}

impl Endpoint {
    /// What the agent of a version makes of it; `None`: it removes the backend.
    #[must_use]
    pub const fn outcome(self, version: CiliumVersion) -> Option<BackendState> {
        match self {
            Self::Ready => Some(BackendState::Active),
            Self::TerminatingServing => Some(BackendState::Terminating),
            Self::TerminatingNotServing if version.keeps_not_ready() => Some(BackendState::Terminating),
            Self::NotReady if version.keeps_not_ready() => Some(BackendState::Maintenance),
            Self::TerminatingNotServing | Self::NotReady | Self::Gone => None,
        }
    }
}

/// Backend state, as its byte in the backends map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum BackendState {
    /// Takes new flows.
    Active = 0,
    /// Its pod is terminating.
    Terminating = 1,
    /// Failed a health check.
    Quarantined = 2,
    /// Not ready.
    Maintenance = 3,
}

/// A service of one family; an index into [`ControlPlane::services`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ServiceId(pub usize);

/// A backend as the agent knows it.
#[derive(Clone, Debug)]
pub struct Backend {
    /// Key in the backends map; unique over both families.
    pub id: u32,
    /// Pod address.
    pub address: IpAddr,
    /// Port, host order.
    pub port: u16,
    /// State.
    pub state: BackendState,
    /// Whether it may be selected while it terminates and no backend is active.
    pub serving: bool,
}

/// A service of one family as the agent knows it.
#[derive(Clone, Debug)]
pub struct ServicePlan {
    /// ClusterIP.
    pub address: IpAddr,
    /// Port, host order.
    pub port: u16,
    /// rev_nat_index, host order.
    pub rev_nat: u16,
    /// ClientIP affinity and its timeout.
    pub affinity: Option<Duration>,
    /// Backends, by id.
    pub backends: Vec<Backend>,
    /// What becomes of the match of a terminating backend.
    pub match_policy: MatchPolicy,
    pub(super) removed: Vec<Backend>,
    pub(super) written_slots: u16,
}

impl ServicePlan {
    /// Family of its address.
    #[must_use]
    pub fn family(&self) -> IpFamily {
        if self.address.is_ipv4() { IpFamily::V4 } else { IpFamily::V6 }
    }

    pub(super) fn master_flags(&self) -> u8 {
        if self.affinity.is_some() { SERVICE_FLAG_AFFINITY } else { 0 }
    }

    pub(super) fn match_key(&self, backend_id: u32) -> AffinityMatchKey {
        AffinityMatchKey { backend_id, rev_nat_index: self.rev_nat.to_be_bytes(), pad: [0; 2] }
    }

    /// Ids in slots 1 to count, and in those behind them.
    pub(super) fn slots(&self) -> (Vec<u32>, Vec<u32>) {
        let in_state = |state| self.backends.iter().filter(move |backend| backend.state == state);
        let ids = |backends: &mut dyn Iterator<Item = &Backend>| {
            backends.map(|backend| backend.id).collect::<Vec<_>>()
        };
        let active = ids(&mut in_state(BackendState::Active));
        let terminating = || in_state(BackendState::Terminating);
        if active.is_empty() {
            // Better a pod that terminates than none.
            let fallback = ids(&mut terminating().filter(|backend| backend.serving));
            let others = terminating().filter(|backend| !backend.serving);
            return (fallback, ids(&mut others.chain(in_state(BackendState::Quarantined))));
        }
        (active, ids(&mut terminating().chain(in_state(BackendState::Quarantined))))
    }
}
