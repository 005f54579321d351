//! Receiving at a pod's device, and answering.

use std::{
    io,
    net::{Ipv6Addr, SocketAddr},
    os::{
        fd::{AsFd as _, AsRawFd as _, OwnedFd},
        unix::net::UnixStream,
    },
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU8, Ordering},
        mpsc,
    },
    thread::JoinHandle,
};

use anyhow::{Context as _, Result, anyhow};

use super::{
    FOU_PORT,
    log::{Place, Record, TrafficLog, now},
    outer::{ChecksumKind, Outer, frame},
    socket::{check, packet_socket, packets_dropped, udp_sink},
    view::{ChecksumState, InnerView, OuterView},
};
use crate::net::Namespace;

/// How an egress pod answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum ReplyMode {
    /// Not at all.
    Silent = 0,
    /// From its FoU port to the client's FoU port, as Coil's devices do.
    FouPort = 1,
    /// From an arbitrary port to the client's FoU port: `fouSourcePortAuto`.
    ArbitraryPort = 2,
    /// From its FoU port to the port that the packet came from, as a socket does.
    Mirror = 3,
}

/// What a receiver does besides recording.
#[derive(Clone, Copy, Debug)]
pub struct ReceiverOptions {
    /// Answers; changeable later.
    pub reply: ReplyMode,
    /// Whether whole frames are kept.
    pub keep_frames: bool,
    /// Whether a socket on the FoU port keeps the kernel from answering that nobody listens.
    pub listen: bool,
}

/// A running receiver: a thread in the pod's namespace. Dropping it stops it.
#[derive(Debug)]
pub struct Receiver {
    namespace: Namespace,
    reply: Arc<AtomicU8>,
    stop: Option<UnixStream>,
    thread: Option<JoinHandle<Result<u32>>>,
    sinks: Mutex<Vec<OwnedFd>>,
}

/// Ports of replies in [`ReplyMode::ArbitraryPort`] begin here.
const ARBITRARY_PORTS: u16 = 20_000;
const BATCH: usize = 64;
/// More than a frame of the lab: devices have an MTU of 1500 and no receive offload.
const FRAME: usize = 2048;

impl Receiver {
    /// Starts one on a device of a namespace; it receives from the moment this returns.
    ///
    /// # Errors
    ///
    /// When the kernel refuses.
    pub fn start(
        namespace: &Namespace,
        device: &str,
        place: Place,
        log: Arc<TrafficLog>,
        options: ReceiverOptions,
    ) -> Result<Self> {
        let (stop, stopped) = UnixStream::pair()?;
        let reply = Arc::new(AtomicU8::new(options.reply as u8));
        let (ready, is_ready) = mpsc::channel();
        let (device, replies) = (device.to_owned(), Arc::clone(&reply));
        let thread = namespace.spawn(&format!("{place:?}"), move || {
            let socket = packet_socket(&device)?;
            let _ = ready.send(());
            Worker { socket, stopped, place, log, reply: replies, keep_frames: options.keep_frames }.run()
        })?;
        let receiver = Self {
            namespace: namespace.clone(),
            reply,
            stop: Some(stop),
            thread: Some(thread),
            sinks: Mutex::new(Vec::new()),
        };
        if is_ready.recv().is_err() {
            return Err(receiver.finish().err().unwrap_or_else(|| anyhow!("receiver {place:?} ended early")));
        }
        if options.listen {
            receiver.listen(FOU_PORT)?;
        }
        Ok(receiver)
    }

    /// Keeps the kernel from answering that nobody listens on a UDP port.
    ///
    /// # Errors
    ///
    /// When the kernel refuses.
    pub fn listen(&self, port: u16) -> Result<()> {
        let sink = self.namespace.run(|| udp_sink(SocketAddr::from((Ipv6Addr::UNSPECIFIED, port))))?;
        self.sinks.lock().unwrap_or_else(PoisonError::into_inner).push(sink);
        Ok(())
    }

    /// Changes how it answers, from the next packet on.
    pub fn set_reply(&self, mode: ReplyMode) {
        self.reply.store(mode as u8, Ordering::Relaxed);
    }

    /// Stops it.
    ///
    /// # Errors
    ///
    /// When it failed, or the kernel dropped packets before it read them: counts would be wrong.
    pub fn finish(mut self) -> Result<()> {
        self.stop = None;
        let Some(thread) = self.thread.take() else { return Ok(()) };
        let dropped = thread.join().map_err(|_| anyhow!("a receiver panicked"))??;
        anyhow::ensure!(
            dropped == 0,
            "a receiver was too slow: the kernel dropped {dropped} packets before it read them"
        );
        Ok(())
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            // Its verdict is for `finish`; here only the thread must not outlive the lab.
            let _ = thread.join();
        }
    }
}

struct Worker {
    socket: OwnedFd,
    stopped: UnixStream,
    place: Place,
    log: Arc<TrafficLog>,
    reply: Arc<AtomicU8>,
    keep_frames: bool,
}

impl Worker {
    /// Receives until told to stop; returns the number of packets that it missed.
    fn run(self) -> Result<u32> {
        use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
        let mut batch = Batch::new();
        loop {
            let mut fds = [
                PollFd::new(self.socket.as_fd(), PollFlags::POLLIN),
                PollFd::new(self.stopped.as_fd(), PollFlags::POLLIN),
            ];
            match poll(&mut fds, PollTimeout::NONE) {
                Ok(_) => {}
                Err(nix::errno::Errno::EINTR) => continue,
                Err(error) => return Err(error).context("cannot wait for packets"),
            }
            let stop = fds[1].any().unwrap_or(true);
            loop {
                let received = batch.receive(&self.socket).context("cannot receive")?;
                if received == 0 {
                    break;
                }
                self.take(&batch, received)?;
            }
            if stop {
                return packets_dropped(self.socket.as_fd()).context("cannot read packet statistics");
            }
        }
    }

    fn take(&self, batch: &Batch, received: usize) -> Result<()> {
        let at = now();
        let mut records = Vec::with_capacity(received);
        for index in 0..received {
            let (bytes, pending) = batch.frame(index);
            let Some(view) = OuterView::of_frame(bytes, pending) else { continue };
            records.push(Record {
                at,
                place: self.place,
                source: view.source,
                destination: view.destination,
                checksum: view.checksum,
                extension_headers: view.extension_headers,
                inner: InnerView::of_packet(view.payload),
                tag: view.tag(),
                frame: self.keep_frames.then(|| bytes.into()),
            });
            self.answer(bytes, &view)?;
        }
        self.log.extend(records);
        Ok(())
    }

    fn answer(&self, received: &[u8], view: &OuterView<'_>) -> Result<()> {
        let reply = self.reply.load(Ordering::Relaxed);
        if reply == ReplyMode::Silent as u8 || view.checksum == ChecksumState::Wrong {
            return Ok(());
        }
        let Some(tag) = view.tag() else { return Ok(()) };
        let (own, client) = (view.destination, view.source);
        let arbitrary = ARBITRARY_PORTS + ((u64::from(tag.stream) * 31 + tag.sequence) % 10_000) as u16;
        let source_port = if reply == ReplyMode::ArbitraryPort as u8 { arbitrary } else { own.1 };
        let destination_port = if reply == ReplyMode::Mirror as u8 { client.1 } else { FOU_PORT };
        let outer = Outer {
            source: (own.0, source_port),
            destination: (client.0, destination_port),
            checksum: if view.checksum == ChecksumState::Zero {
                ChecksumKind::Zero
            } else {
                ChecksumKind::Correct
            },
            destination_options: view.extension_headers,
        };
        let mut inner = view.payload.to_vec();
        reverse(&mut inner);
        let (Some(to), Some(from)) = (received.first_chunk::<6>(), received[6..].first_chunk::<6>()) else {
            return Ok(());
        };
        let answer = frame(*to, *from, &outer.packet(&inner));
        loop {
            // SAFETY: reads `answer` only.
            let sent =
                unsafe { libc::send(self.socket.as_raw_fd(), answer.as_ptr().cast(), answer.len(), 0) };
            match check(sent as i32) {
                Ok(_) => return Ok(()),
                Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => std::thread::yield_now(),
                // The pod's device went down while it answered.
                Err(error) if matches!(error.raw_os_error(), Some(libc::ENETDOWN | libc::ENXIO)) => {
                    return Ok(());
                }
                Err(error) => return Err(error).context("cannot answer"),
            }
        }
    }
}

/// Exchanges source and destination of an inner packet; no checksum changes by that.
fn reverse(packet: &mut [u8]) {
    let (addresses, size, transport) = match packet.first().map(|first| first >> 4) {
        Some(4) => (12, 4, usize::from(packet[0] & 0xf) * 4),
        Some(6) => (8, 16, 40),
        _ => return,
    };
    let protocol = packet.get(if size == 4 { 9 } else { 6 }).copied();
    for at in addresses..addresses + size {
        if at + size < packet.len() {
            packet.swap(at, at + size);
        }
    }
    if matches!(protocol, Some(6 | 17)) && packet.len() >= transport + 4 {
        packet.swap(transport, transport + 2);
        packet.swap(transport + 1, transport + 3);
    }
}

/// Buffers of one `recvmmsg`.
struct Batch {
    frames: Vec<[u8; FRAME]>,
    controls: Vec<[u64; 8]>,
    lengths: Vec<(usize, bool)>,
}

impl Batch {
    fn new() -> Self {
        Self {
            frames: vec![[0; FRAME]; BATCH],
            controls: vec![[0; 8]; BATCH],
            lengths: vec![(0, false); BATCH],
        }
    }

    /// Number of frames that were waiting.
    fn receive(&mut self, socket: &OwnedFd) -> io::Result<usize> {
        let mut vectors: Vec<_> = self
            .frames
            .iter_mut()
            .map(|frame| libc::iovec { iov_base: frame.as_mut_ptr().cast(), iov_len: FRAME })
            .collect();
        let mut messages: Vec<_> = vectors
            .iter_mut()
            .zip(&mut self.controls)
            .map(|(vector, control)| {
                // SAFETY: all zeros are a valid mmsghdr.
                let mut message: libc::mmsghdr = unsafe { std::mem::zeroed() };
                message.msg_hdr.msg_iov = vector;
                message.msg_hdr.msg_iovlen = 1;
                message.msg_hdr.msg_control = control.as_mut_ptr().cast();
                message.msg_hdr.msg_controllen = size_of_val(control) as _;
                message
            })
            .collect();
        // SAFETY: the headers point to buffers that live until the call returns.
        let received = check(unsafe {
            libc::recvmmsg(
                socket.as_raw_fd(),
                messages.as_mut_ptr(),
                BATCH as u32,
                libc::MSG_DONTWAIT as _,
                std::ptr::null_mut(),
            )
        });
        let received = match received {
            Ok(received) => received as usize,
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => 0,
            // Reported once when the device goes down; what was received before has been read.
            Err(error) if error.raw_os_error() == Some(libc::ENETDOWN) => 0,
            Err(error) => return Err(error),
        };
        for (slot, message) in self.lengths.iter_mut().zip(&messages[..received]) {
            *slot = (message.msg_len as usize, checksum_pending(&message.msg_hdr));
        }
        Ok(received)
    }

    fn frame(&self, index: usize) -> (&[u8], bool) {
        let (length, pending) = self.lengths[index];
        (&self.frames[index][..length], pending)
    }
}

fn checksum_pending(header: &libc::msghdr) -> bool {
    const PACKET_AUXDATA: i32 = 8;
    const CHECKSUM_NOT_READY: u32 = 1 << 3;
    // SAFETY: the kernel filled in the header and the control buffer behind it.
    unsafe {
        let control = libc::CMSG_FIRSTHDR(header);
        if control.is_null()
            || (*control).cmsg_level != libc::SOL_PACKET
            || (*control).cmsg_type != PACKET_AUXDATA
        {
            return false;
        }
        libc::CMSG_DATA(control).cast::<u32>().read_unaligned() & CHECKSUM_NOT_READY != 0
    }
}
