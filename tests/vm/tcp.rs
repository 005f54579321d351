//! TCP from a client pod to the host outside.

use std::{
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::{IpAddr, Shutdown, SocketAddr, TcpStream, UdpSocket},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, anyhow, ensure};
use coil_guard_tests::{cilium::IpFamily, net::Pod};

use crate::outside::{self, Digest, ECHO, SINK};

/// Opens a connection, sends a few bytes and gets them back. Returns the address that the host outside saw.
pub(crate) fn short(client: &Pod, family: IpFamily, patience: Duration) -> Result<IpAddr> {
    client.namespace.run(|| short_here(family, patience))
}

fn short_here(family: IpFamily, patience: Duration) -> Result<IpAddr> {
    let stream = open(family, ECHO, patience)?;
    let mut reader = BufReader::new(stream.try_clone()?);
    let mut said = String::new();
    reader.read_line(&mut said).context("no greeting")?;
    (&stream).write_all(b"ping").context("cannot send")?;
    let mut echoed = [0; 4];
    reader.read_exact(&mut echoed).context("no echo")?;
    ensure!(&echoed == b"ping", "{echoed:?} came back");
    said.trim().parse().with_context(|| format!("the greeting should be an address, not {said:?}"))
}

fn open(family: IpFamily, port: u16, patience: Duration) -> Result<TcpStream> {
    let stream = TcpStream::connect_timeout(&SocketAddr::new(outside::address(family), port), patience)
        .context("cannot connect")?;
    stream.set_read_timeout(Some(patience))?;
    stream.set_write_timeout(Some(patience))?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// Sends a datagram of `length` bytes and gets it back. Returns the address that the host outside saw.
///
/// Sent again every half second: the first answer that is too large for the tunnel teaches the host outside the path's
/// MTU, and is lost.
pub(crate) fn datagram(client: &Pod, family: IpFamily, length: usize, patience: Duration) -> Result<IpAddr> {
    client.namespace.run(|| {
        let any: SocketAddr = if family == IpFamily::V4 { "0.0.0.0:0".parse()? } else { "[::]:0".parse()? };
        let socket = UdpSocket::bind(any)?;
        socket.set_read_timeout(Some(Duration::from_millis(500)))?;
        let sent: Vec<u8> = (0..length).map(|index| index as u8).collect();
        let mut buffer = vec![0; length + 100];
        let deadline = Instant::now() + patience;
        loop {
            socket
                .send_to(&sent, SocketAddr::new(outside::address(family), ECHO))
                .with_context(|| format!("cannot send a datagram of {length} bytes"))?;
            match socket.recv(&mut buffer) {
                Ok(received) => {
                    let said = buffer[..received].strip_suffix(sent.as_slice());
                    let said = said.context("the datagram came back changed")?;
                    return std::str::from_utf8(said)?
                        .trim()
                        .parse()
                        .context("the answer should begin with an address");
                }
                Err(error) if Instant::now() > deadline => {
                    return Err(error).with_context(|| format!("no answer to a datagram of {length} bytes"));
                }
                Err(_) => {}
            }
        }
    })
}

/// A bulk transfer from a client that goes on until it is told to end.
pub(crate) struct Bulk {
    stop: Arc<AtomicBool>,
    acknowledged: Arc<AtomicU64>,
    thread: JoinHandle<Result<()>>,
    via: IpAddr,
}

impl Bulk {
    /// Opens the connection and starts to send.
    pub(crate) fn start(client: &Pod, family: IpFamily) -> Result<Self> {
        let (stream, via) = client.namespace.run(|| {
            let stream = open(family, SINK, Duration::from_secs(20))?;
            stream.set_nodelay(false)?;
            let mut said = String::new();
            // Nothing follows the greeting before the transfer has ended, so a buffer swallows nothing.
            BufReader::new(&stream).read_line(&mut said).context("no greeting")?;
            let via = said
                .trim()
                .parse()
                .with_context(|| format!("the greeting should be an address, not {said:?}"))?;
            Ok((stream, via))
        })?;
        let (stop, acknowledged) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (stopped, count) = (Arc::clone(&stop), Arc::clone(&acknowledged));
        let thread = client.namespace.spawn("bulk", move || send(stream, &stopped, &count))?;
        Ok(Self { stop, acknowledged, thread, via })
    }

    /// The address that the host outside sees.
    pub(crate) fn via(&self) -> IpAddr {
        self.via
    }

    /// Bytes per second that were sent during `time`.
    pub(crate) fn rate(&self, time: Duration) -> f64 {
        let began = (Instant::now(), self.acknowledged.load(Ordering::Relaxed));
        std::thread::sleep(time);
        let bytes = self.acknowledged.load(Ordering::Relaxed) - began.1;
        bytes as f64 / began.0.elapsed().as_secs_f64()
    }

    /// Waits until `bytes` more were sent.
    pub(crate) fn wait_progress(&self, bytes: u64, patience: Duration) -> Result<()> {
        let (began, goal) = (Instant::now(), self.acknowledged.load(Ordering::Relaxed) + bytes);
        while self.acknowledged.load(Ordering::Relaxed) < goal {
            let now = self.acknowledged.load(Ordering::Relaxed);
            ensure!(!self.thread.is_finished(), "the transfer ended after {now} bytes");
            ensure!(began.elapsed() < patience, "the transfer stands at {now} bytes, {goal} were expected");
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    /// Ends it; an error when it broke, or when a byte is missing or changed.
    pub(crate) fn finish(self) -> Result<()> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().map_err(|_| anyhow!("the transfer panicked"))?
    }
}

fn send(mut stream: TcpStream, stop: &AtomicBool, sent: &AtomicU64) -> Result<()> {
    const CHUNK: usize = 64 * 1024;
    let mut digest = Digest::default();
    let mut chunk: Vec<u8> = (0..CHUNK / 8).flat_map(usize::to_be_bytes).collect();
    let mut number = 0_u64;
    while !stop.load(Ordering::Relaxed) {
        // Every chunk differs, so that one in the place of another is found.
        chunk[..8].copy_from_slice(&number.to_be_bytes());
        stream
            .write_all(&chunk)
            .with_context(|| format!("the transfer broke after {} bytes", digest.count))?;
        digest.update(&chunk);
        sent.store(digest.count, Ordering::Relaxed);
        number += 1;
    }
    stream.shutdown(Shutdown::Write)?;
    let mut answer = String::new();
    BufReader::new(&stream).read_line(&mut answer).context("no receipt for the transfer")?;
    let Some((count, hash)) = answer.trim().split_once(' ') else {
        anyhow::bail!("a receipt should have two words, not {answer:?}")
    };
    ensure!(
        count == digest.count.to_string() && hash == format!("{:016x}", digest.hash),
        "sent {} bytes with hash {:016x}, but {count} with hash {hash} arrived",
        digest.count,
        digest.hash
    );
    Ok(())
}
