//! Unit tests: each binary once, as libtest runs it.

use std::{
    process::Stdio,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};

use super::{Outcome, Run, Status, TestBinary};

/// Runs every binary and reads each test's result from what libtest prints.
pub(crate) fn run(run: &Run, binaries: &[&TestBinary]) -> Result<Vec<Outcome>> {
    let mut outcomes = Vec::new();
    for binary in binaries {
        let began = Instant::now();
        let mut command = binary.command();
        command.args(&run.filter).env("COIL_GUARD_BINARY", &run.agent).stdin(Stdio::null());
        let output = command.output().with_context(|| format!("cannot run {}", binary.path.display()))?;
        let took = began.elapsed();
        let printed = String::from_utf8_lossy(&output.stdout);
        let mut found = parse(&binary.name, &printed, took);
        let failed = found.iter().any(|outcome| matches!(outcome.status, Status::Failed(_)));
        if !output.status.success() {
            eprintln!("{printed}{}", String::from_utf8_lossy(&output.stderr));
            if !failed {
                let why = format!("the binary ended with {}", output.status);
                found.push(Outcome { name: binary.name.clone(), status: Status::Failed(why), took });
            }
        }
        if !found.is_empty() {
            eprintln!("unit: {} tests of {} in {took:.1?}", found.len(), binary.name);
        }
        outcomes.append(&mut found);
    }
    Ok(outcomes)
}

fn parse(binary: &str, printed: &str, took: Duration) -> Vec<Outcome> {
    let outcome = |line: &str| {
        let (name, result) = line.strip_prefix("test ")?.rsplit_once(" ... ")?;
        let status = match result.split([' ', ',']).next()? {
            "ok" => Status::Passed,
            "FAILED" => Status::Failed("see its output above".to_owned()),
            "ignored" => Status::Skipped("marked #[ignore]".to_owned()),
            _ => return None,
        };
        Some(Outcome { name: format!("{binary}::{name}"), status, took })
    };
    printed.lines().filter_map(outcome).collect()
}

#[cfg(test)]
mod tests {
    use super::{Status, parse};
    use std::time::Duration;

    #[test]
    fn results_are_read_from_libtests_lines() {
        let printed = "\nrunning 4 tests\ntest a::b ... ok\ntest c - should panic ... ok\ntest d ... FAILED\n\
                       test e ... ignored, slow\n\ntest result: FAILED. 2 passed; 1 failed; 1 ignored;\n";
        let outcomes = parse("lib", printed, Duration::ZERO);
        assert_eq!(outcomes.len(), 4);
        assert_eq!(outcomes[0].name, "lib::a::b");
        assert_eq!(outcomes[1].status, Status::Passed);
        assert!(matches!(outcomes[2].status, Status::Failed(_)));
        assert!(matches!(outcomes[3].status, Status::Skipped(_)));
    }
}
