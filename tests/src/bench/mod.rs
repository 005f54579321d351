//! Benchmarks of the program in the kernel, by `BPF_PROG_TEST_RUN`.
//!
//! Machines are noisy and differ: each figure is taken in turns with an empty classifier and with one that does a single
//! lookup in a conntrack map, and it is their difference and ratio that say something.
//!
//! * *Repeated* cases run one packet millions of times: everything is in the caches, which is what a busy client has.
//! * *Single* cases run one packet at a time, because the packet, or the maps, are not the same afterwards: a reset, a
//!   rewritten port, another flow for each packet. The system call around each run costs them caches, too.

mod cases;
mod measure;
mod reference;
mod report;

pub use self::{
    cases::datapath,
    measure::Effort,
    report::{Case, LoadCost, Report},
};
