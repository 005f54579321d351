//! Where the datapath lives and how large its maps are.

use std::{path::PathBuf, time::Duration};

use coil_guard_common::abi::LAYOUT_VERSION;

/// How the program is attached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AttachKind {
    /// TCX where the kernel has it (6.6 and later), clsact elsewhere.
    #[default]
    Auto,
    /// TCX only.
    Tcx,
    /// A clsact filter only.
    Clsact,
}

/// Entries of the own maps. They take effect when a map is made; one that is already pinned keeps its size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// Guarded services (one per address and port).
    pub services: u32,
    /// Backend marks (one per backend address).
    pub marks: u32,
    /// Inner flows remembered on this node.
    pub inner_flows: u32,
    /// Fragmented inner packets remembered at a time.
    pub fragments: u32,
    /// Clients and services whose previous backend is remembered.
    pub previous: u32,
    /// Flows that were given another source port in mode rewrite.
    pub pinned_ports: u32,
    /// Ports given to clients that can have replies there; at most 220 for each client.
    pub returns: u32,
    /// Clients of this node's egress pods whose port is learnt, by egress pod.
    pub answers: u32,
    /// Backends seen leaving by Cilium's state alone.
    pub leaving: u32,
    /// Leaving backends with drain statistics.
    pub drains: u32,
    /// Egresses with counters.
    pub egresses: u32,
    /// Programs in pods of this node: one in each client pod, and in mode rewrite another one there and two in each egress pod.
    pub pods: u32,
    /// Bytes of the event ring; rounded up to a power of two of at least a page.
    pub event_bytes: u32,
}

impl Default for Sizes {
    fn default() -> Self {
        Self {
            services: 4096,
            marks: 32768,
            inner_flows: 131_072,
            fragments: 4096,
            previous: 16384,
            pinned_ports: 16384,
            returns: 16384,
            answers: 16384,
            leaving: 4096,
            drains: 4096,
            egresses: 1024,
            pods: 2048,
            event_bytes: 256 * 1024,
        }
    }
}

/// Everything that the datapath needs to know about the node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Directory of the pins, on a bpffs; made if missing. `/sys/fs/bpf/coil-guard` by default.
    pub pin_directory: PathBuf,
    /// Directory of Cilium's pins, `/sys/fs/bpf/tc/globals` by default.
    pub cilium_directory: PathBuf,
    /// Directory in which the container runtime keeps the pods' network namespaces, `/run/netns` by default.
    pub namespace_directory: PathBuf,
    /// UDP port of Coil's tunnels, host order, 5555 by default.
    pub fou_port: u16,
    /// How to attach.
    pub attach: AttachKind,
    /// Sizes of the own maps.
    pub sizes: Sizes,
    /// How long a backend that left by Cilium's state alone is drained, 5 s by default.
    pub unmarked_drain: Duration,
    /// Nothing may write to Cilium's maps: the program that could is never loaded.
    pub read_only: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            pin_directory: "/sys/fs/bpf/coil-guard".into(),
            cilium_directory: "/sys/fs/bpf/tc/globals".into(),
            namespace_directory: "/run/netns".into(),
            fou_port: 5555,
            attach: AttachKind::Auto,
            sizes: Sizes::default(),
            unmarked_drain: Duration::from_secs(5),
            read_only: false,
        }
    }
}

impl Options {
    /// Directory of this layout's pins.
    #[must_use]
    pub fn layout_directory(&self) -> PathBuf {
        self.pin_directory.join(LAYOUT_VERSION)
    }
}
