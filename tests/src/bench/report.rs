//! What a part of the benchmarks has found: tables, goals, and the figures behind them.

use std::fmt::{self, Write as _};

use serde::{Deserialize, Serialize};

/// Where figures were taken: they hold for that machine, their ratios for others too.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Machine {
    /// Kernel release.
    pub kernel: String,
    /// Processor's name.
    pub processor: String,
    /// Processors.
    pub processors: usize,
    /// Load average of the minute before.
    pub load: f64,
}

impl Machine {
    /// This one, now.
    #[must_use]
    pub fn here() -> Self {
        let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        let cpuinfo = read("/proc/cpuinfo");
        let name = cpuinfo.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
        Self {
            kernel: read("/proc/sys/kernel/osrelease").trim().to_owned(),
            processor: name.map_or_else(|| "unknown".to_owned(), |(_, name)| name.trim().to_owned()),
            processors: std::thread::available_parallelism().map_or(1, Into::into),
            load: read("/proc/loadavg").split(' ').next().and_then(|load| load.parse().ok()).unwrap_or(0.0),
        }
    }
}

/// A table. The first column names, the others hold figures.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Table {
    /// What it is about, with the unit.
    pub title: String,
    /// Heads of the columns.
    pub columns: Vec<String>,
    /// Rows of as many cells.
    pub rows: Vec<Vec<String>>,
}

impl Table {
    /// An empty table.
    #[must_use]
    pub fn new(title: &str, columns: &[&str]) -> Self {
        let columns = columns.iter().map(|column| (*column).to_owned()).collect();
        Self { title: title.to_owned(), columns, rows: Vec::new() }
    }

    /// Adds a row.
    ///
    /// # Panics
    ///
    /// When it has another number of cells than the table has columns.
    pub fn row<T: Into<String>>(&mut self, cells: impl IntoIterator<Item = T>) {
        let cells: Vec<String> = cells.into_iter().map(Into::into).collect();
        assert_eq!(cells.len(), self.columns.len(), "{cells:?} under {:?}", self.columns);
        self.rows.push(cells);
    }
}

impl fmt::Display for Table {
    /// Markdown that is aligned, so that it reads in a terminal too.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = |column: usize| {
            let cells = self.rows.iter().chain([&self.columns]).map(|row| row[column].chars().count());
            cells.max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..self.columns.len()).map(width).collect();
        let line = |f: &mut fmt::Formatter<'_>, cells: &[String]| {
            for (column, (cell, width)) in cells.iter().zip(&widths).enumerate() {
                if column == 0 {
                    write!(f, "| {cell:<width$} ")?;
                } else {
                    write!(f, "| {cell:>width$} ")?;
                }
            }
            writeln!(f, "|")
        };
        writeln!(f, "{}\n", self.title)?;
        line(f, &self.columns)?;
        for (column, width) in widths.iter().enumerate() {
            if column == 0 {
                write!(f, "| {} ", "-".repeat(*width))?;
            } else {
                write!(f, "| {}: ", "-".repeat(width.saturating_sub(1)))?;
            }
        }
        writeln!(f, "|")?;
        self.rows.iter().try_for_each(|row| line(f, row))
    }
}

/// A goal and what was found.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Goal {
    /// What is measured.
    pub what: String,
    /// What it should be.
    pub goal: String,
    /// What it is.
    pub found: String,
    /// Whether that is as it should be.
    pub met: bool,
}

impl Goal {
    /// A figure that should stay below a bound.
    #[must_use]
    pub fn below(what: &str, bound: f64, found: f64, unit: &str) -> Self {
        Self {
            what: what.to_owned(),
            goal: format!("< {bound} {unit}").trim_end().to_owned(),
            found: format!("{} {unit}", short(found)).trim_end().to_owned(),
            met: found < bound,
        }
    }

    /// A figure that should reach a bound.
    #[must_use]
    pub fn at_least(what: &str, bound: f64, found: f64, unit: &str) -> Self {
        Self {
            what: what.to_owned(),
            goal: format!(">= {bound} {unit}").trim_end().to_owned(),
            found: format!("{found:.3} {unit}").trim_end().to_owned(),
            met: found >= bound,
        }
    }
}

/// Three digits that count.
#[must_use]
pub fn short(figure: f64) -> String {
    let digits = match figure.abs() {
        magnitude if magnitude >= 100.0 => 0,
        magnitude if magnitude >= 10.0 => 1,
        magnitude if magnitude >= 1.0 => 2,
        _ => 3,
    };
    format!("{figure:.digits$}")
}

/// Everything that a part has found.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Report {
    /// Name of the part.
    pub part: String,
    /// Where.
    pub machine: Machine,
    /// How long it took, seconds.
    pub seconds: f64,
    /// Whether it was a smoke run, whose figures are worth nothing.
    pub quick: bool,
    /// Tables.
    pub tables: Vec<Table>,
    /// Goals.
    pub goals: Vec<Goal>,
    /// The figures behind the tables, unrounded.
    pub figures: serde_json::Value,
}

impl Report {
    /// The tables and goals as Markdown.
    #[must_use]
    pub fn markdown(&self) -> String {
        let mut text = String::new();
        let machine = &self.machine;
        let _infallible = writeln!(
            text,
            "Kernel {}, {} x {}, load average {:.1} before the run{}.",
            machine.kernel,
            machine.processors,
            machine.processor,
            machine.load,
            if self.quick { "; a smoke run: these figures are worth nothing" } else { "" }
        );
        for table in &self.tables {
            let _infallible = write!(text, "\n{table}");
        }
        text
    }

    /// The goals as a table.
    #[must_use]
    pub fn goals(&self) -> Table {
        goals(self.goals.iter())
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "== {}, {:.0} s. {}", self.part, self.seconds, self.markdown())?;
        if self.goals.is_empty() { Ok(()) } else { write!(f, "\n{}", self.goals()) }
    }
}

/// Goals as a table.
#[expect(single_use_lifetimes, reason = "an anonymous lifetime in impl Trait is not stable")]
pub fn goals<'a>(of: impl Iterator<Item = &'a Goal>) -> Table {
    let mut table = Table::new("Goals", &["goal", "wanted", "found", "met"]);
    for goal in of {
        let met = if goal.met { "yes" } else { "**no**" };
        table.row([goal.what.as_str(), &goal.goal, &goal.found, met]);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::{Goal, Table, short};

    #[test]
    fn a_table_is_aligned_markdown() {
        let mut table = Table::new("Speed, ns", &["packet", "ns"]);
        table.row(["healthy", "1.5"]);
        assert_eq!(
            table.to_string(),
            "Speed, ns\n\n| packet  |  ns |\n| ------- | --: |\n| healthy | 1.5 |\n"
        );
    }

    #[test]
    fn a_goal_says_whether_it_is_met() {
        assert!(Goal::below("x", 5.0, 4.99, "ms").met);
        assert!(!Goal::below("x", 5.0, 5.0, "ms").met);
        assert!(!Goal::at_least("x", 0.99, 0.98, "").met);
        assert_eq!(Goal::at_least("x", 0.99, 0.991_23, "").found, "0.991");
    }

    #[test]
    fn figures_have_three_digits_that_count() {
        assert_eq!([0.1234, 1.234, 12.34, 123.4].map(short), ["0.123", "1.23", "12.3", "123"]);
    }
}
