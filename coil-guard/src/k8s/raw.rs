//! Objects as text, so that one that does not fit its type is skipped alone and not with the whole list.

use kube::core::Status;
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::value::RawValue;

use super::kinds::Watched;
use crate::index::{Malformed, Metadata, Object as _, ObjectName};

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
struct List<T> {
    #[serde(default)]
    metadata: ListMetadata,
    /// Some servers send null for none.
    #[serde(default = "Option::default")]
    items: Option<Vec<T>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct ListMetadata {
    resource_version: Option<String>,
    #[serde(rename = "continue")]
    continue_: Option<String>,
}

/// A page of a list, read.
pub(super) struct Page<T> {
    pub(super) objects: Vec<Read<T>>,
    pub(super) resource_version: Option<String>,
    /// Where the next page begins, if there is one.
    pub(super) next: Option<String>,
}

/// Reads a page.
pub(super) fn page<K: Watched>(text: &str, fou_port: u16) -> Result<Page<K::Object>, serde_json::Error> {
    // Nearly always everything fits its type, and one pass over the text is enough.
    let (metadata, objects) = match serde_json::from_str::<List<K::Api>>(text) {
        Ok(list) => {
            let objects = list.items.unwrap_or_default();
            (list.metadata, objects.into_iter().map(|object| read_object::<K>(&object, fou_port)).collect())
        }
        Err(_) => {
            let list: List<Raw> = serde_json::from_str(text)?;
            let objects = list.items.unwrap_or_default();
            (list.metadata, objects.into_iter().map(|object| object.read::<K>(fou_port)).collect())
        }
    };
    let next = metadata.continue_.filter(|token| !token.is_empty());
    Ok(Page { objects, resource_version: metadata.resource_version, next })
}

#[derive(Debug, Default, Deserialize)]
struct Identity {
    #[serde(default)]
    metadata: IdentityMeta,
}

/// Nothing that could not be read.
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
        if let Ok(object) = serde_json::from_str::<K::Api>(self.0.get()) {
            return read_object::<K>(&object, fou_port);
        }
        let identity: Identity = serde_json::from_str(self.0.get()).unwrap_or_default();
        let IdentityMeta { namespace, name, resource_version } = identity.metadata;
        let (namespace, name) = (namespace.unwrap_or_default(), name.unwrap_or_default());
        let object = decode::<K::Api>(self.0.get())
            .map_err(|(field, problem)| Malformed {
                kind: K::KIND.object(),
                namespace: namespace.clone(),
                name: name.clone(),
                field,
                problem,
            })
            .and_then(|object| K::parse(&object, fou_port))
            .map(|(_, object)| object);
        let name = ObjectName { namespace: namespace.into(), name: name.into() };
        Read { name, resource_version, object }
    }
}

fn read_object<K: Watched>(object: &K::Api, fou_port: u16) -> Read<K::Object> {
    let Metadata { namespace, name, resource_version, .. } = object.metadata();
    let resource_version = resource_version.clone();
    match K::parse(object, fou_port) {
        Ok((name, object)) => Read { name, resource_version, object: Ok(object) },
        Err(malformed) => {
            let text = |text: &Option<String>| text.as_deref().unwrap_or_default().into();
            let name = ObjectName { namespace: text(namespace), name: text(name) };
            Read { name, resource_version, object: Err(malformed) }
        }
    }
}

/// Decodes, and tells where it failed. Keeping track of the place takes several times as long as the decoding.
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
            r#"{"metadata":{"resourceVersion":"5","continue":""}}"#,
        ] {
            let page = page::<ServiceWatch>(text, 5555).unwrap();
            assert!(page.objects.is_empty());
            assert_eq!((page.resource_version.as_deref(), page.next), (Some("5"), None));
        }
        assert!(page::<ServiceWatch>("{", 5555).is_err());
    }

    #[test]
    fn of_a_page_only_what_does_not_fit_is_skipped() {
        let service = r#"{"metadata":{"namespace":"net","name":"a"},"spec":{"ports":[{"port":5555,"protocol":"UDP"}]}}"#;
        let list =
            |second: &str| format!(r#"{{"items":[{service},{second}],"metadata":{{"continue":"next"}}}}"#);
        for second in [
            r#"{"metadata":{"namespace":"net","name":"b"},"spec":{"ports":"many"}}"#,
            r#"{"metadata":{"namespace":"net","name":"b"},"spec":{"ports":[]}}"#,
        ] {
            let page = page::<ServiceWatch>(&list(second), 5555).unwrap();
            assert_eq!(page.next.as_deref(), Some("next"));
            let read: Vec<_> =
                page.objects.iter().map(|read| (read.name.to_string(), read.object.is_ok())).collect();
            assert_eq!(read, [("net/a".to_owned(), true), ("net/b".to_owned(), false)], "{second}");
            let error = page.objects[1].object.as_ref().unwrap_err().to_string();
            assert!(error.starts_with("Service net/b is skipped: spec.ports: "), "{error}");
        }
    }
}
