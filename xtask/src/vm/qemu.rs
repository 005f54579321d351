//! Starts a guest and follows what it reports.

use std::{
    fs,
    io::{BufRead as _, BufReader},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::mpsc::{self, RecvTimeoutError},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};

use super::{guest::Event, kernel::Kernel};
use crate::machine::has_hardware_virtualisation;

/// Memory of a guest in MiB: the root file system and the tests' maps.
const MEMORY: &str = "1536";

/// What makes the guest quick and its clock steady under software emulation.
const COMMAND_LINE: &str = "console=ttyS0 quiet panic=-1 mitigations=off nokaslr no5lvl tsc=reliable no_timer_check \
                            cryptomgr.notests random.trust_cpu=on";

/// The results' port writes to qemu's standard output. A `stdio` device would do too, but counts as disconnected once
/// standard input ends, and the guest's writes then block.
const RESULTS: &str = "file,id=results,path=/proc/self/fd/1";

/// Lines of the console that are shown when a guest fails.
const SHOWN_LINES: usize = 40;

/// Boots `kernel` with the root file system in `initramfs`; `on_event` gets each report as it comes, `limit` bounds the
/// guest's whole life.
pub(crate) fn boot(
    kernel: &Kernel,
    initramfs: &Path,
    limit: Duration,
    mut on_event: impl FnMut(Event, Duration),
) -> Result<()> {
    let console = kernel.directory.join("console.log");
    let mut guest = Guest(start(kernel, initramfs, &console)?);
    let began = Instant::now();
    let lines = follow(&mut guest.0)?;
    loop {
        let left = limit.saturating_sub(began.elapsed());
        match lines.recv_timeout(left) {
            Ok(line) => match serde_json::from_str(&line) {
                Ok(Event::Finished) => return Ok(()),
                Ok(Event::Broken { error }) => bail!("the guest cannot go on: {error}{}", tail(&console)),
                Ok(event) => on_event(event, began.elapsed()),
                Err(error) => {
                    bail!("the guest reported something unexpected ({error}): {line}{}", tail(&console))
                }
            },
            Err(RecvTimeoutError::Timeout) => {
                bail!("the guest was not done after {limit:.0?}{}", tail(&console))
            }
            Err(RecvTimeoutError::Disconnected) => {
                bail!("the guest ended before it was done{}", tail(&console))
            }
        }
    }
}

/// A guest that does not outlive the function that started it: after an emulation failure qemu hangs.
struct Guest(Child);

impl Drop for Guest {
    fn drop(&mut self) {
        // Already gone is as good as killed.
        let _gone = self.0.kill();
        let _reaped = self.0.wait();
    }
}

fn start(kernel: &Kernel, initramfs: &Path, console: &Path) -> Result<Child> {
    let accelerator: [&str; 4] = if has_hardware_virtualisation() {
        ["-accel", "kvm", "-cpu", "host"]
    } else {
        // Fast string instructions are slow to emulate: without them TCP is several times faster.
        ["-accel", "tcg,thread=multi", "-cpu", "max,la57=off,erms=off"]
    };
    let mut command = Command::new("qemu-system-x86_64");
    command.args(["-M", "q35", "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]);
    command.args(["-monitor", "none", "-net", "none", "-smp", "2", "-m", MEMORY]).args(accelerator);
    command.arg("-kernel").arg(&kernel.image).arg("-initrd").arg(initramfs).args(["-append", COMMAND_LINE]);
    command.args([
        "-chardev",
        &format!("file,id=console,path={}", console.display()),
        "-serial",
        "chardev:console",
    ]);
    command.args(["-device", "virtio-serial-pci,max_ports=2", "-chardev", RESULTS]);
    command.args(["-device", "virtserialport,chardev=results,nr=1"]);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::inherit());
    command.spawn().context("cannot run qemu-system-x86_64 (Debian package qemu-system-x86)")
}

fn follow(child: &mut Child) -> Result<mpsc::Receiver<String>> {
    let stdout = child.stdout.take().context("qemu has no standard output")?;
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || {
        for line in BufReader::new(stdout).lines().map_while(Result::ok) {
            if sender.send(line).is_err() {
                break;
            }
        }
    });
    Ok(receiver)
}

fn tail(console: &Path) -> String {
    let text =
        fs::read(console).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    let shown = lines[lines.len().saturating_sub(SHOWN_LINES)..].join("\n");
    format!("; its console, kept in {}, ends with\n{shown}", PathBuf::from(console).display())
}
