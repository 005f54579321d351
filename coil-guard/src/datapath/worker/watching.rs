//! Looking at what others can change: the cores in their array, and the attachments in the pods' namespaces.

use super::{Pod, Worker};
use crate::{
    datapath::{
        Attachment, Report, Sizes, attach::clsact_program, layout::unpin, mailbox::Wanted,
        namespaces::within_each, netlink::Netlink, own_maps::own_maps, part::Key, pods::link_program,
    },
    plan::Want,
};

impl Worker {
    /// Looks whether attachments are still there, and whether pods that need them only for their tunnels still have one.
    pub(super) fn check(&mut self, wanted: &Wanted) {
        match self.cores.as_mut().map_or_else(|| Ok(Vec::new()), |cores| cores.check(&self.layout)) {
            Ok(lost) => {
                for name in lost {
                    self.warn(format!("somebody had removed the core program {name:?}; it is loaded anew"));
                }
            }
            Err(error) => self.warn(error.to_string()),
        }
        self.look_at_pins();
        let mut lost = Vec::new();
        let mut inside = Vec::new();
        for (key, pod) in &self.pods {
            let Some(attached) = &pod.attached else { continue };
            if attached.attachment == Attachment::Tcx {
                match link_program(&self.layout, key) {
                    Ok(Some(_)) => {}
                    Ok(None) => lost.push(key.clone()),
                    Err(error) => self.warn(error.to_string()),
                }
            }
            let tunnelled = wanted.targets.get(key).is_some_and(|target| target.want == Want::WhileTunnelled);
            if tunnelled || attached.attachment == Attachment::Clsact {
                inside.push((key.clone(), attached.namespace, attached.interface_index, attached.attachment));
            }
        }
        let mut unneeded = Vec::new();
        if !inside.is_empty() {
            if let Err(error) = self.namespaces.scan() {
                self.warn(error.to_string());
                return;
            }
            let paths = inside
                .into_iter()
                .filter_map(|pod| self.namespaces.by_inode(pod.1).map(|path| (pod, path)))
                .collect();
            let seen = within_each(paths, |(key, _, index, attachment)| {
                let filter = *attachment != Attachment::Clsact
                    || !matches!(clsact_program(key.part, *index), Ok(None));
                let remotes = Netlink::open().and_then(|mut netlink| netlink.tunnel_remotes());
                (filter, remotes)
            });
            for ((key, ..), (filter, remotes)) in seen {
                if !filter {
                    lost.push(key.clone());
                }
                let tunnelled = remotes.map_or(true, |remotes| !remotes.is_disjoint(&wanted.services));
                if !tunnelled
                    && wanted.targets.get(&key).is_some_and(|target| target.want == Want::WhileTunnelled)
                {
                    unneeded.push(key);
                }
            }
        }
        for key in unneeded {
            self.detach(&key);
        }
        for key in lost {
            self.lose(&key);
        }
        self.announce(None);
    }

    /// Looks twice: the agent may be making its maps anew at this moment.
    fn look_at_pins(&mut self) {
        let names = own_maps(&Sizes::default()).map(|map| map.name);
        let missing = names.into_iter().find(|name| !self.layout.map(name).exists());
        if let Some(name) = missing.filter(|_| missing == self.unpinned) {
            self.report(Report::PinLost(self.layout.map(name)));
        }
        self.unpinned = missing;
    }

    /// Clears away what is left of an attachment that somebody removed; it is made anew at once.
    fn lose(&mut self, key: &Key) {
        let Some(pod) = self.pods.get_mut(key) else { return };
        let Some(attached) = pod.attached.take() else { return };
        if attached.attachment == Attachment::Clsact {
            // Of a filter the record stays: it says whether the qdisc, which is still there, is ours to remove one day.
            let known = std::mem::take(pod);
            *pod = if known.lost { known } else { Pod { lost: true, ..Pod::default() } };
            pod.attached = Some(attached);
            return;
        }
        *pod = Pod { lost: true, ..Pod::default() };
        if let Err(error) = unpin(&self.layout.link(key)) {
            self.warn(error.to_string());
        }
    }
}
