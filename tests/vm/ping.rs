//! Echo requests with a number each, so that every one of them can be accounted for.

use std::{
    collections::BTreeSet,
    io::IoSliceMut,
    net::{IpAddr, SocketAddr},
    os::fd::{AsRawFd as _, OwnedFd},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, anyhow};
use coil_guard_tests::{cilium::IpFamily, net::Pod};
use nix::sys::socket::{
    AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, SockaddrStorage, recvmsg, sendto, setsockopt,
    socket, sockopt::ReceiveTimeout,
};

use crate::outside;

/// How long an answer may take on a machine that is busy with emulation.
const PATIENCE: Duration = Duration::from_secs(5);

/// A steady stream of echo requests from a client pod to the host outside.
pub(crate) struct Pinger {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Result<Report>>,
}

/// What became of the echo requests.
#[derive(Debug)]
pub(crate) struct Report {
    /// When each was sent, by sequence number.
    pub(crate) sent: Vec<Instant>,
    /// Those that were answered.
    pub(crate) answered: BTreeSet<u16>,
}

impl Report {
    /// Sequence numbers that were not answered.
    pub(crate) fn lost(&self) -> Vec<usize> {
        (0..self.sent.len()).filter(|number| !self.answered.contains(&(*number as u16))).collect()
    }
}

impl Pinger {
    /// Sends one every `interval` from `client`.
    pub(crate) fn start(client: &Pod, family: IpFamily, interval: Duration, payload: usize) -> Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = client.namespace.spawn("ping", move || run(family, interval, payload, &stopped))?;
        Ok(Self { stop, thread })
    }

    /// Stops sending, waits for the last answers and tells what became of each.
    pub(crate) fn finish(self) -> Result<Report> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().map_err(|_| anyhow!("the ping thread panicked"))?
    }
}

fn run(family: IpFamily, interval: Duration, payload: usize, stop: &AtomicBool) -> Result<Report> {
    let socket = raw(family)?;
    let mut report = Report { sent: Vec::new(), answered: BTreeSet::new() };
    let to = SockaddrStorage::from(SocketAddr::new(outside::address(family), 0));
    let reply = if family == IpFamily::V4 { 0 } else { 129 };
    let mut end = None;
    let mut next = Instant::now();
    loop {
        let now = Instant::now();
        if end.is_none() && stop.load(Ordering::Relaxed) {
            end = Some(now + PATIENCE);
        }
        if end.is_some_and(|end| now > end || report.answered.len() == report.sent.len()) {
            return Ok(report);
        }
        if end.is_none() && now >= next {
            let request = request(family, u16::try_from(report.sent.len())?, payload);
            sendto(socket.as_raw_fd(), &request, &to, MsgFlags::empty())
                .context("cannot send an echo request")?;
            report.sent.push(now);
            next += interval;
        }
        let wait =
            next.saturating_duration_since(now).clamp(Duration::from_millis(1), Duration::from_millis(20));
        setsockopt(&socket, ReceiveTimeout, &nix::sys::time::TimeVal::new(0, wait.as_micros() as i64))?;
        if let Some((kind, sequence, _)) = receive(&socket, family)?
            && kind == reply
        {
            report.answered.insert(sequence);
        }
    }
}

/// A socket that gets a copy of every ICMP message of its namespace.
pub(crate) fn observer(family: IpFamily) -> Result<OwnedFd> {
    raw(family)
}

/// Calls `on_request` for each echo request that arrives, for ever.
pub(crate) fn observe(
    socket: &OwnedFd,
    family: IpFamily,
    mut on_request: impl FnMut(u16, IpAddr),
) -> Result<()> {
    let request = if family == IpFamily::V4 { 8 } else { 128 };
    loop {
        if let Some((kind, sequence, source)) = receive(socket, family)?
            && kind == request
        {
            on_request(sequence, source);
        }
    }
}

fn raw(family: IpFamily) -> Result<OwnedFd> {
    let (domain, protocol) = match family {
        IpFamily::V4 => (AddressFamily::Inet, SockProtocol::Icmp),
        IpFamily::V6 => (AddressFamily::Inet6, SockProtocol::IcmpV6),
    };
    socket(domain, SockType::Raw, SockFlag::SOCK_CLOEXEC, protocol).context("cannot open a raw ICMP socket")
}

/// Type, sequence number and source of the next message; `None` when none came in time or it is too short.
fn receive(socket: &OwnedFd, family: IpFamily) -> Result<Option<(u8, u16, IpAddr)>> {
    let mut buffer = [0; 9000];
    let (length, source) = {
        let mut parts = [IoSliceMut::new(&mut buffer)];
        match recvmsg::<SockaddrStorage>(socket.as_raw_fd(), &mut parts, None, MsgFlags::empty()) {
            Ok(message) => (message.bytes, message.address),
            Err(nix::errno::Errno::EAGAIN | nix::errno::Errno::EINTR) => return Ok(None),
            Err(error) => return Err(error).context("cannot receive from a raw ICMP socket"),
        }
    };
    let source = source.and_then(|address| {
        let v4 = address.as_sockaddr_in().map(|address| IpAddr::from(address.ip()));
        v4.or_else(|| address.as_sockaddr_in6().map(|address| IpAddr::from(address.ip())))
    });
    // Only IPv4 hands the IP header over, whose length is in its first byte.
    let start = if family == IpFamily::V4 { usize::from(buffer[0] & 0x0f) * 4 } else { 0 };
    let message = buffer.get(start..length).filter(|message| message.len() >= 8);
    Ok(message
        .zip(source)
        .map(|(message, source)| (message[0], u16::from_be_bytes([message[6], message[7]]), source)))
}

fn request(family: IpFamily, sequence: u16, payload: usize) -> Vec<u8> {
    let kind = if family == IpFamily::V4 { 8 } else { 128 };
    let mut message = vec![kind, 0, 0, 0, 0x5c, 0x91];
    message.extend_from_slice(&sequence.to_be_bytes());
    message.extend((0..payload).map(|index| index as u8));
    if family == IpFamily::V4 {
        // The kernel fills the checksum in for ICMPv6 only.
        let sum = checksum(&message);
        message[2..4].copy_from_slice(&sum.to_be_bytes());
    }
    message
}

fn checksum(message: &[u8]) -> u16 {
    let mut sum: u32 =
        message.chunks(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(*pair.get(1).unwrap_or(&0))).sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}
