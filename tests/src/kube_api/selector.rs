//! Label and field selectors, in the syntax of query strings.

use serde_json::Value;

/// What a list or watch is limited to.
#[derive(Clone, Debug, Default)]
pub(crate) struct Filter {
    pub(crate) namespace: Option<String>,
    labels: Vec<LabelRequirement>,
    fields: Vec<FieldRequirement>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum LabelRequirement {
    In(String, Vec<String>),
    NotIn(String, Vec<String>),
    Exists(String),
    Absent(String),
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct FieldRequirement {
    path: &'static [&'static str],
    value: String,
    equal: bool,
}

impl Filter {
    /// Parses the two selectors.
    pub(crate) fn parse(
        namespace: Option<String>,
        labels: Option<&str>,
        fields: Option<&str>,
    ) -> Result<Self, String> {
        Ok(Self {
            namespace,
            labels: split(labels.unwrap_or_default())
                .into_iter()
                .map(label_requirement)
                .collect::<Result<_, _>>()?,
            fields: split(fields.unwrap_or_default())
                .into_iter()
                .map(field_requirement)
                .collect::<Result<_, _>>()?,
        })
    }

    /// The same, and only the object of this name.
    pub(crate) fn named(mut self, name: &str) -> Self {
        self.fields.push(FieldRequirement { path: &["metadata", "name"], value: name.into(), equal: true });
        self
    }

    /// Whether an object is selected.
    pub(crate) fn matches(&self, object: &Value) -> bool {
        let metadata = &object["metadata"];
        self.namespace.as_ref().is_none_or(|namespace| metadata["namespace"].as_str() == Some(namespace))
            && self.labels.iter().all(|requirement| requirement.matches(&metadata["labels"]))
            && self.fields.iter().all(|requirement| requirement.matches(object))
    }
}

impl LabelRequirement {
    fn matches(&self, labels: &Value) -> bool {
        let get = |key: &str| labels[key].as_str();
        match self {
            Self::In(key, values) => get(key).is_some_and(|value| values.iter().any(|v| v == value)),
            Self::NotIn(key, values) => get(key).is_none_or(|value| values.iter().all(|v| v != value)),
            Self::Exists(key) => get(key).is_some(),
            Self::Absent(key) => get(key).is_none(),
        }
    }
}

impl FieldRequirement {
    fn matches(&self, object: &Value) -> bool {
        let found = self.path.iter().fold(object, |value, step| &value[*step]).as_str().unwrap_or_default();
        (found == self.value) == self.equal
    }
}

/// Splits at commas outside of parentheses.
fn split(selector: &str) -> Vec<&str> {
    let mut depth = 0_u32;
    selector
        .split(move |c| {
            match c {
                '(' => depth += 1,
                ')' => depth = depth.saturating_sub(1),
                _ => {}
            }
            c == ',' && depth == 0
        })
        .map(str::trim)
        .filter(|part| !part.is_empty())
        .collect()
}

fn label_requirement(text: &str) -> Result<LabelRequirement, String> {
    let one = |value: &str| vec![value.trim().to_owned()];
    let set = |values: &str| values.trim_end_matches(')').split(',').map(|v| v.trim().to_owned()).collect();
    if let Some((key, values)) = text.split_once(" notin (") {
        return Ok(LabelRequirement::NotIn(key.trim().into(), set(values)));
    }
    if let Some((key, values)) = text.split_once(" in (") {
        return Ok(LabelRequirement::In(key.trim().into(), set(values)));
    }
    if let Some((key, value)) = text.split_once("!=") {
        return Ok(LabelRequirement::NotIn(key.trim().into(), one(value)));
    }
    if let Some((key, value)) = text.split_once("==").or_else(|| text.split_once('=')) {
        return Ok(LabelRequirement::In(key.trim().into(), one(value)));
    }
    let (key, absent) = text.strip_prefix('!').map_or((text, false), |key| (key.trim(), true));
    if key.contains([' ', '(', ')']) {
        return Err(format!("unable to parse requirement: {text:?}"));
    }
    Ok(if absent { LabelRequirement::Absent(key.into()) } else { LabelRequirement::Exists(key.into()) })
}

fn field_requirement(text: &str) -> Result<FieldRequirement, String> {
    let (key, value, equal) = if let Some((key, value)) = text.split_once("!=") {
        (key, value, false)
    } else if let Some((key, value)) = text.split_once("==").or_else(|| text.split_once('=')) {
        (key, value, true)
    } else {
        return Err(format!("invalid field selector: {text:?}"));
    };
    let path: &'static [&'static str] = match key.trim() {
        "metadata.name" => &["metadata", "name"],
        "metadata.namespace" => &["metadata", "namespace"],
        "spec.nodeName" => &["spec", "nodeName"],
        "status.phase" => &["status", "phase"],
        "status.podIP" => &["status", "podIP"],
        "spec.serviceAccountName" => &["spec", "serviceAccountName"],
        other => return Err(format!("field label not supported: {other}")),
    };
    Ok(FieldRequirement { path, value: value.trim().into(), equal })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::Filter;

    fn selects(labels: &str, fields: &str) -> bool {
        let pod = json!({"metadata": {"name": "a", "namespace": "n", "labels": {"app": "coil", "tier": "x"}},
            "spec": {"nodeName": "node1"}, "status": {"phase": "Running"}});
        Filter::parse(None, Some(labels), Some(fields)).unwrap().matches(&pod)
    }

    #[test]
    fn label_selectors() {
        for labels in
            ["app=coil", "app==coil,tier=x", "app in (a, coil),tier", "app notin (a,b)", "!gone", "app!=b"]
        {
            assert!(selects(labels, ""), "{labels}");
        }
        for labels in
            ["app=x", "app=coil,tier=y", "app in (a,b)", "app notin (coil)", "gone", "!app", "app!=coil"]
        {
            assert!(!selects(labels, ""), "{labels}");
        }
    }

    #[test]
    fn field_selectors() {
        assert!(selects("", "spec.nodeName=node1,status.phase!=Failed"));
        assert!(!selects("", "spec.nodeName=node2"));
        assert!(!selects("", "metadata.name!=a"));
        assert!(Filter::parse(None, None, Some("spec.hostNetwork=true")).is_err());
        assert!(Filter::parse(None, Some("a b"), None).is_err());
    }
}
