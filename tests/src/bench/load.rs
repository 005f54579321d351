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
    cilium::{CiliumVersion, IpFamily},
    lab::{Lab, eventually},
    net::{Paths, isolated},
    program::{Instance, Load, Sizes, pod_config},
    scenario::{Agent, Scenario},
};

const PATIENCE: Duration = Duration::from_secs(120);

/// One start of an agent.
#[derive(Debug, Serialize)]
struct Start {
    /// From the start of the process until /readyz says so, seconds.
    ready: f64,
    /// Until every pod is attached, seconds.
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
}

/// What loading one program costs.
#[derive(Clone, Debug, Serialize)]
struct Cost {
    /// Parsing the object and making maps, ms of processor time.
    prepare: f64,
    /// Verifying and compiling in the kernel, ms of processor time.
    verify: f64,
    verified_instructions: u32,
    machine_code_bytes: u32,
    memory_bytes: u32,
}

#[derive(Debug, Serialize)]
struct Figures {
    clients: usize,
    /// Loaded once a node.
    core: Cost,
    /// Loaded once a pod.
    stub: Cost,
    first: Start,
    again: Start,
    kernel: Kernel,
}

pub(super) fn run(options: &Options) -> Result<Findings> {
    let clients = options.extent.pick(250, 3);
    let (core, stub) = isolated(|| costs(options.extent.pick(5, 1)))?;
    let lab = Lab::builder().families(&[IpFamily::V4]).clients(clients).backends(2);
    let mut scenario = Scenario::builder(lab).mode("reset").no_agent().start()?;
    let first = start(&mut scenario, clients)?;
    let kernel = kernel(&scenario)?;
    scenario.kill_agent()?;
    let again = start(&mut scenario, clients)?;
    let figures = Figures { clients, core, stub, first, again, kernel };
    eprintln!("{figures:?}");
    let what = format!("restart until ready, {clients} pods guarded by the pinned program");
    Ok(Findings {
        goals: vec![Goal::below(&what, 1.0, figures.again.ready, "s")],
        tables: vec![starts(&figures), programs(&figures), memories(&figures)],
        figures: serde_json::to_value(&figures)?,
    })
}

/// The least of several loads of the core and of the stub, over small maps: those are made once a node.
fn costs(turns: usize) -> Result<(Cost, Cost)> {
    let (mut cores, mut stubs) = (Vec::new(), Vec::new());
    for index in 0..turns {
        let directory = Paths.cilium_maps().join(index.to_string());
        let mut guard = Instance::load(&directory, CiliumVersion::V1_18, &pod_config(), Sizes::default())?;
        cores.push(guard.load);
        for _ in 0..20 {
            stubs.push(guard.stub_load);
            guard.become_pod(&pod_config())?;
        }
    }
    let least =
        |loads: Vec<Load>| loads.into_iter().min_by_key(|load| load.verify).context("nothing was loaded");
    let cost = |load: Load| Cost {
        prepare: load.prepare.as_secs_f64() * 1e3,
        verify: load.verify.as_secs_f64() * 1e3,
        verified_instructions: load.verified_instructions,
        machine_code_bytes: load.machine_code,
        memory_bytes: load.memory,
    };
    Ok((cost(least(cores)?), cost(least(stubs)?)))
}

/// Starts an agent and follows it until every pod is attached, by it or by the one before it.
fn start(scenario: &mut Scenario, clients: usize) -> Result<Start> {
    let began = Instant::now();
    let mut agent = Agent::start(&scenario.api, &["--log-level".to_owned(), "info".to_owned()])?;
    agent.wait_ready(PATIENCE)?;
    let ready = began.elapsed().as_secs_f64();
    let done = eventually("attached client pods", PATIENCE, || {
        let done = agent.metric("coil_guard_pods", &["state=\"attached\""])?;
        Ok(if done == clients as f64 { Ok(()) } else { Err(done) })
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
        if users == 1 && kernel.programs > 1 {
            kernel.own_maps += 1;
            kernel.own_map_bytes += map_memory(id)?;
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
    row("until every pod is attached, s", &|start| start.attached);
    row("the same for one pod, ms", &|start| 1e3 * start.attached / clients);
    row("processor time for one pod, the kernel's in it, ms", &|start| 1e3 * start.processor / clients);
    row("resident memory of the agent then, MiB", &|start| mebibytes(start.resident));
    table
}

fn programs(figures: &Figures) -> Table {
    let title = "One program: the core, loaded once a node, and the stub, loaded once a pod";
    let mut table = Table::new(title, &["", "core", "stub"]);
    let mut row = |what: &str, get: &dyn Fn(&Cost) -> f64| {
        table.row([what.to_owned(), short(get(&figures.core)), short(get(&figures.stub))]);
    };
    row("object parsed and maps made, ms of processor time", &|cost| cost.prepare);
    row("verified and compiled, ms of processor time", &|cost| cost.verify);
    row("instructions that the verifier went through", &|cost| cost.verified_instructions.into());
    row("machine code, KiB", &|cost| f64::from(cost.machine_code_bytes) / 1024.0);
    row("kernel memory, KiB", &|cost| f64::from(cost.memory_bytes) / 1024.0);
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
    table
}
