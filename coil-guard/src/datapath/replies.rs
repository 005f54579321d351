//! Symmetric replies of mode `rewrite`: on egress pods of this node, and on client pods.

use std::{collections::BTreeMap, net::IpAddr};

use aya::maps::{HashMap, MapData, PerCpuArray};
use coil_guard_common::{
    abi::{self, maps},
    counters::ReplyCount,
};

use super::{
    DatapathError, PodSnapshot,
    layout::Layout,
    own_maps::{map_error, open_own},
    part::{Key, Part},
    records::{Attached, full_or, is_absent, typed},
    report::to_mapped,
};
use crate::plan::PodUid;

/// The object with the cores; empty where there was no toolchain to build it.
pub static REPLIES_OBJECT: &[u8] =
    aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/coil-guard-replies-bpf"));

/// What is done about replies on this node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReplySnapshot {
    /// Client pods whose replies are given the FoU port again.
    pub clients: BTreeMap<PodUid, PodSnapshot>,
    /// Egress pods that send replies to the port that a client's packets come from.
    pub egress_pods: BTreeMap<PodUid, PodSnapshot>,
    /// Clients that egress pods of this node have learnt a port of.
    pub learnt: usize,
    /// What the programs did, by [`ReplyCount`], every one present.
    pub packets: BTreeMap<&'static str, u64>,
}

impl ReplySnapshot {
    pub(super) fn read(layout: &Layout, parts: &BTreeMap<Key, Attached>) -> Result<Self, DatapathError> {
        let mut snapshot = Self {
            packets: ReplyCount::ALL.iter().map(|what| (what.label(), 0)).collect(),
            ..Self::default()
        };
        for (key, attached) in parts {
            match key.part {
                Part::Return => drop(snapshot.clients.insert(key.uid.clone(), attached.into())),
                // Both, or nothing is done.
                Part::Answer if parts.contains_key(&Key::new(&key.uid, Part::Learn)) => {
                    snapshot.egress_pods.insert(key.uid.clone(), attached.into());
                }
                Part::Answer | Part::Learn | Part::Guard => {}
            }
        }
        if let Some(map) = open_own(layout, maps::ANSWERS)? {
            let map: HashMap<_, abi::AnswerKey, abi::Answer> = typed(map, maps::ANSWERS)?;
            snapshot.learnt = map.keys().filter(Result::is_ok).count();
        }
        if let Some(map) = open_own(layout, maps::REPLY_COUNTERS)? {
            let counters: PerCpuArray<_, u64> = typed(map, maps::REPLY_COUNTERS)?;
            for what in ReplyCount::ALL.iter().filter(|what| (**what as u32) < counters.len()) {
                let values =
                    counters.get(&(*what as u32), 0).map_err(map_error("read", maps::REPLY_COUNTERS))?;
                let total = values.iter().fold(0, |total: u64, value| total.wrapping_add(*value));
                snapshot.packets.insert(what.label(), total);
            }
        }
        Ok(snapshot)
    }
}

/// Which client pods can have replies at ports that they are given, by address, with their generation.
#[derive(Debug)]
pub(crate) struct Returning {
    map: HashMap<MapData, [u8; 16], abi::Returning>,
    size: u32,
    /// A copy of what it holds: nobody else writes it.
    have: BTreeMap<[u8; 16], u32>,
}

impl Returning {
    /// Opens the pinned map; `None` when there is none.
    pub(crate) fn open(layout: &Layout) -> Result<Option<Self>, DatapathError> {
        let Some(map) = open_own(layout, maps::RETURNING)? else { return Ok(None) };
        let size = map.info().map_err(map_error("inspect", maps::RETURNING))?.max_entries();
        let map: HashMap<_, [u8; 16], abi::Returning> = typed(map, maps::RETURNING)?;
        let have = map
            .iter()
            .map(|entry| entry.map(|(address, value)| (address, value.generation)))
            .collect::<Result<_, _>>()
            .map_err(map_error("read", maps::RETURNING))?;
        Ok(Some(Self { map, size, have }))
    }

    /// Makes it hold these and no others.
    pub(crate) fn set(&mut self, wanted: BTreeMap<IpAddr, u32>) -> Result<(), DatapathError> {
        let wanted: BTreeMap<_, _> =
            wanted.into_iter().map(|(address, generation)| (to_mapped(address), generation)).collect();
        let stale: Vec<_> =
            self.have.keys().filter(|address| !wanted.contains_key(*address)).copied().collect();
        for address in stale {
            match self.map.remove(&address) {
                Err(error) if !is_absent(&error) => {
                    return Err(map_error("remove from", maps::RETURNING)(error));
                }
                _ => drop(self.have.remove(&address)),
            }
        }
        for (address, generation) in wanted {
            if self.have.get(&address) == Some(&generation) {
                continue;
            }
            let value = abi::Returning { generation, pad: 0 };
            self.map.insert(address, value, 0).map_err(|error| {
                let what = || "a client whose replies are turned back".to_owned();
                full_or(error, maps::RETURNING, self.size, what, "--map-pods")
            })?;
            self.have.insert(address, generation);
        }
        Ok(())
    }
}
