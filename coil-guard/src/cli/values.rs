//! Values of flags. Each error says what is allowed.

use std::{net::SocketAddr, time::Duration};

use clap::ValueEnum;

use crate::{
    datapath::AttachKind,
    index::{self, EgressMode, NotReadyAfter},
    plan::Mode,
};

/// `--default-mode`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DefaultMode {
    /// Not guarded
    Off,
    /// Counted and reported, nothing changed
    Audit,
    /// Every flow leaves a leaving backend with its next packet
    Reset,
    /// New inner connections leave at once, existing ones stay while the old pod serves
    Drain,
    /// A flow on a leaving backend gets another source port; Cilium's maps are only read
    Rewrite,
}

impl From<DefaultMode> for EgressMode {
    fn from(mode: DefaultMode) -> Self {
        match mode {
            DefaultMode::Off => None,
            DefaultMode::Audit => Some(Mode::Audit),
            DefaultMode::Reset => Some(Mode::Reset),
            DefaultMode::Drain => Some(Mode::Drain),
            DefaultMode::Rewrite => Some(Mode::Rewrite),
        }
    }
}

/// `--cilium-access`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum CiliumAccess {
    /// Modes reset and drain may change a client's own conntrack entries
    ReadWrite,
    /// Cilium's maps are only read, whatever an annotation says
    ReadOnly,
}

/// `--attach`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Attach {
    /// TCX where the kernel has it (6.6 and later), clsact elsewhere
    Auto,
    /// TCX only
    Tcx,
    /// A clsact filter only
    Clsact,
}

impl From<Attach> for AttachKind {
    fn from(attach: Attach) -> Self {
        match attach {
            Attach::Auto => Self::Auto,
            Attach::Tcx => Self::Tcx,
            Attach::Clsact => Self::Clsact,
        }
    }
}

/// Where to listen, or nothing.
#[derive(Clone, Debug)]
pub(super) struct Address(pub(super) Option<SocketAddr>);

impl std::str::FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text.is_empty() {
            return Ok(Self(None));
        }
        text.parse().map(|address| Self(Some(address))).map_err(|_| {
            "an address and a port are expected, such as 127.0.0.1:9398 or [::1]:9398, or nothing".to_owned()
        })
    }
}

pub(super) fn duration(text: &str) -> Result<Duration, String> {
    humantime::parse_duration(text)
        .map_err(|error| format!("a duration such as 5s, 90s or 10m is expected: {error}"))
}

/// Seconds between two looks.
pub(super) fn interval(text: &str) -> Result<Duration, String> {
    match text.parse::<f64>() {
        Ok(seconds) if (0.1..=86_400.0).contains(&seconds) => Ok(Duration::from_secs_f64(seconds)),
        _ => Err("seconds from 0.1 to 86400 are expected".to_owned()),
    }
}

pub(super) fn not_ready_after(text: &str) -> Result<NotReadyAfter, String> {
    index::parse_not_ready_after(text)
        .map_err(|_| "a duration such as 0s, 30s or 10m, or never, is expected".to_owned())
}

pub(super) fn entries(text: &str) -> Result<u32, String> {
    match text.parse() {
        Ok(entries @ 1..=0x0400_0000) => Ok(entries),
        _ => Err("a number from 1 to 67108864 is expected".to_owned()),
    }
}

pub(super) fn port(text: &str) -> Result<u16, String> {
    match text.parse() {
        Ok(port @ 1..) => Ok(port),
        _ => Err("a port from 1 to 65535 is expected".to_owned()),
    }
}

pub(super) fn log_level(text: &str) -> Result<String, String> {
    crate::observe::parse_filter(text).map(|_| text.to_owned())
}
