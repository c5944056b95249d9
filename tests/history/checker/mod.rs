//! The checker itself, on small histories, correct and incorrect. A checker that catches nothing proves nothing.

mod book;
mod cap;
mod holders;
mod names;
mod queue;

use self::book::{A, B, Book, C, held, is_clean};
use crate::history::event::Standing;

/// A single slot, held by three permits one after another.
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
