//! The agent's own metrics. Those of the datapath are read from its maps, see the collector beside this.

use prometheus_client::{
    encoding::text::encode,
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
    registry::Registry,
};

use super::collector::SnapshotCell;
use crate::k8s::Kind;

/// One label with a value out of a fixed list.
pub type Label = [(&'static str, &'static str); 1];

/// The agent's metrics.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    /// Whether the agent is ready.
    pub ready: Gauge,
    /// Whether each watch follows its collection, by `watch`.
    pub watch_established: Family<Label, Gauge>,
    /// How often each was lost.
    pub watch_lost: Family<Label, Counter>,
    /// Changes that each told.
    pub watch_updates: Family<Label, Counter>,
    /// Objects that were skipped.
    pub malformed: Family<Label, Counter>,
    /// Egresses with an annotation that is not understood.
    pub invalid_annotations: Gauge,
    /// Egresses whose mode is refused.
    pub refused_egresses: Gauge,
    /// From the arrival of a change to the written maps.
    pub apply_seconds: Histogram,
    /// Map writes and removals.
    pub map_writes: Counter,
    /// Things that could not be written.
    pub apply_errors: Counter,
    /// Pods by `state`: wanted, attached, failing.
    pub pods: Family<Label, Gauge>,
    /// Attachments by `outcome`.
    pub attachments: Family<Label, Counter>,
    /// Whether Cilium's maps are bound.
    pub cilium_bound: Gauge,
    /// How often they were bound anew.
    pub cilium_binds: Counter,
    /// Events of the program by `kind`.
    pub flow_events: Family<Label, Counter>,
    /// Kubernetes events by `outcome`.
    pub kubernetes_events: Family<Label, Counter>,
}

impl Metrics {
    /// Makes and registers them all, and those that are read from `snapshot`.
    #[must_use]
    pub fn new(snapshot: SnapshotCell) -> Self {
        // 50 us to about 1.6 s.
        let buckets = (0..16).map(|power| 50e-6 * f64::from(1u32 << power));
        let mut metrics = Self {
            registry: Registry::default(),
            ready: Gauge::default(),
            watch_established: Family::default(),
            watch_lost: Family::default(),
            watch_updates: Family::default(),
            malformed: Family::default(),
            invalid_annotations: Gauge::default(),
            refused_egresses: Gauge::default(),
            apply_seconds: Histogram::new(buckets),
            map_writes: Counter::default(),
            apply_errors: Counter::default(),
            pods: Family::default(),
            attachments: Family::default(),
            cilium_bound: Gauge::default(),
            cilium_binds: Counter::default(),
            flow_events: Family::default(),
            kubernetes_events: Family::default(),
        };
        metrics.register(snapshot);
        metrics.start_at_zero();
        metrics
    }

    fn register(&mut self, snapshot: SnapshotCell) {
        let mut registry = Registry::with_prefix("coil_guard");
        let build = Family::<[(&'static str, &'static str); 1], Gauge>::default();
        build.get_or_create(&[("version", env!("CARGO_PKG_VERSION"))]).set(1);
        registry.register("build_info", "Version of the agent, always 1", build);
        registry.register("ready", "Whether the agent is ready, as /readyz says", self.ready.clone());
        registry.register(
            "watch_established",
            "Whether the watch follows its collection now; marks are renewed only while all do",
            self.watch_established.clone(),
        );
        registry.register("watch_lost", "Times that the watch was lost", self.watch_lost.clone());
        registry.register(
            "watch_updates",
            "Changes that the watch told; a whole list is one",
            self.watch_updates.clone(),
        );
        registry.register(
            "malformed_objects",
            "Objects skipped because a field was missing or wrong; the log names them",
            self.malformed.clone(),
        );
        registry.register(
            "invalid_annotations",
            "Egresses with a coil-guard.io annotation that is not understood",
            self.invalid_annotations.clone(),
        );
        registry.register(
            "refused_egresses",
            "Egresses whose mode is refused because Cilium's maps may only be read on this node",
            self.refused_egresses.clone(),
        );
        registry.register(
            "apply_seconds",
            "Time from the arrival of a change to the written maps",
            self.apply_seconds.clone(),
        );
        registry.register("map_writes", "Writes to and removals from the own maps", self.map_writes.clone());
        registry.register(
            "apply_errors",
            "Things that could not be written to the own maps, such as a full map; each is tried again",
            self.apply_errors.clone(),
        );
        registry.register(
            "pods",
            "Client pods of this node that are to be attached (wanted), are (attached), or could not be (failing)",
            self.pods.clone(),
        );
        registry.register("attachments", "What was done to attachments", self.attachments.clone());
        registry.register(
            "cilium_bound",
            "Whether the programs are bound to Cilium's maps; 0 also before the first look",
            self.cilium_bound.clone(),
        );
        registry.register("cilium_binds", "Times that Cilium's maps were bound", self.cilium_binds.clone());
        registry.register(
            "flow_events",
            "Events of the program, whose rate per client and service it bounds; packets are in coil_guard_packets",
            self.flow_events.clone(),
        );
        registry.register("kubernetes_events", "Kubernetes events written", self.kubernetes_events.clone());
        registry.register_collector(Box::new(snapshot));
        self.registry = registry;
    }

    /// A series that appears with its first increment hides that increment from `rate`.
    fn start_at_zero(&self) {
        for kind in Kind::ALL {
            let label = [("watch", kind.label())];
            self.watch_established.get_or_create(&label).set(0);
            drop(self.watch_lost.get_or_create(&label));
            drop(self.watch_updates.get_or_create(&label));
            drop(self.malformed.get_or_create(&label));
        }
        for state in ["wanted", "attached", "failing"] {
            drop(self.pods.get_or_create(&[("state", state)]));
        }
        for outcome in ["attached", "kept", "replaced", "restored", "failed", "detached", "detach_failed"] {
            drop(self.attachments.get_or_create(&[("outcome", outcome)]));
        }
        for kind in ["moved", "no_live", "would_move", "drain_port_collision"] {
            drop(self.flow_events.get_or_create(&[("kind", kind)]));
        }
        for outcome in ["created", "patched", "failed"] {
            drop(self.kubernetes_events.get_or_create(&[("outcome", outcome)]));
        }
    }

    /// All metrics in the OpenMetrics text format.
    ///
    /// # Errors
    ///
    /// Never with the metrics registered here.
    pub fn encode(&self) -> Result<String, std::fmt::Error> {
        let mut text = String::new();
        encode(&mut text, &self.registry)?;
        Ok(text)
    }
}
