//! Rolling restarts of several Egresses with many clients, one after the other without a pause.

use std::{
    net::IpAddr,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, anyhow, ensure};
use coil_guard_common::cilium::CtEntry;
use coil_guard_tests::{
    cilium::{BackendState, IpFamily, ServiceId},
    fou::{FOU_PORT, Stream},
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

/// One Egress: its service, and the lab's backends that are its.
struct Fleet {
    name: String,
    address: IpAddr,
    service: ServiceId,
    backends: Vec<usize>,
    pods: Vec<PodRef>,
    restarts: usize,
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
        fleets.push(Fleet { name, address, service, backends, pods, restarts: 0 });
    }
    scenario.lab.catch_up()?;
    Ok(fleets)
}

fn announce(scenario: &Scenario, egress: &str, backend: usize) -> Result<PodRef> {
    let name = format!("{egress}-{backend}");
    let spec = PodSpec::new(&name, "node-2", &scenario.lab.backend(backend).addresses);
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

/// One backend of the Egress is replaced: Terminating, left by every flow, gone, back as another pod under another id.
fn restart_one(scenario: &mut Scenario, fleet: &mut Fleet, clients: usize) -> Result<()> {
    let position = fleet.restarts % REPLICAS;
    let backend = fleet.backends[position];
    fleet.restarts += 1;
    let id = id_of(scenario, fleet, backend)?;
    scenario.cluster.terminate(&fleet.pods[position], None)?;
    scenario.lab.control.set_state(fleet.service, id, BackendState::Terminating)?;
    scenario.lab.catch_up()?;
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
    fleet.pods[position] = announce(scenario, &fleet.name, backend)?;
    let address = scenario.lab.backend(backend).address(FAMILY);
    scenario.lab.control.add_backend(fleet.service, address, FOU_PORT);
    scenario.lab.catch_up()
}

#[test]
fn rolling_restarts_without_a_pause_leave_no_flow_stuck_and_no_memory_behind() -> Result<()> {
    lab_test(|| {
        let lasts = Duration::from_secs(setting("COIL_GUARD_SOAK_SECONDS", 40));
        let clients: usize = setting("COIL_GUARD_SOAK_CLIENTS", 10);
        let egresses: usize = setting("COIL_GUARD_SOAK_EGRESSES", 4);
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
            scenario.api.annotate(
                Kind::Pod,
                &client.namespace,
                &client.name,
                &key,
                Some(&names.join(",")),
            )?;
        }
        for fleet in &fleets {
            let text = fleet.address.to_string();
            scenario.agent()?.wait_log(&["guarding the Service", &text], scenario.patience())?;
        }
        let streams = streams(&scenario, &fleets, clients)?;
        let began = Instant::now();
        let (mut warm, mut restarts) = (None, 0);
        while began.elapsed() < lasts {
            for fleet in &mut fleets {
                restart_one(&mut scenario, fleet, clients)?;
                restarts += 1;
            }
            if warm.is_none() && began.elapsed() > lasts / 4 {
                warm = Some(resident_kib(&scenario)?);
            }
        }
        let (warm, end) = (warm.context("no measurement in time")?, resident_kib(&scenario)?);
        let mut sent = 0;
        let mut lost = 0;
        let mut moved = 0.0;
        for (fleet, streams) in fleets.iter().zip(streams) {
            let mut of_egress = 0;
            for stream in streams {
                let report = stream.finish(true)?;
                ensure!(report.duplicated().is_empty(), "packets arrived more than once: {report:?}");
                lost += report.lost().len() as u64;
                of_egress += report.sent.len() as u64;
            }
            let label = format!("egress=\"{}\"", fleet.name);
            let found = eventually("count of every packet", scenario.patience(), || {
                let seen = scenario.agent()?.metric("coil_guard_egress_packets_total", &[&label])?;
                Ok(if seen as u64 == of_egress { Ok(()) } else { Err(format!("{seen} of {of_egress}")) })
            });
            scenario.explain(found)?;
            let labels = [label.as_str(), "action=\"moved\""];
            moved += scenario.agent()?.metric("coil_guard_egress_actions_total", &labels)?;
            sent += of_egress;
            for client in 0..clients {
                let id = bound(&scenario, fleet, client)?.context("no service entry")?;
                let live: Vec<_> = fleet
                    .backends
                    .iter()
                    .map(|backend| id_of(&scenario, fleet, *backend))
                    .collect::<Result<_>>()?;
                ensure!(
                    live.iter().any(|live| u64::from(*live) == id),
                    "client {client} is stuck on {id}: {live:?}"
                );
            }
        }
        // With a backend replaced every 25 ms a first packet can meet a slot whose backend Cilium is just removing, guard or not.
        ensure!(lost * 10_000 <= sent, "{lost} of {sent} packets lost in {restarts} restarts");
        ensure!(moved >= 1.0, "no flow moved in {restarts} restarts");
        eprintln!(
            "{egresses} Egresses, {clients} clients, {restarts} backends replaced in {:.0?}, {sent} packets, {lost} lost, {moved} \
             moves, 0 stuck; resident {warm} KiB after a quarter, {end} KiB at the end",
            began.elapsed()
        );
        ensure!(end < warm + warm / 10 + 2048, "resident memory grew from {warm} to {end} KiB");
        for name in &names {
            scenario.cluster.set_mode(NAMESPACE, name, None)?;
        }
        leaves_nothing(&scenario, &(0..clients).collect::<Vec<_>>())
    })
}

/// For each Egress one stream from each client.
fn streams(scenario: &Scenario, fleets: &[Fleet], clients: usize) -> Result<Vec<Vec<Stream>>> {
    let mut all = Vec::new();
    for fleet in fleets {
        let mut streams = Vec::new();
        for client in 0..clients {
            let mut spec = scenario.lab.spec(client, FAMILY).interval(Duration::from_millis(20));
            spec.outer.destination = (fleet.address, FOU_PORT);
            streams.push(scenario.lab.stream(client, spec)?);
        }
        for stream in &streams {
            stream.wait_arrived(2, scenario.patience())?;
        }
        all.push(streams);
    }
    Ok(all)
}
