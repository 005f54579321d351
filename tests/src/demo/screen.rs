//! Lines for a person, coloured on a terminal.

use std::{
    env,
    io::{IsTerminal as _, Write, stderr, stdout},
    sync::{Mutex, PoisonError},
};

/// A colour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Colour {
    /// All is well.
    Green,
    /// On a leaving backend, or wrong.
    Red,
    /// Something happened.
    Yellow,
    /// A heading.
    Bold,
    /// Less important.
    Dim,
}

/// Where lines go.
pub struct Screen {
    out: Mutex<Box<dyn Write + Send>>,
    coloured: bool,
}

impl Screen {
    /// Standard output, or standard error where output is for machines. Colour only on a terminal, and not where
    /// `NO_COLOR` is set.
    #[must_use]
    pub fn new(to_stderr: bool) -> Self {
        let terminal = if to_stderr { stderr().is_terminal() } else { stdout().is_terminal() };
        let out: Box<dyn Write + Send> = if to_stderr { Box::new(stderr()) } else { Box::new(stdout()) };
        Self { out: Mutex::new(out), coloured: terminal && env::var_os("NO_COLOR").is_none() }
    }

    /// Prints a line.
    pub fn line(&self, text: &str) {
        let mut out = self.out.lock().unwrap_or_else(PoisonError::into_inner);
        // A reader that has gone away does not end the demonstration: its result is the exit status.
        let _ = writeln!(out, "{}", text.trim_end()).and_then(|()| out.flush());
    }

    /// Text in a colour, if this screen has colours.
    #[must_use]
    pub fn paint(&self, colour: Colour, text: &str) -> String {
        if !self.coloured || text.is_empty() {
            return text.to_owned();
        }
        let code = match colour {
            Colour::Green => "32",
            Colour::Red => "31",
            Colour::Yellow => "33",
            Colour::Bold => "1",
            Colour::Dim => "2",
        };
        format!("\x1b[{code}m{text}\x1b[0m")
    }
}
