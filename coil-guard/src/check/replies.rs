//! Whether replies are symmetric in mode rewrite.

use std::collections::BTreeMap;

use super::Finding;
use crate::{
    datapath::ReplySnapshot,
    plan::{Desired, EgressName, Mode},
};

const ID: &str = "rewrite_replies";

/// What is to be seen of one Egress on this node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Sides {
    sport_auto: bool,
    clients: usize,
    returning: usize,
    egress_pods: usize,
    answering: usize,
}

/// A finding for each Egress in mode rewrite that has clients or pods here.
pub(super) fn check(desired: &Desired, replies: &ReplySnapshot) -> Vec<Finding> {
    let mut sides: BTreeMap<&EgressName, Sides> = BTreeMap::new();
    for service in desired.services.values().filter(|service| service.mode == Mode::Rewrite) {
        sides.entry(&service.egress).or_default().sport_auto = service.sport_auto;
    }
    for (uid, client) in &desired.pods {
        for egress in &client.egresses {
            let Some(sides) = sides.get_mut(egress) else { continue };
            sides.clients += 1;
            sides.returning += usize::from(replies.clients.contains_key(uid));
        }
    }
    for (uid, pod) in &desired.egress_pods {
        let sides = sides.entry(&pod.egress).or_default();
        sides.egress_pods += 1;
        sides.answering += usize::from(replies.egress_pods.contains_key(uid));
    }
    sides.into_iter().map(|(egress, sides)| finding(egress, sides)).collect()
}

fn finding(egress: &EgressName, sides: Sides) -> Finding {
    const ASYMMETRIC: &str = "come from the pod's own address to the FoU port: that needs Coil 2.4.0 or later, and NetworkPolicies \
                              of clients and egress pods that allow UDP to it both ways";
    if sides.sport_auto {
        return Finding::good(
            ID,
            format!(
                "replies of Egress {egress} come from ports of their own (fouSourcePortAuto), with or without the guard"
            ),
            format!("They {ASYMMETRIC}, as without the guard."),
        );
    }
    let Sides { clients, returning, egress_pods, answering, .. } = sides;
    let found = format!(
        "replies of Egress {egress} are turned back for {returning} of {clients} clients here, and sent to the ports that clients \
         were given by {answering} of {egress_pods} egress pods here"
    );
    let meaning = format!(
        "With both ends guarded Cilium and NetworkPolicies see replies of the same flow. Replies of egress pods on other nodes are \
         such where the guard runs there; else they {ASYMMETRIC}."
    );
    if (returning, answering) == (clients, egress_pods) {
        return Finding::good(ID, found, meaning);
    }
    Finding::warning(
        ID,
        found,
        meaning,
        "A running agent attaches the missing programs within seconds; if it does not, its log says why.",
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        check::Level,
        clock::Monotonic,
        datapath::{Attachment, PodSnapshot},
        plan::{ClientPod, GuardedService, LocalEgressPod, ServiceAddress, Want},
    };

    fn egress() -> EgressName {
        EgressName { namespace: "internet".into(), name: "nat".into() }
    }

    fn desired(sport_auto: bool) -> Desired {
        let address = ServiceAddress { address: [10, 96, 0, 10].into(), port: 5555 };
        let service = GuardedService { egress: egress(), mode: Mode::Rewrite, sport_auto };
        let client = ClientPod {
            namespace: "app".into(),
            name: "client".into(),
            addresses: [[10, 0, 0, 1].into()].into(),
            want: Want::Attached,
            egresses: [egress()].into(),
            read_only: true,
            symmetric: !sport_auto,
        };
        let pod = LocalEgressPod {
            namespace: "internet".into(),
            name: "nat-0".into(),
            addresses: [[10, 0, 1, 1].into()].into(),
            egress: egress(),
        };
        Desired {
            services: [(address, service)].into(),
            pods: [("c".to_owned(), client)].into(),
            egress_pods: if sport_auto { BTreeMap::new() } else { [("e".to_owned(), pod)].into() },
            ..Desired::default()
        }
    }

    fn attached() -> PodSnapshot {
        PodSnapshot {
            name: "app/client".into(),
            addresses: Vec::new(),
            attachment: Attachment::Tcx,
            interface_index: 2,
            guarded_since: Monotonic(1),
            program_id: 7,
            core: "return",
            ports_overlap: false,
        }
    }

    #[test]
    fn both_sides_are_counted_and_what_is_missing_is_a_warning() {
        let mut replies = ReplySnapshot::default();
        let found = check(&desired(false), &replies);
        assert_eq!((found.len(), found[0].level), (1, Level::Warning));
        assert!(found[0].found.contains("0 of 1 clients here"), "{}", found[0].found);
        replies.clients.insert("c".into(), attached());
        replies.egress_pods.insert("another".into(), attached());
        assert_eq!(check(&desired(false), &replies)[0].level, Level::Warning);
        replies.egress_pods.insert("e".into(), attached());
        let found = check(&desired(false), &replies);
        assert_eq!(found[0].level, Level::Good);
        assert!(found[0].found.contains("1 of 1 egress pods here"), "{}", found[0].found);
    }

    #[test]
    fn ports_of_their_own_and_other_modes() {
        let found = check(&desired(true), &ReplySnapshot::default());
        assert_eq!((found.len(), found[0].level), (1, Level::Good));
        assert!(found[0].found.contains("fouSourcePortAuto"), "{}", found[0].found);
        let mut reset = desired(false);
        reset.services.values_mut().for_each(|service| service.mode = Mode::Reset);
        reset.egress_pods.clear();
        assert_eq!(check(&reset, &ReplySnapshot::default()), []);
    }
}
