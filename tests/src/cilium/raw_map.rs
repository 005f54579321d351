//! BPF maps of any shape, by file descriptor.
//!
//! The lab makes maps that a loader would refuse (odd layouts, other sizes, no program at all) and compares them as
//! bytes, so it speaks to the kernel directly.

use std::{
    collections::BTreeMap,
    ffi::CString,
    io,
    os::{
        fd::{AsFd, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd},
        unix::ffi::OsStrExt as _,
    },
    path::Path,
};

use anyhow::{Context as _, Result, bail, ensure};
use aya::maps::MapInfo;
use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::bpf::{Attr, address};

/// Kinds of maps that Cilium uses here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum MapKind {
    /// `BPF_MAP_TYPE_HASH`
    Hash = 1,
    /// `BPF_MAP_TYPE_ARRAY`
    Array = 2,
    /// `BPF_MAP_TYPE_LRU_HASH`
    LruHash = 9,
}

/// `BPF_F_NO_PREALLOC`
pub const NO_PREALLOC: u32 = 1;
/// `BPF_F_RDONLY_PROG`
pub const READ_ONLY_FOR_PROGRAMS: u32 = 0x80;

/// What a map is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MapShape {
    /// Kind.
    pub kind: MapKind,
    /// Bytes of a key.
    pub key_size: u32,
    /// Bytes of a value.
    pub value_size: u32,
    /// Capacity.
    pub max_entries: u32,
    /// `BPF_F_…`
    pub flags: u32,
}

/// What an update expects of the element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub enum Expect {
    /// Create or replace.
    Any = 0,
    /// Create only.
    Absent = 1,
    /// Replace only.
    Present = 2,
}

/// All elements of a map, sorted by key.
pub type Elements = BTreeMap<Vec<u8>, Vec<u8>>;

/// All elements of a map in its own order, keys and values one behind the other.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Raw {
    /// Keys.
    pub keys: Vec<u8>,
    /// Values, in the order of the keys.
    pub values: Vec<u8>,
}

/// An open map.
#[derive(Debug)]
pub struct RawMap {
    fd: OwnedFd,
    name: String,
    shape: MapShape,
}

const MAP_CREATE: u32 = 0;
const MAP_LOOKUP_ELEM: u32 = 1;
const MAP_UPDATE_ELEM: u32 = 2;
const MAP_DELETE_ELEM: u32 = 3;
const OBJ_PIN: u32 = 6;
const OBJ_GET_INFO_BY_FD: u32 = 15;
const MAP_LOOKUP_BATCH: u32 = 24;
const MAP_UPDATE_BATCH: u32 = 26;

impl RawMap {
    /// Another handle of a hash map that a loader made.
    ///
    /// # Errors
    ///
    /// When the kernel refuses.
    pub fn open_hash(name: &str, info: &MapInfo) -> Result<Self> {
        let shape = MapShape {
            kind: MapKind::Hash,
            key_size: info.key_size(),
            value_size: info.value_size(),
            max_entries: info.max_entries(),
            flags: info.map_flags(),
        };
        Ok(Self { fd: info.fd()?.as_fd().try_clone_to_owned()?, name: name.to_owned(), shape })
    }

    /// Makes a map. The kernel keeps the first 15 characters of `name`.
    ///
    /// # Errors
    ///
    /// When the kernel refuses.
    pub fn create(name: &str, shape: MapShape) -> Result<Self> {
        let kernel_name = &name.as_bytes()[..name.len().min(15)];
        let mut attr = Attr::new(&[
            (0, &(shape.kind as u32).to_ne_bytes()),
            (4, &shape.key_size.to_ne_bytes()),
            (8, &shape.value_size.to_ne_bytes()),
            (12, &shape.max_entries.to_ne_bytes()),
            (16, &shape.flags.to_ne_bytes()),
            (28, kernel_name),
        ]);
        let fd = attr.call(MAP_CREATE).with_context(|| format!("cannot create map {name} as {shape:?}"))?;
        // SAFETY: the kernel just returned it.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        Ok(Self { fd, name: name.to_owned(), shape })
    }

    /// Pins it.
    ///
    /// # Errors
    ///
    /// When the kernel refuses: no bpffs at `path`, or something is pinned there.
    pub fn pin(&self, path: &Path) -> Result<()> {
        let path_c = CString::new(path.as_os_str().as_bytes())?;
        let mut attr =
            Attr::new(&[(0, &address(path_c.as_bytes_with_nul())), (8, &self.fd.as_raw_fd().to_ne_bytes())]);
        attr.call(OBJ_PIN).with_context(|| format!("cannot pin map {} at {}", self.name, path.display()))?;
        Ok(())
    }

    /// Another handle of the same map.
    ///
    /// # Errors
    ///
    /// When there are too many open files.
    pub fn try_clone(&self) -> io::Result<Self> {
        Ok(Self { fd: self.fd.try_clone()?, name: self.name.clone(), shape: self.shape })
    }

    /// Its id.
    ///
    /// # Errors
    ///
    /// When the kernel refuses.
    pub fn id(&self) -> Result<u32> {
        let info = [0u8; 80];
        let mut attr = Attr::new(&[
            (0, &self.fd.as_raw_fd().to_ne_bytes()),
            (4, &(info.len() as u32).to_ne_bytes()),
            (8, &address(&info)),
        ]);
        attr.call(OBJ_GET_INFO_BY_FD).with_context(|| format!("cannot ask about map {}", self.name))?;
        // Read it back through a volatile pointer: the kernel wrote behind the compiler's back.
        // SAFETY: in bounds and initialised.
        Ok(u32::from_ne_bytes(unsafe { info.as_ptr().add(4).cast::<[u8; 4]>().read_volatile() }))
    }

    /// Name it was made with.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What it was made as.
    #[must_use]
    pub fn shape(&self) -> MapShape {
        self.shape
    }

    /// Value of an element.
    ///
    /// # Errors
    ///
    /// On a key of another size, or when the kernel refuses.
    pub fn lookup_bytes(&self, key: &[u8]) -> Result<Option<Vec<u8>>> {
        self.check("key", key.len(), self.shape.key_size)?;
        let value = vec![0u8; self.shape.value_size as usize];
        match self.element(key, &value, 0).call(MAP_LOOKUP_ELEM) {
            Ok(_) => Ok(Some(value)),
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(None),
            Err(error) => Err(error).with_context(|| format!("cannot look up in map {}", self.name)),
        }
    }

    /// Sets an element. `Ok(false)` when it was not as expected.
    ///
    /// # Errors
    ///
    /// On a key or value of another size, or when the kernel refuses.
    pub fn update_bytes(&self, key: &[u8], value: &[u8], expect: Expect) -> Result<bool> {
        self.check("key", key.len(), self.shape.key_size)?;
        self.check("value", value.len(), self.shape.value_size)?;
        match self.element(key, value, expect as u64).call(MAP_UPDATE_ELEM) {
            Ok(_) => Ok(true),
            Err(error) => match error.raw_os_error() {
                Some(libc::EEXIST) if expect == Expect::Absent => Ok(false),
                Some(libc::ENOENT) if expect == Expect::Present => Ok(false),
                _ => Err(error).with_context(|| format!("cannot update map {}", self.name)),
            },
        }
    }

    /// Sets elements in one call, one after the other as fast as the kernel can; keys and values one behind the other.
    ///
    /// # Errors
    ///
    /// When they do not fit together, or the kernel refuses.
    pub fn update_batch(&self, elements: &Raw) -> Result<()> {
        let count = (elements.keys.len() / self.shape.key_size as usize) as u32;
        self.check("keys", elements.keys.len(), count * self.shape.key_size)?;
        self.check("values", elements.values.len(), count * self.shape.value_size)?;
        let mut attr = Attr::new(&[
            (16, &address(&elements.keys)),
            (24, &address(&elements.values)),
            (32, &count.to_ne_bytes()),
            (36, &self.fd.as_raw_fd().to_ne_bytes()),
        ]);
        attr.call(MAP_UPDATE_BATCH).with_context(|| format!("cannot update map {}", self.name)).map(drop)
    }

    /// Deletes an element. `Ok(false)` when there was none.
    ///
    /// # Errors
    ///
    /// On a key of another size, or when the kernel refuses.
    pub fn delete_bytes(&self, key: &[u8]) -> Result<bool> {
        self.check("key", key.len(), self.shape.key_size)?;
        // The kernel refuses anything behind the key.
        let mut attr = Attr::new(&[(0, &self.fd.as_raw_fd().to_ne_bytes()), (8, &address(key))]);
        match attr.call(MAP_DELETE_ELEM) {
            Ok(_) => Ok(true),
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(false),
            Err(error) => Err(error).with_context(|| format!("cannot delete from map {}", self.name)),
        }
    }

    /// As [`Self::lookup_bytes`], typed.
    ///
    /// # Errors
    ///
    /// On types of other sizes than the map's, or when the kernel refuses.
    pub fn lookup<K: IntoBytes + Immutable, V: FromBytes>(&self, key: &K) -> Result<Option<V>> {
        let Some(bytes) = self.lookup_bytes(key.as_bytes())? else { return Ok(None) };
        match V::read_from_bytes(&bytes) {
            Ok(value) => Ok(Some(value)),
            Err(_) => bail!("map {} has values of {} bytes, not {}", self.name, bytes.len(), size_of::<V>()),
        }
    }

    /// As [`Self::update_bytes`], typed, whatever was there.
    ///
    /// # Errors
    ///
    /// On types of other sizes than the map's, or when the kernel refuses.
    pub fn insert<K: IntoBytes + Immutable, V: IntoBytes + Immutable>(
        &self,
        key: &K,
        value: &V,
    ) -> Result<()> {
        self.update_bytes(key.as_bytes(), value.as_bytes(), Expect::Any).map(drop)
    }

    /// As [`Self::insert`], and nothing at all where the element is that already: a hash map gives a replaced element's memory to
    /// the next one, under the eyes of a program that is looking at it.
    ///
    /// # Errors
    ///
    /// As [`Self::insert`].
    pub fn insert_if_other<K: IntoBytes + Immutable, V: IntoBytes + Immutable>(
        &self,
        key: &K,
        value: &V,
    ) -> Result<()> {
        if self.lookup_bytes(key.as_bytes())?.is_some_and(|found| found == value.as_bytes()) {
            return Ok(());
        }
        self.insert(key, value)
    }

    /// As [`Self::delete_bytes`], typed.
    ///
    /// # Errors
    ///
    /// On a type of another size than the map's keys, or when the kernel refuses.
    pub fn remove<K: IntoBytes + Immutable>(&self, key: &K) -> Result<bool> {
        self.delete_bytes(key.as_bytes())
    }

    /// All elements. Elements that come or go meanwhile may or may not be among them.
    ///
    /// # Errors
    ///
    /// When the kernel refuses.
    pub fn dump(&self) -> Result<Elements> {
        let Raw { keys, values } = self.raw()?;
        let (key_size, value_size) = (self.shape.key_size as usize, self.shape.value_size as usize);
        let pairs = keys.chunks_exact(key_size).zip(values.chunks_exact(value_size));
        Ok(pairs.map(|(key, value)| (key.to_vec(), value.to_vec())).collect())
    }

    /// As [`Self::dump`], in the map's own order, which stays as long as nothing is written: cheap to compare.
    ///
    /// # Errors
    ///
    /// When the kernel refuses.
    pub fn raw(&self) -> Result<Raw> {
        const BATCH: u32 = 1024;
        let (key_size, value_size) = (self.shape.key_size as usize, self.shape.value_size as usize);
        let mut all = Raw::default();
        let keys = vec![0u8; key_size * BATCH as usize];
        let values = vec![0u8; value_size * BATCH as usize];
        // Where the next call goes on: a bucket's number, or a key.
        let mut position: Option<Vec<u8>> = None;
        loop {
            let next = vec![0u8; key_size.max(8)];
            let mut attr = Attr::new(&[
                (0, &position.as_deref().map_or([0; 8], address)),
                (8, &address(&next)),
                (16, &address(&keys)),
                (24, &address(&values)),
                (32, &BATCH.to_ne_bytes()),
                (36, &self.fd.as_raw_fd().to_ne_bytes()),
            ]);
            let over = match attr.call(MAP_LOOKUP_BATCH) {
                Ok(_) => false,
                Err(error) if error.raw_os_error() == Some(libc::ENOENT) => true,
                Err(error) => return Err(error).with_context(|| format!("cannot read map {}", self.name)),
            };
            // SAFETY: in bounds and initialised; the kernel wrote behind the compiler's back, here and in the buffers.
            let count = unsafe { attr.0.as_ptr().add(32).cast::<u32>().read_volatile() } as usize;
            std::hint::black_box((&keys, &values, &next));
            all.keys.extend_from_slice(&keys[..count * key_size]);
            all.values.extend_from_slice(&values[..count * value_size]);
            if over {
                return Ok(all);
            }
            position = Some(next);
        }
    }

    fn element(&self, key: &[u8], value: &[u8], flags: u64) -> Attr {
        Attr::new(&[
            (0, &self.fd.as_raw_fd().to_ne_bytes()),
            (8, &address(key)),
            (16, &address(value)),
            (24, &flags.to_ne_bytes()),
        ])
    }

    fn check(&self, what: &str, found: usize, expected: u32) -> Result<()> {
        ensure!(
            found == expected as usize,
            "map {} has a {what} of {expected} bytes, not {found}",
            self.name
        );
        Ok(())
    }
}

impl AsFd for RawMap {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
