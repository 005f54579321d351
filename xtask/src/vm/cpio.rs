//! Writes the archive format that the kernel unpacks as its first root file system ("newc", see the kernel's
//! Documentation/driver-api/early-userspace/buffer-format.rst). Archives may be appended to one another.

use std::{collections::BTreeSet, path::Path};

/// File type and permission bits of an executable file.
pub(crate) const EXECUTABLE: u32 = 0o100_755;
/// File type and permission bits of a data file.
pub(crate) const DATA: u32 = 0o100_644;
const DIRECTORY: u32 = 0o040_755;
const CHARACTER_DEVICE: u32 = 0o020_600;

/// An archive in the making. Parents of what is added are added by themselves.
#[derive(Default)]
pub(crate) struct Archive {
    bytes: Vec<u8>,
    entries: u32,
    present: BTreeSet<String>,
}

impl Archive {
    /// Adds a file; of two with one path the kernel keeps the later, so a second is ignored here.
    pub(crate) fn file(&mut self, path: &Path, mode: u32, content: &[u8]) {
        let name = relative(path);
        self.parents(path);
        if self.present.insert(name.clone()) {
            self.entry(&name, mode, (0, 0), content);
        }
    }

    /// Adds an empty directory.
    pub(crate) fn directory(&mut self, path: &Path) {
        self.parents(path);
        let name = relative(path);
        if !name.is_empty() && self.present.insert(name.clone()) {
            self.entry(&name, DIRECTORY, (0, 0), &[]);
        }
    }

    /// Adds a character device.
    pub(crate) fn character_device(&mut self, path: &Path, major: u32, minor: u32) {
        self.parents(path);
        let name = relative(path);
        if self.present.insert(name.clone()) {
            self.entry(&name, CHARACTER_DEVICE, (major, minor), &[]);
        }
    }

    /// Ends the archive, padded so that another can follow it.
    pub(crate) fn finish(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, (0, 0), &[]);
        self.pad(512);
        self.bytes
    }

    fn parents(&mut self, path: &Path) {
        if let Some(parent) = path.parent() {
            self.directory(parent);
        }
    }

    fn entry(&mut self, name: &str, mode: u32, device: (u32, u32), content: &[u8]) {
        self.entries += 1;
        let size = u32::try_from(content.len()).expect("newc holds files below 4 GiB");
        let name_size = u32::try_from(name.len() + 1).expect("paths are short");
        let links = 1;
        // inode, mode, uid, gid, links, mtime, size, device of the file system, device, name size, check.
        let fields = [self.entries, mode, 0, 0, links, 0, size, 0, 0, device.0, device.1, name_size, 0];
        self.bytes.extend_from_slice(b"070701");
        for field in fields {
            self.bytes.extend_from_slice(format!("{field:08X}").as_bytes());
        }
        self.bytes.extend_from_slice(name.as_bytes());
        self.bytes.push(0);
        self.pad(4);
        self.bytes.extend_from_slice(content);
        self.pad(4);
    }

    fn pad(&mut self, alignment: usize) {
        self.bytes.resize(self.bytes.len().next_multiple_of(alignment), 0);
    }
}

fn relative(path: &Path) -> String {
    path.to_string_lossy().trim_start_matches('/').to_owned()
}

#[cfg(test)]
mod tests {
    use super::{Archive, DATA};
    use std::path::Path;

    #[test]
    fn an_archive_has_each_parent_once_and_ends_with_the_trailer() {
        let mut archive = Archive::default();
        archive.file(Path::new("/a/b/one"), DATA, b"1");
        archive.file(Path::new("/a/b/two"), DATA, b"22");
        archive.file(Path::new("/a/b/two"), DATA, b"again");
        let bytes = archive.finish();
        let text = String::from_utf8_lossy(&bytes);
        assert_eq!(text.matches("070701").count(), 5, "a, a/b, two files and the trailer");
        assert!(text.contains("TRAILER!!!"));
        assert_eq!(bytes.len() % 512, 0);
        assert!(!text.contains("again"));
    }

    #[test]
    fn header_name_and_content_are_aligned_to_four_bytes() {
        let mut archive = Archive::default();
        archive.file(Path::new("x"), DATA, b"12345");
        let bytes = archive.finish();
        // The header is 110 bytes, the name "x\0" makes 112; content of 5 bytes is followed by 3 of padding.
        assert_eq!(&bytes[110..112], b"x\0");
        assert_eq!(&bytes[112..120], b"12345\0\0\0");
        assert_eq!(&bytes[120..126], b"070701");
        assert_eq!(&bytes[54..62], b"00000005", "the size is the seventh field");
    }
}
