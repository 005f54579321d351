//! The few rtnetlink requests that are needed inside a pod's namespace, in the calling thread's one.

use std::{collections::BTreeSet, io, net::IpAddr};

use aya::programs::TcAttachType;
use coil_guard_common::abi;
use nix::errno::Errno;
use rtnetlink::{
    packet_core::{
        NLM_F_ACK, NLM_F_DUMP, NLM_F_REQUEST, NetlinkDeserializable, NetlinkHeader, NetlinkMessage,
        NetlinkPayload, NetlinkSerializable,
    },
    packet_route::{
        RouteNetlinkMessage,
        address::{AddressAttribute, AddressMessage},
        link::{InfoData, InfoIpTunnel, LinkAttribute, LinkFlags, LinkInfo, LinkMessage},
        tc::{TcAttribute, TcFilterBpfOption, TcHandle, TcMessage, TcOption},
    },
    sys::{Socket, SocketAddr, protocols::NETLINK_ROUTE},
};

/// Parent of filters on the ingress hook.
const INGRESS: TcHandle = TcHandle { major: u16::MAX, minor: TcHandle::MIN_INGRESS };
/// Parent of filters on the egress hook.
const EGRESS: TcHandle = TcHandle { major: u16::MAX, minor: TcHandle::MIN_EGRESS };
/// Handle of a clsact qdisc.
const CLSACT_HANDLE: TcHandle = TcHandle { major: u16::MAX, minor: 0 };

/// An address and the index of its interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Address {
    pub(crate) address: IpAddr,
    pub(crate) interface: u32,
}

/// What sits in the place of a qdisc of type clsact or ingress, which exclude each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum IngressQdisc {
    None,
    Clsact,
    Other(String),
}

/// A filter on one of the hooks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Filter {
    pub(crate) priority: u16,
    pub(crate) handle: u32,
    /// Name and id of its program, if it is a BPF filter.
    pub(crate) program: Option<(String, u32)>,
}

impl Filter {
    /// Whether it is one of ours.
    pub(crate) fn is_ours(&self) -> bool {
        self.program.as_ref().is_some_and(|(name, _)| name == abi::PROGRAM)
    }
}

/// A connection to the namespace that the thread was in when it was made.
#[derive(Debug)]
pub(crate) struct Netlink {
    socket: Socket,
    sequence: u32,
}

impl Netlink {
    pub(crate) fn open() -> io::Result<Self> {
        let mut socket = Socket::new(NETLINK_ROUTE)?;
        socket.bind_auto()?;
        socket.connect(&SocketAddr::new(0, 0))?;
        Ok(Self { socket, sequence: 0 })
    }

    /// All addresses but loopback's and link-local ones.
    pub(crate) fn addresses(&mut self) -> io::Result<Vec<Address>> {
        let request = RouteNetlinkMessage::GetAddress(AddressMessage::default());
        let mut addresses = Vec::new();
        self.request(request, NLM_F_DUMP, |reply| {
            let RouteNetlinkMessage::NewAddress(message) = reply else { return };
            let interface = message.header.index;
            let local = message.attributes.iter().find_map(|attribute| match attribute {
                AddressAttribute::Local(address) => Some(*address),
                _ => None,
            });
            let address = local.or_else(|| {
                message.attributes.iter().find_map(|attribute| match attribute {
                    AddressAttribute::Address(address) => Some(*address),
                    _ => None,
                })
            });
            addresses.extend(address.filter(is_pod_address).map(|address| Address { address, interface }));
        })?;
        Ok(addresses)
    }

    /// Indexes of interfaces that have a carrier.
    pub(crate) fn running(&mut self) -> io::Result<BTreeSet<u32>> {
        let mut running = BTreeSet::new();
        self.links(|link| {
            if link.header.flags.contains(LinkFlags::LowerUp) {
                running.insert(link.header.index);
            }
        })?;
        Ok(running)
    }

    /// Remotes of the tunnel devices: of a Coil client, the ClusterIPs of its Egresses.
    pub(crate) fn tunnel_remotes(&mut self) -> io::Result<BTreeSet<IpAddr>> {
        let mut remotes = BTreeSet::new();
        self.links(|link| {
            let infos = link.attributes.iter().filter_map(|attribute| match attribute {
                LinkAttribute::LinkInfo(infos) => Some(infos),
                _ => None,
            });
            for info in infos.flatten() {
                let LinkInfo::Data(InfoData::IpTunnel(options)) = info else { continue };
                remotes.extend(options.iter().filter_map(|option| match option {
                    InfoIpTunnel::Remote(address) if !address.is_unspecified() => Some(*address),
                    _ => None,
                }));
            }
        })?;
        Ok(remotes)
    }

    fn links(&mut self, mut each: impl FnMut(LinkMessage)) -> io::Result<()> {
        self.request(RouteNetlinkMessage::GetLink(LinkMessage::default()), NLM_F_DUMP, |reply| {
            if let RouteNetlinkMessage::NewLink(message) = reply {
                each(message);
            }
        })
    }

    pub(crate) fn ingress_qdisc(&mut self, interface: u32) -> io::Result<IngressQdisc> {
        let request = RouteNetlinkMessage::GetQueueDiscipline(TcMessage::with_index(interface.cast_signed()));
        let mut found = IngressQdisc::None;
        self.request(request, NLM_F_DUMP, |reply| {
            let RouteNetlinkMessage::NewQueueDiscipline(message) = reply else { return };
            // Older kernels ignore the index in the request.
            if message.header.index == interface.cast_signed() && message.header.parent == TcHandle::CLSACT {
                found = match kind(&message) {
                    Some("clsact") => IngressQdisc::Clsact,
                    other => IngressQdisc::Other(other.unwrap_or("unknown").to_owned()),
                };
            }
        })?;
        Ok(found)
    }

    /// Whether any filter is left on either hook.
    pub(crate) fn has_filters(&mut self, interface: u32) -> io::Result<bool> {
        Ok(!self.filters(interface, TcAttachType::Egress)?.is_empty()
            || !self.filters(interface, TcAttachType::Ingress)?.is_empty())
    }

    /// Filters on a hook; none when there is no qdisc.
    pub(crate) fn filters(&mut self, interface: u32, hook: TcAttachType) -> io::Result<Vec<Filter>> {
        let mut message = TcMessage::with_index(interface.cast_signed());
        message.header.parent = if hook == TcAttachType::Ingress { INGRESS } else { EGRESS };
        let mut filters = Vec::new();
        let result = self.request(RouteNetlinkMessage::GetTrafficFilter(message), NLM_F_DUMP, |reply| {
            if let RouteNetlinkMessage::NewTrafficFilter(message) = reply {
                filters.extend(filter(&message));
            }
        });
        match result {
            // What the kernel says where the parent does not exist.
            Err(error)
                if error.raw_os_error() == Some(libc::EINVAL)
                    || error.raw_os_error() == Some(libc::ENOENT) =>
            {
                Ok(Vec::new())
            }
            result => result.map(|()| filters),
        }
    }

    /// Deletes the clsact qdisc of the interface.
    pub(crate) fn delete_clsact(&mut self, interface: u32) -> io::Result<()> {
        let mut message = TcMessage::with_index(interface.cast_signed());
        message.header.parent = TcHandle::CLSACT;
        message.header.handle = CLSACT_HANDLE;
        self.request(RouteNetlinkMessage::DelQueueDiscipline(message), NLM_F_ACK, |_| {})
    }

    fn request(
        &mut self,
        message: RouteNetlinkMessage,
        flags: u16,
        each: impl FnMut(RouteNetlinkMessage),
    ) -> io::Result<()> {
        self.sequence += 1;
        exchange(&self.socket, message, flags, self.sequence, each)
    }
}

fn exchange<M: NetlinkSerializable + NetlinkDeserializable>(
    socket: &Socket,
    message: M,
    flags: u16,
    sequence: u32,
    mut each: impl FnMut(M),
) -> io::Result<()> {
    let mut header = NetlinkHeader::default();
    header.flags = NLM_F_REQUEST | flags;
    header.sequence_number = sequence;
    let mut request = NetlinkMessage::new(header, NetlinkPayload::InnerMessage(message));
    request.finalize();
    let mut buffer = vec![0; request.buffer_len()];
    request.serialize(&mut buffer);
    socket.send(&buffer, 0)?;
    loop {
        let (datagram, _) = socket.recv_from_full()?;
        let mut rest = &datagram[..];
        while !rest.is_empty() {
            let reply = NetlinkMessage::<M>::deserialize(rest).map_err(io::Error::other)?;
            let length = (reply.header.length as usize).next_multiple_of(4);
            rest = rest.get(length..).unwrap_or_default();
            if reply.header.sequence_number != sequence {
                continue;
            }
            match reply.payload {
                NetlinkPayload::Done(_) => return Ok(()),
                NetlinkPayload::Error(error) => match error.code {
                    None => return Ok(()),
                    Some(_) => return Err(error.to_io()),
                },
                NetlinkPayload::Overrun(_) => return Err(Errno::ENOBUFS.into()),
                NetlinkPayload::InnerMessage(message) => each(message),
                _ => {}
            }
        }
    }
}

fn is_pod_address(address: &IpAddr) -> bool {
    let link_local = match address {
        IpAddr::V4(v4) => v4.is_link_local(),
        IpAddr::V6(v6) => v6.is_unicast_link_local(),
    };
    !link_local && !address.is_loopback() && !address.is_unspecified()
}

fn kind(message: &TcMessage) -> Option<&str> {
    message.attributes.iter().find_map(|attribute| match attribute {
        TcAttribute::Kind(kind) => Some(kind.as_str()),
        _ => None,
    })
}

/// A filter in a reply. A dump also has an entry without a handle for each priority.
fn filter(message: &TcMessage) -> Option<Filter> {
    let handle = u32::from(message.header.handle);
    if handle == 0 {
        return None;
    }
    let mut name = None;
    let mut id = 0;
    for attribute in &message.attributes {
        let TcAttribute::Options(options) = attribute else { continue };
        for option in options {
            match option {
                TcOption::Bpf(TcFilterBpfOption::ProgName(text)) => name = Some(text.clone()),
                TcOption::Bpf(TcFilterBpfOption::ProgId(number)) => id = *number,
                _ => {}
            }
        }
    }
    Some(Filter {
        priority: (message.header.info >> 16) as u16,
        handle,
        program: name.map(|name| (name, id)),
    })
}
