//! Which Cilium is modelled.

use std::{fmt, time::Duration};

/// A Cilium release line that the model follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum CiliumVersion {
    /// 1.14
    V1_14,
    /// 1.15
    V1_15,
    /// 1.16
    V1_16,
    /// 1.17
    V1_17,
    /// 1.18
    V1_18,
    /// 1.19
    V1_19,
    /// 1.20 under development
    V1_20,
}

impl CiliumVersion {
    /// All of them, oldest first.
    pub const ALL: [Self; 7] =
        [Self::V1_14, Self::V1_15, Self::V1_16, Self::V1_17, Self::V1_18, Self::V1_19, Self::V1_20];

    /// 14 to 20.
    #[must_use]
    pub const fn minor(self) -> u32 {
        14 + self as u32
    }

    /// Protocol in the keys of the service map: any up to 1.16, UDP from then on.
    #[must_use]
    pub const fn service_protocol(self) -> u8 {
        if self.minor() >= 17 { 17 } else { 0 }
    }

    /// What the agent does with the affinity match of a terminating backend.
    #[must_use]
    pub const fn match_policy(self) -> MatchPolicy {
        if self.minor() >= 18 { MatchPolicy::Dropped } else { MatchPolicy::Kept }
    }

    /// Whether a backend that is neither ready nor terminating stays in the backends map, in maintenance.
    #[must_use]
    pub const fn keeps_not_ready(self) -> bool {
        self.minor() >= 19
    }

    /// Whether the services map and the match map are read-only for programs.
    #[must_use]
    pub const fn read_only_services(self) -> bool {
        self.minor() >= 20
    }
}

impl fmt::Display for CiliumVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "1.{}", self.minor())
    }
}

/// What happens to the affinity match of a backend that starts to terminate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MatchPolicy {
    /// It stays: affinity brings new tuples back to the terminating backend.
    Kept,
    /// It goes.
    Dropped,
}

/// Kubernetes' default timeout of ClientIP affinity.
pub const DEFAULT_AFFINITY: Duration = Duration::from_secs(10_800);
