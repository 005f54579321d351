//! Renders what is in `deploy/`, as `kubectl kustomize` does, and compares roles with calls.
//!
//! Only the part of kustomize that the manifests use: resources, a namespace, strategic merge patches from files, and
//! image names and tags. Anything else in a kustomization is refused, so that it cannot be passed over.

mod merge;
mod roles;

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, bail, ensure};
use serde::Deserialize;
use serde_json::{Value, json};

pub use self::roles::{ensure_role_matches, role_rules};
use crate::kube_api::Kind;

/// `deploy/` of this repository.
#[must_use]
pub fn deploy() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy")
}

/// The base and every overlay, by their paths below `deploy/`, in order.
///
/// # Errors
///
/// `deploy/overlays` cannot be read.
pub fn kustomizations() -> Result<Vec<String>> {
    let mut found = vec!["base".to_owned()];
    for entry in fs::read_dir(deploy().join("overlays")).context("cannot read deploy/overlays")? {
        found.push(format!("overlays/{}", entry?.file_name().to_string_lossy()));
    }
    found.sort();
    Ok(found)
}

/// The documents of a YAML file.
///
/// # Errors
///
/// It cannot be read, or is no YAML.
pub fn documents(path: &Path) -> Result<Vec<Value>> {
    let text = fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    serde_saphyr::from_multiple(&text).with_context(|| format!("{} is no YAML", path.display()))
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Kustomization {
    api_version: String,
    kind: String,
    namespace: Option<String>,
    resources: Vec<String>,
    #[serde(default)]
    patches: Vec<PatchFile>,
    #[serde(default)]
    images: Vec<Image>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PatchFile {
    path: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Image {
    name: String,
    new_name: Option<String>,
    new_tag: Option<String>,
}

/// Renders a directory with a `kustomization.yaml`.
///
/// # Errors
///
/// What is missing, unknown, or does not fit.
pub fn render(directory: &Path) -> Result<Vec<Value>> {
    let file = directory.join("kustomization.yaml");
    let text = fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
    let kustomization: Kustomization = serde_saphyr::from_str(&text)
        .with_context(|| format!("{} is none that is rendered here", file.display()))?;
    let header = (kustomization.api_version.as_str(), kustomization.kind.as_str());
    ensure!(header == ("kustomize.config.k8s.io/v1beta1", "Kustomization"), "{}: {header:?}", file.display());
    let mut objects = Vec::new();
    for resource in &kustomization.resources {
        let path = directory.join(resource);
        objects.extend(if path.is_dir() { render(&path)? } else { documents(&path)? });
    }
    for patch in &kustomization.patches {
        for patch in documents(&directory.join(&patch.path))? {
            apply(&mut objects, &patch).with_context(|| format!("a patch of {}", file.display()))?;
        }
    }
    for object in &mut objects {
        if let Some(namespace) = &kustomization.namespace {
            set_namespace(object, namespace)?;
        }
        for image in &kustomization.images {
            set_image(object, image);
        }
    }
    Ok(objects)
}

fn apply(objects: &mut [Value], patch: &Value) -> Result<()> {
    let fits = |object: &Value| {
        let same = |pointer: &str| object.pointer(pointer) == patch.pointer(pointer);
        same("/apiVersion") && same("/kind") && same("/metadata/name") && same("/metadata/namespace")
    };
    let mut targets: Vec<_> = objects.iter_mut().filter(|object| fits(object)).collect();
    match targets.as_mut_slice() {
        [target] => merge::strategic(target, patch),
        targets => bail!("it fits {} objects: {}", targets.len(), patch["metadata"]),
    }
}

fn set_namespace(object: &mut Value, namespace: &str) -> Result<()> {
    let kind = Kind::of(object).with_context(|| {
        format!("{} {} is a kind that is not known here", object["apiVersion"], object["kind"])
    })?;
    if kind.info().namespaced {
        object["metadata"]["namespace"] = json!(namespace);
    }
    Ok(())
}

/// In every container below, as kustomize finds them.
fn set_image(value: &mut Value, image: &Image) {
    match value {
        Value::Array(items) => items.iter_mut().for_each(|item| set_image(item, image)),
        Value::Object(fields) => {
            for (field, value) in fields {
                if matches!(field.as_str(), "containers" | "initContainers") {
                    for container in value.as_array_mut().into_iter().flatten() {
                        rename(&mut container["image"], image);
                    }
                } else {
                    set_image(value, image);
                }
            }
        }
        _ => {}
    }
}

fn rename(found: &mut Value, image: &Image) {
    let Some(old) = found.as_str() else { return };
    let (name, tag) = match old.rsplit_once(':') {
        // A colon before a slash belongs to the registry's port.
        Some((name, tag)) if !tag.contains('/') => (name, Some(tag)),
        _ => (old, None),
    };
    if name == image.name {
        let name = image.new_name.as_deref().unwrap_or(name);
        *found = match image.new_tag.as_deref().or(tag) {
            Some(tag) => json!(format!("{name}:{tag}")),
            None => json!(name),
        };
    }
}
