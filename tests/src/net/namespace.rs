//! Network namespaces of pods.

use std::{
    fs::{self, File},
    io,
    panic::resume_unwind,
    path::{Path, PathBuf},
    sync::Arc,
    thread,
};

use anyhow::{Context as _, Result};
use nix::{
    mount::{MntFlags, MsFlags, mount, umount2},
    sched::{CloneFlags, setns, unshare},
};

use super::netlink::Netlink;

/// A named network namespace, with its file in the runtime's directory. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Namespace {
    name: String,
    path: PathBuf,
    file: Arc<File>,
}

impl Namespace {
    /// Makes a namespace, with `lo` up, and its file `directory/name`.
    ///
    /// # Errors
    ///
    /// When the kernel refuses, or the file exists.
    pub fn create(directory: &Path, name: &str) -> Result<Self> {
        let path = directory.join(name);
        File::options()
            .write(true)
            .create_new(true)
            .open(&path)
            .with_context(|| format!("cannot create {}", path.display()))?;
        let file = on_own_thread(|| {
            unshare(CloneFlags::CLONE_NEWNET).context("cannot make a network namespace")?;
            let none: Option<&str> = None;
            mount(Some("/proc/thread-self/ns/net"), &path, none, MsFlags::MS_BIND, none)
                .with_context(|| format!("cannot mount the namespace on {}", path.display()))?;
            Netlink::here()?.up("lo")?;
            File::open(&path).with_context(|| format!("cannot open {}", path.display()))
        })?;
        Ok(Self { name: name.to_owned(), path, file: Arc::new(file) })
    }

    /// The calling thread's own namespace, under a name for messages. It has no file of its own to remove.
    ///
    /// # Errors
    ///
    /// When /proc is not there.
    pub fn current(name: &str) -> Result<Self> {
        let path = PathBuf::from("/proc/thread-self/ns/net");
        let file = File::open(&path).with_context(|| format!("cannot open {}", path.display()))?;
        Ok(Self { name: name.to_owned(), path, file: Arc::new(file) })
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its open file, for moving devices.
    #[must_use]
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Runs `body` in the namespace, on a thread that ends with it.
    ///
    /// # Errors
    ///
    /// When the namespace cannot be entered, and whatever `body` returns.
    ///
    /// # Panics
    ///
    /// When `body` panics.
    pub fn run<T: Send>(&self, body: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        on_own_thread(|| {
            self.enter()?;
            body()
        })
    }

    /// Starts a thread in the namespace.
    ///
    /// # Errors
    ///
    /// When no thread can be started. That the namespace cannot be entered comes out of the thread.
    pub fn spawn<T: Send + 'static>(
        &self,
        name: &str,
        body: impl FnOnce() -> Result<T> + Send + 'static,
    ) -> io::Result<thread::JoinHandle<Result<T>>> {
        let namespace = self.clone();
        thread::Builder::new().name(name.to_owned()).spawn(move || {
            namespace.enter()?;
            body()
        })
    }

    /// Moves the calling thread into the namespace, for good.
    ///
    /// # Errors
    ///
    /// When the kernel refuses.
    pub fn enter(&self) -> Result<()> {
        setns(&*self.file, CloneFlags::CLONE_NEWNET)
            .with_context(|| format!("cannot enter {}", self.path.display()))
    }

    /// Removes its file, as a runtime does with a sandbox. The namespace goes when nothing in it runs any more.
    ///
    /// # Errors
    ///
    /// When the kernel refuses.
    pub fn remove_file(&self) -> Result<()> {
        umount2(&self.path, MntFlags::MNT_DETACH)
            .with_context(|| format!("cannot unmount {}", self.path.display()))?;
        fs::remove_file(&self.path).with_context(|| format!("cannot remove {}", self.path.display()))
    }
}

/// Runs `body` on a thread of its own, for what must not touch the caller: its namespace or its async runtime.
pub(crate) fn on_own_thread<T: Send>(body: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    thread::scope(|scope| {
        let thread = thread::Builder::new().spawn_scoped(scope, body).context("cannot start a thread")?;
        thread.join().unwrap_or_else(|panic| resume_unwind(panic))
    })
}
