//! Rates: in any time `t` at most `t / T + burst` requests begin.

use super::{
    index::{Index, Rate},
    report::Report,
};

pub(super) fn check(index: &Index<'_>, report: &mut Report) {
    for (key, rate) in &index.rates {
        if let Some(what) = exceeded(index, rate) {
            report.violated("rate", what, (index, key), &[]);
        }
    }
}

/// The standing charges, recalculated since the store last lost its data.
fn exceeded(index: &Index<'_>, rate: &Rate) -> Option<String> {
    let mut starts: Vec<_> = rate
        .charges
        .iter()
        .filter(|it| !rate.refunds.contains(&it.3))
        .map(|it| {
            let losses = index
                .history
                .losses
                .iter()
                .filter(|loss| loss.1 <= it.0)
                .count();
            let in_loss = index
                .history
                .losses
                .iter()
                .any(|loss| (loss.0..loss.1).contains(&it.0));
            (losses, it.1, it.2.clone(), in_loss)
        })
        .collect();
    starts.retain(|start| !start.3);
    starts.sort_by_key(|start| (start.0, start.1));
    let (mut epoch, mut full_until) = (0, 0);
    for (losses, start_us, charge, _) in starts {
        if losses != epoch {
            (epoch, full_until) = (losses, 0);
        }
        // In parts of the count, so that nothing is rounded; only the start itself is rounded, by up to a microsecond.
        let count = u128::from(charge.count);
        let now = u128::from(start_us) * count;
        full_until = now.max(full_until) + u128::from(charge.cost * charge.period_us);
        if full_until > now + count + u128::from(charge.burst * charge.period_us) {
            return Some(format!(
                "more than {} in {} us began by {start_us}",
                charge.count, charge.period_us
            ));
        }
    }
    None
}
