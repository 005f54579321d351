//! The programs for symmetric replies of mode `rewrite`: on egress pods of this node, and on client pods.

/// The object with the programs; empty where there was no toolchain to build it.
pub static REPLIES_OBJECT: &[u8] =
    aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/coil-guard-replies-bpf"));
