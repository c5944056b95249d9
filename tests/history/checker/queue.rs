//! G3 and G4: in order and without a pause.

use super::book::{A, B, Book, C, held, is_clean, violates};
use crate::history::event::{Batch, BatchAnswer, Standing};

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

/// It has a low ticket from before, and came back after the other one may have been granted its slot.
#[test]
fn a_waiter_that_came_back_is_not_overtaken() {
    let mut book = Book::new();
    book.acquires(A, 10, held(10));
    book.acquires(C, 30, Standing::Waiting(-100));
    book.returns(A, 40);
    book.acquires(B, 45, Standing::Waiting(-200));
    book.renews(C, 50, held(50));
    book.renews(B, 60, Standing::Waiting(-200));
    is_clean(book);
}

#[test]
fn a_newcomer_that_passes_the_queue_is_caught() {
    let mut book = Book::new();
    book.acquires(B, 20, Standing::Waiting(-200));
    book.acquires(C, 30, held(30));
    book.renews(B, 50, Standing::Waiting(-200));
    violates(book, "G3", "newcomer #31 passed by #21");
}

#[test]
fn a_free_slot_beside_a_queue_is_caught() {
    let mut book = Book::new();
    let answer = BatchAnswer {
        waiting: 1,
        ..BatchAnswer::default()
    };
    book.exchange(0, 10, Batch::default(), answer);
    violates(book, "G4", "0 of 1 slots were left in use");
}

/// A request waits, and nobody polls for this long.
fn forgotten_queue(silence_ms: u64) -> Book {
    let mut book = Book::new();
    book.acquires(B, 20, Standing::Waiting(-200));
    book.renews(B, 20 + silence_ms, Standing::Waiting(-200));
    book
}

#[test]
fn a_line_that_nobody_looks_after_is_caught() {
    is_clean(forgotten_queue(3_000));
    violates(forgotten_queue(10_000), "G4", "nobody asked for the queue");
    let mut book = forgotten_queue(10_000);
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
