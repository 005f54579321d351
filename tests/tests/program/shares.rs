//! Each client's share of the memory of flows.

use anyhow::{Context as _, Result, ensure};
use coil_guard_common::{
    abi::{FLOW_BURST, InnerFlow, InnerFlowKey, flow_cost, maps, mode, v4_mapped},
    cilium::BACKEND_TERMINATING,
    counters::Reason,
};
use coil_guard_tests::{
    fou::{FOU_PORT, tcp},
    program::{REV_NAT, Scene, Sizes, monotonic},
};

use crate::support::each_family;

const NEIGHBOUR: [u8; 16] = v4_mapped([10, 0, 0, 0x12]);
const NEIGHBOURS: u16 = 1000;

/// Flows of a client in a map.
fn flows_of(scene: &Scene, map: &str, client: [u8; 16]) -> Result<usize> {
    let map = scene.guard.own::<InnerFlowKey, InnerFlow>(map)?;
    let keys = map.keys().collect::<Result<Vec<_>, _>>()?;
    Ok(keys.iter().filter(|key| key.client == client).count())
}

fn client(scene: &Scene) -> [u8; 16] {
    match scene.client() {
        std::net::IpAddr::V4(address) => v4_mapped(address.octets()),
        std::net::IpAddr::V6(address) => address.octets(),
    }
}

/// Opens connections from these ports on backend 1.
fn open(scene: &Scene, ports: std::ops::Range<u16>) -> Result<()> {
    ports
        .into_iter()
        .try_for_each(|port| scene.guard.pass(&scene.frame(FOU_PORT, &scene.tcp(port, tcp::SYN))).map(drop))
}

fn share() -> u64 {
    FLOW_BURST / flow_cost(Sizes::default().inner_flows)
}

#[test]
fn a_client_beyond_its_share_pushes_out_nobody_elses_flows() -> Result<()> {
    each_family(|scene, family| {
        scene.begin(family, mode::DRAIN)?;
        scene.entry(FOU_PORT, 1, REV_NAT)?;
        for port in 0..NEIGHBOURS {
            let key = InnerFlowKey {
                service: NEIGHBOUR,
                client: NEIGHBOUR,
                source: NEIGHBOUR,
                destination: NEIGHBOUR,
                service_port: FOU_PORT.to_be_bytes(),
                source_port: port.to_be_bytes(),
                destination_port: [1, 2],
                protocol: 17,
                pad: 0,
            };
            scene.guard.set(maps::INNER_FLOWS, &key, &scene.memory(1, 0))?;
        }
        let began = monotonic();
        // Five times what the whole memory holds.
        open(scene, 1000..21_000)?;
        let earned = (monotonic() - began) / flow_cost(Sizes::default().inner_flows);
        let (own, crowded) = (
            flows_of(scene, maps::INNER_FLOWS, client(scene))? as u64,
            flows_of(scene, maps::CROWDED_FLOWS, client(scene))?,
        );
        let left = flows_of(scene, maps::INNER_FLOWS, NEIGHBOUR)?;
        ensure!(left == usize::from(NEIGHBOURS), "{left} of {NEIGHBOURS} flows of the neighbour are left");
        ensure!((share()..=share() + earned + 2).contains(&own), "{own} flows, the share is {}", share());
        ensure!(crowded > 100, "{crowded} flows are in the other memory");
        Ok(())
    })
}

#[test]
fn a_flow_beyond_the_share_drains_like_any_other() -> Result<()> {
    each_family(|scene, family| {
        scene.begin(family, mode::DRAIN)?;
        scene.entry(FOU_PORT, 1, REV_NAT)?;
        let spent = monotonic() + 2 * FLOW_BURST;
        scene.guard.set(maps::FLOW_SHARES, &client(scene), &spent)?;
        open(scene, 1000..1010)?;
        ensure!(flows_of(scene, maps::INNER_FLOWS, client(scene))? == 0, "the share was not spent");
        ensure!(flows_of(scene, maps::CROWDED_FLOWS, client(scene))? == 10, "not remembered");
        // Backend 1 leaves, and the client was moved off another one since, so that only the memory tells.
        scene.backend(1, BACKEND_TERMINATING)?;
        scene.service(&[2], false)?;
        scene.entry(FOU_PORT, 2, REV_NAT)?;
        scene.leaving(1, 60)?;
        for port in 1000..1010 {
            let run = scene.send(&scene.tcp(port, tcp::ACK))?;
            ensure!(run.reason == Reason::Drained, "connection {port}: {run:?}");
        }
        let stats = scene.drains(1)?;
        ensure!((stats.flows, stats.started) == (10, 10), "{stats:?}");
        let run = scene.send(&scene.tcp(1000, tcp::FIN | tcp::ACK))?;
        ensure!(run.reason == Reason::Drained && scene.drains(1)?.ended == 1, "{run:?}");
        // An unknown one is of the present backend.
        let run = scene.send(&scene.tcp(2000, tcp::ACK))?;
        ensure!(run.reason == Reason::Healthy, "{run:?}");
        Ok(())
    })
}

#[test]
fn a_share_fills_up_again_with_time() -> Result<()> {
    each_family(|scene, family| {
        let cost = flow_cost(Sizes::default().inner_flows);
        // Spent until some time ago: a whole share. Room for two more: two, and what the time meanwhile gives.
        for flows in [share(), 2] {
            scene.begin(family, mode::DRAIN)?;
            scene.entry(FOU_PORT, 1, REV_NAT)?;
            let began = monotonic();
            let until = if flows == share() { began - 1 } else { began + FLOW_BURST - flows * cost };
            scene.guard.set(maps::FLOW_SHARES, &client(scene), &until)?;
            open(scene, 1000..3000)?;
            let earned = (monotonic() - began) / cost;
            let found = flows_of(scene, maps::INNER_FLOWS, client(scene))? as u64;
            // The program's clock is up to a tick behind.
            let range = flows.saturating_sub(1)..=flows + earned + 2;
            ensure!(
                range.contains(&found),
                "{found} flows, expected {flows} and {earned} for the time meanwhile"
            );
        }
        let until = scene.guard.own::<[u8; 16], u64>(maps::FLOW_SHARES)?.get(&client(scene), 0);
        until.context("the client has no share").map(drop)
    })
}
