//! G6: a name is asked for once, what was released does not come back, and what an exchange without an answer may
//! have let in is released after that exchange can run no more.

use super::{
    index::{Ask, Id, Index, Story, What},
    report::Report,
};

pub(super) fn check(index: &Index<'_>, report: &mut Report) {
    for (key, ledger) in &index.ledgers {
        for (id, story) in &ledger.stories {
            let found = used_again(story)
                .or_else(|| came_back(story))
                .or_else(|| ghost(index, *id, story));
            if let Some(what) = found {
                report.violated("G6", format!("#{} {what}", id.1), (index, key), &[*id]);
            }
        }
    }
}

/// It may be asked for again only if the store has said that it is not in.
fn used_again(story: &Story) -> Option<&'static str> {
    let asks: Vec<&Ask> = story.asks.iter().filter(|ask| !ask.adopts).collect();
    let again = asks.windows(2).any(|pair| {
        let refused = pair[0]
            .answer
            .is_some_and(|(line, is_in)| !is_in && line < pair[1].line);
        !refused
    });
    let released = story.releases.first().map(|(line, _, _)| *line);
    let late = asks
        .last()
        .is_some_and(|ask| released.is_some_and(|line| line < ask.line));
    match (again, late) {
        (true, _) => Some("was asked for twice"),
        (_, true) => Some("was asked for after its release"),
        _ => None,
    }
}

/// Once released, only an exchange without an answer may bring it back, and not after its time.
fn came_back(story: &Story) -> Option<&'static str> {
    let mut released = None;
    for fact in &story.facts {
        match (fact.what, released) {
            (What::Released, _) => released = Some(fact.at_us),
            (What::Held { .. } | What::Waiting { .. }, Some(at)) => {
                let may_run = |ask: &Ask| ask.answer.is_none() && ask.not_after_us >= at;
                if !story.asks.iter().any(may_run) {
                    return Some("came back after its release");
                }
            }
            _ => {}
        }
    }
    None
}

/// Nobody was told whether it is in, so it has to be released when that is decided.
fn ghost(index: &Index<'_>, id: Id, story: &Story) -> Option<&'static str> {
    let process = &index.history.processes[id.0];
    let bounds = index.history.bounds;
    let lost = story
        .asks
        .iter()
        .find(|ask| !ask.adopts && ask.answer.is_none())?;
    let last = process
        .lines
        .last()
        .map_or(0, |line| index.earliest(id.0, line.at_us));
    let end = process.killed.unwrap_or(last);
    let over = lost.not_after_us;
    // A wake-up may have told: then it is a permit like others.
    let told = story
        .facts
        .iter()
        .any(|fact| !matches!(fact.what, What::Released));
    let released = story
        .facts
        .iter()
        .filter(|fact| fact.what == What::Released);
    let released = released.map(|fact| fact.at_us).find(|at| *at > over);
    let most = bounds.poll_us + 2 * bounds.round_us + index.history.hampered(over, end, Some(id.0));
    if told || released.unwrap_or(end) <= over + most {
        return None;
    }
    Some("may be a ghost: it was not released in time")
}
