//! The DaemonSet against the agent's command line, and against what it may ask of a node.

use anyhow::{Context as _, Result, ensure};
use clap::{CommandFactory as _, Parser as _};
use coil_guard::{
    cli::{Cli, Command},
    datapath::Sizes,
};
use coil_guard_tests::manifests::{deploy, documents, kustomizations, render};
use serde_json::{Value, json};

fn daemonset(path: &str) -> Result<Value> {
    let objects = render(&deploy().join(path))?;
    objects
        .into_iter()
        .find(|object| object["kind"] == "DaemonSet")
        .with_context(|| format!("{path}: no DaemonSet"))
}

fn pod_spec(path: &str) -> Result<Value> {
    Ok(daemonset(path)?["spec"]["template"]["spec"].clone())
}

fn containers(spec: &Value) -> impl Iterator<Item = &Value> {
    ["initContainers", "containers"].into_iter().flat_map(|list| spec[list].as_array().into_iter().flatten())
}

/// The container's command line, its variables written as flags: what clap makes of it in the pod.
fn parsed(container: &Value) -> Result<Cli> {
    let command = Cli::command();
    let texts = |list: &Value| -> Vec<String> {
        list.as_array().into_iter().flatten().filter_map(|v| v.as_str().map(str::to_owned)).collect()
    };
    let mut line = vec!["coil-guard".to_owned()];
    line.extend(texts(&container["args"]));
    let verb = line.get(1).cloned().context("no subcommand")?;
    let subcommand = command.find_subcommand(&verb).with_context(|| format!("no subcommand {verb}"))?;
    for variable in container["env"].as_array().into_iter().flatten() {
        let name = variable["name"].as_str().context("a variable without a name")?;
        let everywhere = command.get_subcommands().flat_map(clap::Command::get_arguments);
        let known = everywhere.filter_map(|a| a.get_env()).any(|env| env.to_str() == Some(name));
        ensure!(known, "the agent knows no variable {name}");
        let own = subcommand.get_arguments().find(|a| a.get_env().and_then(|env| env.to_str()) == Some(name));
        if let Some(flag) = own.and_then(clap::Arg::get_long) {
            line.extend([format!("--{flag}"), variable["value"].as_str().unwrap_or("node-1").to_owned()]);
        }
    }
    Ok(Cli::try_parse_from(line)?)
}

#[test]
fn every_container_has_a_command_line_that_the_agent_understands() -> Result<()> {
    for path in kustomizations()? {
        for container in containers(&pod_spec(&path)?) {
            let cli = parsed(container).with_context(|| format!("{path}: {}", container["name"]))?;
            let expected = if path.ends_with("uninstall") { "Cleanup" } else { "Run" };
            ensure!(format!("{:?}", cli.command).starts_with(expected), "{path}: {:?}", cli.command);
        }
    }
    Ok(())
}

#[test]
fn the_default_mode_is_that_of_the_overlay() -> Result<()> {
    let expected = [
        ("base", "Off"),
        ("overlays/audit-first", "Audit"),
        ("overlays/reset-by-default", "Reset"),
        ("overlays/podmonitor", "Off"),
        ("overlays/proc-fallback", "Off"),
    ];
    for (path, mode) in expected {
        let Command::Run(run) = parsed(&pod_spec(path)?["containers"][0])?.command else {
            anyhow::bail!("{path} does not run the agent");
        };
        let found = format!("{:?}", run.settings().default_mode);
        let off = mode == "Off" && found == "None";
        ensure!(off || found.contains(mode), "{path}: {found}, not {mode}");
    }
    Ok(())
}

#[test]
fn images_carry_the_version_of_this_workspace() -> Result<()> {
    let expected = json!(format!("coil-guard:{}", env!("CARGO_PKG_VERSION")));
    for path in kustomizations()? {
        for container in containers(&pod_spec(&path)?) {
            ensure!(container["image"] == expected, "{path}: {}: {}", container["name"], container["image"]);
        }
    }
    Ok(())
}

#[test]
fn no_container_may_do_more_than_it_needs() -> Result<()> {
    for path in kustomizations()? {
        let spec = pod_spec(&path)?;
        let by_process = path.ends_with("proc-fallback");
        ensure!(
            spec["hostPID"].as_bool().unwrap_or(false) == by_process,
            "{path}: hostPID {}",
            spec["hostPID"]
        );
        ensure!(spec["hostIPC"].is_null(), "{path}: hostIPC");
        for container in containers(&spec) {
            let security = &container["securityContext"];
            let mut wanted = vec!["SYS_ADMIN", "NET_ADMIN"];
            if by_process {
                wanted.push("SYS_PTRACE");
            }
            ensure!(
                security["capabilities"] == json!({"add": wanted, "drop": ["ALL"]}),
                "{path}: {security}"
            );
            ensure!(
                security["privileged"] == false && security["readOnlyRootFilesystem"] == true,
                "{path}: {security}"
            );
            ensure!(security["seccompProfile"]["type"] == "RuntimeDefault", "{path}: {security}");
            for mount in container["volumeMounts"].as_array().into_iter().flatten() {
                ensure!(mount["mountPropagation"] == "HostToContainer", "{path}: {mount}");
            }
            let name = container["name"].as_str().unwrap_or_default();
            let key = format!("container.apparmor.security.beta.kubernetes.io/{name}");
            let annotation = &daemonset(&path)?["spec"]["template"]["metadata"]["annotations"][key];
            ensure!(
                annotation == "unconfined",
                "{path}: {name}: {annotation}: must say what appArmorProfile says"
            );
            ensure!(security["appArmorProfile"]["type"] == "Unconfined", "{path}: {security}");
        }
        let mut paths: Vec<_> =
            spec["volumes"].as_array().into_iter().flatten().map(|v| &v["hostPath"]["path"]).collect();
        paths.retain(|host| *host != "/sys/fs/bpf" && (by_process || *host != "/run/netns"));
        ensure!(paths.is_empty(), "{path}: further mounts: {paths:?}");
    }
    Ok(())
}

#[test]
fn two_agents_never_meet_on_a_node_and_each_goes_everywhere() -> Result<()> {
    for path in kustomizations()? {
        let daemonset = daemonset(&path)?;
        let strategy = &daemonset["spec"]["updateStrategy"];
        ensure!(
            strategy["type"] == "RollingUpdate" && strategy["rollingUpdate"]["maxSurge"] == 0,
            "{path}: {strategy}"
        );
        let spec = &daemonset["spec"]["template"]["spec"];
        ensure!(spec["hostNetwork"] == true, "{path}: must run while coild is down");
        ensure!(spec["priorityClassName"] == "system-node-critical", "{path}");
        ensure!(spec["tolerations"] == json!([{"operator": "Exists"}]), "{path}");
    }
    Ok(())
}

#[test]
fn ports_are_free_beside_coils_and_are_those_of_the_agent() -> Result<()> {
    let spec = pod_spec("base")?;
    let container = &spec["containers"][0];
    let variable = |name: &str| {
        let all = container["env"].as_array().into_iter().flatten();
        all.filter(|v| v["name"] == name).find_map(|v| v["value"].as_str()).unwrap_or_default().to_owned()
    };
    let metrics = &container["ports"][0]["containerPort"];
    ensure!(variable("COIL_GUARD_METRICS_ADDRESS") == format!("0.0.0.0:{metrics}"), "{metrics}");
    for probe in ["livenessProbe", "readinessProbe"] {
        let get = &container[probe]["httpGet"];
        let host = get["host"].as_str().unwrap_or_default();
        ensure!(variable("COIL_GUARD_HEALTH_ADDRESS") == format!("{host}:{}", get["port"]), "{probe}: {get}");
    }
    for port in [metrics, &container["livenessProbe"]["httpGet"]["port"]] {
        // coild has 9384 and 9385, Coil's other programs the rest.
        ensure!(!(9384..=9396).contains(&port.as_i64().unwrap_or_default()), "{port}");
    }
    Ok(())
}

#[test]
fn the_memory_limit_covers_the_maps_and_a_program_for_each_of_250_pods() -> Result<()> {
    let limit = &pod_spec("base")?["containers"][0]["resources"]["limits"]["memory"];
    let limit =
        limit.as_str().and_then(|text| text.strip_suffix("Mi")).context("expected MiB")?.parse::<u64>()?
            << 20;
    let sizes = Sizes::default();
    // Key, value and the kernel's own bytes per element: generous, so that the limit has room.
    let large = u64::from(sizes.inner_flows) * 256;
    let others = [sizes.services, sizes.marks, sizes.fragments, sizes.previous, sizes.leaving, sizes.drains];
    let small = others
        .iter()
        .chain([&sizes.egresses, &sizes.pods, &sizes.pinned_ports, &sizes.returns, &sizes.answers])
        .map(|entries| u64::from(*entries) * 256)
        .sum::<u64>();
    let programs = 250 * (96 << 10);
    let agent = 40 << 20;
    let need = large + small + u64::from(sizes.event_bytes) + programs + agent;
    ensure!(need < limit, "{} MiB are needed at most, the limit is {} MiB", need >> 20, limit >> 20);
    Ok(())
}

#[test]
fn the_drain_example_has_a_hook_that_fits_its_grace_period() -> Result<()> {
    let objects = documents(&deploy().join("examples/egress-drain.yaml"))?;
    let egress = objects.iter().find(|object| object["kind"] == "Egress").context("no Egress")?;
    let spec = &egress["spec"]["template"]["spec"];
    let container = &spec["containers"][0];
    ensure!(container["name"] == "egress", "Coil's container is called egress, not {}", container["name"]);
    let hook = container["lifecycle"]["preStop"]["sleep"]["seconds"].as_i64().context("no preStop")?;
    let grace = spec["terminationGracePeriodSeconds"].as_i64().context("no grace period")?;
    ensure!(hook + 5 < grace, "the hook of {hook} s does not fit into {grace} s");
    let timeout =
        egress["metadata"]["annotations"]["coil-guard.io/drain-timeout"].as_str().context("no timeout")?;
    ensure!(timeout == format!("{}m", hook / 60), "{timeout} and a hook of {hook} s");
    Ok(())
}
