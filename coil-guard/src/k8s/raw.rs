//! Objects as text, so that one that does not fit its type is skipped alone and not with the whole list.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ListMeta;
use kube::core::Status;
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::value::RawValue;

use super::kinds::Watched;
use crate::index::{Malformed, ObjectName};

/// An object, not yet read.
#[derive(Clone, Debug, Deserialize)]
#[serde(transparent)]
pub(super) struct Raw(Box<RawValue>);

/// An event of a watch.
#[derive(Debug, Deserialize)]
pub(super) struct RawEvent {
    #[serde(rename = "type")]
    pub(super) kind: EventKind,
    pub(super) object: Raw,
}

/// What an event says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub(super) enum EventKind {
    /// The object is now this.
    #[serde(alias = "MODIFIED")]
    Added,
    /// It was this, and is no more.
    Deleted,
    /// Only a version.
    Bookmark,
    /// The watch is over; the object is a Status.
    Error,
}

/// A page of a list.
#[derive(Debug, Deserialize)]
pub(super) struct RawList {
    #[serde(default)]
    pub(super) metadata: ListMeta,
    /// Some servers send null for none.
    #[serde(default)]
    pub(super) items: Option<Vec<Raw>>,
}

#[derive(Debug, Default, Deserialize)]
struct Identity {
    #[serde(default)]
    metadata: IdentityMeta,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct IdentityMeta {
    namespace: Option<String>,
    name: Option<String>,
    resource_version: Option<String>,
}

/// What could be read of an object.
pub(super) struct Read<T> {
    /// Empty parts when it has none.
    pub(super) name: ObjectName,
    pub(super) resource_version: Option<String>,
    /// `None` inside is an object that is of no interest.
    pub(super) object: Result<Option<T>, Malformed>,
}

impl Raw {
    pub(super) fn resource_version(&self) -> Option<String> {
        serde_json::from_str::<Identity>(self.0.get()).ok()?.metadata.resource_version
    }

    pub(super) fn status(&self) -> Status {
        serde_json::from_str(self.0.get())
            .unwrap_or_else(|_| Status::failure(&format!("not a Status: {}", self.0.get()), "Unknown"))
    }

    pub(super) fn read<K: Watched>(&self, fou_port: u16) -> Read<K::Object> {
        let identity: Identity = serde_json::from_str(self.0.get()).unwrap_or_default();
        let name = ObjectName {
            namespace: identity.metadata.namespace.unwrap_or_default(),
            name: identity.metadata.name.unwrap_or_default(),
        };
        let object = decode::<K::Api>(self.0.get())
            .map_err(|(field, problem)| Malformed {
                kind: K::KIND.object(),
                namespace: name.namespace.clone(),
                name: name.name.clone(),
                field,
                problem,
            })
            .and_then(|object| K::parse(&object, fou_port))
            .map(|(_, object)| object);
        Read { name, resource_version: identity.metadata.resource_version, object }
    }
}

/// Decodes, and tells where it failed.
fn decode<T: DeserializeOwned>(text: &str) -> Result<T, (String, String)> {
    let mut deserializer = serde_json::Deserializer::from_str(text);
    serde_path_to_error::deserialize(&mut deserializer)
        .map_err(|error| (error.path().to_string(), error.into_inner().to_string()))
}

#[cfg(test)]
mod tests {
    use super::{super::kinds::*, *};

    fn raw(text: &str) -> Raw {
        serde_json::from_str(text).unwrap()
    }

    #[test]
    fn a_field_of_a_wrong_type_is_named_with_its_object() {
        let object = raw(
            r#"{"metadata":{"namespace":"net","name":"nat","resourceVersion":"7"},"spec":{"ports":"many"}}"#,
        );
        let read = object.read::<ServiceWatch>(5555);
        let error = read.object.unwrap_err().to_string();
        assert!(error.starts_with("Service net/nat is skipped: spec.ports: invalid type"), "{error}");
        assert_eq!(read.resource_version.as_deref(), Some("7"));
    }

    #[test]
    fn events_are_read_in_any_order_of_fields() {
        for text in [r#"{"type":"MODIFIED","object":{"a":1}}"#, r#"{"object":{"a":1},"type":"MODIFIED"}"#] {
            assert_eq!(serde_json::from_str::<RawEvent>(text).unwrap().kind, EventKind::Added);
        }
        let text = r#"{"object":{"kind":"Status","code":410,"message":"too old"},"type":"ERROR"}"#;
        let event: RawEvent = serde_json::from_str(text).unwrap();
        assert_eq!((event.kind, event.object.status().code), (EventKind::Error, 410));
        let text = r#"{"type":"BOOKMARK","object":{"metadata":{"resourceVersion":"9"}}}"#;
        let event: RawEvent = serde_json::from_str(text).unwrap();
        assert_eq!(
            (event.kind, event.object.resource_version().as_deref()),
            (EventKind::Bookmark, Some("9"))
        );
    }

    #[test]
    fn an_egress_needs_no_spec() {
        let read = raw(r#"{"metadata":{"namespace":"net","name":"nat"}}"#).read::<EgressWatch>(5555);
        assert!(!read.object.unwrap().unwrap().sport_auto);
    }

    #[test]
    fn a_list_without_items_is_empty() {
        for text in [
            r#"{"metadata":{"resourceVersion":"5"},"items":null}"#,
            r#"{"metadata":{"resourceVersion":"5"}}"#,
        ] {
            let list: RawList = serde_json::from_str(text).unwrap();
            assert!(list.items.unwrap_or_default().is_empty());
            assert_eq!(list.metadata.resource_version.as_deref(), Some("5"));
        }
    }
}
