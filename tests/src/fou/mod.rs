//! FoU packets: building, sending, receiving, counting.
//!
//! A FoU packet is an outer UDP datagram that holds an IP packet directly. The lab puts a [`Tag`] at the end of every
//! inner packet, so that each one can be told from all others wherever it arrives.

pub mod checksum;
pub mod inner;
pub mod log;
pub mod outer;
pub mod receive;
pub mod report;
pub mod send;
mod socket;
pub mod stream;
pub mod view;

pub use self::{
    inner::{Fragment, Inner, InnerPacket, Tag, tcp},
    log::{Place, Record, TrafficLog},
    outer::{ChecksumKind, Outer, frame},
    receive::{Receiver, ReplyMode},
    report::StreamReport,
    send::{FrameSender, UdpSender},
    stream::{Stream, StreamSpec, Via},
    view::{ChecksumState, InnerView, OuterView},
};

/// Coil's default FoU port.
pub const FOU_PORT: u16 = 5555;
