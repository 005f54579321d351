//! Cilium's maps, opened from their pins. They are checked against the known layout and never made, resized or unpinned.

mod error;

pub use error::CiliumError;
