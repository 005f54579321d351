//! What can go wrong with the own pins.

use std::{io, path::PathBuf};

use aya::{EbpfError, maps::MapError, pin::PinError, programs::ProgramError};

/// An error of the datapath.
#[derive(Debug, thiserror::Error)]
pub enum DatapathError {
    /// The pin directory is not on a bpffs.
    #[error(
        "the pin directory {path} is not on a bpf file system (its file system type is {found:#x}, expected 0xcafe4a11): \
         mount one there (mount -t bpf bpf /sys/fs/bpf), or mount the host's into the container"
    )]
    NotBpffs {
        /// The directory.
        path: PathBuf,
        /// `f_type` of what it is on.
        found: u64,
    },
    /// A file operation on the pin directory failed.
    #[error("cannot {action} {path}: {source}")]
    File {
        /// Verb.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// Another agent holds the pin directory.
    #[error("another agent holds {path}: stop it first")]
    Busy {
        /// The pin directory.
        path: PathBuf,
    },
    /// A pinned own map is not what this version expects.
    #[error(
        "the pinned map {path} has {found}, expected {expected}: it belongs to another build of this layout version; \
         run `coil-guard cleanup` on this node and start again"
    )]
    OwnLayout {
        /// The pin.
        path: PathBuf,
        /// Type and sizes found.
        found: String,
        /// Type and sizes expected.
        expected: String,
    },
    /// An operation on an own map failed.
    #[error("cannot {action} the map {map}: {source}")]
    Map {
        /// Verb.
        action: &'static str,
        /// Which map.
        map: &'static str,
        /// Why not.
        source: MapError,
    },
    /// A map has no room.
    #[error(
        "the map {map} is full ({max_entries} entries), so {what} is left out: start the agent with a larger {flag} \
         after `coil-guard cleanup` on this node"
    )]
    Full {
        /// Which map.
        map: &'static str,
        /// Its size.
        max_entries: u32,
        /// What could not be stored.
        what: String,
        /// The flag that sizes the map.
        flag: &'static str,
    },
    /// A pin could not be made.
    #[error("cannot pin {path}: {source}")]
    Pin {
        /// The pin.
        path: PathBuf,
        /// Why not.
        source: PinError,
    },
    /// There is no program in this build.
    #[error(
        "this build of coil-guard contains no eBPF program, because no eBPF toolchain was found when it was built: run \
         `cargo xtask setup` and build again"
    )]
    NoProgram,
    /// The object could not be loaded.
    #[error("cannot load the eBPF object: {0}")]
    Load(#[source] EbpfError),
    /// The program could not be loaded or attached.
    #[error("cannot {action} the program: {}", crate::datapath::error::chain(.source))]
    Program {
        /// Verb.
        action: &'static str,
        /// Why not.
        source: ProgramError,
    },
}

/// An error with its causes, on one line.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text.push_str(": ");
            text.push_str(&cause_text);
        }
        source = cause.source();
    }
    text
}
