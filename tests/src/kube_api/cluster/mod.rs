//! What Coil, kubelet and the controllers do around an Egress, in the order of writes that a real cluster shows.
//!
//! A change of a pod is one write, and its slice is another that comes after it, by [`SliceLag`]. The EndpointSlice
//! controller acts on the calls made here; after changes made directly through [`KubeApi`], call [`Cluster::settle`].

mod objects;
mod rollout;
mod slices;

use std::{
    net::IpAddr,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use anyhow::Context as _;
use serde_json::{Value, json};

pub use self::{
    objects::{EgressSpec, PodSpec, labels},
    rollout::RollStep,
};
use super::{Kind, KubeApi};

/// The annotation that sets an Egress's mode.
pub const MODE: &str = "coil-guard.io/mode";

/// When a slice follows its pod.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SliceLag {
    /// With the next write, before the call returns.
    #[default]
    None,
    /// This much later, all between coalesced: `--endpointslice-updates-batch-period`.
    After(Duration),
    /// Never: the controller is down. [`Cluster::settle`] makes up for it.
    Stopped,
}

/// A pod that was made here.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PodRef {
    /// Namespace.
    pub namespace: String,
    /// Name.
    pub name: String,
    /// UID.
    pub uid: String,
    /// The Egress that it is a backend of.
    pub egress: Option<String>,
}

/// The players of a cluster.
#[derive(Clone, Debug)]
pub struct Cluster {
    api: KubeApi,
    lag: Arc<Mutex<SliceLag>>,
}

impl Cluster {
    /// A cluster without objects.
    #[must_use]
    pub fn new(api: &KubeApi) -> Self {
        Self { api: api.clone(), lag: Arc::default() }
    }

    /// The server.
    #[must_use]
    pub fn api(&self) -> &KubeApi {
        &self.api
    }

    /// Sets when slices follow their pods.
    pub fn set_slice_lag(&self, lag: SliceLag) {
        *self.lag.lock().unwrap_or_else(PoisonError::into_inner) = lag;
    }

    // ---- Egress ----

    /// Makes an Egress, its Service, and the Service's empty slices.
    ///
    /// # Errors
    ///
    /// What the server answers; it exists already.
    pub fn egress(&self, spec: &EgressSpec) -> anyhow::Result<()> {
        self.api.create(&spec.egress())?;
        self.api.create(&spec.service())?;
        self.changed(&spec.namespace, &spec.name)
    }

    /// Sets `coil-guard.io/mode` of an Egress, or removes it.
    ///
    /// # Errors
    ///
    /// It does not exist.
    pub fn set_mode(&self, namespace: &str, name: &str, mode: Option<&str>) -> anyhow::Result<()> {
        self.api.annotate(Kind::Egress, namespace, name, MODE, mode)
    }

    /// Deletes an Egress and all that Coil made for it: the Service with its slices, the pods at once.
    ///
    /// # Errors
    ///
    /// It does not exist.
    pub fn delete_egress(&self, namespace: &str, name: &str) -> anyhow::Result<()> {
        self.api.delete(Kind::Egress, namespace, name, None)?;
        self.api.delete(Kind::Service, namespace, name, None)?;
        for pod in self.backends(namespace, name) {
            self.api.delete(Kind::Pod, namespace, &pod.name, Some(0))?;
        }
        self.changed(namespace, name)
    }

    /// The backend pods of an Egress that exist, by name.
    #[must_use]
    pub fn backends(&self, namespace: &str, egress: &str) -> Vec<PodRef> {
        let of_egress = |pod: &Value| {
            let metadata = &pod["metadata"];
            metadata["namespace"] == namespace && metadata["labels"]["app.kubernetes.io/instance"] == egress
        };
        let pods = self.api.list(Kind::Pod).into_iter().filter(of_egress);
        pods.map(|pod| reference(&pod, Some(egress))).collect()
    }

    // ---- backend pods ----

    /// Makes a backend pod that is Running and Ready.
    ///
    /// # Errors
    ///
    /// What the server answers.
    pub fn backend(&self, namespace: &str, egress: &str, spec: &PodSpec) -> anyhow::Result<PodRef> {
        let pod = self.pending_backend(namespace, egress, spec)?;
        self.run(&pod, &spec.addresses, true)?;
        Ok(pod)
    }

    /// Makes a backend pod that is Pending and has no address.
    ///
    /// # Errors
    ///
    /// What the server answers.
    pub fn pending_backend(&self, namespace: &str, egress: &str, spec: &PodSpec) -> anyhow::Result<PodRef> {
        let pod = self.api.create(&spec.pod(namespace, &labels(egress), "egress"))?;
        self.changed(namespace, egress)?;
        Ok(reference(&pod, Some(egress)))
    }

    /// Begins to delete a pod: Terminating, with this grace period (seconds) or its own. It stays so until
    /// [`Cluster::force_delete`] takes it away, as with a kubelet that never gets there. Again, with a shorter period,
    /// it moves the deletion forward.
    ///
    /// # Errors
    ///
    /// It does not exist.
    pub fn terminate(&self, pod: &PodRef, grace: Option<i64>) -> anyhow::Result<()> {
        self.api.delete(Kind::Pod, &pod.namespace, &pod.name, grace)?;
        self.follow(pod)
    }

    /// Deletes a pod with no grace: gone. Also what kubelet does in the end.
    ///
    /// # Errors
    ///
    /// It does not exist.
    pub fn force_delete(&self, pod: &PodRef) -> anyhow::Result<()> {
        self.api.delete(Kind::Pod, &pod.namespace, &pod.name, Some(0))?;
        self.follow(pod)
    }

    /// Force-deletes a pod and makes it anew with the same name and addresses, Running and Ready, before its slice
    /// follows: one event, in which only the UID tells the two apart.
    ///
    /// # Errors
    ///
    /// It does not exist.
    pub fn replace_in_place(&self, pod: &PodRef) -> anyhow::Result<PodRef> {
        let old = self.api.get(Kind::Pod, &pod.namespace, &pod.name);
        let old = old.with_context(|| format!("there is no pod {}/{}", pod.namespace, pod.name))?;
        self.api.delete(Kind::Pod, &pod.namespace, &pod.name, Some(0))?;
        let mut new = old.clone();
        new["metadata"] = json!({
            "namespace": pod.namespace, "name": pod.name,
            "labels": old["metadata"]["labels"], "annotations": old["metadata"]["annotations"],
        });
        new["status"] = json!({"phase": "Pending"});
        let new = reference(&self.api.create(&new)?, pod.egress.as_deref());
        let addresses = old["status"]["podIPs"].as_array().into_iter().flatten();
        let addresses: Vec<IpAddr> = addresses.filter_map(|ip| ip["ip"].as_str()?.parse().ok()).collect();
        self.run(&new, &addresses, true)?;
        Ok(new)
    }

    /// Sets the pod Running with these addresses, Ready or not.
    ///
    /// # Errors
    ///
    /// It does not exist.
    pub fn run(&self, pod: &PodRef, addresses: &[IpAddr], ready: bool) -> anyhow::Result<()> {
        self.set_status(pod, &objects::running(addresses, ready))
    }

    /// Sets the Ready condition.
    ///
    /// # Errors
    ///
    /// It does not exist.
    pub fn set_ready(&self, pod: &PodRef, ready: bool) -> anyhow::Result<()> {
        self.set_status(pod, &json!({"conditions": [objects::ready_condition(ready)]}))
    }

    /// Sets the phase, such as `Failed` or `Succeeded`. The addresses stay, as in a real cluster.
    ///
    /// # Errors
    ///
    /// It does not exist.
    pub fn set_phase(&self, pod: &PodRef, phase: &str) -> anyhow::Result<()> {
        self.set_status(pod, &json!({"phase": phase}))
    }

    /// Sets a label of a pod, or removes it.
    ///
    /// # Errors
    ///
    /// It does not exist.
    pub fn set_label(&self, pod: &PodRef, key: &str, value: Option<&str>) -> anyhow::Result<()> {
        let patch = json!({"metadata": {"labels": {key: value}}});
        self.api.patch(Kind::Pod, &pod.namespace, &pod.name, &patch)?;
        self.follow(pod)
    }

    // ---- client pods ----

    /// Makes a pod that is no backend, Running and Ready; see [`PodSpec::client_of`].
    ///
    /// # Errors
    ///
    /// What the server answers.
    pub fn client(&self, namespace: &str, spec: &PodSpec) -> anyhow::Result<PodRef> {
        let pod = self.pending_client(namespace, spec)?;
        self.run(&pod, &spec.addresses, true)?;
        Ok(pod)
    }

    /// Makes a pod that is no backend, Pending and without an address.
    ///
    /// # Errors
    ///
    /// What the server answers.
    pub fn pending_client(&self, namespace: &str, spec: &PodSpec) -> anyhow::Result<PodRef> {
        let pod = self.api.create(&spec.pod(namespace, &json!({"app": spec.name}), "client"))?;
        Ok(reference(&pod, None))
    }

    // ---- slices ----

    /// Brings an Egress's slices up to date at once, whatever the lag.
    ///
    /// # Errors
    ///
    /// What the server answers.
    pub fn settle(&self, namespace: &str, egress: &str) -> anyhow::Result<()> {
        slices::reconcile(&self.api, namespace, egress)
    }

    fn set_status(&self, pod: &PodRef, status: &Value) -> anyhow::Result<()> {
        self.api.patch(Kind::Pod, &pod.namespace, &pod.name, &json!({"status": status}))?;
        self.follow(pod)
    }

    fn follow(&self, pod: &PodRef) -> anyhow::Result<()> {
        match &pod.egress {
            Some(egress) => self.changed(&pod.namespace, egress),
            None => Ok(()),
        }
    }

    fn changed(&self, namespace: &str, egress: &str) -> anyhow::Result<()> {
        let lag = *self.lag.lock().unwrap_or_else(PoisonError::into_inner);
        match lag {
            SliceLag::None => self.settle(namespace, egress),
            SliceLag::Stopped => Ok(()),
            SliceLag::After(lag) => {
                let (api, namespace, egress) = (self.api.clone(), namespace.to_owned(), egress.to_owned());
                std::thread::Builder::new().name("slice-lag".into()).spawn(move || {
                    std::thread::sleep(lag);
                    if let Err(error) = slices::reconcile(&api, &namespace, &egress) {
                        eprintln!("the slices of {namespace}/{egress}: {error:#}");
                    }
                })?;
                Ok(())
            }
        }
    }
}

fn reference(pod: &Value, egress: Option<&str>) -> PodRef {
    let text = |field: &str| pod["metadata"][field].as_str().unwrap_or_default().to_owned();
    PodRef {
        namespace: text("namespace"),
        name: text("name"),
        uid: text("uid"),
        egress: egress.map(str::to_owned),
    }
}
