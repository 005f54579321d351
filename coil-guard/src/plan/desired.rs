//! The desired datapath: plain data, made by the plan, carried out by the datapath.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    net::IpAddr,
    sync::Arc,
};

use crate::clock::Monotonic;

/// Namespace and name of an Egress (and of its Service). Shared texts: there are tens of thousands of names, and every
/// mark has one.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EgressName {
    /// Kubernetes namespace.
    pub namespace: Arc<str>,
    /// Object name.
    pub name: Arc<str>,
}

impl fmt::Display for EgressName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// UID of a pod.
pub type PodUid = String;

/// What the guard does for an Egress. There is no `Off`: an Egress that is off is not in [`Desired`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Mode {
    /// Count and report only.
    Audit,
    /// Every flow leaves a leaving backend with its next packet.
    Reset,
    /// New inner connections leave at once, existing ones stay while the old pod serves.
    Drain,
    /// A flow on a leaving backend gets another outer source port, so that Cilium chooses anew.
    Rewrite,
}

impl Mode {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Audit, Self::Reset, Self::Drain, Self::Rewrite];

    /// Whether it writes to Cilium's maps.
    #[must_use]
    pub const fn writes(self) -> bool {
        matches!(self, Self::Reset | Self::Drain)
    }

    /// As in the annotation.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Audit => "audit",
            Self::Reset => "reset",
            Self::Drain => "drain",
            Self::Rewrite => "rewrite",
        }
    }
}

/// A ClusterIP and FoU port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ServiceAddress {
    /// ClusterIP.
    pub address: IpAddr,
    /// UDP port, host order.
    pub port: u16,
}

/// A guarded service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GuardedService {
    /// The Egress that it belongs to.
    pub egress: EgressName,
    /// What to do.
    pub mode: Mode,
    /// `spec.fouSourcePortAuto`.
    pub sport_auto: bool,
}

/// What the agent says of a backend address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MarkState {
    /// A ready endpoint.
    Ready,
    /// Its endpoint is not ready.
    NotReady,
    /// Its pod is being deleted.
    Leaving,
    /// Its address has left the Service's slices.
    Gone,
}

/// Until when a backend keeps the flows that it has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keep {
    /// Not at all.
    No,
    /// Until then.
    Until(Monotonic),
    /// No end.
    ForEver,
}

/// The mark of a backend address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mark {
    /// The Egress that the backend belongs to.
    pub egress: EgressName,
    /// Its state.
    pub state: MarkState,
    /// Ignored for `Ready`.
    pub keep: Keep,
    /// When the agent first saw this state.
    pub since: Monotonic,
}

/// Why a client pod of this node is in the plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Want {
    /// Its annotation names a guarded Egress: attach.
    Attached,
    /// It is attached and no longer names a guarded Egress: stay attached as long as a FoU device of the pod has one of
    /// [`Desired::services`] as its remote, then detach.
    WhileTunnelled,
}

/// A client pod of this node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientPod {
    /// Kubernetes namespace.
    pub namespace: String,
    /// Object name.
    pub name: String,
    /// Pod addresses; at most one of each family is used.
    pub addresses: BTreeSet<IpAddr>,
    /// Why.
    pub want: Want,
    /// The Egresses that its annotations name and that are guarded.
    pub egresses: BTreeSet<EgressName>,
    /// None of the guarded Egresses that it may have a tunnel to is in a mode that writes to Cilium's maps.
    pub read_only: bool,
    /// It names, or named, an Egress in mode rewrite whose replies can be made symmetric.
    pub symmetric: bool,
}

/// A pod of this node that belongs to an Egress in mode rewrite, and can make its replies symmetric.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LocalEgressPod {
    /// Kubernetes namespace.
    pub namespace: String,
    /// Object name.
    pub name: String,
    /// Pod addresses; at most one of each family is used.
    pub addresses: BTreeSet<IpAddr>,
    /// Its Egress.
    pub egress: EgressName,
}

/// What an earlier agent had marked an address as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Recovered {
    /// Its state.
    pub state: MarkState,
    /// Since when.
    pub since: Monotonic,
}

/// The desired datapath of this node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Desired {
    /// Whether every watch is established and listed: only then may marks and heartbeat be renewed.
    pub complete: bool,
    /// Services to guard.
    pub services: BTreeMap<ServiceAddress, GuardedService>,
    /// Marks to hold.
    pub marks: BTreeMap<IpAddr, Mark>,
    /// Pods to be attached, by UID. A pod that is not here is detached.
    pub pods: BTreeMap<PodUid, ClientPod>,
    /// Egress pods of this node that are to send symmetric replies, by UID. One that is not here is detached.
    pub egress_pods: BTreeMap<PodUid, LocalEgressPod>,
    /// When a mark changes by the passing of time alone.
    pub next_change: Option<Monotonic>,
}

impl Desired {
    /// Whether there is anything to do on this node.
    #[must_use]
    pub fn is_guarding(&self) -> bool {
        !self.services.is_empty() || !self.egress_pods.is_empty()
    }
}

/// What differs between a plan and the one before it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Changes {
    /// Addresses with another mark, with the one that they had.
    pub marks: BTreeMap<IpAddr, Option<Mark>>,
    /// What the services were, if they are others now.
    pub services: Option<BTreeMap<ServiceAddress, GuardedService>>,
    /// Whether client pods or egress pods are others.
    pub pods: bool,
}

impl Changes {
    /// From no plan at all to this one.
    #[must_use]
    pub fn all(desired: &Desired) -> Self {
        Self {
            marks: desired.marks.keys().map(|address| (*address, None)).collect(),
            services: Some(BTreeMap::new()),
            pods: true,
        }
    }

    /// Whether it is the same plan.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.marks.is_empty() && self.services.is_none() && !self.pods
    }
}

/// What was found in Cilium's maps.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CiliumView {
    /// The backend addresses in the slots of each service that was looked at and that Cilium knows, selectable or not.
    pub slots: BTreeMap<ServiceAddress, BTreeSet<IpAddr>>,
    /// Of the addresses that were asked for, those that are no backend of Cilium's any more, in a slot or not: marks of them can
    /// be dropped.
    pub forgotten: BTreeSet<IpAddr>,
}
