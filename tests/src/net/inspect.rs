//! What hangs on a device, and what the kernel counted.

use std::{collections::BTreeMap, fs};

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

    /// Number of programs that see packets arrive.
    #[must_use]
    pub fn ingress_programs(&self) -> usize {
        self.ingress_filters.len() + self.tcx_ingress.len()
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
        let udp = snmp("Udp")?;
        let v4 = |name: &str| udp.get(name).copied().with_context(|| format!("net/snmp has no Udp {name}"));
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

/// IPv4 packets that the calling thread's namespace threw away since it was made, by the kernel's reason.
///
/// # Errors
///
/// When /proc is not as expected.
pub fn ip_errors() -> Result<BTreeMap<String, u64>> {
    let mut counters = snmp("Ip")?;
    counters.retain(|name, count| {
        *count > 0 && (name.ends_with("Errors") || name.ends_with("Discards") || name.ends_with("NoRoutes"))
    });
    Ok(counters)
}

/// Counters of one protocol from net/snmp.
fn snmp(protocol: &str) -> Result<BTreeMap<String, u64>> {
    let text = fs::read_to_string("/proc/thread-self/net/snmp").context("cannot read net/snmp")?;
    let prefix = format!("{protocol}: ");
    let mut lines = text.lines().filter_map(|line| line.strip_prefix(&prefix));
    let (names, values) = (lines.next().unwrap_or_default(), lines.next().unwrap_or_default());
    // Some values, none of them counters, are negative.
    let pairs = names.split(' ').zip(values.split(' '));
    Ok(pairs.filter_map(|(name, value)| Some((name.to_owned(), value.parse().ok()?))).collect())
}
