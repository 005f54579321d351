//! Random histories of egress pods, told by two streams in any interleaving, with events left out as a batching controller
//! or a relist leaves them out, and repeated. Whatever the telling, the plan must come out as the final state alone gives it.

use std::net::IpAddr;

use proptest::{prelude::*, sample::Index as Pick};
use serde_json::json;

use super::*;
use crate::index::{Change, Update, egress_pod, slice, testing::*};

/// What happens to a pod.
#[derive(Clone, Copy, Debug)]
enum Step {
    Create,
    Ready,
    NotReady,
    Delete(i64),
    Finish,
    Remove,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => Just(Step::Create),
        3 => Just(Step::Ready),
        1 => Just(Step::NotReady),
        2 => prop_oneof![Just(0i64), Just(30), Just(300)].prop_map(Step::Delete),
        1 => Just(Step::Finish),
        2 => Just(Step::Remove),
    ]
}

#[derive(Clone, Debug)]
struct Pod {
    uid: String,
    address: String,
    ready: bool,
    deleting: Option<i64>,
    finished: bool,
}

impl Pod {
    fn object(&self) -> crate::index::ApiPod {
        let mut patch = self.deleting.map_or(json!({}), deleted);
        let phase = if self.finished { "Failed" } else { "Running" };
        let ready = if self.ready { "True" } else { "False" };
        patch["status"] = json!({"phase": phase, "conditions": [{"type": "Ready", "status": ready}]});
        api_egress_pod(&self.uid, &[&self.address], &patch)
    }
}

/// A place where one pod at a time lives; the next one there has the same address when the place is shared.
type Places = Vec<Option<Pod>>;

const PLACES: usize = 4;
/// This place gives its address on to the next pod; the others take a new one.
const SHARED: usize = 0;

/// The two streams that the API server would send.
#[derive(Debug, Default)]
struct History {
    pods: Vec<Update>,
    slices: Vec<Update>,
    last: Places,
}

fn slice_updates(places: &Places) -> Vec<Update> {
    // Two slices; a pod stays in the one that its place belongs to.
    (0..2)
        .map(|half| {
            let here = places.iter().skip(half).step_by(2).flatten().filter(|pod| !pod.finished);
            let endpoints: Vec<_> = here
                .map(|pod| {
                    let terminating = pod.deleting.is_some();
                    let conditions = [(pod.ready && !terminating, "r"), (pod.ready, "s"), (terminating, "t")];
                    let set: Vec<&str> =
                        conditions.iter().filter(|(set, _)| *set).map(|(_, name)| *name).collect();
                    endpoint(&pod.address, &pod.uid, &set.join(" "))
                })
                .collect();
            let (name, slice) = slice(&api_slice(&format!("s{half}"), EGRESS, &endpoints), FOU_PORT).unwrap();
            Update::Slice(Change::Apply(name, slice))
        })
        .collect()
}

fn pod_update(pod: &Pod) -> Update {
    let (name, pod) = egress_pod(&pod.object()).unwrap();
    Update::EgressPod(Change::Apply(name, pod))
}

fn history(steps: &[(usize, Step)]) -> History {
    let mut history = History { last: vec![None; PLACES], ..History::default() };
    for (number, (place, step)) in steps.iter().enumerate() {
        let slot = &mut history.last[*place];
        match (step, slot.as_mut()) {
            (Step::Create, None) => {
                let address = if *place == SHARED {
                    "10.0.1.1".to_owned()
                } else {
                    format!("10.0.{}.{}", place + 1, number + 1)
                };
                let uid = format!("{place}-{number}");
                *slot = Some(Pod { uid, address, ready: false, deleting: None, finished: false });
            }
            (Step::Ready, Some(pod)) if !pod.finished => pod.ready = true,
            (Step::NotReady, Some(pod)) => pod.ready = false,
            (Step::Delete(grace), Some(pod)) => {
                pod.deleting = Some(pod.deleting.map_or(*grace, |earlier| earlier.min(*grace)));
            }
            (Step::Finish, Some(pod)) => (pod.finished, pod.ready) = (true, false),
            (Step::Remove, Some(pod)) => {
                history.pods.push(Update::EgressPod(Change::Delete(named(&format!("pod-{}", pod.uid)))));
                *slot = None;
            }
            _ => continue,
        }
        if let Some(pod) = slot {
            history.pods.push(pod_update(pod));
        }
        history.slices.extend(slice_updates(&history.last));
    }
    history
}

fn base() -> Index {
    let mut index = running("drain");
    index.update(Update::EgressPod(Change::Reset(vec![])), at(0));
    index.update(Update::Slice(Change::Reset(vec![])), at(0));
    index.cilium_has(&[], true, at(0));
    index
}

/// The plan, with what Cilium has long forgotten forgotten.
fn settled(index: &mut Index) -> Desired {
    index.cilium_has(&[], true, NOW);
    plan(index, &Settings::default(), &BTreeSet::new(), true, NOW)
}

const NOW: Monotonic = Monotonic(1_000_000_000_000);

fn final_plan(last: &Places) -> Desired {
    let mut index = base();
    let pods = last.iter().flatten().map(|pod| egress_pod(&pod.object()).unwrap());
    index.update(Update::EgressPod(Change::Reset(pods.map(|(name, pod)| (name, Some(pod))).collect())), NOW);
    for update in slice_updates(last) {
        index.update(update, NOW);
    }
    settled(&mut index)
}

/// Delivers both streams in an interleaving, leaving out slice events (never the last ones) and repeating some, and calls
/// `each` after every event.
fn deliver(history: &History, choices: &[(bool, u8)], index: &mut Index, mut each: impl FnMut(&Index)) {
    let mut choices = choices.iter().cycle();
    let (mut pods, mut slices) = (history.pods.iter(), history.slices.iter().enumerate());
    let last_of_each = history.slices.len().saturating_sub(2);
    loop {
        let (pod_first, whim) = choices.next().copied().unwrap_or((true, 0));
        let next = if pod_first {
            pods.next().map(|update| (update, true))
        } else {
            slices.next().map(|(number, update)| (update, number >= last_of_each || whim > 80))
        };
        match next {
            Some((update, told)) => {
                for _ in 0..if told { 1 + usize::from(whim % 5 == 0) } else { 0 } {
                    index.update(update.clone(), NOW);
                    each(index);
                }
            }
            None if pods.len() == 0 && slices.len() == 0 => return,
            None => {}
        }
    }
}

fn steps() -> impl Strategy<Value = Vec<(usize, Step)>> {
    prop::collection::vec((0..PLACES, step()), 0..40)
}

fn choices() -> impl Strategy<Value = Vec<(bool, u8)>> {
    // Both values of the first part, or one stream would never end.
    prop::collection::vec(any::<(bool, u8)>(), 1..60).prop_map(|mut choices| {
        choices.extend([(true, 100), (false, 100)]);
        choices
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    #[test]
    fn any_telling_of_a_history_ends_in_the_same_plan(steps in steps(), choices in choices()) {
        let history = history(&steps);
        let mut index = base();
        deliver(&history, &choices, &mut index, |_| {});
        prop_assert_eq!(settled(&mut index), final_plan(&history.last));
    }

    #[test]
    fn a_relist_in_the_middle_changes_nothing(steps in steps(), choices in choices(), at in any::<Pick>()) {
        let history = history(&steps);
        let mut index = base();
        deliver(&history, &choices, &mut index, |_| {});
        // The same objects listed anew, those unchanged and those that the watch had missed.
        let earlier = self::history(&steps[..at.index(steps.len() + 1)]);
        let listed = |last: &Places| last.iter().flatten().map(|pod| {
            let (name, pod) = egress_pod(&pod.object()).unwrap();
            (name, Some(pod))
        }).collect();
        index.update(Update::EgressPod(Change::Reset(listed(&earlier.last))), NOW);
        index.update(Update::EgressPod(Change::Reset(listed(&history.last))), NOW);
        prop_assert_eq!(settled(&mut index), final_plan(&history.last));
    }

    #[test]
    fn a_pod_that_is_alive_and_ready_is_never_marked_as_leaving(steps in steps(), choices in choices()) {
        let history = history(&steps);
        // Alive and ready to the end, at an address that no other pod had.
        let never = |uid: &String, wanted: fn(&Step) -> bool| {
            let (place, created) = uid.split_once('-').unwrap();
            let (place, created): (usize, usize) = (place.parse().unwrap(), created.parse().unwrap());
            !steps.iter().skip(created).any(|(at, step)| *at == place && wanted(step))
        };
        let alive: Vec<IpAddr> = history.last.iter().enumerate().skip(SHARED + 1).filter_map(|(_, pod)| pod.as_ref())
            .filter(|pod| pod.ready && never(&pod.uid, |step| matches!(step, Step::Delete(_) | Step::Finish)))
            .map(|pod| ip(&pod.address))
            .collect();
        let mut index = base();
        let mut wrong = Vec::new();
        deliver(&history, &choices, &mut index, |index| {
            let desired = plan(index, &Settings::default(), &BTreeSet::new(), true, NOW);
            wrong.extend(alive.iter().filter_map(|address| desired.marks.get(address)).filter(|mark| {
                matches!(mark.state, MarkState::Leaving | MarkState::Gone)
            }).cloned());
        });
        prop_assert!(wrong.is_empty(), "{wrong:?}");
    }

    #[test]
    fn a_pod_known_to_be_leaving_is_never_ready_again(steps in steps(), choices in choices()) {
        let history = history(&steps);
        let mut index = base();
        let mut left: BTreeSet<IpAddr> = BTreeSet::new();
        let mut back = Vec::new();
        let shared = ip("10.0.1.1");
        deliver(&history, &choices, &mut index, |index| {
            let desired = plan(index, &Settings::default(), &BTreeSet::new(), true, NOW);
            for (address, mark) in desired.marks.iter().filter(|(address, _)| **address != shared) {
                match mark.state {
                    MarkState::Leaving | MarkState::Gone => drop(left.insert(*address)),
                    MarkState::Ready if left.contains(address) => back.push(*address),
                    _ => {}
                }
            }
        });
        prop_assert!(back.is_empty(), "{back:?}");
    }
}
