//! Attaching and detaching what the plan wants.

use std::{collections::BTreeSet, time::Instant};

use super::{Bound, FIRST_RETRY, Pod, Worker};
use crate::{
    datapath::{
        How, Report,
        cores::Core,
        mailbox::Wanted,
        pods::{Attacher, Done, PodError, used_addresses},
        records::Attached,
    },
    plan::{ClientPod, PodUid, Want},
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
        let unwanted: Vec<_> =
            self.pods.keys().filter(|uid| !wanted.pods.contains_key(*uid)).cloned().collect();
        for uid in unwanted {
            if self.detach(&uid) {
                self.pods.remove(&uid);
            }
        }
    }

    /// Detaches a pod if it is attached. `false` when that failed.
    pub(super) fn detach(&mut self, uid: &str) -> bool {
        let Some(attached) = self.known(uid) else { return true };
        let Some(mut attacher) = self.attacher() else { return true };
        let result = attacher.detach(uid, &attached);
        let Some(pod) = self.pods.get_mut(uid) else { return true };
        match result {
            Ok(()) => {
                pod.attached = None;
                pod.stands = false;
                self.report(Report::Detached { pod: uid.to_owned() });
                true
            }
            Err(error) => {
                let text = error.to_string();
                if pod.last_error.as_ref() != Some(&text) {
                    pod.last_error = Some(text.clone());
                    self.report(Report::DetachFailed { pod: uid.to_owned(), error: text });
                }
                false
            }
        }
    }

    /// Attaches what is due, one after the other. `false` when it stopped for a newer plan, or because it is time to look at
    /// Cilium's maps again.
    pub(super) fn attach_wanted(&mut self, version: u64, wanted: &Wanted) -> bool {
        let due: Vec<_> = wanted.pods.iter().filter(|(uid, client)| self.is_due(uid, client)).collect();
        for (uid, client) in due {
            if self.mailbox.is_newer(version) {
                return false;
            }
            self.attach(uid, client);
            self.mailbox.set_progress(version, self.progress(wanted));
            if Instant::now() >= self.binding_at {
                return false;
            }
        }
        true
    }

    fn is_due(&self, uid: &str, client: &ClientPod) -> bool {
        let (Bound::Yes, Some(cores)) = (&self.bound, &self.cores) else { return false };
        let Some(pod) = self.pods.get(uid) else { return client.want == Want::Attached };
        if pod.retry_at.is_some_and(|time| time > Instant::now()) {
            return false;
        }
        match &pod.attached {
            // Until the core that it is to have is there it goes on with the one that it has.
            Some(attached) => {
                let differs = attached.core != Core::of(client)
                    || attached.addresses != used_addresses(&client.addresses);
                (!pod.stands || differs) && cores.is_loaded(Core::of(client))
            }
            None => client.want == Want::Attached,
        }
    }

    fn attach(&mut self, uid: &PodUid, client: &ClientPod) {
        let known = self.known(uid);
        self.pods.entry(uid.clone()).or_default();
        let done = self.try_attach(uid, client, known.as_ref());
        match done {
            Some(Ok(done)) => self.attached(uid, done),
            Some(Err(error)) => self.attach_failed(uid, &error),
            None => {}
        }
    }

    /// `None` where nothing is guarded.
    fn try_attach(
        &mut self,
        uid: &PodUid,
        client: &ClientPod,
        known: Option<&Attached>,
    ) -> Option<Result<Done, PodError>> {
        // Without a core a stub is no guard.
        if let Some((problem, _)) = self.cores.as_ref()?.problem(Core::of(client)) {
            return Some(Err(PodError::NoCore(problem.to_owned())));
        }
        let taken: BTreeSet<_> = self
            .pods
            .iter()
            .filter(|(other, _)| *other != uid)
            .filter_map(|(_, pod)| pod.attached.as_ref().map(|attached| attached.namespace))
            .collect();
        let mut attacher = Attacher {
            options: &self.options,
            layout: &self.layout,
            namespaces: &mut self.namespaces,
            records: self.records.as_mut()?,
            no_tcx: &mut self.no_tcx,
        };
        Some(attacher.attach(uid, client, known, self.stubs.as_ref()?, |inode| taken.contains(&inode)))
    }

    fn known(&self, uid: &str) -> Option<Attached> {
        self.pods.get(uid).and_then(|pod| pod.attached.clone())
    }

    fn attached(&mut self, uid: &str, done: Done) {
        let Some(pod) = self.pods.get_mut(uid) else { return };
        let how = if pod.lost { How::Restored } else { done.how };
        let report = Report::Attached {
            pod: uid.to_owned(),
            interface: done.interface,
            attachment: done.attached.attachment,
            ports_overlap: done.attached.ports_overlap,
            how,
        };
        *pod = Pod { attached: Some(done.attached), stands: true, ..Pod::default() };
        self.report(report);
    }

    fn attach_failed(&mut self, uid: &str, error: &PodError) {
        let Some(pod) = self.pods.get_mut(uid) else { return };
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
            self.report(Report::Failed { pod: uid.to_owned(), error: text, retry_in });
        }
    }
}
