//! Attaching and detaching what the plan wants.

use std::{cmp::Reverse, time::Instant};

use super::{Bound, FIRST_RETRY, Pod, Worker};
use crate::{
    datapath::{
        How, Report,
        mailbox::Wanted,
        part::{Key, Part},
        pods::{Attacher, Done, Others, PodError, Target, used_addresses},
        records::{Attached, generation},
    },
    plan::Want,
};

impl Worker {
    fn attacher(&mut self) -> Option<Attacher<'_>> {
        Some(Attacher {
            options: &self.options,
            layout: &self.layout,
            namespaces: &mut self.namespaces,
            records: self.records.as_mut()?,
            no_tcx: &mut self.no_tcx,
        })
    }

    pub(super) fn detach_unwanted(&mut self, wanted: &Wanted) {
        // In the order of keys, in which a pod's parts are to go.
        let unwanted: Vec<_> =
            self.pods.keys().filter(|key| !wanted.targets.contains_key(*key)).cloned().collect();
        for key in unwanted {
            if self.detach(&key) {
                self.pods.remove(&key);
            }
        }
    }

    /// Detaches a part of a pod if it is attached. `false` when that failed.
    pub(super) fn detach(&mut self, key: &Key) -> bool {
        let Some(attached) = self.known(key) else { return true };
        if key.part == Part::Return {
            // No flow may be given a port any more at which this pod has no replies.
            self.announce(Some(key));
        }
        let Some(mut attacher) = self.attacher() else { return true };
        let result = attacher.detach(key, &attached);
        let Some(pod) = self.pods.get_mut(key) else { return true };
        match result {
            Ok(()) => {
                pod.attached = None;
                pod.stands = false;
                self.report(Report::Detached { pod: key.uid.clone(), part: key.part });
                true
            }
            Err(error) => {
                let text = error.to_string();
                if pod.last_error.as_ref() != Some(&text) {
                    pod.last_error = Some(text.clone());
                    self.report(Report::DetachFailed { pod: key.uid.clone(), part: key.part, error: text });
                }
                false
            }
        }
    }

    /// Attaches what is due, one after the other. `false` when it stopped for a newer plan, or because it is time to look at
    /// Cilium's maps again.
    pub(super) fn attach_wanted(&mut self, version: u64, wanted: &Wanted) -> bool {
        let mut due: Vec<_> =
            wanted.targets.iter().filter(|(key, target)| self.is_due(key, target)).collect();
        // What guards comes first. Of the others each comes after what it needs.
        due.sort_by_key(|(key, _)| (key.part != Part::Guard, Reverse(key.part)));
        for (key, target) in due {
            if self.mailbox.is_newer(version) {
                return false;
            }
            self.attach(key, target);
            self.announce(None);
            self.mailbox.set_progress(version, self.progress(wanted));
            if Instant::now() >= self.binding_at {
                return false;
            }
        }
        true
    }

    fn is_due(&self, key: &Key, target: &Target) -> bool {
        let (Bound::Yes, Some(cores)) = (&self.bound, &self.cores) else { return false };
        let Some(pod) = self.pods.get(key) else { return target.want == Want::Attached };
        if pod.retry_at.is_some_and(|time| time > Instant::now()) {
            return false;
        }
        match &pod.attached {
            // Until the core that it is to have is there it goes on with the one that it has.
            Some(attached) => {
                let differs =
                    attached.core != target.core || attached.addresses != used_addresses(&target.addresses);
                (!pod.stands || differs) && cores.is_loaded(target.core)
            }
            None => target.want == Want::Attached,
        }
    }

    fn attach(&mut self, key: &Key, target: &Target) {
        let known = self.known(key);
        self.pods.entry(key.clone()).or_default();
        let done = self.try_attach(key, target, known.as_ref());
        match done {
            Some(Ok(done)) => self.attached(key, done),
            Some(Err(error)) => self.attach_failed(key, &error),
            None => {}
        }
    }

    /// `None` where nothing is guarded.
    fn try_attach(
        &mut self,
        key: &Key,
        target: &Target,
        known: Option<&Attached>,
    ) -> Option<Result<Done, PodError>> {
        // Without a core a stub is no guard.
        if let Some((problem, _)) = self.cores.as_ref()?.problem(target.core) {
            return Some(Err(PodError::NoCore(problem.to_owned())));
        }
        let mut others = Others::default();
        for (other, pod) in self.pods.iter().filter(|(other, _)| *other != key) {
            let Some(attached) = &pod.attached else { continue };
            if other.uid != key.uid {
                others.taken.insert(attached.namespace);
            } else if attached.qdisc_added {
                others.qdiscs.insert(attached.namespace);
            }
        }
        let mut attacher = Attacher {
            options: &self.options,
            layout: &self.layout,
            namespaces: &mut self.namespaces,
            records: self.records.as_mut()?,
            no_tcx: &mut self.no_tcx,
        };
        Some(attacher.attach(key, target, known, self.stubs.as_mut()?, &others))
    }

    fn known(&self, key: &Key) -> Option<Attached> {
        self.pods.get(key).and_then(|pod| pod.attached.clone())
    }

    /// Tells the clients' programs which pods can have replies at ports that they are given: those whose replies are turned
    /// back, but for `going`.
    pub(super) fn announce(&mut self, going: Option<&Key>) {
        let Some(returning) = &mut self.returning else { return };
        let pods = self
            .pods
            .iter()
            .filter(|(key, pod)| key.part == Part::Return && pod.stands && !pod.lost && Some(*key) != going);
        let wanted = pods.flat_map(|(key, pod)| {
            pod.attached.iter().flat_map(|attached| {
                attached.addresses.iter().map(|address| (*address, generation(&key.uid)))
            })
        });
        if let Err(error) = returning.set(wanted.collect()) {
            self.warn(error.to_string());
        }
    }

    fn attached(&mut self, key: &Key, done: Done) {
        let Some(pod) = self.pods.get_mut(key) else { return };
        let how = if pod.lost { How::Restored } else { done.how };
        let report = Report::Attached {
            pod: key.uid.clone(),
            part: key.part,
            interface: done.interface,
            attachment: done.attached.attachment,
            ports_overlap: done.attached.ports_overlap,
            how,
        };
        *pod = Pod { attached: Some(done.attached), stands: true, ..Pod::default() };
        self.report(report);
    }

    fn attach_failed(&mut self, key: &Key, error: &PodError) {
        let Some(pod) = self.pods.get_mut(key) else { return };
        if matches!(error, PodError::Again) {
            pod.retry_at = Some(Instant::now());
            return;
        }
        let backoff = FIRST_RETRY * 2u32.saturating_pow(pod.attempts.min(10));
        // A refusal does not come good by itself, and each attempt costs the verifier's time.
        let retry_in = if error.is_refusal() { error.patience() } else { backoff.min(error.patience()) };
        pod.attempts += 1;
        pod.refused = error.is_refusal();
        pod.no_core = matches!(error, PodError::NoCore(_));
        pod.retry_at = Some(Instant::now() + retry_in);
        let text = error.to_string();
        // A pod that comes up takes a moment; only what lasts is worth a word, and once.
        let lasts = !error.is_not_ready() || pod.attempts > 5;
        if lasts && pod.last_error.as_ref() != Some(&text) {
            pod.last_error = Some(text.clone());
            self.report(Report::Failed { pod: key.uid.clone(), part: key.part, error: text, retry_in });
        }
    }
}
