//! Reading the packet, and the one change that is made to it.

use core::mem::MaybeUninit;

use aya_ebpf::{
    bindings::__sk_buff,
    helpers::{bpf_skb_load_bytes, bpf_skb_store_bytes},
    programs::TcContext,
};
use coil_guard_common::{
    checksum::{self, Sum},
    packet::{Header, Load},
};
use network_types::udp::UdpHdr;

/// The packet at hand.
pub(crate) struct Packet<'a> {
    context: &'a TcContext,
}

impl<'a> Packet<'a> {
    #[inline(always)]
    pub(crate) const fn new(context: &'a TcContext) -> Self {
        Self { context }
    }

    #[inline(always)]
    fn skb(&self) -> *mut __sk_buff {
        self.context.skb.skb
    }

    /// Stores the outer source port and what the checksum then has to be. `pseudo` is the sum over the addresses.
    #[inline(always)]
    pub(crate) fn set_source_port(&self, udp: u32, addresses: Sum, port: [u8; 2]) {
        let Some(header) = self.load::<UdpHdr>(udp) else { return };
        let pseudo = addresses.word([0, coil_guard_common::cilium::PROTO_UDP]).word(header.len);
        if let Some(checksum) = checksum::after_port_change(header.check, pseudo, header.src, port) {
            self.store(udp + core::mem::offset_of!(UdpHdr, check) as u32, checksum);
        }
        self.store(udp + core::mem::offset_of!(UdpHdr, src) as u32, port);
    }

    /// Stores two bytes of a header that was read before. It can fail only for want of memory to un-share the packet: the
    /// first store then fails and so does the second, and the packet goes on under its old port.
    #[inline(always)]
    fn store(&self, offset: u32, bytes: [u8; 2]) {
        // SAFETY: the pointer is to two initialised bytes.
        unsafe { bpf_skb_store_bytes(self.skb().cast(), offset, bytes.as_ptr().cast(), 2, 0) };
    }
}

impl Load for Packet<'_> {
    /// Copies by helper: it works wherever the bytes are, also beyond the linear part.
    #[inline(always)]
    fn load<T: Header>(&self, offset: u32) -> Option<T> {
        let mut header = MaybeUninit::<T>::uninit();
        // SAFETY: the destination has the length given; the helper fills all of it or fails, and Header allows any bytes.
        unsafe {
            let result = bpf_skb_load_bytes(
                self.skb().cast(),
                offset,
                header.as_mut_ptr().cast(),
                size_of::<T>() as u32,
            );
            (result == 0).then(|| header.assume_init())
        }
    }
}
