//! The lab. See `README.md` beside this crate for what it models and what it does not.

pub mod bench;
pub mod bpf;
pub mod cilium;
pub mod demo;
pub mod fou;
pub mod kube_api;
pub mod lab;
pub mod manifests;
pub mod net;
pub mod program;
pub mod scenario;
