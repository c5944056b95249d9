//! G3: waiters are admitted in the order of their tickets, and no newcomer precedes them. A waiter whose process may
//! have been disconnected is excused: it may be passed over.

use super::{
    Micros,
    index::{How, Id, Index, Ledger},
    report::Report,
};

/// A waiter, and when it was first and last seen in the queue. A request under several limits joins the next queue by
/// its first ticket, which may be lower than the ticket of a waiter that was granted a slot before: this is not
/// overtaking.
type Seen = (Micros, Micros, Id);

pub(super) fn check(index: &Index<'_>, report: &mut Report) {
    for (key, ledger) in &index.ledgers {
        let calm = |id: Id, at: Micros| index.history.is_calm(at, at + 1, id.0);
        let found = overtaken(ledger, calm).or_else(|| passed_by(ledger, calm));
        if let Some((first, second, what)) = found {
            report.violated("G3", what, (index, key), &[first, second]);
        }
    }
}

/// A waiter seen in the queue after a higher ticket was granted a slot has been overtaken. A waiter evicted as dead is
/// not seen again.
fn overtaken(ledger: &Ledger, calm: impl Fn(Id, Micros) -> bool) -> Option<(Id, Id, String)> {
    let mut waiters: Vec<_> = ledger
        .stories
        .iter()
        .filter_map(|(id, story)| {
            let (from, last_seen, ticket) = story.waits()?;
            let granted = story.granted().map(|(at, how)| match how {
                How::Admitted | How::Promoted => (at, at),
                // At some time since it was last seen in the queue.
                How::Renewed | How::Adopted => (last_seen, at),
            });
            Some((ticket, (from, last_seen), granted, *id))
        })
        .collect();
    waiters.sort_unstable();
    let (mut before, mut latest): (Vec<Seen>, Micros) = (Vec::new(), 0);
    for (_, (from, last_seen), granted, id) in waiters {
        if let Some(granted) = granted.filter(|(_, until)| *until < latest)
            && let Some((.., other)) = first_passed(&before, granted, &calm)
        {
            let what = format!("#{} was overtaken by #{}", other.1, id.1);
            return Some((other, id, what));
        }
        before.push((from, last_seen, id));
        latest = latest.max(last_seen);
    }
    None
}

/// A waiter that was in the queue before another one was granted a slot, at some time between these, and still was
/// afterwards, without an excuse.
fn first_passed(
    before: &[Seen],
    (since, granted): (Micros, Micros),
    calm: &impl Fn(Id, Micros) -> bool,
) -> Option<Seen> {
    // A call grants slots before it enqueues.
    let was_there = |(from, last_seen, _): &&Seen| *from < since && granted < *last_seen;
    let mut passed = before.iter().filter(was_there);
    passed.find(|(.., id)| calm(*id, granted)).copied()
}

/// A newcomer gets a slot only if nobody waits.
fn passed_by(ledger: &Ledger, calm: impl Fn(Id, Micros) -> bool) -> Option<(Id, Id, String)> {
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
    let (mut before, mut next): (Vec<Seen>, usize) = (Vec::new(), 0);
    for (at_us, id) in newcomers {
        while let Some((from, last_seen, waiter)) = queued.get(next)
            && *from < at_us
        {
            before.push((*from, *last_seen, *waiter));
            next += 1;
        }
        before.retain(|(_, last_seen, _)| *last_seen > at_us);
        if let Some((.., waiter)) = first_passed(&before, (at_us, at_us), &calm) {
            let what = format!("the newcomer #{} passed by #{}", id.1, waiter.1);
            return Some((waiter, id, what));
        }
    }
    None
}
