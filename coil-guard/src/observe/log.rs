//! The log, and its level, which can be changed while the agent runs.

use std::{fmt, io::IsTerminal as _};

use tracing_subscriber::{
    EnvFilter, Registry, fmt as layer, layer::SubscriberExt as _, reload, util::SubscriberInitExt as _,
};

/// How log lines look.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum LogFormat {
    /// One line of text each.
    #[default]
    Text,
    /// One JSON object each.
    Json,
}

/// Changes the log level.
#[derive(Clone)]
pub struct LogControl {
    handle: reload::Handle<EnvFilter, Registry>,
}

impl fmt::Debug for LogControl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LogControl").finish_non_exhaustive()
    }
}

/// Reads a filter: a level, or targets with levels such as `info,coil_guard::k8s=debug`.
///
/// # Errors
///
/// It is neither.
pub(crate) fn parse_filter(text: &str) -> Result<EnvFilter, String> {
    let text = text.trim();
    let allowed = "allowed are error, warn, info, debug, trace, or a list such as info,coil_guard::k8s=debug";
    if text.is_empty() {
        return Err(format!("no log level given; {allowed}"));
    }
    EnvFilter::try_new(text).map_err(|error| format!("{text:?} is no log level ({error}); {allowed}"))
}

/// Starts logging to standard error.
///
/// # Errors
///
/// The level is not understood, or logging was started before.
pub fn init(format: LogFormat, level: &str) -> Result<LogControl, String> {
    let (filter, handle) = reload::Layer::new(parse_filter(level)?);
    let registry = tracing_subscriber::registry().with(filter);
    let started = match format {
        LogFormat::Text => registry
            .with(layer::layer().with_ansi(std::io::stderr().is_terminal()).with_writer(std::io::stderr))
            .try_init(),
        LogFormat::Json => {
            let json = layer::layer().json().flatten_event(true).with_writer(std::io::stderr);
            registry.with(json).try_init()
        }
    };
    started.map_err(|error| error.to_string())?;
    Ok(LogControl { handle })
}

impl LogControl {
    /// Changes the level.
    ///
    /// # Errors
    ///
    /// It is not understood.
    pub fn set(&self, level: &str) -> Result<(), String> {
        let filter = parse_filter(level)?;
        self.handle.reload(filter).map_err(|error| error.to_string())
    }

    /// The level now.
    #[must_use]
    pub fn get(&self) -> String {
        self.handle.with_current(ToString::to_string).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_and_targets_are_read() {
        for good in ["info", "DEBUG", "warn,coil_guard::k8s=trace"] {
            assert!(parse_filter(good).is_ok(), "{good}");
        }
        for bad in ["", "  ", "info,coil_guard=loud"] {
            let error = parse_filter(bad).unwrap_err();
            assert!(error.contains("allowed are error, warn, info"), "{error}");
        }
    }
}
