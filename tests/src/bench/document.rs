//! Puts reports into a document, between marks: no figure in it is typed by hand.

use std::{collections::BTreeMap, fmt::Write as _};

use anyhow::{Context as _, Result, ensure};

use super::{Goal, Report, goals};

/// Name of the block with the goals of all parts.
pub const GOALS: &str = "goals";

fn begin(name: &str) -> String {
    format!("<!-- bench: {name} -->")
}

const END: &str = "<!-- bench end -->";

/// The names of the blocks in a document.
#[must_use]
pub fn blocks(document: &str) -> Vec<String> {
    let name = |line: &str| line.strip_prefix("<!-- bench: ")?.strip_suffix(" -->").map(str::to_owned);
    document.lines().filter_map(name).collect()
}

/// Replaces the blocks of these reports, and of the goals; other blocks stay.
///
/// # Errors
///
/// When a report has no block, or a block no end.
pub fn fill(document: &str, reports: &[Report]) -> Result<String> {
    let mut texts: BTreeMap<String, String> =
        reports.iter().map(|report| (report.part.clone(), report.markdown())).collect();
    let all: Vec<&Goal> = reports.iter().flat_map(|report| &report.goals).collect();
    let mut text = String::new();
    let missed = all.iter().filter(|goal| !goal.met).count();
    let _infallible = write!(text, "{} of {} goals are met.\n\n", all.len() - missed, all.len());
    let table = goals(all.into_iter()).to_string();
    // The heading above the block says what it is.
    text.push_str(table.split_once("\n\n").map_or(table.as_str(), |(_, rows)| rows));
    texts.insert(GOALS.to_owned(), text);
    let mut document = document.to_owned();
    for (name, text) in texts {
        document = replace(&document, &name, &text)?;
    }
    Ok(document)
}

fn replace(document: &str, name: &str, text: &str) -> Result<String> {
    let begin = begin(name);
    let (before, rest) = document
        .split_once(&begin)
        .with_context(|| format!("the document has no line {begin:?} for the part's figures"))?;
    let (old, after) =
        rest.split_once(END).with_context(|| format!("{begin:?} should be followed by {END:?}"))?;
    ensure!(!old.contains("<!-- bench: "), "{begin:?} should be followed by {END:?} before another block");
    Ok(format!("{before}{begin}\n\n{}\n\n{END}{after}", text.trim_end()))
}

#[cfg(test)]
mod tests {
    use super::{blocks, replace};

    const DOCUMENT: &str =
        "# A\n\n<!-- bench: one -->\nold\n<!-- bench end -->\n\n<!-- bench: two -->\n<!-- bench end -->\n";

    #[test]
    fn a_block_is_replaced_and_nothing_else() {
        let new = replace(DOCUMENT, "one", "new\n").unwrap();
        assert_eq!(new, DOCUMENT.replace("\nold\n", "\n\nnew\n\n"));
        assert_eq!(replace(&new, "one", "new\n").unwrap(), new, "again is the same");
        assert_eq!(blocks(&new), ["one", "two"]);
    }

    #[test]
    fn a_missing_block_is_named() {
        assert!(replace(DOCUMENT, "three", "x").unwrap_err().to_string().contains("bench: three"));
        assert!(replace("<!-- bench: one -->\n<!-- bench: two -->\n<!-- bench end -->", "one", "x").is_err());
    }
}
