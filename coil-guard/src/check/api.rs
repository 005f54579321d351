//! The Kubernetes API: Coil's CRD, the rights, the watches, and what the Egresses ask for.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use k8s_openapi::api::authorization::v1::{
    ResourceAttributes, SelfSubjectAccessReview, SelfSubjectAccessReviewSpec,
};
use kube::{Api, Client, api::PostParams};

use super::{Check, Finding};
use crate::{
    clock::Monotonic,
    index::{Egress, Index},
    k8s::{self, Message, Node, Watches},
    plan::{self, Desired, EgressName, Mode, Settings},
};

/// How long the watches may take.
const PATIENCE: Duration = Duration::from_secs(10);
/// Kubernetes' own default.
const DEFAULT_GRACE: Duration = Duration::from_secs(30);
/// coil-egress ends about so long after SIGTERM.
const EGRESS_EXIT: Duration = Duration::from_secs(5);

/// Group, resource, verbs: what the ClusterRole in `deploy/` gives.
const RIGHTS: [(&str, &str, &[&str]); 5] = [
    ("coil.cybozu.com", "egresses", &["list", "watch"]),
    ("", "services", &["list", "watch"]),
    ("discovery.k8s.io", "endpointslices", &["list", "watch"]),
    ("", "pods", &["list", "watch"]),
    ("events.k8s.io", "events", &["create", "patch"]),
];

pub(super) async fn check(check: &Check) -> (Vec<Finding>, Option<Desired>) {
    const ID: &str = "api";
    let client = match k8s::client(check.kubeconfig.as_deref()).await {
        Ok(client) => client,
        Err(error) => {
            let action = "Give --kubeconfig, or run it in a pod with a service account.";
            let finding =
                Finding::cannot(ID, format!("{error:#}"), "There is no way to the Kubernetes API.", action);
            return (vec![finding], None);
        }
    };
    let mut findings = Vec::new();
    match has_crd(&client).await {
        Ok(true) => {
            let meaning = "Egresses can be watched.";
            findings.push(Finding::good("coil_crd", "the API serves egresses.coil.cybozu.com/v2", meaning));
        }
        Ok(false) => {
            findings.push(Finding::cannot(
                "coil_crd",
                "the API does not serve egresses.coil.cybozu.com/v2",
                "Without Coil's Egress there is nothing to guard.",
                "Install Coil 2.0 or later, or see whether this is the right cluster.",
            ));
            return (findings, None);
        }
        Err(error) => {
            findings.push(Finding::cannot(
                ID,
                format!("the API does not answer: {error}"),
                "The agent would keep what is pinned and learn nothing.",
                "See the API server's address, its certificate and the network of this node.",
            ));
            return (findings, None);
        }
    }
    findings.push(rights(&client).await);
    let (finding, index) = watch(check, client).await;
    findings.push(finding);
    let Some(index) = index else { return (findings, None) };
    findings.extend(egresses(index.egresses(), &check.settings));
    let desired = plan::plan(&index, &check.settings, &BTreeSet::new(), true, Monotonic::now());
    (findings, Some(desired))
}

async fn has_crd(client: &Client) -> Result<bool, kube::Error> {
    match client.list_api_group_resources("coil.cybozu.com/v2").await {
        Ok(resources) => Ok(resources.resources.iter().any(|resource| resource.name == "egresses")),
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(false),
        Err(error) => Err(error),
    }
}

async fn rights(client: &Client) -> Finding {
    const ID: &str = "rbac";
    let reviews: Api<SelfSubjectAccessReview> = Api::all(client.clone());
    let mut missing = Vec::new();
    for (group, resource, verbs) in RIGHTS {
        for verb in verbs {
            let attributes = ResourceAttributes {
                group: Some(group.to_owned()),
                resource: Some(resource.to_owned()),
                verb: Some((*verb).to_owned()),
                ..ResourceAttributes::default()
            };
            let spec = SelfSubjectAccessReviewSpec {
                resource_attributes: Some(attributes),
                ..SelfSubjectAccessReviewSpec::default()
            };
            let review = SelfSubjectAccessReview { spec, ..SelfSubjectAccessReview::default() };
            match reviews.create(&PostParams::default(), &review).await {
                Ok(answer) if answer.status.as_ref().is_some_and(|status| status.allowed) => {}
                Ok(_) => missing.push(format!("{verb} {}", qualified(group, resource))),
                Err(error) => {
                    return Finding::warning(
                        ID,
                        format!("the API does not say what is allowed: {error}"),
                        "Whether every right is there cannot be told beforehand.",
                        "See whether the watches come up, below.",
                    );
                }
            }
        }
    }
    if missing.is_empty() {
        return Finding::good(
            ID,
            "every right that the agent uses is there",
            "It lists, watches and writes events.",
        );
    }
    let events_only = missing.iter().all(|right| right.ends_with("events.events.k8s.io"));
    let found = format!("not allowed: {}", missing.join(", "));
    let action = "Apply the ClusterRole and its binding from deploy/base, and see that the agent runs under that account.";
    if events_only {
        Finding::warning(ID, found, "It guards, and cannot write events on Egresses.", action)
    } else {
        Finding::cannot(ID, found, "The agent never becomes ready without it.", action)
    }
}

fn qualified(group: &str, resource: &str) -> String {
    if group.is_empty() { resource.to_owned() } else { format!("{resource}.{group}") }
}

/// Follows the watches until all have listed, as the agent does.
async fn watch(check: &Check, client: Client) -> (Finding, Option<Index>) {
    const ID: &str = "watches";
    let node = Node { name: check.node_name.clone(), fou_port: check.settings.fou_port };
    let mut messages = k8s::watch(&client, &node);
    let mut watches = Watches::new(Monotonic::now());
    let mut index = Index::recover(BTreeMap::new());
    let mut malformed = Vec::new();
    let listed = tokio::time::timeout(PATIENCE, async {
        while !watches.complete() {
            match messages.recv().await {
                Some(Message::Update { kind, update, listed, received }) => {
                    if listed {
                        watches.listed(kind);
                    }
                    index.update(*update, received);
                }
                Some(Message::Health(kind, health)) => {
                    watches.set(kind, health, Monotonic::now());
                }
                Some(Message::Malformed(_, object)) => malformed.push(object.to_string()),
                None => break,
            }
        }
    })
    .await;
    if listed.is_err() || !watches.complete() {
        let problems: Vec<_> = watches
            .all()
            .iter()
            .filter(|(_, watch)| !(watch.listed && watch.established))
            .map(|(kind, watch)| {
                format!("{}: {}", kind.resource(), watch.problem.as_deref().unwrap_or("no answer so far"))
            })
            .collect();
        let finding = Finding::cannot(
            ID,
            format!("not established after {} s: {}", PATIENCE.as_secs(), problems.join("; ")),
            "The agent never becomes ready without every watch.",
            "See the rights above and the API server's log.",
        );
        return (finding, None);
    }
    let finding = if malformed.is_empty() {
        let found = format!("all {} are established", watches.all().len());
        Finding::good(ID, found, "The agent sees what it needs.")
    } else {
        Finding::warning(
            ID,
            malformed.join("; "),
            "These objects are skipped.",
            "Put the named fields right.",
        )
    };
    (finding, Some(index))
}

fn egresses(egresses: &BTreeMap<EgressName, Egress>, settings: &Settings) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut guarded = Vec::new();
    for (name, egress) in egresses {
        for problem in &egress.problems {
            findings.push(Finding::warning(
                "annotation",
                format!("Egress {name}: {} is {:?}", problem.key, problem.value),
                format!("It is not understood: {}.", problem.advice),
                "Correct or remove it.",
            ));
        }
        if let Some(asked) = settings.refused(egress) {
            findings.push(Finding::warning(
                "mode_refused",
                format!("Egress {name} is in mode {}, and Cilium's maps may only be read here", asked.name()),
                "The mode writes to Cilium's conntrack map, so it is treated as off.",
                "Choose audit or rewrite, or run the agent with --cilium-access read-write.",
            ));
        }
        let Some(mode) = settings.mode(egress) else { continue };
        guarded.push(format!("{name} ({mode:?})").to_lowercase());
        if mode == Mode::Drain {
            findings.push(drain(name, egress));
        }
    }
    let meaning = "These are guarded on nodes with clients of theirs.";
    findings.push(if guarded.is_empty() {
        Finding::good(
            "egresses",
            format!("none of {} Egresses is guarded", egresses.len()),
            "Nothing is attached.",
        )
    } else {
        Finding::good("egresses", format!("guarded: {}", guarded.join(", ")), meaning)
    });
    findings
}

/// How long existing connections can really stay on a leaving egress pod.
fn drain(name: &EgressName, egress: &Egress) -> Finding {
    const ID: &str = "drain_time";
    let grace = egress.grace.unwrap_or(DEFAULT_GRACE);
    let limit = egress.drain_timeout.map_or(grace, |timeout| timeout.min(grace));
    if egress.pre_stop || limit <= EGRESS_EXIT {
        return Finding::good(
            ID,
            format!("Egress {name}: a drain lasts at most {}", humantime::format_duration(limit)),
            "The pod serves until its preStop hook ends, at most for its grace period.",
        );
    }
    Finding::warning(
        ID,
        format!("Egress {name} is in mode drain, and its container egress has no preStop hook"),
        format!(
            "coil-egress ends about {} s after SIGTERM, so a drain lasts about that long and not the {} that its grace period \
             and annotation allow.",
            EGRESS_EXIT.as_secs(),
            humantime::format_duration(limit)
        ),
        "Add a preStop hook that sleeps to the container egress in spec.template, see deploy/examples/egress-drain.yaml.",
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::Level;

    fn name() -> EgressName {
        EgressName { namespace: "internet".into(), name: "egress".into() }
    }

    fn draining() -> Egress {
        Egress { mode: Some(Some(Mode::Drain)), ..Egress::default() }
    }

    #[test]
    fn a_drain_without_a_pre_stop_hook_is_warned_of_with_both_times() {
        let egress = Egress { grace: Some(Duration::from_secs(600)), ..draining() };
        let finding = drain(&name(), &egress);
        assert_eq!(finding.level, Level::Warning);
        assert!(
            finding.meaning.contains("about 5 s") && finding.meaning.contains("10m"),
            "{}",
            finding.meaning
        );
    }

    #[test]
    fn with_a_hook_the_earlier_of_grace_period_and_annotation_counts() {
        let egress = Egress {
            pre_stop: true,
            grace: Some(Duration::from_secs(600)),
            drain_timeout: Some(Duration::from_secs(90)),
            ..draining()
        };
        let finding = drain(&name(), &egress);
        assert_eq!(finding.level, Level::Good);
        assert!(finding.found.contains("1m 30s"), "{}", finding.found);
    }

    #[test]
    fn an_egress_that_is_off_is_not_counted_as_guarded() {
        let off = Egress { mode: Some(None), ..Egress::default() };
        let findings = egresses(&[(name(), off)].into(), &Settings::default());
        assert_eq!(findings.len(), 1);
        assert!(findings[0].found.contains("none of 1"), "{}", findings[0].found);
    }
}
