//! Records a watch.

use std::{fmt::Debug, net::IpAddr, pin::Pin, time::Duration};

use coil_guard_tests::kube_api::{Kind, KubeApi};
use futures::{Stream, StreamExt as _, TryStreamExt as _};
use k8s_openapi::api::{core::v1::Pod, discovery::v1::EndpointSlice};
use kube::{
    Api, Client, Config,
    api::WatchParams,
    config::{KubeConfigOptions, Kubeconfig},
    core::WatchEvent,
};
use serde::de::DeserializeOwned;

/// However slow the machine is, an event that has not come by then does not come.
pub(crate) const PATIENCE: Duration = Duration::from_secs(10);

/// A client by the kubeconfig, as the agent makes it.
pub(crate) async fn client(api: &KubeApi) -> Client {
    let kubeconfig = Kubeconfig::read_from(api.kubeconfig()).expect("the kubeconfig can be read");
    let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await;
    Client::try_from(config.expect("the kubeconfig is one")).expect("a client")
}

/// Waits until a watch of pods runs: a list that is done does not mean that yet.
pub(crate) async fn watching(api: &KubeApi) {
    let deadline = tokio::time::Instant::now() + PATIENCE;
    while api.running_watches(Kind::Pod) == 0 {
        assert!(tokio::time::Instant::now() < deadline, "no watch: {:?}", api.calls());
        tokio::task::yield_now().await;
    }
}

pub(crate) fn ip(text: &str) -> IpAddr {
    text.parse().expect("an address")
}

/// The events of one watch.
pub(crate) struct Tape<K> {
    stream: Pin<Box<dyn Stream<Item = kube::Result<WatchEvent<K>>> + Send>>,
    api: KubeApi,
}

impl<K: Clone + Debug + DeserializeOwned + kube::Resource<DynamicType = ()> + Send + 'static> Tape<K> {
    /// Watches from now on.
    pub(crate) async fn start(api: &KubeApi) -> Self {
        Self::start_with(api, &WatchParams::default(), &api.revision().to_string()).await
    }

    pub(crate) async fn start_with(api: &KubeApi, params: &WatchParams, revision: &str) -> Self {
        let all: Api<K> = Api::all(client(api).await);
        let stream = tokio::time::timeout(PATIENCE, all.watch(params, revision)).await;
        let stream = stream.expect("no answer to a watch").expect("a watch").boxed();
        Self { stream, api: api.clone() }
    }

    pub(crate) async fn next(&mut self) -> Option<WatchEvent<K>> {
        let next = tokio::time::timeout(PATIENCE, self.stream.try_next()).await;
        next.expect("the watch stays silent").expect("the watch fails")
    }

    /// Everything that comes before a bookmark that is asked for now. One that was asked for by another tape is older.
    pub(crate) async fn so_far(&mut self) -> Vec<(&'static str, K)> {
        let newest = self.api.revision().to_string();
        self.api.send_bookmarks();
        let mut events = Vec::new();
        loop {
            match self.next().await {
                Some(WatchEvent::Added(object)) => events.push(("ADDED", object)),
                Some(WatchEvent::Modified(object)) => events.push(("MODIFIED", object)),
                Some(WatchEvent::Deleted(object)) => events.push(("DELETED", object)),
                Some(WatchEvent::Bookmark(bookmark)) if bookmark.metadata.resource_version == newest => {
                    return events;
                }
                Some(WatchEvent::Bookmark(_)) => {}
                other => panic!("expected an event or a bookmark, found {other:?} after {events:?}"),
            }
        }
    }

    pub(crate) async fn described(&mut self) -> Vec<String>
    where
        K: Describe,
    {
        self.so_far().await.iter().map(|(event, object)| format!("{event} {}", object.describe())).collect()
    }
}

/// The parts that matter, in few words.
pub(crate) trait Describe {
    fn describe(&self) -> String;
}

impl Describe for Pod {
    fn describe(&self) -> String {
        let status = self.status.clone().unwrap_or_default();
        let ready = status.conditions.iter().flatten().find(|c| c.type_ == "Ready").map(|c| c.status.clone());
        let grace = match (&self.metadata.deletion_timestamp, self.metadata.deletion_grace_period_seconds) {
            (None, None) => "-".to_owned(),
            (Some(_), Some(seconds)) => seconds.to_string(),
            half => panic!("only one of deletionTimestamp and deletionGracePeriodSeconds: {half:?}"),
        };
        format!(
            "{} Ready={} ip={} grace={grace}",
            status.phase.unwrap_or_default(),
            ready.unwrap_or("-".into()),
            status.pod_ip.unwrap_or("-".into()),
        )
    }
}

impl Describe for EndpointSlice {
    fn describe(&self) -> String {
        let flag =
            |value: Option<bool>| if value.expect("the controller sets all three") { "T" } else { "F" };
        let describe = |endpoint: &k8s_openapi::api::discovery::v1::Endpoint| {
            let conditions = endpoint.conditions.clone().unwrap_or_default();
            format!(
                "{} r={} s={} t={}",
                endpoint.addresses.join(","),
                flag(conditions.ready),
                flag(conditions.serving),
                flag(conditions.terminating),
            )
        };
        let endpoints: Vec<_> = self.endpoints.iter().map(describe).collect();
        if endpoints.is_empty() { "empty".into() } else { endpoints.join(" | ") }
    }
}
