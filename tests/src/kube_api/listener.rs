//! The thread that serves, and how it goes away and comes back on the same port.

use std::{
    net::{Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError, mpsc},
    thread::JoinHandle,
};

use anyhow::Context as _;
use axum::serve::ListenerExt as _;
use serde_json::json;
use tokio::{net::TcpSocket, sync::oneshot};

use super::server::{self, Shared};

/// The port, and the thread while it listens.
#[derive(Debug)]
pub(crate) struct Listener {
    address: SocketAddr,
    /// Bound and never listening: keeps the port ours while nobody serves.
    _reserved: TcpSocket,
    running: Mutex<Option<(oneshot::Sender<()>, JoinHandle<()>)>>,
    kubeconfig: PathBuf,
    _directory: tempfile::TempDir,
}

impl Listener {
    pub(crate) fn start(shared: Arc<Shared>) -> anyhow::Result<Self> {
        loopback_up()?;
        let reserved = socket((Ipv4Addr::LOCALHOST, 0).into())?;
        let address = reserved.local_addr()?;
        let directory = tempfile::tempdir().context("a directory for the kubeconfig")?;
        let kubeconfig = directory.path().join("kubeconfig");
        let config = json!({
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": {"server": format!("http://{address}")}}],
            "users": [{"name": "test", "user": {"token": "test"}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test", "namespace": "default"}}],
            "current-context": "test",
        });
        // JSON is YAML, which is what a kubeconfig is.
        std::fs::write(&kubeconfig, config.to_string())?;
        let listener = Self {
            address,
            _reserved: reserved,
            running: Mutex::default(),
            kubeconfig,
            _directory: directory,
        };
        listener.listen(shared)?;
        Ok(listener)
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    pub(crate) fn kubeconfig(&self) -> &Path {
        &self.kubeconfig
    }

    pub(crate) fn listen(&self, shared: Arc<Shared>) -> anyhow::Result<()> {
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        if running.is_some() {
            return Ok(());
        }
        let socket = socket(self.address)?;
        let (stop, stopped) = oneshot::channel();
        let (report, reported) = mpsc::channel();
        let thread = std::thread::Builder::new().name("kube-api".into()).spawn(move || {
            // With the runtime go all its tasks, and with them the connections, in the middle of whatever they did.
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            let runtime = match runtime {
                Ok(runtime) => runtime,
                Err(error) => return drop(report.send(Err(error))),
            };
            runtime.block_on(async {
                let listener = match socket.listen(1024) {
                    Ok(listener) => listener,
                    Err(error) => return drop(report.send(Err(error))),
                };
                drop(report.send(Ok(())));
                // Small events must not wait for the answer to the one before.
                let listener = listener.tap_io(|stream| {
                    // Best effort: slower is not wrong.
                    let _ = stream.set_nodelay(true);
                });
                let serving = axum::serve(listener, server::router(shared));
                tokio::select! {
                    _ = async { serving.await } => {}
                    _ = stopped => {}
                }
            });
        })?;
        reported
            .recv()
            .context("the server's thread ended")?
            .with_context(|| format!("listen on {}", self.address))?;
        *running = Some((stop, thread));
        Ok(())
    }

    pub(crate) fn stop(&self) {
        let running = self.running.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some((stop, thread)) = running {
            // Both fail only when the thread has ended by itself.
            let _ = stop.send(());
            let _ = thread.join();
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.stop();
    }
}

/// In a fresh network namespace the loopback interface is down, and 127.0.0.1 is nobody's.
fn loopback_up() -> anyhow::Result<()> {
    // Binding works all the same; a route is what is missing.
    let probe = std::net::UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))?;
    if probe.connect((Ipv4Addr::LOCALHOST, 9)).is_ok() {
        return Ok(());
    }
    // On a thread of its own: the caller may be in a runtime, and the helper brings its own.
    let thread = std::thread::spawn(|| crate::net::Netlink::here()?.up("lo"));
    thread.join().map_err(|_| anyhow::anyhow!("setting lo up panicked"))?.context("127.0.0.1 cannot be used")
}

fn socket(address: SocketAddr) -> anyhow::Result<TcpSocket> {
    let socket = TcpSocket::new_v4().context("a TCP socket")?;
    // Also what lets two sockets be bound to the port as long as one of them does not listen.
    socket.set_reuseaddr(true)?;
    socket.bind(address).with_context(|| format!("bind to {address}"))?;
    Ok(socket)
}
