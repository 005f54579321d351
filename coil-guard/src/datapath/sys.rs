//! What bpf(2) offers and the library does not: two commands on pinned links, opening a map to read it alone, reading a
//! program array, and reading a whole map with a few calls.

use std::{
    ffi::CString,
    io, mem,
    os::{
        fd::{AsFd as _, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd},
        unix::ffi::OsStrExt as _,
    },
    path::Path,
};

use aya::maps::{MapData, MapError};
use aya_obj::generated::{
    BPF_F_RDONLY, bpf_attr,
    bpf_cmd::{
        self, BPF_LINK_DETACH, BPF_MAP_LOOKUP_BATCH, BPF_MAP_LOOKUP_ELEM, BPF_OBJ_GET, BPF_OBJ_GET_INFO_BY_FD,
    },
    bpf_link_info,
};

/// State of a pinned TCX link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LinkState {
    /// Kernel id of its program.
    pub(crate) program_id: u32,
    /// Index of its interface; 0 when the interface is gone or the link was detached.
    pub(crate) interface_index: u32,
}

/// State of the link pinned at `path`; `None` when nothing is pinned there.
pub(crate) fn link_state(path: &Path) -> io::Result<Option<LinkState>> {
    let Some(link) = open(path)? else { return Ok(None) };
    // SAFETY: all zeros is a valid value of this union and of this struct of integers.
    let (mut attr, mut info): (bpf_attr, bpf_link_info) = unsafe { (mem::zeroed(), mem::zeroed()) };
    attr.info.bpf_fd = link.as_raw_fd().cast_unsigned();
    attr.info.info_len = size_of::<bpf_link_info>() as u32;
    attr.info.info = (&raw mut info) as u64;
    call(BPF_OBJ_GET_INFO_BY_FD, &mut attr)?;
    // SAFETY: every bit pattern is a valid integer, and the pins below the links directory are TCX links.
    let interface_index = unsafe { info.__bindgen_anon_1.tcx.ifindex };
    Ok(Some(LinkState { program_id: info.prog_id, interface_index }))
}

/// Detaches the link pinned at `path` at once: removing the pin alone leaves that to a worker of the kernel.
pub(crate) fn detach_link(path: &Path) -> io::Result<()> {
    let Some(link) = open(path)? else { return Ok(()) };
    // SAFETY: all zeros is a valid value of this union.
    let mut attr: bpf_attr = unsafe { mem::zeroed() };
    attr.link_detach.link_fd = link.as_raw_fd().cast_unsigned();
    match call(BPF_LINK_DETACH, &mut attr) {
        // Its interface is gone.
        Err(error) if error.raw_os_error() == Some(libc::ENOLINK) => Ok(()),
        result => result.map(drop),
    }
}

/// Kernel id of the program at `index` of a program array; `None` when there is none.
pub(crate) fn program_at(array: BorrowedFd<'_>, index: u32) -> io::Result<Option<u32>> {
    let mut id = 0u32;
    // SAFETY: all zeros is a valid value of this union.
    let mut attr: bpf_attr = unsafe { mem::zeroed() };
    attr.__bindgen_anon_2.map_fd = array.as_raw_fd().cast_unsigned();
    attr.__bindgen_anon_2.key = (&raw const index) as u64;
    attr.__bindgen_anon_2.__bindgen_anon_1.value = (&raw mut id) as u64;
    match call(BPF_MAP_LOOKUP_ELEM, &mut attr) {
        Ok(_) => Ok(Some(id)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Elements of a hash map that are read with one call, at first.
const BATCH: usize = 2048;

/// Gives every element of a hash map to `each`. One that is there all the time is given once, whatever comes and goes meanwhile.
pub(crate) fn elements<K: aya::Pod, V: aya::Pod>(
    map: &MapData,
    mut each: impl FnMut(&K, &V),
) -> Result<(), MapError> {
    let info = map.info()?;
    let sizes = (info.key_size() as usize, info.value_size() as usize);
    if sizes != (size_of::<K>(), size_of::<V>()) {
        return Err(MapError::InvalidValueSize { size: size_of::<V>(), expected: sizes.1 });
    }
    read_elements(map.fd().as_fd(), &mut each).map_err(MapError::IoError)
}

fn read_elements<K: aya::Pod, V: aya::Pod>(
    map: BorrowedFd<'_>,
    each: &mut impl FnMut(&K, &V),
) -> io::Result<()> {
    let (mut from, mut to) = (0u64, 0u64);
    let mut first = true;
    let mut room = BATCH;
    loop {
        let mut keys: Vec<K> = Vec::with_capacity(room);
        let mut values: Vec<V> = Vec::with_capacity(room);
        // SAFETY: all zeros is a valid value of this union.
        let mut attr: bpf_attr = unsafe { mem::zeroed() };
        attr.batch.in_batch = if first { 0 } else { (&raw const from) as u64 };
        attr.batch.out_batch = (&raw mut to) as u64;
        attr.batch.keys = keys.as_mut_ptr() as u64;
        attr.batch.values = values.as_mut_ptr() as u64;
        attr.batch.count = u32::try_from(room).unwrap_or(u32::MAX);
        attr.batch.map_fd = map.as_raw_fd().cast_unsigned();
        let result = call(BPF_MAP_LOOKUP_BATCH, &mut attr);
        let is_last = match result {
            Ok(_) => false,
            Err(error) if error.kind() == io::ErrorKind::NotFound => true,
            // There are more elements with one hash than there is room for.
            Err(error) if error.raw_os_error() == Some(libc::ENOSPC) && room < 1 << 20 => {
                room *= 2;
                continue;
            }
            Err(error) => return Err(error),
        };
        // SAFETY: the kernel has set it to the number of those that it has written, and every bit pattern is a key and a value.
        unsafe {
            let count = (attr.batch.count as usize).min(room);
            keys.set_len(count);
            values.set_len(count);
        }
        keys.iter().zip(&values).for_each(|(key, value)| each(key, value));
        if is_last {
            return Ok(());
        }
        (from, first) = (to, false);
    }
}

/// Opens a pinned object so that this process can only read it.
pub(crate) fn open_read_only(path: &Path) -> io::Result<Option<OwnedFd>> {
    open_with(path, BPF_F_RDONLY)
}

fn open(path: &Path) -> io::Result<Option<OwnedFd>> {
    open_with(path, 0)
}

fn open_with(path: &Path, flags: u32) -> io::Result<Option<OwnedFd>> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    // SAFETY: all zeros is a valid value of this union.
    let mut attr: bpf_attr = unsafe { mem::zeroed() };
    attr.__bindgen_anon_4.pathname = path.as_ptr() as u64;
    attr.__bindgen_anon_4.file_flags = flags;
    match call(BPF_OBJ_GET, &mut attr) {
        // SAFETY: the kernel just made this descriptor for us.
        Ok(fd) => Ok(Some(unsafe { OwnedFd::from_raw_fd(fd) })),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

fn call(command: bpf_cmd, attr: &mut bpf_attr) -> io::Result<i32> {
    // SAFETY: attr is a whole bpf_attr, and the pointers in it are valid for the time of the call.
    let result =
        unsafe { libc::syscall(libc::SYS_bpf, command as libc::c_long, attr, size_of::<bpf_attr>()) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result as i32) }
}
