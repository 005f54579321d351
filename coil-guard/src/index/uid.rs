//! UIDs of egress pods. There are some for each egress pod of the cluster, so the usual form is kept as the number that it is.

use std::fmt;

/// A UID. Two are equal when their texts are.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Uid(Form);

#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Form {
    /// Lower case with hyphens, as the API server makes them.
    Usual([u8; 16]),
    Other(Box<str>),
}

/// Lengths of the groups between the hyphens, in bytes of the number.
const GROUPS: [usize; 5] = [4, 2, 2, 2, 6];

fn usual(text: &str) -> Option<[u8; 16]> {
    let digit = |byte: u8| match byte {
        b'0'..=b'9' => Some(byte - b'0'),
        b'a'..=b'f' => Some(byte - b'a' + 10),
        _ => None,
    };
    let mut rest = text.as_bytes();
    let mut number = [0; 16];
    let mut bytes = number.iter_mut();
    for (group, length) in GROUPS.into_iter().enumerate() {
        if group > 0 {
            rest = rest.strip_prefix(b"-")?;
        }
        for byte in bytes.by_ref().take(length) {
            let [high, low, after @ ..] = rest else { return None };
            *byte = digit(*high)? << 4 | digit(*low)?;
            rest = after;
        }
    }
    rest.is_empty().then_some(number)
}

impl From<&str> for Uid {
    fn from(text: &str) -> Self {
        Self(usual(text).map_or_else(|| Form::Other(text.into()), Form::Usual))
    }
}

impl fmt::Display for Uid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let number = match &self.0 {
            Form::Usual(number) => number,
            Form::Other(text) => return f.write_str(text),
        };
        let mut bytes = number.iter();
        for (group, length) in GROUPS.into_iter().enumerate() {
            if group > 0 {
                f.write_str("-")?;
            }
            for byte in bytes.by_ref().take(length) {
                write!(f, "{byte:02x}")?;
            }
        }
        Ok(())
    }
}

impl fmt::Debug for Uid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_usual_form_alone_is_a_number() {
        let is_number = |text: &str| matches!(Uid::from(text).0, Form::Usual(_));
        assert!(is_number("0b5a0f4e-95d2-4c4e-b2a5-0f2d35b4e1a3"));
        for other in [
            "",
            "a",
            "0B5A0F4E-95D2-4C4E-B2A5-0F2D35B4E1A3",
            "0b5a0f4e95d24c4eb2a50f2d35b4e1a3",
            "0b5a0f4e-95d2-4c4e-b2a5-0f2d35b4e1a3-",
            "0b5a0f4e-95d2-4c4e-b2a5-0f2d35b4e1a",
            "0b5a0f4e-95d2-4c4e-b2a50-f2d35b4e1a3",
            "0b5a0f4e-95d2-4c4e-b2a5-0f2d35b4e1ä",
        ] {
            assert!(!is_number(other), "{other}");
        }
        assert!(size_of::<Option<Uid>>() <= 24);
    }

    proptest! {
        #[test]
        fn a_uid_is_the_text_that_it_was(text in "([0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}|.{0,40})") {
            prop_assert_eq!(Uid::from(text.as_str()).to_string(), text);
        }
    }
}
