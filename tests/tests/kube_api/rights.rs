//! RBAC, access reviews, discovery and the log of calls.

use coil_guard_tests::kube_api::{
    Kind, KubeApi,
    cluster::{Cluster, PodSpec},
};
use k8s_openapi::api::{
    authorization::v1::{ResourceAttributes, SelfSubjectAccessReview, SelfSubjectAccessReviewSpec},
    core::v1::{Pod, Service},
    rbac::v1::PolicyRule,
};
use kube::{
    Api,
    api::{ListParams, PostParams},
    discovery::Discovery,
};

use super::tape::{client, ip};

fn rule(verbs: &[&str], group: &str, resources: &[&str]) -> PolicyRule {
    let own = |list: &[&str]| list.iter().map(|text| (*text).to_owned()).collect();
    PolicyRule {
        verbs: own(verbs),
        api_groups: Some(own(&[group])),
        resources: Some(own(resources)),
        ..PolicyRule::default()
    }
}

async fn may(api: &KubeApi, verb: &str, group: &str, resource: &str) -> bool {
    let reviews: Api<SelfSubjectAccessReview> = Api::all(client(api).await);
    let attributes = ResourceAttributes {
        verb: Some(verb.into()),
        group: Some(group.into()),
        resource: Some(resource.into()),
        ..ResourceAttributes::default()
    };
    let spec = SelfSubjectAccessReviewSpec { resource_attributes: Some(attributes), ..Default::default() };
    let review = SelfSubjectAccessReview { spec, ..Default::default() };
    reviews.create(&PostParams::default(), &review).await.unwrap().status.unwrap().allowed
}

#[tokio::test]
async fn what_no_rule_allows_is_forbidden_and_reviews_say_so() {
    let api = KubeApi::start().unwrap();
    api.set_rules(Some(vec![
        rule(&["list"], "", &["pods"]),
        rule(&["create", "patch"], "events.k8s.io", &["events"]),
    ]));
    let pods: Api<Pod> = Api::all(client(&api).await);
    pods.list(&ListParams::default()).await.unwrap();
    let services: Api<Service> = Api::all(client(&api).await);
    let kube::Error::Api(status) = services.list(&ListParams::default()).await.unwrap_err() else { panic!() };
    assert_eq!((status.code, status.reason.as_str()), (403, "Forbidden"));
    let wanted = "services is forbidden: User \"system:serviceaccount:kube-system:coil-guard\" cannot list resource \
                  \"services\" in API group \"\" at the cluster scope";
    assert_eq!(status.message, wanted);
    assert!(pods.watch(&Default::default(), "0").await.is_err());
    assert!(may(&api, "list", "", "pods").await);
    assert!(may(&api, "patch", "events.k8s.io", "events").await);
    assert!(!may(&api, "watch", "", "pods").await);
    assert!(!may(&api, "create", "", "events").await);
    assert!(!may(&api, "patch", "events.k8s.io", "events/status").await);
    api.set_rules(None);
    assert!(may(&api, "watch", "", "pods").await);
}

#[tokio::test]
async fn every_call_is_logged_with_its_size() {
    let api = KubeApi::start().unwrap();
    let cluster = Cluster::new(&api);
    cluster.client("x", &PodSpec::new("a", "node1", &[ip("10.0.0.1")])).unwrap();
    assert!(api.calls().is_empty());
    let client = client(&api).await;
    client.apiserver_version().await.unwrap();
    let pods: Api<Pod> = Api::namespaced(client, "x");
    pods.list(&ListParams::default().labels("app=a")).await.unwrap();
    drop(pods.get("none").await);
    let calls = api.calls();
    let short: Vec<_> =
        calls.iter().map(|c| (c.attributes.to_string(), c.namespace.as_deref(), c.code)).collect();
    let expected = [("get ", None, 200), ("list pods", Some("x"), 200), ("get pods", Some("x"), 404)];
    assert_eq!(short, expected.map(|(call, namespace, code)| (call.to_owned(), namespace, code)));
    assert!(!calls[0].is_resource() && calls[1].is_resource());
    assert!(calls[1].uri.contains("labelSelector=app"), "{}", calls[1].uri);
    assert!(calls[1].response_bytes > 300, "{}", calls[1].response_bytes);
    assert_eq!(calls[2].name, "none");
    api.clear_calls();
    assert!(api.calls().is_empty());
}

#[tokio::test]
async fn discovery_finds_every_kind() {
    let api = KubeApi::start().unwrap();
    let discovery = Discovery::new(client(&api).await).run().await.unwrap();
    for kind in Kind::ALL {
        let info = kind.info();
        let group = discovery.get(info.group).unwrap_or_else(|| panic!("no group {:?}", info.group));
        let found = group.recommended_kind(info.kind);
        assert_eq!(found.map(|(resource, _)| resource.plural).as_deref(), Some(info.plural));
    }
}
