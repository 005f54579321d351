//! `coil-guard check`: each thing that keeps the guard from working has its own sentence and exit code.

use std::{
    fs,
    io::{BufRead as _, BufReader, Write as _},
    net::{TcpListener, TcpStream},
    process::Stdio,
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use coil_guard_tests::{
    cilium::{CiliumVersion, IpFamily, MapOptions, MapShape},
    fou::Stream,
    lab::{Lab, command},
    net::{Paths, lab_test},
    scenario::{NODE, Scenario, binary},
};
use k8s_openapi::api::rbac::v1::PolicyRule;
use serde_json::Value;

const ENOUGH: u64 = 20;

/// What `check --json` found.
struct Found {
    code: i32,
    findings: Vec<Value>,
}

impl Found {
    /// The finding of this id and level.
    fn of(&self, id: &str, level: &str) -> Result<&Value> {
        let found = self.findings.iter().find(|finding| finding["id"] == id && finding["level"] == level);
        found.with_context(|| format!("no {level} finding {id} in {:#?}", self.findings))
    }

    /// Sees that there is this failure, that it says all of `parts`, and what to do.
    fn fails(&self, id: &str, parts: &[&str]) -> Result<()> {
        self.says(id, "cannot_work", 2, parts)
    }

    fn says(&self, id: &str, level: &str, code: i32, parts: &[&str]) -> Result<()> {
        let finding = self.of(id, level)?;
        let text = finding.to_string();
        for part in parts {
            ensure!(text.contains(part), "{text} does not say {part:?}");
        }
        ensure!(
            finding["action"].as_str().is_some_and(|action| !action.is_empty()),
            "{text} does not say what to do"
        );
        ensure!(self.code == code, "exit code {} with {:#?}", self.code, self.findings);
        Ok(())
    }
}

fn check(scenario: &Scenario, arguments: &[&str]) -> Result<Found> {
    let kubeconfig = scenario.api.kubeconfig().to_str().context("a path in UTF-8")?;
    check_with(&[&["--kubeconfig", kubeconfig], arguments].concat())
}

fn check_with(arguments: &[&str]) -> Result<Found> {
    let mut command = command(binary()?);
    command.args(["check", "--json", "--node-name", NODE]).args(arguments).stdin(Stdio::null());
    let output = command.output().context("cannot run the check")?;
    let text = String::from_utf8_lossy(&output.stdout);
    let json: Value = serde_json::from_str(&text)
        .with_context(|| format!("{text}{}", String::from_utf8_lossy(&output.stderr)))?;
    let findings = json["findings"].as_array().context("a list of findings")?.clone();
    Ok(Found { code: output.status.code().context("an exit code")?, findings })
}

fn send(scenario: &Scenario) -> Result<()> {
    let stream: Stream = scenario.lab.stream(0, scenario.lab.spec(0, IpFamily::V4))?;
    stream.wait_arrived(ENOUGH, scenario.patience())?;
    stream.finish(true)?;
    Ok(())
}

#[test]
fn a_guarded_node_with_traffic_is_good() -> Result<()> {
    lab_test(|| {
        let lab = Lab::builder().families(&[IpFamily::V4]).affinity(Some(Duration::from_secs(10_800)));
        let scenario = Scenario::builder(lab).mode("drain").start()?;
        send(&scenario)?;
        let found = check(&scenario, &[])?;
        for id in [
            "kernel",
            "bpffs",
            "program",
            "namespaces",
            "cilium_maps",
            "coil_crd",
            "rbac",
            "watches",
            "drain_time",
            "egresses",
            "per_packet_load_balancing",
            "affinity_match",
        ] {
            found.of(id, "good")?;
        }
        ensure!(found.code == 0, "exit code {} with {:#?}", found.code, found.findings);
        // The agent goes on beside it.
        scenario.wait_attached(0)
    })
}

#[test]
fn whether_rewrite_can_work_is_said_beforehand() -> Result<()> {
    let affinity = Some(Duration::from_secs(10_800));
    for (version, affinity, level, code) in [
        (CiliumVersion::V1_16, affinity, "cannot_work", 2),
        (CiliumVersion::V1_20, affinity, "warning", 1),
        (CiliumVersion::V1_16, None, "good", 1),
    ] {
        lab_test(|| {
            let lab = Lab::builder().families(&[IpFamily::V4]).version(version).affinity(affinity);
            let scenario = Scenario::builder(lab).mode("rewrite").no_agent().start()?;
            send(&scenario)?;
            let found = check(&scenario, &[])?;
            // Without an agent there are no symmetric replies, which is a warning of its own.
            ensure!(found.code == code, "exit code {} with {:#?}", found.code, found.findings);
            if level == "good" {
                return found.of("rewrite", level).map(drop);
            }
            found.says("rewrite", level, code, &["session affinity", "spec.sessionAffinity"])
        })
        .with_context(|| format!("Cilium {version}, affinity {affinity:?}"))?;
    }
    Ok(())
}

#[test]
fn a_mode_that_is_refused_is_found() -> Result<()> {
    lab_test(|| {
        let scenario = Scenario::builder(Lab::builder()).mode("reset").no_agent().start()?;
        check(&scenario, &["--cilium-access", "read-only"])?.says(
            "mode_refused",
            "warning",
            1,
            &["in mode reset", "treated as off", "--cilium-access read-write"],
        )
    })
}

#[test]
fn a_pin_directory_that_is_no_bpffs_is_found() -> Result<()> {
    lab_test(|| {
        let scenario = Scenario::builder(Lab::builder()).no_agent().start()?;
        let directory = Paths.scratch_file("pins");
        let found = check(&scenario, &["--pin-dir", directory.to_str().context("a path in UTF-8")?])?;
        found.fails("bpffs", &["not on a bpf file system", "mount -t bpf"])
    })
}

#[test]
fn missing_maps_of_cilium_are_found() -> Result<()> {
    lab_test(|| {
        let scenario = Scenario::builder(Lab::builder()).no_agent().start()?;
        let directory = Paths.bpffs().join("elsewhere");
        fs::create_dir(&directory)?;
        let found = check(&scenario, &["--cilium-maps", directory.to_str().context("a path in UTF-8")?])?;
        found.fails("cilium_maps", &["does not exist", "Cilium 1.14 or later must run on this node"])
    })
}

#[test]
fn a_map_of_another_layout_is_found() -> Result<()> {
    lab_test(|| {
        let scenario = Scenario::builder(Lab::builder()).no_agent().start()?;
        let name = "cilium_lb4_backends_v3";
        let shape = MapOptions::new(CiliumVersion::V1_20).shapes()[name];
        scenario.lab.maps.pin_imposter(name, MapShape { value_size: 20, ..shape })?;
        check(&scenario, &[])?
            .fails("cilium_maps", &[name, "20-byte values", "12-byte values", "refused, not guessed"])
    })
}

#[test]
fn load_balancing_of_sockets_is_found_by_packets_without_entries() -> Result<()> {
    lab_test(|| {
        let scenario = Scenario::builder(Lab::builder().families(&[IpFamily::V4])).mode("audit").start()?;
        let found = check(&scenario, &[])?;
        found.says("per_packet_load_balancing", "warning", 1, &["cannot be told yet"])?;
        send(&scenario)?;
        scenario.lab.delete_service_entry(0, IpFamily::V4, 5555)?;
        let found = check(&scenario, &[])?;
        found.fails("per_packet_load_balancing", &["balances sockets", "socketLB.hostNamespaceOnly=true"])
    })
}

#[test]
fn a_missing_right_is_named() -> Result<()> {
    lab_test(|| {
        let scenario = Scenario::builder(Lab::builder()).mode("reset").no_agent().start()?;
        let rule = |verbs: &[&str], group: &str, resource: &str| PolicyRule {
            verbs: verbs.iter().map(|verb| (*verb).to_owned()).collect(),
            api_groups: Some(vec![group.to_owned()]),
            resources: Some(vec![resource.to_owned()]),
            ..PolicyRule::default()
        };
        let both: &[&str] = &["list", "watch"];
        let mut rules = vec![
            rule(both, "coil.cybozu.com", "egresses"),
            rule(both, "", "services"),
            rule(both, "discovery.k8s.io", "endpointslices"),
            rule(both, "", "pods"),
        ];
        scenario.api.set_rules(Some(rules.clone()));
        let found = check(&scenario, &[])?;
        let parts = ["create events.events.k8s.io", "patch events.events.k8s.io", "cannot write events"];
        found.says("rbac", "warning", 1, &parts)?;
        rules.push(rule(&["create", "patch"], "events.k8s.io", "events"));
        rules[1] = rule(&["list"], "", "services");
        scenario.api.set_rules(Some(rules));
        let found = check(&scenario, &[])?;
        found.fails("rbac", &["not allowed: watch services", "deploy/base"])?;
        found.fails("watches", &["services"])
    })
}

fn answer_not_found(mut stream: &TcpStream) -> std::io::Result<()> {
    let body = r#"{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"NotFound","code":404}"#;
    let mut request = BufReader::new(stream);
    let mut line = String::new();
    while request.read_line(&mut line)? > 0 && line != "\r\n" {
        line.clear();
    }
    write!(
        stream,
        "HTTP/1.1 404 Not Found\r\nContent-Type: application/json\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
        body.len()
    )
}

#[test]
fn a_cluster_without_coil_is_found() -> Result<()> {
    lab_test(|| {
        // An API server that knows nothing answers every path with 404.
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let address = listener.local_addr()?;
        thread::spawn(move || listener.incoming().flatten().try_for_each(|stream| answer_not_found(&stream)));
        let kubeconfig = Paths.scratch_file("kubeconfig");
        let config = serde_json::json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "x",
            "clusters": [{"name": "x", "cluster": {"server": format!("http://{address}")}}],
            "contexts": [{"name": "x", "context": {"cluster": "x", "user": "x"}}],
            "users": [{"name": "x", "user": {}}],
        });
        fs::write(&kubeconfig, config.to_string())?;
        let found = check_with(&["--kubeconfig", kubeconfig.to_str().context("a path in UTF-8")?])?;
        found.fails("coil_crd", &["egresses.coil.cybozu.com", "Install Coil"])
    })
}

#[test]
fn a_drain_without_a_pre_stop_hook_says_how_long_it_lasts() -> Result<()> {
    lab_test(|| {
        let scenario = Scenario::builder(Lab::builder()).mode("drain").no_pre_stop().no_agent().start()?;
        let found = check(&scenario, &[])?;
        found.says("drain_time", "warning", 1, &["no preStop hook", "about 5 s", "egress-drain.yaml"])
    })
}
