//! The model against what the real program was seen to do: every step of every recorded scenario, all seven versions.
//!
//! After each step all maps are compared byte for byte with the recording, but for:
//!
//! * times (`lifetime`, `last_*_report` of conntrack entries, `last_used` of affinity): each has to stand where it
//!   stood relative to the clock, give or take the seconds that a step takes, and to be zero where it was zero;
//! * byte counters: datagrams had other lengths, so they have to be the packet counter times the lab's frame length
//!   wherever the recording counted bytes, and zero where it did not;
//! * ICMPv6 entries without a rev_nat_index: the link's own multicast, which the lab's links do not send.
//!
//! Which of two live backends a new flow gets is random. The model is steered to the slot of the recorded choice, and
//! has no say in it only there: a choice by affinity, by an entry or among one slot is its own.

use std::{collections::BTreeMap, net::IpAddr};

use anyhow::{Context as _, Result, bail, ensure};
use coil_guard_common::cilium::{CtEntry, MAPS4, MAPS6};
use coil_guard_tests::{
    cilium::{
        BackendState, CiliumVersion, DEFAULT_AFFINITY, Expect, IpFamily, MapOptions, MatchPolicy, hex,
        model::Settings, raw_map::Elements,
    },
    fou::ReplyMode,
    lab::Lab,
    net::lab_test,
};
use serde::Deserialize;
use zerocopy::{FromBytes as _, IntoBytes as _};

#[derive(Deserialize)]
struct Recording {
    versions: Vec<RecordedVersion>,
}

#[derive(Deserialize)]
struct RecordedVersion {
    version: String,
    maps: Vec<RecordedMap>,
    scenarios: Vec<Scenario>,
}

#[derive(Deserialize)]
struct RecordedMap {
    pin_name: String,
    #[serde(rename = "type")]
    kind: u32,
    key_size: u32,
    value_size: u32,
    map_flags: u32,
}

#[derive(Deserialize)]
struct Scenario {
    scenario: String,
    session_affinity: bool,
    steps: Vec<Step>,
}

#[derive(Deserialize)]
struct Step {
    step: String,
    packets: Vec<Packet>,
    observations: Observations,
    monotonic_seconds: u32,
    maps: BTreeMap<String, Vec<Element>>,
}

#[derive(Deserialize)]
struct Observations {
    terminating_backend_id: Option<u32>,
    live_backend_id: Option<u32>,
}

#[derive(Deserialize)]
struct Packet {
    client_port: u16,
    answered: bool,
    backend_id: u32,
    reply_source: String,
}

#[derive(Deserialize)]
struct Element {
    key: String,
    value: String,
}

/// Something to get wrong on purpose.
#[derive(Clone, Copy)]
enum Mistake {
    None,
    Settings(fn(&mut Settings)),
    OtherMatchPolicy,
    OtherControlPlane(CiliumVersion),
}

#[test]
fn ipv4_every_version_and_scenario() -> Result<()> {
    replay_all(IpFamily::V4, include_str!("../vectors/cilium-v4.json"))
}

#[test]
fn ipv6_every_version_and_scenario() -> Result<()> {
    replay_all(IpFamily::V6, include_str!("../vectors/cilium-v6.json"))
}

/// The comparison is worth nothing if a wrong model passes.
#[test]
fn a_wrong_model_is_noticed() -> Result<()> {
    let recording: Recording = serde_json::from_str(include_str!("../vectors/cilium-v4.json"))?;
    let mistakes: [(&str, &str, &str, Mistake); 8] = [
        ("1.16.15", "patch/no-affinity", "counters as in 1.15", Mistake::Settings(|s| s.minor = 15)),
        ("1.15.11", "patch/no-affinity", "counters as in 1.16", Mistake::Settings(|s| s.minor = 16)),
        ("1.14.16", "patch/no-affinity", "related entry as in 1.15", Mistake::Settings(|s| s.minor = 15)),
        ("1.18.3", "clone/no-affinity", "another identity", Mistake::Settings(|s| s.identity = 1)),
        ("1.18.3", "clone/no-affinity", "another lifetime", Mistake::Settings(|s| s.lifetime = 90)),
        ("1.18.3", "clone/no-affinity", "replies denied: none match", Mistake::Settings(|s| s.minor = 14)),
        ("1.17.14", "clone/affinity-match-kept", "match dropped", Mistake::OtherMatchPolicy),
        (
            "1.17.14",
            "patch/no-affinity",
            "slots as in 1.18",
            Mistake::OtherControlPlane(CiliumVersion::V1_18),
        ),
    ];
    lab_test(|| {
        for (version, scenario, what, mistake) in mistakes {
            let recorded =
                recording.versions.iter().find(|v| v.version == version).context("no such version")?;
            let played =
                recorded.scenarios.iter().find(|s| s.scenario == scenario).context("no such scenario")?;
            let outcome = coil_guard_tests::net::isolated(|| replay(IpFamily::V4, recorded, played, mistake));
            match outcome {
                Ok(()) => bail!("{version} {scenario}: a model with {what} passed"),
                Err(error) => println!("{version} {scenario}, {what}: noticed, {error:#}"),
            }
        }
        Ok(())
    })
}

fn replay_all(family: IpFamily, json: &str) -> Result<()> {
    let recording: Recording = serde_json::from_str(json)?;
    ensure!(
        recording.versions.len() == CiliumVersion::ALL.len(),
        "{} versions recorded",
        recording.versions.len()
    );
    let mut steps = 0;
    for version in &recording.versions {
        for scenario in &version.scenarios {
            steps += scenario.steps.len();
            lab_test(|| {
                replay(family, version, scenario, Mistake::None)
                    .with_context(|| format!("{family:?}, Cilium {}, {}", version.version, scenario.scenario))
            })?;
        }
    }
    println!("{steps} steps compared");
    Ok(())
}

fn replay(family: IpFamily, recorded: &RecordedVersion, scenario: &Scenario, mistake: Mistake) -> Result<()> {
    let version = version_of(&recorded.version)?;
    let policy = match scenario.scenario.split_once('/').map(|(_, variant)| variant) {
        Some("no-affinity") => version.match_policy(),
        Some("affinity-match-kept") => MatchPolicy::Kept,
        Some("affinity-match-dropped") => MatchPolicy::Dropped,
        other => bail!("unknown scenario {other:?}"),
    };
    let policy = match (mistake, policy) {
        (Mistake::OtherMatchPolicy, MatchPolicy::Kept) => MatchPolicy::Dropped,
        (Mistake::OtherMatchPolicy, MatchPolicy::Dropped) => MatchPolicy::Kept,
        _ => policy,
    };
    let played_version = if let Mistake::OtherControlPlane(other) = mistake { other } else { version };
    let mut lab = Lab::builder()
        .families(&[family])
        .version(played_version)
        .backends(2)
        .affinity(scenario.session_affinity.then_some(DEFAULT_AFFINITY))
        .match_policy(policy)
        .reply(ReplyMode::Mirror)
        .keep_frames()
        .start()?;
    if let Mistake::Settings(change) = mistake {
        lab.model.configure(change)?;
    }
    compare_shapes(version, recorded)?;
    for port in [5600, 61001, 61002] {
        lab.client_receivers[0].listen(port)?;
    }
    let mut length = None;
    for step in &scenario.steps {
        act(&mut lab, family, step).with_context(|| format!("step {}", step.step))?;
        for (number, packet) in step.packets.iter().enumerate() {
            length = Some(
                send(&mut lab, family, packet)
                    .with_context(|| format!("step {}, packet {number}", step.step))?,
            );
        }
        compare(&lab, step, length.unwrap_or(0)).with_context(|| format!("step {}", step.step))?;
    }
    Ok(())
}

fn version_of(version: &str) -> Result<CiliumVersion> {
    let minor = version.split('.').nth(1).and_then(|minor| minor.parse::<u32>().ok());
    let found = CiliumVersion::ALL.into_iter().find(|known| Some(known.minor()) == minor);
    found.with_context(|| format!("unknown Cilium version {version}"))
}

/// Kind, sizes and flags of the maps; capacities are the agent's to choose.
fn compare_shapes(version: CiliumVersion, recorded: &RecordedVersion) -> Result<()> {
    let shapes = MapOptions::new(version).shapes();
    for map in &recorded.maps {
        let shape = shapes
            .get(map.pin_name.as_str())
            .with_context(|| format!("the lab makes no {}", map.pin_name))?;
        let made = (shape.kind as u32, shape.key_size, shape.value_size, shape.flags);
        let expected = (map.kind, map.key_size, map.value_size, map.map_flags);
        ensure!(made == expected, "{}: kind, sizes, flags are {made:?}, recorded {expected:?}", map.pin_name);
    }
    Ok(())
}

/// What was done to the maps before the packets of a step.
fn act(lab: &mut Lab, family: IpFamily, step: &Step) -> Result<()> {
    let live = || step.observations.live_backend_id.context("no live backend recorded");
    match step.step.as_str() {
        "steady" | "patched-other-port" | "patched-port" | "cloned-port" | "new-port"
        | "patched-port-again" => Ok(()),
        "terminating" => {
            let id = step.observations.terminating_backend_id.context("no terminating backend recorded")?;
            lab.set_backend(id as usize - 1, BackendState::Terminating)
        }
        "patched" => patch(lab, family, live()?),
        "cloned-and-patched" => {
            let entry = lab.service_entry(0, family, 5555)?.context("no entry to clone")?;
            let created = lab.set_service_entry(0, family, 61001, &entry, Expect::Absent)?;
            ensure!(created, "port 61001 has an entry already");
            patch(lab, family, live()?)
        }
        other => bail!("unknown step {other}"),
    }
}

fn patch(lab: &Lab, family: IpFamily, live: u32) -> Result<()> {
    let mut entry = lab.service_entry(0, family, 5555)?.context("no entry to patch")?;
    entry.backend_id = live.into();
    ensure!(lab.set_service_entry(0, family, 5555, &entry, Expect::Present)?, "the entry is gone");
    Ok(())
}

/// Sends one packet and compares who answers; returns the length of its frame.
fn send(lab: &mut Lab, family: IpFamily, packet: &Packet) -> Result<u64> {
    let id = packet.backend_id;
    let service = lab.service_id(family);
    let names = family.names();
    // Slot of the recorded backend among those that can be selected.
    let slot = lab.maps.get(names.services)?.dump()?.into_iter().find_map(|(key, value)| {
        let at = key.len() - 6;
        let slot = u16::from_ne_bytes([key[at], key[at + 1]]);
        (slot > 0 && value[..4] == id.to_ne_bytes()).then_some(u32::from(slot))
    });
    lab.model.pick(slot)?;
    let spec = lab.spec(0, family).source_port(packet.client_port).count(1);
    let report = lab.stream(0, spec)?.finish(false)?;
    ensure!(packet.answered, "the recording has an unanswered packet, which no step should");
    ensure!(
        report.backend_of(0) == Some(id as usize - 1),
        "answered by {:?}, recorded backend {id}",
        report.backend_of(0)
    );
    let reply =
        report.replies().get(&0).and_then(|replies| replies.first().copied()).context("no reply")?.clone();
    ensure!(
        socket_address(reply.source) == packet.reply_source,
        "reply came from {:?}, recorded {} (service {service:?})",
        reply.source,
        packet.reply_source
    );
    Ok(reply.frame.context("frames are kept")?.len() as u64)
}

fn socket_address((address, port): (IpAddr, u16)) -> String {
    std::net::SocketAddr::from((address, port)).to_string()
}

fn compare(lab: &Lab, step: &Step, length: u64) -> Result<()> {
    let now = nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC)?.tv_sec() as u32;
    let dump = lab.dump()?;
    for (name, elements) in &step.maps {
        let mut expected = Elements::new();
        for element in elements {
            let (key, value) = (unhex(&element.key)?, unhex(&element.value)?);
            if name == MAPS6.conntrack && key[36] == 58 && value[38..40] == [0, 0] {
                continue;
            }
            expected.insert(key, value);
        }
        let found = dump.maps.get(name.as_str()).with_context(|| format!("the lab has no {name}"))?;
        ensure!(
            found.keys().eq(expected.keys()),
            "{name} has the keys\n  {}\nrecorded\n  {}",
            found.keys().map(|key| hex(key)).collect::<Vec<_>>().join("\n  "),
            expected.keys().map(|key| hex(key)).collect::<Vec<_>>().join("\n  ")
        );
        for ((key, value), recorded) in found.iter().zip(expected.values()) {
            let result = if name == MAPS4.conntrack || name == MAPS6.conntrack {
                compare_conntrack(value, now, recorded, step.monotonic_seconds, length)
            } else if name == MAPS4.affinity || name == MAPS6.affinity {
                compare_affinity(value, now, recorded, step.monotonic_seconds)
            } else {
                same(value, recorded)
            };
            result.with_context(|| format!("{name}, key {}", hex(key)))?;
        }
    }
    Ok(())
}

fn same(value: &[u8], recorded: &[u8]) -> Result<()> {
    ensure!(value == recorded, "value is\n  {}\nrecorded\n  {}", hex(value), hex(recorded));
    Ok(())
}

fn compare_conntrack(value: &[u8], now: u32, recorded: &[u8], then: u32, length: u64) -> Result<()> {
    let parse = |bytes: &[u8]| CtEntry::read_from_bytes(bytes).ok().context("not a conntrack entry");
    let (found, mut masked) = (parse(value)?, parse(recorded)?);
    for (what, found, recorded) in [
        ("lifetime", found.lifetime, &mut masked.lifetime),
        ("last_tx_report", found.last_tx_report, &mut masked.last_tx_report),
        ("last_rx_report", found.last_rx_report, &mut masked.last_rx_report),
    ] {
        same_time(what, found.into(), now, (*recorded).into(), then)?;
        *recorded = found;
    }
    if masked.bytes != 0 {
        masked.bytes = masked.packets * length;
    }
    // Up to 1.15 the receive counters of an egress entry stand in the first two fields.
    if masked.reserved0 != 0 {
        masked.backend_id = masked.reserved0 * length;
    }
    same(found.as_bytes(), masked.as_bytes())
}

fn compare_affinity(value: &[u8], now: u32, recorded: &[u8], then: u32) -> Result<()> {
    let seconds = |bytes: &[u8]| Ok::<_, anyhow::Error>(u64::from_ne_bytes(bytes[..8].try_into()?));
    same_time("last_used", seconds(value)?, now, seconds(recorded)?, then)?;
    same(&value[8..], &recorded[8..])
}

/// Both zero, or both as far from their clock but for the seconds that a step may take.
fn same_time(what: &str, found: u64, now: u32, recorded: u64, then: u32) -> Result<()> {
    const SLACK: i64 = 10;
    ensure!((found == 0) == (recorded == 0), "{what} is {found}, recorded {recorded}");
    let off = (found as i64 - i64::from(now)) - (recorded as i64 - i64::from(then));
    ensure!(
        found == 0 || off.abs() <= SLACK,
        "{what} is {off} s off: {found} at {now}, recorded {recorded} at {then}"
    );
    Ok(())
}

fn unhex(text: &str) -> Result<Vec<u8>> {
    let digits = text.as_bytes().chunks(2);
    digits.map(|pair| Ok(u8::from_str_radix(std::str::from_utf8(pair)?, 16)?)).collect()
}
