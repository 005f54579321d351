//! The five watches: where each is, what narrows it, and how its objects are read.

use serde::de::DeserializeOwned;

use crate::index::{
    self, ApiEgress, ApiPod, ApiService, ApiSlice, Change, Egress, EgressPod, LocalPod, Malformed,
    ObjectName, Service, Slice, Update,
};

/// Coil puts these labels on an Egress's Deployment, pods and Service, and slices inherit the Service's. They keep
/// everything else in the cluster out of the watches; the joins do not rely on them.
const EGRESS_LABELS: &str = "app.kubernetes.io/name=coil,app.kubernetes.io/component=egress";

/// A watch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// Egresses, all of them.
    Egress,
    /// Services of Egresses.
    Service,
    /// EndpointSlices of these Services.
    EndpointSlice,
    /// Pods of Egresses, anywhere.
    EgressPod,
    /// Pods of this node.
    LocalPod,
}

impl Kind {
    /// All of them.
    pub const ALL: [Self; 5] =
        [Self::Egress, Self::Service, Self::EndpointSlice, Self::EgressPod, Self::LocalPod];

    /// The value of the metrics' `watch` label.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Egress => "egress",
            Self::Service => "service",
            Self::EndpointSlice => "endpointslice",
            Self::EgressPod => "egress_pod",
            Self::LocalPod => "local_pod",
        }
    }

    /// Kind of its objects.
    #[must_use]
    pub const fn object(self) -> &'static str {
        match self {
            Self::Egress => "Egress",
            Self::Service => "Service",
            Self::EndpointSlice => "EndpointSlice",
            Self::EgressPod | Self::LocalPod => "Pod",
        }
    }

    /// Path of the collection over all namespaces.
    #[must_use]
    pub const fn path(self) -> &'static str {
        match self {
            Self::Egress => "/apis/coil.cybozu.com/v2/egresses",
            Self::Service => "/api/v1/services",
            Self::EndpointSlice => "/apis/discovery.k8s.io/v1/endpointslices",
            Self::EgressPod | Self::LocalPod => "/api/v1/pods",
        }
    }

    /// The resource, as an RBAC rule names it.
    #[must_use]
    pub const fn resource(self) -> &'static str {
        match self {
            Self::Egress => "egresses.coil.cybozu.com",
            Self::Service => "services",
            Self::EndpointSlice => "endpointslices.discovery.k8s.io",
            Self::EgressPod | Self::LocalPod => "pods",
        }
    }

    /// Label and field selector.
    #[must_use]
    pub fn selectors(self, node: &str) -> (Option<String>, Option<String>) {
        match self {
            Self::Egress => (None, None),
            Self::Service | Self::EndpointSlice | Self::EgressPod => (Some(EGRESS_LABELS.to_owned()), None),
            Self::LocalPod => (None, Some(format!("spec.nodeName={node}"))),
        }
    }
}

/// How the objects of a watch are read.
pub(super) trait Watched: 'static {
    const KIND: Kind;
    /// As the API has it.
    type Api: DeserializeOwned + index::Object;
    /// As the index has it. The API's object lives no longer than it takes to read it: memory holds only this.
    type Object: 'static;

    /// `None` is an object that is of no interest.
    fn parse(object: &Self::Api, fou_port: u16) -> Result<(ObjectName, Option<Self::Object>), Malformed>;
    fn update(change: Change<Self::Object>) -> Update;
}

macro_rules! watched {
    ($($watch:ident: $kind:ident, $api:ty => $update:ident($object:ty), $parse:expr;)+) => { $(
        pub(super) struct $watch;

        impl Watched for $watch {
            const KIND: Kind = Kind::$kind;
            type Api = $api;
            type Object = $object;

            fn parse(object: &$api, fou_port: u16) -> Result<(ObjectName, Option<$object>), Malformed> {
                $parse(object, fou_port)
            }

            fn update(change: Change<$object>) -> Update {
                Update::$update(change)
            }
        }
    )+ };
}

fn some<T>((name, object): (ObjectName, T)) -> (ObjectName, Option<T>) {
    (name, Some(object))
}

watched! {
    EgressWatch: Egress, ApiEgress => Egress(Egress), |object, _| index::egress(object).map(some);
    ServiceWatch: Service, ApiService => Service(Service), |object, port| index::service(object, port).map(some);
    SliceWatch: EndpointSlice, ApiSlice => Slice(Slice), |object, port| index::slice(object, port).map(some);
    EgressPodWatch: EgressPod, ApiPod => EgressPod(EgressPod), |object, _| index::egress_pod(object).map(some);
    LocalPodWatch: LocalPod, ApiPod => LocalPod(LocalPod), |object, _| index::local_pod(object);
}
