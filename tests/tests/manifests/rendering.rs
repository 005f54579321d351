//! Every kustomization and example, through strict decoding and the API.

use std::{env, fs, path::PathBuf, process::Command};

use anyhow::{Context as _, Result, ensure};
use coil_guard_tests::{
    kube_api::{Kind, KubeApi},
    manifests::{deploy, documents, kustomizations, render},
};
use serde_json::Value;

fn name(object: &Value) -> String {
    format!("{} {}/{}", object["kind"], object["metadata"]["namespace"], object["metadata"]["name"])
}

/// Creates all of them on a fresh server.
fn accepted(objects: &[Value]) -> Result<()> {
    let api = KubeApi::start()?;
    for object in objects {
        api.create(object).with_context(|| format!("{} is refused", name(object)))?;
    }
    Ok(())
}

#[test]
fn every_kustomization_renders_and_is_accepted() -> Result<()> {
    let all = kustomizations()?;
    for wanted in ["base", "audit-first", "reset-by-default", "podmonitor", "proc-fallback", "uninstall"] {
        ensure!(all.iter().any(|found| found.ends_with(wanted)), "no {wanted} in {all:?}");
    }
    for path in all {
        let objects = render(&deploy().join(&path)).with_context(|| path.clone())?;
        accepted(&objects).with_context(|| path.clone())?;
        for object in &objects {
            let kind = Kind::of(object).context("a kind that is not known")?;
            let namespace = object["metadata"]["namespace"].as_str();
            let wanted = kind.info().namespaced.then_some("kube-system");
            ensure!(namespace == wanted, "{path}: {} is not in {wanted:?}", name(object));
        }
        for kind in [Kind::DaemonSet, Kind::ServiceAccount, Kind::ClusterRole, Kind::ClusterRoleBinding] {
            let found = objects.iter().filter(|object| Kind::of(object) == Some(kind)).count();
            ensure!(found == 1, "{path}: {found} of {kind:?}");
        }
    }
    Ok(())
}

type Mistake<'a> = &'a dyn Fn(&mut Value);

#[test]
fn what_has_a_mistake_is_not_accepted() -> Result<()> {
    let base = render(&deploy().join("base"))?;
    let daemonset = base.iter().find(|object| object["kind"] == "DaemonSet").context("no DaemonSet")?;
    let mistakes: [(&str, Mistake<'_>); 5] = [
        ("unknown field", &|d| d["spec"]["template"]["spec"]["hostPid"] = true.into()),
        ("not match template", &|d| d["spec"]["selector"]["matchLabels"]["x"] = "y".into()),
        ("volume \"other\" not found", &|d| {
            d["spec"]["template"]["spec"]["containers"][0]["volumeMounts"][0]["name"] = "other".into();
        }),
        ("Bidirectional", &|d| {
            let mount = &mut d["spec"]["template"]["spec"]["containers"][0]["volumeMounts"][0];
            mount["mountPropagation"] = "Bidirectional".into();
        }),
        ("exceeds the limit", &|d| {
            d["spec"]["template"]["spec"]["containers"][0]["resources"]["requests"]["memory"] = "1Gi".into();
        }),
    ];
    for (expected, make) in mistakes {
        let mut wrong = daemonset.clone();
        make(&mut wrong);
        let error = format!("{:#}", accepted(&[wrong]).err().context(expected)?);
        ensure!(error.contains(expected), "expected {expected:?}, found {error}");
    }
    Ok(())
}

#[test]
fn every_example_is_accepted() -> Result<()> {
    let mut found = 0;
    for entry in fs::read_dir(deploy().join("examples"))? {
        let path = entry?.path();
        let objects = documents(&path)?;
        accepted(&objects).with_context(|| path.display().to_string())?;
        found += objects.iter().filter(|object| Kind::of(object) == Some(Kind::Egress)).count();
    }
    ensure!(found >= 2, "{found} Egresses");
    Ok(())
}

/// The renderer of these tests against the real one, where there is one: `KUBECTL`, or `kubectl` on the path.
#[test]
fn kubectl_renders_the_same() -> Result<()> {
    let kubectl = env::var_os("KUBECTL").map_or_else(|| PathBuf::from("kubectl"), PathBuf::from);
    for path in kustomizations()? {
        let directory = deploy().join(&path);
        let output = match Command::new(&kubectl).arg("kustomize").arg(&directory).output() {
            Ok(output) => output,
            Err(error) => {
                eprintln!("skipped: {} cannot be run ({error}); set KUBECTL", kubectl.display());
                return Ok(());
            }
        };
        ensure!(output.status.success(), "{path}: {}", String::from_utf8_lossy(&output.stderr));
        let file = tempfile::NamedTempFile::new()?;
        fs::write(file.path(), output.stdout)?;
        let sorted = |mut objects: Vec<Value>| {
            objects.sort_by_key(name);
            objects
        };
        let (theirs, ours) = (sorted(documents(file.path())?), sorted(render(&directory)?));
        let names = |objects: &[Value]| objects.iter().map(name).collect::<Vec<_>>();
        ensure!(names(&theirs) == names(&ours), "{path}: {:?} and {:?}", names(&theirs), names(&ours));
        for (theirs, ours) in theirs.iter().zip(&ours) {
            ensure!(theirs == ours, "{path}:\nkubectl: {theirs:#}\nhere: {ours:#}");
        }
    }
    Ok(())
}
