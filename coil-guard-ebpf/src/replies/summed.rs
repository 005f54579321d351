//! Changing a packet that may have arrived from a device.

use aya_ebpf::{bindings::BPF_F_RECOMPUTE_CSUM, helpers::bpf_skb_store_bytes};

use crate::skb::Packet;

impl Packet<'_> {
    /// As `store`, of a packet that may have arrived from a device: where that has summed the whole packet, its sum
    /// is corrected. With a wrong one the kernel would verify the inner checksum in vain, and complain of the hardware.
    #[inline(always)]
    pub(crate) fn store_summed(&self, offset: u32, bytes: [u8; 2]) {
        let flags = BPF_F_RECOMPUTE_CSUM.into();
        // SAFETY: the pointer is to two initialised bytes.
        unsafe { bpf_skb_store_bytes(self.skb().cast(), offset, bytes.as_ptr().cast(), 2, flags) };
    }
}
