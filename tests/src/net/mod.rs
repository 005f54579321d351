//! The lab's network: one node, client pods and egress pods, each in a network namespace of its own.
//!
//! Everything lives in private namespaces of one thread ([`isolated`]): when that thread or the process dies, however,
//! the kernel takes it all down.

pub mod device;
pub mod inspect;
pub mod isolated;
pub mod namespace;
pub mod netlink;
pub mod topology;

pub use self::{
    inspect::{Attachments, UdpErrors, attachments, ip_errors},
    isolated::{Paths, isolated, lab_test},
    namespace::Namespace,
    netlink::Netlink,
    topology::{Pod, PodRole, Topology},
};
