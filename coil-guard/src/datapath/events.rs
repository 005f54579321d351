//! The program's event ring.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};

use aya::maps::{MapData, RingBuf};
use coil_guard_common::abi::{self, maps};
use tokio::{
    io::{Interest, unix::AsyncFd},
    sync::watch,
};
use zerocopy::FromBytes as _;

use super::{
    DatapathError, FlowEvent,
    layout::{Layout, file_error},
    own_maps::open_own,
    records::typed,
};

/// Events of the program.
#[derive(Debug)]
pub struct Events {
    layout: Layout,
    /// Counts the times that the maps were made or removed.
    epoch: watch::Receiver<u64>,
    ring: Option<AsyncFd<Ring>>,
}

struct Ring(RingBuf<MapData>);

impl std::fmt::Debug for Ring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Ring")
    }
}

impl AsFd for Ring {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsRawFd for Ring {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

/// Waits for a change; for ever when the datapath is gone, because then there will be none.
async fn changed(epoch: &mut watch::Receiver<u64>) {
    if epoch.changed().await.is_err() {
        std::future::pending::<()>().await;
    }
}

impl Events {
    pub(crate) fn new(layout: Layout, mut epoch: watch::Receiver<u64>) -> Self {
        epoch.mark_changed();
        Self { layout, epoch, ring: None }
    }

    /// The next event. Waits while there is none, and while nothing is guarded; cancel safe.
    ///
    /// # Errors
    ///
    /// When the ring cannot be opened or waited for.
    pub async fn next(&mut self) -> Result<FlowEvent, DatapathError> {
        loop {
            if self.epoch.has_changed().unwrap_or(false) {
                self.epoch.mark_unchanged();
                self.ring = self.open()?;
            }
            let Some(ring) = &mut self.ring else {
                changed(&mut self.epoch).await;
                self.epoch.mark_changed();
                continue;
            };
            while let Some(item) = ring.get_mut().0.next() {
                let event = abi::Event::read_from_prefix(&item)
                    .ok()
                    .and_then(|(event, _)| FlowEvent::from_abi(&event));
                if let Some(event) = event {
                    return Ok(event);
                }
            }
            tokio::select! {
                ready = ring.readable() => {
                    let mut ready =
                        ready.map_err(file_error("wait for", &self.layout.map(maps::EVENTS)))?;
                    ready.clear_ready();
                }
                () = changed(&mut self.epoch) => self.epoch.mark_changed(),
            }
        }
    }

    fn open(&self) -> Result<Option<AsyncFd<Ring>>, DatapathError> {
        let Some(map) = open_own(&self.layout, maps::EVENTS)? else { return Ok(None) };
        let ring = Ring(typed(map, maps::EVENTS)?);
        // SAFETY: the ring owns its descriptor, always gives the same one, and lives as long as the AsyncFd.
        unsafe { AsyncFd::register_with_interest(ring, Interest::READABLE) }
            .map(Some)
            .map_err(|error| file_error("wait for", &self.layout.map(maps::EVENTS))(error.into()))
    }
}
