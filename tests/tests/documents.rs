//! The documents name things that exist: files, headings, tests, flags.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, ensure};

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");

/// The documents for readers of the repository: README files and `docs/`.
fn documents() -> Result<Vec<(PathBuf, String)>> {
    let root = fs::canonicalize(ROOT)?;
    let mut paths = vec![root.join("README.md"), root.join("CHANGELOG.md"), root.join("tests/README.md")];
    for entry in fs::read_dir(root.join("docs"))? {
        paths.push(entry?.path());
    }
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "md"));
    paths
        .into_iter()
        .map(|path| {
            let text =
                fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
            Ok((path, text))
        })
        .collect()
}

/// Sources below a directory.
fn sources(directory: &Path, found: &mut String) -> Result<()> {
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if path.is_dir() && name != "target" && !name.starts_with('.') {
            sources(&path, found)?;
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push_str(&fs::read_to_string(&path)?);
        }
    }
    Ok(())
}

/// Text between each pair of `open` and `close`.
fn between<'a>(text: &'a str, open: &str, close: &str) -> Vec<&'a str> {
    text.split(open).skip(1).filter_map(|rest| rest.split_once(close).map(|(inner, _)| inner)).collect()
}

/// The anchor that a heading gets.
fn anchor(heading: &str) -> String {
    let kept = heading.trim().to_lowercase().replace(' ', "-");
    kept.chars().filter(|letter| letter.is_alphanumeric() || matches!(letter, '-' | '_')).collect()
}

fn anchors(text: &str) -> BTreeSet<String> {
    let headings = text.lines().filter(|line| line.starts_with('#'));
    headings.map(|line| anchor(line.trim_start_matches('#'))).collect()
}

/// Words in backquotes, outside of fenced blocks.
fn code_words(text: &str) -> BTreeSet<&str> {
    let prose = text.split("```").step_by(2);
    prose
        .flat_map(|part| part.split('`').skip(1).step_by(2))
        .flat_map(|code| code.split([' ', ',']))
        .collect()
}

#[test]
fn every_link_leads_somewhere() -> Result<()> {
    let documents = documents()?;
    let mut missing = Vec::new();
    for (path, text) in &documents {
        for link in between(text, "](", ")").into_iter().filter(|link| !link.contains("://")) {
            let (file, heading) = link.split_once('#').map_or((link, None), |(file, at)| (file, Some(at)));
            let target = if file.is_empty() {
                path.clone()
            } else {
                path.parent().unwrap_or(Path::new("/")).join(file)
            };
            let there = match heading {
                _ if !target.exists() => false,
                None => true,
                Some(heading) => anchors(&fs::read_to_string(&target)?).contains(heading),
            };
            if !there {
                missing.push(format!("{}: {link}", path.display()));
            }
        }
    }
    ensure!(missing.is_empty(), "links that lead nowhere: {missing:#?}");
    Ok(())
}

#[test]
fn every_test_that_is_named_exists() -> Result<()> {
    let mut code = String::new();
    sources(&fs::canonicalize(ROOT)?, &mut code)?;
    let (mut named, mut missing) = (0, Vec::new());
    for (path, text) in documents()? {
        for word in code_words(&text) {
            let name = word.rsplit("::").next().unwrap_or(word);
            let (stem, cut) = name.strip_suffix('*').map_or((name, false), |stem| (stem, true));
            // What else has so many parts is a test.
            let is_name =
                stem.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_');
            if !is_name || stem.matches('_').count() < 4 || stem.starts_with("coil_guard") {
                continue;
            }
            named += 1;
            let there = if cut {
                code.contains(&format!("fn {stem}"))
            } else {
                code.contains(&format!("fn {stem}("))
            };
            if !there && !code.contains(&format!(" {stem}:")) {
                missing.push(format!("{}: {word}", path.display()));
            }
        }
    }
    ensure!(missing.is_empty(), "tests that do not exist: {missing:#?}");
    ensure!(named > 20, "only {named} names found: is the way of naming them another one?");
    Ok(())
}

#[test]
fn every_source_that_is_named_exists() -> Result<()> {
    let root = fs::canonicalize(ROOT)?;
    let mut missing = Vec::new();
    for (path, text) in documents()? {
        let beside = path.parent().unwrap_or(&root);
        for word in code_words(&text).into_iter().filter(|word| word.contains('/') && word.ends_with(".rs")) {
            let several = word.contains(['*', '{', '<']);
            if !several && !root.join(word).exists() && !beside.join(word).exists() {
                missing.push(format!("{}: {word}", path.display()));
            }
        }
    }
    ensure!(missing.is_empty(), "sources that do not exist: {missing:#?}");
    Ok(())
}

#[test]
fn every_flag_that_is_named_exists() -> Result<()> {
    let mut arguments = String::new();
    sources(&Path::new(ROOT).join("coil-guard/src/cli"), &mut arguments)?;
    let mut missing = Vec::new();
    for (path, text) in documents()? {
        for word in code_words(&text) {
            let Some(flag) = word.strip_prefix("--") else { continue };
            let flag = flag.split('=').next().unwrap_or(flag);
            let of_others = ["help", "group", "locked", "json", "kernel", "test"];
            if !of_others.contains(&flag) && !arguments.contains(&format!("{}:", flag.replace('-', "_"))) {
                missing.push(format!("{}: --{flag}", path.display()));
            }
        }
    }
    ensure!(missing.is_empty(), "flags that do not exist: {missing:#?}");
    Ok(())
}

/// Names of the tests in a source.
fn tests_of(source: &str) -> impl Iterator<Item = &str> {
    let marked = source.split("test]\n").skip(1).filter_map(|rest| rest.split_once("fn "));
    marked.filter_map(|(_, rest)| rest.split_once('(').map(|(name, _)| name))
}

#[test]
fn every_row_of_what_an_api_server_sends_is_in_the_table_of_its_tests() -> Result<()> {
    let root = fs::canonicalize(ROOT)?;
    let page = fs::read_to_string(root.join("docs/reliability.md"))?;
    let (_, section) =
        page.split_once("### What a real API server").context("the section has another name")?;
    let table: Vec<_> = section.lines().filter(|line| line.starts_with('|')).collect();
    let mut missing = Vec::new();
    for source in ["tests/tests/watches/rows.rs", "tests/tests/kube_api/rows.rs"] {
        let text = fs::read_to_string(root.join(source))?;
        let names: Vec<_> = tests_of(&text).collect();
        ensure!(names.len() > 10, "{source} has {names:?} only");
        let told = |name: &str| table.iter().any(|row| row.contains(&format!("`{name}`")));
        missing.extend(names.into_iter().filter(|name| !told(name)).map(|name| format!("{source}: {name}")));
    }
    ensure!(missing.is_empty(), "tests that stand for no row: {missing:#?}");
    Ok(())
}
