//! Sending out of a pod.

use std::{
    io,
    net::{IpAddr, SocketAddr, UdpSocket},
    os::fd::{AsFd as _, AsRawFd as _, OwnedFd},
};

use anyhow::{Context as _, Result};

use super::{
    outer::{ChecksumKind, Outer, frame},
    socket::{check, packet_socket, send_without_checksum, udp_sink},
};
use crate::net::{Pod, topology::POD_DEVICE};

/// Sends whole Ethernet frames out of a pod's device: full control, complete checksums. They pass the hooks on the
/// device's egress as the kernel's own packets do.
#[derive(Debug)]
pub struct FrameSender {
    socket: OwnedFd,
    mac: [u8; 6],
    gateway: [u8; 6],
}

impl FrameSender {
    /// Opens one in a pod.
    ///
    /// # Errors
    ///
    /// When the kernel refuses.
    pub fn open(pod: &Pod) -> Result<Self> {
        let socket = pod.namespace.run(|| {
            let socket = packet_socket(POD_DEVICE)?;
            // It only sends; what it would receive is thrown away unread.
            super::socket::set_option(socket.as_fd(), libc::SOL_SOCKET, libc::SO_RCVBUF, &1i32)?;
            Ok(socket)
        })?;
        Ok(Self { socket, mac: pod.mac, gateway: pod.host_mac })
    }

    /// Sends a frame as it is.
    ///
    /// # Errors
    ///
    /// When the kernel refuses.
    pub fn send_frame(&self, frame: &[u8]) -> io::Result<()> {
        loop {
            // SAFETY: reads `frame` only.
            let sent = unsafe { libc::send(self.socket.as_raw_fd(), frame.as_ptr().cast(), frame.len(), 0) };
            match check(sent as i32) {
                Ok(_) => return Ok(()),
                // The peer's queue is full and the frame was not taken: it is the receiver's turn.
                Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => std::thread::yield_now(),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Sends an IP packet to the node.
    ///
    /// # Errors
    ///
    /// When the kernel refuses.
    pub fn send_packet(&self, packet: &[u8]) -> io::Result<()> {
        self.send_frame(&frame(self.mac, self.gateway, packet))
    }

    /// Sends a FoU packet.
    ///
    /// # Errors
    ///
    /// When the kernel refuses.
    pub fn send(&self, outer: &Outer, inner: &[u8]) -> io::Result<()> {
        self.send_packet(&outer.packet(inner))
    }
}

/// Sends FoU packets through a UDP socket of a pod: the kernel makes the outer headers and leaves the checksum to the
/// device.
#[derive(Debug)]
pub struct UdpSender {
    socket: UdpSocket,
}

impl UdpSender {
    /// Binds one in a pod.
    ///
    /// # Errors
    ///
    /// When the kernel refuses, or a wrong checksum is asked for.
    pub fn open(pod: &Pod, source: (IpAddr, u16), checksum: ChecksumKind) -> Result<Self> {
        anyhow::ensure!(
            checksum != ChecksumKind::Wrong,
            "a UDP socket cannot send wrong checksums: send frames"
        );
        pod.namespace.run(|| {
            let socket = udp_sink(SocketAddr::from(source))?;
            if checksum == ChecksumKind::Zero {
                send_without_checksum(socket.as_fd(), source.0).context("cannot turn checksums off")?;
            }
            Ok(Self { socket: socket.into() })
        })
    }

    /// Sends a FoU packet.
    ///
    /// # Errors
    ///
    /// When the kernel refuses.
    pub fn send(&self, destination: (IpAddr, u16), inner: &[u8]) -> io::Result<()> {
        loop {
            match self.socket.send_to(inner, SocketAddr::from(destination)) {
                Ok(_) => return Ok(()),
                Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => std::thread::yield_now(),
                // An ICMP error about an earlier datagram is reported once, instead of sending.
                Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {}
                Err(error) => return Err(error),
            }
        }
    }
}
