//! What the agent would know of the API, without the agent.

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex},
    thread::JoinHandle,
    time::Duration,
};

use anyhow::Result;
use coil_guard::{
    clock::Monotonic,
    index::{BackendState, Index, ObjectName},
    k8s::{self, Message, Node, Watches},
    plan::{self, Desired, Settings},
};
use coil_guard_tests::{kube_api::KubeApi, lab::eventually};
use tokio::sync::oneshot;

pub(crate) const PATIENCE: Duration = Duration::from_secs(15);
pub(crate) const NODE: &str = "node-1";

pub(crate) struct State {
    pub(crate) index: Index,
    pub(crate) watches: Watches,
    pub(crate) malformed: Vec<String>,
    pub(crate) updates: usize,
}

/// What the agent would know, followed on a thread of its own.
pub(crate) struct Follower {
    pub(crate) state: Arc<Mutex<State>>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Follower {
    pub(crate) fn start(api: &KubeApi) -> Self {
        let now = Monotonic::now();
        let state =
            State { index: Index::default(), watches: Watches::new(now), malformed: Vec::new(), updates: 0 };
        let state = Arc::new(Mutex::new(state));
        let (stop, stopped) = oneshot::channel::<()>();
        let (shared, kubeconfig) = (Arc::clone(&state), api.kubeconfig().to_owned());
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            let work = async {
                let client = k8s::client(Some(&kubeconfig)).await.unwrap();
                let mut messages = k8s::watch(&client, &Node { name: NODE.into(), fou_port: 5555 });
                while let Some(message) = messages.recv().await {
                    take(&mut shared.lock().unwrap(), message);
                }
            };
            tokio::task::LocalSet::new().block_on(&runtime, async {
                tokio::select! { () = work => {}, _ = stopped => {} }
            });
        });
        Self { state, stop: Some(stop), thread: Some(thread) }
    }

    pub(crate) fn desired(&self) -> Desired {
        let state = self.state.lock().unwrap();
        let complete = state.watches.complete();
        plan::plan(&state.index, &Settings::default(), &BTreeSet::new(), complete, Monotonic::now())
    }

    /// The state of each backend of `net/nat`, by address.
    pub(crate) fn backends(&self) -> Vec<(String, BackendState)> {
        let state = self.state.lock().unwrap();
        let name = ObjectName { namespace: "net".into(), name: "nat".into() };
        state.index.backends(&name).map(|(key, backend)| (key.address.to_string(), backend.state)).collect()
    }

    pub(crate) fn wait(&self, what: &str, mut holds: impl FnMut(&Desired) -> bool) -> Result<Desired> {
        eventually(what, PATIENCE, || {
            let desired = self.desired();
            Ok(if holds(&desired) { Ok(desired) } else { Err((desired, self.backends())) })
        })
    }

    pub(crate) fn wait_complete(&self) -> Result<Desired> {
        self.wait("complete plan", |desired| desired.complete)
    }

    pub(crate) fn wait_backends(&self, expected: &[(&str, BackendState)]) -> Result<()> {
        eventually(&format!("backends {expected:?}"), PATIENCE, || {
            let found = self.backends();
            let same = found.len() == expected.len()
                && found
                    .iter()
                    .zip(expected)
                    .all(|(found, expected)| (found.0.as_str(), found.1) == *expected);
            Ok(if same { Ok(()) } else { Err(found) })
        })
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let ended = thread.join();
            assert!(ended.is_ok() || std::thread::panicking(), "the follower panicked");
        }
    }
}

fn take(state: &mut State, message: Message) {
    let now = Monotonic::now();
    match message {
        Message::Update { kind, update, listed, .. } => {
            if listed {
                state.watches.listed(kind);
            }
            state.updates += 1;
            state.index.update(*update, now);
        }
        Message::Health(kind, health) => drop(state.watches.set(kind, health, now)),
        Message::Malformed(_, malformed) => state.malformed.push(malformed.to_string()),
    }
}
