//! The ClusterRole against the calls of a running agent.

use anyhow::{Context as _, Result, ensure};
use coil_guard_tests::{
    kube_api::{Call, Kind},
    lab::{Lab, eventually},
    manifests::{deploy, ensure_role_matches, render, role_rules},
    net::lab_test,
    scenario::{EGRESS, NAMESPACE, Scenario},
};

/// An event is brought up to date once a minute; then some.
const EVENT_PATIENCE: std::time::Duration = std::time::Duration::from_secs(100);

#[test]
fn the_agent_works_with_exactly_the_rights_of_its_role() -> Result<()> {
    lab_test(|| {
        let rules = role_rules(&render(&deploy().join("base"))?)?;
        let mut scenario = Scenario::builder(Lab::builder()).mode("audit").no_agent().start()?;
        let api = scenario.api.clone();
        api.set_rules(Some(rules.clone()));
        scenario.start_agent()?;
        scenario.wait_attached(0)?;

        let written = |verb: &str| {
            let calls = api.calls();
            let made =
                calls.iter().any(|call| call.attributes.verb == verb && call.attributes.resource == "events");
            if made { Ok(()) } else { Err(format!("{:?}", api.list(Kind::Event))) }
        };
        scenario.cluster.set_mode(NAMESPACE, EGRESS, Some("reset"))?;
        eventually("created event", scenario.patience(), || Ok(written("create")))?;
        // Back, and seen to be: two changes within one turn of the agent are none.
        scenario.cluster.set_mode(NAMESPACE, EGRESS, Some("audit"))?;
        eventually("audit", scenario.patience(), || {
            let services = scenario.agent()?.metric("coil_guard_guarded_services", &["mode=\"audit\""])?;
            Ok(if services > 0.0 { Ok(()) } else { Err(services) })
        })?;
        eventually("patched event", EVENT_PATIENCE, || Ok(written("patch")))?;

        let calls = api.calls();
        ensure_role_matches(&calls, &rules)?;
        let refused: Vec<&Call> = calls.iter().filter(|call| call.code >= 400).collect();
        ensure!(refused.is_empty(), "refused: {refused:#?}");
        // Each right less, and one more, would have been noticed.
        for index in 0..rules.len() {
            let mut fewer = rules.clone();
            fewer.remove(index);
            // Pods and services share no rule, so none of them can go.
            ensure!(
                ensure_role_matches(&calls, &fewer).is_err(),
                "rule {index} could go: {:?}",
                rules[index]
            );
            let mut more = rules.clone();
            more[index].verbs.push("delete".into());
            ensure!(ensure_role_matches(&calls, &more).is_err(), "an unused right was taken");
        }
        Ok(())
    })
}

#[test]
fn without_a_right_the_agent_says_which_one_is_missing() -> Result<()> {
    lab_test(|| {
        let mut rules = role_rules(&render(&deploy().join("base"))?)?;
        let slices = |rule: &&mut k8s_openapi::api::rbac::v1::PolicyRule| {
            rule.resources.iter().flatten().any(|resource| resource == "endpointslices")
        };
        let rule = rules.iter_mut().find(slices).context("no rule of endpointslices")?;
        rule.verbs.retain(|verb| verb != "watch");
        let mut scenario = Scenario::builder(Lab::builder()).mode("audit").no_agent().start()?;
        scenario.api.set_rules(Some(rules));
        let started = scenario.start_agent();
        ensure!(started.is_err(), "the agent is ready without the right to watch EndpointSlices");
        let error = format!("{:#}", started.err().context("an error")?);
        ensure!(error.contains("must grant list and watch of endpointslices.discovery.k8s.io"), "{error}");
        Ok(())
    })
}
