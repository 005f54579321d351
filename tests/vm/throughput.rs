//! How fast traffic is with the guard and without: `cargo xtask bench vm`.
//!
//! Two client pods that are alike, of which one is guarded, send in turns of some hundred milliseconds, and each turn is
//! compared with the one before it. Then the other one is the guarded one. The emulated processor is slow, but slow for
//! the kernel and the program alike: it is the ratio that counts.

use std::{
    fs,
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpListener, TcpStream, UdpSocket},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use coil_guard_common::abi::mark;
use coil_guard_tests::{
    bench::{Goal, Machine, Report, Spread, Table, short},
    cilium::IpFamily,
    net::lab_test,
    scenario::{Scenario, check::wait_settled},
};
use serde_json::json;

use crate::{
    coil::Tunnels,
    outside,
    world::{PATIENCE, World, lab},
};

/// Set to `full` for figures that can be told to others.
const EXTENT: &str = "COIL_GUARD_BENCH";
const FAMILY: IpFamily = IpFamily::V4;
/// Port of the service outside that throws everything away.
const DISCARD: u16 = 19;
/// What a small datagram carries.
const SMALL: usize = 64;
/// Of unguarded.
const GOAL: f64 = 0.99;

const STATES: [&str; 3] = ["reset, healthy", "drain, healthy", "drain, on a leaving backend"];
const KINDS: [&str; 2] = ["TCP bulk", "UDP, 64 bytes"];

/// Rates without and with the guard, by state and kind of traffic.
type Rates = [[Vec<(f64, f64)>; KINDS.len()]; STATES.len()];

#[derive(Clone, Copy)]
struct Effort {
    pairs: usize,
    turn: Duration,
    guarded: &'static [usize],
}

#[test]
fn traffic_is_as_fast_with_the_guard() -> Result<()> {
    let full = std::env::var(EXTENT).is_ok_and(|extent| extent == "full");
    let effort = if full {
        Effort { pairs: 12, turn: Duration::from_millis(250), guarded: &[0, 1] }
    } else {
        Effort { pairs: 1, turn: Duration::from_millis(100), guarded: &[1] }
    };
    let (machine, began) = (Machine::here(), Instant::now());
    let mut rates = Rates::default();
    for guarded in effort.guarded {
        lab_test(|| reset(*guarded, effort, &mut rates)).context("mode reset")?;
        lab_test(|| drain(*guarded, effort, &mut rates)).context("mode drain")?;
    }
    let report = report(&rates, machine, began.elapsed(), !full)?;
    for row in report.tables.iter().flat_map(|table| &table.rows) {
        println!("figure: {}", row.join(", "));
    }
    println!("report: {}", serde_json::to_string(&report)?);
    Ok(())
}

fn start(mode: &str, guarded: usize) -> Result<World> {
    // The second egress pod is not known before the flows are on the first.
    let builder = Scenario::builder(lab().families(&[FAMILY]).clients(2).backends(2).published(1));
    World::start(builder.mode(mode).only_client(guarded), Tunnels::COIL)
}

fn reset(guarded: usize, effort: Effort, rates: &mut Rates) -> Result<()> {
    let world = start("reset", guarded)?;
    let clients = clients(&world, guarded)?;
    clients.compare(&world, effort, &mut rates[0])
}

fn drain(guarded: usize, effort: Effort, rates: &mut Rates) -> Result<()> {
    let mut world = start("drain", guarded)?;
    let clients = clients(&world, guarded)?;
    clients.compare(&world, effort, &mut rates[1])?;
    world.bring_up(1)?;
    world.scenario.wait_mark(1, mark::READY)?;
    world.begin_to_delete(0)?;
    wait_settled();
    clients.compare(&world, effort, &mut rates[2])?;
    let agent = world.scenario.agent()?;
    let drained = agent.metric("coil_guard_packets_total", &["reason=\"drained\""])?;
    ensure!(drained > 100.0, "only {drained} packets were drained\n{}", agent.log_tail());
    Ok(())
}

/// The unguarded client's connections and the guarded one's.
struct Clients([Client; 2]);

fn clients(world: &World, guarded: usize) -> Result<Clients> {
    let address = SocketAddr::new(outside::address(FAMILY), DISCARD);
    let (listener, datagrams) = world.outside.namespace.run(|| {
        Ok((
            TcpListener::bind(address).context("cannot listen for the discard service")?,
            // Nobody reads it: what does not fit is thrown away where it has arrived.
            UdpSocket::bind(address).context("cannot bind the discard service")?,
        ))
    })?;
    let open = |client| Client::open(world, client, &listener, address);
    let clients = [open(1 - guarded)?, open(guarded)?];
    // It lives as long as the guest's job.
    std::mem::forget(datagrams);
    Ok(Clients(clients))
}

impl Clients {
    fn compare(
        &self,
        world: &World,
        effort: Effort,
        rates: &mut [Vec<(f64, f64)>; KINDS.len()],
    ) -> Result<()> {
        let [without, with] = &self.0;
        let [bulk, small] = rates;
        // The first turns open windows and fill caches.
        for turn in 0..effort.pairs + 1 {
            let pair = (without.bulk(effort.turn)?, with.bulk(effort.turn)?);
            let small_pair = (without.small(world, effort.turn)?, with.small(world, effort.turn)?);
            if turn > 0 {
                bulk.push(pair);
                small.push(small_pair);
            }
        }
        Ok(())
    }
}

/// One client's connections to the host outside.
struct Client {
    stream: TcpStream,
    received: Arc<AtomicU64>,
    datagrams: UdpSocket,
}

impl Client {
    fn open(world: &World, client: usize, listener: &TcpListener, to: SocketAddr) -> Result<Self> {
        let (stream, datagrams) = world.scenario.lab.client(client).namespace.run(|| {
            let stream = TcpStream::connect_timeout(&to, PATIENCE).context("cannot connect")?;
            stream.set_write_timeout(Some(PATIENCE))?;
            let datagrams = UdpSocket::bind("0.0.0.0:0")?;
            datagrams.connect(to)?;
            Ok((stream, datagrams))
        })?;
        let (mut accepted, _) = listener.accept().context("cannot accept")?;
        let received = Arc::new(AtomicU64::new(0));
        let count = Arc::clone(&received);
        thread::spawn(move || {
            let mut buffer = vec![0; 256 * 1024];
            while let Ok(length) = accepted.read(&mut buffer)
                && length > 0
            {
                count.fetch_add(length as u64, Ordering::Relaxed);
            }
        });
        Ok(Self { stream, received, datagrams })
    }

    /// Bytes a second, until the last one has arrived.
    fn bulk(&self, turn: Duration) -> Result<f64> {
        let chunk = vec![0x5a; 64 * 1024];
        let (began, before) = (Instant::now(), self.received.load(Ordering::Relaxed));
        let mut sent = 0;
        while began.elapsed() < turn {
            (&self.stream).write_all(&chunk).context("the transfer broke")?;
            sent += chunk.len() as u64;
        }
        while self.received.load(Ordering::Relaxed) < before + sent {
            ensure!(began.elapsed() < PATIENCE, "the transfer stands still");
            thread::sleep(Duration::from_micros(500));
        }
        Ok(sent as f64 / began.elapsed().as_secs_f64())
    }

    /// Datagrams a second that arrive outside.
    fn small(&self, world: &World, turn: Duration) -> Result<f64> {
        let datagram = [0x5a; SMALL];
        let before = arrived(world)?;
        let began = Instant::now();
        while began.elapsed() < turn {
            for _ in 0..16 {
                self.datagrams.send(&datagram).context("cannot send")?;
            }
        }
        let took = began.elapsed();
        let packets = arrived(world)? - before;
        ensure!(packets > 0, "no datagram arrived outside");
        Ok(packets as f64 / took.as_secs_f64())
    }
}

/// Packets that the host outside has got.
fn arrived(world: &World) -> Result<u64> {
    world.outside.namespace.run(|| {
        let text = fs::read_to_string("/proc/thread-self/net/dev").context("cannot read net/dev")?;
        let line = text.lines().find_map(|line| line.trim_start().strip_prefix("eth0:"));
        let packets = line.and_then(|line| line.split_whitespace().nth(1)?.parse().ok());
        packets.context("net/dev has no packets of eth0")
    })
}

fn report(rates: &Rates, machine: Machine, took: Duration, quick: bool) -> Result<Report> {
    let columns = ["traffic", "unguarded", "guarded", "ratio"];
    let mut table = Table::new(
        "Through FoU as the kernel makes it, in an emulated machine: Mbit/s, thousands of packets a second",
        &columns,
    );
    let (mut goals, mut figures) = (Vec::new(), Vec::new());
    for (state, of_state) in STATES.iter().zip(rates) {
        for (kind, pairs) in KINDS.iter().zip(of_state) {
            let spread = |get: fn(&(f64, f64)) -> f64| Spread::of(pairs.iter().map(get).collect());
            let (without, with) = (spread(|pair| pair.0), spread(|pair| pair.1));
            let ratio = spread(|pair| pair.1 / pair.0);
            let unit = if kind.starts_with("TCP") { 8e-6 } else { 1e-3 };
            let name = format!("{kind}: {state}");
            table.row([
                name.clone(),
                short(without.median * unit),
                short(with.median * unit),
                format!("{:.3} ({:.3} to {:.3})", ratio.median, ratio.low, ratio.high),
            ]);
            goals.push(Goal::at_least(&format!("{name}, of unguarded"), GOAL, ratio.median, ""));
            figures.push(json!({"traffic": name, "unguarded": without, "guarded": with, "ratio": ratio}));
        }
    }
    Ok(Report {
        part: "vm".to_owned(),
        machine,
        seconds: took.as_secs_f64(),
        quick,
        tables: vec![table],
        goals,
        figures: serde_json::to_value(figures)?,
    })
}
