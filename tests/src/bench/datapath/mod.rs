//! The program in the kernel, by `BPF_PROG_TEST_RUN`.
//!
//! Each figure is taken in turns with an empty classifier and with one that does a single lookup in a conntrack map.
//!
//! Each runs millions of times, so that everything is in the caches, which is what a busy client has.
//!
//! * *Repeated* cases run one packet over and over.
//! * *Prepared* cases have a prelude that sets right what the program changed, the packet or a map, or takes another flow for
//!   each packet. It stands before the references, too, so that what it costs is not counted.

mod case;
mod reference;

use std::{fs, time::Duration};

use anyhow::{Context as _, Result, ensure};
use coil_guard_common::{
    abi::{GuardedService, ServiceKey, maps, mode},
    cilium::BACKEND_TERMINATING,
    counters::Reason,
};

use self::{
    case::{Case, goals, tables},
    reference::{Prelude, Programs, Reference, flow_ports},
};
use super::{Extent, Findings, Options, measure::in_turns};
use crate::{
    cilium::{CiliumVersion, IpFamily},
    fou::{FOU_PORT, tcp},
    net::Paths,
    program::{Instance, REV_NAT, Scene, Sizes, bytes, pod_config, processor_time},
};

const VERSION: CiliumVersion = CiliumVersion::V1_18;
const UDP_HEADER: u32 = 8;
const SECOND: u64 = 1_000_000_000;
/// Guarded services in the largest case.
const SERVICES: u32 = 10_000;

/// How long to measure.
#[derive(Clone, Copy, Debug)]
struct Effort {
    /// Packets of a repeated case, per turn.
    packets: u32,
    /// Turns.
    turns: u32,
    /// Inner flows in the largest case.
    flows: u32,
}

impl Effort {
    fn of(extent: Extent) -> Self {
        extent.pick(
            Self { packets: 500_000, turns: 7, flows: 1_000_000 },
            Self { packets: 1000, turns: 1, flows: 1000 },
        )
    }
}

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
    ("reset, healthy, 1 guarded service", Reason::Healthy, Some(100.0), |scene, family| {
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

/// Measures the datapath.
///
/// # Errors
///
/// When a program does not load, or a case does not get the verdict that it is about.
pub(super) fn run(options: &Options) -> Result<Findings> {
    let effort = &Effort::of(options.extent);
    let inner_flows = effort.flows.next_power_of_two();
    let sizes = Sizes { services: SERVICES + 64, inner_flows, ..Sizes::default() };
    let load = |name: &str, object: Option<&[u8]>| -> Result<Scene> {
        let directory = Paths.cilium_maps().join(name);
        let instance = match object {
            Some(object) => Instance::load_object(object, &directory, VERSION, &pod_config(), sizes)?,
            None => Instance::load(&directory, VERSION, &pod_config(), sizes)?,
        };
        Ok(Scene::new(instance, VERSION))
    };
    let other = match &options.against {
        Some(path) => Some(fs::read(path).with_context(|| format!("cannot read {}", path.display()))?),
        None => None,
    };
    let mut guards = Guards {
        this: load("this", None)?,
        other: other.map(|object| load("other", Some(&object))).transpose().context("the other build")?,
    };
    let mut cases = Vec::new();
    for family in [IpFamily::V4, IpFamily::V6] {
        for (name, verdict, goal, setup) in REPEATED {
            cases.push(repeated(&mut guards, family, name, verdict, goal, setup, effort)?);
        }
        for services in [100, SERVICES] {
            let name = format!("reset, healthy, {services} guarded services");
            cases.push(with_services(&mut guards, family, &name, services, effort)?);
        }
        cases.push(resetting(&mut guards, family, effort)?);
        cases.push(drained(&mut guards, family, effort)?);
        cases.push(many_flows(&mut guards, family, effort)?);
    }
    Ok(Findings { tables: tables(&cases), goals: goals(&cases), figures: serde_json::to_value(&cases)? })
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

/// As [`time_repeated`], of a packet that `prelude` sets right before each run.
fn prepared(
    guards: &Guards,
    frame: &[u8],
    name: &str,
    verdict: Reason,
    goal: Option<f64>,
    effort: &Effort,
    prelude: impl Fn(&Scene) -> Result<Prelude<'_>>,
) -> Result<Case> {
    let (empty, lookup) = references(&guards.this)?;
    let scenes = [Some(&guards.this), guards.other.as_ref()];
    let mut programs = vec![empty.fd(), lookup.fd()];
    for scene in scenes.iter().flatten() {
        programs.push(scene.guard.stub()?);
    }
    let programs = Programs::new(&programs)?;
    // The other build has maps of its own; what stands before the references is the same as before this one.
    let runs = [Some(&guards.this), Some(&guards.this), Some(&guards.this), guards.other.as_ref()]
        .into_iter()
        .zip(0..)
        .map(|(scene, index)| {
            scene.map(|scene| Reference::before(&prelude(scene)?, &programs, index)).transpose()
        })
        .collect::<Result<Vec<_>>>()?;
    let packets = effort.packets;
    let before = guards.this.guard.counters()?.of(verdict);
    let times = in_turns::<4>(effort.turns, |index| match &runs[index] {
        Some(run) => {
            let began = processor_time();
            run.time(frame, packets)?;
            Ok((processor_time() - began).as_nanos() as f64 / f64::from(packets))
        }
        None => Ok(0.0),
    })?;
    let counted = guards.this.guard.counters()?.of(verdict) - before;
    let sent = u64::from(packets) * u64::from(effort.turns);
    ensure!(counted >= sent, "{name}: {counted} of {sent} packets were counted as {verdict:?}");
    Ok(case(guards, name, "prepared", verdict, goal, times))
}

fn resetting(guards: &mut Guards, family: IpFamily, effort: &Effort) -> Result<Case> {
    let mut frame = Vec::new();
    for scene in guards.all() {
        scene.begin(family, mode::RESET)?;
        scene.leaving(1, 0)?;
        scene.entry(FOU_PORT, 1, REV_NAT)?;
        frame = scene.frame(FOU_PORT, &scene.tcp(1, tcp::ACK));
    }
    let name = "reset, the packet that moves the flow";
    prepared(guards, &frame, name, Reason::Moved, None, effort, |scene| {
        let conntrack = scene.guard.cilium().conntrack(family)?;
        Ok(Prelude::Entry { conntrack, key: scene.entry_key(FOU_PORT), backend_id: 1 })
    })
}

/// Offset of the inner packet in the frame.
fn inner_offset(scene: &Scene, frame: &[u8]) -> u32 {
    (frame.len() - bytes(&scene.tcp(0, tcp::ACK)).len()) as u32
}

fn drained(guards: &mut Guards, family: IpFamily, effort: &Effort) -> Result<Case> {
    let (mut frame, mut offset) = (Vec::new(), 0);
    for scene in guards.all() {
        scene.begin(family, mode::DRAIN)?;
        scene.backend(1, BACKEND_TERMINATING)?;
        scene.service(&[2], false)?;
        scene.leaving(1, 3600)?;
        scene.entry(FOU_PORT, 2, REV_NAT)?;
        scene.remember(6, 1000, 443, &scene.memory(1, 1))?;
        frame = scene.frame(FOU_PORT, &scene.tcp(1000, tcp::ACK));
        offset = inner_offset(scene, &frame);
    }
    let name = "drain, known flow drained, port rewritten";
    prepared(guards, &frame, name, Reason::Drained, Some(250.0), effort, |_| {
        Ok(Prelude::Port { offset: offset - UDP_HEADER, port: FOU_PORT })
    })
}

/// A packet of another flow each time.
fn many_flows(guards: &mut Guards, family: IpFamily, effort: &Effort) -> Result<Case> {
    let flows = effort.flows;
    let (mut frame, mut offset) = (Vec::new(), 0);
    for scene in guards.all() {
        scene.begin(family, mode::DRAIN)?;
        scene.entry(FOU_PORT, 1, REV_NAT)?;
        for flow in 0..flows {
            let (port, destination_port) = flow_ports(flow);
            scene.remember(6, port, destination_port, &scene.memory(1, 1))?;
        }
        frame = scene.frame(FOU_PORT, &scene.tcp(0, tcp::ACK));
        offset = inner_offset(scene, &frame) + if family == IpFamily::V4 { 20 } else { 40 };
    }
    let name = format!("drain, healthy, one of {flows} flows");
    prepared(guards, &frame, &name, Reason::Healthy, None, effort, |_| Ok(Prelude::Flow { offset, flows }))
}
