//! The programs that a pod can have, and where each stands.

use aya::programs::TcAttachType;

use super::records::is_valid_uid;
use crate::plan::PodUid;

/// A program of a pod. In the order in which they are taken away: who uses what another one does goes first, and what a
/// packet is changed to can be changed back for as long as it is changed. They are attached in the opposite order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Part {
    /// Client pod, egress: what guards its flows.
    Guard,
    /// Client pod, ingress: turns replies back to the FoU port. Mode rewrite.
    Return,
    /// Egress pod, egress: sends replies to the port that a client's packets come from. Mode rewrite.
    Answer,
    /// Egress pod, ingress: learns that port. Mode rewrite.
    Learn,
}

/// Separates UID and part in the names of pins and records. No UID has it.
const SEPARATOR: char = '_';

impl Part {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Guard, Self::Return, Self::Answer, Self::Learn];

    /// Its name in logs, pins and records.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Guard => "guard",
            Self::Return => "return",
            Self::Answer => "answer",
            Self::Learn => "learn",
        }
    }

    pub(crate) const fn hook(self) -> TcAttachType {
        match self {
            Self::Guard | Self::Answer => TcAttachType::Egress,
            Self::Return | Self::Learn => TcAttachType::Ingress,
        }
    }

    /// Handle of its clsact filter: "co" in ASCII for one, and the next for the other of each hook. Any fixed numbers that
    /// others are unlikely to have picked.
    pub(crate) const fn handle(self) -> u32 {
        match self {
            Self::Guard | Self::Learn => 0x636f,
            Self::Return | Self::Answer => 0x6370,
        }
    }
}

/// A program of a pod.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Key {
    pub(crate) uid: PodUid,
    pub(crate) part: Part,
}

impl Key {
    pub(crate) fn new(uid: &str, part: Part) -> Self {
        Self { uid: uid.to_owned(), part }
    }

    /// Name of its pin and of its record.
    pub(crate) fn name(&self) -> String {
        match self.part {
            Part::Guard => self.uid.clone(),
            part => format!("{}{SEPARATOR}{}", self.uid, part.label()),
        }
    }

    /// The other way round; `None` for a name that is none of ours.
    pub(crate) fn parse(name: &str) -> Option<Self> {
        let (uid, part) = match name.split_once(SEPARATOR) {
            None => (name, Part::Guard),
            Some((uid, label)) => (uid, Part::ALL.into_iter().skip(1).find(|part| part.label() == label)?),
        };
        is_valid_uid(uid).then(|| Self::new(uid, part))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_can_be_read_again() {
        for part in Part::ALL {
            let key = Key::new("0b5a0f4e-95d2-4c4e-b2a5-0f2d35b4e1a3", part);
            assert_eq!(Key::parse(&key.name()), Some(key));
        }
        for name in ["", "a_b", "a_guard", "a_learn_", "a/b"] {
            assert_eq!(Key::parse(name), None, "{name}");
        }
    }

    #[test]
    fn no_two_have_one_place() {
        let places = Part::ALL.map(|part| (part.hook() == TcAttachType::Ingress, part.handle()));
        assert_eq!(std::collections::BTreeSet::from(places).len(), Part::ALL.len());
    }
}
