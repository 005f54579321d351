//! Objects, their revisions, and the history that watches read.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
    time::Instant,
};

use serde_json::{Value, json};

use super::{error::ApiError, kind::Kind};

/// Identifies an object. The namespace of a cluster-scoped object is empty.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Key {
    pub(crate) kind: Kind,
    pub(crate) namespace: String,
    pub(crate) name: String,
}

impl Key {
    pub(crate) fn new(kind: Kind, namespace: &str, name: &str) -> Self {
        Self { kind, namespace: namespace.into(), name: name.into() }
    }
}

/// One revision of one object.
#[derive(Clone, Debug)]
pub(crate) struct Change {
    pub(crate) revision: u64,
    pub(crate) key: Key,
    pub(crate) before: Option<Arc<Value>>,
    /// `None` when the object is gone.
    pub(crate) after: Option<Arc<Value>>,
    pub(crate) at: Instant,
}

/// The store.
#[derive(Debug)]
pub(crate) struct Store {
    objects: BTreeMap<Key, Arc<Value>>,
    history: VecDeque<Change>,
    /// The newest revision of all.
    revision: u64,
    /// Watches can start at this revision or later.
    oldest: u64,
    pub(crate) history_limit: usize,
}

impl Default for Store {
    fn default() -> Self {
        // Not 0 or 1: those mean something else to clients, or hide a mix-up of revision and generation.
        const START: u64 = 1000;
        Self {
            objects: BTreeMap::new(),
            history: VecDeque::new(),
            revision: START,
            oldest: START,
            history_limit: 100_000,
        }
    }
}

impl Store {
    pub(crate) fn revision(&self) -> u64 {
        self.revision
    }

    pub(crate) fn get(&self, key: &Key) -> Option<&Arc<Value>> {
        self.objects.get(key)
    }

    /// The objects of a kind, by namespace and name.
    pub(crate) fn of_kind(&self, kind: Kind) -> impl Iterator<Item = (&Key, &Arc<Value>)> {
        self.objects.range(Key::new(kind, "", "")..).take_while(move |(key, _)| key.kind == kind)
    }

    /// Stores an object under a new revision.
    pub(crate) fn put(&mut self, key: Key, mut object: Value) -> Arc<Value> {
        self.revision += 1;
        if let Some(metadata) = object["metadata"].as_object_mut() {
            metadata.insert("resourceVersion".into(), json!(self.revision.to_string()));
        }
        let object = Arc::new(object);
        let before = self.objects.insert(key.clone(), Arc::clone(&object));
        self.record(key, before, Some(Arc::clone(&object)));
        object
    }

    /// Removes an object. What watches are told of it is its last state, under the revision of the removal.
    pub(crate) fn remove(&mut self, key: &Key) -> Option<Arc<Value>> {
        let before = self.objects.remove(key)?;
        self.revision += 1;
        self.record(key.clone(), Some(Arc::clone(&before)), None);
        Some(before)
    }

    fn record(&mut self, key: Key, before: Option<Arc<Value>>, after: Option<Arc<Value>>) {
        self.history.push_back(Change { revision: self.revision, key, before, after, at: Instant::now() });
        while self.history.len() > self.history_limit {
            if let Some(change) = self.history.pop_front() {
                self.oldest = change.revision;
            }
        }
    }

    /// Forgets the history: whoever is not up to date gets 410.
    pub(crate) fn compact(&mut self) {
        self.history.clear();
        self.oldest = self.revision;
    }

    /// The changes after `revision`.
    pub(crate) fn since(&self, revision: u64) -> Result<impl Iterator<Item = &Change>, ApiError> {
        if revision < self.oldest {
            return Err(ApiError::expired(revision, self.oldest));
        }
        // Every revision is one change, so a position in the history is a difference of revisions.
        let skip = usize::try_from(revision - self.oldest).unwrap_or(usize::MAX);
        Ok(self.history.range(skip.min(self.history.len())..))
    }
}
