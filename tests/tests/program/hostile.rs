//! Random and mutated packets against random maps.
//!
//! `COIL_GUARD_FUZZ` sets the number of packets, `COIL_GUARD_SEED` repeats a run.

use std::env;

use anyhow::{Context as _, Result, ensure};
use coil_guard_common::{
    abi::{FOR_EVER, SERVICE_SPORT_AUTO, mode},
    cilium::{CT_EGRESS, CT_SERVICE, CtEntry},
    counters::Reason,
};
use coil_guard_tests::{
    cilium::{
        Change, CiliumVersion, IpFamily, hex,
        raw_map::{Elements, Raw},
    },
    fou::{FOU_PORT, Fragment, Inner, InnerPacket, Tag, tcp},
    net::{Paths, lab_test},
    program::{Checksum, EGRESS, REV_NAT, Rng, Scene, Sizes, monotonic},
};

use crate::support::FAMILIES;

const PACKETS: u64 = 200_000;
/// Small, because they are walked after each packet.
const SIZES: Sizes = Sizes { services: 64, inner_flows: 1024, others: 1024, cilium: 1024 };
/// Packets between two states of the maps.
const ROUND: u64 = 128;
const PORTS: [u16; 6] = [FOU_PORT, 40_001, 60_999, 61_001, 61_002, 65_200];

fn number(variable: &str) -> Result<Option<u64>> {
    let Ok(text) = env::var(variable) else { return Ok(None) };
    text.parse().map(Some).with_context(|| format!("{variable} is {text:?}, expected a number"))
}

#[test]
fn no_packet_makes_it_do_what_it_must_not() -> Result<()> {
    lab_test(|| {
        let seed = number("COIL_GUARD_SEED")?.unwrap_or_else(monotonic);
        let packets = number("COIL_GUARD_FUZZ")?.unwrap_or(PACKETS);
        println!("{packets} packets, COIL_GUARD_SEED={seed}");
        let mut rng = Rng::new(seed);
        let mut scene = Scene::load(Paths.cilium_maps(), CiliumVersion::V1_20, SIZES)?;
        let started = scene.guard.counters()?;
        let mut sent = 0;
        while sent < packets {
            let family = *rng.pick(&FAMILIES);
            let mode = shuffle(&mut scene, family, &mut rng)?;
            let mut watch = Watch::begin(&scene, mode)?;
            for _ in 0..ROUND {
                let frame = packet(&scene, &mut rng);
                watch
                    .pass(&scene, &frame)
                    .with_context(|| format!("seed {seed}, packet {sent}: {}", hex(&frame)))?;
                sent += 1;
            }
            watch.end(&scene).with_context(|| format!("seed {seed}, before packet {sent}"))?;
        }
        // A test in which nothing happens proves nothing.
        let counters = scene.guard.counters()?;
        for reason in Reason::ALL {
            let count = counters.of(*reason) - started.of(*reason);
            println!("{count:>10} {}", reason.label());
            // Contended needs another CPU, and what is left to Cilium, or moves in rewrite, a state that random maps are seldom in;
            // all are reached on purpose elsewhere.
            let rare = matches!(
                reason,
                Reason::Contended
                    | Reason::LeftToCilium
                    | Reason::ExtensionHeaders
                    | Reason::Rewritten
                    | Reason::NewPort
                    | Reason::HeldByAffinity
                    | Reason::NotMoved
            );
            ensure!(rare || count > 0 || packets < PACKETS, "no packet was counted as {reason:?}");
        }
        Ok(())
    })
}

/// Any state of the maps: backends and marks in all states, entries of this client and of others, good and dangling.
fn shuffle(scene: &mut Scene, family: IpFamily, rng: &mut Rng) -> Result<u8> {
    const MODES: [u8; 9] = [
        mode::AUDIT,
        mode::AUDIT,
        mode::RESET,
        mode::DRAIN,
        mode::DRAIN,
        mode::DRAIN,
        mode::REWRITE,
        mode::REWRITE,
        9,
    ];
    let mode = *rng.pick(&MODES);
    scene.begin(family, mode)?;
    scene.guarded(mode, if rng.one_in(3) { SERVICE_SPORT_AUTO } else { 0 })?;
    scene.agent_alive(!rng.one_in(4))?;
    let ids = [1, 2, 3, 4097];
    let slots: Vec<u32> = ids.into_iter().filter(|_| !rng.one_in(3)).collect();
    scene.service(&slots, rng.one_in(2))?;
    if rng.one_in(50) {
        scene.remove_service()?;
    }
    for id in ids {
        scene.backend(id, *rng.pick(&[0, 0, 1, 1, 2, 3, 0xff]))?;
        if rng.one_in(6) {
            scene.remove_backend(id)?;
        }
        let now = monotonic();
        let keep_until = *rng.pick(&[0, now, now + 60_000_000_000, FOR_EVER]);
        let since = *rng.pick(&[1, now, now + 1_000_000_000]);
        scene.mark(id, rng.below(6) as u8, keep_until, since)?;
        if rng.one_in(5) {
            scene.unmark(id)?;
        }
    }
    if rng.one_in(2) {
        scene.affinity(*rng.pick(&[1, 2, 3, 4097, 9]))?;
    }
    for port in PORTS {
        if !rng.one_in(3) {
            let id = *rng.pick(&[1, 1, 2, 3, 4097, 9, 1 << 32 | 1]);
            scene.entry(port, id, *rng.pick(&[REV_NAT, REV_NAT, REV_NAT, [7, 7]]))?;
        }
        for id in ids {
            if rng.one_in(8) {
                let replies = CtEntry::for_replies(REV_NAT, *rng.pick(&[0, 5, u32::MAX]));
                scene.set_conntrack(&scene.egress_key(port, id), &replies)?;
            }
        }
        if port != FOU_PORT {
            continue;
        }
        // Another client's, another service's, another port's, a TCP one, an ingress one.
        let places = if family == IpFamily::V4 { [0, 4, 10, 12, 13] } else { [0, 16, 34, 36, 37] };
        for (at, bits) in places.into_iter().zip([1, 1, 1, 23, 5]) {
            let mut key = scene.entry_key(port);
            key[at] ^= bits;
            scene.set_conntrack(&key, &CtEntry::for_backend(1, REV_NAT))?;
        }
    }
    for port in 1000..1006 {
        let memory = scene.memory(*rng.pick(&ids), *rng.pick(&[1_000, 2_000_000_000, 200_000_000_000]));
        scene.remember(6, port, 443, &memory)?;
        scene.remember(17, port, 53, &memory)?;
    }
    if rng.one_in(2) {
        scene.moved_off(*rng.pick(&ids), 7, 1_000_000_000)?;
    }
    if rng.one_in(2) {
        scene.affinity_match(*rng.pick(&ids), true)?;
    }
    Ok(mode)
}

/// A packet that is mostly right.
fn packet(scene: &Scene, rng: &mut Rng) -> Vec<u8> {
    let port = 1000 + rng.below(8) as u16;
    let payload = match rng.below(7) {
        0..=2 => scene.tcp(port, *rng.pick(&[tcp::SYN, tcp::ACK, tcp::ACK, tcp::FIN | tcp::ACK, tcp::RST])),
        3 => scene.udp(port),
        4 => InnerPacket::new(scene.client(), scene.outside(), Inner::Echo { identifier: port, sequence: 1 }),
        5 => {
            let about = Box::new(scene.tcp(port, tcp::ACK).reversed());
            InnerPacket::new(scene.client(), scene.outside(), Inner::TooBig { about })
        }
        _ => InnerPacket::new(scene.client(), scene.outside(), Inner::Other { protocol: rng.number() as u8 }),
    };
    let fragment =
        Fragment { identification: rng.below(4) as u32, offset: rng.below(3) as u16, more: rng.one_in(2) };
    let payload = if rng.one_in(8) { payload.fragment(fragment) } else { payload };
    let mut inner = payload.padded(rng.below(40)).build(Tag { stream: 0, sequence: 0 });
    if rng.one_in(8) {
        for byte in &mut inner {
            *byte = rng.number() as u8;
        }
    }
    let mut frame = scene.frame_with(*rng.pick(&PORTS), &inner, *rng.pick(&Checksum::ALL), !rng.one_in(4));
    mutate(&mut frame, rng);
    frame
}

pub(crate) fn mutate(frame: &mut Vec<u8>, rng: &mut Rng) {
    if rng.one_in(3) {
        return;
    }
    for _ in 0..rng.below(4) {
        // Headers more often than what is behind them.
        let end = if rng.one_in(3) { frame.len() } else { 80.min(frame.len()) };
        let at = rng.below(end);
        frame[at] = if rng.one_in(2) { frame[at] ^ 1 << rng.below(8) } else { rng.number() as u8 };
    }
    if rng.one_in(6) {
        frame.truncate(rng.below(frame.len() + 1));
    }
    if rng.one_in(12) {
        let at = rng.below(frame.len() + 1);
        let more: Vec<u8> = (0..rng.below(64)).map(|_| rng.number() as u8).collect();
        frame.splice(at..at, more);
    }
    // BPF_PROG_TEST_RUN takes nothing shorter than the headers that it looks at itself.
    frame.resize(frame.len().max(15), 0);
    let shortest = match frame.get(12..14) {
        Some([0x08, 0x00]) => 34,
        Some([0x86, 0xdd]) => 54,
        _ => 15,
    };
    frame.resize(frame.len().max(shortest), 0);
}

/// What the maps were, to see that each change is one that may be.
struct Watch {
    mode: u8,
    conntrack: Elements,
    /// The same, as cheap to compare as it is to read.
    raw: Raw,
    others: coil_guard_tests::cilium::Dump,
    /// Packets that were decided about.
    decided: u64,
    /// Packets whose port was changed.
    rewritten: u64,
}

impl Watch {
    fn begin(scene: &Scene, mode: u8) -> Result<Self> {
        let mut others = scene.guard.cilium().dump()?;
        others.maps.remove(scene.family.names().conntrack);
        Ok(Self {
            mode,
            conntrack: scene.guard.cilium().conntrack(scene.family)?.dump()?,
            raw: scene.guard.cilium().conntrack(scene.family)?.raw()?,
            others,
            decided: scene.guard.egress(EGRESS)?.packets,
            rewritten: rewritten(scene)?,
        })
    }

    fn pass(&mut self, scene: &Scene, frame: &[u8]) -> Result<()> {
        let output = scene.guard.pass(frame)?;
        let decided = scene.guard.egress(EGRESS)?.packets;
        // A packet that was not decided about must not write at all; that is seen when the round ends.
        if decided != self.decided {
            self.decided = decided;
            self.compare(scene, frame)?;
        }
        if output != frame {
            let rewritten = rewritten(scene)?;
            ensure!(rewritten > self.rewritten, "a packet that was not drained changed: {}", hex(&output));
            self.rewritten = rewritten;
            only_the_port(frame, &output, self.mode)?;
        }
        Ok(())
    }

    fn compare(&mut self, scene: &Scene, frame: &[u8]) -> Result<()> {
        let conntrack = scene.guard.cilium().conntrack(scene.family)?;
        let raw = conntrack.raw()?;
        if raw == self.raw {
            return Ok(());
        }
        self.raw = raw;
        let now = conntrack.dump()?;
        for (key, after) in &now {
            let before = self.conntrack.get(key);
            if before != Some(after) {
                ensure!(self.mode != mode::REWRITE, "rewrite wrote the entry {}", hex(key));
                judge(scene, frame, key, before, after)?;
            }
        }
        for key in self.conntrack.keys() {
            ensure!(now.contains_key(key), "the entry {} is gone", hex(key));
        }
        self.conntrack = now;
        Ok(())
    }

    fn end(&self, scene: &Scene) -> Result<()> {
        let mut others = scene.guard.cilium().dump()?;
        let conntrack = others.maps.remove(scene.family.names().conntrack);
        ensure!(
            conntrack.as_ref() == Some(&self.conntrack),
            "a packet that is none of the guard's wrote an entry"
        );
        let changes = self.others.changes(&others);
        ensure!(changes.is_empty(), "maps that are only read changed: {changes:?}");
        let egress = scene.guard.egress(EGRESS)?;
        ensure!(egress.packets >= egress.drained, "{egress:?}");
        Ok(())
    }
}

/// One entry came into being or changed: it has to be one of this packet, and no field may change that is not the guard's.
fn judge(scene: &Scene, frame: &[u8], key: &[u8], before: Option<&Vec<u8>>, after: &[u8]) -> Result<()> {
    let change = || Change {
        map: scene.family.names().conntrack,
        key: key.to_vec(),
        before: before.cloned(),
        after: Some(after.to_vec()),
    };
    let v4 = scene.family == IpFamily::V4;
    let (width, ports) = if v4 { (4, 8) } else { (16, 32) };
    let (client, service) = if v4 { (26..30, 30..34) } else { (22..38, 38..54) };
    let (destination, source) = (&key[..width], &key[width..2 * width]);
    let [first_port, second_port] = [ports, ports + 2].map(|at| u16::from_be_bytes([key[at], key[at + 1]]));
    let of_service = key[ports + 5] == CT_SERVICE;
    let allowed = if of_service {
        // The packet's own tuple, or a drain port of its client and service.
        let own_port = frame
            .windows(4)
            .any(|window| window[..2] == first_port.to_be_bytes() && window[2..] == FOU_PORT.to_be_bytes());
        source == &frame[client]
            && destination == &frame[service]
            && second_port == FOU_PORT
            && (own_port && first_port < 61_000 || (61_000..65_096).contains(&first_port))
    } else {
        key[ports + 5] == CT_EGRESS && destination == &frame[client] && second_port == FOU_PORT
    };
    ensure!(allowed && key[ports + 4] == 17, "not an entry of this packet: {:?}", change());
    let mut expected = before.cloned().unwrap_or_else(|| vec![0; after.len()]);
    if of_service {
        expected[8..16].copy_from_slice(&after[8..16]);
    } else {
        expected[32..36].copy_from_slice(&after[32..36]);
    }
    if of_service || before.is_none() {
        expected[38..40].copy_from_slice(&REV_NAT);
    }
    ensure!(expected == after, "a field changed that must not: {:?}", change());
    Ok(())
}

/// Packets counted under a verdict that comes with another source port.
fn rewritten(scene: &Scene) -> Result<u64> {
    let counters = scene.guard.counters()?;
    let with_a_port = [
        Reason::Drained,
        Reason::Settling,
        Reason::NoLive,
        Reason::Rewritten,
        Reason::NewPort,
        Reason::HeldByAffinity,
        Reason::NotMoved,
    ];
    Ok(with_a_port.into_iter().map(|reason| counters.of(reason)).sum())
}

/// Nothing but the outer source port, now one that the mode gives, and the checksum behind it differs.
fn only_the_port(frame: &[u8], output: &[u8], mode: u8) -> Result<()> {
    ensure!(frame.len() == output.len(), "another length");
    let differing: Vec<_> = (0..frame.len()).filter(|at| frame[*at] != output[*at]).collect();
    let Some(first) = differing.first() else { return Ok(()) };
    // The port's high byte may be the same before and after.
    let udp = [*first, first.wrapping_sub(1)].into_iter().find(|udp| {
        output.get(udp + 2..udp + 4) == Some(&FOU_PORT.to_be_bytes()[..])
            && differing.iter().all(|at| (*udp..udp + 2).contains(at) || (udp + 6..udp + 8).contains(at))
    });
    let udp = udp.with_context(|| format!("bytes {differing:?} changed: {}", hex(output)))?;
    let port = u16::from_be_bytes([output[udp], output[udp + 1]]);
    let range = if mode == mode::REWRITE { 65_096..=65_535 } else { 61_000..=65_095 };
    ensure!(range.contains(&port), "the new source port is {port}");
    ensure!(
        (frame[udp + 6..udp + 8] == [0, 0]) == (output[udp + 6..udp + 8] == [0, 0]),
        "the checksum came or went: {}",
        hex(output)
    );
    Ok(())
}
