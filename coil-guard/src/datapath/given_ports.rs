//! The source ports that mode rewrite has given, read from the pins alone.

use std::{collections::BTreeMap, net::IpAddr, path::Path};

use coil_guard_common::abi::{self, PIN_UNSEEN, maps};

use super::{
    DatapathError, Snapshot, layout::Layout, own_maps::open_own, records::generation, report::from_mapped,
    snapshot::entries,
};
use crate::{clock::Monotonic, plan::ServiceAddress};

/// What mode rewrite remembers of a flow.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GivenPort {
    /// The service.
    pub service: ServiceAddress,
    /// Address of the client pod.
    pub client: IpAddr,
    /// `namespace/name` of the client pod.
    pub pod: String,
    /// Outer source port that the client sends from, host order.
    pub client_port: u16,
    /// The one that its packets are given, if they are.
    pub port: Option<u16>,
    /// Cilium's id of the backend that the flow should leave, or left last.
    pub left: u32,
    /// Since when the flow should leave and has not been seen elsewhere.
    pub stuck_since: Option<Monotonic>,
}

impl GivenPort {
    /// Reads those that count now from the pins below `pin_directory`: of attached pods, for services in this mode, given
    /// since it was turned on.
    ///
    /// # Errors
    ///
    /// When the pinned map cannot be opened or read.
    pub fn read(pin_directory: &Path, snapshot: &Snapshot) -> Result<Vec<Self>, DatapathError> {
        let Some(map) = open_own(&Layout::new(pin_directory), maps::PINNED_PORTS)? else {
            return Ok(Vec::new());
        };
        let mut pods = BTreeMap::new();
        for (uid, pod) in &snapshot.pods {
            pods.extend(pod.addresses.iter().map(|address| ((*address, generation(uid)), pod)));
        }
        let mut given = Vec::new();
        for (key, pin) in entries::<abi::PinnedPortKey, abi::PinnedPort>(&map, maps::PINNED_PORTS)? {
            let service = ServiceAddress {
                address: from_mapped(key.service),
                port: u16::from_be_bytes(key.service_port),
            };
            let client = from_mapped(key.client);
            let since = snapshot.services.get(&service).and_then(|service| service.tracked_since);
            let (Some(since), Some(pod)) = (since, pods.get(&(client, pin.generation))) else { continue };
            if pin.given_at.max(pin.stuck_since) < since.max(pod.guarded_since).0 {
                continue;
            }
            given.push(Self {
                service,
                client,
                pod: pod.name.clone(),
                client_port: u16::from_be_bytes(key.client_port),
                port: (pin.given_at != 0).then(|| u16::from_be_bytes(pin.port)),
                left: pin.left,
                // A port whose outcome nobody has seen yet is no failure.
                stuck_since: (pin.stuck_since != 0 && pin.flags & PIN_UNSEEN == 0)
                    .then_some(Monotonic(pin.stuck_since)),
            });
        }
        given.sort_by_key(|given| (given.service, given.client, given.client_port));
        Ok(given)
    }
}
