//! Packets through the lab with and without the guard.
//!
//! Two client pods that are alike, of which one is guarded, send in turns of some milliseconds; each turn is compared with
//! the one before it, so that what else the machine does meets both. Halfway the other one is the guarded one. The path is
//! a socket, two veth pairs, the model of Cilium and a route: far shorter than a real one, which makes the guard's part
//! of it larger than it is anywhere else.

use std::{
    fs,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use coil_guard_common::abi::mark;
use serde::Serialize;

use super::{Findings, Options, Spread, Table, measure::Extent, short};
use crate::{
    cilium::IpFamily,
    fou::{ChecksumKind, FOU_PORT, InnerPacket, Tag, UdpSender},
    lab::Lab,
    net::isolated,
    scenario::{Scenario, check::wait_settled},
};

const FAMILY: IpFamily = IpFamily::V4;
const TURN: Duration = Duration::from_millis(20);
/// Bytes of the inner packet, headers and all: an acknowledgement or a query, and a full one.
const SIZES: [(&str, usize); 2] = [("small, 64 bytes", 64), ("bulk, 1400 bytes", 1400)];

/// What the guard does meanwhile.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
enum State {
    /// Mode reset, the backend is healthy.
    Reset,
    /// Mode drain, the backend is healthy and the flow known.
    Drain,
    /// Mode drain, the backend is leaving: each packet is given another source port.
    Drained,
}

#[derive(Debug, Serialize)]
struct Figures {
    packets: &'static str,
    state: State,
    /// Packets a second that arrived, without and with the guard.
    unguarded: Spread,
    guarded: Spread,
    /// Of each turn and the one before it.
    ratio: Spread,
}

pub(super) fn run(options: &Options) -> Result<Findings> {
    let pairs = options.extent.pick(60, 3);
    let mut all = Vec::new();
    for state in [State::Reset, State::Drain, State::Drained] {
        let mut rates: [Vec<(f64, f64)>; SIZES.len()] = Default::default();
        for guarded in [0, 1] {
            isolated(|| measure(state, guarded, pairs, &mut rates))
                .with_context(|| format!("{state:?}, client {guarded} guarded"))?;
        }
        for ((packets, _), rates) in SIZES.into_iter().zip(rates) {
            let figures = Figures {
                packets,
                state,
                unguarded: Spread::of(rates.iter().map(|(without, _)| *without).collect()),
                guarded: Spread::of(rates.iter().map(|(_, with)| *with).collect()),
                ratio: Spread::of(rates.iter().map(|(without, with)| with / without).collect()),
            };
            eprintln!("{figures:?}");
            all.push(figures);
        }
    }
    Ok(Findings {
        tables: vec![table(&all, options.extent)],
        goals: Vec::new(),
        figures: serde_json::to_value(&all)?,
    })
}

/// Rates without and with the guard, packets a second.
fn measure(
    state: State,
    guarded: usize,
    pairs: usize,
    rates: &mut [Vec<(f64, f64)>; SIZES.len()],
) -> Result<()> {
    let mode = if state == State::Reset { "reset" } else { "drain" };
    // The second backend is not known before the flows are on the first.
    let lab = Lab::builder().families(&[FAMILY]).clients(2).backends(2).published(1);
    let mut scenario = Scenario::builder(lab)
        .mode(mode)
        .grace(600)
        .arguments(&["--log-level", "info"])
        .only_client(guarded)
        .start()?;
    // Sockets take their places: receivers that look at each packet would be what is measured.
    scenario.lab.backend_receivers.clear();
    scenario.lab.client_receivers.clear();
    let _sinks = scenario
        .lab
        .topology
        .backends
        .iter()
        .map(|pod| UdpSender::open(pod, (pod.address(FAMILY), FOU_PORT), ChecksumKind::Zero))
        .collect::<Result<Vec<_>>>()?;
    for ((_, size), rates) in SIZES.into_iter().zip(rates) {
        let senders =
            [Sender::open(&scenario.lab, 1 - guarded, size)?, Sender::open(&scenario.lab, guarded, size)?];
        if state == State::Drained && scenario.lab.backend_id(FAMILY, 1).is_err() {
            senders.iter().try_for_each(|sender| sender.send_for(TURN).map(drop))?;
            scenario.lab.publish_backend(1)?;
            scenario.announce_backend(1)?;
            scenario.wait_mark(1, mark::READY)?;
            scenario.terminate(0)?;
            scenario.wait_mark(0, mark::LEAVING)?;
            wait_settled();
        }
        // The first turns find cold caches.
        for turn in 0..pairs + 2 {
            let [without, with] = [senders[0].rate(&scenario.lab)?, senders[1].rate(&scenario.lab)?];
            if turn >= 2 {
                rates.push((without, with));
            }
        }
    }
    let agent = scenario.agent()?;
    let drained = agent.metric("coil_guard_packets_total", &["reason=\"drained\""])?;
    ensure!(
        (drained > 0.0) == (state == State::Drained),
        "{drained} packets were drained in the state {state:?}\n{}",
        agent.log_tail()
    );
    Ok(())
}

/// Sends one packet over and over.
struct Sender {
    socket: UdpSender,
    service: (std::net::IpAddr, u16),
    inner: Vec<u8>,
}

impl Sender {
    fn open(lab: &Lab, client: usize, size: usize) -> Result<Self> {
        let pod = lab.client(client);
        let source = pod.address(FAMILY);
        let packet = InnerPacket::udp((source, 40_000), ([198, 51, 100, 1].into(), 443));
        let tag = Tag { stream: 1, sequence: 1 };
        let least = packet.build(tag).len();
        ensure!(size >= least, "an inner packet has at least {least} bytes");
        Ok(Self {
            socket: UdpSender::open(pod, (source, FOU_PORT), ChecksumKind::Zero)?,
            service: lab.service(FAMILY),
            inner: packet.padded(size - least).build(tag),
        })
    }

    /// Sends for some time; returns how long it took.
    fn send_for(&self, time: Duration) -> Result<Duration> {
        let began = Instant::now();
        loop {
            for _ in 0..32 {
                self.socket.send(self.service, &self.inner).context("cannot send")?;
            }
            let took = began.elapsed();
            if took >= time {
                return Ok(took);
            }
        }
    }

    /// Packets a second that arrive at the egress pods.
    fn rate(&self, lab: &Lab) -> Result<f64> {
        let before = arrived(lab)?;
        let took = self.send_for(TURN)?;
        let packets = arrived(lab)? - before;
        ensure!(packets > 0, "nothing arrived at the egress pods");
        Ok(packets as f64 / took.as_secs_f64())
    }
}

/// Packets that the node has sent to egress pods.
fn arrived(lab: &Lab) -> Result<u64> {
    let text = fs::read_to_string("/proc/thread-self/net/dev").context("cannot read net/dev")?;
    let mut packets = 0;
    for pod in &lab.topology.backends {
        let line =
            text.lines().find_map(|line| line.trim_start().strip_prefix(&pod.host_device)?.strip_prefix(':'));
        let sent = line.and_then(|line| line.split_whitespace().nth(9)?.parse::<u64>().ok());
        packets += sent.with_context(|| format!("net/dev has no packets sent by {}", pod.host_device))?;
    }
    Ok(packets)
}

fn table(all: &[Figures], extent: Extent) -> Table {
    let title = format!(
        "Thousands of packets a second, medians, and the ratio with its middle half; turns of {} ms{}",
        TURN.as_millis(),
        if extent == Extent::Quick { ", a smoke run" } else { "" }
    );
    let mut table = Table::new(&title, &["packets", "unguarded", "guarded", "ratio"]);
    for figures in all {
        let state = match figures.state {
            State::Reset => "reset, healthy",
            State::Drain => "drain, healthy",
            State::Drained => "drain, on a leaving backend",
        };
        table.row([
            format!("{}: {state}", figures.packets),
            short(figures.unguarded.median * 1e-3),
            short(figures.guarded.median * 1e-3),
            format!("{:.3} ({:.3} to {:.3})", figures.ratio.median, figures.ratio.low, figures.ratio.high),
        ]);
    }
    table
}
