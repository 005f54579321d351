//! The pin directory: who holds it, and where things are.

use std::{
    collections::BTreeSet,
    fs::{self, File},
    io::{self, ErrorKind},
    os::unix::fs::DirBuilderExt as _,
    path::{Path, PathBuf},
};

use coil_guard_common::abi;
use nix::{
    errno::Errno,
    fcntl::{Flock, FlockArg},
    sys::statfs::{BPF_FS_MAGIC, statfs},
};

use super::{DatapathError, part::Key};

/// Pin directory, with an exclusive lock held on it until it is dropped.
#[derive(Debug)]
pub(crate) struct Lock {
    _lock: Flock<File>,
}

/// Paths below the pin directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    root: PathBuf,
    version: PathBuf,
}

impl Layout {
    pub(crate) fn new(pin_directory: &Path) -> Self {
        Self { root: pin_directory.to_owned(), version: pin_directory.join(abi::LAYOUT_VERSION) }
    }

    /// Parent of all layout versions, which is what is locked.
    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    /// Directory of this layout version.
    pub(crate) fn directory(&self) -> &Path {
        &self.version
    }

    pub(crate) fn map(&self, name: &str) -> PathBuf {
        self.version.join(name)
    }

    /// Links by pod and part.
    pub(crate) fn links(&self) -> PathBuf {
        self.version.join("links")
    }

    pub(crate) fn link(&self, key: &Key) -> PathBuf {
        self.links().join(key.name())
    }

    /// Own pins of what the programs are bound to: Cilium's maps, and stand-ins for those that it does not have. The
    /// loader is pointed here and never into Cilium's directory, so that it cannot make a pin there.
    pub(crate) fn bound(&self) -> PathBuf {
        self.version.join("cilium")
    }

    /// Makes the directories of this layout.
    pub(crate) fn make(&self) -> Result<(), DatapathError> {
        for path in [self.version.clone(), self.links(), self.bound()] {
            make_directory(&path)?;
        }
        Ok(())
    }

    /// Parts of pods with a pinned link.
    pub(crate) fn pinned_links(&self) -> Result<BTreeSet<Key>, DatapathError> {
        Ok(list(&self.links())?.iter().filter_map(|name| Key::parse(name)).collect())
    }

    /// Directories of other layout versions.
    pub(crate) fn other_versions(&self) -> Result<Vec<PathBuf>, DatapathError> {
        Ok(list(&self.root)?
            .into_iter()
            .filter(|name| name != abi::LAYOUT_VERSION && is_version(name))
            .map(|name| self.root.join(name))
            .collect())
    }
}

fn is_version(name: &str) -> bool {
    name.strip_prefix('v')
        .is_some_and(|digits| !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit()))
}

/// Makes the pin directory and takes it; `None` when another agent has it.
pub(crate) fn lock(pin_directory: &Path) -> Result<Option<Lock>, DatapathError> {
    require_bpffs(pin_directory)?;
    make_directory(pin_directory)?;
    lock_existing(pin_directory)
}

/// As [`lock`], of a directory that exists.
pub(crate) fn lock_existing(pin_directory: &Path) -> Result<Option<Lock>, DatapathError> {
    let directory = File::open(pin_directory).map_err(file_error("open", pin_directory))?;
    match Flock::lock(directory, FlockArg::LockExclusiveNonblock) {
        Ok(lock) => Ok(Some(Lock { _lock: lock })),
        Err((_, Errno::EWOULDBLOCK)) => Ok(None),
        Err((_, errno)) => Err(file_error("lock", pin_directory)(errno.into())),
    }
}

/// Looks at the nearest ancestor that exists.
pub(crate) fn require_bpffs(path: &Path) -> Result<(), DatapathError> {
    let mut at = path;
    loop {
        match statfs(at) {
            Ok(stat) if stat.filesystem_type() == BPF_FS_MAGIC => return Ok(()),
            Ok(stat) => {
                let found = stat.filesystem_type().0 as u64;
                return Err(DatapathError::NotBpffs { path: path.to_owned(), found });
            }
            Err(Errno::ENOENT) => match at.parent() {
                Some(parent) if !parent.as_os_str().is_empty() => at = parent,
                _ => return Err(file_error("find", path)(Errno::ENOENT.into())),
            },
            Err(errno) => return Err(file_error("look at", at)(errno.into())),
        }
    }
}

fn make_directory(path: &Path) -> Result<(), DatapathError> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(file_error("make", path))
}

pub(crate) fn file_error(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> DatapathError {
    let path = path.to_owned();
    move |source| DatapathError::File { action, path, source }
}

/// Names in a directory; none if it does not exist.
pub(crate) fn list(directory: &Path) -> Result<Vec<String>, DatapathError> {
    let entries = match fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(file_error("list", directory)(error)),
    };
    entries
        .map(|entry| {
            Ok(entry.map_err(file_error("list", directory))?.file_name().to_string_lossy().into_owned())
        })
        .collect()
}

/// Removes a pin; gone already is fine.
pub(crate) fn unpin(path: &Path) -> Result<(), DatapathError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(file_error("remove", path)(error)),
        _ => Ok(()),
    }
}

/// Removes a directory of pins, one level of directories below it included. Tells each file that it removed.
pub(crate) fn remove_tree(directory: &Path, removed: &mut Vec<PathBuf>) -> Result<(), DatapathError> {
    for name in list(directory)? {
        let path = directory.join(name);
        if path.is_dir() {
            remove_tree(&path, removed)?;
        } else {
            unpin(&path)?;
            removed.push(path);
        }
    }
    match fs::remove_dir(directory) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(file_error("remove", directory)(error)),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_version_directories_of_other_layouts_are_ours_to_remove() {
        assert!(is_version("v1") && is_version("v23"));
        assert!(!is_version("v") && !is_version("vx") && !is_version("links"));
    }

    #[test]
    fn a_directory_elsewhere_is_not_a_bpffs() {
        let directory = tempfile::tempdir().unwrap();
        let error = lock(&directory.path().join("coil-guard")).unwrap_err();
        assert!(matches!(error, DatapathError::NotBpffs { .. }), "{error}");
    }
}
