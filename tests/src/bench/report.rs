//! What was measured, as a table and as JSON.

use std::fmt;

use serde::Serialize;

/// One case.
#[derive(Clone, Debug, Serialize)]
pub struct Case {
    /// What the packet is.
    pub name: String,
    /// `IPv4` or `IPv6`.
    pub family: &'static str,
    /// `repeated` or `single`.
    pub method: &'static str,
    /// The verdict that was counted.
    pub verdict: String,
    /// The program, ns.
    pub nanoseconds: f64,
    /// An empty classifier, ns, measured in turns with it.
    pub empty_nanoseconds: f64,
    /// One lookup in the conntrack map over the empty classifier, ns.
    pub lookup_nanoseconds: f64,
    /// The program over the empty classifier, ns.
    pub over_empty_nanoseconds: f64,
    /// That, in lookups.
    pub lookups: f64,
    /// What it may cost over the empty classifier, ns.
    pub goal_nanoseconds: Option<f64>,
    /// Another build of the program over the empty classifier, ns.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub other_nanoseconds: Option<f64>,
    /// The other build's time over this one's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ratio_to_other: Option<f64>,
}

/// What loading a program costs.
#[derive(Clone, Debug, Serialize)]
pub struct LoadCost {
    /// Parsing the object and making maps, ms.
    pub prepare_milliseconds: f64,
    /// Verifying and compiling in the kernel, ms.
    pub verify_milliseconds: f64,
    /// Instructions that the verifier went through.
    pub verified_instructions: u32,
    /// Machine code, bytes.
    pub machine_code_bytes: u32,
    /// Kernel memory of the program, bytes.
    pub memory_bytes: u32,
}

/// Everything.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Kernel release.
    pub kernel: String,
    /// Cases.
    pub datapath: Vec<Case>,
    /// The core, loaded once a node.
    pub core: LoadCost,
    /// The stub, loaded once a pod.
    pub stub: LoadCost,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "Datapath, kernel {}: ns a packet over an empty classifier\n", self.kernel)?;
        writeln!(
            f,
            "{:<44} {:<4} {:<8} {:<14} {:>8} {:>8} {:>8} {:>6} {:>8} {:>6}",
            "packet", "", "method", "verdict", "empty", "over it", "lookups", "goal", "other", "ratio"
        )?;
        for case in &self.datapath {
            let optional = |value: Option<f64>, digits: usize| {
                value.map_or_else(|| "-".to_owned(), |value| format!("{value:.digits$}"))
            };
            let mark = match case.goal_nanoseconds {
                Some(goal) if case.over_empty_nanoseconds > goal => " !",
                _ => "",
            };
            writeln!(
                f,
                "{:<44} {:<4} {:<8} {:<14} {:>8.1} {:>8.1} {:>8.2} {:>6} {:>8} {:>6}{mark}",
                case.name,
                case.family,
                case.method,
                case.verdict,
                case.empty_nanoseconds,
                case.over_empty_nanoseconds,
                case.lookups,
                optional(case.goal_nanoseconds, 0),
                optional(case.other_nanoseconds, 1),
                optional(case.ratio_to_other, 2),
            )?;
        }
        for (name, cost) in [("\nThe core, once a node", &self.core), ("The stub, once a pod", &self.stub)] {
            writeln!(
                f,
                "{name}: prepared in {:.2} ms, verified and compiled in {:.2} ms ({} instructions), {:.1} KiB of code, {} KiB \
                 of memory.",
                cost.prepare_milliseconds,
                cost.verify_milliseconds,
                cost.verified_instructions,
                f64::from(cost.machine_code_bytes) / 1024.0,
                cost.memory_bytes / 1024,
            )?;
        }
        Ok(())
    }
}
