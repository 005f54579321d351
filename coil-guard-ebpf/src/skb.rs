//! Reading the packet, and the one change that is made to it.

use core::{arch::asm, mem::MaybeUninit};

use aya_ebpf::{
    bindings::__sk_buff,
    helpers::{bpf_skb_load_bytes, bpf_skb_store_bytes},
    programs::TcContext,
};
use coil_guard_common::packet::{Header, Load, NEAR};

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
    pub(crate) fn skb(&self) -> *mut __sk_buff {
        self.context.skb.skb
    }

    /// Stores two bytes of a header that was read before. It can fail only for want of memory to un-share the packet: the
    /// first store then fails and so does the second, and the packet goes on under its old port.
    #[inline(always)]
    pub(crate) fn store(&self, offset: u32, bytes: [u8; 2]) {
        // SAFETY: the pointer is to two initialised bytes.
        unsafe { bpf_skb_store_bytes(self.skb().cast(), offset, bytes.as_ptr().cast(), 2, 0) };
    }
}

/// A packet whose first [`NEAR`] bytes are in its linear part, which can be read without a helper: all packets of tunnels
/// and sockets.
pub(crate) struct LinearPacket<'a> {
    packet: &'a Packet<'a>,
    start: *const u8,
}

impl<'a> LinearPacket<'a> {
    /// `None` when it is not such a packet.
    #[inline(always)]
    pub(crate) fn of(packet: &'a Packet<'a>) -> Option<Self> {
        let (start, end) = (packet.context.data(), packet.context.data_end());
        (start + NEAR as usize <= end).then_some(Self { packet, start: start as *const u8 })
    }
}

impl Load for LinearPacket<'_> {
    #[inline(always)]
    fn load<T: Header>(&self, offset: u32) -> Option<T> {
        self.packet.load(offset)
    }

    #[inline(always)]
    fn load_near<T: Header>(&self, offset: u32) -> Option<T> {
        if offset as usize + size_of::<T>() > NEAR as usize {
            return self.load(offset);
        }
        // SAFETY: in bounds, see `of`; Header allows any bytes.
        Some(unsafe { read(self.start.add(offset as usize)) })
    }
}

/// The word of this type at an address, aligned or not.
macro_rules! load {
    ($type:literal, $from:expr) => {{
        let word: u64;
        asm!(
            concat!("{0} = *(", $type, " *)({1} + 0)"),
            out(reg) word,
            in(reg) $from,
            options(pure, readonly, nostack)
        );
        word
    }};
}

/// Reads a header by words, wherever it is: the compiler would do it byte by byte, because it cannot know that headers are
/// aligned (all are, to 4, behind an Ethernet header that is not) or that the processor does not mind.
///
/// # Safety
///
/// All of it can be read.
#[inline(always)]
unsafe fn read<T: Header>(from: *const u8) -> T {
    const { assert!(size_of::<T>() <= 40) };
    let mut header = MaybeUninit::<Words<T>>::uninit();
    let to = header.as_mut_ptr().cast::<u8>();
    // Not a loop: the compiler would not take it apart before it looks where the bytes go.
    // SAFETY: as the caller says; the room is aligned, and so is every step.
    unsafe {
        read_step::<T>(0, from, to);
        read_step::<T>(8, from, to);
        read_step::<T>(16, from, to);
        read_step::<T>(24, from, to);
        read_step::<T>(32, from, to);
        header.assume_init().0
    }
}

/// Eight bytes at `at`, or what is left from there.
///
/// # Safety
///
/// See [`read`].
#[inline(always)]
unsafe fn read_step<T: Header>(mut at: usize, from: *const u8, to: *mut u8) {
    let left = size_of::<T>().saturating_sub(at);
    // SAFETY: as the caller says.
    unsafe {
        if left >= 8 {
            to.add(at).cast::<u64>().write(load!("u64", from.add(at)));
            return;
        }
        if left & 4 != 0 {
            to.add(at).cast::<u32>().write(load!("u32", from.add(at)) as u32);
            at += 4;
        }
        if left & 2 != 0 {
            to.add(at).cast::<u16>().write(load!("u16", from.add(at)) as u16);
            at += 2;
        }
        if left & 1 != 0 {
            to.add(at).write(*from.add(at));
        }
    }
}

/// Room for a header, aligned.
#[repr(C, align(8))]
struct Words<T>(T);

/// Bytes of a [`Window`].
pub(crate) const WINDOW: usize = 56;
/// Inner IPv4 header and the TCP header up to its flags.
pub(crate) const WINDOW4: usize = 34;
/// Inner IPv6 header and the TCP header up to its flags.
pub(crate) const WINDOW6: usize = 54;

/// A packet of which some bytes were copied at once.
pub(crate) struct Window<'a> {
    packet: &'a Packet<'a>,
    bytes: &'a [u8; WINDOW],
    offset: u32,
    length: u32,
}

impl<'a> Window<'a> {
    /// Copies `LENGTH` bytes at `offset`; none when the packet ends before.
    #[inline(always)]
    pub(crate) fn copy<const LENGTH: usize>(
        packet: &'a Packet<'a>,
        offset: u32,
        bytes: &'a mut [u8; WINDOW],
    ) -> Self {
        const { assert!(LENGTH <= WINDOW) };
        // SAFETY: LENGTH bytes of the array, which are initialised before and after.
        let result = unsafe {
            bpf_skb_load_bytes(packet.skb().cast(), offset, bytes.as_mut_ptr().cast(), LENGTH as u32)
        };
        Self { packet, bytes, offset, length: if result == 0 { LENGTH as u32 } else { 0 } }
    }
}

impl Load for Window<'_> {
    #[inline(always)]
    fn load<T: Header>(&self, offset: u32) -> Option<T> {
        self.packet.load(offset)
    }

    #[inline(always)]
    fn load_near<T: Header>(&self, offset: u32) -> Option<T> {
        let at = offset.wrapping_sub(self.offset);
        // The bound is on `at` itself, which is what is added to the pointer: kernels before 6.11 do not carry a bound of
        // `at + size` over to `at`.
        if at > (WINDOW - size_of::<T>()) as u32 || at + size_of::<T>() as u32 > self.length {
            return self.load(offset);
        }
        // SAFETY: in bounds; Header allows any bytes.
        Some(unsafe { read(self.bytes.as_ptr().add(at as usize)) })
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
