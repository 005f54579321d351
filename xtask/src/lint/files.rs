//! The repository's own rules: short source files, and nothing that holds on one machine only.

use std::{fs, path::Path};

use anyhow::{Result, ensure};

use crate::process::{capture, workspace};

/// Longest source file, in lines.
const MAX_LINES: usize = 400;

/// Text that would tie a file to one machine or one mirror, in pieces so that this file does not contain it itself.
const UNWANTED: [(&str, &str); 11] = [
    (concat!("/wo", "rk/"), "a path of one machine"),
    (concat!("/ro", "ot/"), "a path of one machine"),
    (concat!("/ho", "me/"), "a path of one machine"),
    (concat!("/tm", "p/target"), "a path of one machine"),
    (concat!("index.", "crates.io"), "a registry's host"),
    (concat!("static.", "crates.io"), "a registry's host"),
    (concat!("deb.", "debian.org"), "a registry's host"),
    (concat!("snapshot.", "debian.org"), "a registry's host"),
    (concat!("pypi", ".org"), "a registry's host"),
    (concat!("pythonhosted", ".org"), "a registry's host"),
    (concat!("registry.", "npmjs.org"), "a registry's host"),
];

/// Checks every file that git tracks or would add.
pub(crate) fn check() -> Result<()> {
    let root = workspace();
    let list = ["ls-files", "-z", "--cached", "--others", "--exclude-standard"];
    let names = capture(std::process::Command::new("git").current_dir(&root).args(list))?;
    let mut findings = Vec::new();
    for name in names.split('\0').filter(|name| !name.is_empty()) {
        // A file that is tracked but deleted, or that holds no text, has nothing to judge.
        if let Ok(text) = fs::read_to_string(root.join(name)) {
            findings.extend(judge(name, &text));
        }
    }
    for finding in &findings {
        eprintln!("lint: {finding}");
    }
    ensure!(findings.is_empty(), "{} findings", findings.len());
    Ok(())
}

fn judge(name: &str, text: &str) -> Vec<String> {
    let mut findings = Vec::new();
    let lines = text.lines().count();
    if Path::new(name).extension().is_some_and(|extension| extension == "rs") && lines > MAX_LINES {
        findings.push(format!(
            "{name}: {lines} lines, more than {MAX_LINES}: split it where a part has a name of its own"
        ));
    }
    for (number, line) in text.lines().enumerate() {
        for (unwanted, what) in UNWANTED {
            if line.contains(unwanted) {
                findings.push(format!("{name}:{}: {what} ({unwanted})", number + 1));
            }
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::{MAX_LINES, UNWANTED, judge};

    #[test]
    fn a_source_file_over_the_limit_is_named_with_its_length() {
        let text = "x\n".repeat(MAX_LINES + 1);
        assert_eq!(judge("a/b.rs", &text).len(), 1);
        assert!(judge("a/b.rs", &text)[0].contains("401 lines"));
        assert!(judge("a/b.json", &text).is_empty());
        assert!(judge("a/b.rs", &"x\n".repeat(MAX_LINES)).is_empty());
    }

    #[test]
    fn text_of_one_machine_is_found_with_its_line() {
        for (unwanted, _) in UNWANTED {
            let findings = judge("README.md", &format!("fine\nsee {unwanted}x\n"));
            assert_eq!(findings.len(), 1);
            assert!(findings[0].starts_with("README.md:2: "), "{findings:?}");
        }
    }
}
