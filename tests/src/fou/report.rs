//! The account of every packet of a stream.

use std::{collections::BTreeMap, fmt, net::IpAddr};

use anyhow::{Result, ensure};

use super::{
    log::{Place, Record},
    view::ChecksumState,
};

/// The account of a stream.
#[derive(Clone)]
pub struct StreamReport {
    /// Its number.
    pub number: u32,
    /// When each packet was sent, nanoseconds of CLOCK_MONOTONIC; the index is its number.
    pub sent: Vec<u64>,
    /// Every arrival, at backends, at the client and at taps, in order.
    pub records: Vec<Record>,
}

impl StreamReport {
    /// Arrivals at backends, by packet number.
    #[must_use]
    pub fn arrivals(&self) -> BTreeMap<u64, Vec<&Record>> {
        self.by_sequence(|place| matches!(place, Place::Backend(_)))
    }

    /// Replies at the client, by the number of the packet that they answer.
    #[must_use]
    pub fn replies(&self) -> BTreeMap<u64, Vec<&Record>> {
        self.by_sequence(|place| matches!(place, Place::Client(_)))
    }

    /// What left the pod, by packet number; needs a tap.
    #[must_use]
    pub fn taps(&self) -> BTreeMap<u64, Vec<&Record>> {
        self.by_sequence(|place| matches!(place, Place::Tap(_)))
    }

    /// Numbers of the packets that arrived at a backend.
    #[must_use]
    pub fn arrived_at(&self, backend: usize) -> Vec<u64> {
        let there =
            |records: &Vec<&Record>| records.iter().any(|record| record.place == Place::Backend(backend));
        self.arrivals()
            .into_iter()
            .filter(|(_, records)| there(records))
            .map(|(sequence, _)| sequence)
            .collect()
    }

    /// The backend of each packet that arrived. Of a duplicate the first.
    #[must_use]
    pub fn backends(&self) -> BTreeMap<u64, usize> {
        let mut backends = BTreeMap::new();
        for record in &self.records {
            if let (Place::Backend(index), Some(tag)) = (record.place, record.tag) {
                backends.entry(tag.sequence).or_insert(index);
            }
        }
        backends
    }

    /// The backend of a packet; `None` when it was lost. Of many packets see [`Self::backends`].
    #[must_use]
    pub fn backend_of(&self, sequence: u64) -> Option<usize> {
        self.backends().get(&sequence).copied()
    }

    /// Packets per backend.
    #[must_use]
    pub fn per_backend(&self) -> BTreeMap<usize, u64> {
        let mut counts = BTreeMap::new();
        for record in &self.records {
            if let Place::Backend(index) = record.place {
                *counts.entry(index).or_default() += 1;
            }
        }
        counts
    }

    /// Numbers of the packets that arrived nowhere.
    #[must_use]
    pub fn lost(&self) -> Vec<u64> {
        let arrivals = self.arrivals();
        (0..self.sent.len() as u64).filter(|sequence| !arrivals.contains_key(sequence)).collect()
    }

    /// Numbers of the packets that arrived more than once, anywhere.
    #[must_use]
    pub fn duplicated(&self) -> Vec<u64> {
        self.arrivals()
            .into_iter()
            .filter(|(_, records)| records.len() > 1)
            .map(|(sequence, _)| sequence)
            .collect()
    }

    /// Numbers of the packets that got no reply.
    #[must_use]
    pub fn unanswered(&self) -> Vec<u64> {
        let replies = self.replies();
        (0..self.sent.len() as u64).filter(|sequence| !replies.contains_key(sequence)).collect()
    }

    /// Sources of replies, and how many came from each.
    #[must_use]
    pub fn reply_sources(&self) -> BTreeMap<(IpAddr, u16), u64> {
        let mut counts = BTreeMap::new();
        for record in self.records.iter().filter(|record| matches!(record.place, Place::Client(_))) {
            *counts.entry(record.source).or_default() += 1;
        }
        counts
    }

    /// Checks that each packet arrived exactly once, with a good checksum.
    ///
    /// # Errors
    ///
    /// When one did not; says which.
    pub fn ensure_exactly_once(&self) -> Result<()> {
        let (lost, duplicated) = (self.lost(), self.duplicated());
        ensure!(
            lost.is_empty(),
            "{} of {} packets lost, first {:?}\n{self:?}",
            lost.len(),
            self.sent.len(),
            lost.first()
        );
        ensure!(duplicated.is_empty(), "packets {duplicated:?} arrived more than once\n{self:?}");
        let wrong = self.records.iter().find(|record| record.checksum == ChecksumState::Wrong);
        ensure!(wrong.is_none(), "a packet has a wrong checksum: {wrong:?}");
        Ok(())
    }

    /// Checks that each packet got one reply, and all replies came from `source`.
    ///
    /// # Errors
    ///
    /// When not; says which.
    pub fn ensure_answered_by(&self, source: (IpAddr, u16)) -> Result<()> {
        let unanswered = self.unanswered();
        ensure!(
            unanswered.is_empty(),
            "{} packets got no reply, first {:?}\n{self:?}",
            unanswered.len(),
            unanswered.first()
        );
        let sources = self.reply_sources();
        let expected = BTreeMap::from([(source, self.sent.len() as u64)]);
        ensure!(sources == expected, "replies came from {sources:?}, not {expected:?}");
        Ok(())
    }

    fn by_sequence(&self, at: impl Fn(Place) -> bool) -> BTreeMap<u64, Vec<&Record>> {
        let mut map: BTreeMap<u64, Vec<&Record>> = BTreeMap::new();
        for record in self.records.iter().filter(|record| at(record.place)) {
            if let Some(tag) = record.tag {
                map.entry(tag.sequence).or_default().push(record);
            }
        }
        map
    }
}

impl fmt::Debug for StreamReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "stream {}: sent {}, per backend {:?}, lost {}, duplicated {}, replies from {:?}",
            self.number,
            self.sent.len(),
            self.per_backend(),
            self.lost().len(),
            self.duplicated().len(),
            self.reply_sources(),
        )
    }
}
