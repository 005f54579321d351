//! Constants of this instance.

use coil_guard_common::abi::{POD_HAS_IPV4, POD_HAS_IPV6, ReplyConfig};

/// Written by the loader before the programs are verified. Read volatile: the compiler must not fold the zeros in.
#[unsafe(no_mangle)]
static REPLY_CONFIG: ReplyConfig = ReplyConfig {
    address6: [0; 16],
    address4: [0; 4],
    flags: 0,
    generation: 0,
    fou_port: [0; 2],
    pad: [0; 2],
};

macro_rules! read {
    ($field:ident) => {
        // SAFETY: a valid, aligned field of a static that never changes once the program is loaded.
        unsafe { (&raw const REPLY_CONFIG.$field).read_volatile() }
    };
}

/// Access to the constants.
pub(crate) struct Config;

impl Config {
    #[inline(always)]
    pub(crate) fn fou_port() -> [u8; 2] {
        read!(fou_port)
    }

    #[inline(always)]
    pub(crate) fn generation() -> u32 {
        read!(generation)
    }

    #[inline(always)]
    pub(crate) fn is_address4(address: [u8; 4]) -> bool {
        read!(flags) & POD_HAS_IPV4 != 0 && read!(address4) == address
    }

    #[inline(always)]
    pub(crate) fn is_address6(address: [u8; 16]) -> bool {
        read!(flags) & POD_HAS_IPV6 != 0 && read!(address6) == address
    }
}
