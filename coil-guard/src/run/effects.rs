//! What the loop sets going beside itself, and what it writes to the log.

use std::time::Duration;

use tokio::sync::mpsc;

use crate::{
    datapath::{Events, FlowEvent},
    plan::{Changes, Desired, MarkState},
};

/// The ring is read by a task of its own, because waiting for it can fail and must then pause.
pub(super) fn follow_flows(mut events: Events) -> mpsc::Receiver<FlowEvent> {
    let (out, flows) = mpsc::channel(1024);
    drop(tokio::task::spawn_local(async move {
        loop {
            match events.next().await {
                Ok(event) => {
                    if out.send(event).await.is_err() {
                        return;
                    }
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot read the program's events; trying again");
                    tokio::time::sleep(Duration::from_secs(5)).await;
                }
            }
        }
    }));
    flows
}

/// What an operator wants to find in the log of a bad night: what was guarded when, and what each backend was seen as.
pub(super) fn log_changes(changes: &Changes, now: &Desired) {
    if let Some(before) = &changes.services {
        for (address, service) in &now.services {
            if before.get(address) != Some(service) {
                tracing::info!(egress = %service.egress, address = %address.address, port = address.port,
                    mode = ?service.mode, "guarding the Service");
            }
        }
        for (address, service) in before.iter().filter(|(address, _)| !now.services.contains_key(address)) {
            tracing::info!(egress = %service.egress, address = %address.address, "not guarding the Service any more");
        }
    }
    for (address, earlier) in &changes.marks {
        match (earlier, now.marks.get(address)) {
            (Some(earlier), Some(mark)) if (earlier.state, &earlier.egress) == (mark.state, &mark.egress) => {
            }
            (None, Some(mark)) if mark.state == MarkState::Ready => {
                tracing::debug!(egress = %mark.egress, backend = %address, "backend is ready");
            }
            (earlier, Some(mark)) => {
                let was = earlier.as_ref().map(|earlier| earlier.state);
                tracing::info!(egress = %mark.egress, backend = %address, state = ?mark.state, ?was, keep = ?mark.keep,
                    "backend changed");
            }
            (Some(earlier), None) => {
                tracing::debug!(egress = %earlier.egress, backend = %address, "backend forgotten");
            }
            (None, None) => {}
        }
    }
}
