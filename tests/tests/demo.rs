//! `cargo xtask demo --json`, in its short form: what it prints is complete, adds up, and says what its picture shows.

use std::{
    fs,
    process::{Command, Stdio},
};

use anyhow::{Context as _, Result, ensure};
use coil_guard_tests::{
    cilium::{CiliumVersion, IpFamily},
    demo::{self, Document, Options, Screen, document::VERSION},
    net::lab_test,
};
use tempfile::TempDir;

fn play(directory: &TempDir, arguments: &[&str]) -> Result<Document> {
    let picture = directory.path().join("made/timeline.svg");
    let output = Command::new(env!("CARGO_BIN_EXE_demo"))
        .args(["--json", "--short", "--picture"])
        .arg(&picture)
        .args(arguments)
        .stdin(Stdio::null())
        .output()?;
    let shown = String::from_utf8_lossy(&output.stderr);
    let printed = String::from_utf8(output.stdout)?;
    let document: Document = serde_json::from_str(&printed)
        .with_context(|| format!("standard output is not the document\n{shown}"))?;
    ensure!(output.status.success() == document.passed, "exit status and document differ\n{shown}");
    ensure!(document.passed, "a check failed\n{shown}");
    ensure!(!shown.contains('\x1b'), "colour where there is no terminal\n{shown}");
    for event in document.scenes.iter().flat_map(|scene| &scene.events) {
        ensure!(shown.contains(&event.text), "the timeline lacks {event:?}\n{shown}");
    }
    Ok(document)
}

#[test]
fn the_document_is_complete_and_adds_up() -> Result<()> {
    lab_test(|| {
        let directory = TempDir::new()?;
        let document = play(&directory, &[])?;
        ensure!(document.version == VERSION);
        let acts: Vec<_> = document.scenes.iter().flat_map(|scene| &scene.acts).collect();
        let names: Vec<_> = acts.iter().map(|act| act.name.as_str()).collect();
        ensure!(names == ["off", "reset", "agent_killed", "drain"], "acts are {names:?}");

        for scene in &document.scenes {
            let sent: u64 = scene.acts.iter().map(|act| act.packets.sent).sum();
            let arrived: u64 = scene.lanes.iter().flat_map(|lane| &lane.packets).sum();
            // The bins end with the scene; what was sent in its last bin may have arrived after it.
            ensure!(arrived <= sent && arrived + 500 > sent, "{sent} sent, {arrived} in the lanes");
        }
        let stuck = &acts[0].moves[0];
        ensure!(stuck.to.is_none() && stuck.moved_at_ms.is_none(), "{stuck:?}");
        ensure!(stuck.to_old_after_all_knew > 0, "{stuck:?}");
        for found in acts[1..3].iter().flat_map(|act| &act.moves) {
            let took = found.took_ms.with_context(|| format!("{found:?}"))?;
            let moved = found.moved_at_ms.context("no time")?;
            ensure!((found.changed_at_ms + took - moved).abs() < 0.21, "{found:?}");
            ensure!(found.to.as_ref().is_some_and(|to| *to != found.from), "{found:?}");
        }
        let connections = acts[3].connections.as_ref().context("no connections")?;
        ensure!(connections.old_source_ports.len() == 2, "{connections:?}");
        ensure!(connections.new_joined_leaving < connections.new_after_mark, "{connections:?}");
        Ok(())
    })
}

#[test]
fn the_picture_shows_every_lane_and_event() -> Result<()> {
    lab_test(|| {
        let directory = TempDir::new()?;
        let document = play(&directory, &["--family", "v6", "--cilium", "1.20"])?;
        ensure!(document.cilium == "1.20");
        let path = document.picture.as_ref().context("no picture")?;
        let picture = fs::read_to_string(path).with_context(|| format!("cannot read {path}"))?;
        ensure!(picture.starts_with("<svg") && picture.ends_with("</svg>\n"), "{picture}");
        for lane in document.scenes.iter().flat_map(|scene| &scene.lanes) {
            ensure!(picture.contains(&lane.backend), "no lane of {}", lane.backend);
        }
        for event in document.scenes.iter().flat_map(|scene| &scene.events) {
            let first = event.text.split(' ').next().unwrap_or_default();
            ensure!(picture.contains(first), "no {event:?}");
        }
        Ok(())
    })
}

#[test]
fn a_flow_that_does_not_move_and_a_connection_that_is_cut_are_noticed() -> Result<()> {
    lab_test(|| {
        let options = Options {
            cilium: CiliumVersion::V1_17,
            family: IpFamily::V4,
            short: true,
            modes: ["audit", "reset"],
        };
        let document = demo::run(options, &Screen::new(true))?;
        ensure!(!document.passed);
        let failures: Vec<_> =
            document.failures().map(|(act, check)| (act.name.as_str(), check.name.as_str())).collect();
        for expected in [
            ("reset", "the stuck flow leaves when the Egress is annotated"),
            ("reset", "the flow leaves with its next packet"),
            ("agent_killed", "the flow leaves with its next packet"),
            ("drain", "the old connection stays on the leaving pod and ends by itself"),
        ] {
            ensure!(failures.contains(&expected), "{expected:?} did not fail: {failures:?}");
        }
        ensure!(failures.iter().all(|(act, _)| *act != "off"), "{failures:?}");
        Ok(())
    })
}

#[test]
fn an_unknown_version_is_refused_with_the_known_ones() -> Result<()> {
    let output = Command::new(env!("CARGO_BIN_EXE_demo")).args(["--cilium", "1.9"]).output()?;
    let shown = String::from_utf8_lossy(&output.stderr);
    ensure!(
        !output.status.success() && shown.contains("1.14, 1.15") && shown.contains("--cilium"),
        "{shown}"
    );
    Ok(())
}
