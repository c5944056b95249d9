//! G1 and rates: never more than the limit.

use super::book::{A, B, Book, ONE, held, is_clean, violates};
use crate::history::event::{Batch, BatchAnswer, Standing};

#[test]
fn two_leases_of_one_are_caught() {
    let mut book = Book::new();
    book.acquires(A, 10, held(10));
    book.acquires(B, 20, held(20));
    violates(book, "G1", "2 leases of 1");
}

#[test]
fn a_heavy_lease_beside_another_is_caught() {
    // A permit of two units.
    let heavy = (A.0, A.1 | 1 << 54);
    let mut book = Book::new();
    book.acquires(heavy, 10, held(10));
    book.returns(heavy, 15);
    book.acquires(B, 20, held(20));
    is_clean(book);
    let mut book = Book::new();
    book.acquires(heavy, 10, held(10));
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
    // The exchange may have run, so the store made no mistake.
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
