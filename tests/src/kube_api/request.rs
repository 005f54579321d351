//! From paths and queries to what is asked for.

use std::collections::HashMap;

use axum::http::Method;

use super::{error::ApiError, kind::Kind, rbac::Attributes, selector::Filter, store::Key};

/// A parsed path below `/api` or `/apis`.
#[derive(Clone, Debug)]
pub(crate) struct Target {
    pub(crate) group: String,
    pub(crate) version: String,
    pub(crate) plural: String,
    pub(crate) subresource: Option<String>,
    pub(crate) namespace: Option<String>,
    pub(crate) name: Option<String>,
}

impl Target {
    /// Parses a path that names a resource; `None` for discovery, `/version` and the like.
    pub(crate) fn parse(path: &str) -> Option<Self> {
        let mut steps = path.split('/').filter(|step| !step.is_empty());
        let group = match steps.next()? {
            "api" => String::new(),
            "apis" => steps.next()?.to_owned(),
            _ => return None,
        };
        let version = steps.next()?.to_owned();
        let rest: Vec<&str> = steps.collect();
        // "namespaces" is a resource itself, and the prefix of all that live in one.
        let (namespace, rest) = match rest.as_slice() {
            ["namespaces", namespace, rest @ ..] if !matches!(rest, [] | ["status"]) => {
                (Some(*namespace), rest)
            }
            rest => (None, rest),
        };
        let mut rest = rest.iter().map(|step| (*step).to_owned());
        Some(Self {
            group,
            version,
            namespace: namespace.map(str::to_owned),
            plural: rest.next()?,
            name: rest.next(),
            subresource: rest.next(),
        })
    }

    pub(crate) fn kind(&self) -> Result<Kind, ApiError> {
        Kind::by_path(&self.group, &self.version, &self.plural).ok_or_else(ApiError::no_such_path)
    }

    /// The object, where the path names one.
    pub(crate) fn key(&self, kind: Kind) -> Result<Key, ApiError> {
        let name = self.name.as_deref().ok_or_else(ApiError::no_such_path)?;
        if kind.info().namespaced != self.namespace.is_some() {
            return Err(ApiError::no_such_path());
        }
        Ok(Key::new(kind, self.namespace.as_deref().unwrap_or_default(), name))
    }

    /// What RBAC is asked.
    pub(crate) fn attributes(&self, method: &Method, query: &Query) -> Attributes {
        let verb = match (method.as_str(), self.name.is_some()) {
            ("GET" | "HEAD", _) if query.watch() => "watch",
            ("GET" | "HEAD", true) => "get",
            ("GET" | "HEAD", false) => "list",
            ("POST", _) => "create",
            ("PUT", _) => "update",
            ("PATCH", _) => "patch",
            ("DELETE", true) => "delete",
            ("DELETE", false) => "deletecollection",
            (other, _) => other,
        };
        let resource = match &self.subresource {
            Some(subresource) => format!("{}/{subresource}", self.plural),
            None => self.plural.clone(),
        };
        Attributes { verb: verb.into(), group: self.group.clone(), resource }
    }
}

/// A query string.
#[derive(Clone, Debug, Default)]
pub(crate) struct Query(pub(crate) HashMap<String, String>);

impl Query {
    pub(crate) fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str).filter(|value| !value.is_empty())
    }

    pub(crate) fn flag(&self, name: &str) -> bool {
        self.0.get(name).is_some_and(|value| value == "true" || value == "1")
    }

    pub(crate) fn watch(&self) -> bool {
        self.flag("watch")
    }

    pub(crate) fn number(&self, name: &str) -> Result<Option<u64>, ApiError> {
        let parse = |text: &str| {
            text.parse().map_err(|_| {
                ApiError::bad_request(format!("invalid {name}: expected a number, found {text:?}"))
            })
        };
        self.get(name).map(parse).transpose()
    }

    pub(crate) fn filter(&self, target: &Target) -> Result<Filter, ApiError> {
        let namespace = target.namespace.clone();
        let parsed = Filter::parse(namespace, self.get("labelSelector"), self.get("fieldSelector"));
        let filter = parsed.map_err(ApiError::bad_request)?;
        Ok(match &target.name {
            // A watch of one object by its path.
            Some(name) => filter.named(name),
            None => filter,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::Target;

    #[test]
    fn paths() {
        let parts = |path: &str| {
            let t = Target::parse(path)?;
            Some((t.group, t.version, t.namespace, t.plural, t.name, t.subresource))
        };
        let s = |text: &str| text.to_owned();
        assert_eq!(parts("/api/v1/pods"), Some((s(""), s("v1"), None, s("pods"), None, None)));
        assert_eq!(
            parts("/api/v1/namespaces/a"),
            Some((s(""), s("v1"), None, s("namespaces"), Some(s("a")), None))
        );
        assert_eq!(
            parts("/apis/coil.cybozu.com/v2/namespaces/a/egresses/b/status"),
            Some((
                s("coil.cybozu.com"),
                s("v2"),
                Some(s("a")),
                s("egresses"),
                Some(s("b")),
                Some(s("status"))
            ))
        );
        assert_eq!(parts("/apis/apps/v1"), None);
        assert_eq!(parts("/version"), None);
    }
}
