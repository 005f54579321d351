//! Is the agent doing its work, and if not, why not.

use std::sync::{
    Mutex, PoisonError,
    atomic::{AtomicU64, Ordering},
};
use std::time::Duration;

use crate::clock::Monotonic;

/// The loop turns at least every few seconds; longer than this it hangs.
const LONGEST_TURN: Duration = Duration::from_secs(60);

/// Something that readiness depends on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Condition {
    /// Short name.
    pub name: &'static str,
    /// Why it is not met; `None` when it is.
    pub problem: Option<String>,
}

/// Shared between the loop, which writes it, and the health endpoint.
#[derive(Debug)]
pub struct Readiness {
    conditions: Mutex<Vec<Condition>>,
    turned_at: AtomicU64,
}

impl Readiness {
    /// Not ready, because of `problem`.
    #[must_use]
    pub fn new(problem: &str) -> Self {
        let starting = Condition { name: "started", problem: Some(problem.to_owned()) };
        Self { conditions: Mutex::new(vec![starting]), turned_at: AtomicU64::new(Monotonic::now().0) }
    }

    /// Replaces the conditions.
    pub fn set(&self, conditions: Vec<Condition>) {
        *self.conditions.lock().unwrap_or_else(PoisonError::into_inner) = conditions;
    }

    /// Says that the loop is alive.
    pub fn turn(&self, now: Monotonic) {
        self.turned_at.store(now.0, Ordering::Relaxed);
    }

    /// Whether the loop has turned lately.
    #[must_use]
    pub fn is_live(&self, now: Monotonic) -> bool {
        now.since(Monotonic(self.turned_at.load(Ordering::Relaxed))) < LONGEST_TURN
    }

    /// The conditions.
    #[must_use]
    pub fn conditions(&self) -> Vec<Condition> {
        self.conditions.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Whether every condition is met.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.conditions().iter().all(|condition| condition.problem.is_none())
    }

    /// A line for each condition, as Kubernetes components write it.
    #[must_use]
    pub fn report(&self) -> String {
        let line = |condition: &Condition| match &condition.problem {
            None => format!("[+]{} ok\n", condition.name),
            Some(problem) => format!("[-]{} {problem}\n", condition.name),
        };
        self.conditions().iter().map(line).collect()
    }
}
