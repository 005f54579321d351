//! What became of the packets, found out from what was seen of them.

use std::{net::IpAddr, ops::Range};

use super::document::{Move, Tally};
use crate::fou::{Place, StreamReport};

/// An arrival at an egress pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arrival {
    /// When, nanoseconds of CLOCK_MONOTONIC.
    pub at: u64,
    /// Where.
    pub backend: usize,
    /// Outer source port.
    pub source_port: u16,
}

/// The packets of a stream, by number.
#[derive(Clone, Debug, Default)]
pub struct Packets {
    /// When each was sent.
    pub sent: Vec<u64>,
    /// Where each arrived.
    pub arrivals: Vec<Vec<Arrival>>,
    /// Answers that each got from the service's address.
    pub answers: Vec<u32>,
    /// Answers that came from elsewhere.
    pub foreign_answers: u64,
}

/// A change that should make a flow leave a backend.
#[derive(Clone, Copy, Debug)]
pub struct Change {
    /// The backend.
    pub backend: usize,
    /// Before the first system was told.
    pub begun: u64,
    /// After the last one was.
    pub done: u64,
}

impl Packets {
    /// Of a finished stream to `service`.
    #[must_use]
    pub fn of(report: &StreamReport, service: (IpAddr, u16)) -> Self {
        let count = report.sent.len();
        let mut packets = Self {
            sent: report.sent.clone(),
            arrivals: vec![Vec::new(); count],
            answers: vec![0; count],
            foreign_answers: 0,
        };
        for record in &report.records {
            let Some(number) = record.tag.map(|tag| tag.sequence as usize).filter(|number| *number < count)
            else {
                continue;
            };
            match record.place {
                Place::Backend(backend) => packets.arrivals[number].push(Arrival {
                    at: record.at,
                    backend,
                    source_port: record.source.1,
                }),
                Place::Client(_) if record.source == service => packets.answers[number] += 1,
                Place::Client(_) => packets.foreign_answers += 1,
                Place::Tap(_) => {}
            }
        }
        packets
    }

    /// The backend of a packet; `None` when it was lost. Of a duplicate the first.
    #[must_use]
    pub fn backend(&self, number: usize) -> Option<usize> {
        self.arrivals[number].first().map(|arrival| arrival.backend)
    }

    /// Numbers of the packets that were sent from `from` on and before `to`.
    #[must_use]
    pub fn sent_between(&self, from: u64, to: u64) -> Range<usize> {
        let from = self.sent.partition_point(|sent| *sent < from);
        from..self.sent.partition_point(|sent| *sent < to).max(from)
    }

    /// Counts these packets.
    #[must_use]
    pub fn tally(&self, numbers: Range<usize>) -> Tally {
        let arrivals = |wanted: fn(usize) -> bool| {
            self.arrivals[numbers.clone()].iter().filter(|arrivals| wanted(arrivals.len())).count() as u64
        };
        Tally {
            sent: numbers.len() as u64,
            lost: arrivals(|count| count == 0),
            duplicated: arrivals(|count| count > 1),
            unanswered: self.answers[numbers.clone()].iter().filter(|answers| **answers == 0).count() as u64,
            foreign_answers: self.foreign_answers,
        }
    }

    /// How many of these packets arrived at a backend.
    #[must_use]
    pub fn count_at(&self, numbers: Range<usize>, backend: usize) -> u64 {
        let there = |arrivals: &&Vec<Arrival>| arrivals.iter().any(|arrival| arrival.backend == backend);
        self.arrivals[numbers].iter().filter(there).count() as u64
    }

    /// Whether and when the one flow of this stream left a backend, looking at what was sent from the change until `to`.
    #[must_use]
    pub fn departure(&self, change: Change, to: u64, names: &[String], start: u64) -> Move {
        let after = self.sent_between(change.begun, to);
        let first =
            self.arrivals[after.clone()].iter().flatten().find(|arrival| arrival.backend != change.backend);
        Move {
            from: names[change.backend].clone(),
            to: first.map(|arrival| names[arrival.backend].clone()),
            changed_at_ms: milliseconds(change.begun - start),
            moved_at_ms: first.map(|arrival| milliseconds(arrival.at - start)),
            took_ms: first.map(|arrival| milliseconds(arrival.at.saturating_sub(change.begun))),
            to_old_after_change: self.count_at(after, change.backend),
            to_old_after_all_knew: self.count_at(self.sent_between(change.done, to), change.backend),
        }
    }

    /// Arrivals at a backend per bin, from `start` on, of packets that were sent from `since` on.
    #[must_use]
    pub fn bins(&self, backend: usize, since: u64, (start, bin, count): (u64, u64, usize)) -> Vec<u64> {
        let mut bins = vec![0; count];
        let sent = self.sent.iter().zip(&self.arrivals).filter(|(sent, _)| **sent >= since);
        for arrival in sent.flat_map(|(_, arrivals)| arrivals).filter(|arrival| arrival.backend == backend) {
            let index = (arrival.at.saturating_sub(start) / bin) as usize;
            if let Some(cell) = bins.get_mut(index) {
                *cell += 1;
            }
        }
        bins
    }
}

/// Nanoseconds as milliseconds, to a tenth.
#[must_use]
pub fn milliseconds(nanoseconds: u64) -> f64 {
    (nanoseconds as f64 / 100_000.0).round() / 10.0
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Packets sent every 10 ns; `at[n]` is the backend of packet n.
    fn packets(at: &[Option<usize>]) -> Packets {
        let arrival = |(number, backend): (usize, &Option<usize>)| {
            let at = number as u64 * 10 + 5;
            backend.map(|backend| Arrival { at, backend, source_port: 5555 }).into_iter().collect()
        };
        Packets {
            sent: (0..at.len() as u64).map(|number| number * 10).collect(),
            arrivals: at.iter().enumerate().map(arrival).collect(),
            answers: at.iter().map(|backend| u32::from(backend.is_some())).collect(),
            foreign_answers: 0,
        }
    }

    fn names() -> Vec<String> {
        vec!["a".into(), "b".into()]
    }

    #[test]
    fn a_flow_that_moves_is_seen_to_move() {
        let packets = packets(&[Some(0), Some(0), Some(0), Some(1), Some(1)]);
        let change = Change { backend: 0, begun: 12, done: 25 };
        let found = packets.departure(change, 100, &names(), 0);
        assert_eq!((found.from.as_str(), found.to.as_deref()), ("a", Some("b")));
        assert_eq!(found.to_old_after_change, 1);
        assert_eq!(found.to_old_after_all_knew, 0);
    }

    #[test]
    fn a_flow_that_stays_is_seen_to_stay() {
        let packets = packets(&[Some(0); 5]);
        let found = packets.departure(Change { backend: 0, begun: 12, done: 15 }, 100, &names(), 0);
        assert_eq!((found.to, found.took_ms, found.to_old_after_all_knew), (None, None, 3));
    }

    #[test]
    fn what_was_lost_is_counted_in_its_window_only() {
        let packets = packets(&[Some(0), None, Some(0), Some(1)]);
        assert_eq!(packets.tally(packets.sent_between(0, 100)).lost, 1);
        assert_eq!(packets.tally(packets.sent_between(20, 100)).lost, 0);
        assert_eq!(packets.tally(packets.sent_between(0, 100)).unanswered, 1);
    }

    #[test]
    fn bins_hold_every_arrival_of_their_span() {
        let packets = packets(&[Some(0), Some(0), Some(1), Some(1)]);
        assert_eq!(packets.bins(0, 0, (0, 20, 2)), [2, 0]);
        assert_eq!(packets.bins(1, 0, (0, 20, 2)), [0, 2]);
        assert_eq!(packets.bins(0, 10, (0, 20, 2)), [1, 0], "what was sent before is left out");
    }
}
