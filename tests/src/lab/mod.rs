//! A node with Cilium, client pods and an Egress's pods, ready to send FoU packets.
//!
//! ```no_run
//! use coil_guard_tests::{cilium::{BackendState, CiliumVersion, IpFamily}, lab::Lab, net::isolated};
//!
//! # fn main() -> anyhow::Result<()> {
//! isolated(|| {
//!     let mut lab = Lab::builder().version(CiliumVersion::V1_17).clients(1).backends(2).start()?;
//!     let stream = lab.stream(0, lab.spec(0, IpFamily::V4))?;
//!     stream.wait_arrived(100, lab.patience())?;
//!     lab.set_backend(0, BackendState::Terminating)?;
//!     let report = stream.finish(true)?;
//!     report.ensure_exactly_once()
//! })
//! # }
//! ```
//!
//! A lab lives inside of [`crate::net::isolated`]. Threads and processes that start there are on its node.

mod builder;
mod entries;
mod losses;
mod process;

use std::{net::IpAddr, sync::Arc, time::Duration};

use anyhow::{Context as _, Result};

pub use self::{
    builder::LabBuilder,
    entries::FlowTuple,
    losses::Losses,
    process::{GarbageCollector, command, eventually},
};
use crate::{
    cilium::{
        AttachKind, BackendState, CiliumMaps, ControlPlane, Dump, Endpoint, IpFamily, MapOptions, Model,
        ServiceId,
    },
    fou::{
        FOU_PORT, InnerPacket, Outer, Place, Receiver, ReplyMode, Stream, StreamSpec, TrafficLog,
        receive::ReceiverOptions,
    },
    net::{Attachments, Pod, PodRole, Topology, UdpErrors, attachments, topology::POD_DEVICE},
};

/// A running lab. Fields are open: a test may do to each part what the methods do not cover.
#[derive(Debug)]
pub struct Lab {
    /// Receivers at egress pods, by index.
    pub backend_receivers: Vec<Receiver>,
    /// Receivers at client pods, by index.
    pub client_receivers: Vec<Receiver>,
    /// Receivers at the clients' host sides, before Cilium; none without [`LabBuilder::taps`].
    pub taps: Vec<Receiver>,
    /// Everything that arrived.
    pub log: Arc<TrafficLog>,
    /// The model of Cilium's datapath.
    pub model: Model,
    /// The agent's side of the maps.
    pub control: ControlPlane,
    /// Cilium's maps.
    pub maps: CiliumMaps,
    /// Pods and devices.
    pub topology: Topology,
    options: LabBuilder,
    /// The Egress's service, one per family in the order of the builder.
    egress: Vec<ServiceId>,
}

impl Lab {
    /// One client, three backends, both families, the newest Cilium, no affinity.
    #[must_use]
    pub fn builder() -> LabBuilder {
        LabBuilder::default()
    }

    /// How long to wait for what should happen at once on a machine that is busy: half a minute, or as many seconds as
    /// `COIL_GUARD_PATIENCE` says where the processor is emulated.
    #[must_use]
    pub fn patience(&self) -> Duration {
        let seconds = std::env::var("COIL_GUARD_PATIENCE").ok().and_then(|seconds| seconds.parse().ok());
        Duration::from_secs(seconds.unwrap_or(30))
    }

    /// Families of the lab.
    #[must_use]
    pub fn families(&self) -> &[IpFamily] {
        &self.options.families
    }

    /// How the model is attached.
    #[must_use]
    pub fn attach_kind(&self) -> AttachKind {
        self.options.attach
    }

    /// A client pod.
    ///
    /// # Panics
    ///
    /// When there is none of that index.
    #[must_use]
    pub fn client(&self, index: usize) -> &Pod {
        &self.topology.clients[index]
    }

    /// An egress pod.
    ///
    /// # Panics
    ///
    /// When there is none of that index.
    #[must_use]
    pub fn backend(&self, index: usize) -> &Pod {
        &self.topology.backends[index]
    }

    /// The Egress's service of a family, in the control plane.
    ///
    /// # Panics
    ///
    /// When the lab does not have that family.
    #[must_use]
    pub fn service_id(&self, family: IpFamily) -> ServiceId {
        let position = self.options.families.iter().position(|known| *known == family);
        self.egress[position.unwrap_or_else(|| panic!("the lab has no {family:?}: add it to the builder"))]
    }

    /// ClusterIP and port of the Egress's service.
    #[must_use]
    pub fn service(&self, family: IpFamily) -> (IpAddr, u16) {
        let plan = self.control.service(self.service_id(family));
        (plan.address, plan.port)
    }

    /// Cilium's id of a backend of the Egress.
    ///
    /// # Errors
    ///
    /// When Cilium does not know it (any more).
    pub fn backend_id(&self, family: IpFamily, index: usize) -> Result<u32> {
        let (service, address) = (self.service_id(family), self.backend(index).address(family));
        let found = self.control.backends_at(address).into_iter().find(|(id, _)| *id == service);
        found.map(|(_, id)| id).with_context(|| format!("Cilium does not know backend {index} at {address}"))
    }

    /// Sets the state of an egress pod in every service and family, as an agent that is up to date.
    ///
    /// # Errors
    ///
    /// When Cilium does not know the pod, or a map refuses.
    pub fn set_backend(&mut self, index: usize, state: BackendState) -> Result<()> {
        self.plan_backend(index, state)?;
        self.control.sync(&self.maps)
    }

    /// Sets the state of an egress pod in the backends map only: slots, count and matches are still old. [`Self::catch_up`]
    /// ends that.
    ///
    /// # Errors
    ///
    /// When Cilium does not know the pod, or a map refuses.
    pub fn set_backend_lagging(&mut self, index: usize, state: BackendState) -> Result<()> {
        self.plan_backend(index, state)?;
        self.egress.iter().try_for_each(|service| self.control.write_states(&self.maps, *service))
    }

    /// Plans the state of an egress pod; the maps stay as they are (an agent that is behind, or down).
    ///
    /// # Errors
    ///
    /// When Cilium does not know the pod.
    pub fn plan_backend(&mut self, index: usize, state: BackendState) -> Result<()> {
        self.known_backend(index)?
            .into_iter()
            .try_for_each(|(service, id)| self.control.set_state(service, id, state))
    }

    /// Sets the endpoint conditions of an egress pod: every service and family gets what the agent of this version makes
    /// of them. Unlike [`Self::set_backend`] it may remove the backend, or bring it back under another id.
    ///
    /// # Errors
    ///
    /// When a map refuses.
    pub fn set_endpoint(&mut self, index: usize, endpoint: Endpoint) -> Result<()> {
        for family in self.options.families.clone() {
            let (service, address) = (self.service_id(family), self.backend(index).address(family));
            self.control.set_endpoint(service, address, self.options.backend_port, endpoint);
        }
        self.control.sync(&self.maps)
    }

    /// Removes an egress pod from every service, as when its endpoint has left the slices. Its network stays.
    ///
    /// # Errors
    ///
    /// When Cilium does not know the pod, or a map refuses.
    pub fn remove_backend(&mut self, index: usize) -> Result<()> {
        for (service, id) in self.known_backend(index)? {
            self.control.remove_backend(service, id)?;
        }
        self.control.sync(&self.maps)
    }

    /// Makes an egress pod known to the Egress's service, active: a new pod, or one that was removed before (under a new
    /// id).
    ///
    /// # Errors
    ///
    /// When a map refuses.
    pub fn publish_backend(&mut self, index: usize) -> Result<()> {
        for family in self.options.families.clone() {
            let (service, address) = (self.service_id(family), self.backend(index).address(family));
            self.control.add_backend(service, address, self.options.backend_port);
        }
        self.control.sync(&self.maps)
    }

    /// Starts another egress pod and says its index; [`Self::publish_backend`] makes it known.
    ///
    /// # Errors
    ///
    /// When the kernel refuses.
    pub fn add_backend_pod(&mut self) -> Result<usize> {
        let index = self.topology.add_pod(PodRole::Backend)?;
        let receiver = self.start_receiver(PodRole::Backend, index)?;
        self.backend_receivers.push(receiver);
        Ok(index)
    }

    /// Starts another client pod, with Cilium attached, and says its index.
    ///
    /// # Errors
    ///
    /// When the kernel refuses.
    pub fn add_client_pod(&mut self) -> Result<usize> {
        let index = self.topology.add_pod(PodRole::Client)?;
        self.start_client(index)?;
        Ok(index)
    }

    /// Writes everything that is planned.
    ///
    /// # Errors
    ///
    /// When a map refuses.
    pub fn catch_up(&mut self) -> Result<()> {
        self.control.sync(&self.maps)
    }

    /// Makes Cilium's maps anew (other ids, perhaps other sizes), fills in the services, and replaces the model in its
    /// links. Conntrack and affinity are empty then.
    ///
    /// # Errors
    ///
    /// When the kernel refuses.
    pub fn recreate_maps(&mut self, options: MapOptions) -> Result<()> {
        self.maps.recreate_all(options)?;
        self.control.sync(&self.maps)?;
        self.model.reload(&self.maps)
    }

    /// All of Cilium's maps as bytes.
    ///
    /// # Errors
    ///
    /// When a map cannot be walked.
    pub fn dump(&self) -> Result<Dump> {
        self.maps.dump()
    }

    /// What a client sends by default: Coil's outer header from the FoU port to the Egress's service, one inner UDP flow,
    /// as fast as possible until stopped.
    #[must_use]
    pub fn spec(&self, client: usize, family: IpFamily) -> StreamSpec {
        let source = self.client(client).address(family);
        let outer = Outer::coil((source, FOU_PORT), self.service(family));
        let outside: IpAddr = match family {
            IpFamily::V4 => [198, 51, 100, 1].into(),
            IpFamily::V6 => [0x2001, 0xdb8, 0, 0, 0, 0, 0, 1].into(),
        };
        StreamSpec::new(outer, InnerPacket::udp((source, 40_000), (outside, 53)))
    }

    /// Starts a stream from a client.
    ///
    /// # Errors
    ///
    /// When the kernel refuses.
    pub fn stream(&self, client: usize, spec: StreamSpec) -> Result<Stream> {
        Stream::start(self.client(client), &self.log, spec)
    }

    /// Changes how all egress pods answer.
    pub fn set_reply(&self, mode: ReplyMode) {
        self.backend_receivers.iter().for_each(|receiver| receiver.set_reply(mode));
    }

    /// What is attached to the device of a client pod, inside of the pod.
    ///
    /// # Errors
    ///
    /// When the pod is gone.
    pub fn attachments(&self, client: usize) -> Result<Attachments> {
        self.client(client).namespace.run(|| attachments(POD_DEVICE))
    }

    /// UDP errors that the kernel counted in all pods.
    ///
    /// # Errors
    ///
    /// When a pod is gone.
    pub fn udp_errors(&self) -> Result<UdpErrors> {
        let mut total = UdpErrors::default();
        for pod in self.topology.clients.iter().chain(&self.topology.backends) {
            let errors = pod.namespace.run(UdpErrors::read)?;
            total.checksum += errors.checksum;
            total.no_port += errors.no_port;
        }
        Ok(total)
    }

    fn known_backend(&self, index: usize) -> Result<Vec<(ServiceId, u32)>> {
        let addresses = &self.topology.pod(PodRole::Backend, index)?.addresses;
        let known: Vec<_> = addresses.iter().flat_map(|address| self.control.backends_at(*address)).collect();
        anyhow::ensure!(!known.is_empty(), "Cilium does not know backend {index} at {addresses:?}");
        Ok(known)
    }

    fn start_client(&mut self, index: usize) -> Result<()> {
        let device = self.client(index).host_device.clone();
        self.model.attach(&device, self.options.attach)?;
        let receiver = self.start_receiver(PodRole::Client, index)?;
        self.client_receivers.push(receiver);
        if self.options.taps {
            let node = crate::net::Namespace::current("node")?;
            let options = ReceiverOptions { reply: ReplyMode::Silent, keep_frames: true, listen: false };
            let tap = Receiver::start(&node, &device, Place::Tap(index), Arc::clone(&self.log), options)?;
            self.taps.push(tap);
        }
        Ok(())
    }

    fn start_receiver(&self, role: PodRole, index: usize) -> Result<Receiver> {
        let (place, reply) = match role {
            PodRole::Client => (Place::Client(index), ReplyMode::Silent),
            PodRole::Backend => (Place::Backend(index), self.options.reply),
        };
        let options = ReceiverOptions { reply, keep_frames: self.options.keep_frames, listen: true };
        let pod = self.topology.pod(role, index)?;
        Receiver::start(&pod.namespace, POD_DEVICE, place, Arc::clone(&self.log), options)
    }
}
