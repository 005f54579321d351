//! The bpf system call, for what no library is asked to do.

use std::{
    ffi::CString,
    io,
    os::{
        fd::{AsRawFd as _, FromRawFd as _, OwnedFd},
        unix::ffi::OsStrExt as _,
    },
    path::Path,
};

const OBJ_GET: u32 = 7;
const LINK_DETACH: u32 = 34;

/// Takes the program of a pinned link off, as `bpftool link detach` does; the pin stays.
///
/// # Errors
///
/// When nothing is pinned there, or the kernel refuses.
pub fn detach_link(pin: &Path) -> io::Result<()> {
    let path = CString::new(pin.as_os_str().as_bytes())?;
    let fd = Attr::new(&[(0, &address(path.as_bytes_with_nul()))]).call(OBJ_GET)?;
    // SAFETY: the kernel just returned it.
    let link = unsafe { OwnedFd::from_raw_fd(fd) };
    Attr::new(&[(0, &link.as_raw_fd().to_ne_bytes())]).call(LINK_DETACH).map(drop)
}

/// `union bpf_attr`, as far as the callers need it.
#[repr(C, align(8))]
pub(crate) struct Attr(pub(crate) [u8; 128]);

impl Attr {
    /// Zeros but for these bytes at these offsets.
    pub(crate) fn new(fields: &[(usize, &[u8])]) -> Self {
        let mut attr = Self([0; 128]);
        for (offset, bytes) in fields {
            attr.0[*offset..offset + bytes.len()].copy_from_slice(bytes);
        }
        attr
    }

    /// What the kernel returns for `command`.
    pub(crate) fn call(&mut self, command: u32) -> io::Result<i32> {
        // SAFETY: the attribute is as large as told; pointers in it come from live buffers of the caller.
        let result = unsafe { libc::syscall(libc::SYS_bpf, command, &raw mut *self, size_of::<Self>()) };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result as i32) }
    }
}

/// A pointer to `bytes`, as it stands in an attribute.
pub(crate) fn address(bytes: &[u8]) -> [u8; 8] {
    (bytes.as_ptr() as u64).to_ne_bytes()
}
