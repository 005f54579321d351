//! What Cilium's datapath can lose by itself, and that the lab tells it from everything else.

use std::{
    net::IpAddr,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use coil_guard_tests::{
    cilium::{Expect, IpFamily},
    fou::FOU_PORT,
    lab::Lab,
    net::{lab_test, topology::service_address},
};

/// A hash map gives the memory of an element that was replaced to the next one at once, while programs may still look at it. So
/// a packet whose service is written anew between two of its steps can find another service there, and no backend.
#[test]
fn a_packet_whose_service_is_written_anew_under_it_may_be_lost_and_is_accounted_for() -> Result<()> {
    lab_test(|| {
        let family = IpFamily::V4;
        let mut lab = Lab::builder().families(&[family]).clients(2).start()?;
        let other = lab.control.add_service(service_address(family, 1), FOU_PORT, None);
        let backend = lab.backend(0).address(family);
        lab.control.add_backend(other, backend, FOU_PORT);
        lab.catch_up()?;
        let streams = [0, 1].map(|client| lab.stream(client, lab.spec(client, family)));
        let services = lab.maps.get(family.names().services)?;
        // A master of one service, then a slot of the other, which gets the memory of the master that was replaced.
        let slot = if family == IpFamily::V4 { 6..8 } else { 18..20 };
        let all = services.dump()?;
        let (own, others): (Vec<_>, Vec<_>) =
            all.into_iter().partition(|(key, _)| key.starts_with(&octets(lab.service(family).0)));
        let find = |elements: &[(Vec<u8>, Vec<u8>)], number: u16| {
            let found = elements.iter().find(|(key, _)| key[slot.clone()] == number.to_ne_bytes());
            found.cloned().context("no such slot")
        };
        let elements = [find(&own, 0)?, find(&others, 1)?];
        let (began, mut writes) = (Instant::now(), 0u64);
        while began.elapsed() < Duration::from_secs(3) {
            for (key, value) in &elements {
                services.update_bytes(key, value, Expect::Any)?;
                writes += 1;
            }
        }
        let (mut lost, mut sent) = (0, 0);
        for stream in streams {
            let report = stream?.finish(true)?;
            ensure!(report.duplicated().is_empty(), "{report:?}");
            lost += report.lost().len() as u64;
            sent += report.sent.len() as u64;
        }
        let losses = lab.losses()?;
        eprintln!("{sent} packets, {writes} writes of the same service: {losses:?}");
        ensure!(
            losses.by_changes_alone() == Some(lost),
            "{lost} of {sent} lost, accounted for are {losses:?}"
        );
        lab.finish_receivers()
    })
}

fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(address) => address.octets().to_vec(),
        IpAddr::V6(address) => address.octets().to_vec(),
    }
}
