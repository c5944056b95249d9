//! The content of a store in this process, in the form that Redis would have.

use std::collections::BTreeMap;

use crate::ledger::{Generation, Ledger, Ledgers, PaceState, Rate, RateState};

/// All stored data, in the form that Redis would have.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Content {
    /// Members and scores of each sorted set.
    pub(crate) ledgers: BTreeMap<String, Vec<(String, f64)>>,
    pub(crate) rates: BTreeMap<String, String>,
    pub(crate) generations: BTreeMap<String, String>,
    /// Limits that find their own value.
    pub(crate) paces: BTreeMap<String, String>,
}

impl Ledgers {
    /// Loses all ledgers, as if they were deleted one by one.
    pub(crate) fn lose_ledgers(&mut self) {
        self.ledgers.clear();
    }

    /// Forgets the shares whose time is over. Returns the keys of their ledgers.
    pub(crate) fn forget_shares(&mut self, now_us: u64) -> Vec<String> {
        let ended = self.ledgers.iter_mut();
        let ended = ended.filter_map(|(key, ledger)| {
            let ended = ledger.forget_shares(now_us / 1_000);
            ended.then(|| key.clone())
        });
        let ended = ended.collect();
        self.ledgers.retain(|_, ledger| !ledger.is_forgotten());
        ended
    }

    pub(crate) fn get(&self, key: &str) -> Option<&Ledger> {
        self.ledgers.get(key)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (&String, &Ledger)> {
        self.ledgers.iter()
    }

    pub(crate) fn content(&self) -> Content {
        let ledgers = self.ledgers.iter().flat_map(|(key, ledger)| {
            let [tenants, lines] = ledger.shares_content();
            let beside = [
                (format!("{key}:shares"), tenants),
                (format!("{key}:lines"), lines),
            ];
            let own = (key.clone(), ledger.content());
            beside.into_iter().chain([own])
        });
        let rates = self.rates.iter();
        let rates = rates.map(|(key, state)| (key.clone(), state.text()));
        let generations = self.generations.iter().map(|(key, (generation, _))| {
            let Generation { id, found_ms } = generation;
            (key.clone(), format!("{id} {found_ms}"))
        });
        let paces = self.ledgers.iter().filter_map(|(key, ledger)| {
            let state = ledger.pace_of()?;
            Some((format!("{key}:pace"), state.text()))
        });
        Content {
            paces: paces.collect(),
            ledgers: ledgers.filter(|(_, content)| !content.is_empty()).collect(),
            rates: rates.collect(),
            generations: generations.collect(),
        }
    }
}

impl PaceState {
    /// The state's text in the store.
    pub(super) fn text(self) -> String {
        let cut = self
            .last_cut
            .map_or((0, 0, 0), |cut| (cut.at_ms, cut.from, cut.to));
        let (
            Self {
                limit,
                generation,
                score,
                wall,
                ..
            },
            any,
        ) = (self, u8::from(self.any_accepted));
        let walls = format!("{wall} {} {}", self.wall_until_ms, self.wall_ms);
        format!(
            "{limit} {generation} {score} {walls} {any} {} {} {} {}",
            self.grown_ms, cut.0, cut.1, cut.2
        )
    }
}

impl RateState {
    /// The state's text in the store.
    pub(super) fn text(self) -> String {
        let Self {
            us,
            rem,
            rate,
            rounded,
            since_us,
            charged,
            before_group,
            group,
            start_us,
        } = self;
        let Rate {
            count,
            period_us,
            burst,
        } = rate;
        format!(
            "{us} {rem} {count}/{period_us}/{burst}/{rounded}/{before_group}/{group}/{start_us} {charged} {since_us}"
        )
    }
}
