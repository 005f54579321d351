// What the model shares with the lab, which includes this file.

/// Settings of a loaded model: the only element of the array map `MODEL_SETTINGS`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Minor version of the Cilium 1.x that is modelled, 14 to 20.
    pub minor: u32,
    /// Lifetime that a packet gives its conntrack entries, seconds.
    pub lifetime: u32,
    /// Security identity of the client pods.
    pub identity: u32,
    /// Security identity of everything else.
    pub remote_identity: u32,
    /// Steers the selection among the selectable slots: 0 is random, n is slot n (modulo their count).
    pub pick: u32,
    /// Ingress policy of the client pods: 0 allows everything, 1 nothing but replies.
    pub default_deny: u32,
    /// 1: a service without selectable slots drops established flows too (1.15.0 to 1.15.4 and older).
    pub early_count_check: u32,
    /// Zero.
    pub reserved: u32,
}

/// What the model counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Stat {
    /// UDP packets from a client to a known service.
    ToService = 0,
    /// Of these, packets that met no usable service entry.
    NewService = 1,
    /// Of these, packets whose backend came from the affinity map.
    FromAffinity = 2,
    /// Packets whose entry named a backend that does not exist.
    Reselected = 3,
    /// Packets dropped because the service, as they read it, has no selectable slot.
    DropNoService = 4,
    /// Packets to a client dropped by its ingress policy.
    DropPolicy = 5,
    /// Packets to a client that belong to a flow which it opened.
    Reply = 6,
    /// Of these, packets whose source became the service again.
    ReverseNat = 7,
    /// UDP packets from a client to anything but a service.
    Direct = 8,
    /// Packets dropped because the chosen slot, or the backend that it names, does not exist.
    DropNoBackend = 9,
    /// Of the packets dropped for either reason, those whose service was written anew between two of their steps.
    ServiceChanged = 10,
    /// Packets dropped because they could not be translated.
    DropUntranslated = 11,
}

/// Number of [`Stat`]s.
pub const STAT_COUNT: u32 = 12;
