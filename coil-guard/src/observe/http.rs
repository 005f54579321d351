//! The HTTP endpoints: `/metrics` on one address; `/livez`, `/readyz` and `/log-level` on another.

use std::{net::SocketAddr, sync::Arc};

use anyhow::Context as _;
use axum::{
    Router,
    extract::State,
    http::{StatusCode, header},
    response::{IntoResponse, Response},
    routing::get,
};
use tokio::{
    net::TcpListener,
    sync::{mpsc, oneshot},
};

use super::{LogControl, Metrics, Readiness, SnapshotCell};
use crate::{clock::Monotonic, datapath::Snapshot, memory};

/// A wish for a snapshot of the datapath. The loop owns the datapath, so it is asked.
pub type SnapshotRequest = oneshot::Sender<Option<Snapshot>>;

/// What the endpoints show.
#[derive(Clone, Debug)]
pub struct Endpoints {
    /// The agent's metrics.
    pub metrics: Arc<Metrics>,
    /// Where the metrics find the datapath's numbers.
    pub cell: SnapshotCell,
    /// For a fresh snapshot.
    pub snapshots: mpsc::Sender<SnapshotRequest>,
    /// Health.
    pub readiness: Arc<Readiness>,
    /// The log level.
    pub log: LogControl,
}

/// Serves on the current runtime until it ends. `None` leaves an endpoint out.
///
/// # Errors
///
/// An address cannot be bound.
pub async fn serve(
    endpoints: &Endpoints,
    metrics: Option<SocketAddr>,
    health: Option<SocketAddr>,
) -> anyhow::Result<()> {
    if let Some(address) = metrics {
        let router = Router::new().route("/metrics", get(get_metrics)).with_state(endpoints.clone());
        start(router, address, "--metrics-address").await?;
    }
    if let Some(address) = health {
        let router = Router::new()
            .route("/livez", get(get_livez))
            .route("/readyz", get(get_readyz))
            .route("/log-level", get(get_log_level).put(put_log_level))
            .with_state(endpoints.clone());
        start(router, address, "--health-address").await?;
    }
    Ok(())
}

async fn start(router: Router, address: SocketAddr, flag: &str) -> anyhow::Result<()> {
    let listener = TcpListener::bind(address).await.with_context(|| {
        format!("cannot listen on {address} ({flag}): another program of this node may have the port; choose another")
    })?;
    let address = listener.local_addr()?;
    tracing::info!(%address, flag, "listening");
    drop(tokio::spawn(async move {
        if let Err(error) = axum::serve(listener, router).await {
            tracing::error!(%error, %address, "the HTTP endpoint stopped");
        }
    }));
    Ok(())
}

async fn get_metrics(State(endpoints): State<Endpoints>) -> Response {
    let (answer, snapshot) = oneshot::channel();
    let snapshot = match endpoints.snapshots.send(answer).await {
        Ok(()) => snapshot.await.ok().flatten(),
        Err(_) => None,
    };
    // One thread serves all, and nothing is waited for in between. What was read is large where there are many backends.
    endpoints.cell.set(snapshot);
    let encoded = endpoints.metrics.encode();
    endpoints.cell.set(None);
    memory::give_back();
    match encoded {
        Ok(text) => {
            ([(header::CONTENT_TYPE, "application/openmetrics-text; version=1.0.0; charset=utf-8")], text)
                .into_response()
        }
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

async fn get_livez(State(endpoints): State<Endpoints>) -> Response {
    if endpoints.readiness.is_live(Monotonic::now()) {
        (StatusCode::OK, "ok\n").into_response()
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, "the agent's loop has not turned for a minute\n").into_response()
    }
}

async fn get_readyz(State(endpoints): State<Endpoints>) -> Response {
    let status =
        if endpoints.readiness.is_ready() { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (status, endpoints.readiness.report()).into_response()
}

async fn get_log_level(State(endpoints): State<Endpoints>) -> String {
    format!("{}\n", endpoints.log.get())
}

async fn put_log_level(State(endpoints): State<Endpoints>, level: String) -> Response {
    let before = endpoints.log.get();
    match endpoints.log.set(&level) {
        Ok(()) => {
            tracing::warn!(before, now = endpoints.log.get(), "the log level was changed");
            (StatusCode::OK, format!("{}\n", endpoints.log.get())).into_response()
        }
        Err(error) => (StatusCode::BAD_REQUEST, format!("{error}\n")).into_response(),
    }
}
