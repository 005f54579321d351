//! Packets of the scene's client.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use anyhow::Result;

use super::{
    replies::frame_between,
    run::Run,
    scene::{EGRESS, Scene},
};
use crate::{
    cilium::IpFamily,
    fou::{FOU_PORT, InnerPacket, Tag},
};

/// State of the outer UDP checksum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Checksum {
    /// 0.
    None,
    /// The pseudo-header sum, for whoever finishes it.
    Unfinished,
    /// Right.
    Finished,
}

impl Checksum {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::None, Self::Unfinished, Self::Finished];
}

/// Offset of the outer UDP header in a frame of [`Scene::frame`]'s making.
#[must_use]
pub fn udp_offset(frame: &[u8], inner: &[u8]) -> usize {
    frame.len() - inner.len() - 8
}

impl Scene {
    /// Address of the peer that inner packets go to, of the outer family.
    #[must_use]
    pub fn outside(&self) -> IpAddr {
        match self.family {
            IpFamily::V4 => Ipv4Addr::new(203, 0, 113, 9).into(),
            IpFamily::V6 => Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 9).into(),
        }
    }

    /// An inner TCP segment of the connection from `port`.
    #[must_use]
    pub fn tcp(&self, port: u16, flags: u8) -> InnerPacket {
        InnerPacket::tcp((self.client(), port), (self.outside(), 443), flags)
    }

    /// An inner UDP datagram of the flow from `port`.
    #[must_use]
    pub fn udp(&self, port: u16) -> InnerPacket {
        InnerPacket::udp((self.client(), port), (self.outside(), 53))
    }

    /// A FoU frame as Coil makes it.
    #[must_use]
    pub fn frame(&self, port: u16, inner: &InnerPacket) -> Vec<u8> {
        self.frame_with(port, &bytes(inner), Checksum::None, true)
    }

    /// A FoU frame.
    #[must_use]
    pub fn frame_with(&self, port: u16, inner: &[u8], state: Checksum, destination_options: bool) -> Vec<u8> {
        frame_between((self.client(), port), (self.cluster_ip(), FOU_PORT), inner, state, destination_options)
    }

    /// Runs a frame.
    ///
    /// # Errors
    ///
    /// As [`Instance::run`].
    pub fn run(&mut self, frame: &[u8]) -> Result<Run> {
        self.guard.run(frame, EGRESS)
    }

    /// Runs an inner packet under the FoU port, as Coil makes it.
    ///
    /// # Errors
    ///
    /// As [`Instance::run`].
    pub fn send(&mut self, inner: &InnerPacket) -> Result<Run> {
        let frame = self.frame(FOU_PORT, inner);
        self.run(&frame)
    }
}

/// Bytes of an inner packet.
pub fn bytes(inner: &InnerPacket) -> Vec<u8> {
    inner.build(Tag { stream: 1, sequence: 1 })
}
