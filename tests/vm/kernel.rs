//! Without a guard: the topology itself works, and the kernel's packets are what the guard is made for.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use coil_guard_tests::{cilium::IpFamily, fou::FOU_PORT, lab::Lab, net::lab_test};

use crate::{
    coil::{Form, Tunnels},
    outside::Outside,
    ping::Pinger,
    tcp::{self, Bulk},
};

const FAMILIES: [IpFamily; 2] = [IpFamily::V4, IpFamily::V6];

#[test]
fn every_kind_of_traffic_passes_through_every_form_of_tunnel() -> Result<()> {
    for form in [Form::Coil, Form::Checksums] {
        for sport_auto in [false, true] {
            lab_test(|| {
                let tunnels = Tunnels { form, sport_auto };
                let mut lab = Lab::builder().backends(2).start()?;
                tunnels.equip(&mut lab)?;
                let outside = Outside::start(&FAMILIES)?;
                for family in FAMILIES {
                    traffic_passes(&lab, &outside, family)
                        .with_context(|| format!("{tunnels:?} {family:?}"))?;
                    if !sport_auto {
                        ensure!(lab.bound_backend(0, family, FOU_PORT)?.is_some(), "the model saw no packet");
                    }
                }
                let errors = lab.udp_errors()?;
                ensure!(errors.checksum == 0, "{tunnels:?}: the kernel counted {errors:?}");
                Ok(())
            })?;
        }
    }
    Ok(())
}

fn traffic_passes(lab: &Lab, outside: &Outside, family: IpFamily) -> Result<()> {
    let client = lab.client(0);
    let backends: Vec<_> = lab.topology.backends.iter().map(|pod| pod.address(family)).collect();
    let seen = tcp::short(client, family, Duration::from_secs(10))?;
    ensure!(backends.contains(&seen), "the host outside saw {seen}, not one of the egress pods {backends:?}");
    for length in [8, 1400, 4000] {
        tcp::datagram(client, family, length, Duration::from_secs(10))?;
    }
    let ping = Pinger::start(client, family, Duration::from_millis(10), 56)?;
    let bulk = Bulk::start(client, family)?;
    bulk.wait_progress(4 << 20, Duration::from_secs(60))?;
    bulk.finish()?;
    let report = ping.finish()?;
    ensure!(report.lost().is_empty(), "lost echo requests {:?} of {}", report.lost(), report.sent.len());
    let pings = outside.pings();
    ensure!(
        pings.values().any(|source| backends.contains(source)),
        "no echo request came through an egress pod: {pings:?}"
    );
    Ok(())
}
