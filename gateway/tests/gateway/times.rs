//! How messages tell a time.

use std::time::Duration;

use crate::time::in_words;

#[test]
fn times_are_told_as_people_say_them() {
    for (millis, words) in [
        (0, "1 second"),
        (1, "1 second"),
        (1_000, "1 second"),
        (17_100, "18 seconds"),
        (59_001, "1 minute"),
        (90_000, "1 minute 30 seconds"),
        (3_599_001, "1 hour"),
        (3_601_000, "1 hour 1 minute"),
        (93_240_000, "1 day 2 hours"),
        (86_399_000, "1 day"),
        (2 * 86_400_000, "2 days"),
        (2 * 86_400_000 + 1, "2 days 1 hour"),
    ] {
        assert_eq!(in_words(Duration::from_millis(millis)), words, "{millis}");
    }
}

#[test]
fn a_told_time_is_never_too_short_and_little_too_long() {
    let unit = |word: &str| match word.trim_end_matches('s') {
        "day" => 86_400,
        "hour" => 3_600,
        "minute" => 60,
        _ => 1,
    };
    for seconds in (1..400_000).step_by(37) {
        let text = in_words(Duration::from_secs(seconds));
        let words: Vec<_> = text.split(' ').collect();
        let parts = words.chunks(2);
        let told: u64 = parts
            .map(|part| part[0].parse::<u64>().expect("a number") * unit(part[1]))
            .sum();
        assert!(
            (seconds..=seconds + seconds / 24 + 1).contains(&told),
            "{seconds}: {text}"
        );
    }
    assert_eq!(in_words(Duration::MAX), "24855 days 4 hours");
}
