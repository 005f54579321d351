//! Who may do what: the rules of one role, bound cluster-wide to the only client.

use k8s_openapi::api::rbac::v1::PolicyRule;

/// What is asked for, as RBAC sees it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Attributes {
    /// `get`, `list`, `watch`, `create`, `update`, `patch`, `delete` …
    pub verb: String,
    /// API group, empty for the core group.
    pub group: String,
    /// Plural name; with a subresource, `plural/subresource`.
    pub resource: String,
}

impl std::fmt::Display for Attributes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let dot = if self.group.is_empty() { "" } else { "." };
        write!(f, "{} {}{dot}{}", self.verb, self.resource, self.group)
    }
}

/// Whether one of the rules allows it to a request for `name` (empty for list, watch and create).
pub(crate) fn allowed(rules: &[PolicyRule], attributes: &Attributes, name: &str) -> bool {
    let has = |list: Option<&Vec<String>>, wanted: &str| {
        list.is_some_and(|list| list.iter().any(|value| value == "*" || value == wanted))
    };
    rules.iter().any(|rule| {
        has(Some(&rule.verbs), &attributes.verb)
            && has(rule.api_groups.as_ref(), &attributes.group)
            && has(rule.resources.as_ref(), &attributes.resource)
            && rule
                .resource_names
                .as_ref()
                .is_none_or(|names| names.is_empty() || names.iter().any(|n| n == name))
    })
}

/// What every authenticated client may ask whatever its roles: the reviews of its own rights.
pub(crate) fn always_allowed(attributes: &Attributes) -> bool {
    attributes.group == "authorization.k8s.io" && attributes.verb == "create"
}
