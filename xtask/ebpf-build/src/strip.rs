//! Takes out of an object what only debuggers read.
//!
//! The type information that the kernel needs is made from debug information, which is nine tenths of an object. The loader
//! goes through all of it, for each client pod again.

use std::{fs, path::Path};

use anyhow::{Context as _, Result};
use object::{
    build::elf::{Builder, SectionData},
    elf::SHT_STRTAB,
};

/// Rewrites the object at `path` without its debug sections.
pub(crate) fn strip(path: &Path) -> Result<()> {
    let data = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    let stripped = without_debug(&data).with_context(|| format!("cannot strip {}", path.display()))?;
    fs::write(path, stripped).with_context(|| format!("cannot write {}", path.display()))
}

fn without_debug(data: &[u8]) -> Result<Vec<u8>> {
    let mut builder = Builder::read(data)?;
    for section in &mut builder.sections {
        let name = section.name.as_slice();
        section.delete = name.starts_with(b".debug_") || name.starts_with(b".rel.debug_");
    }
    // Symbols of what is gone.
    builder.delete_orphans();
    // LLVM keeps the names of sections among those of symbols.
    let names = builder.sections.add();
    names.name = b".shstrtab"[..].into();
    names.sh_type = SHT_STRTAB;
    names.data = SectionData::SectionString;
    let mut stripped = Vec::new();
    builder.write(&mut stripped)?;
    Ok(stripped)
}
