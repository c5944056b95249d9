//! SIGHUP reloads the file, as in a service.

use std::fs;

use crate::{
    scene::{Scene, until_in_use},
    support::{alone, soon},
};

#[test]
fn a_reloaded_file_applies_to_those_who_wait_and_to_newcomers() {
    alone(async {
        let scene = Scene::new(&[]).await;
        let (first, _) = scene.granted("gpu", "key=beta").await;
        let mut second = scene.queued("gpu", "key=beta").await;
        let text = fs::read_to_string(scene.file.path()).unwrap();
        let raised = text.replace(
            "[limits.gpu]\n    concurrent = 1",
            "[limits.gpu]\n    concurrent = 2",
        );
        let more = "[limits.more]\nconcurrent = 1\nwait = '1h'\nfair = true\nunrouted = true\n";
        fs::write(scene.file.path(), raised.clone() + more).unwrap();
        scene.serve.hang_up();
        assert_eq!(second.outcome().await.0, "granted");
        scene.granted("more", "tenant=acme").await;
        // Without a limit, its holders stay.
        let without = raised.replace("[limits.gpu]", "[limits.other]");
        fs::write(scene.file.path(), without).unwrap();
        scene.serve.hang_up();
        soon(scene.serve.until_logged("turnstile: reloaded", 2)).await;
        assert_eq!(scene.post("/slots/gpu", "key=beta").await.status, 404);
        let gpu = scene.gpu().await;
        until_in_use(&gpu, 2, 0).await;
        drop((first, second));
        until_in_use(&gpu, 0, 0).await;
    });
}

/// What makes a limit fair cannot be taken away.
const FAIR: &str = "fair = { by = { header = 'x-tenant' }, shares = { acme = 3 } }
    require_tenant = true";

#[test]
fn a_faulty_file_and_what_cannot_change_change_nothing() {
    alone(async {
        let scene = Scene::new(&[]).await;
        let text = fs::read_to_string(scene.file.path()).unwrap();
        let raised = text.replace("concurrent = 1", "concurrent = 9");
        for (count, (from, to, fault)) in [
            ("[limits.gpu]", "[limits.gpu", "unclosed"),
            ("wait = '1h'", "wait = 'long'", "expected a duration"),
            (
                "lease = '5m'",
                "lease = '4m'",
                "store: cannot change while it is in use",
            ),
            (FAIR, "", "the fairness of limit `fair` cannot change"),
        ]
        .into_iter()
        .enumerate()
        {
            assert!(raised.contains(from));
            fs::write(scene.file.path(), raised.replace(from, to)).unwrap();
            scene.serve.hang_up();
            let words = "not reloaded, the old limits stay in force: ";
            soon(scene.serve.until_logged(words, count + 1)).await;
            soon(scene.serve.until_logged(fault, 1)).await;
        }
        // A limit is as before.
        let (holder, _) = scene.granted("gpu", "key=beta").await;
        let waiter = scene.queued("gpu", "key=beta").await;
        drop((holder, waiter));
        fs::remove_file(scene.file.path()).unwrap();
        scene.serve.hang_up();
        soon(scene.serve.until_logged("not reloaded", 5)).await;
    });
}
