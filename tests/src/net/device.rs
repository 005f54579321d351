//! Device settings that netlink does not have.

use std::os::fd::AsRawFd as _;

use anyhow::{Context as _, Result, ensure};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socket};

/// Whether the device leaves transmit checksums to its peer, which for veth means to nobody. With it off the kernel
/// completes them, and mistakes in them are seen. In the calling thread's namespace.
///
/// # Errors
///
/// When the kernel refuses.
pub fn set_tx_checksum_offload(device: &str, on: bool) -> Result<()> {
    const SET_TX_CHECKSUM: u32 = 0x17;
    const SIOCETHTOOL: libc::c_ulong = 0x8946;
    ensure!(device.len() < libc::IFNAMSIZ, "{device} is too long for a device name");
    let any = socket(AddressFamily::Inet, SockType::Datagram, SockFlag::SOCK_CLOEXEC, None)?;
    let mut value = [SET_TX_CHECKSUM, u32::from(on)];
    // SAFETY: all zeros are a valid ifreq.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(device.bytes()) {
        *to = from as libc::c_char;
    }
    request.ifr_ifru.ifru_data = value.as_mut_ptr().cast();
    // SAFETY: the request points to an ethtool_value that lives until the call returns.
    let result = unsafe { libc::ioctl(any.as_raw_fd(), SIOCETHTOOL as _, &mut request) };
    nix::errno::Errno::result(result)
        .with_context(|| format!("cannot set tx checksum offload of {device}"))?;
    Ok(())
}
