//! What the datapath tells the rest of the agent.

use std::{
    net::{IpAddr, Ipv6Addr},
    path::PathBuf,
    time::Duration,
};

use coil_guard_common::abi;

use super::part::Part;
use crate::{
    cilium::CiliumError,
    clock::Monotonic,
    plan::{Mode, PodUid, ServiceAddress},
};

/// How a program is attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Attachment {
    /// A TCX link.
    Tcx,
    /// A clsact filter.
    Clsact,
}

/// Something that happened to the attachments or the bindings.
#[derive(Debug)]
pub enum Report {
    /// The pod's program is attached, or was replaced in place.
    Attached {
        /// The pod.
        pod: PodUid,
        /// Which of its programs.
        part: Part,
        /// Interface that holds the pod's address.
        interface: String,
        /// How.
        attachment: Attachment,
        /// The pod's ephemeral ports overlap the drain ports: an Egress with `fouSourcePortAuto` in drain is reset for it.
        ports_overlap: bool,
        /// What happened.
        how: How,
    },
    /// The pod's program is gone, and its pin with it.
    Detached {
        /// The pod.
        pod: PodUid,
        /// Which of its programs.
        part: Part,
    },
    /// The pod could not be attached, and will be tried again.
    Failed {
        /// The pod.
        pod: PodUid,
        /// Which of its programs.
        part: Part,
        /// What was tried, what was found, what to do.
        error: String,
        /// When it is tried again at the latest.
        retry_in: Duration,
    },
    /// The core program, in which the programs of all pods go on, could not be loaded, and will be tried again. Pods that
    /// are attached go on with the one before, if there was one.
    CoreFailed {
        /// What was tried, what was found, what to do.
        error: String,
        /// When it is tried again.
        retry_in: Duration,
    },
    /// A pod that should not be attached any more could not be detached; it is tried again.
    DetachFailed {
        /// The pod.
        pod: PodUid,
        /// Which of its programs.
        part: Part,
        /// What was tried, what was found, what to do.
        error: String,
    },
    /// The cores that pods need are loaded over these maps of Cilium's, for the first time or anew.
    Bound(Vec<BoundMap>),
    /// Cilium's maps cannot be used now. Pods stay attached to a core that was bound before to maps of the known layout when
    /// the maps are merely missing ([`CiliumError::is_missing`]), and are detached when the layout is another one.
    Unbound(CiliumError),
    /// Everything in the latest plan has been looked at: [`super::Progress::settled`] is set.
    Settled,
    /// The pin of one of the agent's maps is gone. The next program would be loaded over another map than the agent writes to: it
    /// has to start anew.
    PinLost(PathBuf),
    /// Something that the operator should know and that needs no reaction.
    Warning(String),
}

/// What happened to an attachment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum How {
    /// Attached for the first time.
    Fresh,
    /// It stands as an earlier agent left it.
    Kept,
    /// The program in an existing attachment was replaced.
    Replaced,
    /// Somebody had removed the attachment; it was made anew.
    Restored,
}

/// A map of Cilium's that the programs use.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct BoundMap {
    /// Its name in Cilium's directory.
    pub name: String,
    /// Its kernel id; `None` for an empty stand-in of ours, because Cilium has no such map.
    pub id: Option<u32>,
}

/// What happened to a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum FlowEventKind {
    /// It was moved to a live backend.
    Moved,
    /// It should have been moved, and no backend was live.
    NoLive,
    /// Audit: it would have been moved.
    WouldMove,
    /// Its drain port was taken by another draining backend.
    DrainPortCollision,
    /// Rewrite: it should have been moved, and other source ports are of no use. `to` is the backend to which Cilium's
    /// session affinity would send it back, if that is why.
    CannotMove,
}

impl FlowEventKind {
    /// Value of the metric's `kind` label.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Moved => "moved",
            Self::NoLive => "no_live",
            Self::WouldMove => "would_move",
            Self::DrainPortCollision => "drain_port_collision",
            Self::CannotMove => "cannot_move",
        }
    }
}

/// An event of the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlowEvent {
    /// When.
    pub time: Monotonic,
    /// What.
    pub kind: FlowEventKind,
    /// Mode of the service at that time.
    pub mode: Mode,
    /// The client pod.
    pub client: IpAddr,
    /// Outer source port, host order.
    pub client_port: u16,
    /// The guarded service.
    pub service: ServiceAddress,
    /// Address and id of the backend that the flow was on.
    pub from: Option<(IpAddr, u32)>,
    /// Address and id of the backend that it went to.
    pub to: Option<(IpAddr, u32)>,
    /// Index of the Egress, see [`super::Datapath::egress_of`].
    pub egress: u32,
}

impl FlowEvent {
    /// Reads an event; `None` for a kind or a mode that this version does not know.
    #[must_use]
    pub fn from_abi(event: &abi::Event) -> Option<Self> {
        let kind = match event.kind {
            abi::event::MOVED => FlowEventKind::Moved,
            abi::event::NO_LIVE => FlowEventKind::NoLive,
            abi::event::WOULD_MOVE => FlowEventKind::WouldMove,
            abi::event::DRAIN_PORT_COLLISION => FlowEventKind::DrainPortCollision,
            abi::event::CANNOT_MOVE => FlowEventKind::CannotMove,
            _ => return None,
        };
        let backend = |address: [u8; 16], id: u32| (address != [0; 16]).then(|| (from_mapped(address), id));
        Some(Self {
            time: Monotonic(event.time),
            kind,
            mode: mode_from_abi(event.mode)?,
            client: from_mapped(event.client),
            client_port: u16::from_be_bytes(event.client_port),
            service: ServiceAddress {
                address: from_mapped(event.service),
                port: u16::from_be_bytes(event.service_port),
            },
            from: backend(event.from, event.from_id),
            to: backend(event.to, event.to_id),
            egress: event.egress,
        })
    }
}

/// The address in the 16 bytes of the shared maps.
#[must_use]
pub(crate) fn from_mapped(address: [u8; 16]) -> IpAddr {
    Ipv6Addr::from(address).to_canonical()
}

/// The 16 bytes of the shared maps.
#[must_use]
pub(crate) fn to_mapped(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    }
}

pub(crate) fn mode_from_abi(mode: u8) -> Option<Mode> {
    Some(match mode {
        abi::mode::AUDIT => Mode::Audit,
        abi::mode::RESET => Mode::Reset,
        abi::mode::DRAIN => Mode::Drain,
        abi::mode::REWRITE => Mode::Rewrite,
        _ => return None,
    })
}

pub(crate) fn mode_to_abi(mode: Mode) -> u8 {
    match mode {
        Mode::Audit => abi::mode::AUDIT,
        Mode::Reset => abi::mode::RESET,
        Mode::Drain => abi::mode::DRAIN,
        Mode::Rewrite => abi::mode::REWRITE,
    }
}
