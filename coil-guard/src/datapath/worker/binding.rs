//! The core programs and what they are bound to.

use std::collections::BTreeSet;

use super::{Bound, Worker};
use crate::{
    cilium::{CiliumError, CiliumMaps},
    datapath::{DatapathError, Report, cores::Core, mailbox::Wanted, program::Binding},
};

impl Worker {
    /// Compares the ids behind Cilium's pins with what the cores are bound to.
    pub(super) fn bind(&mut self) -> Result<(), DatapathError> {
        let maps = match CiliumMaps::open(&self.options.cilium_directory) {
            Ok(maps) => maps,
            Err(error) => return self.unbind(error),
        };
        if self.binding.as_ref().is_none_or(|binding| binding.ids != maps.ids()) {
            self.binding = None;
            self.told_bound = false;
            self.binding = Some(Binding::make(&self.layout, &maps)?);
            if let Some(cores) = &mut self.cores {
                cores.outdated();
            }
        }
        self.told_bound &= self.bound == Bound::Yes;
        self.bound = Bound::Yes;
        Ok(())
    }

    fn unbind(&mut self, error: CiliumError) -> Result<(), DatapathError> {
        if !error.is_missing() {
            // A program that reads maps of another layout could do harm; of maps that are gone it does nothing. Without a core
            // all pods are free of it at once, however long it takes to detach them.
            if let Some(cores) = &mut self.cores {
                Core::ALL.into_iter().try_for_each(|core| cores.clear(core))?;
            }
            let attached: Vec<_> = self.pods.keys().cloned().collect();
            for uid in attached {
                self.detach(&uid);
            }
            self.binding = None;
        }
        let text = error.to_string();
        if self.bound != Bound::No(text.clone()) {
            self.bound = Bound::No(text);
            self.report(Report::Unbound(error));
        }
        Ok(())
    }

    /// Puts the cores that pods need in place, over the present binding. One that no pod needs goes with the binding that it
    /// was loaded over, and is not loaded anew.
    pub(super) fn load_cores(&mut self, wanted: &Wanted) -> Result<(), DatapathError> {
        let (Bound::Yes, Some(binding), Some(cores)) = (&self.bound, &self.binding, &mut self.cores) else {
            return Ok(());
        };
        let attached =
            self.pods.values().filter_map(|pod| pod.attached.as_ref().map(|attached| attached.core));
        // Those for replies know nothing of Cilium's maps.
        let allowed = |core: &Core| !self.options.read_only || *core != Core::Guard;
        let needed: BTreeSet<_> =
            wanted.targets.values().map(|target| target.core).chain(attached).filter(allowed).collect();
        let mut failures = Vec::new();
        for core in Core::ALL {
            let needed = needed.contains(&core);
            if !cores.is_due(core, needed) {
                continue;
            }
            if !needed {
                cores.clear(core)?;
                continue;
            }
            match cores.load(&self.layout, binding, core) {
                Ok(()) => {
                    // Pods that waited for it.
                    for pod in self.pods.values_mut().filter(|pod| pod.no_core) {
                        (pod.no_core, pod.retry_at) = (false, None);
                    }
                }
                Err(failure) => failures.extend(failure),
            }
        }
        let complete = needed.iter().all(|core| cores.is_loaded(*core));
        let maps = binding.maps.clone();
        if complete && !self.told_bound {
            self.told_bound = true;
            self.report(Report::Bound(maps));
        }
        for (error, retry_in) in failures {
            self.report(Report::CoreFailed { error, retry_in });
        }
        Ok(())
    }
}
