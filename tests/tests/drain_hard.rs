//! Mode `drain` where it is hard: races, overflow, collisions, reuse.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use coil_guard_common::{
    abi::mark,
    cilium::CtEntry,
    decide::{DRAIN_PORTS, drain_port},
};
use coil_guard_tests::{
    cilium::{BackendState, CiliumVersion, Expect, IpFamily, MatchPolicy},
    fou::{InnerPacket, inner::tcp, log::now},
    lab::{Lab, eventually},
    net::{lab_test, topology::set_sysctl},
    scenario::{Scenario, check},
};

const AFFINITY: Option<Duration> = Some(Duration::from_secs(10_800));
const FAMILY: IpFamily = IpFamily::V4;
const OUTSIDE: [u8; 4] = [198, 51, 100, 7];

fn segment(scenario: &Scenario, port: u16, flags: u8) -> InnerPacket {
    let source = scenario.lab.client(0).address(FAMILY);
    InnerPacket::tcp((source, port), (IpAddr::from(OUTSIDE), 443), flags)
}

fn send(scenario: &Scenario, inner: Vec<InnerPacket>) -> Result<BTreeMap<u64, usize>> {
    let count = inner.len() as u64;
    let report =
        scenario.lab.stream(0, scenario.lab.spec(0, FAMILY).inner(inner).count(count))?.finish(false)?;
    report.ensure_exactly_once()?;
    Ok(report.backends())
}

/// How many rounds of the race; the default keeps a run short, `COIL_GUARD_ROUNDS=1000` is the promise.
fn rounds() -> u32 {
    std::env::var("COIL_GUARD_ROUNDS").ok().and_then(|text| text.parse().ok()).unwrap_or(60)
}

/// Two senders at full rate: one of old connections, one that opens new ones all the time.
#[test]
fn no_old_packet_meets_the_new_backend_while_the_mark_is_written() -> Result<()> {
    lab_test(|| {
        let lab =
            Lab::builder().backends(2).families(&[FAMILY]).affinity(AFFINITY).match_policy(MatchPolicy::Kept);
        let mut scenario = Scenario::builder(lab).mode("drain").grace(60).start()?;
        for round in 0..rounds() {
            let first = 20_000 + u16::try_from(round % 100)? * 100;
            let old: Vec<_> = (first..first + 8).map(|port| segment(&scenario, port, tcp::SYN)).collect();
            let homes = send(&scenario, old)?;
            let home = homes[&0];
            ensure!(
                homes.values().all(|other| *other == home),
                "round {round}: one client, one backend: {homes:?}"
            );
            let established = (first..first + 8).map(|port| segment(&scenario, port, tcp::ACK)).collect();
            let olds = scenario.lab.stream(0, scenario.lab.spec(0, FAMILY).inner(established))?;
            let fresh = (first + 8..first + 99).map(|port| segment(&scenario, port, tcp::SYN)).collect();
            let news = scenario.lab.stream(0, scenario.lab.spec(0, FAMILY).inner(fresh))?;
            olds.wait_arrived(40, scenario.patience())?;
            scenario.terminate(home)?;
            scenario.wait_mark(home, mark::LEAVING)?;
            let marked = now();
            check::wait_settled();
            let settled = now();
            olds.wait_arrived(olds.sent() + 40, scenario.patience())?;
            news.wait_arrived(news.sent() + 40, scenario.patience())?;
            let (olds, news) = (olds.finish(true)?, news.finish(true)?);
            check::stayed(&olds, home).with_context(|| format!("round {round}, marked at {marked}"))?;
            news.ensure_exactly_once()?;
            let mut late = news
                .backends()
                .into_iter()
                .filter(|(sequence, backend)| news.sent[*sequence as usize] > settled && *backend == home);
            ensure!(late.next().is_none(), "round {round}: new connections on the leaving backend: {news:?}");
            scenario.cluster.force_delete(&scenario.backend_pod(home)?)?;
            scenario.lab.remove_backend(home)?;
            scenario.announce_backend(home)?;
            scenario.lab.publish_backend(home)?;
            scenario.wait_mark(home, mark::READY)?;
        }
        Ok(())
    })
}

#[test]
fn ten_thousand_flows_of_one_client_go_where_they_should() -> Result<()> {
    lab_test(|| {
        let lab = Lab::builder().backends(2).families(&[FAMILY]).affinity(AFFINITY);
        let mut scenario = Scenario::builder(lab).mode("drain").grace(120).start()?;
        let (old, new) = (10_000..15_000u16, 15_000..20_000u16);
        let all =
            |ports: std::ops::Range<u16>, flags| ports.map(|port| segment(&scenario, port, flags)).collect();
        let homes: BTreeSet<_> = send(&scenario, all(old.clone(), tcp::SYN))?.into_values().collect();
        let home = *homes.first().context("they arrived")?;
        ensure!(homes.len() == 1, "old connections on {homes:?}");
        let opening = all(new.clone(), tcp::SYN);
        let (again, later) = (all(old, tcp::ACK), all(new, tcp::ACK));
        scenario.terminate(home)?;
        scenario.wait_mark(home, mark::LEAVING)?;
        check::wait_settled();
        let there = |sent: BTreeMap<u64, usize>| sent.into_values().collect::<BTreeSet<_>>();
        ensure!(there(send(&scenario, opening)?) == BTreeSet::from([1 - home]), "new connections");
        ensure!(there(send(&scenario, again)?) == BTreeSet::from([home]), "old connections");
        ensure!(there(send(&scenario, later)?) == BTreeSet::from([1 - home]), "new connections, later");
        eventually("count of drained flows", scenario.patience(), || {
            let drained = scenario.agent()?.metric("coil_guard_drained_flows", &[])?;
            Ok(if (drained - 5_000.0).abs() < f64::EPSILON { Ok(()) } else { Err(drained) })
        })
    })
}

#[test]
fn an_overflowing_memory_costs_only_the_forgotten_flows_their_drain() -> Result<()> {
    lab_test(|| {
        let lab = Lab::builder().backends(2).families(&[FAMILY]);
        let mut scenario = Scenario::builder(lab)
            .mode("drain")
            .grace(60)
            .arguments(&["--map-inner-flows", "256"])
            .start()?;
        let ports = 10_000..14_000u16;
        let all = |flags| ports.clone().map(|port| segment(&scenario, port, flags)).collect::<Vec<_>>();
        let (opening, established) = (all(tcp::SYN), all(tcp::ACK));
        let home = send(&scenario, opening)?[&0];
        scenario.terminate(home)?;
        scenario.wait_mark(home, mark::LEAVING)?;
        check::wait_settled();
        let new = send(&scenario, vec![segment(&scenario, 20_000, tcp::SYN)])?[&0];
        ensure!(new != home, "a new connection on the leaving backend");
        // Forgotten ones are told by not being openings, and go to the backend that the client was moved off.
        let homes: BTreeSet<_> = send(&scenario, established)?.into_values().collect();
        ensure!(homes == BTreeSet::from([home]), "old connections on {homes:?}, they were opened on {home}");
        Ok(())
    })
}

#[test]
fn backends_that_leave_one_after_the_other_drain_side_by_side() -> Result<()> {
    lab_test(|| {
        let lab =
            Lab::builder().backends(3).families(&[FAMILY]).version(CiliumVersion::V1_17).affinity(AFFINITY);
        let mut scenario = Scenario::builder(lab).mode("drain").grace(60).start()?;
        let mut homes = Vec::new();
        for port in [30_001u16, 30_002, 30_003] {
            let home = send(&scenario, vec![segment(&scenario, port, tcp::SYN)])?[&0];
            ensure!(!homes.iter().any(|(_, other)| *other == home), "{port} on {home}, which is leaving");
            homes.push((port, home));
            if homes.len() < 3 {
                scenario.terminate(home)?;
                scenario.wait_mark(home, mark::LEAVING)?;
                check::wait_settled();
            }
        }
        for (port, home) in &homes {
            let there: BTreeSet<_> =
                send(&scenario, vec![segment(&scenario, *port, tcp::ACK); 10])?.into_values().collect();
            ensure!(there == BTreeSet::from([*home]), "connection {port} on {there:?}, not {home}");
        }
        Ok(())
    })
}

#[test]
fn a_stale_entry_under_the_drain_port_is_taken_over() -> Result<()> {
    lab_test(|| {
        let lab = Lab::builder().backends(2).families(&[FAMILY]);
        let mut scenario = Scenario::builder(lab).mode("drain").grace(60).start()?;
        let home = send(&scenario, vec![segment(&scenario, 30_001, tcp::SYN)])?[&0];
        let (id, other) =
            (scenario.lab.backend_id(FAMILY, home)?, scenario.lab.backend_id(FAMILY, 1 - home)?);
        let port = u16::from_be_bytes(drain_port(id));
        let good = scenario.lab.service_entry(0, FAMILY, 5555)?.context("an entry")?;
        let stale = CtEntry { backend_id: u64::from(other), ..good };
        scenario.lab.set_service_entry(0, FAMILY, port, &stale, Expect::Absent)?;
        scenario.terminate(home)?;
        scenario.wait_mark(home, mark::LEAVING)?;
        check::wait_settled();
        ensure!(send(&scenario, vec![segment(&scenario, 30_002, tcp::SYN)])?[&0] != home);
        let there: BTreeSet<_> =
            send(&scenario, vec![segment(&scenario, 30_001, tcp::ACK); 5])?.into_values().collect();
        ensure!(there == BTreeSet::from([home]), "the old connection on {there:?}");
        let entry = scenario.lab.service_entry(0, FAMILY, port)?.context("an entry under the drain port")?;
        ensure!(entry.backend_id == u64::from(id), "{entry:?}");
        Ok(())
    })
}

#[test]
fn a_true_collision_of_drain_ports_is_reset_and_counted_and_never_misrouted() -> Result<()> {
    lab_test(|| {
        // Two draining backends whose ids differ by the number of drain ports.
        let lab = Lab::builder().backends(3).families(&[FAMILY]).published(1);
        let mut scenario = Scenario::builder(lab).mode("drain").grace(60).start()?;
        let first = scenario.lab.backend_id(FAMILY, 0)?;
        scenario.lab.control.skip_ids_to(first + DRAIN_PORTS);
        scenario.announce_backend(1)?;
        scenario.lab.publish_backend(1)?;
        scenario.wait_mark(1, mark::READY)?;
        ensure!(scenario.lab.backend_id(FAMILY, 1)? == first + DRAIN_PORTS, "ids of the lab");
        ensure!(send(&scenario, vec![segment(&scenario, 30_001, tcp::SYN)])?.len() == 1);
        // A connection on each of the two.
        let mut homes = BTreeMap::new();
        for port in 30_000..30_200u16 {
            scenario.lab.delete_service_entry(0, FAMILY, 5555)?;
            let spec = scenario.lab.spec(0, FAMILY).source_port(port).inner(vec![segment(
                &scenario,
                port,
                tcp::SYN,
            )]);
            let report = scenario.lab.stream(0, spec.count(1))?.finish(false)?;
            homes.entry(report.backend_of(0).context("it arrived")?).or_insert(port);
            if homes.len() == 2 {
                break;
            }
        }
        ensure!(homes.len() == 2, "connections on {homes:?} only");
        scenario.announce_backend(2)?;
        scenario.lab.publish_backend(2)?;
        scenario.wait_mark(2, mark::READY)?;
        for index in [0, 1] {
            scenario.terminate(index)?;
            scenario.wait_mark(index, mark::LEAVING)?;
        }
        check::wait_settled();
        // Their own outer ports are taken over by new connections, so that both need the one drain port.
        for (home, port) in &homes {
            let inner = vec![segment(&scenario, port + 1000, tcp::SYN)];
            let spec = scenario.lab.spec(0, FAMILY).source_port(*port).inner(inner);
            let report = scenario.lab.stream(0, spec.count(1))?.finish(false)?;
            ensure!(report.backend_of(0) == Some(2), "a new connection beside {home}: {report:?}");
        }
        let mut there = Vec::new();
        for (home, port) in &homes {
            let inner = vec![segment(&scenario, *port, tcp::ACK)];
            let spec = scenario.lab.spec(0, FAMILY).source_port(*port).inner(inner);
            let report = scenario.lab.stream(0, spec.count(5))?.finish(false)?;
            report.ensure_exactly_once()?;
            let seen: BTreeSet<_> = report.per_backend().into_keys().collect();
            ensure!(
                seen == BTreeSet::from([*home]) || seen == BTreeSet::from([2]),
                "{home}: misrouted: {report:?}"
            );
            there.push(seen);
        }
        ensure!(there.iter().any(|seen| seen.contains(&2)), "no collision: {there:?}");
        eventually("count of the collision", scenario.patience(), || {
            let seen = scenario.agent()?.metric("coil_guard_packets_total", &["reason=\"not_drained\""])?;
            Ok(if seen >= 1.0 { Ok(()) } else { Err(seen) })
        })
    })
}

#[test]
fn drain_is_refused_where_ephemeral_ports_reach_into_the_drain_ports() -> Result<()> {
    lab_test(|| {
        let lab = Lab::builder().backends(2).families(&[FAMILY]);
        let mut scenario = Scenario::builder(lab).mode("drain").sport_auto().no_agent().start()?;
        scenario.lab.client(0).namespace.run(|| set_sysctl("ipv4/ip_local_port_range", "32768 65535"))?;
        scenario.start_agent()?;
        scenario.wait_attached(0)?;
        scenario.agent()?.wait_log(&["WARN", "ip_local_port_range"], scenario.patience())?;
        let spec = |flags| {
            scenario.lab.spec(0, FAMILY).source_port(62_000).inner(vec![segment(&scenario, 30_001, flags)])
        };
        let syn = scenario.lab.stream(0, spec(tcp::SYN).count(1))?.finish(false)?;
        ensure!(syn.backend_of(0).is_some());
        let plain = |flags| {
            scenario.lab.spec(0, FAMILY).source_port(40_000).inner(vec![segment(&scenario, 30_002, flags)])
        };
        let home = scenario
            .lab
            .stream(0, plain(tcp::SYN).count(1))?
            .finish(false)?
            .backend_of(0)
            .context("arrived")?;
        let again = plain(tcp::ACK);
        scenario.terminate(home)?;
        scenario.wait_mark(home, mark::LEAVING)?;
        let report = scenario.lab.stream(0, again.count(5))?.finish(false)?;
        check::stayed(&report, 1 - home).context("it is reset instead")
    })
}

#[test]
fn an_egress_without_a_pre_stop_hook_is_warned_about() -> Result<()> {
    lab_test(|| {
        let scenario =
            Scenario::builder(Lab::builder().families(&[FAMILY])).mode("drain").no_pre_stop().start()?;
        scenario.agent()?.wait_log(&["WARN", "preStop", "internet/nat"], scenario.patience())?;
        let found = eventually("event about the missing hook", scenario.patience(), || {
            let events = scenario.events();
            Ok(if events.iter().any(|(_, note)| note.contains("preStop")) { Ok(()) } else { Err(events) })
        });
        scenario.explain(found)
    })
}

#[test]
fn icmp_errors_and_fragments_follow_their_flow() -> Result<()> {
    use coil_guard_tests::fou::inner::{Fragment, Inner};
    lab_test(|| {
        let lab = Lab::builder().backends(2).families(&[FAMILY]);
        let mut scenario = Scenario::builder(lab).mode("drain").grace(60).start()?;
        let client = scenario.lab.client(0).address(FAMILY);
        let echo =
            |identifier| InnerPacket::new(client, OUTSIDE.into(), Inner::Echo { identifier, sequence: 1 });
        let fragment = |offset, more| {
            segment(&scenario, 30_001, tcp::ACK).fragment(Fragment { identification: 77, offset, more })
        };
        let about = segment(&scenario, 30_001, tcp::ACK).reversed();
        let error = InnerPacket::new(client, OUTSIDE.into(), Inner::TooBig { about: Box::new(about) });
        let first = send(&scenario, vec![segment(&scenario, 30_001, tcp::SYN), echo(9)])?;
        let home = first[&0];
        ensure!(first[&1] == home);
        let old = vec![fragment(0, true), fragment(64, false), error, echo(9)];
        let opening = vec![segment(&scenario, 30_002, tcp::SYN)];
        scenario.terminate(home)?;
        scenario.wait_mark(home, mark::LEAVING)?;
        check::wait_settled();
        ensure!(send(&scenario, opening)?[&0] != home);
        let there = send(&scenario, old)?;
        ensure!(
            there.values().all(|backend| *backend == home),
            "parts of old flows went elsewhere: {there:?}"
        );
        Ok(())
    })
}

#[test]
fn a_drained_flow_that_ends_is_counted_as_ended() -> Result<()> {
    lab_test(|| {
        let lab = Lab::builder().backends(2).families(&[FAMILY]);
        let mut scenario = Scenario::builder(lab).mode("drain").grace(60).start()?;
        let home = send(&scenario, vec![segment(&scenario, 30_001, tcp::SYN)])?[&0];
        scenario.lab.set_backend(home, BackendState::Active)?;
        scenario.terminate(home)?;
        scenario.wait_mark(home, mark::LEAVING)?;
        check::wait_settled();
        send(&scenario, vec![segment(&scenario, 30_001, tcp::ACK)])?;
        let drained = |scenario: &Scenario| scenario.agent()?.metric("coil_guard_drained_flows", &[]);
        eventually("drained flow", scenario.patience(), || {
            let seen = drained(&scenario)?;
            Ok(if (seen - 1.0).abs() < f64::EPSILON { Ok(()) } else { Err(seen) })
        })?;
        send(&scenario, vec![segment(&scenario, 30_001, tcp::FIN | tcp::ACK)])?;
        eventually("end of the drained flow", scenario.patience(), || {
            let (left, ended) = (
                drained(&scenario)?,
                scenario.agent()?.metric("coil_guard_drains_total", &["outcome=\"ended\""])?,
            );
            Ok(if left == 0.0 && ended == 1.0 { Ok(()) } else { Err((left, ended)) })
        })?;
        Ok(())
    })
}
