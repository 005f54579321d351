//! Finding and entering the pods' network namespaces.
//!
//! They are the files of a directory, where the runtime keeps them (`/run/netns`), or those of all processes (`/proc`).
//!
//! A namespace is entered by a thread of its own that ends afterwards. No file of a namespace is kept open: it would keep
//! the namespace alive after its pod.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, File},
    io::{self, ErrorKind},
    net::IpAddr,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use nix::{
    sched::{CloneFlags, setns},
    sys::statfs::{NSFS_MAGIC, PROC_SUPER_MAGIC, statfs},
};

use super::netlink::{Address, Netlink};

/// A namespace with addresses is looked at again no sooner than this.
const KNOWN_FOR: Duration = Duration::from_secs(1);

/// A pod's namespace and the interface that holds its address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Found {
    pub(crate) path: PathBuf,
    pub(crate) inode: u64,
    pub(crate) interface_index: u32,
}

/// Why a pod's namespace is not there.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NamespaceError {
    #[error(
        "none of the {scanned} network namespaces in {directory} holds {addresses}: is that where the container runtime \
         keeps them (--netns-dir), and is it mounted with propagation? Trying again"
    )]
    NotFound { directory: PathBuf, scanned: usize, addresses: String },
    #[error("cannot list the network namespaces in {directory}: {source}")]
    Directory { directory: PathBuf, source: io::Error },
    #[error("cannot enter the network namespace {path}: {source}. It needs CAP_SYS_ADMIN")]
    Enter { path: PathBuf, source: io::Error },
}

#[derive(Clone, Debug)]
struct Known {
    path: PathBuf,
    addresses: Vec<(Address, bool)>,
    seen: Instant,
}

/// Namespaces by inode, with the addresses that they were last seen to hold.
#[derive(Debug)]
pub(crate) struct Namespaces {
    directory: PathBuf,
    own: Option<u64>,
    known: BTreeMap<u64, Known>,
}

impl Namespaces {
    pub(crate) fn new(directory: &Path) -> Self {
        // The namespace of the agent is the node's: a file for it among the pods' must never match.
        let own = fs::metadata("/proc/thread-self/ns/net").ok().map(|metadata| metadata.ino());
        Self { directory: directory.to_owned(), own, known: BTreeMap::new() }
    }

    pub(crate) fn directory(&self) -> &Path {
        &self.directory
    }

    /// The namespace with this inode, as last seen.
    pub(crate) fn by_inode(&self, inode: u64) -> Option<PathBuf> {
        self.known.get(&inode).map(|known| known.path.clone())
    }

    pub(crate) fn paths(&self) -> impl Iterator<Item = (u64, &Path)> {
        self.known.iter().map(|(inode, known)| (*inode, known.path.as_path()))
    }

    /// Reads the directory, and the addresses of namespaces that are new, were without one, or were looked at long ago.
    /// Files that vanish meanwhile, and files that are no namespaces (yet), are passed over.
    pub(crate) fn scan(&mut self) -> Result<(), NamespaceError> {
        let now = Instant::now();
        let files = self.files()?;
        let alive: BTreeSet<_> = files.iter().map(|(inode, _)| *inode).collect();
        self.known.retain(|inode, _| alive.contains(inode));
        let stale: Vec<_> = files
            .into_iter()
            .filter(|(inode, path)| {
                !self.known.get(inode).is_some_and(|known| {
                    known.path == *path && !known.addresses.is_empty() && now - known.seen < KNOWN_FOR
                })
            })
            .collect();
        if stale.is_empty() {
            return Ok(());
        }
        // One thread visits them all, and is gone with the last one.
        let read = thread::scope(|scope| {
            scope
                .spawn(|| {
                    stale
                        .into_iter()
                        .filter_map(|(inode, path)| {
                            enter(&path).ok()?;
                            let addresses = addresses_with_carrier().ok()?;
                            Some((inode, Known { path, addresses, seen: now }))
                        })
                        .collect::<Vec<_>>()
                })
                .join()
                .expect("reading addresses does not panic")
        });
        self.known.extend(read);
        Ok(())
    }

    /// Inode and a path of every namespace there is but the agent's own.
    fn files(&self) -> Result<Vec<(u64, PathBuf)>, NamespaceError> {
        let failed = |source| NamespaceError::Directory { directory: self.directory.clone(), source };
        let is_proc = statfs(&self.directory).is_ok_and(|stat| stat.filesystem_type() == PROC_SUPER_MAGIC);
        let mut files = BTreeMap::new();
        for entry in fs::read_dir(&self.directory).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let path = if is_proc {
                if !entry.file_name().as_encoded_bytes().iter().all(u8::is_ascii_digit) {
                    continue;
                }
                entry.path().join("ns/net")
            } else {
                entry.path()
            };
            let Ok(metadata) = fs::metadata(&path) else { continue };
            let inode = metadata.ino();
            if self.own == Some(inode) || files.contains_key(&inode) {
                continue;
            }
            // A path that is known already is kept: of a pod's many processes any will do.
            let known = self
                .known
                .get(&inode)
                .map(|known| known.path.clone())
                .filter(|known| fs::metadata(known).is_ok_and(|metadata| metadata.ino() == inode));
            let path = known.unwrap_or(path);
            if statfs(&path).is_ok_and(|stat| stat.filesystem_type() == NSFS_MAGIC) {
                files.insert(inode, path);
            }
        }
        Ok(files.into_iter().collect())
    }

    /// The namespace that holds one of `addresses`, IPv4 first. `taken` says which belong to other pods: during the reuse of
    /// an address two can hold it for a moment, and then one with a carrier that is not taken is preferred.
    pub(crate) fn find(
        &self,
        addresses: &BTreeSet<IpAddr>,
        taken: impl Fn(u64) -> bool,
    ) -> Result<Found, NamespaceError> {
        let mut candidates: Vec<_> = self
            .known
            .iter()
            .flat_map(|(inode, known)| {
                let taken = taken(*inode);
                known.addresses.iter().filter(|(held, _)| addresses.contains(&held.address)).map(
                    move |(held, carrier)| {
                        let rank = (taken, !carrier, held.address.is_ipv6());
                        (rank, *inode, known.path.clone(), held.interface)
                    },
                )
            })
            .collect();
        candidates.sort();
        match candidates.into_iter().next() {
            Some((_, inode, path, interface_index)) => Ok(Found { path, inode, interface_index }),
            None => Err(NamespaceError::NotFound {
                directory: self.directory.clone(),
                scanned: self.known.len(),
                addresses: addresses.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "),
            }),
        }
    }

    /// Forgets what was read of a namespace: it turned out not to be so.
    pub(crate) fn forget(&mut self, inode: u64) {
        self.known.remove(&inode);
    }
}

/// Number of network namespaces in `directory`, the agent's own aside.
///
/// # Errors
///
/// A sentence, when it cannot be listed.
pub fn count_namespaces(directory: &Path) -> Result<usize, String> {
    Namespaces::new(directory).files().map(|files| files.len()).map_err(|error| error.to_string())
}

fn addresses_with_carrier() -> io::Result<Vec<(Address, bool)>> {
    let mut netlink = Netlink::open()?;
    let addresses = netlink.addresses()?;
    let running = netlink.running()?;
    Ok(addresses.into_iter().map(|address| (address, running.contains(&address.interface))).collect())
}

fn enter(path: &Path) -> Result<(), NamespaceError> {
    let failed = |source: io::Error| NamespaceError::Enter { path: path.to_owned(), source };
    let file = File::open(path).map_err(failed)?;
    setns(&file, CloneFlags::CLONE_NEWNET).map_err(|errno| failed(errno.into()))
}

/// Runs `work` inside the namespace, if it is still the one with this inode.
pub(crate) fn within<T: Send>(
    path: &Path,
    inode: u64,
    work: impl FnOnce() -> T + Send,
) -> Result<T, NamespaceError> {
    thread::scope(|scope| {
        scope
            .spawn(|| {
                enter(path)?;
                let now = fs::metadata("/proc/thread-self/ns/net").map(|metadata| metadata.ino());
                if now.as_ref().ok() != Some(&inode) {
                    let source = now.err().unwrap_or_else(|| ErrorKind::NotFound.into());
                    return Err(NamespaceError::Enter { path: path.to_owned(), source });
                }
                Ok(work())
            })
            .join()
            .expect("work in a namespace does not panic")
    })
}

/// Runs `work` inside each of the namespaces, on one thread; those that cannot be entered are passed over.
pub(crate) fn within_each<K: Send, T: Send>(
    namespaces: Vec<(K, PathBuf)>,
    work: impl Fn(&K) -> T + Send + Sync,
) -> Vec<(K, T)> {
    if namespaces.is_empty() {
        return Vec::new();
    }
    thread::scope(|scope| {
        scope
            .spawn(|| {
                namespaces
                    .into_iter()
                    .filter_map(|(key, path)| {
                        enter(&path).ok()?;
                        let result = work(&key);
                        Some((key, result))
                    })
                    .collect()
            })
            .join()
            .expect("work in a namespace does not panic")
    })
}

/// Whether the ephemeral ports of the calling thread's namespace overlap the ports that the program uses.
pub(crate) fn ports_overlap() -> bool {
    // One setting for both families.
    fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").is_ok_and(|text| range_overlaps(&text))
}

fn range_overlaps(text: &str) -> bool {
    /// First drain port.
    const FIRST: u32 = 61000;
    text.split_whitespace().nth(1).and_then(|last| last.parse().ok()).is_some_and(|last: u32| last >= FIRST)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_widened_port_range_overlaps() {
        assert!(!range_overlaps("32768\t60999\n"));
        assert!(range_overlaps("1024\t65535\n"));
        assert!(range_overlaps("32768 61000"));
    }

    fn namespaces(known: &[(u64, &str, bool)]) -> Namespaces {
        let known = known
            .iter()
            .map(|(inode, address, carrier)| {
                let address = Address { address: address.parse().unwrap(), interface: 2 };
                let path = PathBuf::from(format!("/n/{inode}"));
                (*inode, Known { path, addresses: vec![(address, *carrier)], seen: Instant::now() })
            })
            .collect();
        Namespaces { directory: "/n".into(), own: None, known }
    }

    #[test]
    fn of_two_namespaces_with_the_address_the_living_and_free_one_is_taken() {
        let wanted = BTreeSet::from(["10.0.0.1".parse().unwrap()]);
        let two = namespaces(&[(1, "10.0.0.1", false), (2, "10.0.0.1", true), (3, "10.0.0.9", true)]);
        assert_eq!(two.find(&wanted, |_| false).unwrap().inode, 2);
        assert_eq!(two.find(&wanted, |inode| inode == 2).unwrap().inode, 1);
    }

    #[test]
    fn a_missing_namespace_says_where_it_was_looked_for() {
        let wanted = BTreeSet::from(["10.0.0.2".parse().unwrap()]);
        let text = namespaces(&[(1, "10.0.0.1", true)]).find(&wanted, |_| false).unwrap_err().to_string();
        assert!(text.contains("/n") && text.contains("10.0.0.2"), "{text}");
    }

    #[test]
    fn a_procfs_shows_the_namespaces_of_its_processes_once_and_not_our_own() {
        if !nix::unistd::geteuid().is_root() {
            eprintln!("skipped: needs root for a process in another network namespace");
            return;
        }
        let mut command = std::process::Command::new("unshare");
        let mut child = command.args(["--net", "--", "sleep", "60"]).spawn().unwrap();
        let wanted = PathBuf::from(format!("/proc/{}/ns/net", child.id()));
        let own = fs::metadata("/proc/self/ns/net").unwrap().ino();
        let deadline = Instant::now() + Duration::from_secs(10);
        let files = loop {
            let files = Namespaces::new(Path::new("/proc")).files().unwrap();
            if files.iter().any(|(_, path)| *path == wanted) || Instant::now() > deadline {
                break files;
            }
            thread::yield_now();
        };
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(files.iter().any(|(_, path)| *path == wanted), "{wanted:?} is not in {files:?}");
        assert!(files.iter().all(|(inode, _)| *inode != own), "{files:?}");
        let inodes: BTreeSet<_> = files.iter().map(|(inode, _)| inode).collect();
        assert_eq!(inodes.len(), files.len(), "{files:?}");
    }

    #[test]
    fn files_that_are_no_namespaces_are_passed_over() {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join("cni-1"), "").unwrap();
        let mut namespaces = Namespaces::new(directory.path());
        namespaces.scan().unwrap();
        assert_eq!(namespaces.paths().count(), 0);
    }
}
