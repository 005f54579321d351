//! Writes: strictness, concurrency, patches, deletion, Events.

use coil_guard_tests::kube_api::{
    Kind, KubeApi,
    cluster::{Cluster, EgressSpec},
};
use k8s_openapi::api::{
    core::v1::{ObjectReference, Pod},
    events::v1::Event,
};
use kube::{
    Api, ResourceExt as _,
    api::{DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PostParams, Preconditions},
    core::{ApiResource, GroupVersionKind},
    runtime::events::{Event as NewEvent, EventType, Recorder},
};
use serde_json::{Value, json};

use super::tape::{client, ip};

fn pod(name: &str) -> Pod {
    let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name},
        "spec": {"containers": [{"name": "c", "image": "i"}]}, "status": {"phase": "Running"}});
    serde_json::from_value(pod).unwrap()
}

#[track_caller]
fn code<T: std::fmt::Debug>(result: kube::Result<T>) -> u16 {
    match result {
        Err(kube::Error::Api(status)) => status.code,
        other => panic!("expected an error of the API, found {other:?}"),
    }
}

#[tokio::test]
async fn an_unknown_field_is_refused_wherever_it_is() {
    let api = KubeApi::start().unwrap();
    let cases = [
        (
            json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, "spec": {"containers": [{"name": "c", "imagePullPolicy": "Always", "imagePulPolicy": "Always"}]}}),
            "spec.containers.0.imagePulPolicy",
        ),
        (
            json!({"apiVersion": "coil.cybozu.com/v2", "kind": "Egress", "metadata": {"name": "a"}, "spec": {"destinations": [], "template": {"spec": {"containers": [], "preStop": {}}}}}),
            "spec.template.spec.preStop",
        ),
        (
            json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "a", "label": {}}, "spec": {}}),
            "metadata.label",
        ),
    ];
    for (object, field) in cases {
        let error = format!("{:#}", api.create(&object).unwrap_err());
        assert!(error.contains("unknown field") && error.contains(field), "{error}");
    }
    let wrong = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": 7}});
    assert!(api.create(&wrong).is_err());
    assert!(api.create(&json!({"apiVersion": "v2", "kind": "Pod"})).is_err());
}

#[tokio::test]
async fn creation_fills_in_the_metadata_and_drops_the_status() {
    let api = KubeApi::start().unwrap();
    let pods: Api<Pod> = Api::namespaced(client(&api).await, "x");
    let made = pods.create(&PostParams::default(), &pod("a")).await.unwrap();
    assert_eq!(made.namespace().as_deref(), Some("x"));
    assert!(made.uid().is_some() && made.creation_timestamp().is_some() && made.resource_version().is_some());
    assert_eq!(made.status.clone().unwrap().phase.as_deref(), Some("Pending"));
    assert_eq!(code(pods.create(&PostParams::default(), &pod("a")).await), 409);
    let mut generated = pod("");
    generated.metadata.name = None;
    generated.metadata.generate_name = Some("g-".into());
    assert!(pods.create(&PostParams::default(), &generated).await.unwrap().name_any().starts_with("g-"));
    assert_eq!(code(pods.get("none").await), 404);
    // A list's items are bare, an object alone is not.
    assert_eq!(pods.list(&ListParams::default()).await.unwrap().items.len(), 2);
}

#[tokio::test]
async fn optimistic_concurrency_and_no_change_without_a_difference() {
    let api = KubeApi::start().unwrap();
    let pods: Api<Pod> = Api::namespaced(client(&api).await, "x");
    let first = pods.create(&PostParams::default(), &pod("a")).await.unwrap();
    let mut newer = first.clone();
    newer.labels_mut().insert("k".into(), "v".into());
    let second = pods.replace("a", &PostParams::default(), &newer).await.unwrap();
    assert_ne!(first.resource_version(), second.resource_version());
    assert_eq!(code(pods.replace("a", &PostParams::default(), &newer).await), 409);
    let revision = api.revision();
    pods.replace("a", &PostParams::default(), &second).await.unwrap();
    assert_eq!(api.revision(), revision);
    let stale = Patch::Merge(json!({"metadata": {"resourceVersion": first.resource_version()}}));
    assert_eq!(code(pods.patch("a", &PatchParams::default(), &stale).await), 409);
}

#[tokio::test]
async fn patches_and_the_status_subresource() {
    let api = KubeApi::start().unwrap();
    Cluster::new(&api).egress(&EgressSpec::new("x", "nat", &[ip("10.96.0.1")])).unwrap();
    let resource = ApiResource::from_gvk(&GroupVersionKind::gvk("coil.cybozu.com", "v2", "Egress"));
    let egresses: Api<DynamicObject> = Api::namespaced_with(client(&api).await, "x", &resource);
    let params = PatchParams::default();
    let both = Patch::Merge(
        json!({"metadata": {"annotations": {"a": "b"}}, "spec": {"replicas": 5}, "status": {"replicas": 9}}),
    );
    let patched = egresses.patch("nat", &params, &both).await.unwrap();
    assert_eq!((&patched.annotations()["a"], patched.metadata.generation), (&"b".to_owned(), Some(2)));
    assert_eq!((&patched.data["spec"]["replicas"], &patched.data["status"]), (&json!(5), &Value::Null));
    let status = Patch::Merge(json!({"spec": {"replicas": 1}, "status": {"replicas": 9}}));
    let patched = egresses.patch_status("nat", &params, &status).await.unwrap();
    assert_eq!(
        (&patched.data["spec"]["replicas"], &patched.data["status"]["replicas"]),
        (&json!(5), &json!(9))
    );
    assert_eq!(patched.metadata.generation, Some(2));
    let remove = json!([{"op": "test", "path": "/metadata/annotations/a", "value": "b"}, {"op": "remove", "path": "/metadata/annotations/a"}]);
    let remove: json_patch::Patch = serde_json::from_value(remove).unwrap();
    assert!(
        egresses
            .patch("nat", &params, &Patch::<()>::Json(remove.clone()))
            .await
            .unwrap()
            .annotations()
            .is_empty()
    );
    assert_eq!(code(egresses.patch("nat", &params, &Patch::<()>::Json(remove)).await), 422);
    let strategic = Patch::Strategic(json!({"spec": {"replicas": 1}}));
    assert_eq!(code(egresses.patch("nat", &params, &strategic).await), 415);
    let unknown = Patch::Merge(json!({"spec": {"mode": "drain"}}));
    assert_eq!(code(egresses.patch("nat", &params, &unknown).await), 422);
    let apply = json!({"apiVersion": "coil.cybozu.com/v2", "kind": "Egress", "metadata": {"name": "new"}, "spec": {"destinations": ["::/0"]}});
    let applied = egresses.patch("new", &PatchParams::apply("test"), &Patch::Apply(&apply)).await.unwrap();
    assert_eq!(applied.data["spec"]["destinations"], json!(["::/0"]));
}

#[tokio::test]
async fn finalizers_hold_and_preconditions_are_kept() {
    let api = KubeApi::start().unwrap();
    let pods: Api<Pod> = Api::namespaced(client(&api).await, "x");
    let mut held = pod("a");
    held.metadata.finalizers = Some(vec!["test/hold".into()]);
    let held = pods.create(&PostParams::default(), &held).await.unwrap();
    let other = Preconditions { uid: Some("another".into()), ..Preconditions::default() };
    let wrong = DeleteParams { preconditions: Some(other), ..DeleteParams::default() };
    assert_eq!(code(pods.delete("a", &wrong).await), 409);
    let right = Preconditions { uid: held.uid(), ..Preconditions::default() };
    let right = DeleteParams { preconditions: Some(right), ..DeleteParams::default() };
    pods.delete("a", &right).await.unwrap();
    assert!(pods.get("a").await.unwrap().metadata.deletion_timestamp.is_some());
    let free = Patch::Merge(json!({"metadata": {"finalizers": null}}));
    pods.patch("a", &PatchParams::default(), &free).await.unwrap();
    assert_eq!(code(pods.get("a").await), 404);
}

fn event(change: impl FnOnce(&mut Value)) -> Event {
    let mut event = json!({
        "metadata": {"name": "e", "namespace": "x"},
        "regarding": {"kind": "Egress", "namespace": "x", "name": "nat"},
        "reportingController": "coil-guard.io/agent", "reportingInstance": "node1", "action": "Move",
        "reason": "FlowsMoved", "type": "Normal", "note": "n", "eventTime": "2026-01-01T00:00:00.000000Z",
    });
    change(&mut event);
    serde_json::from_value(event).unwrap()
}

#[tokio::test]
async fn events_are_validated_as_a_real_server_does() {
    let api = KubeApi::start().unwrap();
    let events: Api<Event> = Api::namespaced(client(&api).await, "x");
    let long = "n".repeat(1025);
    let wrong: [(&str, Value); 8] = [
        ("reportingController", json!(null)),
        ("reportingInstance", json!("i".repeat(129))),
        ("action", json!("")),
        ("reason", json!(null)),
        ("type", json!("Info")),
        ("eventTime", json!(null)),
        ("note", json!(long)),
        ("regarding", json!({"kind": "Egress", "name": "nat"})),
    ];
    for (field, value) in wrong {
        let event = event(|event| event[field] = value);
        assert_eq!(code(events.create(&PostParams::default(), &event).await), 422, "{field}");
    }
    let made = events.create(&PostParams::default(), &event(|_| {})).await.unwrap();
    let patch = async |patch: Value| {
        events.patch(&made.name_any(), &PatchParams::default(), &Patch::Merge(patch)).await
    };
    assert_eq!(code(patch(json!({"note": "other"})).await), 422);
    assert_eq!(
        code(patch(json!({"series": {"count": 1, "lastObservedTime": "2026-01-01T00:00:01.000000Z"}})).await),
        422
    );
    patch(json!({"series": {"count": 2, "lastObservedTime": "2026-01-01T00:00:01.000000Z"}})).await.unwrap();
}

#[tokio::test]
async fn kubes_recorder_creates_once_and_then_counts() {
    let api = KubeApi::start().unwrap();
    let recorder = Recorder::new(client(&api).await, "coil-guard".into());
    let egress = ObjectReference {
        api_version: Some("coil.cybozu.com/v2".into()),
        kind: Some("Egress".into()),
        namespace: Some("x".into()),
        name: Some("nat".into()),
        uid: Some("1".into()),
        ..ObjectReference::default()
    };
    let new = NewEvent {
        type_: EventType::Warning,
        reason: "NoLiveBackend".into(),
        note: Some("none".into()),
        action: "Guard".into(),
        secondary: None,
    };
    for _ in 0..3 {
        recorder.publish(&new, &egress).await.unwrap();
    }
    let events = api.list(Kind::Event);
    assert_eq!((events.len(), &events[0]["series"]["count"]), (1, &json!(3)));
}
