//! Debian's kernels, fetched by package name and kept below `target/vm`.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, bail};

use super::{bzimage, modules};
use crate::{
    machine::update_package_lists,
    process::{capture, run},
};

/// The kernels that every release is tested with: 6.1 has no TCX, so the guard attaches to clsact there; 6.12 has it.
pub(crate) const SERIES: [&str; 2] = ["6.1", "6.12"];

/// A kernel that is ready to boot.
pub(crate) struct Kernel {
    /// The uncompressed ELF image.
    pub(crate) image: PathBuf,
    /// The modules that the tests need, uncompressed, in the order in which they load.
    pub(crate) modules: Vec<PathBuf>,
    /// Where its files, and what a run leaves, are.
    pub(crate) directory: PathBuf,
}

/// Finds the kernel of a series in the cache or fetches it; needs the network only when it is not there.
pub(crate) fn prepare(series: &str, cache: &Path) -> Result<Kernel> {
    let directory = cache.join(series);
    let image = directory.join("vmlinux");
    let list = directory.join("modules.list");
    // Written last, so it stands for all the rest; another list of wanted modules makes it anew.
    let wanted = modules::WANTED.join(" ");
    let complete = fs::read_to_string(directory.join("complete")).is_ok_and(|recorded| recorded == wanted);
    if !complete {
        fetch(series, &directory, &image, &list)?;
        fs::write(directory.join("complete"), wanted)?;
    }
    let text = fs::read_to_string(&list).with_context(|| format!("cannot read {}", list.display()))?;
    let modules = text.lines().map(|file| directory.join("modules").join(file)).collect();
    Ok(Kernel { image, modules, directory })
}

fn fetch(series: &str, directory: &Path, image: &Path, list: &Path) -> Result<()> {
    let unpacked = directory.join("package");
    let modules = directory.join("modules");
    for stale in [&unpacked, &modules] {
        if stale.exists() {
            fs::remove_dir_all(stale)?;
        }
    }
    fs::create_dir_all(&unpacked)?;
    fs::create_dir_all(&modules)?;
    let package = package(series)?;
    eprintln!("vm: fetching {package}");
    run(Command::new("apt-get").current_dir(directory).args(["download", "-q", &package]))?;
    let file = newest(directory, |name| name.starts_with(&package) && name.ends_with(".deb"))?;
    run(Command::new("dpkg").arg("-x").args([&file, &unpacked]))?;

    let compressed = newest(&unpacked.join("boot"), |name| name.starts_with("vmlinuz-"))?;
    let bytes = fs::read(&compressed).with_context(|| format!("cannot read {}", compressed.display()))?;
    fs::write(image, bzimage::extract(&bytes)?)?;

    let tree = newest(&unpacked.join("lib/modules"), |_| true)?;
    let version = tree.file_name().context("the modules' directory has no name")?;
    run(Command::new("depmod").arg("-b").arg(&unpacked).arg(version))?;
    let dep = fs::read_to_string(tree.join("modules.dep"))?;
    let builtin = fs::read_to_string(tree.join("modules.builtin"))?;
    let mut names = String::new();
    for module in modules::order(&modules::WANTED, &dep, &builtin)? {
        let content = fs::read(tree.join(&module)).with_context(|| format!("cannot read module {module}"))?;
        let name =
            Path::new(&module).file_name().context("a module without a name")?.to_string_lossy().into_owned();
        let (name, content) = match name.strip_suffix(".xz") {
            Some(plain) => (plain.to_owned(), bzimage::filter("xz", &content)?),
            None => (name, content),
        };
        fs::write(modules.join(&name), content)?;
        names.push_str(&name);
        names.push('\n');
    }
    fs::write(list, names)?;
    fs::remove_dir_all(&unpacked)?;
    fs::remove_file(file)?;
    Ok(())
}

/// The newest cloud kernel of a series: a small configuration with everything that the tests need.
fn package(series: &str) -> Result<String> {
    let find = || -> Result<Option<String>> {
        let names = capture(Command::new("apt-cache").args(["pkgnames", &format!("linux-image-{series}.")]))?;
        Ok(select(&names).into_iter().find(|name| is_available(name)))
    };
    if let Some(name) = find()? {
        return Ok(name);
    }
    update_package_lists()?;
    match find()? {
        Some(name) => Ok(name),
        None => bail!(
            "no package linux-image-{series}.…-cloud-amd64 in the package lists: expected Debian 12 with its security or \
             backports suite for 6.12"
        ),
    }
}

fn is_available(package: &str) -> bool {
    capture(Command::new("apt-cache").args(["policy", package])).is_ok_and(|policy| {
        policy.lines().any(|line| line.contains("Candidate:") && !line.contains("(none)"))
    })
}

/// The signed cloud kernels among package names, newest first.
fn select(names: &str) -> Vec<String> {
    let mut found: Vec<&str> = names.lines().filter(|name| name.ends_with("-cloud-amd64")).collect();
    found.sort_by_key(|name| std::cmp::Reverse(numbers(name)));
    found.into_iter().map(str::to_owned).collect()
}

fn numbers(name: &str) -> Vec<u32> {
    name.split(|c: char| !c.is_ascii_digit()).filter_map(|part| part.parse().ok()).collect()
}

fn newest(directory: &Path, wanted: impl Fn(&str) -> bool) -> Result<PathBuf> {
    let entries = fs::read_dir(directory).with_context(|| format!("cannot list {}", directory.display()))?;
    let mut found: Vec<PathBuf> = entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.file_name().is_some_and(|name| wanted(&name.to_string_lossy())))
        .collect();
    found.sort_by_key(|path| numbers(&path.to_string_lossy()));
    found.pop().with_context(|| format!("{} does not hold what was expected there", directory.display()))
}

#[cfg(test)]
mod tests {
    use super::select;

    #[test]
    fn the_newest_signed_cloud_kernel_is_chosen() {
        let names = "linux-image-6.1.0-9-cloud-amd64\nlinux-image-6.1.0-57-cloud-amd64\nlinux-image-6.1.0-57-amd64\n\
                     linux-image-6.1.0-58-cloud-amd64-dbg\nlinux-image-6.1.0-58-cloud-amd64-unsigned\n";
        let expected = ["linux-image-6.1.0-57-cloud-amd64", "linux-image-6.1.0-9-cloud-amd64"];
        assert_eq!(select(names), expected);
        let backports = "linux-image-6.12.117+deb12-cloud-amd64\nlinux-image-6.12.99+deb12-cloud-amd64\n";
        assert_eq!(select(backports)[0], "linux-image-6.12.117+deb12-cloud-amd64");
    }
}
