//! Two tiny classifiers to measure against: one that does nothing, and one that looks one key up in a conntrack map.
//!
//! Given as instructions: they are too small for a compiler, and must not change with one.

use std::{
    os::fd::{AsFd as _, AsRawFd as _, FromRawFd as _, OwnedFd},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};

use crate::{
    bpf::{Attr, address},
    cilium::RawMap,
};

const PROG_LOAD: u32 = 5;
const PROG_TEST_RUN: u32 = 10;
const SCHED_CLS: u32 = 3;

/// One instruction, `struct bpf_insn`.
const fn instruction(code: u8, registers: u8, offset: i16, immediate: i32) -> [u8; 8] {
    let ([o0, o1], [i0, i1, i2, i3]) = (offset.to_le_bytes(), immediate.to_le_bytes());
    [code, registers, o0, o1, i0, i1, i2, i3]
}

/// `r0 = -1; exit`
const RETURN_NEXT: [[u8; 8]; 2] = [instruction(0xb7, 0, 0, -1), instruction(0x95, 0, 0, 0)];

/// A classifier to measure against.
#[derive(Debug)]
pub(super) struct Reference(OwnedFd);

impl Reference {
    /// Does nothing.
    pub(super) fn empty() -> Result<Self> {
        Self::load(&RETURN_NEXT)
    }

    /// Looks `key` up in `map`, once a packet.
    pub(super) fn lookup(map: &RawMap, key: &[u8]) -> Result<Self> {
        let mut program = Vec::new();
        // *(u8 *)(r10 - size + i) = key[i]
        let size = key.len().next_multiple_of(8) as i16;
        for (index, byte) in key.iter().enumerate() {
            program.push(instruction(0x72, 10, index as i16 - size, i32::from(*byte)));
        }
        // r1 = map; r2 = r10 - size; call bpf_map_lookup_elem
        program.push(instruction(0x18, 0x11, 0, map.as_fd().as_raw_fd()));
        program.push(instruction(0, 0, 0, 0));
        program.push(instruction(0xbf, 0xa2, 0, 0));
        program.push(instruction(0x07, 2, 0, -i32::from(size)));
        program.push(instruction(0x85, 0, 0, 1));
        program.extend(RETURN_NEXT);
        Self::load(&program)
    }

    fn load(program: &[[u8; 8]]) -> Result<Self> {
        let fd = Attr::new(&[
            (0, &SCHED_CLS.to_ne_bytes()),
            (4, &(program.len() as u32).to_ne_bytes()),
            (8, &address(program.as_flattened())),
            (16, &address(b"GPL\0")),
        ])
        .call(PROG_LOAD)
        .context("cannot load a classifier to measure against")?;
        // SAFETY: the kernel just returned it.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// Mean time of a run.
    pub(super) fn time(&self, frame: &[u8], times: u32) -> Result<Duration> {
        ensure!(frame.len() >= 14, "a frame of {} bytes", frame.len());
        let mut attr = Attr::new(&[
            (0, &self.0.as_raw_fd().to_ne_bytes()),
            (8, &(frame.len() as u32).to_ne_bytes()),
            (16, &address(frame)),
            (32, &times.to_ne_bytes()),
        ]);
        attr.call(PROG_TEST_RUN).context("cannot run a classifier to measure against")?;
        let duration = &raw const attr.0[36];
        // SAFETY: in bounds; volatile because the kernel wrote it behind the compiler's back.
        let duration = unsafe { duration.cast::<u32>().read_volatile() };
        Ok(Duration::from_nanos(u64::from(duration)))
    }
}
