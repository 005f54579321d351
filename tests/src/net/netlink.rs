//! The few things the lab asks of netlink, blocking, in the namespace of the thread that opened the socket.

use std::{
    net::IpAddr,
    os::fd::{AsRawFd as _, BorrowedFd},
};

use anyhow::{Context as _, Result, bail};
use futures::TryStreamExt as _;
use rtnetlink::{
    Handle, LinkUnspec, LinkVeth, RouteMessageBuilder,
    packet_route::{
        link::LinkAttribute,
        neighbour::NeighbourState,
        tc::{TcAttribute, TcHandle, TcMessage},
    },
};
use tokio::runtime::Runtime;

/// A netlink socket. Not for use inside of an async runtime.
#[derive(Debug)]
pub struct Netlink {
    runtime: Runtime,
    handle: Handle,
}

/// A filter or qdisc as the kernel lists it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TcObject {
    /// `clsact`, `bpf`, …
    pub kind: String,
    /// Major and minor number.
    pub handle: u32,
    /// Priority of a filter.
    pub priority: u16,
}

impl Netlink {
    /// Opens a socket in the calling thread's namespace.
    ///
    /// # Errors
    ///
    /// When the kernel refuses.
    pub fn here() -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build()?;
        let guard = runtime.enter();
        let (connection, handle, _) = rtnetlink::new_connection().context("cannot open a netlink socket")?;
        runtime.spawn(connection);
        drop(guard);
        Ok(Self { runtime, handle })
    }

    /// Index of a device.
    ///
    /// # Errors
    ///
    /// When there is none of that name.
    pub fn index(&self, device: &str) -> Result<u32> {
        let mut links = self.handle.link().get().match_name(device.to_owned()).execute();
        match self.runtime.block_on(links.try_next()) {
            Ok(Some(link)) => Ok(link.header.index),
            Ok(None) => bail!("there is no device {device}"),
            Err(error) => Err(error).with_context(|| format!("cannot find device {device}")),
        }
    }

    /// Sets a device up.
    ///
    /// # Errors
    ///
    /// When the kernel refuses.
    pub fn up(&self, device: &str) -> Result<()> {
        let message = LinkUnspec::new_with_index(self.index(device)?).up().build();
        self.runtime
            .block_on(self.handle.link().set(message).execute())
            .with_context(|| format!("cannot set {device} up"))
    }

    /// Sets a device down.
    ///
    /// # Errors
    ///
    /// When the kernel refuses.
    pub fn down(&self, device: &str) -> Result<()> {
        let message = LinkUnspec::new_with_index(self.index(device)?).down().build();
        self.runtime
            .block_on(self.handle.link().set(message).execute())
            .with_context(|| format!("cannot set {device} down"))
    }

    /// Deletes a device (of a veth pair, both ends).
    ///
    /// # Errors
    ///
    /// When the kernel refuses.
    pub fn delete(&self, device: &str) -> Result<()> {
        let index = self.index(device)?;
        self.runtime
            .block_on(self.handle.link().del(index).execute())
            .with_context(|| format!("cannot delete {device}"))
    }

    /// Removes devices in one go: the kernel waits for all processors with each removal, and then once.
    ///
    /// # Errors
    ///
    /// When one is missing, or the kernel refuses.
    pub fn delete_all(&self, devices: &[&str]) -> Result<()> {
        const GOING: u32 = 0x676f_696e;
        for device in devices {
            let message = LinkUnspec::new_with_index(self.index(device)?)
                .append_extra_attribute(LinkAttribute::Group(GOING))
                .build();
            self.runtime
                .block_on(self.handle.link().set(message).execute())
                .with_context(|| format!("cannot put {device} into a group"))?;
        }
        let mut request = self.handle.link().del(0);
        request.message_mut().attributes.push(LinkAttribute::Group(GOING));
        self.runtime.block_on(request.execute()).context("cannot delete a group of devices")
    }

    /// Makes a veth pair with these hardware addresses: `device` here, `peer` in the namespace behind `namespace`.
    ///
    /// # Errors
    ///
    /// When the kernel refuses.
    pub fn add_veth(
        &self,
        (device, mac): (&str, [u8; 6]),
        (peer, peer_mac): (&str, [u8; 6]),
        namespace: BorrowedFd<'_>,
    ) -> Result<()> {
        let passing = format!("{device}p");
        let run = |message| self.runtime.block_on(self.handle.link().set(message).execute());
        self.runtime
            .block_on(self.handle.link().add(LinkVeth::new(device, &passing).build()).execute())
            .with_context(|| format!("cannot make veth pair {device}"))?;
        let (index, peer_index) = (self.index(device)?, self.index(&passing)?);
        run(LinkUnspec::new_with_index(index).address(mac.to_vec()).build())
            .and_then(|()| run(LinkUnspec::new_with_index(peer_index).address(peer_mac.to_vec()).build()))
            .with_context(|| format!("cannot set the hardware addresses of {device}"))?;
        run(LinkUnspec::new_with_index(peer_index).name(peer).setns_by_fd(namespace.as_raw_fd()).build())
            .with_context(|| format!("cannot move the peer of {device}"))
    }

    /// Adds an address.
    ///
    /// # Errors
    ///
    /// When the kernel refuses.
    pub fn add_address(&self, device: &str, address: IpAddr) -> Result<()> {
        let request = self.handle.address().add(self.index(device)?, address, host_prefix(address));
        self.runtime.block_on(request.execute()).with_context(|| format!("cannot add {address} to {device}"))
    }

    /// Routes one address to a device.
    ///
    /// # Errors
    ///
    /// When the kernel refuses.
    pub fn add_route(&self, device: &str, destination: IpAddr) -> Result<()> {
        let route = RouteMessageBuilder::<IpAddr>::new()
            .destination_prefix(destination, host_prefix(destination))
            .context("bad prefix")?
            .output_interface(self.index(device)?)
            .build();
        self.runtime
            .block_on(self.handle.route().add(route).execute())
            .with_context(|| format!("cannot route {destination} to {device}"))
    }

    /// Routes everything of the gateway's family over it.
    ///
    /// # Errors
    ///
    /// When the kernel refuses.
    pub fn add_default_route(&self, device: &str, gateway: IpAddr) -> Result<()> {
        let any: IpAddr = match gateway {
            IpAddr::V4(_) => std::net::Ipv4Addr::UNSPECIFIED.into(),
            IpAddr::V6(_) => std::net::Ipv6Addr::UNSPECIFIED.into(),
        };
        let route = RouteMessageBuilder::<IpAddr>::new()
            .destination_prefix(any, 0)
            .context("bad prefix")?
            .gateway(gateway)
            .context("bad gateway")?
            .output_interface(self.index(device)?)
            .onlink()
            .build();
        self.runtime
            .block_on(self.handle.route().add(route).execute())
            .with_context(|| format!("cannot route everything on {device} over {gateway}"))
    }

    /// Adds a permanent neighbour: no ARP or neighbour discovery disturbs the counts.
    ///
    /// # Errors
    ///
    /// When the kernel refuses.
    pub fn add_neighbour(&self, device: &str, address: IpAddr, mac: [u8; 6]) -> Result<()> {
        let request = self.handle.neighbours().add(self.index(device)?, address);
        let request = request.link_layer_address(&mac).state(NeighbourState::Permanent).replace();
        self.runtime
            .block_on(request.execute())
            .with_context(|| format!("cannot add neighbour {address} on {device}"))
    }

    /// Queueing disciplines of a device; `noqueue`, which stands for none, left out.
    ///
    /// # Errors
    ///
    /// When the kernel refuses.
    pub fn qdiscs(&self, device: &str) -> Result<Vec<TcObject>> {
        let index = self.index(device)? as i32;
        let all = self.handle.qdisc().get().index(index).execute();
        let all: Vec<TcMessage> = self.runtime.block_on(all.try_collect()).context("cannot list qdiscs")?;
        let ours = all.iter().filter(|message| message.header.index == index).filter_map(object);
        Ok(ours.filter(|object| object.kind != "noqueue").collect())
    }

    /// Removes a device's clsact qdisc, with all filters.
    ///
    /// # Errors
    ///
    /// When there is none.
    pub fn delete_clsact(&self, device: &str) -> Result<()> {
        let mut request = self.handle.qdisc().del(self.index(device)? as i32);
        request.message_mut().header.parent = TcHandle::CLSACT;
        self.runtime.block_on(request.execute()).with_context(|| format!("{device} has no clsact qdisc"))
    }

    /// Filters of one direction of a device; empty without clsact.
    ///
    /// # Errors
    ///
    /// When the kernel refuses.
    pub fn filters(&self, device: &str, ingress: bool) -> Result<Vec<TcObject>> {
        if !self.qdiscs(device)?.iter().any(|qdisc| qdisc.kind == "clsact") {
            return Ok(Vec::new());
        }
        let mut filters = self.handle.traffic_filter(self.index(device)? as i32);
        let request = if ingress { filters.get().ingress() } else { filters.get().egress() };
        let all: Vec<TcMessage> =
            self.runtime.block_on(request.execute().try_collect()).context("cannot list filters")?;
        // A filter's chain is listed too, as an entry without a handle.
        Ok(all.iter().filter(|message| message.header.handle != 0.into()).filter_map(object).collect())
    }
}

fn object(message: &TcMessage) -> Option<TcObject> {
    let kind = message.attributes.iter().find_map(|attribute| match attribute {
        TcAttribute::Kind(kind) => Some(kind.clone()),
        _ => None,
    })?;
    let handle = message.header.handle;
    Some(TcObject {
        kind,
        handle: u32::from(handle.major) << 16 | u32::from(handle.minor),
        priority: (message.header.info >> 16) as u16,
    })
}

fn host_prefix(address: IpAddr) -> u8 {
    if address.is_ipv4() { 32 } else { 128 }
}
