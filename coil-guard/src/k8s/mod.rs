//! The Kubernetes API: five watches, and events about Egresses. Nothing else is asked of it.

mod backoff;
mod events;
mod health;
mod kinds;
mod ledger;
mod raw;
mod watch;

use std::{path::Path, time::Duration};

use anyhow::Context as _;
pub use events::{EventWriter, Outcome};
pub use health::{Health, Watches};
pub use kinds::Kind;
use kube::{
    Client, Config,
    config::{KubeConfigOptions, Kubeconfig},
};
pub use ledger::{Ledger, Notice, Topic, Write};
use tokio::sync::mpsc;

use crate::{
    clock::Monotonic,
    index::{Malformed, Update},
};

/// What the watches tell.
#[derive(Debug)]
pub enum Message {
    /// Objects came, changed or went.
    Update {
        /// Which watch.
        kind: Kind,
        /// What changed. Boxed: a channel's slots are as large as its largest message.
        update: Box<Update>,
        /// The update is a whole list.
        listed: bool,
        /// When it arrived.
        received: Monotonic,
    },
    /// A watch was established or lost.
    Health(Kind, Health),
    /// An object was skipped.
    Malformed(Kind, Malformed),
}

/// What the watches need to know about this node.
#[derive(Clone, Debug)]
pub struct Node {
    /// Its name in the cluster.
    pub name: String,
    /// UDP port of Coil's tunnels, host order.
    pub fou_port: u16,
}

/// A client by a kubeconfig, or as kube finds one (`KUBECONFIG`, `~/.kube/config`, or the pod's service account).
///
/// # Errors
///
/// There is none of these, or it cannot be used.
pub async fn client(kubeconfig: Option<&Path>) -> anyhow::Result<Client> {
    let mut config = match kubeconfig {
        Some(path) => {
            let file = Kubeconfig::read_from(path).with_context(|| format!("cannot read kubeconfig {}", path.display()))?;
            Config::from_custom_kubeconfig(file, &KubeConfigOptions::default())
                .await
                .with_context(|| format!("cannot use kubeconfig {}", path.display()))?
        }
        None => Config::infer().await.context(
            "no way to the Kubernetes API: neither --kubeconfig, KUBECONFIG, ~/.kube/config nor a pod's service account",
        )?,
    };
    // The API server may be behind a load balancer that drops packets of a dead one.
    config.connect_timeout = Some(Duration::from_secs(5));
    Client::try_from(config).context("cannot make a client for the Kubernetes API")
}

/// Starts the five watches on the current `LocalSet`. They end when the receiver is dropped.
#[must_use]
pub fn watch(client: &Client, node: &Node) -> mpsc::Receiver<Message> {
    let (out, messages) = mpsc::channel(256);
    watch::spawn::<kinds::EgressWatch>(client, node, &out);
    watch::spawn::<kinds::ServiceWatch>(client, node, &out);
    watch::spawn::<kinds::SliceWatch>(client, node, &out);
    watch::spawn::<kinds::EgressPodWatch>(client, node, &out);
    watch::spawn::<kinds::LocalPodWatch>(client, node, &out);
    messages
}
