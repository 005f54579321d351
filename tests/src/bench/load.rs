//! What attaching the program to many client pods costs, once and again.

use std::{
    collections::BTreeMap,
    fs,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use aya::{
    maps::MapInfo,
    programs::{ProgramInfo, loaded_programs},
};
use serde::Serialize;

use super::{
    Findings, Goal, Options, Table,
    process::{mebibytes, memory, processor_time},
    short,
};
use crate::{
    cilium::IpFamily,
    lab::{Lab, eventually},
    scenario::{Agent, Scenario},
};

const PATIENCE: Duration = Duration::from_secs(120);

/// One start of an agent.
#[derive(Debug, Serialize)]
struct Start {
    /// From the start of the process until /readyz says so, seconds.
    ready: f64,
    /// Until every pod has this agent's program, seconds.
    attached: f64,
    /// Processor time of the agent until then, the kernel's verifier in it, seconds.
    processor: f64,
    /// Resident memory then, bytes.
    resident: u64,
}

/// Kernel memory of the programs.
#[derive(Debug, Default, Serialize)]
struct Kernel {
    /// Programs on the pods' devices.
    programs: usize,
    /// Of one of them: memory, machine code, instructions that the verifier went through.
    program_bytes: u64,
    code_bytes: u64,
    verified: u64,
    /// Maps that one pod's program alone uses, and their memory in all.
    own_maps: usize,
    own_map_bytes: u64,
    /// Maps that all share.
    shared_maps: usize,
    shared_map_bytes: u64,
}

#[derive(Debug, Serialize)]
struct Figures {
    clients: usize,
    first: Start,
    again: Start,
    kernel: Kernel,
}

pub(super) fn run(options: &Options) -> Result<Findings> {
    let clients = options.extent.pick(250, 3);
    let lab = Lab::builder().families(&[IpFamily::V4]).clients(clients).backends(2);
    let mut scenario = Scenario::builder(lab).mode("reset").no_agent().start()?;
    let first = start(&mut scenario, "attached", clients)?;
    let kernel = kernel(&scenario)?;
    scenario.kill_agent()?;
    let again = start(&mut scenario, "replaced", clients)?;
    let figures = Figures { clients, first, again, kernel };
    eprintln!("{figures:?}");
    let what = format!("restart until ready, {clients} pods guarded by the pinned program");
    Ok(Findings {
        goals: vec![Goal::below(&what, 1.0, figures.again.ready, "s")],
        tables: vec![starts(&figures), memories(&figures)],
        figures: serde_json::to_value(&figures)?,
    })
}

/// Starts an agent and follows it until it has done `outcome` to every pod.
fn start(scenario: &mut Scenario, outcome: &str, clients: usize) -> Result<Start> {
    let began = Instant::now();
    let mut agent = Agent::start(&scenario.api, &["--log-level".to_owned(), "info".to_owned()])?;
    agent.wait_ready(PATIENCE)?;
    let ready = began.elapsed().as_secs_f64();
    let label = format!("outcome=\"{outcome}\"");
    let done = eventually("pods with this agent's program", PATIENCE, || {
        let done = agent.metric("coil_guard_attachments_total", &[&label])?;
        Ok(if done >= clients as f64 { Ok(()) } else { Err(done) })
    });
    done.with_context(|| agent.log_tail())?;
    let start = Start {
        ready,
        attached: began.elapsed().as_secs_f64(),
        processor: processor_time(agent.pid())?.as_secs_f64(),
        resident: memory(agent.pid())?.resident,
    };
    scenario.agent = Some(agent);
    Ok(start)
}

fn kernel(scenario: &Scenario) -> Result<Kernel> {
    let mut kernel = Kernel::default();
    let mut users: BTreeMap<u32, usize> = BTreeMap::new();
    // Others load and unload programs on this machine meanwhile: one that is gone is none of ours.
    let programs: BTreeMap<u32, ProgramInfo> =
        loaded_programs().filter_map(|program| program.ok().map(|program| (program.id(), program))).collect();
    for client in 0..scenario.lab.topology.clients.len() {
        let attached = scenario.lab.attachments(client)?;
        let Some((_, id)) = attached.tcx_egress.first() else { continue };
        let program = programs.get(id).context("a program is gone")?;
        kernel.programs += 1;
        kernel.program_bytes = program.memory_locked()?.into();
        kernel.code_bytes = program.size_jitted().into();
        kernel.verified = program.verified_instruction_count().unwrap_or(0).into();
        for map in program.map_ids()?.context("the kernel does not tell a program's maps")? {
            *users.entry(map).or_default() += 1;
        }
    }
    ensure!(kernel.programs > 0, "no client pod has a program by TCX: this part needs kernel 6.6 or later");
    for (id, users) in users {
        let bytes = map_memory(id)?;
        if users == 1 && kernel.programs > 1 {
            kernel.own_maps += 1;
            kernel.own_map_bytes += bytes;
        } else {
            kernel.shared_maps += 1;
            kernel.shared_map_bytes += bytes;
        }
    }
    Ok(kernel)
}

fn map_memory(id: u32) -> Result<u64> {
    use std::os::fd::{AsFd as _, AsRawFd as _};
    let map = MapInfo::from_id(id).context("a map is gone")?;
    let fd = map.fd().context("cannot open a map")?;
    let path = format!("/proc/self/fdinfo/{}", fd.as_fd().as_raw_fd());
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
    let memory = text.lines().find_map(|line| line.strip_prefix("memlock:")?.trim().parse().ok());
    memory.with_context(|| format!("{path} has no memlock"))
}

fn starts(figures: &Figures) -> Table {
    let clients = figures.clients as f64;
    let title = format!("Starts of an agent with {} client pods on the node", figures.clients);
    let mut table = Table::new(&title, &["", "first", "again, all guarded"]);
    let mut row = |what: &str, get: &dyn Fn(&Start) -> f64| {
        table.row([what.to_owned(), short(get(&figures.first)), short(get(&figures.again))]);
    };
    row("until ready, s", &|start| start.ready);
    row("until each pod has this agent's program, s", &|start| start.attached);
    row("the same for one pod, ms", &|start| 1e3 * start.attached / clients);
    row("processor time for one pod, the kernel's in it, ms", &|start| 1e3 * start.processor / clients);
    row("resident memory of the agent then, MiB", &|start| mebibytes(start.resident));
    table
}

fn memories(figures: &Figures) -> Table {
    let Kernel { programs, program_bytes, code_bytes, verified, .. } = figures.kernel;
    let kernel = &figures.kernel;
    let kibibytes = |bytes: u64| format!("{:.1}", bytes as f64 / 1024.0);
    let mut table = Table::new("Kernel memory", &["", "figure"]);
    table.row(["programs on pods' devices", &programs.to_string()]);
    table.row(["one of them, KiB".to_owned(), kibibytes(program_bytes)]);
    table.row(["its machine code, KiB".to_owned(), kibibytes(code_bytes)]);
    table.row(["instructions that the verifier went through for it".to_owned(), verified.to_string()]);
    table.row(["its own maps, KiB".to_owned(), kibibytes(kernel.own_map_bytes / programs.max(1) as u64)]);
    table.row([
        "all of a pod, KiB".to_owned(),
        kibibytes(program_bytes + kernel.own_map_bytes / programs.max(1) as u64),
    ]);
    table.row([
        format!("{} maps that all share, Cilium's among them, MiB", kernel.shared_maps),
        short(mebibytes(kernel.shared_map_bytes)),
    ]);
    table
}
