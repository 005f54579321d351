//! One copy of each text that tens of thousands of names have in common.

use std::{collections::BTreeSet, sync::Arc};

use super::objects::{Change, EgressPod, ObjectName, Slice, Update};

/// Namespaces, and names of Egresses.
#[derive(Clone, Debug, Default)]
pub(super) struct Names(BTreeSet<Arc<str>>);

impl Names {
    /// Lets the names in the update share the texts that are known already.
    pub(super) fn share(&mut self, update: &mut Update) {
        match update {
            Update::Slice(change) => {
                self.each(change, |names, slice: &mut Slice| names.name(&mut slice.service));
            }
            Update::EgressPod(change) => self.each(change, |names, pod: &mut EgressPod| {
                if let Some(egress) = &mut pod.egress {
                    names.name(egress);
                }
            }),
            Update::Egress(_) | Update::Service(_) | Update::LocalPod(_) => {}
        }
    }

    fn each<T>(&mut self, change: &mut Change<T>, mut inside: impl FnMut(&mut Self, &mut T)) {
        match change {
            Change::Apply(name, object) => {
                self.text(&mut name.namespace);
                inside(self, object);
            }
            Change::Delete(_) => {}
            Change::Reset(objects) => {
                for (name, object) in objects {
                    self.text(&mut name.namespace);
                    object.iter_mut().for_each(|object| inside(self, object));
                }
                // Those that nobody else has any more.
                self.0.retain(|text| Arc::strong_count(text) > 1);
            }
        }
    }

    fn name(&mut self, name: &mut ObjectName) {
        self.text(&mut name.namespace);
        self.text(&mut name.name);
    }

    fn text(&mut self, text: &mut Arc<str>) {
        match self.0.get(text) {
            Some(known) => *text = Arc::clone(known),
            None => drop(self.0.insert(Arc::clone(text))),
        }
    }
}
