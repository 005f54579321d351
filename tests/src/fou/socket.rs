//! Sockets that the standard library does not have.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd},
};

use anyhow::{Context as _, Result};

/// Sets a socket option.
pub(super) fn set_option<T>(socket: BorrowedFd<'_>, level: i32, name: i32, value: &T) -> io::Result<()> {
    // SAFETY: the option is read from `value` only, which is as long as told.
    check(unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            level,
            name,
            std::ptr::from_ref(value).cast(),
            size_of::<T>() as libc::socklen_t,
        )
    })
    .map(drop)
}

pub(super) fn check(result: i32) -> io::Result<i32> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

fn socket(domain: i32, kind: i32, protocol: i32) -> io::Result<OwnedFd> {
    // SAFETY: no pointers; the descriptor is new.
    check(unsafe { libc::socket(domain, kind | libc::SOCK_CLOEXEC, protocol) })
        .map(|fd| unsafe { OwnedFd::from_raw_fd(fd) })
}

/// A packet socket on a device of the calling thread's namespace that sees what arrives there.
pub(super) fn packet_socket(device: &str) -> Result<OwnedFd> {
    use std::os::fd::AsFd as _;
    const PACKET_AUXDATA: i32 = 8;
    const PACKET_IGNORE_OUTGOING: i32 = 23;
    /// A limit, not an allocation: enough for some 100,000 small packets of a test that outruns its receiver.
    const BUFFER: i32 = 128 << 20;
    let index =
        nix::net::if_::if_nametoindex(device).with_context(|| format!("there is no device {device}"))?;
    // Without a protocol nothing is delivered yet.
    let socket = socket(libc::AF_PACKET, libc::SOCK_RAW, 0).context("cannot open a packet socket")?;
    let fd = socket.as_fd();
    set_option(fd, libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, &BUFFER)
        .context("cannot enlarge a receive buffer")?;
    set_option(fd, libc::SOL_PACKET, PACKET_AUXDATA, &1i32).context("cannot ask for checksum states")?;
    set_option(fd, libc::SOL_PACKET, PACKET_IGNORE_OUTGOING, &1i32).context("cannot ignore sent packets")?;
    // SAFETY: all zeros are a valid address.
    let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    address.sll_family = libc::AF_PACKET as u16;
    address.sll_protocol = (libc::ETH_P_ALL as u16).to_be();
    address.sll_ifindex = index as i32;
    // SAFETY: the address lives until the call returns.
    check(unsafe {
        libc::bind(
            socket.as_raw_fd(),
            std::ptr::from_ref(&address).cast(),
            size_of::<libc::sockaddr_ll>() as libc::socklen_t,
        )
    })
    .with_context(|| format!("cannot bind to {device}"))?;
    Ok(socket)
}

/// Packets that the kernel dropped because nobody read the socket in time.
pub(super) fn packets_dropped(socket: BorrowedFd<'_>) -> io::Result<u32> {
    const PACKET_STATISTICS: i32 = 6;
    let mut statistics = [0u32; 2];
    let mut length = size_of_val(&statistics) as libc::socklen_t;
    // SAFETY: writes at most `length` bytes.
    check(unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_PACKET,
            PACKET_STATISTICS,
            statistics.as_mut_ptr().cast(),
            &mut length,
        )
    })?;
    Ok(statistics[1])
}

/// A UDP socket bound to `address` in the calling thread's namespace that shares its port with others of the lab and
/// throws away what it gets, after the kernel verified its checksum (zero is accepted).
pub(super) fn udp_sink(address: SocketAddr) -> Result<OwnedFd> {
    use std::os::fd::AsFd as _;
    const UDP_NO_CHECK6_RX: i32 = 102;
    let domain = if address.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
    let socket = socket(domain, libc::SOCK_DGRAM, 0).context("cannot open a UDP socket")?;
    let fd = socket.as_fd();
    for option in [libc::SO_REUSEADDR, libc::SO_REUSEPORT] {
        set_option(fd, libc::SOL_SOCKET, option, &1i32).context("cannot share a port")?;
    }
    if address.is_ipv6() {
        set_option(fd, libc::IPPROTO_IPV6, libc::IPV6_V6ONLY, &0i32).context("cannot take both families")?;
        set_option(fd, libc::SOL_UDP, UDP_NO_CHECK6_RX, &1i32).context("cannot accept zero checksums")?;
    }
    // BPF_RET | BPF_K with 0: keep nothing.
    let mut nothing = libc::sock_filter { code: 6, jt: 0, jf: 0, k: 0 };
    let filter = libc::sock_fprog { len: 1, filter: &raw mut nothing };
    set_option(fd, libc::SOL_SOCKET, libc::SO_ATTACH_FILTER, &filter).context("cannot attach a filter")?;
    bind(fd, address).with_context(|| format!("cannot bind to {address}"))?;
    Ok(socket)
}

fn bind(socket: BorrowedFd<'_>, address: SocketAddr) -> Result<()> {
    match address {
        SocketAddr::V4(address) => {
            nix::sys::socket::bind(socket.as_raw_fd(), &nix::sys::socket::SockaddrIn::from(address))?;
        }
        SocketAddr::V6(address) => {
            nix::sys::socket::bind(socket.as_raw_fd(), &nix::sys::socket::SockaddrIn6::from(address))?;
        }
    }
    Ok(())
}

/// Turns off the checksum of what the socket sends.
pub(super) fn send_without_checksum(socket: BorrowedFd<'_>, address: IpAddr) -> io::Result<()> {
    const UDP_NO_CHECK6_TX: i32 = 101;
    match address {
        IpAddr::V4(_) => set_option(socket, libc::SOL_SOCKET, libc::SO_NO_CHECK, &1i32),
        IpAddr::V6(_) => set_option(socket, libc::SOL_UDP, UDP_NO_CHECK6_TX, &1i32),
    }
}
