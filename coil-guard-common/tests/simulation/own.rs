//! The guard's own maps.

use std::collections::{BTreeMap, BTreeSet};

use coil_guard_common::{
    abi::{FLOW_DRAINED, FLOW_ENDED, InnerFlow, LeavingSeen, PinnedPort, Previous},
    decide::DrainChange,
};

use super::cilium::{SECOND, Tuple};

/// As in the program.
const LEAVING_PAUSE: u64 = 60 * SECOND;

#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Drains {
    pub(crate) flows: i64,
    pub(crate) started: i64,
    pub(crate) ended: i64,
    pub(crate) cut: i64,
}

#[derive(Debug, Default)]
pub(crate) struct Own {
    /// Client and inner tuple.
    pub(crate) flows: BTreeMap<(u8, u32), InnerFlow>,
    pub(crate) previous: BTreeMap<u8, Previous>,
    /// Client and own source port.
    pub(crate) pins: BTreeMap<Tuple, PinnedPort>,
    pub(crate) leaving: BTreeMap<([u8; 16], u32, bool), LeavingSeen>,
    pub(crate) drains: BTreeMap<[u8; 16], Drains>,
    /// Drained flows that fell out of the memory, by address: they stay counted.
    pub(crate) forgotten: BTreeMap<[u8; 16], i64>,
    pub(crate) memory_since: u64,
    pub(crate) returns: Returns,
}

/// Symmetric replies of mode rewrite.
#[derive(Debug, Default)]
pub(crate) struct Returns {
    /// Client and port.
    noted: BTreeSet<(u8, [u8; 2])>,
}

impl Returns {
    /// Of every other client.
    #[expect(clippy::unused_self, reason = "as a map would be asked")]
    pub(crate) fn is_returning(&self, client: u8) -> bool {
        client % 2 == 1
    }

    pub(crate) fn note(&mut self, client: u8, port: [u8; 2]) -> bool {
        self.noted.insert((client, port));
        true
    }

    pub(crate) fn is_noted(&self, client: u8, port: u16) -> bool {
        self.noted.contains(&(client, port.to_be_bytes()))
    }
}

impl Own {
    /// The record of a tuple that counts.
    pub(crate) fn pin(&self, tuple: Tuple) -> Option<&PinnedPort> {
        self.pins.get(&tuple).filter(|pin| pin.given_at.max(pin.stuck_since) >= self.memory_since)
    }

    /// When the program first saw a backend leaving, without noting it.
    pub(crate) fn first_seen(&self, address: &[u8; 16], id: u32, terminating: bool, now: u64) -> u64 {
        match self.leaving.get(&(*address, id, terminating)) {
            Some(seen) if now.saturating_sub(seen.last) <= LEAVING_PAUSE => seen.first,
            _ => now,
        }
    }

    pub(crate) fn leaving_since(&mut self, address: &[u8; 16], id: u32, terminating: bool, now: u64) -> u64 {
        let first = self.first_seen(address, id, terminating, now);
        self.leaving.insert((*address, id, terminating), LeavingSeen { first, last: now });
        first
    }

    pub(crate) fn count(&mut self, address: &[u8; 16], change: DrainChange) {
        let drains = self.drains.entry(*address).or_default();
        match change {
            DrainChange::Started => (drains.flows, drains.started) = (drains.flows + 1, drains.started + 1),
            DrainChange::Seen => {}
            DrainChange::Ended => (drains.flows, drains.ended) = (drains.flows - 1, drains.ended + 1),
            DrainChange::Cut => (drains.flows, drains.cut) = (drains.flows - 1, drains.cut + 1),
        }
    }

    /// The LRU gives a flow up.
    pub(crate) fn evict(&mut self, key: (u8, u32)) {
        if let Some(flow) = self.flows.remove(&key)
            && flow.flags & (FLOW_DRAINED | FLOW_ENDED) == FLOW_DRAINED
        {
            *self.forgotten.entry(flow.backend_address).or_default() += 1;
        }
    }

    /// Compares the gauges with the flows that they count.
    pub(crate) fn check_gauges(&self) -> Result<(), String> {
        for (address, drains) in &self.drains {
            let remembered = self
                .flows
                .values()
                .filter(|flow| flow.backend_address == *address)
                .filter(|flow| flow.flags & (FLOW_DRAINED | FLOW_ENDED) == FLOW_DRAINED)
                .count() as i64;
            let expected = remembered + self.forgotten.get(address).copied().unwrap_or(0);
            if drains.flows != expected || drains.flows != drains.started - drains.ended - drains.cut {
                return Err(format!("gauge of {address:?} is {drains:?}, {expected} flows are drained"));
            }
        }
        Ok(())
    }
}
