//! How a lab is asked for.

use std::{sync::Arc, time::Duration};

use anyhow::Result;

use super::Lab;
use crate::{
    cilium::{
        AttachKind, CiliumMaps, CiliumVersion, ControlPlane, IpFamily, MapOptions, MatchPolicy, Model, Policy,
    },
    fou::{FOU_PORT, ReplyMode, TrafficLog},
    net::{Paths, Topology, topology::service_address},
};

/// Options of a [`Lab`].
#[derive(Clone, Debug)]
pub struct LabBuilder {
    pub(super) families: Vec<IpFamily>,
    pub(super) attach: AttachKind,
    pub(super) reply: ReplyMode,
    pub(super) taps: bool,
    pub(super) keep_frames: bool,
    pub(super) backend_port: u16,
    clients: usize,
    backends: usize,
    published: Option<usize>,
    version: CiliumVersion,
    affinity: Option<Duration>,
    match_policy: Option<MatchPolicy>,
    service_protocol: Option<u8>,
    policy: Policy,
    lifetime: Duration,
    maps: Option<MapOptions>,
}

impl Default for LabBuilder {
    fn default() -> Self {
        Self {
            families: vec![IpFamily::V4, IpFamily::V6],
            attach: AttachKind::preferred(),
            reply: ReplyMode::FouPort,
            taps: false,
            keep_frames: false,
            backend_port: FOU_PORT,
            clients: 1,
            backends: 3,
            published: None,
            version: CiliumVersion::V1_20,
            affinity: None,
            match_policy: None,
            service_protocol: None,
            policy: Policy::Allow,
            lifetime: Duration::from_secs(60),
            maps: None,
        }
    }
}

impl LabBuilder {
    /// Number of client pods.
    #[must_use]
    pub fn clients(self, clients: usize) -> Self {
        Self { clients, ..self }
    }

    /// Number of egress pods.
    #[must_use]
    pub fn backends(self, backends: usize) -> Self {
        Self { backends, ..self }
    }

    /// Number of egress pods that the service has at first; the others are up, and unknown to Cilium until
    /// [`Lab::publish_backend`]. All by default.
    #[must_use]
    pub fn published(self, published: usize) -> Self {
        Self { published: Some(published), ..self }
    }

    /// Families, in the order in which Cilium learns of them: the first gets rev_nat_index 7 and the low backend ids.
    #[must_use]
    pub fn families(self, families: &[IpFamily]) -> Self {
        Self { families: families.to_vec(), ..self }
    }

    /// Which Cilium.
    #[must_use]
    pub fn version(self, version: CiliumVersion) -> Self {
        Self { version, ..self }
    }

    /// ClientIP affinity with this timeout, or none.
    #[must_use]
    pub fn affinity(self, affinity: Option<Duration>) -> Self {
        Self { affinity, ..self }
    }

    /// What becomes of the match of a terminating backend; by default what the version does.
    #[must_use]
    pub fn match_policy(self, policy: MatchPolicy) -> Self {
        Self { match_policy: Some(policy), ..self }
    }

    /// Protocol in service keys, 17 or 0; by default what the version does.
    #[must_use]
    pub fn service_protocol(self, protocol: u8) -> Self {
        Self { service_protocol: Some(protocol), ..self }
    }

    /// Ingress policy of the clients.
    #[must_use]
    pub fn policy(self, policy: Policy) -> Self {
        Self { policy, ..self }
    }

    /// Lifetime of conntrack entries, whole seconds; 60 s by default.
    #[must_use]
    pub fn lifetime(self, lifetime: Duration) -> Self {
        Self { lifetime, ..self }
    }

    /// How the model is attached; by default as Cilium does on this kernel.
    #[must_use]
    pub fn attach(self, attach: AttachKind) -> Self {
        Self { attach, ..self }
    }

    /// How egress pods answer; from FoU port to FoU port by default.
    #[must_use]
    pub fn reply(self, reply: ReplyMode) -> Self {
        Self { reply, ..self }
    }

    /// Records what leaves each client, before Cilium, with whole frames.
    #[must_use]
    pub fn taps(self) -> Self {
        Self { taps: true, ..self }
    }

    /// Keeps whole frames of everything that arrives.
    #[must_use]
    pub fn keep_frames(self) -> Self {
        Self { keep_frames: true, ..self }
    }

    /// Port of the backends, when it shall differ from the service's.
    #[must_use]
    pub fn backend_port(self, port: u16) -> Self {
        Self { backend_port: port, ..self }
    }

    /// Maps other than those of an agent of this version: without affinity, of other sizes, …. Families that are not in
    /// there have no maps, and no service, whatever their pods have.
    #[must_use]
    pub fn maps(self, options: MapOptions) -> Self {
        Self { maps: Some(options), ..self }
    }

    /// Starts it. The calling thread has to be inside of [`crate::net::isolated`].
    ///
    /// # Errors
    ///
    /// When the kernel refuses, or the model was built without an eBPF toolchain.
    pub fn start(self) -> Result<Lab> {
        let topology = Topology::build(&self.families, self.clients, self.backends)?;
        let map_options = self.maps.clone().unwrap_or_else(|| MapOptions {
            families: self.families.clone(),
            ..MapOptions::new(self.version)
        });
        let with_maps = map_options.families.clone();
        let maps = CiliumMaps::create(Paths.cilium_maps(), map_options)?;
        let mut control = ControlPlane::new(self.version);
        if let Some(protocol) = self.service_protocol {
            control.service_protocol = protocol;
        }
        let mut options = self;
        options.families.retain(|family| with_maps.contains(family));
        let mut egress = Vec::new();
        for family in &options.families {
            let service = control.add_service(service_address(*family, 0), FOU_PORT, options.affinity);
            if let Some(policy) = options.match_policy {
                control.service_mut(service).match_policy = policy;
            }
            for pod in topology.backends.iter().take(options.published.unwrap_or(usize::MAX)) {
                control.add_backend(service, pod.address(*family), options.backend_port);
            }
            egress.push(service);
        }
        control.sync(&maps)?;
        let mut settings = Model::default_settings(options.version);
        settings.default_deny = u32::from(options.policy == Policy::DefaultDeny);
        let mut model = Model::load(&maps, settings)?;
        model.set_lifetime(options.lifetime)?;
        let mut lab = Lab {
            backend_receivers: Vec::new(),
            client_receivers: Vec::new(),
            taps: Vec::new(),
            log: Arc::new(TrafficLog::default()),
            model,
            control,
            maps,
            topology,
            options,
            egress,
        };
        for index in 0..lab.topology.backends.len() {
            let receiver = lab.start_receiver(crate::net::PodRole::Backend, index)?;
            lab.backend_receivers.push(receiver);
        }
        for index in 0..lab.topology.clients.len() {
            lab.start_client(index)?;
        }
        Ok(lab)
    }
}
