//! What happened, as notices about an Egress. Pure but for the log.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use crate::{
    clock::Monotonic,
    datapath::{FlowEvent, FlowEventKind},
    index::{AnnotationProblem, Egress, EgressMode, Index},
    k8s::{Ledger, Notice, Topic, Write},
    plan::{ClientPod, EgressName, Mode, Settings},
};

/// Added to the text about a drain without a preStop hook: what to write where.
const PRE_STOP_ADVICE: &str = "coil-egress exits about 5 s after SIGTERM, and existing connections with it. Add to the \
    Egress: spec.template.spec: {terminationGracePeriodSeconds: 600, containers: [{name: egress, lifecycle: {preStop: \
    {exec: {command: [sleep, \"590\"]}}}}]}";

/// Remembers what has been told.
#[derive(Debug)]
pub(super) struct Notices {
    node: String,
    ledger: Ledger,
    /// By Egress; empty until the first look, which changes nothing.
    modes: Option<BTreeMap<EgressName, EgressMode>>,
    problems: BTreeSet<(EgressName, AnnotationProblem)>,
    no_pre_stop: BTreeSet<EgressName>,
    refused: BTreeSet<EgressName>,
}

fn mode_name(mode: EgressMode) -> &'static str {
    mode.map_or("off", Mode::name)
}

impl Notices {
    pub(super) fn new(node: String) -> Self {
        Self {
            node,
            ledger: Ledger::default(),
            modes: None,
            problems: BTreeSet::new(),
            no_pre_stop: BTreeSet::new(),
            refused: BTreeSet::new(),
        }
    }

    /// Looks at every Egress. Only nodes that have clients of an Egress write events about its configuration: a cluster
    /// of hundreds of nodes would say the same thing hundreds of times.
    pub(super) fn configuration(&mut self, index: &Index, settings: &Settings, now: Monotonic) {
        let here: BTreeSet<&EgressName> =
            index.local_pods().values().flat_map(|local| local.pod.egresses.iter()).collect();
        let mut problems = BTreeSet::new();
        let mut modes = BTreeMap::new();
        let mut no_pre_stop = BTreeSet::new();
        let mut refused = BTreeSet::new();
        for (name, egress) in index.egresses() {
            let mode = settings.mode(egress);
            let is_here = here.contains(name);
            self.mode(name, egress, mode, is_here, now);
            modes.insert(name.clone(), mode);
            for problem in &egress.problems {
                self.problem(name, egress, problem, is_here, now);
                problems.insert((name.clone(), problem.clone()));
            }
            if let Some(asked) = settings.refused(egress) {
                if !self.refused.contains(name) {
                    self.refusal(name, egress, asked, is_here, now);
                }
                refused.insert(name.clone());
            }
            if mode == Some(Mode::Drain) && !egress.pre_stop && is_here {
                if !self.no_pre_stop.contains(name) {
                    tracing::warn!(egress = %name, "mode drain without a preStop hook: a drain lasts about 5 s");
                    let text = format!(
                        "Mode drain, and the container egress has no preStop hook: {PRE_STOP_ADVICE}"
                    );
                    self.take(name, egress, Topic::NoPreStop, None, text, now);
                }
                no_pre_stop.insert(name.clone());
            }
        }
        (self.modes, self.problems) = (Some(modes), problems);
        (self.no_pre_stop, self.refused) = (no_pre_stop, refused);
    }

    fn refusal(&mut self, name: &EgressName, egress: &Egress, asked: Mode, is_here: bool, now: Monotonic) {
        let asked = asked.name();
        let text = format!(
            "Mode {asked} writes to Cilium's conntrack map, which --cilium-access read-only forbids on node {}: treated as \
             off. Allowed are audit and rewrite",
            self.node
        );
        tracing::warn!(egress = %name, mode = asked, "the mode is refused: Cilium's maps may only be read");
        if is_here {
            self.take(name, egress, Topic::ModeRefused, None, text, now);
        }
    }

    fn mode(&mut self, name: &EgressName, egress: &Egress, mode: EgressMode, is_here: bool, now: Monotonic) {
        // At the start, and for a new Egress, there is nothing that it changed from.
        let Some(before) = self.modes.as_ref().and_then(|modes| modes.get(name)).copied() else { return };
        if before == mode {
            return;
        }
        tracing::info!(egress = %name, mode = mode_name(mode), before = mode_name(before), "mode changed");
        if is_here {
            let (mode, before) = (mode_name(mode), mode_name(before));
            let text = format!("The guard's mode is now {mode}, it was {before} (node {})", self.node);
            self.take(name, egress, Topic::ModeChanged, None, text, now);
        }
    }

    fn problem(
        &mut self,
        name: &EgressName,
        egress: &Egress,
        problem: &AnnotationProblem,
        is_here: bool,
        now: Monotonic,
    ) {
        if self.problems.contains(&(name.clone(), problem.clone())) {
            return;
        }
        tracing::warn!(egress = %name, "{problem}");
        if is_here {
            let topic = Topic::InvalidAnnotation(problem.key);
            self.take(name, egress, topic, None, problem.to_string(), now);
        }
    }

    /// Number of Egresses with an annotation that is not understood.
    pub(super) fn invalid_egresses(&self) -> usize {
        self.problems.iter().map(|(name, _)| name).collect::<BTreeSet<_>>().len()
    }

    /// Number of Egresses whose mode is refused.
    pub(super) fn refused_egresses(&self) -> usize {
        self.refused.len()
    }

    /// A client pod could not be attached.
    pub(super) fn attach_failed(&mut self, index: &Index, pod: &ClientPod, error: &str, now: Monotonic) {
        let client = format!("{}/{}", pod.namespace, pod.name);
        for name in &pod.egresses {
            let text = format!("not guarded on node {}: {client}: {error}", self.node);
            self.about(index, name, Topic::AttachFailed, Some(client.clone()), text, now);
        }
    }

    /// A client pod's ephemeral ports overlap the drain ports.
    pub(super) fn ports_overlap(&mut self, index: &Index, pod: &ClientPod, now: Monotonic) {
        let client = format!("{}/{}", pod.namespace, pod.name);
        for name in &pod.egresses {
            let concerned = |egress: &&Egress| egress.sport_auto;
            if index.egresses().get(name).filter(concerned).is_none() {
                continue;
            }
            let text = format!(
                "net.ipv4.ip_local_port_range of {client} overlaps the drain ports 61000 to 65095, and the Egress has \
                 fouSourcePortAuto: the pod's flows are reset and not drained"
            );
            self.about(index, name, Topic::PortsOverlap, Some(client.clone()), text, now);
        }
    }

    /// The program did something.
    pub(super) fn flow(&mut self, index: &Index, name: &EgressName, event: &FlowEvent, now: Monotonic) {
        let node = &self.node;
        let from = event.from.map(|(address, _)| address);
        let of = |address: IpAddr| describe(index, name, address);
        let (topic, text) = match (event.kind, from) {
            (FlowEventKind::Moved, Some(from)) => {
                (Topic::Moved(from), format!("Flows moved off leaving backend {} on node {node}", of(from)))
            }
            (FlowEventKind::WouldMove, Some(from)) => (
                Topic::WouldMove(from),
                format!("Audit: flows would have moved off leaving backend {} on node {node}", of(from)),
            ),
            (FlowEventKind::NoLive, from) => {
                let on = from
                    .map_or_else(|| "no backend".to_owned(), |from| format!("leaving backend {}", of(from)));
                (
                    Topic::NoLive(from),
                    format!(
                        "No backend is live, so flows stay on {on} on node {node}: see whether the Egress's pods are \
                         Ready, and whether Cilium knows them"
                    ),
                )
            }
            (FlowEventKind::DrainPortCollision, Some(from)) => (
                Topic::NotDrained(from),
                format!(
                    "Flows of leaving backend {} on node {node} were reset and not drained: another draining backend \
                     has their drain port",
                    of(from)
                ),
            ),
            (FlowEventKind::CannotMove, Some(from)) => {
                let why = match event.to {
                    Some((to, _)) => format!(
                        "Cilium's session affinity would send them back to {} from any source port (Cilium up to 1.17, or a \
                         backend that is not ready). Use mode reset, or set the Egress's sessionAffinity to None",
                        of(to)
                    ),
                    None => "Cilium chose leaving backends again, or has none that it could choose; they are tried again after \
                             a pause"
                        .to_owned(),
                };
                (
                    Topic::CannotMove(from),
                    format!("Rewrite: flows stay on leaving backend {} on node {node}: {why}", of(from)),
                )
            }
            (_, None) => return,
        };
        self.about(index, name, topic, Some(event.client.to_string()), text, now);
    }

    fn about(
        &mut self,
        index: &Index,
        name: &EgressName,
        topic: Topic,
        client: Option<String>,
        text: String,
        now: Monotonic,
    ) {
        // An Egress that is gone has nowhere to show events.
        if let Some(egress) = index.egresses().get(name) {
            self.take(name, egress, topic, client, text, now);
        }
    }

    fn take(
        &mut self,
        name: &EgressName,
        egress: &Egress,
        topic: Topic,
        client: Option<String>,
        text: String,
        now: Monotonic,
    ) {
        let notice = Notice { egress: name.clone(), egress_uid: egress.uid.clone(), topic, client, text };
        self.ledger.take(notice, now);
    }

    /// See [`Ledger::next_due`].
    pub(super) fn next_due(&self) -> Option<Monotonic> {
        self.ledger.next_due()
    }

    /// See [`Ledger::due`].
    pub(super) fn due(&mut self, now: Monotonic) -> Vec<Write> {
        self.ledger.due(now)
    }
}

/// A backend's address, with the name of its pod if that is known.
fn describe(index: &Index, egress: &EgressName, address: IpAddr) -> String {
    let pod = index
        .backends(egress)
        .filter(|(key, _)| key.address == address)
        .find_map(|(key, _)| index.egress_pod(key.pod.as_ref()?));
    pod.map_or_else(|| address.to_string(), |(name, _)| format!("{address} (pod {})", name.name))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::{
        datapath::FlowEvent,
        index::testing::*,
        plan::{ServiceAddress, Want},
    };

    fn texts(notices: &mut Notices) -> Vec<(&'static str, String)> {
        notices
            .due(at(1_000_000))
            .into_iter()
            .map(|write| (write.notice.topic.reason(), write.note))
            .collect()
    }

    fn event(kind: FlowEventKind, client: &str) -> FlowEvent {
        FlowEvent {
            time: at(0),
            kind,
            mode: Mode::Reset,
            client: ip(client),
            client_port: 5555,
            service: ServiceAddress { address: ip(CLUSTER_IP), port: 5555 },
            from: Some((ip("10.0.1.1"), 1)),
            to: Some((ip("10.0.1.2"), 2)),
            egress: 0,
        }
    }

    #[test]
    fn a_start_is_no_change_of_mode_and_a_change_is() {
        let mut index = running("reset");
        let mut notices = Notices::new("n1".into());
        notices.configuration(&index, &Settings::default(), at(0));
        assert_eq!(texts(&mut notices), []);
        index.egress_is(&api_egress(EGRESS, &[("coil-guard.io/mode", "audit")]), at(1));
        notices.configuration(&index, &Settings::default(), at(1));
        let told = texts(&mut notices);
        assert_eq!(
            told,
            [("GuardModeChanged", "The guard's mode is now audit, it was reset (node n1)".to_owned())]
        );
    }

    #[test]
    fn an_annotation_not_understood_is_told_once() {
        let mut index = running("reset");
        index.egress_is(&api_egress(EGRESS, &[("coil-guard.io/mode", "yes")]), at(0));
        let mut notices = Notices::new("n1".into());
        notices.configuration(&index, &Settings::default(), at(0));
        notices.configuration(&index, &Settings::default(), at(1));
        assert_eq!(notices.invalid_egresses(), 1);
        let told = texts(&mut notices);
        assert_eq!((told.len(), told[0].0), (1, "InvalidAnnotation"));
        assert!(
            told[0]
                .1
                .contains("annotation coil-guard.io/mode: \"yes\" is not understood: allowed are off, audit"),
            "{told:?}"
        );
    }

    #[test]
    fn a_drain_without_a_pre_stop_hook_says_what_to_add() {
        let index = running("drain");
        let mut notices = Notices::new("n1".into());
        notices.configuration(&index, &Settings::default(), at(0));
        let told = texts(&mut notices);
        assert_eq!((told.len(), told[0].0), (1, "DrainWithoutPreStop"));
        assert!(told[0].1.contains("preStop: {exec: {command:") && told[0].1.len() < 1024, "{told:?}");
    }

    #[test]
    fn configuration_of_egresses_without_clients_here_is_left_to_other_nodes() {
        let mut index = running("reset");
        index.egress_is(&api_egress("far", &[("coil-guard.io/mode", "nonsense")]), at(0));
        let mut notices = Notices::new("n1".into());
        notices.configuration(&index, &Settings::default(), at(0));
        assert_eq!((texts(&mut notices), notices.invalid_egresses()), (vec![], 1));
    }

    #[test]
    fn moves_of_many_clients_are_one_event_that_names_the_pod() {
        let index = running("reset");
        let mut notices = Notices::new("n1".into());
        for client in 1..=100 {
            let client = format!("10.0.0.{client}");
            notices.flow(&index, &named(EGRESS), &event(FlowEventKind::Moved, &client), at(0));
        }
        let expected =
            "Flows moved off leaving backend 10.0.1.1 (pod pod-a) on node n1 (100 times, 100 client pods)";
        assert_eq!(texts(&mut notices), [("FlowsMoved", expected.to_owned())]);
    }

    #[test]
    fn failures_of_many_pods_are_one_event() {
        let mut index = running("reset");
        index.client_is(&api_client("second", "10.0.0.2", EGRESS, &json!({})), at(0));
        let mut notices = Notices::new("n1".into());
        for name in ["client", "second"] {
            let pod = ClientPod {
                namespace: "app".into(),
                name: name.into(),
                addresses: BTreeSet::new(),
                want: Want::Attached,
                egresses: BTreeSet::from([named(EGRESS)]),
                read_only: false,
                symmetric: false,
            };
            notices.attach_failed(&index, &pod, "no namespace has its address", at(0));
            notices.ports_overlap(&index, &pod, at(0));
        }
        let expected = "2 client pods: not guarded on node n1: app/second: no namespace has its address";
        assert_eq!(
            texts(&mut notices),
            [("AttachFailed", expected.to_owned())],
            "ports matter with fouSourcePortAuto only"
        );
    }
}
