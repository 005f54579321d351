//! Rolling restarts of many Egresses with many clients, one after the other without a pause.

use std::{
    net::IpAddr,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, anyhow, ensure};
use coil_guard_common::cilium::CtEntry;
use coil_guard_tests::{
    cilium::{BackendState, IpFamily, ServiceId},
    fou::{FOU_PORT, Stream, StreamReport},
    kube_api::{
        Kind,
        cluster::{EgressSpec, PodRef, PodSpec},
    },
    lab::{FlowTuple, Lab, eventually},
    net::{lab_test, topology::service_address},
    scenario::{EGRESS, NAMESPACE, Scenario},
};
use zerocopy::FromBytes as _;

use crate::support::{leaves_nothing, resident_kib, setting};

const FAMILY: IpFamily = IpFamily::V4;
const REPLICAS: usize = 3;
/// Packets in a second, of all clients together.
const RATE: u64 = 4000;

/// One Egress: its service, and the lab's backends that are its.
struct Fleet {
    name: String,
    address: IpAddr,
    service: ServiceId,
    backends: Vec<usize>,
    pods: Vec<PodRef>,
}

fn fleets(scenario: &mut Scenario, number: usize) -> Result<Vec<Fleet>> {
    let mut fleets = Vec::new();
    for index in 0..number {
        let backends: Vec<usize> = (index * REPLICAS..(index + 1) * REPLICAS).collect();
        let name = if index == 0 { EGRESS.to_owned() } else { format!("{EGRESS}-e{index}") };
        let address = service_address(FAMILY, index);
        let (service, pods) = if index == 0 {
            let pods =
                backends.iter().map(|backend| scenario.backend_pod(*backend)).collect::<Result<_>>()?;
            (scenario.lab.service_id(FAMILY), pods)
        } else {
            scenario.cluster.egress(&EgressSpec::new(NAMESPACE, &name, &[address]).mode("reset"))?;
            let service = scenario.lab.control.add_service(address, FOU_PORT, None);
            let mut pods = Vec::new();
            for backend in &backends {
                let at = scenario.lab.backend(*backend).address(FAMILY);
                scenario.lab.control.add_backend(service, at, FOU_PORT);
                pods.push(announce(scenario, &name, *backend)?);
            }
            (service, pods)
        };
        fleets.push(Fleet { name, address, service, backends, pods });
    }
    scenario.lab.catch_up()?;
    Ok(fleets)
}

fn announce(scenario: &Scenario, egress: &str, backend: usize) -> Result<PodRef> {
    let name = format!("{egress}-{backend}");
    let mut spec = PodSpec::new(&name, "node-2", &scenario.lab.backend(backend).addresses);
    spec.grace = 30;
    scenario.cluster.backend(NAMESPACE, egress, &spec)
}

fn id_of(scenario: &Scenario, fleet: &Fleet, backend: usize) -> Result<u32> {
    let address = scenario.lab.backend(backend).address(FAMILY);
    let found = scenario.lab.control.backends_at(address).into_iter().find(|(id, _)| *id == fleet.service);
    found.map(|(_, id)| id).with_context(|| format!("Cilium does not know backend {backend}"))
}

/// Id of the backend that a client's flow to the Egress is bound to.
fn bound(scenario: &Scenario, fleet: &Fleet, client: usize) -> Result<Option<u64>> {
    let source = scenario.lab.client(client).address(FAMILY);
    let flow = FlowTuple { client: (source, FOU_PORT), destination: (fleet.address, FOU_PORT) };
    let Some(bytes) = scenario.lab.maps.conntrack(FAMILY)?.lookup_bytes(&flow.service_key()?)? else {
        return Ok(None);
    };
    let entry = CtEntry::read_from_bytes(&bytes).map_err(|error| anyhow!("{error}"))?;
    Ok(Some(entry.backend_id))
}

/// In each Egress one backend is replaced: Terminating, left by every flow, gone, back as another pod under another id.
fn restart_one_of_each(
    scenario: &mut Scenario,
    fleets: &mut [Fleet],
    position: usize,
    clients: usize,
) -> Result<()> {
    let mut leaving = Vec::new();
    for fleet in fleets.iter() {
        let id = id_of(scenario, fleet, fleet.backends[position])?;
        scenario.cluster.terminate(&fleet.pods[position], None)?;
        scenario.lab.control.set_state(fleet.service, id, BackendState::Terminating)?;
        scenario.lab.catch_up()?;
        leaving.push(id);
    }
    for (fleet, id) in fleets.iter_mut().zip(leaving) {
        let left = eventually("end of every flow's stay", scenario.patience(), || {
            let mut stuck = Vec::new();
            for client in 0..clients {
                if bound(scenario, fleet, client)? == Some(u64::from(id)) {
                    stuck.push(client);
                }
            }
            Ok(if stuck.is_empty() { Ok(()) } else { Err(format!("stuck on {id}: clients {stuck:?}")) })
        });
        scenario.explain(left)?;
        scenario.cluster.force_delete(&fleet.pods[position])?;
        scenario.lab.control.remove_backend(fleet.service, id)?;
        scenario.lab.catch_up()?;
        let backend = fleet.backends[position];
        fleet.pods[position] = announce(scenario, &fleet.name, backend)?;
        let address = scenario.lab.backend(backend).address(FAMILY);
        scenario.lab.control.add_backend(fleet.service, address, FOU_PORT);
        scenario.lab.catch_up()?;
    }
    Ok(())
}

#[test]
fn rolling_restarts_without_a_pause_leave_no_flow_stuck_and_no_memory_behind() -> Result<()> {
    lab_test(|| {
        let rolls: usize = setting("COIL_GUARD_SOAK_ROLLS", 6);
        let clients: usize = setting("COIL_GUARD_SOAK_CLIENTS", 40);
        let egresses: usize = setting("COIL_GUARD_SOAK_EGRESSES", 8);
        let lab = Lab::builder()
            .families(&[FAMILY])
            .clients(clients)
            .backends(egresses * REPLICAS)
            .published(REPLICAS);
        let mut scenario = Scenario::builder(lab).mode("reset").start()?;
        let mut fleets = fleets(&mut scenario, egresses)?;
        let names: Vec<_> = fleets.iter().map(|fleet| fleet.name.clone()).collect();
        let key = format!("egress.coil.cybozu.com/{NAMESPACE}");
        for client in scenario.clients.clone() {
            let names = names.join(",");
            scenario.api.annotate(Kind::Pod, &client.namespace, &client.name, &key, Some(&names))?;
        }
        for fleet in &fleets {
            let text = fleet.address.to_string();
            scenario.agent()?.wait_log(&["guarding the Service", &text], scenario.patience())?;
        }
        let streams = streams(&scenario, &fleets, clients)?;
        let began = Instant::now();
        let mut warm = None;
        for roll in 0..rolls {
            for position in 0..REPLICAS {
                restart_one_of_each(&mut scenario, &mut fleets, position, clients)
                    .with_context(|| format!("roll {roll}, replica {position}"))?;
            }
            if roll + 1 == rolls.div_ceil(4) {
                warm = Some(resident_kib(&scenario)?);
            }
        }
        let (warm, end) = (warm.context("no measurement in time")?, resident_kib(&scenario)?);
        let took = began.elapsed();
        let reports = streams.into_iter().map(|stream| stream.finish(true)).collect::<Result<Vec<_>>>()?;
        let sent: usize = reports.iter().map(|report| report.sent.len()).sum();
        let moved = account(&scenario, &fleets, &reports)?;
        eprintln!(
            "{egresses} Egresses, {clients} clients: {rolls} rolling restarts of each, {} backends replaced in {took:.0?}, {sent} \
             packets, {} lost, {moved} moves, 0 stuck; resident {warm} KiB after a quarter, {end} KiB at the end",
            rolls * REPLICAS * egresses,
            lost(&mut scenario, &reports)?,
        );
        ensure!(moved >= (clients * egresses) as f64, "only {moved} flows moved in {rolls} rolling restarts");
        ensure!(end < warm + warm / 10 + 2048, "resident memory grew from {warm} to {end} KiB");
        for name in &names {
            scenario.cluster.set_mode(NAMESPACE, name, None)?;
        }
        leaves_nothing(&scenario, &(0..clients).collect::<Vec<_>>())
    })
}

/// Checks that no packet was lost but those that Cilium dropped because its agent changed the service under them, which the
/// guard can neither cause nor prevent; and that nobody saw one twice.
fn lost(scenario: &mut Scenario, reports: &[StreamReport]) -> Result<u64> {
    let mut lost = 0;
    for report in reports {
        ensure!(report.duplicated().is_empty(), "packets arrived more than once: {report:?}");
        lost += report.lost().len() as u64;
    }
    let losses = scenario.lab.losses()?;
    ensure!(losses.by_changes_alone() == Some(lost), "{lost} packets lost, accounted for are {losses:?}");
    scenario.lab.finish_receivers()?;
    Ok(lost)
}

/// Each Egress's counter is the number of packets sent to it, and each flow is on a backend that is there. Gives the number of
/// moves.
fn account(scenario: &Scenario, fleets: &[Fleet], reports: &[StreamReport]) -> Result<f64> {
    let mut moved = 0.0;
    for (index, fleet) in fleets.iter().enumerate() {
        let to_egress = |report: &StreamReport| (index..report.sent.len()).step_by(fleets.len()).len();
        let expected: usize = reports.iter().map(to_egress).sum();
        let label = format!("egress=\"{}\"", fleet.name);
        let found = eventually("count of every packet", scenario.patience(), || {
            let seen = scenario.agent()?.metric("coil_guard_egress_packets_total", &[&label])?;
            Ok(if seen as usize == expected { Ok(()) } else { Err(format!("{seen} of {expected}")) })
        });
        scenario.explain(found)?;
        let labels = [label.as_str(), "action=\"moved\""];
        moved += scenario.agent()?.metric("coil_guard_egress_actions_total", &labels)?;
        let live = fleet.backends.iter().map(|backend| id_of(scenario, fleet, *backend));
        let live = live.collect::<Result<Vec<_>>>()?;
        for client in 0..reports.len() {
            let id = bound(scenario, fleet, client)?.context("no service entry")?;
            ensure!(
                live.iter().any(|live| u64::from(*live) == id),
                "client {client} is stuck on {id}: {live:?}"
            );
        }
    }
    Ok(moved)
}

/// One stream from each client, whose packets go to one Egress after the other.
fn streams(scenario: &Scenario, fleets: &[Fleet], clients: usize) -> Result<Vec<Stream>> {
    let interval = Duration::from_micros(1_000_000 * clients as u64 / RATE);
    let mut streams = Vec::new();
    for client in 0..clients {
        let spec = scenario.lab.spec(client, FAMILY).interval(interval);
        let inner = spec.inner.first().cloned().context("an inner packet")?;
        let services: Vec<IpAddr> = fleets.iter().map(|fleet| fleet.address).collect();
        let spec = spec.generate(move |sequence, outer| {
            let mut outer = outer.clone();
            outer.destination.0 = services[sequence as usize % services.len()];
            (outer, inner.clone())
        });
        streams.push(scenario.lab.stream(client, spec)?);
    }
    for stream in &streams {
        stream.wait_arrived(2 * fleets.len() as u64, scenario.patience())?;
    }
    Ok(streams)
}
