//! Cilium on a node: its maps, its agent's way of writing them, and the model of its load balancer.

pub mod control_plane;
pub mod maps;
pub mod model;
pub mod plan;
pub mod raw_map;
pub mod version;

pub use self::{
    control_plane::ControlPlane,
    maps::{Change, CiliumMaps, Dump, IpFamily, MapOptions, hex},
    model::{AttachKind, Model, Policy},
    plan::{BackendState, Endpoint, ServiceId},
    raw_map::{Expect, MapKind, MapShape, Raw, RawMap},
    version::{CiliumVersion, DEFAULT_AFFINITY, MatchPolicy},
};
