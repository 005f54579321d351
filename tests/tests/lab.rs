//! The lab works as its documentation says: packets are counted exactly and the model does what Cilium was seen to do.

use std::{collections::BTreeMap, net::IpAddr, time::Duration};

use anyhow::{Context as _, Result, ensure};
use coil_guard_tests::{
    cilium::{AttachKind, BackendState, CiliumVersion, DEFAULT_AFFINITY, IpFamily, MatchPolicy, Policy},
    fou::{ChecksumKind, FOU_PORT, ReplyMode, Via},
    lab::{Lab, eventually},
    net::lab_test,
};

const FAMILIES: [IpFamily; 2] = [IpFamily::V4, IpFamily::V6];

#[test]
fn every_packet_arrives_once_and_is_answered_by_the_service() -> Result<()> {
    lab_test(|| {
        let lab = Lab::builder().clients(2).start()?;
        for family in FAMILIES {
            for client in 0..2 {
                for (via, checksum) in [
                    (Via::Frames, ChecksumKind::Zero),
                    (Via::Frames, ChecksumKind::Correct),
                    (Via::UdpSocket, ChecksumKind::Zero),
                    (Via::UdpSocket, ChecksumKind::Correct),
                ] {
                    let spec = lab.spec(client, family).count(2000).via(via).checksum(checksum);
                    let report = lab.stream(client, spec)?.finish(false)?;
                    report
                        .ensure_exactly_once()
                        .with_context(|| format!("{family:?} {via:?} {checksum:?}"))?;
                    report.ensure_answered_by(lab.service(family))?;
                    ensure!(
                        report.per_backend().len() == 1,
                        "one outer flow went to {:?}",
                        report.per_backend()
                    );
                }
            }
        }
        let errors = lab.udp_errors()?;
        ensure!(errors.checksum == 0, "the kernel counted {errors:?}");
        for receiver in lab.backend_receivers.into_iter().chain(lab.client_receivers) {
            receiver.finish()?;
        }
        Ok(())
    })
}

#[test]
fn an_established_flow_stays_on_a_terminating_backend() -> Result<()> {
    for (attach, version) in
        [(AttachKind::Tcx, CiliumVersion::V1_18), (AttachKind::Clsact, CiliumVersion::V1_15)]
    {
        lab_test(move || {
            let mut lab = Lab::builder().attach(attach).version(version).start()?;
            for family in FAMILIES {
                let stream = lab.stream(0, lab.spec(0, family))?;
                stream.wait_arrived(100, lab.patience())?;
                let bound = lab.bound_backend(0, family, FOU_PORT)?.context("no service entry")?;
                lab.set_backend(bound, BackendState::Terminating)?;
                stream.wait_arrived(stream.sent() + 500, lab.patience())?;
                lab.remove_backend(bound)?;
                let removed = stream.sent();
                stream.wait_arrived(removed + 500, lab.patience())?;
                let report = stream.finish(true)?;
                report.ensure_exactly_once()?;
                report.ensure_answered_by(lab.service(family))?;
                let after: Vec<_> =
                    (removed + 300..report.sent.len() as u64).map(|n| report.backend_of(n)).collect();
                ensure!(
                    !after.contains(&Some(bound)),
                    "{family:?}: went on to a backend that Cilium does not know"
                );
                lab.publish_backend(bound)?;
            }
            Ok(())
        })?;
    }
    Ok(())
}

#[test]
fn affinity_brings_a_new_port_to_the_terminating_backend_while_its_match_is_there() -> Result<()> {
    for policy in [MatchPolicy::Kept, MatchPolicy::Dropped] {
        lab_test(move || {
            let mut lab = Lab::builder().affinity(Some(DEFAULT_AFFINITY)).match_policy(policy).start()?;
            for family in FAMILIES {
                lab.stream(0, lab.spec(0, family).count(5))?.finish(false)?.ensure_exactly_once()?;
                let bound = lab.bound_backend(0, family, FOU_PORT)?.context("no service entry")?;
                lab.set_backend(bound, BackendState::Terminating)?;
                let spec = lab.spec(0, family).source_port(5600).count(5);
                let report = lab.stream(0, spec)?.finish(false)?;
                report.ensure_exactly_once()?;
                let stuck = report.per_backend() == BTreeMap::from([(bound, 5)]);
                ensure!(
                    stuck == (policy == MatchPolicy::Kept),
                    "{policy:?}: {report:?}, was bound to {bound}"
                );
                lab.set_backend(bound, BackendState::Active)?;
            }
            Ok(())
        })?;
    }
    Ok(())
}

#[test]
fn under_default_deny_only_replies_of_tracked_flows_come_in() -> Result<()> {
    lab_test(|| {
        let lab = Lab::builder().policy(Policy::DefaultDeny).reply(ReplyMode::ArbitraryPort).start()?;
        for family in FAMILIES {
            let report = lab.stream(0, lab.spec(0, family).count(20))?.finish(false)?;
            report.ensure_exactly_once()?;
            ensure!(report.replies().is_empty(), "replies from arbitrary ports passed: {report:?}");
            lab.set_reply(ReplyMode::FouPort);
            let report = lab.stream(0, lab.spec(0, family).count(20))?.finish(false)?;
            report.ensure_answered_by(lab.service(family))?;
            lab.set_reply(ReplyMode::ArbitraryPort);
        }
        Ok(())
    })
}

#[test]
fn a_backend_with_another_port_is_translated_both_ways() -> Result<()> {
    lab_test(|| {
        let lab = Lab::builder().backend_port(6666).backends(1).reply(ReplyMode::Mirror).start()?;
        for family in FAMILIES {
            for checksum in [ChecksumKind::Zero, ChecksumKind::Correct] {
                let spec = lab.spec(0, family).source_port(5600).checksum(checksum).count(100);
                let report = lab.stream(0, spec)?.finish(false)?;
                report.ensure_exactly_once()?;
                report.ensure_answered_by(lab.service(family))?;
                let destinations: Vec<(IpAddr, u16)> =
                    report.arrivals().values().flatten().map(|record| record.destination).collect();
                ensure!(destinations.iter().all(|(_, port)| *port == 6666), "arrived at {destinations:?}");
            }
        }
        Ok(())
    })
}

#[test]
fn garbage_collection_removes_what_no_packet_refreshes() -> Result<()> {
    lab_test(|| {
        let lab = Lab::builder().lifetime(Duration::from_secs(1)).families(&[IpFamily::V4]).start()?;
        let collector = lab.start_garbage_collection(Duration::from_millis(100))?;
        lab.stream(0, lab.spec(0, IpFamily::V4).count(5))?.finish(false)?;
        eventually("collected entry", lab.patience(), || {
            Ok(lab.service_entry(0, IpFamily::V4, FOU_PORT)?.map_or(Ok(()), Err))
        })?;
        ensure!(collector.finish()? >= 3, "service, egress and related entry");
        Ok(())
    })
}
