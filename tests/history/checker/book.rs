//! Histories under construction, and the checker's reports.

use crate::history::{
    History, Process, check,
    event::{
        Answered, Batch, BatchAnswer, Charge, Claim, ClaimAnswer, Event, Held, Line, Permit, Sent,
        Standing, Woken,
    },
    report::Report,
};

/// Store time at the beginning.
const BEGIN_US: u64 = 1_795_000_000_000_000;
pub(super) const LEASE_MS: u64 = 30_000;
pub(super) const ONE: &str = "turnstile:{one}";

/// A history under construction. All times are in milliseconds since the beginning.
pub(super) struct Book {
    processes: Vec<Vec<Line>>,
    exchanges: u64,
    pub(super) losses: Vec<(u64, u64)>,
    pub(super) stops: Vec<(usize, u64, u64)>,
}

/// A process, and a permit's number there.
pub(super) type Who = (usize, u64);

impl Book {
    /// Three processes, each with one answer of the store.
    pub(super) fn new() -> Self {
        let mut book = Self {
            processes: vec![Vec::new(); 3],
            exchanges: 0,
            losses: Vec::new(),
            stops: Vec::new(),
        };
        for process in 0..3 {
            book.hello(process, 0);
        }
        book
    }

    /// Each process's clock has a different start.
    pub(super) fn local_us(process: usize, at_ms: u64) -> u64 {
        at_ms * 1_000 + 7_000_000 * (process as u64 + 1)
    }

    pub(super) fn store_us(at_ms: u64) -> u64 {
        BEGIN_US + at_ms * 1_000
    }

    pub(super) fn store_ms(at_ms: u64) -> u64 {
        Self::store_us(at_ms) / 1_000
    }

    fn line(&mut self, process: usize, local_us: u64, event: Event) {
        let lines = &mut self.processes[process];
        lines.push(Line {
            replica: format!("replica {process}"),
            order: lines.len() as u64,
            at_us: local_us,
            event,
        });
    }

    /// Sends an exchange. Returns its number.
    pub(super) fn send(
        &mut self,
        process: usize,
        at_ms: u64,
        batch: Batch,
        charges: Vec<Charge>,
    ) -> u64 {
        self.exchanges += 1;
        let asks = Vec::new();
        let sent = Sent {
            n: self.exchanges,
            not_after_us: Self::store_us(at_ms + 500),
            lease_ms: LEASE_MS,
            batches: vec![Batch {
                key: ONE.to_owned(),
                limit: 1,
                ..batch
            }],
            claims: vec![Claim { charges, asks }],
            refunds: Vec::new(),
        };
        let local_us = Self::local_us(process, at_ms) - 100;
        self.line(process, local_us, Event::Sent(sent));
        self.exchanges
    }

    pub(super) fn answer(&mut self, process: usize, at_ms: u64, n: u64, answer: BatchAnswer) {
        let standings = Vec::new();
        let charged = vec![Some((Self::store_us(at_ms), Self::store_us(at_ms) + n, 0))];
        let answered = Answered {
            n,
            store_us: Self::store_us(at_ms),
            more: false,
            batches: vec![Some(answer)],
            claims: vec![Some(ClaimAnswer { charged, standings })],
        };
        let local_us = Self::local_us(process, at_ms) + 100;
        self.line(process, local_us, Event::Answered(answered));
    }

    /// The store did not run it.
    pub(super) fn refuse_as_late(&mut self, process: usize, at_ms: u64, n: u64) {
        let event = Event::Failed { n, too_late: true };
        self.line(process, Self::local_us(process, at_ms), event);
    }

    pub(super) fn exchange(
        &mut self,
        process: usize,
        at_ms: u64,
        batch: Batch,
        answer: BatchAnswer,
    ) {
        let n = self.send(process, at_ms, batch, Vec::new());
        self.answer(process, at_ms, n, answer);
    }

    pub(super) fn hello(&mut self, process: usize, at_ms: u64) {
        self.exchange(process, at_ms, Batch::default(), BatchAnswer::default());
    }

    pub(super) fn charge(&mut self, at_ms: u64) {
        let charge = Charge {
            key: "turnstile:{one}:rate".to_owned(),
            count: 1,
            period_us: 100_000,
            burst: 2,
            cost: 1,
        };
        let n = self.send(0, at_ms, Batch::default(), vec![charge]);
        self.answer(0, at_ms, n, BatchAnswer::default());
    }

    pub(super) fn acquires(&mut self, (process, seq): Who, at_ms: u64, standing: Standing) {
        let batch = Batch {
            acquire: vec![seq],
            ..Batch::default()
        };
        let answer = BatchAnswer {
            acquired: vec![standing],
            ..BatchAnswer::default()
        };
        self.exchange(process, at_ms, batch, answer);
        if let Standing::Held(until_ms) = standing {
            self.holds((process, seq), at_ms, until_ms);
            self.deed(Event::Taken, (process, seq), at_ms);
        }
    }

    /// Holds for as long as the store reports, or should report.
    pub(super) fn holds(&mut self, (process, seq): Who, at_ms: u64, until_ms: u64) {
        let lasts_ms = until_ms - Self::store_ms(at_ms);
        let until_us = Self::local_us(process, at_ms + lasts_ms) - lasts_ms - 2_000;
        self.counts_as_held((process, seq), at_ms, until_ms, until_us);
    }

    pub(super) fn counts_as_held(
        &mut self,
        (process, seq): Who,
        at_ms: u64,
        until_ms: u64,
        until_us: u64,
    ) {
        let key = ONE.to_owned();
        let held = Held {
            key,
            seq,
            until_us,
            until_ms,
        };
        let local_us = Self::local_us(process, at_ms) + 100;
        self.line(process, local_us, Event::Held(held));
    }

    pub(super) fn deed(&mut self, event: fn(Permit) -> Event, (process, seq): Who, at_ms: u64) {
        let key = ONE.to_owned();
        let local_us = Self::local_us(process, at_ms) + 100;
        self.line(process, local_us, event(Permit { key, seq }));
    }

    /// Another process's exchange has promoted the permit.
    pub(super) fn woken(&mut self, (process, seq): Who, at_ms: u64) {
        let until_ms = Self::store_ms(at_ms + LEASE_MS);
        let woken = Woken {
            key: ONE.to_owned(),
            granted_us: Self::store_us(at_ms),
            until_ms,
            seqs: vec![seq],
        };
        self.line(
            process,
            Self::local_us(process, at_ms) + 100,
            Event::Woken(woken),
        );
        self.holds((process, seq), at_ms, until_ms);
        self.deed(Event::Taken, (process, seq), at_ms);
    }

    pub(super) fn renews(&mut self, (process, seq): Who, at_ms: u64, standing: Standing) {
        let batch = Batch {
            renew: vec![seq],
            ..Batch::default()
        };
        let answer = BatchAnswer {
            renewed: vec![standing],
            ..BatchAnswer::default()
        };
        self.exchange(process, at_ms, batch, answer);
    }

    pub(super) fn adopts(&mut self, (process, seq): Who, at_ms: u64) {
        let batch = Batch {
            adopt: vec![seq],
            ..Batch::default()
        };
        let adopted = vec![Standing::Adopted(Self::store_ms(at_ms + LEASE_MS))];
        self.exchange(
            process,
            at_ms,
            batch,
            BatchAnswer {
                adopted,
                ..BatchAnswer::default()
            },
        );
    }

    pub(super) fn gives_up(&mut self, who: Who, at_ms: u64) {
        self.deed(Event::GivenUp, who, at_ms);
    }

    pub(super) fn releases(&mut self, (process, seq): Who, at_ms: u64) {
        let batch = Batch {
            release: vec![seq],
            ..Batch::default()
        };
        self.exchange(process, at_ms, batch, BatchAnswer::default());
    }

    /// Gives up the permit and releases it.
    pub(super) fn returns(&mut self, who: Who, at_ms: u64) {
        self.gives_up(who, at_ms);
        self.releases(who, at_ms + 1);
    }

    pub(super) fn check(self) -> Report {
        let stops = self.stops;
        let stopped = |process| {
            let own = stops.iter().filter(move |stop| stop.0 == process);
            own.map(|stop| (Self::store_us(stop.1), Self::store_us(stop.2)))
                .collect()
        };
        let processes = self.processes.into_iter().enumerate();
        let processes = processes.map(|(number, lines)| Process {
            name: format!("process {number}"),
            lines,
            stops: stopped(number),
            ..Process::default()
        });
        let losses = self.losses.iter();
        check(&History {
            processes: processes.collect(),
            losses: losses
                .map(|loss| (Self::store_us(loss.0), Self::store_us(loss.1)))
                .collect(),
            ..History::default()
        })
    }
}

pub(super) const A: Who = (0, 11);
pub(super) const B: Who = (1, 21);
pub(super) const C: Who = (2, 31);

pub(super) fn held(at_ms: u64) -> Standing {
    Standing::Held(Book::store_ms(at_ms + LEASE_MS))
}

/// Checks that a violation is reported with this guarantee and these words, and with a timeline of the processes
/// involved.
#[track_caller]
pub(super) fn violates(book: Book, guarantee: &str, words: &str) {
    let report = book.check();
    let found = report
        .violations
        .iter()
        .find(|violation| violation.guarantee == guarantee && violation.what.contains(words));
    assert!(
        found.is_some(),
        "not found: {guarantee} {words:?} in {report}"
    );
}

#[track_caller]
pub(super) fn is_clean(book: Book) -> Report {
    let report = book.check();
    report.assert_clean();
    report
}
