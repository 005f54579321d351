//! Cilium's maps, opened from their pins. They are checked against the known layout and never made, resized or unpinned.
//!
//! * [`CiliumMaps`]: opening and checking;
//! * [`view`]: what they hold of the guarded services;
//! * [`probe`]: how this Cilium balances them;
//! * [`current`]: where their clients and backends stand now.

mod current;
mod error;
mod maps;
mod probe;
mod view;

pub use current::{Current, CurrentBackend, CurrentService, Sought, current, state_name};
pub use error::{CiliumError, MapShape};
pub use maps::{CiliumMaps, MapSpec, OpenMap, Role, SPEC_MATCH, SPECS4, SPECS6, specs};
pub(crate) use maps::{is_not_found, shape_of};
pub use probe::{AffinityMatch, Probe, ServiceProbe, probe};
pub use view::view;
