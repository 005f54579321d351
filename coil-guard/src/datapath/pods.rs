//! Attaching one pod, and everything else that is done to one.

use std::{
    collections::BTreeSet,
    net::IpAddr,
    path::{Path, PathBuf},
    time::Duration,
};

use super::{
    AttachKind, Attachment, DatapathError, How, Options,
    attach::{
        AttachError, attach_clsact, attach_tcx, clsact_program, detach_clsact, detach_tcx, interface_name,
        needs_qdisc, replace_tcx,
    },
    layout::Layout,
    namespaces::{Found, NamespaceError, Namespaces, ports_overlap, within},
    program::{self, Binding},
    records::{Attached, Pods, is_valid_uid, pod_config},
    sys,
};
use crate::{clock::Monotonic, plan::ClientPod};

/// Why a pod is not attached or not detached.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PodError {
    #[error("the pod's UID {0:?} cannot be the name of a pin")]
    Uid(String),
    #[error("the pod has no address yet")]
    NoAddress,
    #[error(transparent)]
    Namespace(#[from] NamespaceError),
    #[error(transparent)]
    Attach(#[from] AttachError),
    #[error(transparent)]
    Datapath(#[from] DatapathError),
}

impl PodError {
    /// Whether the pod is merely not up yet (or already going).
    pub(crate) fn is_not_ready(&self) -> bool {
        matches!(self, Self::NoAddress | Self::Namespace(_))
    }

    /// Longest time between two attempts.
    pub(crate) fn patience(&self) -> Duration {
        if self.is_not_ready() { Duration::from_secs(1) } else { Duration::from_secs(10) }
    }
}

/// The means to attach.
#[derive(Debug)]
pub(crate) struct Attacher<'a> {
    pub(crate) options: &'a Options,
    pub(crate) layout: &'a Layout,
    pub(crate) namespaces: &'a mut Namespaces,
    pub(crate) records: &'a mut Pods,
    /// Set when the kernel turned out to have no TCX.
    pub(crate) no_tcx: &'a mut bool,
}

/// The addresses that the program looks at: the first of each family.
pub(crate) fn used_addresses(addresses: &BTreeSet<IpAddr>) -> Vec<IpAddr> {
    [false, true]
        .into_iter()
        .filter_map(|v6| addresses.iter().find(|ip| ip.is_ipv6() == v6).copied())
        .collect()
}

/// Outcome of an attempt.
#[derive(Debug)]
pub(crate) struct Done {
    pub(crate) attached: Attached,
    pub(crate) interface: String,
    pub(crate) how: How,
}

impl Attacher<'_> {
    fn kind(&self) -> Attachment {
        match self.options.attach {
            AttachKind::Tcx => Attachment::Tcx,
            AttachKind::Clsact => Attachment::Clsact,
            AttachKind::Auto if *self.no_tcx => Attachment::Clsact,
            AttachKind::Auto => Attachment::Tcx,
        }
    }

    /// Attaches the pod, or replaces the program where it is attached. `taken` says which namespaces belong to other pods.
    pub(crate) fn attach(
        &mut self,
        uid: &str,
        pod: &ClientPod,
        known: Option<&Attached>,
        binding: &Binding,
        taken: impl Fn(u64) -> bool,
    ) -> Result<Done, PodError> {
        if !is_valid_uid(uid) {
            return Err(PodError::Uid(uid.to_owned()));
        }
        let addresses = used_addresses(&pod.addresses);
        if addresses.is_empty() {
            return Err(PodError::NoAddress);
        }
        let pin = self.layout.link(uid);
        if let Some(known) =
            known.filter(|known| known.attachment == Attachment::Tcx && self.keeps_kind(known))
        {
            let mut attached = Attached { addresses: addresses.clone(), ..known.clone() };
            match self.replace_link(uid, &pin, &mut attached, binding) {
                Ok(()) => {
                    self.records.store(uid, &attached)?;
                    return Ok(Done { attached, interface: String::new(), how: How::Replaced });
                }
                Err(PodError::Attach(AttachError::Dead)) => detach_tcx(&pin)?,
                Err(error) => return Err(error),
            }
        } else {
            // Left by an agent that died between pinning and recording; without a record there is nothing to tell of it.
            if known.is_none() && pin.exists() {
                detach_tcx(&pin)?;
            }
        }
        let found = self.find(&pod.addresses, taken)?;
        let done = self.attach_afresh(uid, pod, addresses, known, binding, &found);
        if done.is_err() {
            // What was read of it earlier may be the reason: an interface made anew has another index.
            self.namespaces.forget(found.inode);
        }
        let done = done?;
        if let Some(known) = known.filter(|known| known.attachment != done.attached.attachment) {
            self.detach_program(uid, known)?;
        }
        Ok(done)
    }

    /// An attachment made before stays of its kind unless the flags ask for the other one.
    fn keeps_kind(&self, known: &Attached) -> bool {
        self.options.attach == AttachKind::Auto || self.kind() == known.attachment
    }

    fn replace_link(
        &self,
        uid: &str,
        pin: &Path,
        attached: &mut Attached,
        binding: &Binding,
    ) -> Result<(), PodError> {
        let config = pod_config(uid, attached, self.options.fou_port, self.options.unmarked_drain);
        let mut instance = program::load(self.layout, binding, &config)?;
        replace_tcx(instance.program()?, pin)?;
        attached.program_id = instance.id;
        Ok(())
    }

    fn find(&mut self, addresses: &BTreeSet<IpAddr>, taken: impl Fn(u64) -> bool) -> Result<Found, PodError> {
        if let Ok(found) = self.namespaces.find(addresses, &taken)
            && !taken(found.inode)
        {
            return Ok(found);
        }
        self.namespaces.scan()?;
        Ok(self.namespaces.find(addresses, taken)?)
    }

    fn attach_afresh(
        &mut self,
        uid: &str,
        pod: &ClientPod,
        addresses: Vec<IpAddr>,
        known: Option<&Attached>,
        binding: &Binding,
        found: &Found,
    ) -> Result<Done, PodError> {
        let kind = known
            .filter(|known| self.keeps_kind(known))
            .map_or_else(|| self.kind(), |known| known.attachment);
        let result = self.attach_as(kind, uid, pod, &addresses, known, binding, found);
        match result {
            Err(PodError::Attach(AttachError::NoTcx)) if self.options.attach == AttachKind::Auto => {
                *self.no_tcx = true;
                self.attach_as(Attachment::Clsact, uid, pod, &addresses, known, binding, found)
            }
            result => result,
        }
    }

    #[expect(clippy::too_many_arguments, reason = "one call site; a struct for it would only rename them")]
    fn attach_as(
        &mut self,
        attachment: Attachment,
        uid: &str,
        pod: &ClientPod,
        addresses: &[IpAddr],
        known: Option<&Attached>,
        binding: &Binding,
        found: &Found,
    ) -> Result<Done, PodError> {
        let (layout, options) = (self.layout, self.options);
        let records = &mut *self.records;
        let index = found.interface_index;
        let same = known.filter(|known| known.attachment == attachment && known.namespace == found.inode);
        within(&found.path, found.inode, move || {
            let interface = interface_name(index)?;
            let now = Monotonic::now();
            // A filter that is still there has been guarding all the time; a link that is made anew has not.
            let unbroken = match same {
                Some(known) if attachment == Attachment::Clsact => {
                    clsact_program(index)?.map(|_| known.guarded_since)
                }
                _ => None,
            };
            let mut attached = Attached {
                name: format!("{}/{}", pod.namespace, pod.name),
                attachment,
                namespace: found.inode,
                interface_index: index,
                program_id: 0,
                guarded_since: unbroken.unwrap_or(now),
                // Recorded before it is added, so that an agent that dies in between does not leave it.
                qdisc_added: same.is_some_and(|known| known.qdisc_added)
                    || (attachment == Attachment::Clsact && needs_qdisc(&interface, index)?),
                ports_overlap: ports_overlap(),
                addresses: addresses.to_vec(),
            };
            let config = pod_config(uid, &attached, options.fou_port, options.unmarked_drain);
            let mut instance = program::load(layout, binding, &config)?;
            attached.program_id = instance.id;
            // Recorded first: a filter without a record would be found by `cleanup` alone.
            records.store(uid, &attached)?;
            let how = if known.is_some() { How::Restored } else { How::Fresh };
            let how = match attachment {
                Attachment::Tcx => {
                    attach_tcx(instance.program()?, &interface, &layout.link(uid))?;
                    how
                }
                Attachment::Clsact => {
                    let replaced = attach_clsact(instance.program()?, &interface, index)?;
                    if replaced { How::Replaced } else { how }
                }
            };
            Ok(Done { attached, interface, how })
        })?
    }

    /// Detaches the pod and forgets it.
    pub(crate) fn detach(&mut self, uid: &str, known: &Attached) -> Result<(), PodError> {
        self.detach_program(uid, known)?;
        self.records.remove(uid)?;
        Ok(())
    }

    fn detach_program(&mut self, uid: &str, known: &Attached) -> Result<(), PodError> {
        match known.attachment {
            Attachment::Tcx => Ok(detach_tcx(&self.layout.link(uid))?),
            Attachment::Clsact => {
                let Some(path) = self.namespace_path(known.namespace)? else { return Ok(()) };
                let (index, remove_qdisc) = (known.interface_index, known.qdisc_added);
                match within(&path, known.namespace, move || detach_clsact(index, remove_qdisc)) {
                    // The namespace went meanwhile, and the filter with it.
                    Err(NamespaceError::Enter { .. }) => Ok(()),
                    result => {
                        result??;
                        Ok(())
                    }
                }
            }
        }
    }

    fn namespace_path(&mut self, inode: u64) -> Result<Option<PathBuf>, PodError> {
        if let Some(path) = self.namespaces.by_inode(inode).filter(|path| path.exists()) {
            return Ok(Some(path));
        }
        self.namespaces.scan()?;
        Ok(self.namespaces.by_inode(inode))
    }
}

/// Whether a TCX attachment is still in place.
pub(crate) fn link_is_alive(layout: &Layout, uid: &str) -> Result<bool, DatapathError> {
    let pin = layout.link(uid);
    let state = sys::link_state(&pin).map_err(super::layout::file_error("look at the link", &pin))?;
    Ok(state.is_some_and(|state| state.interface_index != 0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_address_of_each_family_is_used_ipv4_first() {
        let addresses = ["fd00::2", "fd00::1", "10.0.0.2", "10.0.0.1"].map(|text| text.parse().unwrap());
        let used = used_addresses(&BTreeSet::from(addresses));
        assert_eq!(used, ["10.0.0.1".parse::<IpAddr>().unwrap(), "fd00::1".parse().unwrap()]);
    }
}
