//! Takes the kernel's ELF image out of a bzImage, by its setup header (Documentation/arch/x86/boot.rst): booted by PVH
//! it is in userspace in half the time under software emulation, because the guest need not decompress itself.

use std::{
    io::Write as _,
    process::{Command, Stdio},
    thread,
};

use anyhow::{Context as _, Result, bail, ensure};

/// How a payload is compressed, by its first bytes, and the program that undoes it.
const COMPRESSIONS: [(&[u8], &str); 4] = [
    (&[0xfd, 0x37, 0x7a, 0x58], "xz"),
    (&[0x28, 0xb5, 0x2f, 0xfd], "zstd"),
    (&[0x02, 0x21, 0x4c, 0x18], "lz4"),
    (&[0x1f, 0x8b], "gzip"),
];

/// The ELF image inside `image`.
pub(crate) fn extract(image: &[u8]) -> Result<Vec<u8>> {
    let Payload { program, compressed, length } = locate(image)?;
    let elf = filter(program, compressed)?;
    ensure!(
        elf.len() == length && elf.starts_with(b"\x7fELF"),
        "the kernel's payload should unpack to an ELF image of {length} bytes, but {program} made {} bytes of it",
        elf.len()
    );
    Ok(elf)
}

struct Payload<'a> {
    program: &'static str,
    compressed: &'a [u8],
    length: usize,
}

fn locate(image: &[u8]) -> Result<Payload<'_>> {
    let word = |offset: usize| -> Result<usize> {
        let bytes = image.get(offset..offset + 4).context("the image ends inside its setup header")?;
        Ok(u32::from_le_bytes(bytes.try_into()?) as usize)
    };
    ensure!(image.get(0x202..0x206) == Some(b"HdrS"), "not a bzImage: no HdrS at offset 0x202");
    let setup_sectors = usize::from(image[0x1f1]);
    let start = (setup_sectors + 1) * 512 + word(0x248)?;
    let end = start + word(0x24c)?;
    let payload = image.get(start..end).filter(|payload| payload.len() > 8);
    let payload = payload.context("the image ends inside the payload that its setup header announces")?;
    // The uncompressed length stands behind the compressed data, except in gzip, whose own trailer ends with it.
    let length = word(end - 4)?;
    let Some((_, program)) = COMPRESSIONS.iter().find(|(magic, _)| payload.starts_with(magic)) else {
        bail!("the payload begins with {:02x?}: neither xz, zstd, lz4 nor gzip", &payload[..4]);
    };
    let compressed = if *program == "gzip" { payload } else { &payload[..payload.len() - 4] };
    Ok(Payload { program, compressed, length })
}

/// What `program -dc` makes of `input`.
pub(crate) fn filter(program: &str, input: &[u8]) -> Result<Vec<u8>> {
    let mut child = Command::new(program)
        .arg("-dc")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot run {program}"))?;
    let mut stdin = child.stdin.take().context("the child has no standard input")?;
    let output = thread::scope(|scope| {
        // A child that ends early closes the pipe; its status and message say why.
        scope.spawn(move || stdin.write_all(input).unwrap_or_default());
        child.wait_with_output()
    })?;
    ensure!(output.status.success(), "{program} failed: {}", String::from_utf8_lossy(&output.stderr).trim());
    Ok(output.stdout)
}

#[cfg(test)]
mod tests {
    use super::{extract, locate};

    fn image(payload: &[u8]) -> Vec<u8> {
        let mut image = vec![0; 2048];
        image[0x1f1] = 3;
        image[0x202..0x206].copy_from_slice(b"HdrS");
        image[0x248..0x24c].copy_from_slice(&16_u32.to_le_bytes());
        image[0x24c..0x250].copy_from_slice(&u32::try_from(payload.len()).unwrap().to_le_bytes());
        image.extend_from_slice(&[0xee; 16]);
        image.extend_from_slice(payload);
        image
    }

    #[test]
    fn the_payload_is_found_by_the_setup_header() {
        let bytes = image(b"\x28\xb5\x2f\xfdcompressed\x07\x00\x00\x00");
        let payload = locate(&bytes).unwrap();
        assert_eq!(payload.program, "zstd");
        assert_eq!(payload.compressed, b"\x28\xb5\x2f\xfdcompressed");
        assert_eq!(payload.length, 7);
    }

    #[test]
    fn what_is_no_kernel_or_cut_short_is_refused() {
        assert!(extract(b"#!/bin/sh\n").is_err());
        let mut cut = image(b"\x28\xb5\x2f\xfdcompressed\x07\x00\x00\x00");
        cut.truncate(cut.len() - 1);
        assert!(locate(&cut).is_err());
        assert!(locate(&image(b"plain text, no compression")).is_err());
    }
}
