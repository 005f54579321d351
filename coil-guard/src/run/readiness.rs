//! When the agent is ready.

use std::time::Duration;

use crate::{clock::Monotonic, datapath::Progress, k8s::Watches, observe::Condition};

/// An API server that restarts is no reason to be unready.
const WATCH_MAY_BE_LOST: Duration = Duration::from_secs(30);

/// The conditions: watches listed and following, Cilium's maps bound, the program not refused by the kernel, every pod of the first
/// plan looked at (`settled`; pods that come later change nothing). A pod that cannot be attached does not count, or one broken
/// pod would stop a rollout of the agent.
pub(super) fn conditions(
    watches: &Watches,
    progress: &Progress,
    settled: bool,
    now: Monotonic,
) -> Vec<Condition> {
    let mut conditions: Vec<Condition> = watches
        .all()
        .iter()
        .map(|(kind, watch)| {
            let lost_for = now.since(watch.since);
            let problem = if !watch.listed {
                Some(watch.problem.clone().unwrap_or_else(|| "not listed yet".to_owned()))
            } else if !watch.established && lost_for > WATCH_MAY_BE_LOST {
                let why = watch.problem.as_deref().unwrap_or("no reason known");
                Some(format!("lost for {} s: {why}", lost_for.as_secs()))
            } else {
                None
            };
            Condition { name: kind.label(), problem }
        })
        .collect();
    let bound = match (progress.bound, progress.wanted) {
        (Some(true), _) | (_, 0) => None,
        (Some(false), _) => Some("Cilium's maps cannot be used; the log says why".to_owned()),
        (None, _) => Some("Cilium's maps have not been looked at yet".to_owned()),
    };
    conditions.push(Condition { name: "cilium_maps", problem: bound });
    // Unlike a pod that cannot be found this is about the agent itself: its rollout has to stop.
    conditions.push(Condition { name: "program", problem: progress.refused.clone() });
    let Progress { wanted, attached, failing, .. } = progress;
    let attaching =
        (!settled).then(|| format!("{attached} of {wanted} client pods attached, {failing} failing"));
    conditions.push(Condition { name: "attachments", problem: attaching });
    conditions
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::k8s::{Health, Kind};

    fn at(seconds: u64) -> Monotonic {
        Monotonic(seconds * 1_000_000_000)
    }

    fn problems(watches: &Watches, progress: &Progress, settled: bool, now: Monotonic) -> Vec<&'static str> {
        let unmet = |condition: Condition| condition.problem.map(|_| condition.name);
        conditions(watches, progress, settled, now).into_iter().filter_map(unmet).collect()
    }

    #[test]
    fn each_condition_is_named_until_it_is_met() {
        let mut watches = Watches::new(at(0));
        assert_eq!(problems(&watches, &Progress::default(), false, at(0)).len(), Kind::ALL.len() + 1);
        for kind in Kind::ALL {
            watches.listed(kind);
            watches.set(kind, Health::Established, at(0));
        }
        let wanted = Progress { wanted: 2, attached: 1, failing: 1, ..Progress::default() };
        assert_eq!(problems(&watches, &wanted, false, at(0)), ["cilium_maps", "attachments"]);
        let unbound = Progress { bound: Some(false), settled: true, ..wanted.clone() };
        assert_eq!(problems(&watches, &unbound, true, at(0)), ["cilium_maps"]);
        let refused =
            Progress { bound: Some(true), refused: Some("verifier".into()), settled: true, ..wanted.clone() };
        assert_eq!(problems(&watches, &refused, true, at(0)), ["program"]);
        let bound = Progress { bound: Some(true), settled: true, ..wanted };
        assert_eq!(problems(&watches, &bound, true, at(0)), [""; 0], "one failing pod stops nothing");
        assert_eq!(problems(&watches, &Progress::default(), true, at(0)), [""; 0], "nothing is guarded");
    }

    #[test]
    fn a_lost_watch_counts_after_a_while() {
        let mut watches = Watches::new(at(0));
        for kind in Kind::ALL {
            watches.listed(kind);
            watches.set(kind, Health::Established, at(0));
        }
        watches.set(Kind::Service, Health::Lost("refused".into()), at(100));
        assert_eq!(problems(&watches, &Progress::default(), true, at(130)), [""; 0]);
        assert_eq!(problems(&watches, &Progress::default(), true, at(131)), ["service"]);
    }
}
