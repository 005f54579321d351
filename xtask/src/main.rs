//! Every developer verb: `cargo xtask --help` lists them.

mod bench;
mod image;
mod libraries;
mod lint;
mod machine;
mod process;
mod programs;
mod setup;
mod test;
mod vm;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(
    name = "cargo xtask",
    about = "Everything a developer of coil-guard runs",
    disable_help_subcommand = true
)]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Find or install what the eBPF build needs: a compiler with the sources of `core`, and bpf-linker
    Setup(setup::Options),
    /// rustfmt, clippy with warnings denied, cargo-deny, and the repository's own rules
    Lint,
    /// Build everything once, then run unit, lab and virtual-machine tests
    Test(test::Options),
    /// Boot guests with Debian's kernels 6.1 and 6.12 and run tests in them, with FoU as the kernel makes it (root)
    Vm(vm::Options),
    /// Build the container image from what is on this machine, and run it once
    Image(image::Options),
    /// Show a flow stuck on a leaving egress pod, and the same flow with the guard (root)
    Demo(programs::Arguments),
    /// Write the agent's manual pages and shell completions
    Docs,
    /// Measure the datapath, throughput, cutover and the agent (root)
    Bench(bench::Options),
}

fn main() -> ExitCode {
    if std::process::id() == 1 && std::env::args().next().as_deref() == Some("/init") {
        vm::guest::main();
    }
    machine::put_cargo_bin_on_path();
    let outcome = match Cli::parse().verb {
        Verb::Setup(options) => setup::run_verb(&options),
        Verb::Lint => lint::run_verb(),
        Verb::Test(options) => test::run_verb(&options),
        Verb::Vm(options) => vm::run_verb(&options),
        Verb::Image(options) => image::run_verb(&options),
        Verb::Docs => programs::docs(),
        Verb::Demo(arguments) => programs::demo(&arguments),
        Verb::Bench(options) => bench::run_verb(&options),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // The chain of causes says what to do; a backtrace into this program would bury it.
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
