//! A client pod that may send what it likes, and does.

use std::{
    net::{IpAddr, Ipv4Addr},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use aya::maps::{HashMap, Map, MapData};
use coil_guard_common::abi::{FLOW_BURST, InnerFlow, InnerFlowKey, LAYOUT_VERSION, flow_cost, maps, mark};
use coil_guard_tests::{
    cilium::IpFamily,
    fou::{FOU_PORT, Fragment, FrameSender, Inner, InnerPacket, Outer, StreamReport, Tag, inner::tcp},
    lab::{Lab, eventually},
    net::lab_test,
    program::Rng,
    scenario::{Scenario, check},
};

use crate::support::{guard_pins, leaves_nothing, setting};

const FAMILY: IpFamily = IpFamily::V4;
const NEIGHBOUR: usize = 0;
const HOSTILE: usize = 1;
/// Flows of the neighbour on each of two backends that leave one after the other.
const FLOWS: u16 = 500;
const OUTSIDE: [u8; 4] = [198, 51, 100, 7];

/// The neighbour's connections: every other one UDP, of which nothing but the memory says that they are old.
fn flows(scenario: &Scenario, first_port: u16, opening: bool) -> Vec<InnerPacket> {
    let source = scenario.lab.client(NEIGHBOUR).address(FAMILY);
    let flags = if opening { tcp::SYN } else { tcp::ACK };
    let flow = |port: u16| match port % 2 {
        0 => InnerPacket::tcp((source, port), (OUTSIDE.into(), 443), flags),
        _ => InnerPacket::udp((source, port), (OUTSIDE.into(), 443)),
    };
    (first_port..first_port + FLOWS).map(flow).collect()
}

/// One packet of each of the neighbour's connections from this port up, under an outer source port.
fn one_of_each(scenario: &Scenario, outer: u16, first_port: u16, opening: bool) -> Result<StreamReport> {
    let inner = flows(scenario, first_port, opening);
    let spec = scenario.lab.spec(NEIGHBOUR, FAMILY).source_port(outer).inner(inner).count(FLOWS.into());
    let report = scenario.lab.stream(NEIGHBOUR, spec)?.finish(false)?;
    report.ensure_exactly_once()?;
    Ok(report)
}

/// Opens connections under an outer port and says the backend that they are on.
fn open(scenario: &Scenario, outer: u16, first_port: u16) -> Result<usize> {
    let report = one_of_each(scenario, outer, first_port, true)?;
    let home = report.backend_of(0).context("an arrival")?;
    check::stayed(&report, home)?;
    Ok(home)
}

/// Lets a backend leave, and the next new connection under this outer port move on.
fn leave(scenario: &mut Scenario, home: usize, outer: u16, new_port: u16) -> Result<()> {
    scenario.terminate(home)?;
    scenario.wait_mark(home, mark::LEAVING)?;
    check::wait_settled();
    let source = scenario.lab.client(NEIGHBOUR).address(FAMILY);
    let syn = InnerPacket::tcp((source, new_port), (OUTSIDE.into(), 443), tcp::SYN);
    let spec = scenario.lab.spec(NEIGHBOUR, FAMILY).source_port(outer).inner(vec![syn]).count(1);
    let report = scenario.lab.stream(NEIGHBOUR, spec)?.finish(false)?;
    report.ensure_exactly_once()?;
    ensure!(report.backend_of(0) != Some(home), "a new connection on backend {home}, which leaves");
    Ok(())
}

/// Lets a packet go no further than the node: nobody has to count a million arrivals.
fn end_at_the_node(packet: &mut [u8]) {
    let word = |packet: &[u8], at: usize| u32::from(u16::from_be_bytes([packet[at], packet[at + 1]]));
    let before = word(packet, 8);
    packet[8] = 1;
    let sum = (!word(packet, 10) & 0xffff) + (!before & 0xffff) + word(packet, 8);
    let sum = (sum & 0xffff) + (sum >> 16);
    let sum = (sum & 0xffff) + (sum >> 16);
    packet[10..12].copy_from_slice(&(!sum as u16).to_be_bytes());
}

/// What the hostile pod has sent.
#[derive(Debug, Default)]
struct Sent {
    packets: u64,
    forged: u64,
}

/// Packets of flows that nobody ever opened, first fragments of datagrams that never end, source ports that the guard gives, and
/// every eighth packet in the neighbour's name.
fn flood(scenario: &Scenario, packets: u64, random: &mut Rng) -> Result<Sent> {
    let sender = FrameSender::open(scenario.lab.client(HOSTILE))?;
    let address = |client| scenario.lab.client(client).address(FAMILY);
    let (own, neighbour, service) = (address(HOSTILE), address(NEIGHBOUR), scenario.lab.service(FAMILY));
    let mut sent = Sent::default();
    for number in 0..packets {
        let forged = number % 8 == 0;
        let port = match number % 5 {
            0 => 61_000 + random.below(4096) as u16,
            1 => 40_000 + random.below(16) as u16,
            _ => FOU_PORT,
        };
        let from = if forged { neighbour } else { own };
        let [a, b, c, d] = (random.number() as u32).to_be_bytes();
        let (inside, outside): (IpAddr, IpAddr) =
            (Ipv4Addr::new(10, a, b, c).into(), Ipv4Addr::new(100, 64, d, a).into());
        let ports = (random.number() as u16, random.number() as u16);
        let inner = match number % 3 {
            0 => InnerPacket::tcp((inside, ports.0), (outside, ports.1), tcp::ACK),
            1 => InnerPacket::udp((inside, ports.0), (outside, ports.1)),
            _ => InnerPacket::new(
                inside,
                outside,
                Inner::Udp { source_port: ports.0, destination_port: ports.1 },
            )
            .fragment(Fragment { identification: number as u32 & 0xffff, offset: 0, more: true }),
        };
        let inner = inner.build(Tag { stream: 0, sequence: number });
        let mut packet = Outer::coil((from, port), service).packet(&inner);
        end_at_the_node(&mut packet);
        sender.send_packet(&packet)?;
        sent.packets += 1;
        sent.forged += u64::from(forged);
    }
    Ok(sent)
}

/// Flows of a client in one of the program's memories.
fn remembered(scenario: &Scenario, map: &str, client: usize) -> Result<u64> {
    let path = guard_pins().join(LAYOUT_VERSION).join(map);
    if !path.exists() {
        return Ok(0);
    }
    let data = MapData::from_pin(&path).with_context(|| format!("cannot open {}", path.display()))?;
    let map: HashMap<_, InnerFlowKey, InnerFlow> = HashMap::try_from(Map::from_map_data(data)?)?;
    let IpAddr::V4(address) = scenario.lab.client(client).address(FAMILY) else {
        anyhow::bail!("the client's address is not IPv4")
    };
    let address = coil_guard_common::abi::v4_mapped(address.octets());
    let mut count = 0;
    for key in map.keys() {
        count += u64::from(key?.client == address);
    }
    Ok(count)
}

/// Flows of a report that are not on their home.
fn astray(report: &StreamReport, home: usize) -> usize {
    report.backends().values().filter(|backend| **backend != home).count()
}

#[test]
fn a_client_that_floods_every_memory_costs_the_others_nothing() -> Result<()> {
    lab_test(|| {
        let memory: u32 = setting("COIL_GUARD_FLOOD_MEMORY", 16_384);
        let packets: u64 = setting("COIL_GUARD_FLOOD", 131_072);
        let seed = setting("COIL_GUARD_SEED", 1);
        let lab = Lab::builder().families(&[FAMILY]).clients(2).backends(4);
        let mut scenario = Scenario::builder(lab)
            .mode("drain")
            .grace(900)
            .arguments(&["--map-inner-flows", &memory.to_string()])
            .start()?;
        // Two backends leave. Of the flows on the first nothing but the memory tells any more where they belong.
        let first = open(&scenario, FOU_PORT, 10_000)?;
        let mut outer = 30_000;
        let second = loop {
            let home = open(&scenario, outer, 20_000)?;
            if home != first {
                break home;
            }
            outer += 1;
        };
        leave(&mut scenario, first, FOU_PORT, 1001)?;
        leave(&mut scenario, second, outer, 1002)?;

        let (log_before, events_before) = (scenario.agent()?.log().len(), scenario.events().len());
        let counted = |reason: &str| {
            let label = format!("reason=\"{reason}\"");
            Ok::<_, anyhow::Error>(scenario.agent()?.metric("coil_guard_packets_total", &[&label])? as u64)
        };
        let forged_before = counted("foreign_source")?;
        let began = Instant::now();
        let sent = flood(&scenario, packets, &mut Rng::new(seed))?;
        let took = began.elapsed();

        let old = one_of_each(&scenario, FOU_PORT, 10_000, false)?;
        let newer = one_of_each(&scenario, outer, 20_000, false)?;
        let (lost_first, lost_second) = (astray(&old, first), astray(&newer, second));
        let shared = remembered(&scenario, maps::INNER_FLOWS, HOSTILE)?;
        let crowded = remembered(&scenario, maps::CROWDED_FLOWS, HOSTILE)?;
        let log = scenario.agent()?.log()[log_before..].to_owned();
        let events = scenario.events().len() - events_before;
        eprintln!(
            "seed {seed}: {sent:?} in {took:.1?} against a memory of {memory}; of 1000 idle drained flows of the neighbour {} went \
             astray; {shared} flows of the flood in the shared memory, {crowded} in the other; {} bytes of log, {events} events",
            lost_first + lost_second,
            log.len(),
        );
        ensure!(
            lost_first + lost_second == 0,
            "{lost_first} of {FLOWS} and {lost_second} of {FLOWS} went astray"
        );
        // The client's share, twice as much for two processors that take the same one at once.
        let share = (FLOW_BURST + took.as_nanos() as u64) / flow_cost(memory);
        ensure!(
            shared <= 2 * share,
            "{shared} flows of the flood are in the shared memory, its share is {share}"
        );
        ensure!(crowded > 0, "the flood was too small to need more than its share");
        eventually("count of the forged packets", scenario.patience(), || {
            let forged = counted("foreign_source")? - forged_before;
            Ok(if forged == sent.forged { Ok(()) } else { Err(forged) })
        })?;
        // One event of a kind in a second for each client, service and backend, whatever is sent.
        let lines = log.lines().count();
        let bound = 20 * (2 + took.as_secs() as usize);
        ensure!(lines <= bound && events <= bound, "{lines} lines and {events} events in {took:?}:\n{log}");
        ensure!(
            took < Duration::from_nanos(FLOW_BURST) || memory > 16_384,
            "too slow to be a flood: {took:?}"
        );
        leaves_nothing(&scenario, &[NEIGHBOUR, HOSTILE])
    })
}
