//! Alert rules and the dashboard against the metrics that the agent has.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
};

use anyhow::{Context as _, Result, bail, ensure};
use coil_guard::{
    datapath::Snapshot,
    observe::{Metrics, SnapshotCell},
    plan::EgressName,
};
use coil_guard_common::{
    abi::{DrainStats, EgressCounters},
    counters::Reason,
};
use coil_guard_tests::manifests::{deploy, documents};
use serde_json::Value;
use zerocopy::FromZeros as _;

/// Sample names, with the labels of each and their values.
type Known = BTreeMap<String, BTreeMap<String, BTreeSet<String>>>;

/// What an agent with everything to tell shows.
fn known() -> Result<Known> {
    let cell = SnapshotCell::default();
    let metrics = Metrics::new(cell.clone());
    let mut drain = DrainStats::new_zeroed();
    drain.flows = 1;
    cell.set(Some(Snapshot {
        packets: Reason::ALL.iter().map(|reason| (reason.label(), 1)).collect(),
        egresses: [(EgressName { namespace: "n".into(), name: "e".into() }, EgressCounters::new_zeroed())]
            .into(),
        drains: [("10.0.0.1".parse()?, drain)].into(),
        ..Snapshot::default()
    }));
    let mut known = Known::new();
    for line in metrics.encode()?.lines().filter(|line| !line.starts_with('#')) {
        let (name, labels) = match line.split_once('{') {
            Some((name, rest)) => (name, rest.split_once('}').context("an open brace")?.0),
            None => (line.split(' ').next().unwrap_or_default(), ""),
        };
        let sample = known.entry(name.to_owned()).or_default();
        for label in labels.split(',').filter(|label| !label.is_empty()) {
            let (key, value) = label.split_once('=').with_context(|| format!("{line}: {label}"))?;
            sample.entry(key.to_owned()).or_default().insert(value.trim_matches('"').to_owned());
        }
    }
    ensure!(known.len() > 20, "only {known:?}");
    Ok(known)
}

/// Labels that a scrape adds, and those whose values are the cluster's own.
const ADDED: [&str; 1] = ["instance"];
const OPEN: [&str; 5] = ["namespace", "egress", "backend", "version", "le"];

/// Checks each selector of an expression.
fn check(expression: &str, known: &Known) -> Result<()> {
    let count = |wanted: char| expression.chars().filter(|c| *c == wanted).count();
    for (open, close) in [('(', ')'), ('{', '}'), ('[', ']')] {
        ensure!(count(open) == count(close), "{open}{close} do not match: {expression}");
    }
    let mut rest = expression;
    let mut selectors = 0;
    while let Some(at) = rest.find("coil_guard_") {
        let text = &rest[at..];
        let end = text.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(text.len());
        let (name, after) = text.split_at(end);
        let labels =
            known.get(name).with_context(|| format!("the agent has no metric {name}: {expression}"))?;
        if let Some(matchers) = after.strip_prefix('{') {
            let matchers = matchers.split_once('}').context("an open brace")?.0;
            for matcher in matchers.split(", ") {
                check_matcher(matcher, labels).with_context(|| format!("{name}: {expression}"))?;
            }
        }
        check_grouping(&rest[..at], labels).with_context(|| format!("{name}: {expression}"))?;
        selectors += 1;
        rest = after;
    }
    ensure!(selectors > 0, "no metric of ours in {expression}");
    Ok(())
}

fn check_matcher(matcher: &str, labels: &BTreeMap<String, BTreeSet<String>>) -> Result<()> {
    let (key, value) = matcher.split_once('=').with_context(|| format!("not understood: {matcher:?}"))?;
    let (key, value) = (key.trim_end_matches('!'), value.trim_start_matches('~').trim_matches('"'));
    if ADDED.contains(&key) {
        return Ok(());
    }
    let values =
        labels.get(key).with_context(|| format!("it has no label {key:?}, only {:?}", labels.keys()))?;
    if !OPEN.contains(&key) {
        for value in value.split('|') {
            ensure!(values.contains(value), "{key} is never {value:?}, but one of {values:?}");
        }
    }
    Ok(())
}

/// `by (…)` directly before a selector, if there is one, names labels that the metric has.
fn check_grouping(before: &str, labels: &BTreeMap<String, BTreeSet<String>>) -> Result<()> {
    let Some((_, by)) = before.rsplit_once("by (") else { return Ok(()) };
    for label in by.split_once(')').context("an open parenthesis")?.0.split(", ") {
        let known = labels.contains_key(label) || ADDED.contains(&label);
        ensure!(known, "grouped by {label:?}, which is none of {:?}", labels.keys());
    }
    Ok(())
}

#[test]
fn a_wrong_expression_is_noticed() -> Result<()> {
    let known = known()?;
    for wrong in [
        "coil_guard_packets == 0",
        "rate(coil_guard_packets_total{reason=\"forein_source\"}[5m])",
        "rate(coil_guard_packets_total{egress=\"x\"}[5m])",
        "sum by (egress) (coil_guard_ready)",
        "sum(coil_guard_ready",
        "up == 0",
    ] {
        ensure!(check(wrong, &known).is_err(), "{wrong} was taken");
    }
    Ok(())
}

#[test]
fn every_alert_is_about_a_metric_that_exists_and_says_what_to_do() -> Result<()> {
    let known = known()?;
    let rules = documents(&deploy().join("prometheus/rules.yaml"))?.pop().context("empty")?;
    let mut names = BTreeSet::new();
    for rule in rules["groups"]
        .as_array()
        .into_iter()
        .flatten()
        .flat_map(|g| g["rules"].as_array().into_iter().flatten())
    {
        let name = rule["alert"].as_str().context("a rule without a name")?;
        ensure!(names.insert(name.to_owned()), "{name} is there twice");
        let expression = rule["expr"].as_str().context("no expression")?;
        check(expression, &known).with_context(|| name.to_owned())?;
        ensure!(
            matches!(rule["labels"]["severity"].as_str(), Some("critical" | "warning" | "info")),
            "{name}"
        );
        for field in ["summary", "description"] {
            let text = rule["annotations"][field].as_str().unwrap_or_default();
            ensure!(text.len() > 20, "{name}: {field}: {text:?}");
            check_template(text, expression).with_context(|| format!("{name}: {field}"))?;
        }
    }
    ensure!(names.len() >= 10, "{names:?}");
    Ok(())
}

/// `{{ $labels.x }}` is empty when an aggregation has taken x away.
fn check_template(text: &str, expression: &str) -> Result<()> {
    for used in text.split("$labels.").skip(1) {
        let label: String = used.chars().take_while(|c| c.is_ascii_alphanumeric() || *c == '_').collect();
        if let Some((_, by)) = expression.split_once("by (") {
            let kept = by.split_once(')').context("an open parenthesis")?.0;
            ensure!(kept.split(", ").any(|k| k == label), "{label:?} is gone: {expression}");
        }
    }
    Ok(())
}

#[test]
fn the_operators_rules_are_the_same() -> Result<()> {
    let plain = documents(&deploy().join("prometheus/rules.yaml"))?.pop().context("empty")?;
    let operator =
        documents(&deploy().join("overlays/podmonitor/prometheusrule.yaml"))?.pop().context("empty")?;
    ensure!(
        plain["groups"] == operator["spec"]["groups"],
        "prometheus/rules.yaml and prometheusrule.yaml differ"
    );
    Ok(())
}

#[test]
fn the_dashboard_shows_metrics_that_exist() -> Result<()> {
    let known = known()?;
    let text = fs::read_to_string(deploy().join("grafana/coil-guard.json"))?;
    let dashboard: Value = serde_json::from_str(&text)?;
    let variables: BTreeSet<_> = dashboard["templating"]["list"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|v| v["name"].as_str())
        .collect();
    let mut ids = BTreeSet::new();
    let mut taken: Vec<(u64, u64, u64, u64)> = Vec::new();
    let mut expressions = 0;
    for panel in dashboard["panels"].as_array().context("no panels")? {
        let title = panel["title"].as_str().context("a panel without a title")?;
        ensure!(ids.insert(panel["id"].as_u64()), "{title}: its id is taken");
        let at =
            |field: &str| panel["gridPos"][field].as_u64().with_context(|| format!("{title}: no {field}"));
        let place = (at("x")?, at("y")?, at("x")? + at("w")?, at("y")? + at("h")?);
        ensure!(place.2 <= 24, "{title}: too wide");
        let overlaps =
            |t: &&(u64, u64, u64, u64)| place.0 < t.2 && t.0 < place.2 && place.1 < t.3 && t.1 < place.3;
        ensure!(taken.iter().find(overlaps).is_none(), "{title}: lies over another panel");
        taken.push(place);
        if panel["type"] == "row" {
            continue;
        }
        ensure!(panel["datasource"]["uid"] == "${datasource}", "{title}: a fixed data source");
        ensure!(!panel["description"].as_str().unwrap_or_default().is_empty(), "{title}: no description");
        for target in panel["targets"].as_array().into_iter().flatten() {
            let expression = target["expr"].as_str().context("no expression")?;
            check(expression, &known).with_context(|| title.to_owned())?;
            for used in expression.split('$').skip(1) {
                let name: String =
                    used.chars().take_while(|c| c.is_ascii_alphanumeric() || *c == '_').collect();
                let fine = name.starts_with("__") || variables.contains(name.as_str());
                ensure!(fine, "{title}: there is no variable ${name}");
            }
            expressions += 1;
        }
    }
    for variable in dashboard["templating"]["list"].as_array().into_iter().flatten() {
        match variable["query"]["query"].as_str() {
            Some(query) => check(query, &known).with_context(|| variable["name"].to_string())?,
            None if variable["type"] == "datasource" => {}
            None => bail!("variable {} has no query", variable["name"]),
        }
    }
    ensure!(expressions > 20, "{expressions}");
    Ok(())
}
