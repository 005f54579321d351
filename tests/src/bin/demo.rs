//! `cargo xtask demo`.

use std::{env, fs, path::PathBuf, process::ExitCode};

use anyhow::{Context as _, Result};
use clap::{Parser, ValueEnum};
use coil_guard_tests::{
    cilium::{CiliumVersion, IpFamily},
    demo::{Document, MODES, Options, Screen, picture, run},
};

/// Shows a client pod's FoU flow stuck on a Terminating egress pod, and the same flow with coil-guard.
///
/// Everything happens in private network and mount namespaces of this process: nothing on this machine changes. Needs
/// root. Exit status: 0 when everything went as it should, 1 when a flow did not move, a packet was lost, or a drained
/// connection was cut.
#[derive(Parser)]
#[command(name = "cargo xtask demo", max_term_width = 110)]
struct Arguments {
    /// Print what was found as JSON; the timeline goes to standard error
    #[arg(long)]
    json: bool,

    /// Which Cilium to model; up to 1.17, ClientIP affinity brings flows back to a Terminating pod
    #[arg(long, value_name = "VERSION", default_value = "1.17", value_parser = cilium)]
    cilium: CiliumVersion,

    /// Family of the outer packets
    #[arg(long, value_enum, default_value = "v4")]
    family: Family,

    /// Play faster than one can follow
    #[arg(long)]
    short: bool,

    /// Where the picture goes
    #[arg(long, value_name = "FILE", default_value_os_t = default_picture())]
    picture: PathBuf,
}

#[derive(Clone, Copy, ValueEnum)]
enum Family {
    V4,
    V6,
}

fn cilium(text: &str) -> Result<CiliumVersion, String> {
    let versions = CiliumVersion::ALL;
    versions.into_iter().find(|version| version.to_string() == text).ok_or_else(|| {
        let known: Vec<_> = versions.iter().map(ToString::to_string).collect();
        format!("one of {} is expected", known.join(", "))
    })
}

/// `demo/timeline.svg` in the target directory of the build.
fn default_picture() -> PathBuf {
    let built = env::current_exe().ok();
    let target = built.as_ref().and_then(|binary| binary.parent()?.parent());
    target.map_or_else(|| PathBuf::from("target"), PathBuf::from).join("demo/timeline.svg")
}

fn main() -> ExitCode {
    match play(&Arguments::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn play(arguments: &Arguments) -> Result<bool> {
    let screen = Screen::new(arguments.json);
    let family = match arguments.family {
        Family::V4 => IpFamily::V4,
        Family::V6 => IpFamily::V6,
    };
    let options = Options { cilium: arguments.cilium, family, short: arguments.short, modes: MODES };
    let mut document = run(options, &screen)?;
    write_picture(arguments, &mut document)?;
    screen.line(&format!("\nPicture: {}", arguments.picture.display()));
    if arguments.json {
        println!("{}", serde_json::to_string_pretty(&document)?);
    }
    for (act, check) in document.failures() {
        screen.line(&format!("FAILED: {}: {}: {}", act.title, check.name, check.seen));
    }
    Ok(document.passed)
}

fn write_picture(arguments: &Arguments, document: &mut Document) -> Result<()> {
    let path = &arguments.picture;
    if let Some(directory) = path.parent() {
        fs::create_dir_all(directory).with_context(|| format!("cannot create {}", directory.display()))?;
    }
    document.picture = Some(path.display().to_string());
    fs::write(path, picture::draw(document)).with_context(|| format!("cannot write {}", path.display()))
}
