//! The loop: changes in, plan out.

mod looks;
mod reports;

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use anyhow::bail;
use tokio::sync::mpsc;

use self::looks::Looks;
use super::{
    Stop,
    effects::{follow_flows, log_changes},
    notices::Notices,
    readiness::conditions,
};
use crate::{
    clock::Monotonic,
    datapath::{Datapath, FlowEvent},
    index::{Index, Update},
    k8s::{EventWriter, Health, Message, Node, Watches},
    memory,
    observe::{Endpoints, Metrics, SnapshotRequest},
    plan::{Changes, Desired, Planner, PodUid, Recovered, Settings},
};

/// What could not be written is tried again after this.
const RETRY: Duration = Duration::from_secs(1);
/// The loop turns at least this often: `/livez` looks at it.
const LONGEST_SLEEP: Duration = Duration::from_secs(10);
/// Messages taken in one turn. A roll's events that come together become one plan.
const BATCH: usize = 256;

/// The agent.
pub(super) struct Agent {
    index: Index,
    planner: Planner,
    watches: Watches,
    datapath: Datapath,
    /// Of the attached pods, for the log: a pod that is detached is in no plan any more.
    names: BTreeMap<PodUid, String>,
    /// A complete plan has been made.
    planned: bool,
    /// The datapath has looked at every pod of the first plan.
    settled: bool,
    /// By when the datapath wants to be called again.
    renew_by: Monotonic,
    looks: Looks,
    notices: Notices,
    /// Egresses or local pods changed, which notices depend on.
    look_at_configuration: bool,
    events: EventWriter,
    endpoints: Endpoints,
    metrics: Arc<Metrics>,
    /// The last error of writing, told once.
    last_error: Option<String>,
}

impl Agent {
    pub(super) fn new(
        node: &Node,
        settings: Settings,
        datapath: Datapath,
        events: EventWriter,
        endpoints: &Endpoints,
    ) -> Self {
        let now = Monotonic::now();
        let marks = &datapath.remembered().marks;
        let recovered = marks
            .iter()
            .map(|(address, mark)| (*address, Recovered { state: mark.state, since: mark.since }))
            .collect();
        let names: BTreeMap<PodUid, String> = match datapath.snapshot() {
            Ok(snapshot) => snapshot.pods.into_iter().map(|(uid, pod)| (uid, pod.name)).collect(),
            Err(error) => {
                tracing::warn!(%error, "cannot read what is attached");
                BTreeMap::new()
            }
        };
        Self {
            index: Index::recover(recovered),
            planner: Planner::new(settings, names.keys().cloned().collect()),
            watches: Watches::new(now),
            datapath,
            names,
            planned: false,
            settled: false,
            renew_by: now,
            looks: Looks::new(now),
            notices: Notices::new(node.name.clone()),
            look_at_configuration: false,
            events,
            endpoints: endpoints.clone(),
            metrics: Arc::clone(&endpoints.metrics),
            last_error: None,
        }
    }

    pub(super) async fn run(
        mut self,
        mut messages: mpsc::Receiver<Message>,
        mut snapshot_requests: mpsc::Receiver<SnapshotRequest>,
        stop: &mut Stop,
    ) -> anyhow::Result<()> {
        let mut reports = self.datapath.take_reports();
        let mut flows = follow_flows(self.datapath.events());
        let (mut messages_now, mut reports_now, mut flows_now) = (Vec::new(), Vec::new(), Vec::new());
        loop {
            let now = Monotonic::now();
            self.report_health(now);
            let sleep = self.wake_at(now).since(now);
            tokio::select! {
                biased;
                () = stop.requested() => return Ok(()),
                number = messages.recv_many(&mut messages_now, BATCH) => {
                    if number == 0 {
                        bail!("the watches have ended");
                    }
                    self.take_messages(messages_now.drain(..));
                }
                number = reports.recv_many(&mut reports_now, BATCH) => {
                    if number == 0 {
                        bail!("the datapath's worker has ended");
                    }
                    reports_now.drain(..).try_for_each(|report| self.take_report(report))?;
                    self.replan(None);
                }
                Some(request) = snapshot_requests.recv() => self.answer(request),
                _ = flows.recv_many(&mut flows_now, BATCH) => {
                    for flow in flows_now.drain(..) {
                        self.take_flow(&flow);
                    }
                }
                () = tokio::time::sleep(sleep) => {}
            }
            self.do_what_is_due();
        }
    }

    fn desired(&self) -> &Desired {
        self.planner.desired()
    }

    fn wake_at(&self, now: Monotonic) -> Monotonic {
        let mut wake = now.saturating_add(LONGEST_SLEEP);
        if self.planned {
            let next = [Some(self.renew_by), Some(self.looks.due()), self.desired().next_change];
            wake = next.into_iter().flatten().fold(wake, Monotonic::min);
        }
        self.notices.next_due().map_or(wake, |due| due.min(wake))
    }

    fn take_messages(&mut self, messages: impl Iterator<Item = Message>) {
        let was_complete = self.watches.complete();
        let mut first_arrival: Option<Monotonic> = None;
        let mut any_list = false;
        for message in messages {
            match message {
                Message::Update { kind, update, listed, received } => {
                    first_arrival = Some(first_arrival.map_or(received, |first| first.min(received)));
                    if listed {
                        any_list = true;
                        self.watches.listed(kind);
                    }
                    self.metrics.watch_updates.get_or_create(&[("watch", kind.label())]).inc();
                    self.look_at_configuration |= matches!(*update, Update::Egress(_) | Update::LocalPod(_));
                    self.index.update(*update, received);
                }
                Message::Health(kind, health) => self.take_health(kind, health),
                Message::Malformed(kind, malformed) => {
                    tracing::warn!("{malformed}");
                    self.metrics.malformed.get_or_create(&[("watch", kind.label())]).inc();
                }
            }
        }
        if first_arrival.is_some() || self.watches.complete() != was_complete {
            self.replan(first_arrival);
        }
        if any_list {
            memory::give_back();
        }
    }

    fn take_health(&mut self, kind: crate::k8s::Kind, health: Health) {
        let established = health == Health::Established;
        let gauge = self.metrics.watch_established.get_or_create(&[("watch", kind.label())]);
        if gauge.set(i64::from(established)) == 1 && !established {
            self.metrics.watch_lost.get_or_create(&[("watch", kind.label())]).inc();
        }
        drop(gauge);
        let problem = if let Health::Lost(problem) = &health { problem.clone() } else { String::new() };
        if self.watches.set(kind, health, Monotonic::now()) {
            if established {
                tracing::info!(watch = kind.label(), "following");
            } else {
                tracing::warn!(
                    watch = kind.label(),
                    problem,
                    "the watch is lost; Cilium's state alone guards until it is back"
                );
            }
        }
    }

    /// Plans anew, and writes the plan if it is another one or if something is due.
    fn replan(&mut self, arrived: Option<Monotonic>) {
        if !self.watches.all_listed() {
            return;
        }
        let now = Monotonic::now();
        let complete = self.watches.complete();
        if !self.planned && !complete {
            return;
        }
        if self.look_at_configuration {
            self.look_at_configuration = false;
            self.notices.configuration(&self.index, self.planner.settings(), now);
            self.metrics
                .invalid_annotations
                .set(i64::try_from(self.notices.invalid_egresses()).unwrap_or(i64::MAX));
            self.metrics
                .refused_egresses
                .set(i64::try_from(self.notices.refused_egresses()).unwrap_or(i64::MAX));
        }
        let was_complete = self.desired().complete;
        let mut changes = self.planner.update(&mut self.index, complete, now);
        if !self.planned {
            // Before the first write: what a predecessor had marked and has gone since must not lose its mark for a moment.
            self.look_at_cilium(now);
            self.planner.update(&mut self.index, complete, now);
            changes = Changes::all(self.desired());
            self.planned = true;
        }
        if changes.is_empty() && was_complete == complete && now < self.renew_by {
            return;
        }
        self.looks.changed(&self.index, self.planner.desired(), &changes, now);
        log_changes(&changes, self.planner.desired());
        // Not `now`, which planning has made a little old: marks say since when they are written.
        let applied = self.datapath.apply_changes(self.planner.desired(), &changes, Monotonic::now());
        self.metrics.map_writes.inc_by(applied.writes as u64);
        self.renew_by = applied.renew_by;
        if let Some(arrived) = arrived {
            self.metrics.apply_seconds.observe(Monotonic::now().since(arrived).as_secs_f64());
        }
        self.metrics.apply_errors.inc_by(applied.errors.len() as u64);
        let error = applied.errors.iter().map(ToString::to_string).reduce(|all, one| format!("{all}; {one}"));
        if let Some(error) = &error {
            self.renew_by = self.renew_by.min(now.saturating_add(RETRY));
            if self.last_error.as_ref() != Some(error) {
                tracing::error!(error, "cannot write everything to the maps; trying again");
            }
        }
        self.last_error = error;
    }

    fn look_at_cilium(&mut self, now: Monotonic) {
        let look = self.looks.next(&self.index, self.planner.desired(), now);
        match self.datapath.cilium_view(&look.services, &look.addresses) {
            Ok(view) => self.index.observe_cilium(&view, self.watches.complete(), now),
            // The worker reports what is wrong with the maps; here it only means that no mark may go.
            Err(error) => tracing::debug!(%error, "cannot look at Cilium's maps"),
        }
        self.looks.done(&self.index, self.planner.desired(), now);
    }

    fn do_what_is_due(&mut self) {
        let now = Monotonic::now();
        if self.planned {
            let look = now >= self.looks.due();
            if look {
                self.look_at_cilium(now);
            }
            if look || now >= self.renew_by || self.desired().next_change.is_some_and(|change| now >= change)
            {
                self.replan(None);
            }
        }
        for write in self.notices.due(now) {
            let (egress, topic) = (&write.notice.egress, &write.notice.topic);
            if topic.is_warning() {
                tracing::warn!(%egress, reason = topic.reason(), "{}", write.note);
            } else {
                tracing::info!(%egress, reason = topic.reason(), "{}", write.note);
            }
            self.events.write(write);
        }
    }

    fn take_flow(&mut self, flow: &FlowEvent) {
        let kind = flow.kind.label();
        self.metrics.flow_events.get_or_create(&[("kind", kind)]).inc();
        let egress = self.datapath.egress_of(flow.egress);
        tracing::debug!(kind, client = %flow.client, port = flow.client_port, service = %flow.service.address,
            from = ?flow.from, to = ?flow.to, ?egress, "flow");
        if let Some(egress) = egress {
            self.notices.flow(&self.index, &egress, flow, Monotonic::now());
        }
    }

    fn answer(&self, request: SnapshotRequest) {
        let snapshot = self.datapath.snapshot();
        if let Err(error) = &snapshot {
            tracing::warn!(%error, "cannot read the datapath's counters");
        }
        // A scrape that was given up has no one to answer to.
        drop(request.send(snapshot.ok()));
    }

    fn report_health(&mut self, now: Monotonic) {
        let progress = self.datapath.progress();
        self.settled |= self.planned && (progress.settled || progress.wanted == 0);
        let count = |state, number: usize| {
            self.metrics
                .pods
                .get_or_create(&[("state", state)])
                .set(i64::try_from(number).unwrap_or(i64::MAX));
        };
        count("wanted", progress.wanted);
        count("attached", progress.attached);
        count("failing", progress.failing);
        self.metrics.cilium_bound.set(i64::from(progress.bound == Some(true)));
        let readiness = &self.endpoints.readiness;
        readiness.turn(now);
        readiness.set(conditions(&self.watches, &progress, self.settled, now));
        let ready = i64::from(readiness.is_ready());
        if self.metrics.ready.set(ready) != ready {
            tracing::info!(ready = ready == 1, "readiness changed");
        }
    }
}
