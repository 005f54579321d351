//! A scene while it is played: its clock, what happened so far, and the lines that show it.

use std::{
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use anyhow::{Result, bail};

use super::{
    BIN, Screen,
    account::{Packets, milliseconds},
    document::{Event, EventKind, Lane},
    screen::Colour,
};
use crate::fou::{
    Place, Record, TrafficLog,
    log::{LogState, now},
};

/// Packets of one stream.
#[derive(Clone, Debug)]
pub(super) struct Track {
    /// Which flows, in a word.
    pub(super) flows: String,
    /// Whether it should stay on a leaving pod.
    pub(super) stays: bool,
    /// Number of the stream.
    pub(super) stream: u32,
}

#[derive(Clone, Copy, Debug, Default)]
struct PodState {
    leaving_from: Option<u64>,
    gone_from: Option<u64>,
}

/// See the module.
pub(super) struct Story<'a> {
    /// Its begin, nanoseconds of CLOCK_MONOTONIC.
    pub(super) start: u64,
    screen: &'a Screen,
    log: &'a TrafficLog,
    names: Vec<String>,
    tracks: Vec<Track>,
    pods: Mutex<Vec<PodState>>,
    events: Mutex<Vec<(u64, Event)>>,
    over: AtomicBool,
}

/// Arrivals are looked at this long after their bin is over, when all of them have been recorded.
const DELAY: Duration = Duration::from_millis(30);
/// Every so many bins a line is printed even if it looks like the one before.
const REPEAT: usize = 5;
const BAR: usize = 8;

impl<'a> Story<'a> {
    /// Begins now.
    #[must_use]
    pub(super) fn begin(
        screen: &'a Screen,
        log: &'a TrafficLog,
        names: &[String],
        tracks: Vec<Track>,
    ) -> Self {
        Self {
            start: now(),
            screen,
            log,
            names: names.to_vec(),
            tracks,
            pods: Mutex::new(vec![PodState::default(); names.len()]),
            events: Mutex::default(),
            over: AtomicBool::new(false),
        }
    }

    /// Plays it: `director` acts while the lines are printed.
    ///
    /// # Errors
    ///
    /// What `director` returns.
    pub(super) fn play<T>(&self, director: impl FnOnce() -> Result<T>) -> Result<T> {
        /// Ends the printing however the director ends.
        struct Over<'a>(&'a AtomicBool);
        impl Drop for Over<'_> {
            fn drop(&mut self) {
                self.0.store(true, Ordering::Release);
            }
        }
        thread::scope(|scope| {
            let _over = Over(&self.over);
            scope.spawn(|| self.print());
            director()
        })
    }

    /// Name of a backend.
    #[must_use]
    pub(super) fn name(&self, backend: usize) -> &str {
        &self.names[backend]
    }

    /// Notes what has happened at this time, now.
    pub(super) fn note(&self, at: u64, kind: EventKind, text: &str) {
        let at_ms = milliseconds(at.saturating_sub(self.start));
        let event = Event { at_ms, kind, text: text.to_owned() };
        self.events.lock().unwrap_or_else(PoisonError::into_inner).push((at, event));
    }

    /// A backend is Terminating from now on.
    pub(super) fn leaving(&self, backend: usize, at: u64) {
        self.pods.lock().unwrap_or_else(PoisonError::into_inner)[backend].leaving_from = Some(at);
    }

    /// A backend is gone from now on.
    pub(super) fn gone(&self, backend: usize, at: u64) {
        self.pods.lock().unwrap_or_else(PoisonError::into_inner)[backend].gone_from = Some(at);
    }

    /// Lets the scene go on for this long.
    pub(super) fn pause(&self, span: Duration) {
        thread::sleep(span);
    }

    /// The backend at which the last packet of a stream arrived.
    ///
    /// # Errors
    ///
    /// When none has arrived in time.
    pub(super) fn current(&self, stream: u32, patience: Duration) -> Result<usize> {
        let mut found = None;
        self.log.wait(patience, |state| {
            let records = state.streams.get(&stream).map(|stream| &stream.records[..]).unwrap_or_default();
            found = records.iter().rev().find_map(|record| backend_of(record.place));
            found.is_some()
        });
        match found {
            Some(backend) => Ok(backend),
            None => bail!("no packet of the stream has arrived at an egress pod after {patience:?}"),
        }
    }

    /// Waits until a packet sent after `since` arrives elsewhere than at `leaving`, and says when and where. `None` when
    /// none has in time.
    #[must_use]
    pub(super) fn wait_elsewhere(
        &self,
        stream: u32,
        leaving: usize,
        since: u64,
        patience: Duration,
    ) -> Option<(u64, usize)> {
        let mut found = None;
        self.log.wait(patience, |state| {
            let elsewhere = |record: &Record| {
                backend_of(record.place).filter(|at| *at != leaving).map(|backend| (record.at, backend))
            };
            found = records_since(state, stream, since).filter_map(elsewhere).min();
            found.is_some()
        });
        found
    }

    /// What happened, in order.
    #[must_use]
    pub(super) fn events(&self) -> Vec<Event> {
        let mut events = self.events.lock().unwrap_or_else(PoisonError::into_inner).clone();
        events.sort_by_key(|(at, _)| *at);
        events.into_iter().map(|(_, event)| event).collect()
    }

    /// The lanes of a track until `end`, one for each backend.
    #[must_use]
    pub(super) fn lanes(&self, flows: &str, packets: &Packets, end: u64) -> Vec<Lane> {
        let bin = BIN.as_nanos() as u64;
        let bins = (self.start, bin, (end - self.start).div_ceil(bin) as usize);
        let since = |at: u64| milliseconds(at.saturating_sub(self.start));
        let lane = |backend: usize| {
            let pod = self.pod(backend);
            Lane {
                flows: flows.to_owned(),
                stays: self.tracks.iter().any(|track| track.flows == flows && track.stays),
                backend: self.names[backend].clone(),
                leaving_from_ms: pod.leaving_from.map(since),
                gone_from_ms: pod.gone_from.map(since),
                packets: packets.bins(backend, 0, bins),
                packets_after_mark: packets.bins(backend, pod.leaving_from.unwrap_or(u64::MAX), bins),
            }
        };
        (0..self.names.len()).map(lane).collect()
    }

    fn pod(&self, backend: usize) -> PodState {
        self.pods.lock().unwrap_or_else(PoisonError::into_inner)[backend]
    }

    fn print(&self) {
        let bin = BIN.as_nanos() as u64;
        self.print_heading();
        let (mut printed, mut shape, mut silent) = (0, Vec::new(), 0);
        for number in 0.. {
            let (from, to) = (self.start + number * bin, self.start + (number + 1) * bin);
            let over = self.over.load(Ordering::Acquire);
            if !over {
                thread::sleep(Duration::from_nanos((to + DELAY.as_nanos() as u64).saturating_sub(now())));
            }
            let events: Vec<_> = self.events.lock().unwrap_or_else(PoisonError::into_inner).clone();
            let until = if over { u64::MAX } else { to };
            let fresh = events[printed..].iter().take_while(|(at, _)| *at < until).count();
            for (_, event) in &events[printed..printed + fresh] {
                self.print_event(event);
            }
            printed += fresh;
            if over {
                return;
            }
            let counts = self.counts(from, to);
            let now_shape: Vec<_> = counts.iter().map(|count| *count > 0).collect();
            if fresh > 0 || now_shape != shape || silent + 1 == REPEAT {
                self.print_row(number, &counts, to);
                (shape, silent) = (now_shape, 0);
            } else {
                silent += 1;
            }
        }
    }

    /// Arrivals per track and backend.
    fn counts(&self, from: u64, to: u64) -> Vec<u64> {
        self.log.with(|state| {
            let mut counts = vec![0; self.tracks.len() * self.names.len()];
            for (index, track) in self.tracks.iter().enumerate() {
                let arrived = records_since(state, track.stream, from).filter(|record| record.at < to);
                for backend in arrived.filter_map(|record| backend_of(record.place)) {
                    counts[index * self.names.len() + backend] += 1;
                }
            }
            counts
        })
    }

    fn print_heading(&self) {
        let mut heading = format!("{:>8}", "time");
        for track in &self.tracks {
            for name in &self.names {
                let title =
                    if self.tracks.len() > 1 { format!("{}: {name}", track.flows) } else { name.clone() };
                heading.push_str(&format!("   {title:<width$}", width = BAR + 7));
            }
        }
        self.screen.line("");
        self.screen.line(&self.screen.paint(Colour::Dim, &heading));
    }

    fn print_event(&self, event: &Event) {
        let time = format!("{:>6.2} s", event.at_ms / 1000.0);
        let (colour, sign) = match event.kind {
            EventKind::Act => (Colour::Bold, "==="),
            EventKind::Move => (Colour::Green, "→"),
            EventKind::Mark | EventKind::Kill => (Colour::Red, "→"),
            EventKind::Mode | EventKind::End => (Colour::Yellow, "→"),
        };
        if event.kind == EventKind::Act && event.at_ms > 0.0 {
            self.screen.line("");
        }
        self.screen
            .line(&format!("{time}  {}", self.screen.paint(colour, &format!("{sign} {}", event.text))));
    }

    fn print_row(&self, number: u64, counts: &[u64], to: u64) {
        // A full bar is what the whole track had in this bin, so that a moved flow is a moved bar.
        let mut row = format!("{:>6.1} s", number as f64 * BIN.as_secs_f64());
        for (index, count) in counts.iter().enumerate() {
            let track = index / self.names.len();
            let pod = self.pod(index % self.names.len());
            let total: u64 = counts[track * self.names.len()..(track + 1) * self.names.len()].iter().sum();
            let is_gone = pod.gone_from.is_some_and(|at| at < to);
            let is_leaving = pod.leaving_from.is_some_and(|at| at < to);
            let sign = if is_gone {
                "G"
            } else if is_leaving {
                "T"
            } else {
                ""
            };
            let length = (*count as usize * BAR).div_ceil(total.max(1) as usize);
            let bar = "█".repeat(length) + &" ".repeat(BAR - length);
            let number = if *count > 0 { count.to_string() } else { "·".to_owned() };
            let colour = match (is_leaving, self.tracks[track].stays) {
                (false, _) => Colour::Green,
                (true, true) => Colour::Yellow,
                (true, false) => Colour::Red,
            };
            let text = format!("{bar}{number:>4}");
            let text = if *count > 0 { self.screen.paint(colour, &text) } else { text };
            row.push_str(&format!("   {text} {sign:<2}"));
        }
        self.screen.line(&row);
    }
}

/// Records of a stream from `since` on. Several receivers write them, so they are in order only by and large.
fn records_since(state: &LogState, stream: u32, since: u64) -> impl Iterator<Item = &Record> {
    const DISORDER: u64 = 200_000_000;
    let records = state.streams.get(&stream).map(|stream| &stream.records[..]).unwrap_or_default();
    let recent = records.iter().rev().take_while(move |record| record.at + DISORDER >= since);
    recent.filter(move |record| record.at >= since)
}

fn backend_of(place: Place) -> Option<usize> {
    match place {
        Place::Backend(backend) => Some(backend),
        _ => None,
    }
}
