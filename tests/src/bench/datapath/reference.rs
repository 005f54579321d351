//! Tiny classifiers: one that does nothing and one that looks one key up in a conntrack map, to measure against, and those
//! that set a packet and the maps right before each run.
//!
//! Given as instructions: they are too small for a compiler, and must not change with one.

use std::{
    os::fd::{AsFd, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd, RawFd},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};

use crate::{
    bpf::{Attr, address},
    cilium::RawMap,
};

const MAP_CREATE: u32 = 0;
const MAP_UPDATE: u32 = 2;
const PROG_LOAD: u32 = 5;
const PROG_TEST_RUN: u32 = 10;
const SCHED_CLS: u32 = 3;
const PROG_ARRAY: u32 = 3;

/// One instruction, `struct bpf_insn`.
const fn instruction(code: u8, registers: u8, offset: i16, immediate: i32) -> [u8; 8] {
    let ([o0, o1], [i0, i1, i2, i3]) = (offset.to_le_bytes(), immediate.to_le_bytes());
    [code, registers, o0, o1, i0, i1, i2, i3]
}

/// `r0 = -1; exit`
const RETURN_NEXT: [[u8; 8]; 2] = [instruction(0xb7, 0, 0, -1), instruction(0x95, 0, 0, 0)];

/// `r<register> = map`
fn map_address(register: u8, fd: RawFd) -> [[u8; 8]; 2] {
    [instruction(0x18, 0x10 | register, 0, fd), instruction(0, 0, 0, 0)]
}

/// `r0 = lookup(map, key)`
fn lookup(map: &RawMap, key: &[u8]) -> Vec<[u8; 8]> {
    let mut program = Vec::new();
    // *(u8 *)(r10 - size + i) = key[i]
    let size = key.len().next_multiple_of(8) as i16;
    for (index, byte) in key.iter().enumerate() {
        program.push(instruction(0x72, 10, index as i16 - size, i32::from(*byte)));
    }
    // r1 = map; r2 = r10 - size; call bpf_map_lookup_elem
    program.extend(map_address(1, map.as_fd().as_raw_fd()));
    program.push(instruction(0xbf, 0xa2, 0, 0));
    program.push(instruction(0x07, 2, 0, -i32::from(size)));
    program.push(instruction(0x85, 0, 0, 1));
    program
}

/// What is put back, or changed, before each run, so that a packet can be run over and over although it, or a map, is not
/// the same afterwards.
#[derive(Debug)]
pub(super) enum Prelude<'a> {
    /// The outer source port, which is at this offset.
    Port { offset: u32, port: u16 },
    /// The backend id in the service entry under this key.
    Entry { conntrack: &'a RawMap, key: Vec<u8>, backend_id: u32 },
    /// The inner ports, which are at this offset, to those of any of so many flows; see [`flow_ports`].
    Flow { offset: u32, flows: u32 },
}

const PORTS: u32 = 50_000;
const FIRST_PORT: u16 = 1024;

/// Inner source and destination port of a flow.
pub(super) const fn flow_ports(flow: u32) -> (u16, u16) {
    (FIRST_PORT + (flow % PORTS) as u16, 1 + (flow / PORTS) as u16)
}

impl Prelude<'_> {
    /// The context is in r6.
    fn push(&self, program: &mut Vec<[u8; 8]>) {
        match self {
            Self::Port { offset, port } => {
                // *(u16 *)(r10 - 8) = port
                program.push(instruction(0x6a, 10, -8, i32::from(port.to_be())));
                store(program, *offset, 2);
            }
            Self::Entry { conntrack, key, backend_id } => {
                program.extend(lookup(conntrack, key));
                // if r0 == 0 goto +2; r1 = backend_id; *(u64 *)(r0 + 8) = r1
                program.push(instruction(0x15, 0, 2, 0));
                program.push(instruction(0xb7, 1, 0, *backend_id as i32));
                program.push(instruction(0x7b, 0x10, 8, 0));
            }
            Self::Flow { offset, flows } => {
                program.extend([
                    // w0 = bpf_get_prandom_u32() % flows; w1 = w0 % PORTS + FIRST_PORT; w0 = w0 / PORTS + 1
                    instruction(0x85, 0, 0, 7),
                    instruction(0x94, 0, 0, *flows as i32),
                    instruction(0xbc, 0x01, 0, 0),
                    instruction(0x94, 1, 0, PORTS as i32),
                    instruction(0x04, 1, 0, i32::from(FIRST_PORT)),
                    instruction(0x34, 0, 0, PORTS as i32),
                    instruction(0x04, 0, 0, 1),
                    // *(u16 *)(r10 - 8) = be16 r1; *(u16 *)(r10 - 6) = be16 r0
                    instruction(0xdc, 1, 0, 16),
                    instruction(0xdc, 0, 0, 16),
                    instruction(0x6b, 0x1a, -8, 0),
                    instruction(0x6b, 0x0a, -6, 0),
                ]);
                store(program, *offset, 4);
            }
        }
    }
}

/// `bpf_skb_store_bytes(r6, offset, r10 - 8, length, 0)`
fn store(program: &mut Vec<[u8; 8]>, offset: u32, length: i32) {
    program.extend([
        instruction(0xbf, 0x61, 0, 0),
        instruction(0xb7, 2, 0, offset as i32),
        instruction(0xbf, 0xa3, 0, 0),
        instruction(0x07, 3, 0, -8),
        instruction(0xb7, 4, 0, length),
        instruction(0xb7, 5, 0, 0),
        instruction(0x85, 0, 0, 9),
    ]);
}

/// A program array.
#[derive(Debug)]
pub(super) struct Programs(OwnedFd);

impl Programs {
    /// With these in it.
    pub(super) fn new(programs: &[BorrowedFd<'_>]) -> Result<Self> {
        let size = 4u32.to_ne_bytes();
        let fd = Attr::new(&[
            (0, &PROG_ARRAY.to_ne_bytes()),
            (4, &size),
            (8, &size),
            (12, &(programs.len() as u32).to_ne_bytes()),
        ])
        .call(MAP_CREATE)
        .context("cannot make a program array")?;
        // SAFETY: the kernel just returned it.
        let array = unsafe { OwnedFd::from_raw_fd(fd) };
        for (index, program) in programs.iter().enumerate() {
            let (key, value) = ((index as u32).to_ne_bytes(), program.as_raw_fd().to_ne_bytes());
            Attr::new(&[(0, &array.as_raw_fd().to_ne_bytes()), (8, &address(&key)), (16, &address(&value))])
                .call(MAP_UPDATE)
                .with_context(|| format!("cannot put program {index} into the array"))?;
        }
        Ok(Self(array))
    }
}

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
        let mut program = lookup(map, key);
        program.extend(RETURN_NEXT);
        Self::load(&program)
    }

    /// Does what `prelude` says and goes on in the program at `index` of `programs`.
    pub(super) fn before(prelude: &Prelude<'_>, programs: &Programs, index: u32) -> Result<Self> {
        // r6 = r1
        let mut program = vec![instruction(0xbf, 0x16, 0, 0)];
        prelude.push(&mut program);
        // r1 = r6; r2 = programs; r3 = index; call bpf_tail_call
        program.push(instruction(0xbf, 0x61, 0, 0));
        program.extend(map_address(2, programs.0.as_raw_fd()));
        program.push(instruction(0xb7, 3, 0, index as i32));
        program.push(instruction(0x85, 0, 0, 12));
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

    /// The program.
    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
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
