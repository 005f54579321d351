//! Cilium: its maps, and whether and how it balances the guarded services packet by packet.

use std::{collections::BTreeMap, path::Path};

use super::Finding;
use crate::{
    cilium::{AffinityMatch, CiliumMaps, Probe, probe},
    plan::{Desired, EgressName, Mode, ServiceAddress},
};

pub(super) fn maps(directory: &Path) -> Finding {
    const ID: &str = "cilium_maps";
    match CiliumMaps::open(directory) {
        Ok(maps) => {
            let (there, absent): (Vec<_>, Vec<_>) = maps.maps.iter().partition(|open| open.map.is_some());
            let ids: Vec<_> = there
                .iter()
                .filter_map(|open| Some(format!("{} id {}", open.spec.pin_name, open.map.as_ref()?.1)))
                .collect();
            let absent: Vec<_> = absent.iter().map(|open| open.spec.pin_name).collect();
            let meaning = if absent.is_empty() {
                "Every map has the layout that is known.".to_owned()
            } else {
                format!(
                    "They have the layout that is known. Not there, and done without: {}.",
                    absent.join(", ")
                )
            };
            Finding::good(ID, ids.join(", "), meaning)
        }
        Err(error) => Finding::cannot(
            ID,
            error.to_string(),
            if error.is_missing() {
                "Nothing can be guarded before Cilium's maps are there; a running agent binds them when they appear."
            } else {
                "An unknown layout is refused, not guessed."
            },
            format!("Cilium 1.14 or later must run on this node, with its maps in {}.", directory.display()),
        ),
    }
}

/// Looks at the services of a plan. `packets` are those that the program has counted, by Egress.
pub(super) fn services(
    directory: &Path,
    desired: &Desired,
    packets: &BTreeMap<EgressName, u64>,
) -> Vec<Finding> {
    let addresses = desired.services.keys().copied().collect();
    match probe(directory, &addresses) {
        Ok(probe) => judge(desired, &probe, packets),
        // The maps have a finding of their own.
        Err(_) => Vec::new(),
    }
}

fn judge(desired: &Desired, probe: &Probe, packets: &BTreeMap<EgressName, u64>) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (address, service) in &desired.services {
        let found = probe.services.get(address).copied().unwrap_or_default();
        let name = format!("Egress {} ({})", service.egress, display(address));
        if !found.known {
            findings.push(Finding::warning(
                "service",
                format!("Cilium on this node does not know the service of {name}"),
                "Its packets are left alone until Cilium does.",
                "See whether Cilium replaces kube-proxy (kubeProxyReplacement=true) and whether its agent is in step with \
                 the API server.",
            ));
            continue;
        }
        let sent = packets.get(&service.egress).copied().unwrap_or(0);
        findings.push(per_packet(&name, found.entries, sent));
        if service.mode == Mode::Rewrite {
            findings.push(rewrite(&name, found.affinity, probe.affinity_match));
        }
    }
    findings.extend(affinity(probe));
    findings
}

fn display(address: &ServiceAddress) -> String {
    std::net::SocketAddr::new(address.address, address.port).to_string()
}

fn per_packet(name: &str, entries: usize, sent: u64) -> Finding {
    const ID: &str = "per_packet_load_balancing";
    match (entries, sent) {
        (0, 0) => Finding::warning(
            ID,
            format!("no client of {name} on this node has a service entry in Cilium's conntrack map"),
            "Either none has sent a packet for a while, or Cilium balances sockets and not packets; it cannot be told yet.",
            "Send something through the Egress from a pod of this node and check again.",
        ),
        (0, _) => Finding::cannot(
            ID,
            format!(
                "clients of {name} have sent {sent} packets and have no service entry in Cilium's conntrack map"
            ),
            "Cilium balances sockets here, and tunnel packets come from no socket: they are not balanced at all, and there is \
             no entry to move a flow by.",
            "Set Cilium's socketLB.hostNamespaceOnly=true (bpf-lb-sock-hostns-only), as Coil needs it too.",
        ),
        (entries, _) => Finding::good(
            ID,
            format!("{entries} service entries of clients of {name}"),
            "Cilium balances packet by packet, which the guard works on.",
        ),
    }
}

/// Whether another source port makes Cilium choose anew.
fn rewrite(name: &str, affinity: bool, leaving: AffinityMatch) -> Finding {
    const ID: &str = "rewrite";
    let action = "Set spec.sessionAffinity of the Egress to None, or use mode reset, or upgrade Cilium to 1.18 or later.";
    match (affinity, leaving) {
        (false, _) => Finding::good(
            ID,
            format!("{name} has no session affinity"),
            "Cilium chooses anew for each source port, so rewrite can move its flows.",
        ),
        (true, AffinityMatch::Dropped) => Finding::good(
            ID,
            format!("{name} has session affinity, and this Cilium keeps none to a leaving backend"),
            "Cilium chooses anew for another source port, so rewrite can move its flows.",
        ),
        (true, AffinityMatch::Kept) => Finding::cannot(
            ID,
            format!("{name} has session affinity, and this Cilium keeps it to a leaving backend"),
            "A client is sent back to the leaving backend from any source port: rewrite cannot move its flows before Cilium \
             drops that backend.",
            action,
        ),
        (true, AffinityMatch::Unknown) => Finding::warning(
            ID,
            format!("{name} has session affinity, and no backend is leaving now to see what becomes of it"),
            "With Cilium up to 1.17 a client is sent back to a leaving backend from any source port, and rewrite cannot move its \
             flows; with 1.18 and later it can.",
            action,
        ),
    }
}

fn affinity(probe: &Probe) -> Option<Finding> {
    const ID: &str = "affinity_match";
    if !probe.services.values().any(|service| service.affinity) {
        return None;
    }
    Some(match probe.affinity_match {
        AffinityMatch::Kept => Finding::good(
            ID,
            "a leaving backend keeps its affinity match (Cilium up to 1.17)",
            "Only an entry that is changed in place leaves it, which is what reset and drain do.",
        ),
        AffinityMatch::Dropped => Finding::good(
            ID,
            "a leaving backend loses its affinity match (Cilium 1.18 and later)",
            "Reset and drain move flows; so would deleting their entries.",
        ),
        AffinityMatch::Unknown => Finding::good(
            ID,
            "no backend is leaving now, so what becomes of its affinity match cannot be seen",
            "Reset and drain work either way.",
        ),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{check::Level, cilium::ServiceProbe, plan::GuardedService};

    fn egress() -> EgressName {
        EgressName { namespace: "internet".into(), name: "egress".into() }
    }

    fn address() -> ServiceAddress {
        ServiceAddress { address: "10.96.0.10".parse().unwrap(), port: 5555 }
    }

    fn judged(
        mode: Mode,
        found: ServiceProbe,
        affinity_match: AffinityMatch,
        sent: u64,
    ) -> Vec<(&'static str, Level)> {
        let desired = Desired {
            services: [(address(), GuardedService { egress: egress(), mode, sport_auto: false })].into(),
            ..Desired::default()
        };
        let probe = Probe { services: [(address(), found)].into(), affinity_match };
        judge(&desired, &probe, &[(egress(), sent)].into())
            .iter()
            .map(|finding| (finding.id, finding.level))
            .collect()
    }

    #[test]
    fn packets_without_a_service_entry_mean_that_sockets_are_balanced() {
        let known = ServiceProbe { known: true, ..ServiceProbe::default() };
        let some = ServiceProbe { entries: 3, ..known };
        let id = "per_packet_load_balancing";
        assert_eq!(judged(Mode::Reset, known, AffinityMatch::Unknown, 17), [(id, Level::CannotWork)]);
        assert_eq!(judged(Mode::Reset, known, AffinityMatch::Unknown, 0), [(id, Level::Warning)]);
        assert_eq!(judged(Mode::Reset, some, AffinityMatch::Unknown, 17), [(id, Level::Good)]);
        assert!(per_packet("x", 0, 1).action.contains("socketLB.hostNamespaceOnly=true"));
    }

    #[test]
    fn a_service_that_cilium_does_not_know_is_a_warning() {
        let unknown = ServiceProbe::default();
        assert_eq!(judged(Mode::Reset, unknown, AffinityMatch::Unknown, 0), [("service", Level::Warning)]);
    }

    #[test]
    fn whether_rewrite_can_work_is_told_by_what_affinity_does() {
        let none = ServiceProbe { known: true, entries: 1, ..ServiceProbe::default() };
        let some = ServiceProbe { affinity: true, ..none };
        for (found, leaving, level) in [
            (none, AffinityMatch::Kept, Level::Good),
            (some, AffinityMatch::Dropped, Level::Good),
            (some, AffinityMatch::Unknown, Level::Warning),
            (some, AffinityMatch::Kept, Level::CannotWork),
        ] {
            let judged = judged(Mode::Rewrite, found, leaving, 1);
            assert!(judged.contains(&("rewrite", level)), "{judged:?}");
        }
        assert!(!judged(Mode::Reset, some, AffinityMatch::Kept, 1).iter().any(|(id, _)| *id == "rewrite"));
    }

    #[test]
    fn a_kept_affinity_match_is_told_and_hinders_nothing() {
        let found = ServiceProbe { known: true, affinity: true, entries: 1 };
        for mode in [Mode::Reset, Mode::Drain] {
            assert_eq!(judged(mode, found, AffinityMatch::Kept, 1)[1], ("affinity_match", Level::Good));
        }
    }
}
