//! One case: what was measured, and how it is told.

use serde::Serialize;

use crate::bench::{Goal, Table, short};

/// One case.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Case {
    /// What the packet is.
    pub(super) name: String,
    /// `IPv4` or `IPv6`.
    pub(super) family: &'static str,
    /// `repeated` or `prepared`.
    pub(super) method: &'static str,
    /// The verdict that was counted.
    pub(super) verdict: String,
    /// The program, ns.
    pub(super) nanoseconds: f64,
    /// An empty classifier, ns, measured in turns with it.
    pub(super) empty_nanoseconds: f64,
    /// One lookup in the conntrack map over the empty classifier, ns.
    pub(super) lookup_nanoseconds: f64,
    /// The program over the empty classifier, ns.
    pub(super) over_empty_nanoseconds: f64,
    /// That, in lookups.
    pub(super) lookups: f64,
    /// What it may cost over the empty classifier, ns.
    pub(super) goal_nanoseconds: Option<f64>,
    /// Another build of the program over the empty classifier, ns.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) other_nanoseconds: Option<f64>,
    /// The other build's time over this one's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) ratio_to_other: Option<f64>,
}

/// A row for each case with both families in it.
pub(super) fn tables(cases: &[Case]) -> Vec<Table> {
    let compared = cases.iter().any(|case| case.other_nanoseconds.is_some());
    let mut columns =
        vec!["packet", "run", "IPv4", "lookups", "goal", "IPv6", "lookups", "empty", "one lookup"];
    if compared {
        columns.extend(["other IPv4", "ratio"]);
    }
    let mut table = Table::new("Nanoseconds a packet over an empty classifier", &columns);
    for case in cases.iter().filter(|case| case.family == "IPv4") {
        let other_family = cases.iter().find(|other| other.family == "IPv6" && other.name == case.name);
        let of = |case: Option<&Case>, get: fn(&Case) -> f64| {
            case.map_or_else(|| "-".to_owned(), |case| format!("{:.1}", get(case)))
        };
        let mut row = vec![
            case.name.clone(),
            case.method.to_owned(),
            of(Some(case), |case| case.over_empty_nanoseconds),
            of(Some(case), |case| case.lookups),
            case.goal_nanoseconds.map_or_else(|| "-".to_owned(), |goal| format!("{goal:.0}")),
            of(other_family, |case| case.over_empty_nanoseconds),
            of(other_family, |case| case.lookups),
            of(Some(case), |case| case.empty_nanoseconds),
            of(Some(case), |case| case.lookup_nanoseconds),
        ];
        if compared {
            let optional = |value: Option<f64>| value.map_or_else(|| "-".to_owned(), short);
            row.extend([optional(case.other_nanoseconds), optional(case.ratio_to_other)]);
        }
        table.row(row);
    }
    vec![table]
}

/// The goals of the cases that have one, each family by itself.
pub(super) fn goals(cases: &[Case]) -> Vec<Goal> {
    let goal = |case: &Case| {
        let what = format!("{}, {}", case.name, case.family);
        Some(Goal::below(&what, case.goal_nanoseconds?, case.over_empty_nanoseconds, "ns"))
    };
    cases.iter().filter_map(goal).collect()
}
