//! The demonstration: a flow stuck on a Terminating egress pod, and the same flow with the guard.
//!
//! Everything that it says was seen: each packet is numbered and recorded where it arrives, and every figure and every
//! check is computed from these records. It runs in private namespaces and needs root.

pub mod account;
pub mod document;
mod drain;
pub mod picture;
pub mod screen;
mod story;
mod stuck;

use std::time::Duration;

use anyhow::Result;

use self::screen::Colour;
pub use self::{document::Document, screen::Screen};
use crate::{
    cilium::{AttachKind, CiliumVersion, DEFAULT_AFFINITY, IpFamily},
    lab::{Lab, LabBuilder},
    net::isolated,
};

/// Arrivals are counted in bins of this length.
pub const BIN: Duration = Duration::from_millis(100);

/// What to play.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// The Cilium that is modelled.
    pub cilium: CiliumVersion,
    /// Family of the outer packets.
    pub family: IpFamily,
    /// Less time for each act: enough to see that it works, too little to watch.
    pub short: bool,
    /// Modes of acts 2 and 4. With others than `reset` and `drain` the checks must fail, which a test sees to.
    pub modes: [&'static str; 2],
}

/// `reset`, and `drain`.
pub const MODES: [&str; 2] = ["reset", "drain"];

impl Options {
    /// A span of the play, given for the full length.
    fn span(self, seconds: f64) -> Duration {
        Duration::from_secs_f64(if self.short { seconds * 0.4 } else { seconds })
    }

    /// A lab as most clusters of Coil are: ClientIP affinity, which is Coil's default.
    fn lab(self, backends: usize) -> LabBuilder {
        Lab::builder()
            .version(self.cilium)
            .families(&[self.family])
            .affinity(Some(DEFAULT_AFFINITY))
            .clients(1)
            .backends(backends)
    }
}

/// Plays everything.
///
/// # Errors
///
/// When something cannot be played at all. What was played and did not go as it should is in the document.
pub fn run(options: Options, screen: &Screen) -> Result<Document> {
    screen.line(&format!(
        "A client pod sends Coil's FoU packets through a model of Cilium {}; nat-0, nat-1, … are pods of one Egress.",
        options.cilium
    ));
    screen.line("Numbers are packets that arrived in 100 ms; T: the pod is Terminating, G: it is gone. A line like the one before");
    screen.line("it is left out, except for every fifth.");
    // A node of its own for each: nothing is left of the first when the second begins.
    let scenes = vec![isolated(|| stuck::play(options, screen))?, isolated(|| drain::play(options, screen))?];
    let mut document = Document {
        version: document::VERSION,
        passed: false,
        cilium: options.cilium.to_string(),
        attached: match AttachKind::preferred() {
            AttachKind::Tcx => "tcx",
            AttachKind::Clsact => "clsact",
        }
        .to_owned(),
        bin_ms: BIN.as_millis() as u64,
        scenes,
        picture: None,
    };
    let failures = document.failures().count();
    document.passed = failures == 0;
    conclude(&document, screen);
    Ok(document)
}

/// Prints what came of each act.
fn conclude(document: &Document, screen: &Screen) {
    screen.line("");
    for act in document.scenes.iter().flat_map(|scene| &scene.acts) {
        screen.line(&screen.paint(Colour::Bold, &act.title));
        for check in &act.checks {
            let sign = if check.passed {
                screen.paint(Colour::Green, "ok    ")
            } else {
                screen.paint(Colour::Red, "FAILED")
            };
            screen.line(&format!("  {sign} {}: {}", check.name, check.seen));
        }
    }
}
