//! What became of one test.

use std::time::Duration;

/// What became of one test.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Status {
    /// It ran and passed.
    Passed,
    /// It ran and failed, or did not end in time; in a few words.
    Failed(String),
    /// It did not run; in a few words.
    Skipped(String),
}

/// One test and what became of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Outcome {
    /// Binary and test, as in `reset::moves_a_stuck_flow`.
    pub(crate) name: String,
    /// What became of it.
    pub(crate) status: Status,
    /// How long it took.
    pub(crate) took: Duration,
}

/// How many passed, failed and were skipped.
pub(crate) fn count(outcomes: &[Outcome]) -> [usize; 3] {
    let mut counts = [0; 3];
    for outcome in outcomes {
        let index = match outcome.status {
            Status::Passed => 0,
            Status::Failed(_) => 1,
            Status::Skipped(_) => 2,
        };
        counts[index] += 1;
    }
    counts
}

/// What a test says about itself when it finds that it cannot run: the rest of the line is the reason.
const SKIP_MARK: &str = "skipped: ";

/// What a test says that is worth showing also when it passes: the rest of the line.
const FIGURE_MARK: &str = "figure: ";

/// What follows `mark` on a line that begins with it. libtest leaves its own line open until the test has ended, so the
/// mark may follow that.
fn marked<'a>(line: &'a str, mark: &str) -> Option<&'a str> {
    let said = line.split_once(" ... ").map_or(line, |(_, said)| said);
    said.strip_prefix(mark)
}

/// Judges one test that ran alone in its process.
pub(crate) fn judge(name: String, output: &str, success: bool, took: Duration, limit: Duration) -> Outcome {
    let status = if took >= limit {
        Status::Failed(format!("not finished after {limit:.0?}"))
    } else if !success {
        Status::Failed("see its output above".to_owned())
    } else if let Some(reason) = output.lines().find_map(|line| marked(line, SKIP_MARK)) {
        Status::Skipped(reason.to_owned())
    } else if output.contains("test result: ok. 0 passed; 0 failed; 1 ignored") {
        Status::Skipped("marked #[ignore]".to_owned())
    } else if output.contains("test result: ok. 1 passed") {
        Status::Passed
    } else {
        Status::Failed("ended without a result".to_owned())
    };
    Outcome { name, status, took }
}

/// Tells how a test that ran alone ended, with its output when it failed.
pub(crate) fn report(group: &str, number: usize, total: usize, outcome: &Outcome, output: &str) {
    let (word, detail) = match &outcome.status {
        Status::Passed => ("ok", String::new()),
        Status::Skipped(why) => ("SKIPPED", format!(": {why}")),
        Status::Failed(why) => ("FAILED", format!(": {why}")),
    };
    if matches!(outcome.status, Status::Failed(_)) {
        eprintln!("---- {}\n{output}----", outcome.name);
    }
    for figure in output.lines().filter_map(|line| marked(line, FIGURE_MARK)) {
        eprintln!("{group}:     {figure}");
    }
    eprintln!(
        "{group}: [{number}/{total}] {word} {:.1}s {}{detail}",
        outcome.took.as_secs_f64(),
        outcome.name
    );
}

#[cfg(test)]
mod tests {
    use super::{Outcome, Status, count, judge};
    use std::time::Duration;

    const LIMIT: Duration = Duration::from_secs(10);

    fn status(output: &str, success: bool, took: u64) -> Status {
        judge("x".to_owned(), output, success, Duration::from_secs(took), LIMIT).status
    }

    #[test]
    fn a_test_counts_as_passed_only_with_libtests_own_word() {
        assert_eq!(
            status("test x ... ok\n\ntest result: ok. 1 passed; 0 failed; 0 ignored;", true, 1),
            Status::Passed
        );
        assert!(matches!(status("", true, 1), Status::Failed(_)));
        assert!(matches!(
            status("test result: ok. 0 passed; 0 failed; 0 ignored;", true, 1),
            Status::Failed(_)
        ));
        assert!(matches!(status("test result: FAILED. 0 passed; 1 failed;", false, 1), Status::Failed(_)));
        assert!(matches!(status("test result: ok. 1 passed; 0 failed;", true, 11), Status::Failed(_)));
    }

    #[test]
    fn a_test_that_says_why_it_cannot_run_is_skipped() {
        let output = "test x ... skipped: no TCX in this kernel\nok\n\ntest result: ok. 1 passed; 0 failed;";
        assert_eq!(status(output, true, 1), Status::Skipped("no TCX in this kernel".to_owned()));
        let mentions = "the agent says it skipped: a pod\n\ntest result: ok. 1 passed; 0 failed;";
        assert_eq!(status(mentions, true, 1), Status::Passed);
        let ignored = "test x ... ignored\n\ntest result: ok. 0 passed; 0 failed; 1 ignored;";
        assert!(matches!(status(ignored, true, 1), Status::Skipped(_)));
    }

    #[test]
    fn outcomes_are_counted_by_status() {
        let of = |status| Outcome { name: String::new(), status, took: Duration::ZERO };
        let outcomes = [of(Status::Passed), of(Status::Failed(String::new())), of(Status::Passed)];
        assert_eq!(count(&outcomes), [2, 1, 0]);
    }
}
