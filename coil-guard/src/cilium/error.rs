//! Why Cilium's maps cannot be used.

use std::{fmt, path::PathBuf};

use aya::maps::MapError;

/// Type and sizes of a map.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MapShape {
    /// Kernel's name of the type, such as `LruHash`.
    pub kind: String,
    /// Bytes of a key.
    pub key_size: u32,
    /// Bytes of a value.
    pub value_size: u32,
}

impl fmt::Display for MapShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "type {}, {}-byte keys, {}-byte values", self.kind, self.key_size, self.value_size)
    }
}

/// Why Cilium's maps cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum CiliumError {
    /// No map of Cilium's for either family.
    #[error(
        "Cilium's map {path} does not exist: is Cilium running on this node, and is {directory} its map directory \
         (--cilium-maps)? Trying again"
    )]
    Missing {
        /// The first one that is missing.
        path: PathBuf,
        /// The directory.
        directory: PathBuf,
    },
    /// Some maps of a family are there and others are not.
    #[error(
        "Cilium's map {missing} does not exist although {present} does: Cilium is starting, or keeps its maps in another \
         way than the versions known (1.14 and later). Trying again"
    )]
    Incomplete {
        /// Which is not there.
        missing: PathBuf,
        /// Which is.
        present: PathBuf,
    },
    /// Cilium before 1.14.
    #[error(
        "Cilium has {found} and not {expected}: this is a Cilium before 1.14, whose backend layout coil-guard does not \
         know. Upgrade Cilium to 1.14 or later; until then nothing is attached"
    )]
    TooOld {
        /// backends_v2.
        found: PathBuf,
        /// backends_v3.
        expected: PathBuf,
    },
    /// A map has another layout.
    #[error(
        "Cilium's map {path} has another layout than the versions known (1.14 to 1.20): found {found}, expected {expected}. \
         Nothing is attached; look for a coil-guard release that knows this Cilium version"
    )]
    Layout {
        /// Which map.
        path: PathBuf,
        /// Found.
        found: MapShape,
        /// Expected.
        expected: MapShape,
    },
    /// A pin could not be opened.
    #[error("cannot open Cilium's map {path}: {source}. Opening pinned maps needs CAP_BPF or CAP_SYS_ADMIN")]
    Open {
        /// Which map.
        path: PathBuf,
        /// Why not.
        source: MapError,
    },
    /// Reading a map failed.
    #[error("cannot read Cilium's map {map}: {source}")]
    Read {
        /// Which map.
        map: &'static str,
        /// Why not.
        source: MapError,
    },
}

impl CiliumError {
    /// Whether the maps are merely not there (yet), as opposed to having a layout that is not known.
    #[must_use]
    pub fn is_missing(&self) -> bool {
        matches!(self, Self::Missing { .. } | Self::Incomplete { .. } | Self::Open { .. } | Self::Read { .. })
    }
}
