//! Every packet that arrived, where and when.

use std::{
    collections::HashMap,
    net::IpAddr,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use super::{
    inner::Tag,
    view::{ChecksumState, InnerView},
};

/// Where a packet was seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Place {
    /// At a client pod's device: what its FoU socket gets.
    Client(usize),
    /// At an egress pod's device.
    Backend(usize),
    /// At a client pod's host side, as it left the pod and before Cilium.
    Tap(usize),
}

/// A UDP packet that arrived.
#[derive(Clone, Debug, PartialEq)]
pub struct Record {
    /// When, nanoseconds of CLOCK_MONOTONIC.
    pub at: u64,
    /// Where.
    pub place: Place,
    /// Outer source.
    pub source: (IpAddr, u16),
    /// Outer destination.
    pub destination: (IpAddr, u16),
    /// Outer checksum.
    pub checksum: ChecksumState,
    /// Whether IPv6 extension headers stood before UDP.
    pub extension_headers: bool,
    /// The inner flow; `None` for later fragments and what is no IP packet.
    pub inner: Option<InnerView>,
    /// Which packet it is; `None` when the lab did not make it.
    pub tag: Option<Tag>,
    /// The whole frame, where the receiver keeps frames.
    pub frame: Option<Arc<[u8]>>,
}

/// All records, shared by all receivers of a lab.
#[derive(Debug, Default)]
pub struct TrafficLog {
    state: Mutex<LogState>,
    changed: Condvar,
}

/// The records of one stream.
#[derive(Clone, Debug, Default)]
pub struct StreamLog {
    /// In order of arrival.
    pub records: Vec<Record>,
    /// How many of them were seen at backends.
    pub at_backends: u64,
    /// How many of them were seen at clients.
    pub at_clients: u64,
}

impl StreamLog {
    fn push(&mut self, record: Record) {
        match record.place {
            Place::Backend(_) => self.at_backends += 1,
            Place::Client(_) => self.at_clients += 1,
            Place::Tap(_) => {}
        }
        self.records.push(record);
    }
}

/// The records.
#[derive(Debug, Default)]
pub struct LogState {
    /// By stream.
    pub streams: HashMap<u32, StreamLog>,
    /// Packets without a tag.
    pub untagged: Vec<Record>,
    next_stream: u32,
}

impl TrafficLog {
    /// A number for a new stream.
    pub fn new_stream(&self) -> u32 {
        let mut state = self.lock();
        state.next_stream += 1;
        let number = state.next_stream;
        state.streams.insert(number, StreamLog::default());
        number
    }

    /// Adds records.
    pub fn extend(&self, records: impl IntoIterator<Item = Record>) {
        let mut state = self.lock();
        for record in records {
            match record.tag.and_then(|tag| state.streams.get_mut(&tag.stream)) {
                Some(stream) => stream.push(record),
                None => state.untagged.push(record),
            }
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Looks at the records.
    pub fn with<T>(&self, look: impl FnOnce(&LogState) -> T) -> T {
        look(&self.lock())
    }

    /// Records of a stream so far.
    #[must_use]
    pub fn stream(&self, number: u32) -> Vec<Record> {
        self.with(|state| state.streams.get(&number).map(|stream| stream.records.clone()).unwrap_or_default())
    }

    /// Takes the records of a stream out, for good: later arrivals count as untagged.
    #[must_use]
    pub fn take_stream(&self, number: u32) -> Vec<Record> {
        self.lock().streams.remove(&number).unwrap_or_default().records
    }

    /// Waits until `done` says so after an arrival, or `patience` is over. Says whether `done` did.
    pub fn wait(&self, patience: Duration, mut done: impl FnMut(&LogState) -> bool) -> bool {
        let deadline = Instant::now() + patience;
        let mut state = self.lock();
        loop {
            if done(&state) {
                return true;
            }
            let Some(left) = deadline.checked_duration_since(Instant::now()) else { return false };
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn lock(&self) -> MutexGuard<'_, LogState> {
        // A receiver that panicked has not left a half-written record: each is pushed whole.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Nanoseconds of CLOCK_MONOTONIC.
#[must_use]
pub fn now() -> u64 {
    nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC)
        .map_or(0, |time| Duration::from(time).as_nanos() as u64)
}
