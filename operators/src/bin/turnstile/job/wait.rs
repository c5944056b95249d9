//! Waits for the slot, and reports its place.

use std::{
    io::{self, IsTerminal, Write},
    time::Duration,
};

use nix::sys::signal::Signal;
use tokio::time::Instant;
use tower_turnstile::{Acquire, AcquireErrorKind, Permit};

use super::{signals::Signals, slot::SlotSource};
use crate::{
    commands::CommandError,
    notes::{self, Notes},
    text::escaped,
    timers::every,
};

/// How often the place is checked.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// How often the place is reported to a file.
const SAY_EVERY: Duration = Duration::from_secs(60);

pub(super) enum Waited {
    Granted(Permit),
    /// Cancelled by a signal.
    Cancelled(Signal),
}

/// A queued command whose store fails, or whose limit is paused, asks again until its maximum wait: neither a restart of
/// the store nor a pause may empty a queue of commands.
pub(super) async fn wait(
    slots: &SlotSource<'_>,
    limit: &str,
    signals: &mut Signals,
) -> Result<Waited, CommandError> {
    let until = Instant::now() + slots.wait;
    let mut acquire = slots.ask(slots.wait)?;
    let mut progress = Progress::new(limit);
    let (mut has_queued, mut asks) = (false, true);
    let mut looks = every(LOOK_EVERY);
    let waited = loop {
        tokio::select! {
            biased;
            signal = signals.ending() => break Ok(Waited::Cancelled(signal)),
            outcome = &mut acquire, if asks => match outcome {
                Ok(permit) => break Ok(Waited::Granted(permit)),
                Err(error) => {
                    has_queued |= error.position().is_some();
                    // Newcomers may have filled the queue before it asks again.
                    let passes = matches!(
                        error.kind(),
                        AcquireErrorKind::Unavailable
                            | AcquireErrorKind::Paused
                            | AcquireErrorKind::QueueFull
                    );
                    if !passes || !has_queued || until <= Instant::now() {
                        break Err(slots.refusal(&error).await);
                    }
                    asks = false;
                }
            },
            _ = looks.tick() => if asks { progress.look(&acquire) } else {
                acquire = slots.ask(until.saturating_duration_since(Instant::now()))?;
                asks = true;
            },
        }
    };
    progress.clear();
    waited
}

/// `3rd of 12 for gpu`: redrawn in place on a terminal, otherwise one line per minute.
struct Progress {
    limit: String,
    is_terminal: bool,
    said: Option<(String, Instant)>,
}

impl Progress {
    fn new(limit: &str) -> Self {
        Self {
            limit: escaped(limit),
            is_terminal: io::stderr().is_terminal(),
            said: None,
        }
    }

    fn look(&mut self, acquire: &Acquire) {
        let (Some(position), Some(waiting)) = (acquire.position(), acquire.waiting()) else {
            return;
        };
        self.show(format!(
            "{} of {waiting} for {}",
            ordinal(position),
            self.limit
        ));
    }

    fn show(&mut self, text: String) {
        if !self.is_due(&text) {
            return;
        }
        if self.is_terminal {
            redraw(&text)
        } else {
            note!("turnstile: {text}")
        }
        self.said = Some((text, Instant::now()));
    }

    fn is_due(&self, text: &str) -> bool {
        match &self.said {
            None => true,
            Some((said, _)) if self.is_terminal => said != text,
            Some((_, at)) => at.elapsed() >= SAY_EVERY,
        }
    }

    fn clear(&self) {
        if self.is_terminal && self.said.is_some() {
            redraw("");
            // The command may write next.
            notes::flush(notes::IN_ORDER);
        }
    }
}

/// Redraws a line of a terminal.
fn redraw(text: &str) {
    let _ = Notes.write(format!("\r\x1b[K{text}").as_bytes());
}

fn ordinal(number: u32) -> String {
    let ending = match (number % 100, number % 10) {
        (11..=13, _) => "th",
        (_, 1) => "st",
        (_, 2) => "nd",
        (_, 3) => "rd",
        _ => "th",
    };
    format!("{number}{ending}")
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_file_gets_a_line_a_minute_and_a_terminal_each_change() {
        for is_terminal in [false, true] {
            let mut progress = Progress {
                limit: "gpu".to_owned(),
                is_terminal,
                said: None,
            };
            progress.show("3rd of 3 for gpu".to_owned());
            advance(SAY_EVERY - Duration::from_millis(1)).await;
            assert_eq!(progress.is_due("2nd of 3 for gpu"), is_terminal);
            advance(Duration::from_millis(1)).await;
            assert_eq!(progress.is_due("3rd of 3 for gpu"), !is_terminal);
        }
    }

    #[test]
    fn places_are_ordinals() {
        for (number, shown) in [
            (1, "1st"),
            (2, "2nd"),
            (3, "3rd"),
            (4, "4th"),
            (11, "11th"),
            (12, "12th"),
            (13, "13th"),
            (21, "21st"),
            (112, "112th"),
            (1_003, "1003rd"),
        ] {
            assert_eq!(ordinal(number), shown);
        }
    }
}
