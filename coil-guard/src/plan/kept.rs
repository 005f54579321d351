//! A plan that is kept up to date is the one that would be made from nothing, whatever has happened since, and the changes that
//! it tells of are those between the two.

use std::{net::IpAddr, time::Duration};

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::index::{Change, Update, testing::*};

const EGRESSES: u8 = 3;
const ADDRESSES: u8 = 4;
const CLIENTS: u8 = 3;

#[derive(Clone, Debug)]
enum Step {
    Egress {
        egress: u8,
        mode: u8,
        after: u8,
        auto: bool,
    },
    EgressGone(u8),
    Service {
        egress: u8,
        address: u8,
    },
    ServiceGone(u8),
    Slice {
        egress: u8,
        endpoints: Vec<(u8, u8, u8)>,
    },
    Pod {
        pod: u8,
        egress: u8,
        deleting: bool,
    },
    PodGone(u8),
    Client {
        client: u8,
        address: u8,
        egresses: u8,
        created: u8,
    },
    ClientGone(u8),
    Attached(u8),
    Detached(u8),
    Wait(u16),
    Cilium {
        forgotten: bool,
        address: u8,
    },
    Complete(bool),
    /// The plan is made.
    Plan,
}

fn step() -> impl Strategy<Value = Step> {
    let endpoint = (0..ADDRESSES, 0u8..6, 0u8..8);
    prop_oneof![
        2 => (0..EGRESSES, 0u8..6, 0u8..3, any::<bool>())
            .prop_map(|(egress, mode, after, auto)| Step::Egress { egress, mode, after, auto }),
        1 => (0..EGRESSES).prop_map(Step::EgressGone),
        2 => (0..EGRESSES, 0u8..4).prop_map(|(egress, address)| Step::Service { egress, address }),
        1 => (0..EGRESSES).prop_map(Step::ServiceGone),
        6 => (0..EGRESSES, prop::collection::vec(endpoint, 0..4))
            .prop_map(|(egress, endpoints)| Step::Slice { egress, endpoints }),
        2 => (0u8..6, 0..EGRESSES, any::<bool>())
            .prop_map(|(pod, egress, deleting)| Step::Pod { pod, egress, deleting }),
        1 => (0u8..6).prop_map(Step::PodGone),
        3 => (0..CLIENTS, 0u8..3, 0u8..8, 0u8..3)
            .prop_map(|(client, address, egresses, created)| Step::Client { client, address, egresses, created }),
        1 => (0..CLIENTS).prop_map(Step::ClientGone),
        1 => (0..CLIENTS).prop_map(Step::Attached),
        1 => (0..CLIENTS).prop_map(Step::Detached),
        2 => prop_oneof![Just(100u16), Just(900), Just(1100), Just(31_000)].prop_map(Step::Wait),
        1 => (any::<bool>(), 0..ADDRESSES).prop_map(|(forgotten, address)| Step::Cilium { forgotten, address }),
        1 => any::<bool>().prop_map(Step::Complete),
        8 => Just(Step::Plan),
    ]
}

fn egress_name(egress: u8) -> String {
    format!("nat{egress}")
}

fn backend(address: u8) -> String {
    format!("10.0.1.{}", address + 1)
}

fn client_uid(client: u8) -> String {
    format!("uid-client{client}")
}

/// Everything that a plan is made of.
struct World {
    index: Index,
    planner: Planner,
    attached: BTreeSet<PodUid>,
    complete: bool,
    now: Monotonic,
    /// The last plan, by its changes.
    followed: Desired,
}

impl World {
    fn new() -> Self {
        // One Egress with a client, so that not every history begins with nothing.
        let mut world = Self {
            index: Index::default(),
            planner: Planner::new(Settings::default(), BTreeSet::new()),
            attached: BTreeSet::new(),
            complete: true,
            now: at(1_000_000),
            followed: Desired::default(),
        };
        for step in [
            Step::Egress { egress: 0, mode: 2, after: 0, auto: false },
            Step::Service { egress: 0, address: 0 },
            Step::Client { client: 0, address: 0, egresses: 1, created: 0 },
        ] {
            world.take(&step);
        }
        world
    }

    fn take(&mut self, step: &Step) {
        let (index, now) = (&mut self.index, self.now);
        match step {
            Step::Egress { egress, mode, after, auto } => {
                let modes = ["off", "audit", "reset", "drain", "rewrite", "nonsense"];
                let after = ["30s", "0s", "never"][usize::from(*after)];
                let annotations = [
                    ("coil-guard.io/mode", modes[usize::from(*mode)]),
                    ("coil-guard.io/not-ready-after", after),
                ];
                let mut object = api_egress(&egress_name(*egress), &annotations);
                object.spec = serde_json::from_value(json!({"fouSourcePortAuto": auto})).unwrap();
                index.egress_is(&object, now);
            }
            Step::EgressGone(egress) => {
                index.update(Update::Egress(Change::Delete(named(&egress_name(*egress)))), now);
            }
            Step::Service { egress, address } => {
                let address = format!("10.96.0.{}", address + 1);
                index.service_is(&api_service(&egress_name(*egress), &[&address]), now);
            }
            Step::ServiceGone(egress) => {
                index.update(Update::Service(Change::Delete(named(&egress_name(*egress)))), now);
            }
            Step::Slice { egress, endpoints } => {
                let endpoints: Vec<Value> = endpoints
                    .iter()
                    .map(|(at, pod, conditions)| {
                        let set: Vec<&str> = ["r", "s", "t"]
                            .into_iter()
                            .enumerate()
                            .filter(|(bit, _)| conditions >> bit & 1 == 1)
                            .map(|(_, condition)| condition)
                            .collect();
                        endpoint(&backend(*at), &pod.to_string(), &set.join(" "))
                    })
                    .collect();
                let egress = egress_name(*egress);
                index.slice_is(&api_slice(&egress, &egress, &endpoints), now);
            }
            Step::Pod { pod, egress, deleting } => {
                let mut patch = if *deleting { deleted(30) } else { json!({}) };
                patch["metadata"]["labels"] = json!({"app.kubernetes.io/instance": egress_name(*egress)});
                index.pod_is(&api_egress_pod(&pod.to_string(), &[&backend(pod % ADDRESSES)], &patch), now);
                // It is on this node as well.
                if *pod < CLIENTS {
                    self.take(&Step::Client { client: *pod, address: *pod, egresses: 0, created: 0 });
                }
            }
            Step::PodGone(pod) => index.pod_is_gone(&pod.to_string(), now),
            Step::Client { client, address, egresses, created } => {
                let named: Vec<String> =
                    (0..EGRESSES).filter(|egress| egresses >> egress & 1 == 1).map(egress_name).collect();
                // Every other one has the UID of an egress pod.
                let uid = if client % 2 == 0 { client_uid(*client) } else { client.to_string() };
                let mut patch = json!({"metadata": {
                    "uid": uid, "creationTimestamp": format!("2026-01-01T00:00:0{created}Z"),
                }});
                if named.is_empty() {
                    patch["metadata"]["annotations"] = Value::Null;
                }
                let address = format!("10.0.0.{}", address + 1);
                index.client_is(
                    &api_client(&format!("client{client}"), &address, &named.join(","), &patch),
                    now,
                );
            }
            Step::ClientGone(client) => {
                let name = EgressName { namespace: "app".into(), name: format!("client{client}").into() };
                index.update(Update::LocalPod(Change::Delete(name)), now);
            }
            Step::Attached(client) => {
                self.attached.insert(client_uid(*client));
                self.planner.attached(client_uid(*client));
            }
            Step::Detached(client) => {
                self.attached.remove(&client_uid(*client));
                self.planner.detached(&client_uid(*client));
            }
            Step::Wait(millis) => self.now = now.saturating_add(Duration::from_millis((*millis).into())),
            Step::Cilium { forgotten, address } => {
                let service = ServiceAddress { address: ip("10.96.0.1"), port: FOU_PORT };
                let view = CiliumView {
                    slots: BTreeMap::from([(service, BTreeSet::from([ip(&backend(*address))]))]),
                    forgotten: if *forgotten { index.lingering() } else { BTreeSet::new() },
                };
                index.observe_cilium(&view, true, now);
            }
            Step::Complete(complete) => self.complete = *complete,
            Step::Plan => {}
        }
    }

    /// The kept plan, the one from nothing, and what the changes make of the former one.
    fn plans(&mut self) -> (Desired, Desired) {
        let changes = self.planner.update(&mut self.index, self.complete, self.now);
        let kept = self.planner.desired().clone();
        let anew = plan(&self.index, &Settings::default(), &self.attached, self.complete, self.now);
        for (address, before) in &changes.marks {
            assert_eq!(self.followed.marks.get(address), before.as_ref(), "{address}");
            let now = kept.marks.get(address).cloned();
            assert_ne!(&now, before, "{address} has not changed");
            self.followed.marks.remove(address);
            self.followed.marks.extend(now.map(|mark| (*address, mark)));
        }
        if let Some(before) = &changes.services {
            assert_eq!(&self.followed.services, before);
            assert_ne!(&kept.services, before);
            self.followed.services = kept.services.clone();
        }
        let pods = (kept.pods.clone(), kept.egress_pods.clone());
        assert_eq!(pods != (self.followed.pods.clone(), self.followed.egress_pods.clone()), changes.pods);
        (self.followed.pods, self.followed.egress_pods) = pods;
        (self.followed.complete, self.followed.next_change) = (kept.complete, kept.next_change);
        assert_eq!(self.followed, kept, "the changes are not all");
        (kept, anew)
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1024, ..ProptestConfig::default() })]

    #[test]
    fn a_plan_kept_up_to_date_is_the_one_made_from_nothing(steps in prop::collection::vec(step(), 1..80)) {
        let mut world = World::new();
        for step in steps.iter().chain([&Step::Plan]) {
            world.take(step);
            if matches!(step, Step::Plan) {
                let (kept, anew) = world.plans();
                prop_assert_eq!(kept, anew);
            }
        }
    }
}

#[test]
fn one_changed_backend_is_one_changed_mark_whatever_else_there_is() {
    let mut index = running("reset");
    for client in 0..100 {
        index.client_is(
            &api_client(&format!("c{client}"), &format!("10.0.3.{client}"), EGRESS, &json!({})),
            at(0),
        );
    }
    let mut planner = Planner::new(Settings::default(), BTreeSet::new());
    planner.update(&mut index, true, at(1));
    assert_eq!(planner.desired().pods.len(), 101);
    index.pod_is(&api_egress_pod("a", &["10.0.1.1"], &deleted(30)), at(2));
    let touched: Vec<IpAddr> = index.clone().take_touched().backends.into_values().flatten().collect();
    assert_eq!(touched, [ip("10.0.1.1")]);
    let changes = planner.update(&mut index, true, at(2));
    assert_eq!(changes.marks.keys().collect::<Vec<_>>(), [&ip("10.0.1.1")]);
    assert_eq!((changes.services, changes.pods), (None, false));
    assert!(planner.update(&mut index, true, at(3)).is_empty());
}
