//! A stream of numbered packets from a client, and the account of every one of them.

use std::{
    collections::BTreeSet,
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, anyhow, ensure};

use super::{
    inner::{InnerPacket, Tag},
    log::{LogState, Place, Record, StreamLog, TrafficLog, now},
    outer::{ChecksumKind, Outer},
    report::StreamReport,
    send::{FrameSender, UdpSender},
};
use crate::net::Pod;

/// How packets leave the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Via {
    /// As whole frames with complete checksums.
    Frames,
    /// Through a UDP socket, checksums left to the device. No Destination Options header.
    UdpSocket,
}

/// Makes packet n from its number and the outer header of the spec.
#[derive(Clone)]
pub struct Generator(Arc<Generate>);

type Generate = dyn Fn(u64, &Outer) -> (Outer, InnerPacket) + Send + Sync;

impl fmt::Debug for Generator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Generator")
    }
}

/// What a stream sends. Packet n carries `inner[n % inner.len()]`, unless there is a generator.
#[derive(Clone, Debug)]
pub struct StreamSpec {
    /// Outer header: source port, destination (the service), checksum.
    pub outer: Outer,
    /// Inner packets, in turn.
    pub inner: Vec<InnerPacket>,
    /// Makes each packet instead.
    pub generator: Option<Generator>,
    /// Number of packets, or until stopped.
    pub count: Option<u64>,
    /// Time between packets; `None` is as fast as possible.
    pub interval: Option<Duration>,
    /// Packets that may be on their way at once; the sender waits for arrivals, so that no queue overflows.
    pub window: u64,
    /// How they leave.
    pub via: Via,
}

/// A running stream. Dropping it stops it.
#[derive(Debug)]
pub struct Stream {
    number: u32,
    log: Arc<TrafficLog>,
    stop: Arc<AtomicBool>,
    sent: Arc<AtomicU64>,
    thread: Option<JoinHandle<Result<Vec<u64>>>>,
}

/// When nothing arrives any more for this long, what is missing is lost.
const QUIET: Duration = Duration::from_secs(1);

impl Stream {
    /// Starts sending from a pod.
    ///
    /// # Errors
    ///
    /// When the kernel refuses.
    ///
    /// # Panics
    ///
    /// When the spec has no inner packet.
    pub fn start(pod: &Pod, log: &Arc<TrafficLog>, spec: StreamSpec) -> Result<Self> {
        assert!(!spec.inner.is_empty(), "a stream needs an inner packet");
        let sender = match spec.via {
            Via::Frames => Sender::Frames(FrameSender::open(pod)?),
            Via::UdpSocket => Sender::Udp(UdpSender::open(pod, spec.outer.source, spec.outer.checksum)?),
        };
        let number = log.new_stream();
        let (stop, sent) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let run = Run {
            number,
            spec,
            sender,
            log: Arc::clone(log),
            stop: Arc::clone(&stop),
            sent: Arc::clone(&sent),
        };
        let thread = std::thread::Builder::new().name(format!("stream {number}")).spawn(move || run.run())?;
        Ok(Self { number, log: Arc::clone(log), stop, sent, thread: Some(thread) })
    }

    /// Its number, as in tags.
    #[must_use]
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Packets sent so far; the next one has this number.
    #[must_use]
    pub fn sent(&self) -> u64 {
        self.sent.load(Ordering::Acquire)
    }

    /// Packets that arrived at backends so far.
    #[must_use]
    pub fn arrived(&self) -> u64 {
        self.log.with(|state| arrivals(state, self.number))
    }

    /// Waits until this many have arrived at backends.
    ///
    /// # Errors
    ///
    /// When they have not within `patience`.
    pub fn wait_arrived(&self, count: u64, patience: Duration) -> Result<()> {
        let done = self.log.wait(patience, |state| arrivals(state, self.number) >= count);
        ensure!(
            done,
            "{} of stream {} have arrived after {patience:?}, not {count}",
            self.arrived(),
            self.number
        );
        Ok(())
    }

    /// Stops sending (a counted stream first sends what is left when `early` is false), waits for what is on its way,
    /// and gives account.
    ///
    /// # Errors
    ///
    /// When sending failed.
    pub fn finish(mut self, early: bool) -> Result<StreamReport> {
        if early {
            self.stop.store(true, Ordering::Relaxed);
        }
        let thread = self.thread.take().context("the stream is over")?;
        let sent = thread.join().map_err(|_| anyhow!("the sender of stream {} panicked", self.number))??;
        let mut last = (Instant::now(), 0);
        // Over when every packet has been seen and answered, or when nothing moves any more.
        loop {
            let all = self.log.wait(Duration::from_millis(20), |state| {
                state.streams.get(&self.number).is_some_and(|stream| complete(stream, sent.len() as u64))
            });
            let seen = self
                .log
                .with(|state| state.streams.get(&self.number).map_or(0, |stream| stream.records.len()));
            if seen != last.1 {
                last = (Instant::now(), seen);
            }
            if all || last.0.elapsed() > QUIET {
                break;
            }
        }
        Ok(StreamReport { number: self.number, sent, records: self.log.take_stream(self.number) })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // The account was not asked for.
            let _ = thread.join();
        }
    }
}

fn arrivals(state: &LogState, stream: u32) -> u64 {
    state.streams.get(&stream).map_or(0, |stream| stream.at_backends)
}

/// Whether each of `sent` packets has arrived and was answered.
fn complete(stream: &StreamLog, sent: u64) -> bool {
    let distinct = |at_backends| {
        let there = |record: &&Record| matches!(record.place, Place::Backend(_)) == at_backends;
        let tags =
            stream.records.iter().filter(|record| !matches!(record.place, Place::Tap(_))).filter(there);
        tags.filter_map(|record| record.tag).collect::<BTreeSet<_>>().len() as u64
    };
    // The cheap half first: it is asked after every arrival.
    stream.at_backends >= sent
        && stream.at_clients >= sent
        && distinct(true) == sent
        && distinct(false) == sent
}

enum Sender {
    Frames(FrameSender),
    Udp(UdpSender),
}

struct Run {
    number: u32,
    spec: StreamSpec,
    sender: Sender,
    log: Arc<TrafficLog>,
    stop: Arc<AtomicBool>,
    sent: Arc<AtomicU64>,
}

impl Run {
    /// Sends; returns the time of each packet.
    fn run(self) -> Result<Vec<u64>> {
        let mut times = Vec::new();
        let start = Instant::now();
        while !self.stop.load(Ordering::Relaxed)
            && self.spec.count.is_none_or(|count| (times.len() as u64) < count)
        {
            let sequence = times.len() as u64;
            if let Some(interval) = self.spec.interval {
                pause_until(
                    start + interval.saturating_mul(u32::try_from(sequence).unwrap_or(u32::MAX)),
                    &self.stop,
                );
            }
            // Counting takes a lock, so not for every packet.
            if sequence >= self.spec.window && sequence.is_multiple_of((self.spec.window / 4).max(1)) {
                let floor = sequence - self.spec.window;
                // What is lost never arrives: go on after a moment.
                self.log.wait(Duration::from_millis(20), |state| arrivals(state, self.number) > floor);
            }
            let tag = Tag { stream: self.number, sequence };
            let generated =
                self.spec.generator.as_ref().map(|generator| generator.0(sequence, &self.spec.outer));
            let (outer, payload) = match &generated {
                Some((outer, inner)) => (outer, inner.build(tag)),
                None => {
                    let inner = &self.spec.inner[(sequence % self.spec.inner.len() as u64) as usize];
                    (&self.spec.outer, inner.build(tag))
                }
            };
            times.push(now());
            let sent = match &self.sender {
                Sender::Frames(sender) => sender.send(outer, &payload),
                Sender::Udp(sender) => sender.send(outer.destination, &payload),
            };
            sent.with_context(|| format!("cannot send packet {sequence} of stream {}", self.number))?;
            self.sent.store(sequence + 1, Ordering::Release);
        }
        Ok(times)
    }
}

fn pause_until(when: Instant, stop: &AtomicBool) {
    // In small parts, so that a stop is heard.
    while let Some(left) = when.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) {
        if stop.load(Ordering::Relaxed) {
            return;
        }
        std::thread::sleep(left.min(Duration::from_millis(10)));
    }
}

impl StreamSpec {
    /// One inner flow, as fast as possible until stopped, as frames.
    #[must_use]
    pub fn new(outer: Outer, inner: InnerPacket) -> Self {
        Self {
            outer,
            inner: vec![inner],
            generator: None,
            count: None,
            interval: None,
            window: 256,
            via: Via::Frames,
        }
    }

    /// With this number of packets.
    #[must_use]
    pub fn count(self, count: u64) -> Self {
        Self { count: Some(count), ..self }
    }

    /// With this time between packets.
    #[must_use]
    pub fn interval(self, interval: Duration) -> Self {
        Self { interval: Some(interval), ..self }
    }

    /// With these inner packets, in turn.
    #[must_use]
    pub fn inner(self, inner: Vec<InnerPacket>) -> Self {
        Self { inner, ..self }
    }

    /// With packets made one by one: from the number of the packet and the outer header, which may be changed
    /// (`fouSourcePortAuto`: a port for each inner flow). Through a UDP socket the source stays the spec's.
    #[must_use]
    pub fn generate(
        self,
        make: impl Fn(u64, &Outer) -> (Outer, InnerPacket) + Send + Sync + 'static,
    ) -> Self {
        Self { generator: Some(Generator(Arc::new(make))), ..self }
    }

    /// From another outer source port.
    #[must_use]
    pub fn source_port(mut self, port: u16) -> Self {
        self.outer.source.1 = port;
        self
    }

    /// With another outer checksum.
    #[must_use]
    pub fn checksum(mut self, checksum: ChecksumKind) -> Self {
        self.outer.checksum = checksum;
        self
    }

    /// Through a UDP socket instead of as frames.
    #[must_use]
    pub fn via(self, via: Via) -> Self {
        Self { via, ..self }
    }
}
