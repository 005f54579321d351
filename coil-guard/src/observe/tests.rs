//! The metrics against their documentation.

use std::collections::{BTreeMap, BTreeSet};

use coil_guard_common::abi::{DrainStats, EgressCounters};
use zerocopy::FromZeros as _;

use super::*;
use crate::{
    clock::Monotonic,
    datapath::{MarkSnapshot, ServiceSnapshot, Snapshot},
    plan::{EgressName, Keep, MarkState, Mode, ServiceAddress},
};

const DOCUMENTATION: &str = include_str!("../../../docs/metrics.md");

fn snapshot() -> Snapshot {
    let egress = EgressName { namespace: "net".into(), name: "nat".into() };
    let backend = [10, 0, 1, 1].into();
    let mark = MarkSnapshot {
        state: MarkState::Leaving,
        keep: Keep::No,
        since: Monotonic(0),
        valid_until: Monotonic(9),
    };
    let service = ServiceSnapshot {
        egress: Some(egress.clone()),
        mode: Mode::Drain,
        sport_auto: false,
        tracked_since: None,
        expires_at: Monotonic(9),
    };
    Snapshot {
        time: Monotonic(10_000_000_000),
        packets: BTreeMap::from([("moved", 7)]),
        egresses: BTreeMap::from([(
            egress,
            EgressCounters { moved: 3, packets: 9, ..EgressCounters::new_zeroed() },
        )]),
        drains: BTreeMap::from([(backend, DrainStats { flows: 2, started: 5, ..DrainStats::new_zeroed() })]),
        services: BTreeMap::from([(ServiceAddress { address: [10, 96, 0, 10].into(), port: 5555 }, service)]),
        marks: BTreeMap::from([(backend, mark)]),
        heartbeat_until: Some(Monotonic(4_000_000_000)),
        ..Snapshot::default()
    }
}

fn encoded() -> String {
    let cell = SnapshotCell::default();
    let metrics = Metrics::new(cell.clone());
    cell.set(Some(snapshot()));
    metrics.encode().unwrap()
}

/// Type and label names by metric.
type Described = BTreeMap<String, (String, BTreeSet<String>)>;

fn exported(text: &str) -> Described {
    let mut described = Described::new();
    let mut current = String::new();
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').unwrap();
            current = name.to_owned();
            described.insert(current.clone(), (kind.to_owned(), BTreeSet::new()));
        } else if let Some((_, rest)) = line.split_once('{').filter(|_| line.starts_with(&current)) {
            let labels =
                rest.rsplit_once('}').unwrap().0.split(',').filter_map(|label| label.split_once('='));
            let names = labels.map(|(name, _)| name.to_owned()).filter(|name| name != "le");
            described.get_mut(&current).unwrap().1.extend(names);
        }
    }
    described
}

fn documented() -> Described {
    let quoted =
        |cell: &str| -> Vec<String> { cell.split('`').skip(1).step_by(2).map(str::to_owned).collect() };
    DOCUMENTATION
        .lines()
        .filter(|line| line.starts_with("| `coil_guard_"))
        .map(|line| {
            let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
            let [name, kind, labels, meaning] = cells[..] else { panic!("four cells are expected: {line}") };
            assert!(!meaning.is_empty(), "{line}");
            (quoted(name).remove(0), (kind.to_owned(), quoted(labels).into_iter().collect()))
        })
        .collect()
}

#[test]
fn every_metric_is_documented_as_it_is() {
    assert_eq!(exported(&encoded()), documented());
}

#[test]
fn values_of_the_datapath_come_through() {
    let text = encoded();
    for line in [
        "coil_guard_packets_total{reason=\"moved\"} 7",
        "coil_guard_egress_packets_total{namespace=\"net\",egress=\"nat\"} 9",
        "coil_guard_egress_actions_total{namespace=\"net\",egress=\"nat\",action=\"moved\"} 3",
        "coil_guard_guarded_services{mode=\"drain\"} 1",
        "coil_guard_guarded_services{mode=\"reset\"} 0",
        "coil_guard_backends{state=\"leaving\"} 1",
        "coil_guard_drained_flows{backend=\"10.0.1.1\"} 2",
        "coil_guard_drains_total{backend=\"10.0.1.1\",outcome=\"started\"} 5",
        "coil_guard_heartbeat_valid_seconds -6",
    ] {
        assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
    }
}

#[test]
fn documented_values_of_fixed_labels_are_those_that_are_exported() {
    let text = encoded();
    for (label, name) in [("outcome", "attachments"), ("kind", "flow_events"), ("action", "egress_actions")] {
        let prefix = format!("coil_guard_{name}_total{{");
        for line in text.lines().filter(|line| line.starts_with(&prefix)) {
            let value = line.split(&format!("{label}=\"")).nth(1).unwrap().split('"').next().unwrap();
            let row =
                DOCUMENTATION.lines().find(|row| row.contains(&format!("`coil_guard_{name}`"))).unwrap();
            assert!(row.contains(&format!("`{value}`")), "{value} of {name} is not documented");
        }
    }
}

#[test]
fn readiness_reports_each_condition() {
    let readiness = Readiness::new("starting");
    assert!(!readiness.is_ready());
    readiness.set(vec![
        Condition { name: "egress", problem: None },
        Condition { name: "cilium_maps", problem: Some("missing".into()) },
    ]);
    assert_eq!(readiness.report(), "[+]egress ok\n[-]cilium_maps missing\n");
    readiness.set(vec![Condition { name: "egress", problem: None }]);
    assert!(readiness.is_ready());
    readiness.turn(Monotonic(0));
    assert!(readiness.is_live(Monotonic(59_000_000_000)) && !readiness.is_live(Monotonic(61_000_000_000)));
}
