//! What the datapath should look like.

mod desired;

pub use desired::*;
