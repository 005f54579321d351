//! Behaviour of Cilium that was observed or read but is in no recording: counts of zero, entries of another service,
//! entries that somebody else made, timeouts, and flows that a backend opened.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use coil_guard_common::cilium::CtEntry;
use coil_guard_tests::{
    cilium::{
        BackendState, CiliumVersion, DEFAULT_AFFINITY, Expect, IpFamily, MatchPolicy, Policy, model::Stat,
    },
    fou::{FOU_PORT, FrameSender, InnerPacket, Outer, StreamReport, Tag},
    lab::{FlowTuple, Lab},
    net::lab_test,
};
use zerocopy::IntoBytes as _;

const FAMILIES: [IpFamily; 2] = [IpFamily::V4, IpFamily::V6];

fn send(lab: &Lab, family: IpFamily, port: u16, count: u64) -> Result<StreamReport> {
    lab.stream(0, lab.spec(0, family).source_port(port).count(count))?.finish(false)
}

fn bound(lab: &Lab, family: IpFamily, port: u16) -> Result<usize> {
    lab.bound_backend(0, family, port)?.context("no service entry")
}

#[test]
fn without_a_selectable_slot_established_flows_go_on_and_new_ones_are_dropped() -> Result<()> {
    lab_test(|| {
        let mut lab = Lab::builder().backends(1).start()?;
        for family in FAMILIES {
            send(&lab, family, 5600, 5)?.ensure_exactly_once()?;
        }
        // Not terminating, which would be a fallback.
        lab.set_backend(0, BackendState::Quarantined)?;
        for family in FAMILIES {
            send(&lab, family, 5600, 5)?.ensure_exactly_once()?;
            ensure!(send(&lab, family, 5601, 5)?.lost().len() == 5, "a new flow got through");
            lab.delete_service_entry(0, family, 5600)?;
            ensure!(send(&lab, family, 5600, 5)?.lost().len() == 5, "a flow that was reset got through");
        }
        ensure!(
            lab.model.stat(Stat::DropNoService)? == 20,
            "{} dropped",
            lab.model.stat(Stat::DropNoService)?
        );
        Ok(())
    })
}

#[test]
fn old_patch_releases_drop_established_flows_too() -> Result<()> {
    lab_test(|| {
        let mut lab = Lab::builder().version(CiliumVersion::V1_15).backends(1).start()?;
        lab.model.configure(|settings| settings.early_count_check = 1)?;
        for family in FAMILIES {
            send(&lab, family, FOU_PORT, 5)?.ensure_exactly_once()?;
        }
        lab.set_backend(0, BackendState::Quarantined)?;
        for family in FAMILIES {
            ensure!(
                send(&lab, family, FOU_PORT, 5)?.lost().len() == 5,
                "{family:?}: an established flow got through"
            );
        }
        Ok(())
    })
}

#[test]
fn all_terminating_backends_are_better_than_none() -> Result<()> {
    lab_test(|| {
        let mut lab = Lab::builder().backends(2).start()?;
        lab.set_backend(0, BackendState::Terminating)?;
        lab.set_backend(1, BackendState::Terminating)?;
        for family in FAMILIES {
            send(&lab, family, FOU_PORT, 5)?.ensure_exactly_once()?;
        }
        Ok(())
    })
}

#[test]
fn the_entry_of_another_service_is_new_from_1_16_and_corrected_before() -> Result<()> {
    for (version, packets) in
        [(CiliumVersion::V1_15, 0), (CiliumVersion::V1_16, 3), (CiliumVersion::V1_20, 3)]
    {
        lab_test(move || {
            let lab = Lab::builder().version(version).start()?;
            for family in FAMILIES {
                let strange = CtEntry { packets: 100, ..CtEntry::for_backend(1, 99u16.to_be_bytes()) };
                lab.set_service_entry(0, family, FOU_PORT, &strange, Expect::Absent)?;
                send(&lab, family, FOU_PORT, 3)?.ensure_exactly_once()?;
                let entry = lab.service_entry(0, family, FOU_PORT)?.context("no entry")?;
                let rev_nat = lab.control.service(lab.service_id(family)).rev_nat;
                ensure!(entry.rev_nat_index == rev_nat.to_be_bytes(), "{version}: {entry:?}");
                // 1.15 does not count in service entries, so that the strange number stays.
                let expected = if packets == 0 { 100 } else { packets };
                ensure!(
                    entry.packets == expected,
                    "{version}: {} packets, expected {expected}",
                    entry.packets
                );
            }
            Ok(())
        })?;
    }
    Ok(())
}

#[test]
fn an_entry_that_names_a_missing_backend_is_corrected_in_place() -> Result<()> {
    for version in CiliumVersion::ALL {
        lab_test(move || {
            let lab = Lab::builder().version(version).start()?;
            for family in FAMILIES {
                let rev_nat = lab.control.service(lab.service_id(family)).rev_nat.to_be_bytes();
                let dangling = CtEntry { src_sec_id: 4711, ..CtEntry::for_backend(999, rev_nat) };
                lab.set_service_entry(0, family, FOU_PORT, &dangling, Expect::Absent)?;
                let report = send(&lab, family, FOU_PORT, 10)?;
                report.ensure_exactly_once()?;
                let entry = lab.service_entry(0, family, FOU_PORT)?.context("no entry")?;
                ensure!(entry.src_sec_id == 4711, "{version}: it was made anew: {entry:?}");
                ensure!(
                    report.per_backend().keys().eq([&bound(&lab, family, FOU_PORT)?]),
                    "{version}: {report:?}"
                );
            }
            Ok(())
        })?;
    }
    Ok(())
}

#[test]
fn an_entry_with_nothing_but_a_backend_is_honoured_and_takes_affinity_along() -> Result<()> {
    for version in CiliumVersion::ALL {
        lab_test(move || {
            let mut lab = Lab::builder()
                .version(version)
                .affinity(Some(DEFAULT_AFFINITY))
                .match_policy(MatchPolicy::Kept)
                .start()?;
            for family in FAMILIES {
                send(&lab, family, FOU_PORT, 3)?.ensure_exactly_once()?;
                let leaving = bound(&lab, family, FOU_PORT)?;
                let other = (leaving + 1) % 3;
                lab.set_backend(leaving, BackendState::Terminating)?;
                let id = lab.backend_id(family, other)?;
                let rev_nat = lab.control.service(lab.service_id(family)).rev_nat.to_be_bytes();
                lab.set_service_entry(0, family, 5600, &CtEntry::for_backend(id, rev_nat), Expect::Absent)?;
                let report = send(&lab, family, 5600, 3)?;
                ensure!(report.arrived_at(other).len() == 3, "{version}: {report:?}, not all at {other}");
                let entry = lab.service_entry(0, family, 5600)?.context("no entry")?;
                ensure!(entry.lifetime > 0, "{version}: no lifetime: {entry:?}");
                let affinity = lab.affinity(0, family)?.context("no affinity")?;
                ensure!(affinity.backend_id == id, "{version}: {affinity:?}, expected backend {id}");
                lab.set_backend(leaving, BackendState::Active)?;
            }
            Ok(())
        })?;
    }
    Ok(())
}

#[test]
fn an_egress_entry_with_nothing_but_a_rev_nat_index_lets_replies_in() -> Result<()> {
    lab_test(|| {
        let lab = Lab::builder().policy(Policy::DefaultDeny).backends(1).start()?;
        for family in FAMILIES {
            // From 5600, while replies go to the FoU port: they belong to no flow.
            ensure!(send(&lab, family, 5600, 5)?.replies().is_empty(), "replies came in against the policy");
            let flow = FlowTuple {
                client: (lab.client(0).address(family), FOU_PORT),
                destination: (lab.backend(0).address(family), FOU_PORT),
            };
            let rev_nat = lab.control.service(lab.service_id(family)).rev_nat.to_be_bytes();
            let entry = CtEntry::for_replies(rev_nat, 1);
            lab.maps.conntrack(family)?.update_bytes(
                &flow.egress_key()?,
                entry.as_bytes(),
                Expect::Absent,
            )?;
            send(&lab, family, 5600, 5)?.ensure_answered_by(lab.service(family))?;
            let entry = lab.egress_entry(0, family, FOU_PORT, 0)?.context("no entry")?;
            ensure!(entry.lifetime > 1, "an expired lifetime was not refreshed: {entry:?}");
        }
        Ok(())
    })
}

#[test]
fn affinity_ends_with_its_timeout() -> Result<()> {
    lab_test(|| {
        let mut lab = Lab::builder().affinity(Some(Duration::from_secs(60))).start()?;
        for family in FAMILIES {
            lab.model.pick(Some(1))?;
            send(&lab, family, FOU_PORT, 1)?.ensure_exactly_once()?;
            lab.model.pick(Some(2))?;
            ensure!(send(&lab, family, 5600, 1)?.arrived_at(0).len() == 1, "affinity did not hold");
            // The client was silent since second 1 of the clock.
            let map = lab.maps.get(family.names().affinity)?;
            let (key, mut value) = map.dump()?.pop_first().context("no affinity")?;
            value[..8].copy_from_slice(&1u64.to_ne_bytes());
            map.update_bytes(&key, &value, Expect::Present)?;
            ensure!(send(&lab, family, 5601, 1)?.arrived_at(1).len() == 1, "affinity held after its timeout");
            ensure!(send(&lab, family, 5700, 1)?.arrived_at(1).len() == 1, "the new choice has no affinity");
        }
        Ok(())
    })
}

#[test]
fn services_without_a_protocol_are_found_by_every_version() -> Result<()> {
    for version in CiliumVersion::ALL {
        lab_test(move || {
            let lab = Lab::builder().version(version).service_protocol(0).start()?;
            for family in FAMILIES {
                send(&lab, family, FOU_PORT, 3)?.ensure_answered_by(lab.service(family))?;
            }
            Ok(())
        })?;
    }
    Ok(())
}

#[test]
fn a_flow_that_the_backend_opened_hides_the_service_up_to_1_16() -> Result<()> {
    for version in [CiliumVersion::V1_14, CiliumVersion::V1_16, CiliumVersion::V1_17, CiliumVersion::V1_20] {
        lab_test(move || {
            let lab = Lab::builder().version(version).backends(1).start()?;
            for family in FAMILIES {
                let (client, backend) = (lab.client(0).address(family), lab.backend(0).address(family));
                let stream = lab.log.new_stream();
                let inner = InnerPacket::udp((backend, 1), (client, 2)).build(Tag { stream, sequence: 0 });
                let outer = Outer::coil((backend, FOU_PORT), (client, FOU_PORT));
                FrameSender::open(lab.backend(0))?.send(&outer, &inner)?;
                let came = lab.log.wait(lab.patience(), |state| state.streams[&stream].at_clients == 1);
                ensure!(came, "the backend's packet did not come");
                let report = send(&lab, family, FOU_PORT, 3)?;
                let hidden = version.minor() <= 16;
                report.ensure_answered_by(if hidden { (backend, FOU_PORT) } else { lab.service(family) })?;
                let egress = lab.egress_entry(0, family, FOU_PORT, 0)?;
                ensure!(egress.is_none() == hidden, "{version}: egress entry {egress:?}");
            }
            Ok(())
        })?;
    }
    Ok(())
}

#[test]
fn each_inner_flow_may_have_an_outer_port_of_its_own() -> Result<()> {
    lab_test(|| {
        let mut lab = Lab::builder().start()?;
        for family in FAMILIES {
            for slot in 1..=3u32 {
                // Ports of one third go to one backend, then the next.
                lab.model.pick(Some(slot))?;
                let base = 30_000 + slot as u16 * 100;
                let spec = lab.spec(0, family).count(300).generate(move |number, outer| {
                    let port = base + (number % 30) as u16;
                    let (client, service) = (outer.source.0, outer.destination.0);
                    let inner = InnerPacket::udp((client, port), (service, 53));
                    (Outer { source: (client, port), ..outer.clone() }, inner)
                });
                let report = lab.stream(0, spec)?.finish(false)?;
                report.ensure_exactly_once()?;
                ensure!(report.arrived_at(slot as usize - 1).len() == 300, "slot {slot}: {report:?}");
                let ports: std::collections::BTreeSet<_> =
                    report.records.iter().map(|record| record.source.1).collect();
                ensure!(ports.len() >= 30, "packets came from {ports:?}");
            }
        }
        Ok(())
    })
}
