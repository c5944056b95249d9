//! The examples' reactions to bad options, and the example without options.

use std::fs;

use tempfile::TempDir;

use crate::support::replica::run_to_end;

#[test]
fn bad_options_are_refused_in_one_line() {
    let folder = TempDir::new().expect("a temporary folder");
    let file = |name: &str, text: &str| {
        let path = folder.path().join(name);
        fs::write(&path, text).expect("a file");
        path.to_str().expect("text").to_owned()
    };
    let tokens = "limits.tokens = { rate = 9, per = '1s', unrouted = true }";
    let good = file("good", &format!("unlimited = true\n{tokens}"));
    let typo = file(
        "typo",
        &format!("unlimited = true\n{}", tokens.replace("tokens", "tokns")),
    );
    let slots = "unlimited = true\nlimits.tokens = { concurrent = 9, unrouted = true }";
    let slots = file("slots", slots);
    let two_faults = "limits.chat.concurrent = 0\nlimits.opens.rate = 60";
    let two_faults = file("two-faults", two_faults);
    let syntax = file("syntax", "store.url = 'redis://:canary-51c2@");
    let nowhere = file("nowhere", "store.url = 'http://127.0.0.1'");
    let listen = "127.0.0.1:0";
    let up = "http://127.0.0.1:9";
    for (options, named) in [
        (&["--listen", listen, "--upstream", up][..], "--config"),
        (&["--listen", listen, "--config", &good], "--upstream"),
        (
            &["--upstream", "localhost", "--config", &good],
            "--upstream",
        ),
        (
            &["--upstream", "ftp://localhost", "--config", &good],
            "--upstream",
        ),
        (
            &["--upstream", "http://localhost/v1?a", "--config", &good],
            "--upstream",
        ),
        (
            &["--upstream", "http://u:p@localhost", "--config", &good],
            "--upstream",
        ),
        (
            &[
                "--upstream",
                "http://localhost,NOBODY_SETS_THIS",
                "--config",
                &good,
            ],
            "NOBODY_SETS_THIS",
        ),
        (
            &["--upstream", up, "--config", &good, "--budget", "tokns"],
            "limits.tokns",
        ),
        (
            &[
                "--upstream",
                up,
                "--config",
                &good,
                "--callers",
                "/not/there",
            ],
            "--callers /not/there",
        ),
        (
            &["--upstream", up, "--config", &good, "--max-request", "4MB"],
            "--max-request",
        ),
        (
            &[
                "--upstream",
                up,
                "--config",
                &good,
                "--monitor",
                "192.0.2.1:1",
            ],
            "--monitor",
        ),
        (
            &["--upstream", up, "--config", "/not/there"],
            "--config /not/there",
        ),
        (
            &["--upstream", up, "--config", &two_faults],
            "limits.opens.per",
        ),
        (
            &["--upstream", up, "--config", &two_faults],
            "limits.chat.concurrent",
        ),
        (&["--upstream", up, "--config", &typo], "limits.tokens"),
        (&["--upstream", up, "--config", &slots], "limits.tokens"),
        (&["--upstream", up, "--config", &syntax], "line 1"),
        (&["--upstream", up, "--config", &nowhere], "store.url"),
        (
            &["--upstream", up, "--config", &good, "--listen", "nowhere"],
            "--listen",
        ),
        (
            &["--upstream", up, "--config", &good, "--grace", "soon"],
            "--grace",
        ),
        (
            &["--upstream", up, "--config", &good, "--head-timeout", "0s"],
            "--head-timeout",
        ),
        (
            &["--upstream", up, "--config", &good, "--silence", "0s"],
            "--silence",
        ),
        (
            &["--upstream", up, "--config", &good, "--idle", "0s"],
            "--idle",
        ),
    ] {
        let (code, errors) = run_to_end("turnstile-gateway", options);
        assert_eq!(code, Some(2), "{options:?}: {errors}");
        let lines = errors.trim_end().lines().count();
        assert_eq!(lines, 1, "{options:?}: {errors}");
        assert!(errors.contains(named), "{options:?}: {errors}");
        assert!(!errors.contains("canary"), "{errors}");
    }
}
