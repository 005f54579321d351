//! What hangs on a device, and what the kernel counted.

use std::fs;

use anyhow::{Context as _, Result};
use aya::programs::{SchedClassifier, TcAttachType};

use super::netlink::{Netlink, TcObject};

/// Everything that is attached to a device. Empty (`is_empty`) is what an unguarded pod looks like.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Attachments {
    /// Queueing disciplines, `noqueue` left out.
    pub qdiscs: Vec<TcObject>,
    /// Filters on clsact's ingress.
    pub ingress_filters: Vec<TcObject>,
    /// Filters on clsact's egress.
    pub egress_filters: Vec<TcObject>,
    /// TCX programs on ingress, in order, by name and id.
    pub tcx_ingress: Vec<(String, u32)>,
    /// TCX programs on egress, in order, by name and id.
    pub tcx_egress: Vec<(String, u32)>,
}

impl Attachments {
    /// Whether nothing is there: no qdisc, no filter, no program.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Number of programs that see packets leave, whichever way they are attached.
    #[must_use]
    pub fn egress_programs(&self) -> usize {
        self.egress_filters.len() + self.tcx_egress.len()
    }
}

/// Lists what is attached to a device of the calling thread's namespace; see [`super::Namespace::run`].
///
/// # Errors
///
/// When there is no such device.
pub fn attachments(device: &str) -> Result<Attachments> {
    let netlink = Netlink::here()?;
    Ok(Attachments {
        qdiscs: netlink.qdiscs(device)?,
        ingress_filters: netlink.filters(device, true)?,
        egress_filters: netlink.filters(device, false)?,
        tcx_ingress: tcx(device, TcAttachType::Ingress)?,
        tcx_egress: tcx(device, TcAttachType::Egress)?,
    })
}

fn tcx(device: &str, hook: TcAttachType) -> Result<Vec<(String, u32)>> {
    if !crate::cilium::model::kernel_has_tcx() {
        return Ok(Vec::new());
    }
    let (_, programs) =
        SchedClassifier::query_tcx(device, hook).with_context(|| format!("cannot query tcx of {device}"))?;
    Ok(programs.iter().map(|info| (info.name_as_str().unwrap_or("?").to_owned(), info.id())).collect())
}

/// UDP errors of a namespace, both families, since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UdpErrors {
    /// Datagrams with a wrong checksum.
    pub checksum: u64,
    /// Datagrams that no socket wanted.
    pub no_port: u64,
}

impl UdpErrors {
    /// Reads the counters of the calling thread's namespace.
    ///
    /// # Errors
    ///
    /// When /proc is not as expected.
    pub fn read() -> Result<Self> {
        let snmp = fs::read_to_string("/proc/thread-self/net/snmp").context("cannot read net/snmp")?;
        let mut udp = snmp.lines().filter_map(|line| line.strip_prefix("Udp: "));
        let (names, values) = (udp.next().unwrap_or_default(), udp.next().unwrap_or_default());
        let v4 = |name| {
            let pair = names.split(' ').zip(values.split(' ')).find(|(n, _)| *n == name);
            pair.and_then(|(_, value)| value.parse::<u64>().ok())
                .with_context(|| format!("net/snmp has no Udp {name}"))
        };
        let snmp6 = fs::read_to_string("/proc/thread-self/net/snmp6").unwrap_or_default();
        let v6 = |name: &str| -> u64 {
            let line = snmp6.lines().find_map(|line| line.strip_prefix(name));
            line.and_then(|value| value.trim().parse().ok()).unwrap_or(0)
        };
        Ok(Self {
            checksum: v4("InCsumErrors")? + v6("Udp6InCsumErrors"),
            no_port: v4("NoPorts")? + v6("Udp6NoPorts"),
        })
    }
}
