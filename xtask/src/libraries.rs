//! What a program needs beside itself: the shared libraries that it loads, and root certificates.

use std::{path::Path, path::PathBuf, process::Command};

use crate::process::capture;

/// The system's root certificates, of the Debian package ca-certificates.
pub(crate) const CA_BUNDLE: &str = "/etc/ssl/certs/ca-certificates.crt";

/// Files that `binary` loads, the loader among them; none for a static program.
pub(crate) fn of(binary: &Path) -> Vec<PathBuf> {
    // ldd fails for a static program.
    capture(Command::new("ldd").arg(binary)).map(|listed| parse(&listed)).unwrap_or_default()
}

fn parse(listed: &str) -> Vec<PathBuf> {
    listed
        .lines()
        .filter_map(|line| line.split_whitespace().find(|word| word.starts_with('/')))
        .map(PathBuf::from)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::parse;
    use std::path::PathBuf;

    #[test]
    fn libraries_and_the_loader_are_read_from_ldd() {
        let listed = "\tlinux-vdso.so.1 (0x1)\n\tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x2)\n\
                      \t/lib64/ld-linux-x86-64.so.2 (0x3)\n";
        let expected = ["/lib/x86_64-linux-gnu/libc.so.6", "/lib64/ld-linux-x86-64.so.2"].map(PathBuf::from);
        assert_eq!(parse(listed), expected);
    }
}
