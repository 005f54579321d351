//! Metrics that are read from the datapath's maps when they are asked for.

use std::{
    collections::BTreeMap,
    fmt,
    sync::{Arc, Mutex, PoisonError},
};

use coil_guard_common::{abi::EgressCounters, counters::ReplyCount};
use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeLabelSet, MetricEncoder},
    metrics::MetricType,
};

use crate::{
    clock::Monotonic,
    datapath::{Snapshot, draining},
    plan::{MarkState, Mode},
};

/// The latest snapshot; filled before each scrape.
#[derive(Clone, Debug, Default)]
pub struct SnapshotCell(Arc<Mutex<Option<Snapshot>>>);

impl SnapshotCell {
    #[expect(clippy::unused_self, reason = "reads as one with the collector")]
    fn replies(&self, sheet: &mut Sheet<'_, '_>, snapshot: &Snapshot) -> fmt::Result {
        let replies = &snapshot.replies;
        sheet.counters(
            "reply_packets",
            "Packets of mode rewrite that the programs for symmetric replies saw, by what was done with them",
            ReplyCount::ALL.iter().map(|what| {
                let packets = replies.packets.get(what.label()).copied().unwrap_or(0);
                ([("action", what.label())], packets)
            }),
        )?;
        let sides = [("client", replies.clients.len()), ("egress", replies.egress_pods.len())];
        sheet.gauges(
            "reply_pods",
            "Pods of this node with programs for symmetric replies, by the side that they are on",
            sides.map(|(side, pods)| ([("side", side)], i64::try_from(pods).unwrap_or(i64::MAX))),
        )
    }

    /// Replaces the snapshot. `None` leaves the datapath's metrics out.
    pub fn set(&self, snapshot: Option<Snapshot>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = snapshot;
    }
}

/// Value of the `action` label, and where its number is.
type Action = (&'static str, fn(&EgressCounters) -> u64);

/// What the program does.
const ACTIONS: [Action; 13] = [
    ("moved", |counters| counters.moved),
    ("created", |counters| counters.created),
    ("repaired", |counters| counters.repaired),
    ("drained", |counters| counters.drained),
    ("cut", |counters| counters.cut),
    ("no_live", |counters| counters.no_live),
    ("would_move", |counters| counters.would_move),
    ("would_drain", |counters| counters.would_drain),
    ("not_drained", |counters| counters.not_drained),
    ("contended", |counters| counters.contended),
    ("rewritten", |counters| counters.rewritten),
    ("new_port", |counters| counters.new_ports),
    ("cannot_move", |counters| counters.cannot_move),
];

const STATES: [(&str, MarkState); 4] = [
    ("ready", MarkState::Ready),
    ("not_ready", MarkState::NotReady),
    ("leaving", MarkState::Leaving),
    ("gone", MarkState::Gone),
];

struct Sheet<'a, 'b>(&'a mut DescriptorEncoder<'b>);

impl Sheet<'_, '_> {
    fn counters<L: EncodeLabelSet>(
        &mut self,
        name: &str,
        help: &str,
        series: impl IntoIterator<Item = (L, u64)>,
    ) -> fmt::Result {
        let mut family = self.0.encode_descriptor(name, help, None, MetricType::Counter)?;
        for (labels, value) in series {
            let mut metric = family.encode_family(&labels)?;
            metric.encode_counter::<[(&str, &str); 0], _, u64>(&value, None)?;
        }
        Ok(())
    }

    fn gauges<L: EncodeLabelSet>(
        &mut self,
        name: &str,
        help: &str,
        series: impl IntoIterator<Item = (L, i64)>,
    ) -> fmt::Result {
        let mut family = self.0.encode_descriptor(name, help, None, MetricType::Gauge)?;
        for (labels, value) in series {
            let mut metric: MetricEncoder<'_> = family.encode_family(&labels)?;
            metric.encode_gauge(&value)?;
        }
        Ok(())
    }
}

fn number<T: PartialEq>(items: impl Iterator<Item = T>, wanted: &T) -> i64 {
    i64::try_from(items.filter(|item| item == wanted).count()).unwrap_or(i64::MAX)
}

impl Collector for SnapshotCell {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let guard = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(snapshot) = guard.as_ref() else { return Ok(()) };
        let mut sheet = Sheet(&mut encoder);
        sheet.counters(
            "packets",
            "Packets that the programs saw, by what was done with them",
            snapshot.packets.iter().map(|(reason, packets)| ([("reason", *reason)], *packets)),
        )?;
        let egresses = || {
            let names = snapshot.egresses.iter();
            names.map(|(name, counters)| (&*name.namespace, &*name.name, counters))
        };
        sheet.counters(
            "egress_packets",
            "FoU packets to the Egress's Service",
            egresses().map(|(namespace, egress, counters)| {
                ([("namespace", namespace), ("egress", egress)], counters.packets)
            }),
        )?;
        sheet.counters(
            "egress_actions",
            "What was done for the Egress; drained, no_live, would_move, would_drain, rewritten and cannot_move count packets, the others \
             flows",
            egresses().flat_map(|(namespace, egress, counters)| {
                ACTIONS.iter().map(move |(action, get)| {
                    ([("namespace", namespace), ("egress", egress), ("action", *action)], get(counters))
                })
            }),
        )?;
        sheet.gauges(
            "guarded_services",
            "Guarded addresses of Services, by mode",
            Mode::ALL.iter().map(|mode| {
                let services = snapshot.services.values().map(|service| service.mode);
                ([("mode", mode.name())], number(services, mode))
            }),
        )?;
        sheet.gauges(
            "backends",
            "Backend addresses by what the agent has marked them as",
            STATES.iter().map(|(label, state)| {
                ([("state", *label)], number(snapshot.marks.values().map(|mark| mark.state), state))
            }),
        )?;
        self.drains(&mut sheet, snapshot)?;
        self.replies(&mut sheet, snapshot)?;
        sheet.gauges(
            "heartbeat_valid_seconds",
            "For how much longer the agent's list of ready backends counts; negative when it does not",
            [([("", ""); 0], heartbeat(snapshot))],
        )
    }
}

impl SnapshotCell {
    /// Only backends that are leaving or still have drained flows: the label's values must not add up over the years.
    #[expect(clippy::unused_self, reason = "reads as one with the collector")]
    fn drains(&self, sheet: &mut Sheet<'_, '_>, snapshot: &Snapshot) -> fmt::Result {
        let current: BTreeMap<String, _> = snapshot
            .drains
            .iter()
            .filter(|(address, drain)| {
                let leaving = |state| matches!(state, MarkState::Leaving | MarkState::Gone);
                draining(drain) > 0 || snapshot.marks.get(address).is_some_and(|mark| leaving(mark.state))
            })
            .map(|(address, drain)| (address.to_string(), drain))
            .collect();
        sheet.gauges(
            "drained_flows",
            "Inner flows that stay on the leaving backend for now; flows that never said goodbye stay counted",
            current.iter().map(|(backend, drain)| {
                ([("backend", backend.as_str())], i64::try_from(draining(drain)).unwrap_or(i64::MAX))
            }),
        )?;
        sheet.counters(
            "drains",
            "Inner flows of a leaving backend by what became of them: started, ended by themselves, cut at the deadline",
            current.iter().flat_map(|(backend, drain)| {
                [("started", drain.started), ("ended", drain.ended), ("cut", drain.cut)]
                    .map(|(outcome, flows)| ([("backend", backend.as_str()), ("outcome", outcome)], flows))
            }),
        )
    }
}

fn heartbeat(snapshot: &Snapshot) -> i64 {
    let Some(until) = snapshot.heartbeat_until else { return 0 };
    let seconds =
        |later: Monotonic, earlier| i64::try_from(later.since(earlier).as_secs()).unwrap_or(i64::MAX);
    if until >= snapshot.time { seconds(until, snapshot.time) } else { -seconds(snapshot.time, until) }
}
