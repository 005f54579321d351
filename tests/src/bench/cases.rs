//! The cases of the datapath.

use std::{path::Path, time::Duration};

use anyhow::{Context as _, Result, ensure};
use coil_guard_common::{
    abi::{GuardedService, ServiceKey, maps, mode},
    cilium::BACKEND_TERMINATING,
    counters::Reason,
};

use super::{
    Case, Effort, LoadCost, Report,
    measure::{in_turns, median},
    reference::Reference,
};
use crate::{
    cilium::{CiliumVersion, IpFamily},
    fou::{FOU_PORT, tcp},
    program::{Instance, Load, REV_NAT, Rng, Scene, Sizes, bytes, pod_config, processor_time},
};

const VERSION: CiliumVersion = CiliumVersion::V1_18;
const SECOND: u64 = 1_000_000_000;
/// Guarded services in the largest case.
const SERVICES: u32 = 10_000;
/// Inner flows in the largest case.
const FLOWS: u32 = 1_000_000;

/// Sets a scene up and gives the packet.
type Setup = fn(&mut Scene, IpFamily) -> Result<Vec<u8>>;

/// One packet over and over: name, verdict, goal in ns over the empty classifier.
const REPEATED: [(&str, Reason, Option<f64>, Setup); 6] = [
    ("not FoU", Reason::NotFou, Some(15.0), |scene, family| {
        scene.begin(family, mode::RESET)?;
        let mut frame = scene.frame(FOU_PORT, &scene.tcp(1, tcp::ACK));
        let protocol = if family == IpFamily::V4 { 23 } else { 20 };
        frame[protocol] = 6;
        Ok(frame)
    }),
    ("FoU to a service that is not guarded", Reason::NotGuarded, None, |scene, family| {
        scene.begin(family, mode::RESET)?;
        let mut frame = scene.frame(FOU_PORT, &scene.tcp(1, tcp::ACK));
        let address_end = if family == IpFamily::V4 { 33 } else { 53 };
        frame[address_end] ^= 1;
        Ok(frame)
    }),
    ("reset, healthy", Reason::Healthy, Some(100.0), |scene, family| {
        scene.begin(family, mode::RESET)?;
        scene.entry(FOU_PORT, 1, REV_NAT)?;
        Ok(scene.frame(FOU_PORT, &scene.tcp(1, tcp::ACK)))
    }),
    ("audit, healthy, flow known", Reason::Healthy, None, |scene, family| {
        scene.begin(family, mode::AUDIT)?;
        known(scene)
    }),
    ("drain, healthy, flow known", Reason::Healthy, Some(200.0), |scene, family| {
        scene.begin(family, mode::DRAIN)?;
        known(scene)
    }),
    ("drain, leaving backend, no live one", Reason::NoLive, None, |scene, family| {
        scene.begin(family, mode::DRAIN)?;
        scene.entry(FOU_PORT, 1, REV_NAT)?;
        for id in [1, 2] {
            scene.backend(id, BACKEND_TERMINATING)?;
            scene.leaving(id, 0)?;
        }
        Ok(scene.frame(FOU_PORT, &scene.tcp(1000, tcp::SYN)))
    }),
];

fn known(scene: &mut Scene) -> Result<Vec<u8>> {
    scene.entry(FOU_PORT, 1, REV_NAT)?;
    scene.remember(6, 1000, 443, &scene.memory(1, SECOND / 2))?;
    Ok(scene.frame(FOU_PORT, &scene.tcp(1000, tcp::ACK)))
}

/// Gives the packet of each single run.
type Next = Box<dyn FnMut(&mut Scene) -> Result<Vec<u8>>>;

/// The program, and another build of it.
struct Guards {
    this: Scene,
    other: Option<Scene>,
}

impl Guards {
    fn all(&mut self) -> impl Iterator<Item = &mut Scene> {
        std::iter::once(&mut self.this).chain(self.other.as_mut())
    }
}

/// Measures the datapath. `directory` is on a bpffs and empty; `other` is the object of another build to compare with.
///
/// # Errors
///
/// When a program does not load, or a case does not get the verdict that it is about.
pub fn datapath(directory: &Path, effort: &Effort, other: Option<&[u8]>) -> Result<Report> {
    let sizes = Sizes { services: SERVICES + 64, inner_flows: 1 << 20, ..Sizes::default() };
    let load = |name: &str, object: Option<&[u8]>| -> Result<Scene> {
        let directory = directory.join(name);
        let instance = match object {
            Some(object) => Instance::load_object(object, &directory, VERSION, &pod_config(), sizes)?,
            None => Instance::load(&directory, VERSION, &pod_config(), sizes)?,
        };
        Ok(Scene::new(instance, VERSION))
    };
    let mut guards = Guards {
        this: load("this", None)?,
        other: other.map(|object| load("other", Some(object))).transpose().context("the other build")?,
    };
    let (core, stub) = load_costs(&directory.join("load"))?;
    let mut cases = Vec::new();
    for family in [IpFamily::V4, IpFamily::V6] {
        for (name, verdict, goal, setup) in REPEATED {
            cases.push(repeated(&mut guards, family, name, verdict, goal, setup, effort)?);
        }
        for services in [100, SERVICES] {
            let name = format!("reset, healthy, {services} guarded services");
            for scene in guards.all() {
                scene.begin(family, mode::RESET)?;
            }
            cases.push(with_services(&mut guards, family, &name, services, effort)?);
        }
        cases.push(resetting(&mut guards, family, effort)?);
        cases.push(drained(&mut guards, family, effort)?);
        cases.push(many_flows(&mut guards, family, effort)?);
    }
    Ok(Report {
        kernel: nix::sys::utsname::uname()?.release().to_string_lossy().into_owned(),
        datapath: cases,
        core,
        stub,
    })
}

/// The least of several loads of the core and of the stub, over small maps: those are made once a node.
fn load_costs(directory: &Path) -> Result<(LoadCost, LoadCost)> {
    let mut least: Option<(LoadCost, LoadCost)> = None;
    let lesser = |a: LoadCost, b: LoadCost| if a.verify_milliseconds < b.verify_milliseconds { a } else { b };
    for index in 0..5 {
        let directory = directory.join(index.to_string());
        let mut guard = Instance::load(&directory, VERSION, &pod_config(), Sizes::default())?;
        let mut stub = load_cost(&guard.stub_load);
        for _ in 0..20 {
            guard.become_pod(&pod_config())?;
            stub = lesser(stub, load_cost(&guard.stub_load));
        }
        let costs = (load_cost(&guard.load), stub);
        least = Some(match least {
            Some(least) => (lesser(least.0, costs.0), lesser(least.1, costs.1)),
            None => costs,
        });
    }
    least.context("nothing was loaded")
}

fn load_cost(load: &Load) -> LoadCost {
    LoadCost {
        prepare_milliseconds: load.prepare.as_secs_f64() * 1e3,
        verify_milliseconds: load.verify.as_secs_f64() * 1e3,
        verified_instructions: load.verified_instructions,
        machine_code_bytes: load.machine_code,
        memory_bytes: load.memory,
    }
}

fn references(scene: &Scene) -> Result<(Reference, Reference)> {
    let conntrack = scene.guard.cilium().conntrack(scene.family)?;
    Ok((Reference::empty()?, Reference::lookup(conntrack, &scene.entry_key(FOU_PORT))?))
}

fn repeated(
    guards: &mut Guards,
    family: IpFamily,
    name: &str,
    verdict: Reason,
    goal: Option<f64>,
    setup: Setup,
    effort: &Effort,
) -> Result<Case> {
    let mut frame = Vec::new();
    for scene in guards.all() {
        frame = setup(scene, family).with_context(|| name.to_owned())?;
        let run = scene.run(&frame)?;
        ensure!(run.reason == verdict, "{name}: {:?}, expected {verdict:?}", run.reason);
    }
    time_repeated(guards, &frame, name, verdict, goal, effort)
}

fn time_repeated(
    guards: &Guards,
    frame: &[u8],
    name: &str,
    verdict: Reason,
    goal: Option<f64>,
    effort: &Effort,
) -> Result<Case> {
    let (empty, lookup) = references(&guards.this)?;
    let packets = effort.packets;
    // The kernel gives whole nanoseconds, in which it was not this thread's turn all the time. What the call itself costs
    // is shared by millions.
    let timed = |run: &dyn Fn() -> Result<Duration>| -> Result<f64> {
        let began = processor_time();
        run()?;
        Ok((processor_time() - began).as_nanos() as f64 / f64::from(packets))
    };
    let times = in_turns::<4>(effort.turns, |index| match index {
        0 => timed(&|| empty.time(frame, packets)),
        1 => timed(&|| lookup.time(frame, packets)),
        2 => timed(&|| guards.this.guard.repeat(frame, packets)),
        _ => guards.other.as_ref().map_or(Ok(0.0), |other| timed(&|| other.guard.repeat(frame, packets))),
    })?;
    Ok(case(guards, name, "repeated", verdict, goal, times))
}

fn case(
    guards: &Guards,
    name: &str,
    method: &'static str,
    verdict: Reason,
    goal: Option<f64>,
    [empty, lookup, this, other]: [f64; 4],
) -> Case {
    let other = guards.other.as_ref().map(|_| other - empty);
    let case = Case {
        name: name.to_owned(),
        family: if guards.this.family == IpFamily::V4 { "IPv4" } else { "IPv6" },
        method,
        verdict: verdict.label().to_owned(),
        nanoseconds: this,
        empty_nanoseconds: empty,
        lookup_nanoseconds: lookup - empty,
        over_empty_nanoseconds: this - empty,
        lookups: (this - empty) / (lookup - empty),
        goal_nanoseconds: goal,
        other_nanoseconds: other,
        ratio_to_other: other.map(|other| other / (this - empty)),
    };
    eprintln!("{} {}: {:.1} ns", case.family, case.name, case.over_empty_nanoseconds);
    case
}

/// `services` guarded services, of which the packet's is one.
fn with_services(
    guards: &mut Guards,
    family: IpFamily,
    name: &str,
    services: u32,
    effort: &Effort,
) -> Result<Case> {
    let mut frame = Vec::new();
    for scene in guards.all() {
        scene.begin(family, mode::RESET)?;
        scene.entry(FOU_PORT, 1, REV_NAT)?;
        for index in 1..services {
            let mut address = [0xfd; 16];
            address[12..].copy_from_slice(&index.to_be_bytes());
            let key = ServiceKey { address, port: FOU_PORT.to_be_bytes(), pad: [0; 2] };
            let value = GuardedService {
                expires_at: u64::MAX >> 1,
                tracked_since: 1,
                egress: 0,
                mode: mode::RESET,
                flags: 0,
                pad: [0; 2],
            };
            scene.guard.set(maps::GUARDED_SERVICES, &key, &value)?;
        }
        frame = scene.frame(FOU_PORT, &scene.tcp(1, tcp::ACK));
    }
    time_repeated(guards, &frame, name, Reason::Healthy, Some(100.0), effort)
}

/// Runs packets that `next` gives, one at a time, in turns with the references.
fn single(
    guards: &mut Guards,
    name: &str,
    verdict: Reason,
    goal: Option<f64>,
    effort: &Effort,
    make: fn(&Scene) -> Next,
) -> Result<Case> {
    let (empty, lookup) = references(&guards.this)?;
    let count = effort.singles as usize;
    let mut durations: [Vec<Duration>; 4] = std::array::from_fn(|_| Vec::with_capacity(count));
    let mut nexts: Vec<Next> = guards.all().map(|scene| make(scene)).collect();
    let before = guards.this.guard.counters()?.of(verdict);
    for _ in 0..count {
        for (index, (scene, next)) in guards.all().zip(&mut nexts).enumerate() {
            let frame = next(scene)?;
            durations[2 + index].push(scene.guard.repeat(&frame, 1)?);
            if index == 0 {
                durations[0].push(empty.time(&frame, 1)?);
                durations[1].push(lookup.time(&frame, 1)?);
            }
        }
    }
    let counted = guards.this.guard.counters()?.of(verdict) - before;
    ensure!(counted == count as u64, "{name}: {counted} of {count} packets were counted as {verdict:?}");
    let times = durations.each_mut().map(|durations| median(durations));
    Ok(case(guards, name, "single", verdict, goal, times))
}

fn resetting(guards: &mut Guards, family: IpFamily, effort: &Effort) -> Result<Case> {
    for scene in guards.all() {
        scene.begin(family, mode::RESET)?;
        scene.leaving(1, 0)?;
    }
    single(guards, "reset, the packet that moves the flow", Reason::Moved, None, effort, |_| {
        Box::new(|scene| {
            scene.entry(FOU_PORT, 1, REV_NAT)?;
            Ok(scene.frame(FOU_PORT, &scene.tcp(1, tcp::ACK)))
        })
    })
}

fn drained(guards: &mut Guards, family: IpFamily, effort: &Effort) -> Result<Case> {
    for scene in guards.all() {
        scene.begin(family, mode::DRAIN)?;
        scene.backend(1, BACKEND_TERMINATING)?;
        scene.service(&[2], false)?;
        scene.leaving(1, 3600)?;
        scene.entry(FOU_PORT, 2, REV_NAT)?;
        scene.remember(6, 1000, 443, &scene.memory(1, 1))?;
    }
    single(guards, "drain, known flow drained, port rewritten", Reason::Drained, Some(250.0), effort, |_| {
        Box::new(|scene| Ok(scene.frame(FOU_PORT, &scene.tcp(1000, tcp::ACK))))
    })
}

/// A packet of another flow each time.
fn many_flows(guards: &mut Guards, family: IpFamily, effort: &Effort) -> Result<Case> {
    for scene in guards.all() {
        scene.begin(family, mode::DRAIN)?;
        scene.entry(FOU_PORT, 1, REV_NAT)?;
        let memory = scene.memory(1, 1);
        for flow in 0..FLOWS {
            let (port, destination_port) = ports(flow);
            scene.remember(6, port, destination_port, &memory)?;
        }
    }
    single(guards, "drain, healthy, one of 1,000,000 flows", Reason::Healthy, None, effort, |scene| {
        let mut rng = Rng::new(1);
        let inner = bytes(&scene.tcp(0, tcp::ACK));
        let frame = scene.frame(FOU_PORT, &scene.tcp(0, tcp::ACK));
        let at = frame.len() - inner.len() + if scene.family == IpFamily::V4 { 20 } else { 40 };
        Box::new(move |_| {
            let (port, destination_port) = ports(rng.below(FLOWS as usize) as u32);
            let mut frame = frame.clone();
            frame[at..at + 2].copy_from_slice(&port.to_be_bytes());
            frame[at + 2..at + 4].copy_from_slice(&destination_port.to_be_bytes());
            Ok(frame)
        })
    })
}

const fn ports(flow: u32) -> (u16, u16) {
    (1024 + (flow % 50_000) as u16, 1 + (flow / 50_000) as u16)
}
