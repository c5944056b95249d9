//! G3: waiters are admitted in the order of their tickets, and no newcomer comes before them.

use super::{
    Micros,
    index::{How, Id, Index, Ledger},
    report::Report,
};

/// Somebody who waited: the time, and who.
type Latest = Option<(Micros, Id)>;

pub(super) fn check(index: &Index<'_>, report: &mut Report) {
    for (key, ledger) in &index.ledgers {
        let found = overtaken(ledger).or_else(|| passed_by(ledger));
        if let Some((first, second, what)) = found {
            report.violated("G3", what, (index, key), &[first, second]);
        }
    }
}

/// Whoever is seen in line after somebody with a higher ticket was granted a slot has been overtaken: who is dropped
/// for dead is not seen again.
fn overtaken(ledger: &Ledger) -> Option<(Id, Id, String)> {
    let mut waiters: Vec<_> = ledger
        .stories
        .iter()
        .filter_map(|(id, story)| {
            let (_, last_seen, ticket) = story.waits()?;
            Some((ticket, last_seen, story.granted().map(|it| it.0), *id))
        })
        .collect();
    waiters.sort_unstable();
    let mut latest: Latest = None;
    for (_, last_seen, granted, id) in waiters {
        if let (Some((seen, other)), Some(granted)) = (latest, granted)
            && seen > granted
        {
            let what = format!("#{} was overtaken by #{}", other.1, id.1);
            return Some((other, id, what));
        }
        latest = latest.max(Some((last_seen, id)));
    }
    None
}

/// A newcomer gets a slot only if nobody waits.
fn passed_by(ledger: &Ledger) -> Option<(Id, Id, String)> {
    let mut queued: Vec<_> = ledger
        .stories
        .iter()
        .filter_map(|(id, story)| {
            let (from, last_seen, _) = story.waits()?;
            Some((from, last_seen, *id))
        })
        .collect();
    queued.sort_unstable();
    let mut newcomers: Vec<_> = ledger
        .stories
        .iter()
        .filter_map(|(id, story)| {
            let (at_us, how) = story.granted()?;
            (how == How::Admitted && story.waits().is_none()).then_some((at_us, *id))
        })
        .collect();
    newcomers.sort_unstable();
    let (mut latest, mut next): (Latest, usize) = (None, 0);
    for (at_us, id) in newcomers {
        while let Some((from, last_seen, waiter)) = queued.get(next)
            && *from < at_us
        {
            latest = latest.max(Some((*last_seen, *waiter)));
            next += 1;
        }
        if let Some((seen, waiter)) = latest
            && seen > at_us
        {
            let what = format!("the newcomer #{} passed by #{}", id.1, waiter.1);
            return Some((waiter, id, what));
        }
    }
    None
}
