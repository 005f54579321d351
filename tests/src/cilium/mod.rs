//! Cilium on a node: its maps, its agent's way of writing them, and the model of its load balancer.

pub mod control_plane;
pub mod maps;
pub mod model;
pub mod raw_map;
pub mod version;

pub use self::{
    control_plane::{BackendState, ControlPlane, ServiceId},
    maps::{Change, CiliumMaps, Dump, IpFamily, MapOptions, hex},
    model::{AttachKind, Model, Policy},
    raw_map::{Expect, MapKind, MapShape, RawMap},
    version::{CiliumVersion, DEFAULT_AFFINITY, MatchPolicy},
};
