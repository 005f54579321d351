//! `coil-guard run`: the agent.
//!
//! One thread, one loop. A change from the API becomes a plan and is in the maps within the same turn; everything slow
//! (namespaces, attaching, Cilium's pins) is on the datapath's own thread, and Kubernetes events have a queue.

mod agent;
mod effects;
mod notices;
mod readiness;

use std::{sync::Arc, time::Duration};

use anyhow::Context as _;
use tokio::{
    signal::unix::{Signal, SignalKind, signal},
    sync::mpsc,
    task::LocalSet,
};

use crate::{
    cli::RunArguments,
    clock::Monotonic,
    datapath::{Datapath, Opened, Options},
    k8s::{self, EventWriter, Node, Outcome},
    memory,
    observe::{self, Condition, Endpoints, Metrics, Readiness, SnapshotCell, SnapshotRequest},
};

/// How often a waiting agent tries to take the lock.
const LOCK_RETRY: Duration = Duration::from_millis(250);

/// Runs the agent until it is told to stop.
///
/// # Errors
///
/// What cannot be put right without the operator: no API configuration, an address in use, no bpffs.
pub fn run(arguments: &RunArguments) -> anyhow::Result<()> {
    memory::keep_small();
    let log = observe::init_log(arguments.log.log_format, &arguments.log.log_level)
        .map_err(|error| anyhow::anyhow!("--log-level: {error}"))?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot start the runtime")?;
    LocalSet::new().block_on(&runtime, async {
        let mut stop = Stop::new()?;
        let cell = SnapshotCell::default();
        let (snapshots, snapshot_requests) = mpsc::channel(4);
        let endpoints = Endpoints {
            metrics: Arc::new(Metrics::new(cell.clone())),
            cell,
            snapshots,
            readiness: Arc::new(Readiness::new("the agent is starting")),
            log,
        };
        observe::serve(&endpoints, arguments.endpoints.metrics(), arguments.endpoints.health()).await?;
        run_until_stopped(arguments, &endpoints, snapshot_requests, &mut stop).await
    })
}

async fn run_until_stopped(
    arguments: &RunArguments,
    endpoints: &Endpoints,
    mut snapshot_requests: mpsc::Receiver<SnapshotRequest>,
    stop: &mut Stop,
) -> anyhow::Result<()> {
    tracing::info!(version = env!("CARGO_PKG_VERSION"), node = arguments.api.node_name, "starting");
    let client = k8s::client(arguments.api.kubeconfig.as_deref()).await?;
    let options = arguments.datapath();
    let Some(datapath) = wait_for_lock(&options, endpoints, &mut snapshot_requests, stop).await? else {
        return Ok(());
    };
    let node = Node { name: arguments.api.node_name.clone(), fou_port: arguments.node.fou_port };
    let outcomes = Arc::clone(&endpoints.metrics);
    let events = EventWriter::start(client.clone(), node.name.clone(), move |outcome| {
        let outcome = match outcome {
            Outcome::Created => "created",
            Outcome::Patched => "patched",
            Outcome::Failed => "failed",
        };
        outcomes.kubernetes_events.get_or_create(&[("outcome", outcome)]).inc();
    });
    let messages = k8s::watch(&client, &node);
    let agent = agent::Agent::new(&node, arguments.settings(), datapath, events, endpoints);
    agent.run(messages, snapshot_requests, stop).await?;
    tracing::info!("stopping; what is attached goes on guarding");
    Ok(())
}

/// Takes the datapath, waiting for another agent to end; `None` when told to stop meanwhile.
async fn wait_for_lock(
    options: &Options,
    endpoints: &Endpoints,
    snapshot_requests: &mut mpsc::Receiver<SnapshotRequest>,
    stop: &mut Stop,
) -> anyhow::Result<Option<Datapath>> {
    let mut told = false;
    loop {
        endpoints.readiness.turn(Monotonic::now());
        match Datapath::try_open(options)? {
            Opened::Datapath(datapath) => return Ok(Some(datapath)),
            Opened::Busy(path) => {
                if !std::mem::replace(&mut told, true) {
                    tracing::info!(path = %path.display(), "another agent is at work on this node; waiting for it to end");
                    let problem = Some(format!("another agent holds {}", path.display()));
                    endpoints.readiness.set(vec![Condition { name: "lock", problem }]);
                }
            }
        }
        tokio::select! {
            () = stop.requested() => return Ok(None),
            // The other agent shows the datapath's numbers.
            Some(request) = snapshot_requests.recv() => drop(request.send(None)),
            () = tokio::time::sleep(LOCK_RETRY) => {}
        }
    }
}

/// SIGTERM and SIGINT.
struct Stop {
    terminate: Signal,
    interrupt: Signal,
}

impl Stop {
    fn new() -> anyhow::Result<Self> {
        let handler = |kind| signal(kind).context("cannot install a signal handler");
        Ok(Self {
            terminate: handler(SignalKind::terminate())?,
            interrupt: handler(SignalKind::interrupt())?,
        })
    }

    /// Returns when one has come. Cancel safe.
    async fn requested(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}
