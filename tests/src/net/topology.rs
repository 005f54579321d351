//! Node, client pods, egress pods: devices, addresses and routes.

use std::{
    fs,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    os::fd::AsFd as _,
};

use anyhow::{Context as _, Result};

use super::{
    isolated::Paths,
    namespace::{Namespace, on_own_thread},
    netlink::Netlink,
};
use crate::cilium::IpFamily;

/// MTU and name are those of a pod.
pub const POD_DEVICE: &str = "eth0";

/// What a pod is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PodRole {
    /// Sends FoU packets; Cilium is attached to its host side.
    Client,
    /// Egress pod; plain routing.
    Backend,
}

/// A pod of the lab.
#[derive(Clone, Debug)]
pub struct Pod {
    /// Role.
    pub role: PodRole,
    /// Number among those of its role, from 0.
    pub index: usize,
    /// Its network namespace.
    pub namespace: Namespace,
    /// One address per family of the lab.
    pub addresses: Vec<IpAddr>,
    /// Name of its host side on the node.
    pub host_device: String,
    /// Hardware address of [`POD_DEVICE`].
    pub mac: [u8; 6],
    /// Hardware address of its host side, where all that it sends goes.
    pub host_mac: [u8; 6],
}

impl Pod {
    /// Its address of a family.
    ///
    /// # Panics
    ///
    /// When the lab does not have that family.
    #[must_use]
    pub fn address(&self, family: IpFamily) -> IpAddr {
        let found = self.addresses.iter().find(|address| address.is_ipv4() == (family == IpFamily::V4));
        *found.unwrap_or_else(|| panic!("the lab has no {family:?} addresses: add the family to the builder"))
    }
}

/// The node and its pods.
#[derive(Debug)]
pub struct Topology {
    families: Vec<IpFamily>,
    /// Client pods; removed ones stay, so that indexes hold.
    pub clients: Vec<Pod>,
    /// Egress pods; removed ones stay.
    pub backends: Vec<Pod>,
    serial: u32,
}

impl Topology {
    /// Builds it. The calling thread's namespace becomes the node: call it inside of [`super::isolated`].
    ///
    /// # Errors
    ///
    /// When the kernel refuses.
    pub fn build(families: &[IpFamily], clients: usize, backends: usize) -> Result<Self> {
        let mut topology =
            Self { families: families.to_vec(), clients: Vec::new(), backends: Vec::new(), serial: 0 };
        on_own_thread(|| {
            let netlink = Netlink::here()?;
            quiet()?;
            set_sysctl("ipv4/ip_forward", "1")?;
            set_sysctl("ipv6/conf/all/forwarding", "1")?;
            for family in families {
                netlink.add_address("lo", gateway(*family))?;
            }
            for _ in 0..clients {
                topology.add(&netlink, PodRole::Client)?;
            }
            for _ in 0..backends {
                topology.add(&netlink, PodRole::Backend)?;
            }
            Ok(topology)
        })
    }

    /// Adds a pod and says its index.
    ///
    /// # Errors
    ///
    /// When the kernel refuses.
    pub fn add_pod(&mut self, role: PodRole) -> Result<usize> {
        on_own_thread(|| self.add(&Netlink::here()?, role))
    }

    /// Tears a pod's network down: devices, routes and the namespace file. Its place in the list stays.
    ///
    /// # Errors
    ///
    /// When the kernel refuses.
    pub fn remove_pod(&self, role: PodRole, index: usize) -> Result<()> {
        let pod = self.pod(role, index)?;
        on_own_thread(|| {
            Netlink::here()?.delete(&pod.host_device)?;
            pod.namespace.remove_file()
        })
    }

    /// As [`Self::remove_pod`], many at once.
    ///
    /// # Errors
    ///
    /// When the kernel refuses.
    pub fn remove_pods(&self, role: PodRole, indexes: &[usize]) -> Result<()> {
        let pods: Vec<_> = indexes.iter().map(|index| self.pod(role, *index)).collect::<Result<_>>()?;
        let devices: Vec<_> = pods.iter().map(|pod| pod.host_device.as_str()).collect();
        on_own_thread(|| {
            Netlink::here()?.delete_all(&devices)?;
            pods.iter().try_for_each(|pod| pod.namespace.remove_file())
        })
    }

    /// A pod.
    ///
    /// # Errors
    ///
    /// When there is none of that index.
    pub fn pod(&self, role: PodRole, index: usize) -> Result<&Pod> {
        let pods = match role {
            PodRole::Client => &self.clients,
            PodRole::Backend => &self.backends,
        };
        pods.get(index).with_context(|| format!("there is no {role:?} {index}, the lab has {}", pods.len()))
    }

    fn add(&mut self, netlink: &Netlink, role: PodRole) -> Result<usize> {
        let (list, label, device_label) = match role {
            PodRole::Client => (&mut self.clients, "client", "lxc"),
            PodRole::Backend => (&mut self.backends, "egress", "egr"),
        };
        let index = list.len();
        self.serial += 1;
        let [_, _, high, low] = self.serial.to_be_bytes();
        let (mac, host_mac) = ([0x02, 0, 0, 1, high, low], [0x02, 0, 0, 2, high, low]);
        let namespace = Namespace::create(Paths.namespaces(), &format!("cni-{label}{index}"))?;
        namespace.run(quiet)?;
        let host_device = format!("{device_label}{index}");
        netlink.add_veth((&host_device, host_mac), (POD_DEVICE, mac), namespace.file().as_fd())?;
        netlink.up(&host_device)?;
        let addresses: Vec<_> =
            self.families.iter().map(|family| pod_address(role, *family, index)).collect();
        namespace.run(|| {
            let netlink = Netlink::here()?;
            netlink.up(POD_DEVICE)?;
            for address in &addresses {
                let gateway = gateway(if address.is_ipv4() { IpFamily::V4 } else { IpFamily::V6 });
                netlink.add_address(POD_DEVICE, *address)?;
                netlink.add_neighbour(POD_DEVICE, gateway, host_mac)?;
                netlink.add_default_route(POD_DEVICE, gateway)?;
            }
            Ok(())
        })?;
        for address in &addresses {
            netlink.add_route(&host_device, *address)?;
            netlink.add_neighbour(&host_device, *address, mac)?;
        }
        list.push(Pod { role, index, namespace, addresses, host_device, mac, host_mac });
        Ok(index)
    }
}

/// Address of the node.
#[must_use]
pub fn gateway(family: IpFamily) -> IpAddr {
    match family {
        IpFamily::V4 => Ipv4Addr::new(10, 64, 0, 1).into(),
        IpFamily::V6 => Ipv6Addr::new(0xfd00, 0x10, 0x64, 0, 0, 0, 0, 1).into(),
    }
}

/// Address of a pod: 10.64.0.10, 10.64.0.11, … and fd00:10:64::10, … for clients, 10.64.1.1, … and fd00:10:65::1, … for
/// backends, as in the recorded vectors.
#[must_use]
pub fn pod_address(role: PodRole, family: IpFamily, index: usize) -> IpAddr {
    let n = index as u16;
    match (role, family) {
        (PodRole::Client, IpFamily::V4) if n < 240 => Ipv4Addr::new(10, 64, 0, 10 + n as u8).into(),
        (PodRole::Client, IpFamily::V4) => Ipv4Addr::new(10, 65, (n / 240) as u8, (n % 240 + 1) as u8).into(),
        (PodRole::Client, IpFamily::V6) => Ipv6Addr::new(0xfd00, 0x10, 0x64, 0, 0, 0, 0, 0x10 + n).into(),
        (PodRole::Backend, IpFamily::V4) => {
            Ipv4Addr::new(10, 64, 1 + (n / 240) as u8, (n % 240 + 1) as u8).into()
        }
        (PodRole::Backend, IpFamily::V6) => Ipv6Addr::new(0xfd00, 0x10, 0x65, 0, 0, 0, 0, 1 + n).into(),
    }
}

/// ClusterIP of the service number `index`: 10.96.0.10, … and fd00:10:96::10, ….
#[must_use]
pub fn service_address(family: IpFamily, index: usize) -> IpAddr {
    let n = index as u16;
    match family {
        IpFamily::V4 => Ipv4Addr::new(10, 96, (n / 240) as u8, (n % 240 + 10) as u8).into(),
        IpFamily::V6 => Ipv6Addr::new(0xfd00, 0x10, 0x96, 0, 0, 0, 0, 0x10 + n).into(),
    }
}

/// Settings of a namespace before its devices come: no packet that no test sent, and no check that drops a reply.
fn quiet() -> Result<()> {
    for (name, value) in [
        ("ipv4/conf/all/rp_filter", "0"),
        ("ipv4/conf/default/rp_filter", "0"),
        ("ipv6/conf/default/accept_dad", "0"),
        ("ipv6/conf/default/dad_transmits", "0"),
        ("ipv6/conf/default/router_solicitations", "0"),
        ("ipv6/conf/default/accept_ra", "0"),
        ("ipv6/conf/default/addr_gen_mode", "1"),
    ] {
        set_sysctl(name, value)?;
    }
    Ok(())
}

/// Sets `net/<name>` of the calling thread's namespace.
///
/// # Errors
///
/// When there is no such setting, or /proc/sys is read-only.
pub fn set_sysctl(name: &str, value: &str) -> Result<()> {
    let path = format!("/proc/sys/net/{name}");
    fs::write(&path, value).with_context(|| format!("cannot write {value} to {path}"))
}
