//! The devices, routes and rules that Coil sets up in client and egress pods.

use std::net::IpAddr;

use anyhow::{Result, ensure};
use coil_guard_tests::{
    cilium::IpFamily,
    fou::FOU_PORT,
    lab::{Lab, command},
    net::{Pod, topology::set_sysctl},
};

use crate::outside;

/// Variants of the tunnels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    /// As Coil makes them: outer UDP checksum zero, and in IPv6 the tunnel encapsulation limit as a Destination Options
    /// header.
    Coil,
    /// As iproute2 makes them with `encap-csum`: outer checksums in both families, no Destination Options header.
    Checksums,
}

/// How the pods of a lab are equipped.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tunnels {
    /// Variant.
    pub(crate) form: Form,
    /// Whether clients' and egress pods' source ports are hashes of the inner flow: `fouSourcePortAuto`.
    pub(crate) sport_auto: bool,
}

impl Tunnels {
    /// Coil's defaults.
    pub(crate) const COIL: Self = Self { form: Form::Coil, sport_auto: false };

    /// Gives every pod of the lab what Coil gives it. The lab's own receivers make room: from here on the kernel answers.
    pub(crate) fn equip(self, lab: &mut Lab) -> Result<()> {
        lab.backend_receivers.clear();
        lab.client_receivers.clear();
        for client in 0..lab.topology.clients.len() {
            self.equip_client(lab, client)?;
        }
        for backend in 0..lab.topology.backends.len() {
            self.equip_backend(lab, backend)?;
        }
        Ok(())
    }

    fn equip_client(self, lab: &Lab, index: usize) -> Result<()> {
        let client = lab.client(index);
        client.namespace.run(|| {
            for family in lab.families() {
                let (own, service) = (client.address(*family), lab.service(*family).0);
                listen(*family)?;
                let device = name(*family, "s");
                self.tunnel(*family, &device, own, service)?;
                let outside = outside::address(*family);
                ip(*family, &format!("route add {outside} dev {device} src {own}"))?;
            }
            Ok(())
        })
    }

    /// Gives an egress pod its listener, a device back to every client, and the masquerade.
    pub(crate) fn equip_backend(self, lab: &Lab, index: usize) -> Result<()> {
        let pod = lab.backend(index);
        pod.namespace.run(|| {
            set_sysctl("ipv4/ip_forward", "1")?;
            set_sysctl("ipv6/conf/all/forwarding", "1")?;
            for family in lab.families() {
                let own = pod.address(*family);
                listen(*family)?;
                ip(*family, "rule add iif eth0 lookup 118")?;
                for (number, client) in lab.topology.clients.iter().enumerate() {
                    let (device, client) = (name(*family, &number.to_string()), client.address(*family));
                    self.tunnel(*family, &device, own, client)?;
                    ip(*family, &format!("route add {client} dev {device} table 118"))?;
                }
                masquerade(*family, own)?;
            }
            Ok(())
        })
    }

    fn tunnel(self, family: IpFamily, device: &str, local: IpAddr, remote: IpAddr) -> Result<()> {
        let kind = match (family, self.form) {
            (IpFamily::V4, _) => "ipip",
            // The kernel adds the Destination Options header for any limit, also for 0.
            (IpFamily::V6, Form::Coil) => "ip6tnl mode any encaplimit 0",
            (IpFamily::V6, Form::Checksums) => "ip6tnl mode any encaplimit none",
        };
        let checksum = match (family, self.form) {
            (IpFamily::V4, Form::Coil) => "noencap-csum",
            (IpFamily::V4, Form::Checksums) => "encap-csum",
            (IpFamily::V6, Form::Coil) => "noencap-udp6-csum",
            (IpFamily::V6, Form::Checksums) => "encap-udp6-csum",
        };
        // ip(8) says encap-csum6 in its help, but takes only this older spelling.
        let hops = if family == IpFamily::V4 { "ttl" } else { "hoplimit" };
        let port = if self.sport_auto { "auto".to_owned() } else { FOU_PORT.to_string() };
        ip(
            family,
            &format!(
                "link add {device} type {kind} remote {remote} local {local} {hops} 225 encap fou encap-sport {port} \
                 encap-dport {FOU_PORT} {checksum}"
            ),
        )?;
        ip(family, &format!("link set {device} up"))
    }
}

/// The listener, and the flow-based device that takes packets from a pod's own address where a client knows only the
/// ClusterIP (Coil 2.4.0 and later).
fn listen(family: IpFamily) -> Result<()> {
    let (protocol, device, kind) = match family {
        IpFamily::V4 => (4, "coil_ipip4", "ipip"),
        IpFamily::V6 => (41, "coil_ipip6", "ip6tnl"),
    };
    ip(family, &format!("fou add port {FOU_PORT} ipproto {protocol}"))?;
    ip(family, &format!("link add {device} type {kind} external"))?;
    ip(family, &format!("link set {device} up"))
}

/// Puts the pod's address on what it forwards.
fn masquerade(family: IpFamily, own: IpAddr) -> Result<()> {
    let (table, key) = match family {
        IpFamily::V4 => ("ip", "ip"),
        IpFamily::V6 => ("ip6", "ip6"),
    };
    run(
        "nft",
        &[&format!(
            "table {table} coil {{ chain postrouting {{ type nat hook postrouting priority 100; oifname \"eth0\" {key} \
             saddr != {own} masquerade; }}; }}"
        )],
    )
}

/// Takes an egress pod off the network without telling anybody: its node is lost.
pub(crate) fn blackhole(pod: &Pod) -> Result<()> {
    pod.namespace.run(|| ip(IpFamily::V4, "link set eth0 down"))
}

fn name(family: IpFamily, suffix: &str) -> String {
    match family {
        IpFamily::V4 => format!("fou4_{suffix}"),
        IpFamily::V6 => format!("fou6_{suffix}"),
    }
}

/// Runs `ip` with these words in the calling thread's namespace.
pub(crate) fn ip(family: IpFamily, words: &str) -> Result<()> {
    let option = if family == IpFamily::V6 { "-6" } else { "-4" };
    let words: Vec<&str> = [option].into_iter().chain(words.split_whitespace()).collect();
    run("ip", &words)
}

fn run(program: &str, arguments: &[&str]) -> Result<()> {
    let output = command(program).args(arguments).output()?;
    ensure!(
        output.status.success(),
        "{program} {} failed: {}",
        arguments.join(" "),
        String::from_utf8_lossy(&output.stderr).trim()
    );
    Ok(())
}
