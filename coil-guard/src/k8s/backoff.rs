//! Waiting longer after each failure.

use std::time::Duration;

use crate::clock::Monotonic;

/// Doubles from a first to a longest wait, with a fifth of it left to chance: the agents of a cluster lose their API
/// server all at once and should not come back so.
#[derive(Debug)]
pub(super) struct Backoff {
    first: Duration,
    longest: Duration,
    next: Duration,
}

impl Backoff {
    pub(super) fn new(first: Duration, longest: Duration) -> Self {
        Self { first, longest, next: first }
    }

    pub(super) fn next(&mut self) -> Duration {
        let wait = self.next;
        self.next = (wait * 2).min(self.longest);
        // The low bits of the clock are chance enough here.
        let chance = u32::try_from(Monotonic::now().0 % 200).unwrap_or(0);
        wait - wait * chance / 1000
    }

    pub(super) fn reset(&mut self) {
        self.next = self.first;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_doubles_to_a_bound_and_starts_anew() {
        let millis = Duration::from_millis;
        let mut backoff = Backoff::new(millis(200), millis(1000));
        for expected in [200, 400, 800, 1000, 1000] {
            let wait = backoff.next();
            assert!(wait <= millis(expected) && wait >= millis(expected * 4 / 5), "{wait:?} of {expected}");
        }
        backoff.reset();
        assert!(backoff.next() <= millis(200));
    }
}
