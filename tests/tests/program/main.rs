//! The guard's own program in the kernel, packet by packet, by `BPF_PROG_TEST_RUN`.

mod audit;
mod drain;
mod flows;
mod hostile;
mod load;
mod pods;
mod read_only;
mod reasons;
mod recent;
mod replies;
mod reset;
mod reuse;
mod rewrite;
mod shares;
mod support;
mod untouched;
