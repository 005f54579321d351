//! Lists, watches and their faults, through kube's watcher.

use std::{pin::Pin, time::Duration};

use coil_guard_tests::kube_api::{
    Close, Delivery, Gone, Kind, KubeApi, Outage,
    cluster::{Cluster, EgressSpec, PodSpec},
};
use futures::{Stream, StreamExt as _, stream};
use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api, ResourceExt,
    api::{DynamicObject, ListParams, WatchParams},
    core::{ApiResource, GroupVersionKind, WatchEvent},
    runtime::{WatchStreamExt as _, reflector, watcher},
};
use serde_json::json;

use super::tape::{PATIENCE, Tape, client, ip, watching};

fn cluster() -> Cluster {
    Cluster::new(&KubeApi::start().expect("a server"))
}

fn add(cluster: &Cluster, name: &str, node: &str) {
    cluster.client("default", &PodSpec::new(name, node, &[ip("10.0.0.9")])).expect("a pod");
}

/// Two lists of calls: how often pods were listed and watched.
fn lists_and_watches(api: &KubeApi) -> (usize, usize) {
    let calls = api.calls();
    let count = |verb: &str| {
        calls.iter().filter(|c| c.attributes.verb == verb && c.attributes.resource == "pods").count()
    };
    (count("list"), count("watch"))
}

/// What a watcher tells, as short texts; errors as "error".
struct Watched {
    events: Pin<Box<dyn Stream<Item = String> + Send>>,
    seen: Vec<String>,
}

impl Watched {
    async fn start(api: &KubeApi, config: watcher::Config) -> Self {
        let pods: Api<Pod> = Api::all(client(api).await);
        let describe = |event: watcher::Result<watcher::Event<Pod>>| match event {
            Ok(watcher::Event::Init) => "init".to_owned(),
            Ok(watcher::Event::InitApply(pod)) => format!("listed {}", pod.name_any()),
            Ok(watcher::Event::InitDone) => "done".to_owned(),
            Ok(watcher::Event::Apply(pod)) => format!("apply {}", pod.name_any()),
            Ok(watcher::Event::Delete(pod)) => format!("delete {}", pod.name_any()),
            Err(_) => "error".to_owned(),
        };
        let events = watcher(pods, config).default_backoff().map(describe).boxed();
        Self { events, seen: Vec::new() }
    }

    /// Reads on while the server has no watch of pods: the events of others would not reach it.
    async fn until_watching(&mut self, api: &KubeApi) {
        tokio::select! {
            () = watching(api) => {}
            next = self.events.next() => panic!("expected nothing, saw {next:?}"),
        }
    }

    /// Reads on until this text comes; panics with what came when it does not.
    async fn until(&mut self, text: &str) -> Vec<String> {
        let mut since = Vec::new();
        // For all of them together: a watcher that only fails, tells so for ever.
        let deadline = tokio::time::Instant::now() + PATIENCE;
        loop {
            let Ok(next) = tokio::time::timeout_at(deadline, self.events.next()).await else {
                panic!("waited for {text:?}, saw {:?} and then {since:?}", self.seen);
            };
            let next = next.expect("a watcher does not end");
            since.push(next.clone());
            if next == text {
                self.seen.extend(since.clone());
                return since;
            }
        }
    }
}

#[tokio::test]
async fn a_list_in_pages_then_events() {
    let cluster = cluster();
    for name in ["a", "b", "c", "d", "e"] {
        add(&cluster, name, "node1");
    }
    let mut watched = Watched::start(cluster.api(), watcher::Config::default().page_size(2)).await;
    let listed = watched.until("done").await;
    assert_eq!(listed, ["init", "listed a", "listed b", "listed c", "listed d", "listed e", "done"]);
    assert_eq!(lists_and_watches(cluster.api()).0, 3);
    cluster.api().remove_raw(Kind::Pod, "default", "c");
    watched.until("delete c").await;
    add(&cluster, "f", "node1");
    watched.until("apply f").await;
}

#[tokio::test]
async fn the_rest_of_a_list_expires_with_the_history() {
    let cluster = cluster();
    for name in ["a", "b", "c"] {
        add(&cluster, name, "node1");
    }
    let pods: Api<Pod> = Api::all(client(cluster.api()).await);
    let first = pods.list(&ListParams::default().limit(2)).await.unwrap();
    assert_eq!((first.items.len(), first.metadata.remaining_item_count), (2, Some(1)));
    add(&cluster, "d", "node1");
    let token = first.metadata.continue_.unwrap();
    let next = ListParams::default().limit(2).continue_token(&token);
    // The list is that of its first part, whatever has come since.
    let second = pods.list(&next).await.unwrap();
    assert_eq!(second.items.iter().map(ResourceExt::name_any).collect::<Vec<_>>(), ["c"]);
    assert_eq!(second.metadata.resource_version, first.metadata.resource_version);
    let token = pods.list(&ListParams::default().limit(2)).await.unwrap().metadata.continue_.unwrap();
    cluster.api().compact();
    let error = pods.list(&ListParams::default().continue_token(&token)).await.unwrap_err();
    assert!(matches!(&error, kube::Error::Api(status) if status.code == 410), "{error}");
}

#[tokio::test]
async fn a_closed_watch_goes_on_where_it_was() {
    let cluster = cluster();
    add(&cluster, "a", "node1");
    let mut watched = Watched::start(cluster.api(), watcher::Config::default()).await;
    watched.until("done").await;
    add(&cluster, "b", "node1");
    watched.until("apply b").await;
    for (how, name) in [(Close::Clean, "c"), (Close::Abrupt, "d")] {
        cluster.api().close_watches(Some(Kind::Pod), how);
        add(&cluster, name, "node1");
        let since = watched.until(&format!("apply {name}")).await;
        assert!(!since.contains(&"init".to_owned()), "listed again: {since:?}");
    }
    assert_eq!(lists_and_watches(cluster.api()).0, 1);
}

#[tokio::test]
async fn gone_makes_a_watcher_list_again() {
    let cluster = cluster();
    add(&cluster, "a", "node1");
    let mut watched = Watched::start(cluster.api(), watcher::Config::default()).await;
    watched.until("done").await;
    // Not up to date, and what it has missed is forgotten.
    cluster.api().hold(Kind::Pod);
    add(&cluster, "b", "node1");
    cluster.api().compact();
    cluster.api().deliver(Kind::Pod, Delivery::default());
    let since = watched.until("done").await;
    assert_eq!(since, ["error", "init", "listed a", "listed b", "done"]);
    // And to a watch that runs.
    cluster.api().remove_raw(Kind::Pod, "default", "a");
    watched.until("delete a").await;
    cluster.api().expire_watches();
    assert_eq!(watched.until("done").await, ["error", "init", "listed b", "done"]);
}

#[tokio::test]
async fn an_old_revision_is_refused_as_an_event_or_as_a_status() {
    let api = KubeApi::start().unwrap();
    let old = api.revision().to_string();
    add(&Cluster::new(&api), "a", "node1");
    api.compact();
    let mut watch = Tape::<Pod>::start_with(&api, &WatchParams::default(), &old).await;
    let event = watch.next().await;
    assert!(matches!(&event, Some(WatchEvent::Error(status)) if status.code == 410), "{event:?}");
    assert!(watch.next().await.is_none());
    api.set_gone(Gone::Status);
    let pods: Api<Pod> = Api::all(client(&api).await);
    let Err(kube::Error::Api(status)) = pods.watch(&WatchParams::default(), &old).await else { panic!() };
    assert_eq!((status.code, status.reason.as_str()), (410, "Expired"));
    // A history that is too short forgets by itself.
    api.set_gone(Gone::Event);
    api.set_history_limit(2);
    let old = api.revision().to_string();
    add(&Cluster::new(&api), "b", "node1");
    let mut watch = Tape::<Pod>::start_with(&api, &WatchParams::default(), &old).await;
    assert!(matches!(watch.next().await, Some(WatchEvent::Added(_))));
    add(&Cluster::new(&api), "c", "node1");
    let mut watch = Tape::<Pod>::start_with(&api, &WatchParams::default(), &old).await;
    assert!(matches!(watch.next().await, Some(WatchEvent::Error(_))));
}

#[tokio::test]
async fn bookmarks_move_the_point_to_resume_from() {
    let api = KubeApi::start().unwrap();
    let cluster = Cluster::new(&api);
    add(&cluster, "a", "node1");
    let mut watch = Tape::<Pod>::start(&api).await;
    cluster.egress(&EgressSpec::new("egress", "nat", &[ip("10.96.0.1")])).unwrap();
    api.send_bookmarks();
    let Some(WatchEvent::Bookmark(bookmark)) = watch.next().await else { panic!("expected a bookmark") };
    assert_eq!(bookmark.metadata.resource_version, api.revision().to_string());
    // A client that does not ask for bookmarks gets none.
    let mut without = Tape::<Pod>::start_with(&api, &WatchParams::default().disable_bookmarks(), "0").await;
    assert!(matches!(without.next().await, Some(WatchEvent::Added(_))));
    api.send_bookmarks();
    add(&cluster, "b", "node1");
    assert!(matches!(without.next().await, Some(WatchEvent::Added(_))));
    // By itself, every so often.
    watch.so_far().await;
    api.set_bookmark_interval(Duration::from_millis(20));
    for _ in 0..3 {
        assert!(matches!(watch.next().await, Some(WatchEvent::Bookmark(_))));
    }
}

#[tokio::test]
async fn a_watch_ends_with_its_timeout() {
    let api = KubeApi::start().unwrap();
    let params = WatchParams::default().timeout(1);
    let mut watch = Tape::<Pod>::start_with(&api, &params, &api.revision().to_string()).await;
    assert!(matches!(watch.next().await, Some(WatchEvent::Bookmark(_))));
    assert!(watch.next().await.is_none());
}

#[tokio::test]
async fn streaming_lists() {
    let cluster = cluster();
    add(&cluster, "a", "node1");
    let mut watched = Watched::start(cluster.api(), watcher::Config::default().streaming_lists()).await;
    assert_eq!(watched.until("done").await, ["init", "listed a", "done"]);
    assert_eq!(lists_and_watches(cluster.api()), (0, 1));
    add(&cluster, "b", "node1");
    watched.until("apply b").await;
}

#[tokio::test]
async fn an_object_that_leaves_a_selector_is_deleted_and_one_that_enters_is_added() {
    let cluster = cluster();
    let params = WatchParams::default().labels("app=web").fields("spec.nodeName=node1");
    let mut watch =
        Tape::<Pod>::start_with(cluster.api(), &params, &cluster.api().revision().to_string()).await;
    add(&cluster, "a", "");
    add(&cluster, "other", "node2");
    let patch = |patch: serde_json::Value| cluster.api().patch(Kind::Pod, "default", "a", &patch).unwrap();
    patch(json!({"metadata": {"labels": {"app": "web"}}}));
    assert!(watch.so_far().await.is_empty());
    patch(json!({"spec": {"nodeName": "node1"}}));
    patch(json!({"metadata": {"annotations": {"x": "y"}}}));
    patch(json!({"metadata": {"labels": {"app": "db"}}}));
    patch(json!({"metadata": {"annotations": {"x": "z"}}}));
    let events = watch.so_far().await;
    assert_eq!(events.iter().map(|(event, _)| *event).collect::<Vec<_>>(), ["ADDED", "MODIFIED", "DELETED"]);
    // What is deleted is the object as it last matched, under the revision of the change.
    let last = &events[2].1;
    assert_eq!(last.labels()["app"], "web");
    assert!(last.resource_version() > events[1].1.resource_version());
}

#[tokio::test]
async fn the_server_goes_away_and_comes_back() {
    let cluster = cluster();
    let mut watched = Watched::start(cluster.api(), watcher::Config::default()).await;
    watched.until("done").await;
    cluster.api().stop_listening();
    cluster.api().stop_listening();
    watched.until("error").await;
    add(&cluster, "a", "node1");
    cluster.api().start_listening().unwrap();
    cluster.api().start_listening().unwrap();
    watched.until("apply a").await;
    cluster.api().set_outage(Outage::Status(500));
    cluster.api().close_watches(None, Close::Clean);
    watched.until("error").await;
    cluster.api().set_outage(Outage::Hang);
    add(&cluster, "b", "node1");
    cluster.api().set_outage(Outage::None);
    watched.until("apply b").await;
}

#[tokio::test]
async fn events_held_coalesced_doubled_reordered_and_late() {
    let cluster = cluster();
    let api = cluster.api();
    let mut watch = Tape::<Pod>::start(api).await;
    let mut told = async |delivery: Delivery, happens: &dyn Fn()| {
        api.hold(Kind::Pod);
        happens();
        api.deliver(Kind::Pod, delivery);
        let told: Vec<_> =
            watch.so_far().await.iter().map(|(event, pod)| format!("{event} {}", pod.name_any())).collect();
        api.deliver(Kind::Pod, Delivery::default());
        told
    };
    let plain = Delivery::default();
    let make = || {
        add(&cluster, "a", "node1");
        add(&cluster, "b", "node1");
    };
    let remove = || ["a", "b"].into_iter().for_each(|name| api.remove_raw(Kind::Pod, "default", name));
    let in_order = ["ADDED a", "MODIFIED a", "ADDED b", "MODIFIED b"];
    assert_eq!(told(plain, &make).await, in_order);
    assert_eq!(
        told(Delivery { duplicate: true, ..plain }, &remove).await,
        ["DELETED a", "DELETED a", "DELETED b", "DELETED b"]
    );
    assert_eq!(told(Delivery { coalesce: true, ..plain }, &make).await, ["ADDED a", "ADDED b"]);
    assert_eq!(told(Delivery { newest_first: true, ..plain }, &remove).await, ["DELETED b", "DELETED a"]);
    let both = || {
        make();
        remove();
    };
    assert!(told(Delivery { coalesce: true, ..plain }, &both).await.is_empty());

    let delay = Duration::from_millis(100);
    api.deliver(Kind::Pod, Delivery { delay, ..plain });
    let start = std::time::Instant::now();
    add(&cluster, "c", "node1");
    assert!(matches!(watch.next().await, Some(WatchEvent::Added(_))));
    assert!(start.elapsed() >= delay);
}

#[tokio::test]
async fn malformed_objects_in_events_and_lists() {
    let cluster = cluster();
    add(&cluster, "a", "node1");
    let mut watched = Watched::start(cluster.api(), watcher::Config::default()).await;
    watched.until("done").await;
    watched.until_watching(cluster.api()).await;
    cluster.api().inject(Kind::Pod, "MODIFIED", &json!({"metadata": {"name": ["not", "a", "name"]}}));
    watched.until("error").await;
    add(&cluster, "b", "node1");
    watched.until("apply b").await;

    let odd = json!({"apiVersion": "coil.cybozu.com/v2", "kind": "Egress", "metadata": {"name": "odd", "namespace": "x"}, "spec": 7});
    cluster.api().put_raw(Kind::Egress, "x", "odd", odd);
    let resource = ApiResource::from_gvk(&GroupVersionKind::gvk("coil.cybozu.com", "v2", "Egress"));
    let egresses: Api<DynamicObject> = Api::all_with(client(cluster.api()).await, &resource);
    let egresses = egresses.list(&ListParams::default()).await.unwrap();
    assert_eq!(egresses.items[0].data["spec"], 7);
}

#[tokio::test]
async fn a_reflector_ends_up_with_what_the_server_has_through_all_of_it() {
    let cluster = cluster();
    let (reader, writer) = reflector::store();
    let pods: Api<Pod> = Api::all(client(cluster.api()).await);
    let events = watcher(pods, watcher::Config::default().page_size(3)).default_backoff();
    let mut events = reflector(writer, events).boxed();
    for round in 0..6_u32 {
        for pod in 0..5 {
            add(&cluster, &format!("r{round}-{pod}"), "node1");
        }
        cluster.api().remove_raw(Kind::Pod, "default", &format!("r{round}-3"));
        match round {
            1 => cluster.api().close_watches(None, Close::Abrupt),
            2 => cluster.api().expire_watches(),
            3 => cluster.api().stop_listening(),
            4 => cluster.api().start_listening().unwrap(),
            _ => {}
        }
        if round == 3 {
            continue;
        }
        let names = |mut names: Vec<String>| {
            names.sort();
            names
        };
        let wanted = || {
            cluster
                .api()
                .list(Kind::Pod)
                .iter()
                .map(|p| p["metadata"]["name"].as_str().unwrap().to_owned())
                .collect()
        };
        let deadline = tokio::time::Instant::now() + PATIENCE;
        while names(reader.state().iter().map(|pod| pod.name_any()).collect()) != names(wanted()) {
            let next = tokio::time::timeout_at(deadline, events.next()).await;
            let have = reader.state().len();
            next.unwrap_or_else(|_| panic!("round {round}: have {have} pods, not {}", wanted().len()));
        }
    }
}

#[tokio::test]
async fn metadata_alone() {
    let cluster = cluster();
    add(&cluster, "a", "node1");
    let pods: Api<Pod> = Api::all(client(cluster.api()).await);
    let list = pods.list_metadata(&ListParams::default()).await.unwrap();
    assert_eq!(list.items[0].name_any(), "a");
    let events =
        stream::once(async { pods.watch_metadata(&WatchParams::default(), "0").await.unwrap() }).flatten();
    let first = tokio::time::timeout(PATIENCE, Box::pin(events).next()).await.unwrap();
    assert!(matches!(first, Some(Ok(WatchEvent::Added(pod))) if pod.name_any() == "a"));
}
