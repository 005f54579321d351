//! Strategic merge, for the lists that the patches touch.

use anyhow::{Context as _, Result, bail};
use serde_json::{Map, Value};

/// What tells the elements of a list apart; a list that is not here is replaced as a whole.
const KEYS: [(&str, &str); 6] = [
    ("containers", "name"),
    ("initContainers", "name"),
    ("env", "name"),
    ("volumes", "name"),
    ("volumeMounts", "mountPath"),
    ("ports", "containerPort"),
];

const DIRECTIVE: &str = "$patch";

/// Merges `patch` into `target`.
pub(super) fn strategic(target: &mut Value, patch: &Value) -> Result<()> {
    let Value::Object(fields) = patch else {
        *target = patch.clone();
        return Ok(());
    };
    if let Some(directive) = fields.get(DIRECTIVE) {
        bail!("{DIRECTIVE}: {directive} is understood in elements of lists only");
    }
    if !target.is_object() {
        *target = Value::Object(Map::new());
    }
    let Value::Object(old) = target else { return Ok(()) };
    for (field, new) in fields {
        let key = KEYS.iter().find(|(list, _)| list == field).map(|(_, key)| *key);
        match (key, new) {
            (_, Value::Null) => drop(old.remove(field)),
            (Some(key), Value::Array(new)) => {
                let list = old.entry(field.clone()).or_insert_with(|| Value::Array(Vec::new()));
                let Value::Array(list) = list else { bail!("{field} is no list") };
                elements(list, key, new).with_context(|| format!("in {field}"))?;
            }
            _ => strategic(old.entry(field.clone()).or_insert(Value::Null), new)
                .with_context(|| format!("in {field}"))?,
        }
    }
    Ok(())
}

fn elements(list: &mut Vec<Value>, key: &str, patch: &[Value]) -> Result<()> {
    let mut first = Vec::new();
    for element in patch {
        let id = element.get(key).with_context(|| format!("an element has no {key}: {element}"))?;
        let at = list.iter().position(|old| old.get(key) == Some(id));
        match (element.get(DIRECTIVE).and_then(Value::as_str), at) {
            (Some("delete"), Some(at)) => drop(list.remove(at)),
            (Some("delete"), None) => bail!("there is no {key} {id} to delete"),
            (Some(other), _) => bail!("{DIRECTIVE}: {other} is not understood"),
            (None, at) => {
                let mut merged = at.map_or(Value::Null, |at| list.remove(at));
                strategic(&mut merged, element)?;
                first.push(merged);
            }
        }
    }
    // kustomize puts what the patch names first, in the patch's order.
    list.splice(0..0, first);
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::strategic;

    #[test]
    fn lists_are_merged_by_their_key_and_others_replaced() {
        let mut target = json!({"containers": [{"name": "a", "args": ["x"], "env": [{"name": "K", "value": "1"}]}], "gone": 1});
        let patch = json!({
            "containers": [
                {"name": "a", "args": ["y", "z"], "env": [{"name": "L", "value": "2"}, {"name": "K", "value": "3"}]},
                {"name": "b"},
            ],
            "gone": null,
        });
        strategic(&mut target, &patch).unwrap();
        let env = json!([{"name": "L", "value": "2"}, {"name": "K", "value": "3"}]);
        assert_eq!(
            target,
            json!({"containers": [{"name": "a", "args": ["y", "z"], "env": env}, {"name": "b"}]})
        );
    }

    #[test]
    fn an_element_can_be_deleted_only_where_there_is_one() {
        let delete = json!({"volumes": [{"name": "v", "$patch": "delete"}]});
        let mut target = json!({"volumes": [{"name": "v"}, {"name": "w"}]});
        strategic(&mut target, &delete).unwrap();
        assert_eq!(target, json!({"volumes": [{"name": "w"}]}));
        assert!(strategic(&mut target, &delete).is_err());
    }
}
