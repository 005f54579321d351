//! What a preflight found.

use std::fmt::Write as _;

use serde::Serialize;

/// How bad it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Level {
    /// As it should be.
    Good,
    /// It works, with less than what was asked for, or it cannot be told.
    Warning,
    /// It cannot work.
    CannotWork,
}

/// One finding.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// A stable name for scripts.
    pub id: &'static str,
    /// How bad it is.
    pub level: Level,
    /// What was found.
    pub found: String,
    /// What that means for the guard.
    pub meaning: String,
    /// What to do about it; empty when there is nothing to do.
    pub action: String,
}

impl Finding {
    pub(super) fn good(id: &'static str, found: impl Into<String>, meaning: impl Into<String>) -> Self {
        Self { id, level: Level::Good, found: found.into(), meaning: meaning.into(), action: String::new() }
    }

    pub(super) fn warning(
        id: &'static str,
        found: impl Into<String>,
        meaning: impl Into<String>,
        action: impl Into<String>,
    ) -> Self {
        Self {
            id,
            level: Level::Warning,
            found: found.into(),
            meaning: meaning.into(),
            action: action.into(),
        }
    }

    pub(super) fn cannot(
        id: &'static str,
        found: impl Into<String>,
        meaning: impl Into<String>,
        action: impl Into<String>,
    ) -> Self {
        Self {
            id,
            level: Level::CannotWork,
            found: found.into(),
            meaning: meaning.into(),
            action: action.into(),
        }
    }
}

/// All findings.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Findings {
    /// In the order in which they were looked for.
    pub findings: Vec<Finding>,
}

impl Findings {
    /// The worst level.
    #[must_use]
    pub fn level(&self) -> Level {
        self.findings.iter().map(|finding| finding.level).max().unwrap_or(Level::Good)
    }

    /// 0 for good, 1 for warnings, 2 for what cannot work.
    #[must_use]
    pub fn exit_code(&self) -> u8 {
        match self.level() {
            Level::Good => 0,
            Level::Warning => 1,
            Level::CannotWork => 2,
        }
    }

    /// For people.
    #[must_use]
    pub fn text(&self) -> String {
        let mut text = String::new();
        for finding in &self.findings {
            let mark = match finding.level {
                Level::Good => "ok  ",
                Level::Warning => "warn",
                Level::CannotWork => "FAIL",
            };
            // Writing to a string cannot fail.
            let _ = writeln!(text, "{mark} {}: {}", finding.id, finding.found);
            for line in [&finding.meaning, &finding.action] {
                if !line.is_empty() && finding.level != Level::Good {
                    let _ = writeln!(text, "     {line}");
                }
            }
        }
        text.push_str(match self.level() {
            Level::Good => "This node can be guarded.\n",
            Level::Warning => "This node can be guarded; see the warnings.\n",
            Level::CannotWork => "This node cannot be guarded until the failures are put right.\n",
        });
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_worst_finding_decides_the_exit_code() {
        let mut findings = Findings::default();
        assert_eq!(findings.exit_code(), 0);
        findings.findings.push(Finding::good("a", "b", "c"));
        assert_eq!(findings.exit_code(), 0);
        findings.findings.push(Finding::warning("a", "b", "c", "d"));
        assert_eq!(findings.exit_code(), 1);
        findings.findings.push(Finding::cannot("x", "is missing", "cannot", "do this"));
        findings.findings.push(Finding::good("a", "b", "c"));
        assert_eq!(findings.exit_code(), 2);
        let text = findings.text();
        assert!(text.contains("FAIL x: is missing\n     cannot\n     do this\n"), "{text}");
    }
}
