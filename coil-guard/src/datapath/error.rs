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
    /// The kernel's verifier refuses the program.
    #[error(
        "the kernel ({kernel}) refuses the program: {source}; its verifier says: {verifier}. Pods whose program is attached \
         already stay guarded by that one, others are not guarded: go back to the version before, see that the agent has the \
         capabilities of its manifest, and report this with the output of `coil-guard check`"
    )]
    Refused {
        /// Its release.
        kernel: String,
        /// The last lines of the verifier's log.
        verifier: String,
        /// What the system call answered.
        source: io::Error,
    },
}

/// The verifier tells why in its last lines.
const VERIFIER_LINES: usize = 3;

/// What the verifier went through, and for how long: another each time, so that a refusal would be told again and again.
fn is_statistics(line: &str) -> bool {
    line.is_empty()
        || ["processed ", "verification time ", "stack depth "].iter().any(|start| line.starts_with(start))
}

impl DatapathError {
    pub(crate) fn refused(source: io::Error, log: &str) -> Self {
        let name = nix::sys::utsname::uname();
        let release = name.as_ref().map(|name| name.release().to_string_lossy().into_owned());
        let lines: Vec<_> = log.lines().map(str::trim).filter(|line| !is_statistics(line)).collect();
        let last = &lines[lines.len().saturating_sub(VERIFIER_LINES)..];
        Self::Refused {
            kernel: format!("Linux {}", release.as_deref().unwrap_or("of unknown release")),
            verifier: if last.is_empty() { "nothing".to_owned() } else { last.join("; ") },
            source,
        }
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_is_one_sentence_with_the_verifiers_last_words() {
        let log = "0: (bf) r6 = r1\n1: x\n2: y\n\nR3 pointer arithmetic prohibited\nverification time 4 usec\nprocessed 7 insns (limit 1000000)\n";
        let text = DatapathError::refused(io::Error::from_raw_os_error(libc::EACCES), log).to_string();
        assert!(!text.contains('\n') && !text.contains("r6 = r1") && !text.contains("usec"), "{text}");
        for part in ["Linux ", "Permission denied", "y; R3 pointer arithmetic prohibited. Pods", "check"] {
            assert!(text.contains(part), "{part:?} is not in {text}");
        }
        let text = DatapathError::refused(io::Error::from_raw_os_error(libc::E2BIG), "").to_string();
        assert!(text.contains("verifier says: nothing"), "{text}");
    }
}
