//! Client pods come, go, and interfere.

use std::{
    fs,
    os::fd::AsFd as _,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use aya::programs::{TcAttachType, tc::qdisc_detach_program};
use coil_guard_common::abi::LAYOUT_VERSION;
use coil_guard_tests::{
    cilium::{BackendState, IpFamily},
    fou::FOU_PORT,
    kube_api::cluster::PodSpec,
    lab::{Lab, eventually},
    net::{
        Namespace, Netlink, Paths, PodRole, lab_test,
        topology::{POD_DEVICE, pod_address},
    },
    scenario::{EGRESS, NAMESPACE, NODE, Scenario},
};

use crate::support::{
    counted, finish, guard_pins, leaves_nothing, open_namespaces, pins, remove_client, sent, setting,
    streams, wait_left,
};

/// Within which 200 pods have come and gone.
const COME_AND_GO: Duration = Duration::from_secs(20);

fn wait_pods(scenario: &Scenario, state: &str, number: usize) -> Result<()> {
    let patience = scenario.patience_for(scenario.clients.len());
    let found = eventually(&format!("{number} pods {state}"), patience, || {
        let now = scenario.agent()?.metric("coil_guard_pods", &[&format!("state=\"{state}\"")])?;
        Ok(if now as usize == number { Ok(()) } else { Err(now) })
    });
    scenario.explain(found)
}

#[test]
fn many_pods_come_and_go_within_seconds_and_leave_nothing() -> Result<()> {
    lab_test(|| {
        let many: usize = setting("COIL_GUARD_PODS", 200);
        let lab = Lab::builder().families(&[IpFamily::V4]);
        let mut scenario = Scenario::builder(lab).mode("reset").start()?;
        let running = streams(&scenario, &[0], Duration::from_millis(2))?;
        // Files that are no namespaces, or not yet: a runtime makes the file first and mounts on it afterwards.
        fs::write(Paths.namespaces().join("not-yet"), "")?;
        let before = pins();
        // Making a network takes this lab longer than the agent needs for the pod, so most are there when their pods are told of.
        let late = many / 8;
        for _ in 0..many - late {
            scenario.lab.add_client_pod()?;
        }
        let began = Instant::now();
        for number in 1..=many {
            let client = if number > many - late { scenario.lab.add_client_pod()? } else { number };
            scenario.announce_client(client)?;
            // Every fourth goes at once: its namespace vanishes between being found and being entered.
            if number % 4 == 0 {
                remove_client(&mut scenario, client)?;
            }
        }
        let created = began.elapsed();
        let stay: Vec<usize> = (1..=many).filter(|number| number % 4 != 0).collect();
        wait_pods(&scenario, "attached", stay.len() + 1)?;
        let attached = began.elapsed();
        for client in &stay {
            ensure!(
                scenario.lab.attachments(*client)?.egress_programs() == 1,
                "client {client} is not guarded"
            );
        }
        let seen = began.elapsed();
        for client in &stay {
            scenario.cluster.force_delete(&scenario.clients[*client])?;
        }
        scenario.lab.topology.remove_pods(PodRole::Client, &stay)?;
        let removed = began.elapsed();
        wait_pods(&scenario, "wanted", 1)?;
        let gone = eventually("pins as before", scenario.patience_for(many), || {
            let now = pins();
            Ok(if now == before { Ok(()) } else { Err(now.len()) })
        });
        scenario.explain(gone)?;
        let all_gone = began.elapsed();
        eprintln!(
            "{many} pods created within {created:.1?}, attached after {attached:.1?}, looked at until {seen:.1?}, removed from \
             Kubernetes and the node after {removed:.1?}, all gone after {all_gone:.1?}"
        );
        let within = COME_AND_GO.mul_f64((many as f64 / 200.0).max(1.0));
        ensure!(all_gone < within, "{many} pods have come and gone within {all_gone:.1?}, not {within:?}");
        let open = eventually("agent without open namespaces", scenario.patience(), || {
            let open = open_namespaces(&scenario)?;
            Ok(if open == 0 { Ok(()) } else { Err(open) })
        });
        scenario.explain(open)?;
        let bound = scenario.bound(0, IpFamily::V4, FOU_PORT)?;
        scenario.terminate(bound)?;
        wait_left(&scenario, &[0], bound)?;
        counted(&scenario, sent(&finish(running)?))?;
        leaves_nothing(&scenario, &[0])
    })
}

#[test]
fn a_pod_that_is_known_before_its_network_is_up_is_attached_when_it_is() -> Result<()> {
    lab_test(|| {
        let mut scenario = Scenario::builder(Lab::builder()).mode("reset").start()?;
        let addresses = [IpFamily::V4, IpFamily::V6].map(|family| pod_address(PodRole::Client, family, 1));
        let spec = PodSpec::new("client-1", NODE, &addresses).client_of(NAMESPACE, EGRESS);
        // First without an address, then with one that no interface has yet.
        let pod = scenario.cluster.pending_client("default", &spec)?;
        scenario.cluster.run(&pod, &addresses, true)?;
        scenario.clients.push(pod);
        scenario.agent()?.wait_log(&["cannot attach", "client-1"], scenario.patience())?;
        ensure!(scenario.agent()?.ready()?.0, "one pod that is not up makes the agent unready");
        let client = scenario.lab.add_client_pod()?;
        ensure!(scenario.lab.client(client).addresses == addresses, "the lab gave other addresses");
        let since = Instant::now();
        scenario.wait_attached(client)?;
        eprintln!("attached {:.0?} after its network was up", since.elapsed());
        ensure!(since.elapsed() < Duration::from_secs(3), "attached only after {:?}", since.elapsed());
        leaves_nothing(&scenario, &[0, client])
    })
}

#[test]
fn a_second_interface_is_left_alone() -> Result<()> {
    lab_test(|| {
        let mut scenario = Scenario::builder(Lab::builder()).mode("reset").no_agent().start()?;
        let pod = scenario.lab.client(0).namespace.clone();
        pod.run(|| {
            let netlink = Netlink::here()?;
            let (here, macs) = (Namespace::current("pod")?, [[2, 0, 0, 0, 7, 1], [2, 0, 0, 0, 7, 2]]);
            netlink.add_veth(("net1", macs[0]), ("net1-peer", macs[1]), here.file().as_fd())?;
            netlink.up("net1")?;
            netlink.add_address("net1", "192.0.2.7".parse()?)
        })?;
        scenario.start_agent()?;
        scenario.wait_attached(0)?;
        let second = pod.run(|| coil_guard_tests::net::attachments("net1"))?;
        ensure!(second.egress_programs() == 0, "attached to the second interface: {second:?}");
        let running = streams(&scenario, &[0], Duration::from_millis(2))?;
        let bound = scenario.bound(0, IpFamily::V4, FOU_PORT)?;
        scenario.terminate(bound)?;
        wait_left(&scenario, &[0], bound)?;
        finish(running)?;
        leaves_nothing(&scenario, &[0])
    })
}

/// Somebody takes the program off; it is seen, made anew, counted and told.
fn removed_program_comes_back(attach: &'static str, remove: fn(&Scenario) -> Result<()>) -> Result<()> {
    lab_test(move || {
        let mut scenario =
            Scenario::builder(Lab::builder()).mode("reset").arguments(&["--attach", attach]).start()?;
        let running = streams(&scenario, &[0], Duration::from_millis(2))?;
        remove(&scenario)?;
        let since = Instant::now();
        let restored = eventually("restored attachment", scenario.patience(), || {
            let now = scenario.agent()?.metric("coil_guard_attachments_total", &["outcome=\"restored\""])?;
            Ok(if now as u64 == 1 { Ok(()) } else { Err(now) })
        });
        scenario.explain(restored)?;
        eprintln!("{attach}: attached anew after {:.1?}", since.elapsed());
        scenario.wait_attached(0)?;
        scenario.agent()?.wait_log(&["WARN", "somebody had removed", "client-0"], scenario.patience())?;
        let bound = scenario.bound(0, IpFamily::V4, FOU_PORT)?;
        scenario.lab.set_backend(bound, BackendState::Terminating)?;
        wait_left(&scenario, &[0], bound)?;
        finish(running)?;
        leaves_nothing(&scenario, &[0])
    })
}

#[test]
fn a_program_that_was_removed_is_restored_and_counted_clsact() -> Result<()> {
    removed_program_comes_back("clsact", |scenario| {
        let filters = scenario.lab.attachments(0)?.egress_filters;
        ensure!(filters.len() == 1, "{filters:?}");
        scenario.lab.client(0).namespace.run(|| {
            Ok(qdisc_detach_program(POD_DEVICE, TcAttachType::Egress, coil_guard_common::abi::PROGRAM)?)
        })
    })
}

#[test]
fn a_program_that_was_removed_is_restored_and_counted_tcx() -> Result<()> {
    removed_program_comes_back("tcx", |scenario| {
        let pin = guard_pins().join(LAYOUT_VERSION).join("links").join(&scenario.clients[0].uid);
        Ok(fs::remove_file(pin)?)
    })
}
