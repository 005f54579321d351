//! Is a role what its bearer needs, and no more?

use std::collections::BTreeSet;

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::rbac::v1::{ClusterRole, PolicyRule};
use serde_json::Value;

use crate::kube_api::{Attributes, Call, Kind};

/// The rules of the only ClusterRole among these objects.
///
/// # Errors
///
/// There is none, or more than one.
pub fn role_rules(objects: &[Value]) -> Result<Vec<PolicyRule>> {
    let roles: Vec<_> = objects.iter().filter(|object| Kind::of(object) == Some(Kind::ClusterRole)).collect();
    ensure!(roles.len() == 1, "expected one ClusterRole, found {}", roles.len());
    let role: ClusterRole = serde_json::from_value(roles[0].clone())?;
    role.rules.context("the ClusterRole has no rules")
}

/// Checks that each call is in the rules, and that each right in the rules was used.
///
/// # Errors
///
/// The calls that no rule allows, and the rights that no call used.
pub fn ensure_role_matches(calls: &[Call], rules: &[PolicyRule]) -> Result<()> {
    let made: BTreeSet<_> =
        calls.iter().filter(|call| call.is_resource()).map(|call| call.attributes.clone()).collect();
    let granted = granted(rules)?;
    let list = |attributes: Vec<&Attributes>| {
        attributes.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
    };
    let missing: Vec<_> = made.difference(&granted).collect();
    let unused: Vec<_> = granted.difference(&made).collect();
    ensure!(missing.is_empty(), "calls that the role does not allow: {}", list(missing));
    ensure!(unused.is_empty(), "rights of the role that no call used: {}", list(unused));
    Ok(())
}

fn granted(rules: &[PolicyRule]) -> Result<BTreeSet<Attributes>> {
    let mut granted = BTreeSet::new();
    for rule in rules {
        let odd = rule.non_resource_urls.is_some() || rule.resource_names.is_some();
        ensure!(!odd, "a rule of paths or names cannot be compared with calls: {rule:?}");
        for group in rule.api_groups.iter().flatten() {
            for resource in rule.resources.iter().flatten() {
                for verb in &rule.verbs {
                    ensure!(
                        ![group, resource, verb].iter().any(|text| *text == "*"),
                        "a rule with a star: {rule:?}"
                    );
                    granted.insert(Attributes {
                        verb: verb.clone(),
                        group: group.clone(),
                        resource: resource.clone(),
                    });
                }
            }
        }
    }
    Ok(granted)
}
