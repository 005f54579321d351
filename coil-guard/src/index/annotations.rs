//! Annotations: the guard's own on an Egress, and Coil's on a client pod.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use super::objects::{AnnotationProblem, Egress, EgressMode, NotReadyAfter};
use crate::plan::{EgressName, Mode};

/// What to do for an Egress.
pub const MODE: &str = "coil-guard.io/mode";
/// Upper bound of a drain.
pub const DRAIN_TIMEOUT: &str = "coil-guard.io/drain-timeout";
/// How long a backend that is not ready keeps its flows.
pub const NOT_READY_AFTER: &str = "coil-guard.io/not-ready-after";
/// Coil's annotation on a client pod, followed by the Egress's namespace.
pub const EGRESS_PREFIX: &str = "egress.coil.cybozu.com/";

/// Reads a mode, in any case.
///
/// # Errors
///
/// The value is none of them.
pub fn parse_mode(value: &str) -> Result<EgressMode, &'static str> {
    match value.trim().to_ascii_lowercase().as_str() {
        "off" => Ok(None),
        "audit" => Ok(Some(Mode::Audit)),
        "reset" => Ok(Some(Mode::Reset)),
        "drain" => Ok(Some(Mode::Drain)),
        "rewrite" => Ok(Some(Mode::Rewrite)),
        _ => Err("allowed are off, audit, reset, drain and rewrite; treated as off"),
    }
}

/// Reads a duration such as `90s` or `10m`, or `never`.
///
/// # Errors
///
/// The value is neither.
pub fn parse_not_ready_after(value: &str) -> Result<NotReadyAfter, &'static str> {
    if value.trim().eq_ignore_ascii_case("never") {
        return Ok(NotReadyAfter::Never);
    }
    parse_duration(value)
        .map(NotReadyAfter::After)
        .ok_or("a duration such as 0s, 90s or 10m, or never, is expected; the agent's default is used")
}

fn parse_duration(value: &str) -> Option<Duration> {
    humantime::parse_duration(value.trim()).ok()
}

/// Fills in what an Egress's annotations say.
pub(super) fn read_egress(annotations: &BTreeMap<String, String>, egress: &mut Egress) {
    if let Some(value) = annotations.get(MODE) {
        egress.mode = Some(parse_mode(value).unwrap_or_else(|advice| {
            egress.problems.push(AnnotationProblem { key: MODE, value: value.clone(), advice });
            None
        }));
    }
    if let Some(value) = annotations.get(DRAIN_TIMEOUT) {
        egress.drain_timeout = parse_duration(value);
        if egress.drain_timeout.is_none() {
            let advice =
                "a duration such as 90s or 10m is expected; the pod's grace period alone bounds the drain";
            egress.problems.push(AnnotationProblem { key: DRAIN_TIMEOUT, value: value.clone(), advice });
        }
    }
    if let Some(value) = annotations.get(NOT_READY_AFTER) {
        match parse_not_ready_after(value) {
            Ok(after) => egress.not_ready_after = Some(after),
            Err(advice) => {
                egress.problems.push(AnnotationProblem {
                    key: NOT_READY_AFTER,
                    value: value.clone(),
                    advice,
                });
            }
        }
    }
}

/// The Egresses that a pod's annotations name. As Coil does it: the value is split at commas and nothing is trimmed, so
/// a name with a space names no Egress here either.
pub(super) fn read_client(annotations: &BTreeMap<String, String>) -> BTreeSet<EgressName> {
    let mut egresses = BTreeSet::new();
    for (key, value) in annotations {
        if let Some(namespace) = key.strip_prefix(EGRESS_PREFIX) {
            let name = |name: &str| EgressName { namespace: namespace.into(), name: name.into() };
            egresses.extend(value.split(',').map(name));
        }
    }
    egresses
}

#[cfg(test)]
mod tests {
    use super::*;

    fn egress(key: &str, value: &str) -> Egress {
        let mut egress = Egress::default();
        read_egress(&BTreeMap::from([(key.to_owned(), value.to_owned())]), &mut egress);
        egress
    }

    #[test]
    fn modes_are_read_in_any_case() {
        for (text, mode) in [
            ("off", None),
            ("Audit", Some(Mode::Audit)),
            ("RESET", Some(Mode::Reset)),
            (" drain ", Some(Mode::Drain)),
            ("Rewrite", Some(Mode::Rewrite)),
        ] {
            let egress = egress(MODE, text);
            assert_eq!(egress.mode, Some(mode), "{text}");
            assert_eq!(egress.problems, []);
        }
    }

    #[test]
    fn an_unknown_mode_is_off_and_reported_with_its_value() {
        for text in ["on", "", "drain,reset", "true"] {
            let egress = egress(MODE, text);
            assert_eq!(
                egress.mode,
                Some(None),
                "{text}: explicitly off, so that the default mode does not apply"
            );
            assert_eq!(egress.problems.len(), 1);
            assert_eq!((egress.problems[0].key, egress.problems[0].value.as_str()), (MODE, text));
        }
    }

    #[test]
    fn durations_are_read_and_bad_ones_reported() {
        let seconds = Duration::from_secs;
        assert_eq!(egress(DRAIN_TIMEOUT, "90s").drain_timeout, Some(seconds(90)));
        assert_eq!(egress(DRAIN_TIMEOUT, "1m30s").drain_timeout, Some(seconds(90)));
        assert_eq!(egress(DRAIN_TIMEOUT, "0s").drain_timeout, Some(seconds(0)));
        for bad in ["90", "soon", "-3s", ""] {
            let egress = egress(DRAIN_TIMEOUT, bad);
            assert_eq!(egress.drain_timeout, None, "{bad}");
            assert_eq!(egress.problems.len(), 1, "{bad}");
        }
        assert_eq!(egress(NOT_READY_AFTER, "never").not_ready_after, Some(NotReadyAfter::Never));
        assert_eq!(egress(NOT_READY_AFTER, "Never").not_ready_after, Some(NotReadyAfter::Never));
        assert_eq!(egress(NOT_READY_AFTER, "0s").not_ready_after, Some(NotReadyAfter::After(seconds(0))));
        let bad = egress(NOT_READY_AFTER, "always");
        assert_eq!((bad.not_ready_after, bad.problems.len()), (None, 1));
    }

    #[test]
    fn clients_are_read_as_coil_does() {
        let annotations =
            [("egress.coil.cybozu.com/net", "a,b, c"), ("egress.coil.cybozu.com/other", "a"), ("x/y", "z")]
                .map(|(key, value)| (key.to_owned(), value.to_owned()));
        let name =
            |namespace: &str, name: &str| EgressName { namespace: namespace.into(), name: name.into() };
        assert_eq!(
            read_client(&annotations.into()),
            BTreeSet::from([name("net", "a"), name("net", "b"), name("net", " c"), name("other", "a")])
        );
    }
}
