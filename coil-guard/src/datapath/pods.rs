//! Attaching one part of a pod, and everything else that is done to one.

use std::{collections::BTreeSet, net::IpAddr, path::PathBuf, time::Duration};

use super::{
    AttachKind, Attachment, DatapathError, How, Options,
    attach::{
        AttachError, attach_clsact, attach_tcx, clsact_program, detach_clsact, detach_tcx, interface_name,
        needs_qdisc, replace_tcx,
    },
    cores::Core,
    layout::Layout,
    namespaces::{Found, NamespaceError, Namespaces, ports_overlap, within},
    part::{Key, Part},
    records::{Attached, Pods, is_valid_uid, pod_config},
    stub::{Stub, Stubs},
    sys,
};
use crate::{clock::Monotonic, plan::Want};

/// Why a pod is not attached or not detached.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PodError {
    #[error("the pod's UID {0:?} cannot be the name of a pin")]
    Uid(String),
    #[error("things have changed meanwhile; tried again at once")]
    Again,
    #[error("the pod has no address yet")]
    NoAddress,
    #[error(transparent)]
    Namespace(#[from] NamespaceError),
    #[error(transparent)]
    Attach(#[from] AttachError),
    #[error(transparent)]
    Datapath(#[from] DatapathError),
    /// There is no core program to go on in.
    #[error("{0}")]
    NoCore(String),
}

impl PodError {
    /// Whether the pod is merely not up yet (or already going).
    pub(crate) fn is_not_ready(&self) -> bool {
        matches!(self, Self::NoAddress | Self::Namespace(_))
    }

    /// Whether the kernel refuses the program itself.
    pub(crate) fn is_refusal(&self) -> bool {
        matches!(self, Self::Datapath(DatapathError::Refused { .. }))
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

/// What is to be attached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Target {
    /// `namespace/name` of the pod.
    pub(crate) name: String,
    pub(crate) addresses: BTreeSet<IpAddr>,
    pub(crate) core: Core,
    pub(crate) want: Want,
}

/// What else is attached, by inode of the namespace.
#[derive(Debug, Default)]
pub(crate) struct Others {
    /// Namespaces of other pods.
    pub(crate) taken: BTreeSet<u64>,
    /// Those in which another part of this pod says that the qdisc is ours.
    pub(crate) qdiscs: BTreeSet<u64>,
}

/// What is known before the stub is loaded.
#[derive(Debug)]
struct Prepared {
    attached: Attached,
    interface: String,
    place: Place,
    /// Kernel id of our program that stands there.
    program_id: Option<u32>,
}

#[derive(Debug)]
enum Place {
    /// The pinned link, whose program is replaced.
    Link,
    /// The interface in this namespace.
    Interface(Found),
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

    /// An attachment made before stays of its kind unless the flags ask for the other one.
    fn keeps_kind(&self, known: &Attached) -> bool {
        self.options.attach == AttachKind::Auto || self.kind() == known.attachment
    }

    /// Attaches the pod's stub, or replaces it where it is, if it is not the one that is wanted.
    pub(crate) fn attach(
        &mut self,
        key: &Key,
        target: &Target,
        known: Option<&Attached>,
        stubs: &mut Stubs,
        others: &Others,
    ) -> Result<Done, PodError> {
        let prepared = self.prepare(key, target, known, others)?;
        let config =
            pod_config(&key.uid, &prepared.attached, self.options.fou_port, self.options.unmarked_drain);
        let wanted = stubs.fingerprint(&config);
        let stands = |known: &&Attached| {
            known.stub == wanted && prepared.program_id.is_some_and(|id| id == known.program_id)
        };
        if let Some(known) = known.filter(stands) {
            let Prepared { mut attached, interface, .. } = prepared;
            (attached.program_id, attached.stub) = (known.program_id, known.stub);
            if attached != *known {
                self.records.store(key, &attached)?;
            }
            return Ok(Done { attached, interface, how: How::Kept });
        }
        let stub = stubs.load(&config)?;
        self.place(key, known, prepared, stub, wanted)
    }

    /// Finds out where and with which constants the pod's stub is to be attached, or replaced where it is.
    fn prepare(
        &mut self,
        key: &Key,
        target: &Target,
        known: Option<&Attached>,
        others: &Others,
    ) -> Result<Prepared, PodError> {
        if !is_valid_uid(&key.uid) {
            return Err(PodError::Uid(key.uid.clone()));
        }
        let addresses = used_addresses(&target.addresses);
        if addresses.is_empty() {
            return Err(PodError::NoAddress);
        }
        let pin = self.layout.link(key);
        match known {
            Some(known) if known.attachment == Attachment::Tcx && self.keeps_kind(known) => {
                if let Some(program) = link_program(self.layout, key)? {
                    let attached = Attached { addresses, core: target.core, ..known.clone() };
                    return Ok(Prepared {
                        attached,
                        interface: String::new(),
                        place: Place::Link,
                        program_id: Some(program),
                    });
                }
                detach_tcx(&pin)?;
            }
            // Left by an agent that died between pinning and recording; without a record there is nothing to tell of it.
            None if pin.exists() => detach_tcx(&pin)?,
            _ => {}
        }
        let found = self.find(&target.addresses, |inode| others.taken.contains(&inode))?;
        let kind = known
            .filter(|known| self.keeps_kind(known))
            .map_or_else(|| self.kind(), |known| known.attachment);
        let inode = found.inode;
        let prepared = prepare_interface(kind, key.part, target, addresses, known, others, found);
        if prepared.is_err() {
            // What was read of it earlier may be the reason: an interface made anew has another index.
            self.namespaces.forget(inode);
        }
        prepared
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

    /// Attaches the loaded stub, or puts it in the place of the one that is attached.
    fn place(
        &mut self,
        key: &Key,
        known: Option<&Attached>,
        prepared: Prepared,
        mut stub: Stub,
        fingerprint: u64,
    ) -> Result<Done, PodError> {
        let Prepared { mut attached, interface, place, .. } = prepared;
        (attached.program_id, attached.stub) = (stub.id, fingerprint);
        let Place::Interface(found) = place else {
            match replace_tcx(stub.program()?, &self.layout.link(key)) {
                // It died since it was looked at.
                Err(AttachError::Dead) => return Err(PodError::Again),
                result => result?,
            }
            self.records.store(key, &attached)?;
            return Ok(Done { attached, interface, how: How::Replaced });
        };
        // Recorded first: a filter without a record would be found by `cleanup` alone.
        self.records.store(key, &attached)?;
        let how = if known.is_some() { How::Restored } else { How::Fresh };
        let (pin, kind) = (self.layout.link(key), attached.attachment);
        let result = within(&found.path, found.inode, || match kind {
            Attachment::Tcx => attach_tcx(stub.program()?, key.part, &interface, &pin).map(|()| how),
            Attachment::Clsact => attach_clsact(stub.program()?, key.part, &interface, found.interface_index)
                .map(|replaced| if replaced { How::Replaced } else { how }),
        });
        let how = match result {
            Ok(Ok(how)) => how,
            Ok(Err(AttachError::NoTcx)) if self.options.attach == AttachKind::Auto => {
                *self.no_tcx = true;
                return Err(PodError::Again);
            }
            Ok(Err(error)) => {
                self.namespaces.forget(found.inode);
                return Err(error.into());
            }
            Err(error) => {
                self.namespaces.forget(found.inode);
                return Err(error.into());
            }
        };
        if let Some(known) = known.filter(|known| known.attachment != kind) {
            self.detach_program(key, known)?;
        }
        Ok(Done { attached, interface, how })
    }

    /// Detaches the part and forgets it.
    pub(crate) fn detach(&mut self, key: &Key, known: &Attached) -> Result<(), PodError> {
        self.detach_program(key, known)?;
        self.records.remove(key)?;
        Ok(())
    }

    fn detach_program(&mut self, key: &Key, known: &Attached) -> Result<(), PodError> {
        match known.attachment {
            Attachment::Tcx => Ok(detach_tcx(&self.layout.link(key))?),
            Attachment::Clsact => {
                let Some(path) = self.namespace_path(known.namespace)? else { return Ok(()) };
                let (part, index, remove_qdisc) = (key.part, known.interface_index, known.qdisc_added);
                match within(&path, known.namespace, move || detach_clsact(part, index, remove_qdisc)) {
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

fn prepare_interface(
    attachment: Attachment,
    part: Part,
    target: &Target,
    addresses: Vec<IpAddr>,
    known: Option<&Attached>,
    others: &Others,
    found: Found,
) -> Result<Prepared, PodError> {
    let index = found.interface_index;
    let same = known.filter(|known| known.attachment == attachment && known.namespace == found.inode);
    let (interface, overlap, filter, qdisc) = within(&found.path, found.inode, || {
        let interface = interface_name(index)?;
        let is_clsact = attachment == Attachment::Clsact;
        let filter = if is_clsact { clsact_program(part, index)? } else { None };
        let qdisc = is_clsact && needs_qdisc(&interface, index)?;
        Ok::<_, AttachError>((interface, ports_overlap(), filter, qdisc))
    })??;
    let attached = Attached {
        name: target.name.clone(),
        attachment,
        namespace: found.inode,
        interface_index: index,
        program_id: 0,
        // A filter that is still there has been guarding all the time; a link that is made anew has not.
        guarded_since: same
            .filter(|_| filter.is_some())
            .map_or_else(Monotonic::now, |known| known.guarded_since),
        // Recorded before it is added, so that an agent that dies in between does not leave it.
        // Whichever part is the last to go takes it along.
        qdisc_added: qdisc
            || same.is_some_and(|known| known.qdisc_added)
            || others.qdiscs.contains(&found.inode),
        ports_overlap: overlap,
        addresses,
        core: target.core,
        stub: 0,
    };
    Ok(Prepared { attached, interface, place: Place::Interface(found), program_id: filter })
}

/// Kernel id of the program in the part's TCX link; `None` when the link is not in place any more.
pub(crate) fn link_program(layout: &Layout, key: &Key) -> Result<Option<u32>, DatapathError> {
    let pin = layout.link(key);
    let state = sys::link_state(&pin).map_err(super::layout::file_error("look at the link", &pin))?;
    Ok(state.filter(|state| state.interface_index != 0).map(|state| state.program_id))
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
