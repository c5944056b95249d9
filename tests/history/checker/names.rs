//! G5 and G6: released names are removed, and no name without an owner remains.

use super::{
    book::{A, Book, LEASE_MS, held, is_clean, violates},
    three_in_turn,
};
use crate::history::event::{Batch, Standing};

#[test]
fn a_slot_that_is_not_returned_is_caught() {
    let mut book = Book::new();
    book.acquires(A, 10, held(10));
    book.gives_up(A, 20);
    book.releases(A, 8_000);
    violates(book, "G5", "was given up and stayed");
}

/// Even where faults occurred all the time.
#[test]
fn a_slot_that_is_forgotten_is_caught() {
    let story = |released: bool| {
        let mut book = Book::new();
        book.stops.push((A.0, 0, 60_000));
        book.acquires(A, 10, held(10));
        book.gives_up(A, 20);
        book.hello(A.0, 30);
        if released {
            book.releases(A, 40);
        }
        (5..10).for_each(|at| book.hello(A.0, at * 10));
        book
    };
    is_clean(story(true));
    violates(story(false), "G5", "was given up and not released");
}

/// Its request got another slot at the same moment.
#[test]
fn a_slot_that_is_kept_for_the_pool_is_no_breach() {
    let story = |given_up_again: bool| {
        let mut book = Book::new();
        book.acquires(A, 10, held(10));
        book.gives_up(A, 10);
        book.holds(A, 10, Book::store_ms(10 + LEASE_MS));
        if given_up_again {
            book.gives_up(A, 30);
        }
        (4..10).for_each(|at| book.hello(A.0, at * 10));
        book
    };
    is_clean(story(false));
    violates(story(true), "G5", "was given up and not released");
}

#[test]
fn a_name_that_is_used_again_is_caught() {
    let mut book = Book::new();
    book.acquires(A, 10, held(10));
    book.acquires(A, 20, held(10));
    violates(book, "G6", "asked for twice");
    let mut book = Book::new();
    book.acquires(A, 10, Standing::Absent);
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

/// An acquire without an answer, and its release this much later.
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

/// The process was stopped before it sent the exchange.
#[test]
fn a_name_that_the_store_never_had_is_no_ghost() {
    let mut book = Book::new();
    let batch = Batch {
        acquire: vec![A.1],
        ..Batch::default()
    };
    let n = book.send(0, 10, batch, Vec::new());
    book.refuse_as_late(0, 9_000, n);
    book.hello(0, 20_000);
    is_clean(book);
}

#[test]
fn a_ghost_is_caught() {
    is_clean(unanswered(600));
    // The acquire may have run afterwards.
    violates(unanswered(100), "G6", "ghost");
    violates(unanswered(9_000), "G6", "ghost");
}
