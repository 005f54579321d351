//! Drives the in-process API with kube's own client and watchers.

mod rights;
mod rows;
mod tape;
mod watching;
mod writing;
