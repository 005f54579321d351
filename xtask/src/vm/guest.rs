//! What runs inside a guest: this program is its first process. It mounts, loads modules, runs the tests one by one and
//! reports each on a virtio port as it ends, so that a guest that hangs has told what came before.

use std::{
    ffi::CString,
    fs::{self, File, OpenOptions},
    io::Write as _,
    os::unix::process::CommandExt as _,
    path::Path,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use nix::{
    mount::{MsFlags, mount},
    sched::{CloneFlags, unshare},
    sys::{
        reboot::{RebootMode, reboot},
        signal::{Signal, kill},
        wait::{WaitPidFlag, WaitStatus, waitpid},
    },
    unistd::Pid,
};
use serde::{Deserialize, Serialize};

/// Where the modules are in the guest.
pub(crate) const MODULES: &str = "/guest/modules";
/// The modules' paths, a line each, in the order in which they load.
pub(crate) const MODULE_ORDER: &str = "/guest/modules.order";
/// Where the tests' binaries are in the guest.
pub(crate) const BINARIES: &str = "/guest/bin";
/// What to run.
pub(crate) const JOBS: &str = "/guest/jobs.json";
/// Where the results go: the first port of the first virtio console device.
const PORT: &str = "/dev/vport0p1";

/// One thing to run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Job {
    /// What the report calls it.
    pub(crate) name: String,
    /// Program and arguments.
    pub(crate) command: Vec<String>,
    /// Variables beside the guest's own.
    pub(crate) environment: Vec<(String, String)>,
    /// Seconds after which it is killed.
    pub(crate) limit: u64,
}

/// What a guest reports, a JSON object a line.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub(crate) enum Event {
    /// Userspace is up and the modules are loaded.
    Up {
        /// The running kernel's release.
        release: String,
    },
    /// A job ended.
    Done {
        /// The job's name.
        name: String,
        /// Whether it exited with status 0.
        success: bool,
        /// How long it took, in milliseconds.
        milliseconds: u64,
        /// Standard output and standard error, as they came.
        output: String,
    },
    /// Every job has been run.
    Finished,
    /// The guest cannot go on.
    Broken {
        /// Why.
        error: String,
    },
}

/// The guest's whole life. Never returns: the machine is off afterwards.
pub(crate) fn main() -> ! {
    let outcome = prepare().and_then(|mut port| {
        let outcome = serve(&mut port);
        if let Err(error) = &outcome {
            say(&mut port, &Event::Broken { error: format!("{error:#}") })?;
        }
        outcome
    });
    if let Err(error) = outcome {
        eprintln!("guest: {error:#}");
    }
    // The host starts the machine with -no-reboot: this ends it at once, without a need for ACPI.
    let refused = reboot(RebootMode::RB_AUTOBOOT);
    panic!("the guest cannot end itself: {refused:?}");
}

fn prepare() -> Result<File> {
    for (kind, target) in [
        ("proc", "/proc"),
        ("sysfs", "/sys"),
        ("devtmpfs", "/dev"),
        ("tmpfs", "/tmp"),
        ("tmpfs", "/run"),
        ("bpf", "/sys/fs/bpf"),
        ("cgroup2", "/sys/fs/cgroup"),
    ] {
        mount(Some(kind), target, Some(kind), MsFlags::empty(), None::<&str>)
            .with_context(|| format!("cannot mount {kind} on {target}"))?;
    }
    for module in fs::read_to_string(MODULE_ORDER)?.lines() {
        let file = File::open(module).with_context(|| format!("cannot open {module}"))?;
        nix::kmod::finit_module(&file, &CString::default(), nix::kmod::ModuleInitFlags::empty())
            .with_context(|| format!("cannot load {module}"))?;
    }
    OpenOptions::new().write(true).open(PORT).with_context(|| format!("cannot open the results' port {PORT}"))
}

fn serve(port: &mut File) -> Result<()> {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease")?.trim().to_owned();
    say(port, &Event::Up { release })?;
    let jobs: Vec<Job> = serde_json::from_slice(&fs::read(JOBS)?).context("cannot read the jobs")?;
    for job in jobs {
        let event = run(&job)?;
        say(port, &event)?;
    }
    say(port, &Event::Finished)
}

fn run(job: &Job) -> Result<Event> {
    let output = Path::new("/tmp/output");
    let file = File::create(output)?;
    let (program, arguments) = job.command.split_first().context("a job without a command")?;
    let mut command = Command::new(program);
    command.args(arguments).current_dir("/tmp").stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file);
    command
        .env_clear()
        .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
        .env("HOME", "/")
        .env("RUST_BACKTRACE", "1");
    command.envs(job.environment.iter().map(|(name, value)| (name, value)));
    // SAFETY: unshare is a plain system call, which is safe between fork and exec.
    unsafe { command.pre_exec(isolate) };
    let began = Instant::now();
    let child = command.spawn().with_context(|| format!("cannot start {program}"))?;
    let pid = Pid::from_raw(i32::try_from(child.id())?);
    let status = wait(pid, began + Duration::from_secs(job.limit))?;
    let milliseconds = u64::try_from(began.elapsed().as_millis())?;
    clear()?;
    let mut text = String::from_utf8_lossy(&fs::read(output)?).into_owned();
    let success = matches!(status, Some(WaitStatus::Exited(_, 0)));
    match status {
        Some(WaitStatus::Signaled(_, signal, _)) => text.push_str(&format!("\nguest: ended by {signal}\n")),
        None => text.push_str(&format!("\nguest: not finished after {} s\n", job.limit)),
        Some(_) => {}
    }
    Ok(Event::Done { name: job.name.clone(), success, milliseconds, output: text })
}

/// Each job has interfaces and mounts of its own: nothing of one test is left for the next.
fn isolate() -> std::io::Result<()> {
    unshare(CloneFlags::CLONE_NEWNET | CloneFlags::CLONE_NEWNS)?;
    mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>)?;
    // The new network namespace's own view of /sys/class/net, and an empty bpffs.
    mount(Some("sysfs"), "/sys", Some("sysfs"), MsFlags::empty(), None::<&str>)?;
    mount(Some("bpf"), "/sys/fs/bpf", Some("bpf"), MsFlags::empty(), None::<&str>)?;
    mount(Some("cgroup2"), "/sys/fs/cgroup", Some("cgroup2"), MsFlags::empty(), None::<&str>)?;
    mount(Some("tmpfs"), "/run", Some("tmpfs"), MsFlags::empty(), None::<&str>)?;
    Ok(())
}

/// Waits for `pid` as the first process must: reaping whatever else ends meanwhile. `None` when the deadline passed.
fn wait(pid: Pid, deadline: Instant) -> Result<Option<WaitStatus>> {
    while Instant::now() < deadline {
        match waitpid(None, Some(WaitPidFlag::WNOHANG))? {
            WaitStatus::StillAlive => std::thread::sleep(Duration::from_millis(5)),
            status if status.pid() == Some(pid) => return Ok(Some(status)),
            _orphan => {}
        }
    }
    Ok(None)
}

/// Ends every other process and reaps it.
fn clear() -> Result<()> {
    loop {
        match kill(Pid::from_raw(-1), Signal::SIGKILL) {
            Ok(()) | Err(nix::errno::Errno::ESRCH) => {}
            Err(error) => return Err(error).context("cannot end what a job left running"),
        }
        match waitpid(None, None) {
            Ok(_reaped) => {}
            Err(nix::errno::Errno::ECHILD) => return Ok(()),
            Err(error) => return Err(error).context("cannot reap what a job left running"),
        }
    }
}

fn say(port: &mut File, event: &Event) -> Result<()> {
    let mut line = serde_json::to_vec(event)?;
    line.push(b'\n');
    port.write_all(&line).context("cannot write to the results' port")
}
