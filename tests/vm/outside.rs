//! The host outside the cluster: it answers, and tells by whose address each request came.

use std::{
    collections::BTreeMap,
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    os::fd::AsFd as _,
    sync::{Arc, Mutex, PoisonError},
    thread,
};

use anyhow::{Context as _, Result};
use coil_guard_tests::{
    cilium::IpFamily,
    net::{Namespace, Paths, netlink::Netlink, topology::gateway},
};

use crate::ping;

/// Port of the service that says who asks and then echoes, over TCP and UDP.
pub(crate) const ECHO: u16 = 7;
/// Port of the service that says who asks, takes bytes until the end and answers with their number and hash.
pub(crate) const SINK: u16 = 9;

/// Address of the host outside.
pub(crate) fn address(family: IpFamily) -> IpAddr {
    match family {
        IpFamily::V4 => Ipv4Addr::new(198, 51, 100, 1).into(),
        IpFamily::V6 => Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1).into(),
    }
}

/// Echo requests that arrived: sequence number to the address that they came from.
pub(crate) type Pings = Arc<Mutex<BTreeMap<u16, IpAddr>>>;

/// The host outside. Its servers end with the test's process.
pub(crate) struct Outside {
    /// Its namespace.
    pub(crate) namespace: Namespace,
    pings: Pings,
}

impl Outside {
    /// Connects it to the node that the calling thread is on, and starts its servers.
    pub(crate) fn start(families: &[IpFamily]) -> Result<Self> {
        let namespace = Namespace::create(Paths.namespaces(), "outside")?;
        let (mac, node_mac) = ([2, 0, 0, 9, 0, 1], [2, 0, 0, 9, 0, 2]);
        let node = Namespace::current("node")?;
        node.run(|| {
            let netlink = Netlink::here()?;
            netlink.add_veth(("out0", node_mac), ("eth0", mac), namespace.file().as_fd())?;
            netlink.up("out0")
        })?;
        namespace.run(|| {
            let netlink = Netlink::here()?;
            coil_guard_tests::net::topology::set_sysctl("ipv6/conf/eth0/accept_dad", "0")?;
            netlink.up("eth0")?;
            for family in families {
                netlink.add_address("eth0", address(*family))?;
                netlink.add_neighbour("eth0", gateway(*family), node_mac)?;
                netlink.add_default_route("eth0", gateway(*family))?;
            }
            Ok(())
        })?;
        node.run(|| {
            let netlink = Netlink::here()?;
            for family in families {
                netlink.add_route("out0", address(*family))?;
                netlink.add_neighbour("out0", address(*family), mac)?;
            }
            Ok(())
        })?;
        let outside = Self { namespace, pings: Pings::default() };
        for family in families {
            outside.serve(*family)?;
        }
        Ok(outside)
    }

    /// The echo requests that have arrived so far.
    pub(crate) fn pings(&self) -> BTreeMap<u16, IpAddr> {
        self.pings.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn serve(&self, family: IpFamily) -> Result<()> {
        let at = |port| SocketAddr::new(address(family), port);
        let (echo, sink, datagrams, observer) = self.namespace.run(|| {
            Ok((
                TcpListener::bind(at(ECHO)).context("cannot listen for the echo service")?,
                TcpListener::bind(at(SINK)).context("cannot listen for the sink service")?,
                UdpSocket::bind(at(ECHO)).context("cannot bind the datagram echo service")?,
                ping::observer(family)?,
            ))
        })?;
        // A connection that breaks is the client's to notice and report.
        thread::spawn(move || each(&echo, |stream| say_and_echo(stream).unwrap_or_default()));
        thread::spawn(move || each(&sink, |stream| take(stream).unwrap_or_default()));
        thread::spawn(move || say_and_echo_datagrams(&datagrams));
        let pings = Arc::clone(&self.pings);
        thread::spawn(move || {
            ping::observe(&observer, family, |sequence, source| {
                pings.lock().unwrap_or_else(PoisonError::into_inner).insert(sequence, source);
            })
        });
        Ok(())
    }
}

fn each(listener: &TcpListener, serve: impl Fn(TcpStream) + Copy + Send + 'static) {
    for stream in listener.incoming().flatten() {
        thread::spawn(move || serve(stream));
    }
}

fn say_and_echo(mut stream: TcpStream) -> Result<()> {
    let peer = stream.peer_addr()?.ip();
    writeln!(stream, "{peer}")?;
    let mut reader = BufReader::new(stream.try_clone()?);
    loop {
        let taken = {
            let bytes = reader.fill_buf()?;
            stream.write_all(bytes)?;
            bytes.len()
        };
        if taken == 0 {
            return Ok(());
        }
        reader.consume(taken);
    }
}

fn say_and_echo_datagrams(socket: &UdpSocket) {
    let mut buffer = vec![0; 65_536];
    while let Ok((length, peer)) = socket.recv_from(&mut buffer) {
        let answer = [peer.ip().to_string().as_bytes(), b" ", &buffer[..length]].concat();
        // A lost answer is the client's to notice.
        let _sent = socket.send_to(&answer, peer);
    }
}

/// Says who asks, takes everything, then answers with count and hash.
fn take(mut stream: TcpStream) -> Result<()> {
    let peer = stream.peer_addr()?.ip();
    writeln!(stream, "{peer}")?;
    let mut buffer = vec![0; 256 * 1024];
    let mut digest = Digest::default();
    loop {
        let length = stream.read(&mut buffer)?;
        if length == 0 {
            break;
        }
        digest.update(&buffer[..length]);
    }
    writeln!(stream, "{} {:016x}", digest.count, digest.hash)?;
    Ok(())
}

/// Count and a 64-bit FNV-1a over 8-byte words: finds any byte that is missing, changed or moved. By words, because the
/// guest's processor is emulated and the tests are not optimised.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Digest {
    /// Bytes seen.
    pub(crate) count: u64,
    /// Hash of the complete words.
    pub(crate) hash: u64,
    carry: [u8; 8],
}

impl Digest {
    /// Adds bytes.
    pub(crate) fn update(&mut self, mut bytes: &[u8]) {
        let held = (self.count % 8) as usize;
        self.count += bytes.len() as u64;
        if held > 0 {
            let taken = bytes.len().min(8 - held);
            self.carry[held..held + taken].copy_from_slice(&bytes[..taken]);
            bytes = &bytes[taken..];
            if held + taken < 8 {
                return;
            }
            self.word(self.carry);
        }
        let (words, rest) = bytes.as_chunks();
        for word in words {
            self.word(*word);
        }
        self.carry[..rest.len()].copy_from_slice(rest);
    }

    fn word(&mut self, word: [u8; 8]) {
        self.hash = (self.hash ^ u64::from_ne_bytes(word)).wrapping_mul(0x0100_0000_01b3);
    }
}
