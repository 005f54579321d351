//! Errors as the API reports them: a `Status` object.

use serde_json::{Value, json};

use super::kind::Kind;

/// An error answer.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{code} {reason}: {message}")]
pub struct ApiError {
    /// HTTP status code.
    pub code: u16,
    /// Machine-readable reason, such as `NotFound`.
    pub reason: &'static str,
    /// What happened.
    pub message: String,
}

impl ApiError {
    pub(crate) fn new(code: u16, reason: &'static str, message: impl Into<String>) -> Self {
        Self { code, reason, message: message.into() }
    }

    pub(crate) fn not_found(kind: Kind, name: &str) -> Self {
        Self::new(404, "NotFound", format!("{} {name:?} not found", kind.info().qualified()))
    }

    pub(crate) fn no_such_path() -> Self {
        Self::new(404, "NotFound", "the server could not find the requested resource")
    }

    pub(crate) fn bad_request(message: impl Into<String>) -> Self {
        Self::new(400, "BadRequest", message)
    }

    pub(crate) fn invalid(kind: Kind, name: &str, message: &str) -> Self {
        Self::new(422, "Invalid", format!("{} {name:?} is invalid: {message}", kind.info().kind))
    }

    pub(crate) fn conflict(kind: Kind, name: &str, message: &str) -> Self {
        let what = kind.info().qualified();
        Self::new(409, "Conflict", format!("Operation cannot be fulfilled on {what} {name:?}: {message}"))
    }

    pub(crate) fn expired(asked: u64, oldest: u64) -> Self {
        Self::new(410, "Expired", format!("too old resource version: {asked} ({oldest})"))
    }

    /// The `Status` object.
    #[must_use]
    pub fn status(&self) -> Value {
        json!({
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
            "reason": self.reason,
            "code": self.code,
        })
    }
}
