//! The checker itself: small histories, right and wrong. A checker that catches nothing proves nothing.

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
const LEASE_MS: u64 = 30_000;
const ONE: &str = "turnstile:{one}";

/// A history in the making. All times are milliseconds since the beginning.
struct Book {
    processes: Vec<Vec<Line>>,
    exchanges: u64,
    losses: Vec<(u64, u64)>,
    stops: Vec<(usize, u64, u64)>,
}

/// The process, and the number there.
type Who = (usize, u64);

impl Book {
    /// Three processes, which the store has answered once.
    fn new() -> Self {
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

    /// Each process's clock began at another time.
    fn local_us(process: usize, at_ms: u64) -> u64 {
        at_ms * 1_000 + 7_000_000 * (process as u64 + 1)
    }

    fn store_us(at_ms: u64) -> u64 {
        BEGIN_US + at_ms * 1_000
    }

    fn store_ms(at_ms: u64) -> u64 {
        Self::store_us(at_ms) / 1_000
    }

    fn line(&mut self, process: usize, local_us: u64, event: Event) {
        self.processes[process].push(Line {
            replica: format!("replica {process}"),
            at_us: local_us,
            event,
        });
    }

    /// Returns its number.
    fn send(&mut self, process: usize, at_ms: u64, batch: Batch, charges: Vec<Charge>) -> u64 {
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

    fn answer(&mut self, process: usize, at_ms: u64, n: u64, answer: BatchAnswer) {
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

    fn exchange(&mut self, process: usize, at_ms: u64, batch: Batch, answer: BatchAnswer) {
        let n = self.send(process, at_ms, batch, Vec::new());
        self.answer(process, at_ms, n, answer);
    }

    fn hello(&mut self, process: usize, at_ms: u64) {
        self.exchange(process, at_ms, Batch::default(), BatchAnswer::default());
    }

    fn charge(&mut self, at_ms: u64) {
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

    fn acquires(&mut self, (process, seq): Who, at_ms: u64, standing: Standing) {
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

    /// As long as the store says, or so it should.
    fn holds(&mut self, (process, seq): Who, at_ms: u64, until_ms: u64) {
        let lasts_ms = until_ms - Self::store_ms(at_ms);
        let until_us = Self::local_us(process, at_ms + lasts_ms) - lasts_ms - 2_000;
        self.counts_as_held((process, seq), at_ms, until_ms, until_us);
    }

    fn counts_as_held(&mut self, (process, seq): Who, at_ms: u64, until_ms: u64, until_us: u64) {
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

    fn deed(&mut self, event: fn(Permit) -> Event, (process, seq): Who, at_ms: u64) {
        let key = ONE.to_owned();
        let local_us = Self::local_us(process, at_ms) + 100;
        self.line(process, local_us, event(Permit { key, seq }));
    }

    /// Another process's exchange has promoted it.
    fn woken(&mut self, (process, seq): Who, at_ms: u64) {
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

    fn renews(&mut self, (process, seq): Who, at_ms: u64, standing: Standing) {
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

    fn adopts(&mut self, (process, seq): Who, at_ms: u64) {
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

    fn gives_up(&mut self, who: Who, at_ms: u64) {
        self.deed(Event::GivenUp, who, at_ms);
    }

    fn releases(&mut self, (process, seq): Who, at_ms: u64) {
        let batch = Batch {
            release: vec![seq],
            ..Batch::default()
        };
        self.exchange(process, at_ms, batch, BatchAnswer::default());
    }

    /// Gives it up and releases it.
    fn returns(&mut self, who: Who, at_ms: u64) {
        self.gives_up(who, at_ms);
        self.releases(who, at_ms + 1);
    }

    fn check(self) -> Report {
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

const A: Who = (0, 11);
const B: Who = (1, 21);
const C: Who = (2, 31);

fn held(at_ms: u64) -> Standing {
    Standing::Held(Book::store_ms(at_ms + LEASE_MS))
}

/// It is reported as that, in these words, and with a timeline of whom it concerns.
#[track_caller]
fn violates(book: Book, guarantee: &str, words: &str) {
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
fn is_clean(book: Book) -> Report {
    let report = book.check();
    report.assert_clean();
    report
}

/// One slot, and three who have it one after the other.
fn three_in_turn() -> Book {
    let mut book = Book::new();
    book.acquires(A, 10, held(10));
    book.acquires(B, 20, Standing::Waiting(-200));
    book.acquires(C, 30, Standing::Waiting(-100));
    book.returns(A, 40);
    book.woken(B, 41);
    book.renews(C, 45, Standing::Waiting(-100));
    book.returns(B, 50);
    book.woken(C, 51);
    book.returns(C, 60);
    (0..3).for_each(|process| book.hello(process, 5_000));
    book
}

#[test]
fn a_history_without_fault_passes() {
    let report = is_clean(three_in_turn());
    assert_eq!((report.grants, report.promotions, report.lost), (3, 2, 0));
    assert!(report.over.is_empty());
}

#[test]
fn a_violation_prints_its_timeline() {
    let mut book = Book::new();
    book.acquires(A, 10, held(10));
    book.acquires(B, 20, held(20));
    let text = book.check().to_string();
    println!("{text}");
    for line in [
        "G1 VIOLATED: 2 leases of 1",
        "process 0 #11 store: is held for 30000 ms (Admitted)",
        "10.201 ms  process 1 #21 store: is held for 30000 ms (Admitted)",
        "process 1 #21 process: has an owner",
    ] {
        assert!(text.contains(line), "{line:?} is not in {text}");
    }
}

#[test]
fn two_leases_of_one_are_caught() {
    let mut book = Book::new();
    book.acquires(A, 10, held(10));
    book.acquires(B, 20, held(20));
    violates(book, "G1", "2 leases of 1");
}

#[test]
fn a_count_above_the_limit_is_caught() {
    let mut book = Book::new();
    let answer = BatchAnswer {
        in_use: 2,
        ..BatchAnswer::default()
    };
    book.exchange(0, 10, Batch::default(), answer);
    violates(book, "G1", "2 slots of 1 are in use");
}

#[test]
fn two_owners_of_one_are_caught() {
    let mut book = Book::new();
    book.acquires(A, 10, held(10));
    // It may have run, and so the store did nothing wrong.
    let batch = Batch {
        release: vec![A.1],
        ..Batch::default()
    };
    book.send(0, 15, batch, Vec::new());
    book.acquires(B, 20, held(20));
    book.gives_up(A, 1_000);
    violates(book, "G1", "2 owners of 1");
}

#[test]
fn putting_back_what_was_not_lost_is_caught() {
    let mut book = Book::new();
    book.acquires(A, 10, held(10));
    book.adopts(A, 20);
    violates(book, "G1", "put back");
}

#[test]
fn a_permit_that_outlives_its_lease_is_caught() {
    let mut book = Book::new();
    book.acquires(A, 10, held(10));
    book.renews(A, 5_000, held(5_000));
    let until_us = Book::local_us(0, 5_000 + LEASE_MS) + 100_000;
    book.counts_as_held(A, 5_000, Book::store_ms(5_000 + LEASE_MS), until_us);
    violates(book, "G2", "longer than its lease");
}

#[test]
fn a_permit_that_the_store_never_gave_is_caught() {
    let mut book = Book::new();
    book.acquires(A, 10, Standing::Full);
    book.holds(A, 10, Book::store_ms(10 + LEASE_MS));
    violates(book, "G2", "never said so");
}

#[test]
fn a_lease_that_vanishes_is_caught() {
    let mut book = Book::new();
    book.acquires(A, 10, held(10));
    book.renews(A, 1_000, Standing::Absent);
    violates(book, "G2", "before its time");
}

#[test]
fn a_slot_released_under_its_owner_is_caught() {
    let mut book = Book::new();
    book.acquires(A, 10, held(10));
    book.releases(A, 20);
    book.gives_up(A, 1_000);
    violates(book, "G2", "had an owner");
}

#[test]
fn a_permit_that_comes_back_from_the_dead_is_caught() {
    let mut book = Book::new();
    book.acquires(A, 10, held(10));
    book.renews(A, 40_000, held(40_000));
    book.holds(A, 40_000, Book::store_ms(40_000 + LEASE_MS));
    violates(book, "G2", "over counts as held again");
}

#[test]
fn an_overtaken_waiter_is_caught() {
    let mut book = Book::new();
    book.acquires(A, 10, held(10));
    book.acquires(B, 20, Standing::Waiting(-200));
    book.acquires(C, 30, Standing::Waiting(-100));
    book.returns(A, 40);
    book.woken(C, 41);
    book.renews(B, 50, Standing::Waiting(-200));
    violates(book, "G3", "#21 was overtaken by #31");
}

#[test]
fn a_newcomer_that_passes_the_line_is_caught() {
    let mut book = Book::new();
    book.acquires(B, 20, Standing::Waiting(-200));
    book.acquires(C, 30, held(30));
    book.renews(B, 50, Standing::Waiting(-200));
    violates(book, "G3", "newcomer #31 passed by #21");
}

#[test]
fn a_free_slot_beside_a_line_is_caught() {
    let mut book = Book::new();
    let answer = BatchAnswer {
        waiting: 1,
        ..BatchAnswer::default()
    };
    book.exchange(0, 10, Batch::default(), answer);
    violates(book, "G4", "0 of 1 slots were left in use");
}

/// Somebody waits, and nobody asks for so long.
fn forgotten_line(silence_ms: u64) -> Book {
    let mut book = Book::new();
    book.acquires(B, 20, Standing::Waiting(-200));
    book.renews(B, 20 + silence_ms, Standing::Waiting(-200));
    book
}

#[test]
fn a_line_that_nobody_looks_after_is_caught() {
    is_clean(forgotten_line(3_000));
    violates(forgotten_line(10_000), "G4", "nobody looked after the line");
    let mut book = forgotten_line(10_000);
    book.stops.push((1, 100, 9_000));
    is_clean(book);
}

#[test]
fn a_line_that_stands_still_is_caught() {
    let mut book = Book::new();
    book.acquires(B, 20, Standing::Waiting(-200));
    for at in 1..60 {
        book.renews(B, at * 1_000, Standing::Waiting(-200));
    }
    violates(book, "G4", "nobody held a slot");
}

#[test]
fn a_slot_that_is_not_returned_is_caught() {
    let mut book = Book::new();
    book.acquires(A, 10, held(10));
    book.gives_up(A, 20);
    book.releases(A, 8_000);
    violates(book, "G5", "was given up and stayed");
}

#[test]
fn a_name_that_is_used_again_is_caught() {
    let mut book = Book::new();
    book.acquires(A, 10, held(10));
    book.acquires(A, 20, held(10));
    violates(book, "G6", "asked for twice");
    let mut book = Book::new();
    book.acquires(A, 10, Standing::Stale);
    book.acquires(A, 20, held(20));
    is_clean(book);
    let mut book = Book::new();
    book.releases(A, 10);
    book.acquires(A, 20, held(20));
    violates(book, "G6", "asked for after its release");
}

#[test]
fn what_comes_back_after_its_release_is_caught() {
    let mut book = three_in_turn();
    book.renews(A, 70, Standing::Waiting(-50));
    violates(book, "G6", "came back");
}

/// An acquire without an answer, and its release so much later.
fn unanswered(released_ms: u64) -> Book {
    let mut book = Book::new();
    let batch = Batch {
        acquire: vec![A.1],
        ..Batch::default()
    };
    book.send(0, 10, batch, Vec::new());
    book.releases(A, released_ms);
    book.hello(0, released_ms + 10_000);
    book
}

#[test]
fn a_ghost_is_caught() {
    is_clean(unanswered(600));
    // It may have run after this.
    violates(unanswered(100), "G6", "ghost");
    violates(unanswered(9_000), "G6", "ghost");
}

#[test]
fn what_has_no_answer_may_have_run_or_not() {
    let mut book = Book::new();
    book.acquires(A, 10, held(10));
    book.gives_up(A, 14);
    let batch = Batch {
        release: vec![A.1],
        ..Batch::default()
    };
    book.send(0, 15, batch, Vec::new());
    book.acquires(B, 20, held(20));
    book.releases(A, 600);
    is_clean(book);
}

#[test]
fn lost_data_is_an_excuse_that_is_counted() {
    let story = || {
        let mut book = Book::new();
        book.acquires(A, 10, held(10));
        book.acquires(B, 30, held(30));
        book.renews(A, 40, Standing::Absent);
        book.adopts(A, 50);
        book.returns(B, 150);
        book
    };
    assert!(!story().check().violations.is_empty());
    let mut book = story();
    book.losses.push((20, 25));
    let report = is_clean(book);
    let over = report.over[ONE];
    assert_eq!((over.peak, over.lasted_us / 1_000), (2, 101), "{report}");
    assert_eq!(report.adopted, 1);
}

#[test]
fn more_than_a_rate_allows_is_caught() {
    let mut book = Book::new();
    [100, 101, 201, 301]
        .into_iter()
        .for_each(|at| book.charge(at));
    is_clean(book);
    let mut book = Book::new();
    [100, 101, 150].into_iter().for_each(|at| book.charge(at));
    violates(book, "rate", "more than 1 in 100000 us");
}
