//! What the index keeps of each object: the few fields that decide something.

use std::{collections::BTreeSet, fmt, net::IpAddr, time::Duration};

use super::{Addresses, Uid};
use crate::plan::{EgressName, Mode, PodUid};

/// Namespace and name of any object. An Egress and its Service share theirs, so one type serves all kinds.
pub type ObjectName = EgressName;

/// A mode that was asked for, or `off`.
pub type EgressMode = Option<Mode>;

/// After how long a backend that is not ready stops keeping its flows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotReadyAfter {
    /// This long after the agent saw it; zero means at once.
    After(Duration),
    /// As long as Cilium itself keeps them.
    Never,
}

impl Default for NotReadyAfter {
    /// FoU and NAT are kernel state: a pod that fails its probe usually still forwards, so a short flap moves nothing.
    fn default() -> Self {
        Self::After(Duration::from_secs(30))
    }
}

/// An annotation whose value was not understood, for a person to read.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AnnotationProblem {
    /// The annotation's key.
    pub key: &'static str,
    /// Its value as found.
    pub value: String,
    /// What is allowed, and what is done instead.
    pub advice: &'static str,
}

impl fmt::Display for AnnotationProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { key, value, advice } = self;
        write!(f, "annotation {key}: {value:?} is not understood: {advice}")
    }
}

/// An Egress.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Egress {
    /// Its UID, for events about it.
    pub uid: String,
    /// `coil-guard.io/mode`; `None` when there is no such annotation, `Some(None)` for off or an unknown value.
    pub mode: Option<EgressMode>,
    /// `coil-guard.io/drain-timeout`.
    pub drain_timeout: Option<Duration>,
    /// `coil-guard.io/not-ready-after`.
    pub not_ready_after: Option<NotReadyAfter>,
    /// `spec.fouSourcePortAuto`.
    pub sport_auto: bool,
    /// Whether the template gives the container `egress` a preStop hook. Without one a drain lasts about 5 s.
    pub pre_stop: bool,
    /// `spec.template.spec.terminationGracePeriodSeconds`.
    pub grace: Option<Duration>,
    /// Annotations that were not understood.
    pub problems: Vec<AnnotationProblem>,
}

/// A Service that may be an Egress's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Service {
    /// ClusterIPs, one or two. A headless Service has none.
    pub cluster_ips: BTreeSet<IpAddr>,
}

/// An EndpointSlice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Slice {
    /// The Service that it belongs to; same namespace.
    pub service: ObjectName,
    /// Empty when the slice does not serve the FoU port.
    pub endpoints: Vec<Endpoint>,
}

/// An endpoint of a slice, its conditions with the API's defaults applied.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Endpoint {
    /// Its addresses, of the slice's family.
    pub addresses: Addresses,
    /// UID of the pod behind it, if it is a pod.
    pub pod: Option<Uid>,
    /// May get new flows.
    pub ready: bool,
    /// Passes its readiness probe, terminating or not.
    pub serving: bool,
    /// Is being deleted.
    pub terminating: bool,
}

/// A pod of an Egress, anywhere in the cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EgressPod {
    /// Its UID.
    pub uid: Uid,
    /// The Egress that its labels name.
    pub egress: Option<ObjectName>,
    /// `status.podIPs`, in order. There is one of these for each egress pod of the cluster, so it is kept small.
    pub addresses: Addresses,
    /// Phase Succeeded or Failed: never a backend, whoever uses its address now.
    pub finished: bool,
    /// Its Ready condition.
    pub ready: bool,
    /// It has a deletionTimestamp.
    pub deleting: bool,
    /// How long it may take to end: of the deletion where there is one, else of its spec.
    pub grace: Duration,
}

/// A pod of this node that is not on the host's network.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LocalPod {
    /// Its UID.
    pub uid: PodUid,
    /// `status.podIPs`.
    pub addresses: BTreeSet<IpAddr>,
    /// Phase Succeeded or Failed: its address may belong to another pod by now.
    pub finished: bool,
    /// It has a deletionTimestamp.
    pub deleting: bool,
    /// Seconds since the epoch, to tell which of two pods with one address is the newer.
    pub created: i64,
    /// The Egresses that its annotations name.
    pub egresses: BTreeSet<EgressName>,
}

/// A change of one kind of object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change<T> {
    /// The object is now this.
    Apply(ObjectName, T),
    /// The object is no more.
    Delete(ObjectName),
    /// These are all there are. `None` stands for an object that could not be read: what was known of it stays.
    Reset(Vec<(ObjectName, Option<T>)>),
}

/// A change of any kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Update {
    /// Of an Egress.
    Egress(Change<Egress>),
    /// Of a Service.
    Service(Change<Service>),
    /// Of an EndpointSlice.
    Slice(Change<Slice>),
    /// Of an egress pod.
    EgressPod(Change<EgressPod>),
    /// Of a pod of this node.
    LocalPod(Change<LocalPod>),
}
