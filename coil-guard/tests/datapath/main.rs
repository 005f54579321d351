//! The datapath on the running kernel, in namespaces of its own. Needs root; skips loudly without it.

mod attach;
mod binding;
mod clsact;
mod cores;
mod harness;
mod replies;
mod tables;
