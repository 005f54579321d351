//! The lab. See `README.md` beside this crate for what it models and what it does not.
