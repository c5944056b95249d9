//! G2: every holder that counts on a lease has one.

use super::book::{A, Book, LEASE_MS, held, violates};
use crate::history::event::Standing;

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
