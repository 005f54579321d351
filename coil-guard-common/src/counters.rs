//! Verdicts by reason.

macro_rules! counters {
    ($(#[$meta:meta])+ $counters:ident: $($(#[doc = $doc:literal])+ $name:ident = $text:literal,)+) => {
        $(#[$meta])+
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(u32)]
        pub enum $counters { $($(#[doc = $doc])+ $name,)+ }

        impl $counters {
            /// All of them, in index order.
            pub const ALL: &'static [Self] = &[$(Self::$name,)+];
            /// Number of counters.
            pub const COUNT: u32 = Self::ALL.len() as u32;

            /// The value of the metric's label.
            #[must_use]
            pub const fn label(self) -> &'static str {
                match self { $(Self::$name => $text,)+ }
            }

            /// What it means, for documentation and `status`.
            #[must_use]
            pub const fn describe(self) -> &'static str {
                match self { $(Self::$name => concat!($($doc),+).trim_ascii(),)+ }
            }
        }
    };
}

counters! {
    /// Why the program did what it did with a packet; index into the `COUNTERS` map.
    ///
    /// Exactly one verdict is counted for every packet that is UDP to the FoU port, and one for every other packet.
    Reason:
    /// Not IP, not UDP, or not to the FoU port.
    NotFou = "not_fou",
    /// Outer header is too short or contradicts itself.
    Malformed = "malformed",
    /// Outer packet is a later fragment, which has no ports.
    OuterFragment = "outer_fragment",
    /// More IPv6 extension headers than are looked at, or one that is not understood.
    ExtensionHeaders = "extension_headers",
    /// No guarded service at this destination.
    NotGuarded = "not_guarded",
    /// Outer source is not an address of this pod.
    ForeignSource = "foreign_source",
    /// The service has no master entry in Cilium's map.
    UnknownService = "unknown_service",
    /// The flow is on a backend that keeps it.
    Healthy = "healthy",
    /// No service entry: Cilium chooses. Except in rewrite, every backend that it could choose is usable.
    LeftToCilium = "left_to_cilium",
    /// The service entry was moved to a live backend.
    Moved = "moved",
    /// A service entry was made for the first packet.
    Created = "created",
    /// A dangling service entry was repaired.
    Repaired = "repaired",
    /// The flow should leave, and there is no live backend.
    NoLive = "no_live",
    /// Audit: reset would have moved it.
    WouldMove = "would_move",
    /// Drain: sent on to the leaving backend under the drain port.
    Drained = "drained",
    /// Drain: should have been drained and could not be, so it was reset.
    NotDrained = "not_drained",
    /// Drain: an existing flow was reset because its backend stopped keeping it.
    Cut = "cut",
    /// Drain: remembered on a backend that began to leave a moment ago.
    Settling = "settling",
    /// Source port lies in the ports that the guard gives, so nothing is done for it.
    ReservedPort = "reserved_port",
    /// The entry changed under the guard each time it was tried.
    Contended = "contended",
    /// Rewrite: sent on under the source port that the flow was given.
    Rewritten = "rewritten",
    /// Rewrite: the flow has to leave its backend and was given another source port with this packet.
    NewPort = "new_port",
    /// Rewrite: the flow should leave, and Cilium's session affinity would send it back from any port.
    HeldByAffinity = "held_by_affinity",
    /// Rewrite: the flow should leave, and other ports were of no use; they are tried again after a pause.
    NotMoved = "not_moved",
}

counters! {
    /// What the programs for symmetric replies did; index into the `REPLY_COUNTERS` map.
    ReplyCount:
    /// Egress pod: a client's packets have begun to come from another port.
    Learnt = "learnt",
    /// Egress pod: a client's packets come from the FoU port again, or from a port at which it can have no replies.
    Forgotten = "forgotten",
    /// Egress pod: a reply was sent to the port that the client's packets come from.
    Answered = "answered",
    /// Client pod: a reply was given the FoU port again.
    Returned = "returned",
    /// Client pod: a packet from a FoU port to one of the ports that are given was no reply, and was left alone.
    NotReturned = "not_returned",
}
