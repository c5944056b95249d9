//! Tenants of fair limits: their shares as operators change them, and their rows.

use std::time::Duration;

use tokio::time::sleep;
use tower_turnstile::{Acquire, Key, Limit, Limiter, Permit, Semaphore};
use tower_turnstile_operate::{
    Explanation, KeyDigest, OperateError, OperateErrorKind, Order, Outcome, Setting, Target,
    TenantDigest, TenantRow,
};

use crate::{
    scene::{
        CHAT, HOUR, Orders as _, Patient, ada, again_while, await_replicas, builder, replicas,
        scenes, seen, until,
    },
    support::{queue::wait_in_line, redis_server::RedisServer},
};

/// One slot for all callers.
pub(crate) const GPU: Limit = Limit::concurrent("gpu", 1).wait_up_to(HOUR).fair();

fn gpu(limiter: &Limiter, tenant: &'static str) -> Semaphore {
    limiter
        .semaphore(GPU, Key::SHARED)
        .unwrap()
        .tenant(tenant)
        .unwrap()
}

fn share_of(tenant: &'static str, share: u32, length: Duration) -> Order {
    Order::Share {
        limit: "gpu".to_owned(),
        tenant: TenantDigest::of(tenant),
        share,
        length,
        seen: None,
    }
}

async fn rows(operator: &Patient, limit: &str, key: Option<KeyDigest>) -> Vec<TenantRow> {
    operator.tenants(limit, key).await.unwrap().rows
}

/// A holder, and waiters: two of globex, then three of acme on two replicas.
async fn crowd(limiters: &[Limiter; 2]) -> (Permit, Vec<Acquire>) {
    let [one, other] = limiters;
    let held = gpu(one, "acme").acquire().await.unwrap();
    let mut waiters = Vec::new();
    for semaphore in [
        gpu(one, "globex").share(2).unwrap(),
        gpu(one, "globex").share(2).unwrap(),
        gpu(one, "acme"),
        gpu(other, "acme"),
        gpu(other, "acme"),
    ] {
        waiters.push(wait_in_line(&semaphore).await);
        // Ages are in milliseconds.
        sleep(Duration::from_millis(5)).await;
    }
    (held, waiters)
}

#[tokio::test]
async fn a_share_is_set_and_ends() {
    for (server, limiters, operator) in scenes().await {
        let _crowd = crowd(&limiters).await;
        let replicas = if server.is_some() { 2 } else { 1 };
        let acme = TenantDigest::of("acme");
        let share = async || rows(&operator, "gpu", None).await[0].share;
        assert_eq!(share().await, 1);
        let outcome = operator.order(&share_of("acme", 5, HOUR), &ada()).await;
        assert_eq!(outcome.unwrap(), Outcome::Done { replicas });
        let shares = rows(&operator, "gpu", None).await;
        let shares = shares.iter().map(|row| (row.tenant, row.share));
        let expected = [(acme, 5), (TenantDigest::of("globex"), 2)];
        assert!(shares.eq(expected));

        let now = seen(&operator).await;
        let target = Target::tenant("gpu", acme);
        let [one] = now.all() else { panic!("{now:?}") };
        assert_eq!(
            (&one.target, one.setting, &*one.author),
            (&target, Setting::Share(5), "ada")
        );
        // The limit itself has no override.
        assert!(now.tokens(&Target::limit("gpu")).is_empty());
        let of_limit = operator.unset(&now, &Target::limit("gpu"), &ada()).await;
        assert_eq!(of_limit.unwrap_err().kind(), OperateErrorKind::NotFound);
        operator.unset(&now, &target, &ada()).await.unwrap();
        assert_eq!(share().await, 1);
        let log = operator.log().await.unwrap();
        let edited = &log[0].edits[0];
        assert_eq!(
            (&edited.target, edited.before, edited.after),
            (&target, Some(Setting::Share(5)), None)
        );

        let short = share_of("acme", 7, Duration::from_secs(1));
        // It may be confirmed too late.
        let is_refused = |outcome: &Result<Outcome, _>| outcome.is_err();
        let order = async || operator.0.order(&short, &ada()).await;
        again_while(is_refused, order).await.unwrap();
        // It ends by itself.
        until(async || share().await == 1).await;
    }
}

#[tokio::test]
async fn a_share_that_was_changed_meanwhile_is_refused() {
    for (_server, limiters, operator) in scenes().await {
        drop(gpu(&limiters[0], "acme").acquire().await.unwrap());
        let order = share_of("acme", 5, HOUR);
        operator.order(&order, &ada()).await.unwrap();
        let Order::Share {
            limit,
            tenant,
            length,
            ..
        } = order
        else {
            unreachable!()
        };
        let second = Order::Share {
            limit,
            tenant,
            share: 6,
            length,
            seen: Some(Vec::new()),
        };
        let error = operator.order(&second, &ada()).await.unwrap_err();
        assert_eq!(error.kind(), OperateErrorKind::Conflict);
        let text = error.to_string();
        assert!(text.contains("share 5") && text.contains(&tenant.to_string()));
    }
}

#[tokio::test]
async fn a_share_that_nobody_can_have_is_an_error() {
    for (_server, limiters, operator) in scenes().await {
        drop(gpu(&limiters[0], "acme").acquire().await.unwrap());
        let chat = limiters[0].semaphore(CHAT, "acme").unwrap();
        drop(chat.acquire().await.unwrap());
        let of = |limit: &str, tenant: &'static str, share| Order::Share {
            limit: limit.to_owned(),
            tenant: TenantDigest::of(tenant),
            share,
            length: HOUR,
            seen: None,
        };
        for (order, kind) in [
            (of("chat", "acme", 5), OperateErrorKind::NotFair),
            (of("unknown", "acme", 5), OperateErrorKind::UnknownLimit),
            (of("", "acme", 5), OperateErrorKind::Value),
            (of("gpu", "", 5), OperateErrorKind::Value),
            (of("gpu", "acme", 0), OperateErrorKind::Value),
            (of("gpu", "acme", 1_001), OperateErrorKind::Value),
            (
                share_of("acme", 5, Duration::from_millis(999)),
                OperateErrorKind::Value,
            ),
            (
                Order::Resume {
                    target: Target::tenant("gpu", TenantDigest::of("acme")),
                },
                OperateErrorKind::Value,
            ),
            (
                Order::Set {
                    target: Target::tenant("gpu", TenantDigest::of("acme")),
                    value: 5,
                    burst: None,
                    length: HOUR,
                    seen: None,
                },
                OperateErrorKind::Value,
            ),
        ] {
            let error = operator.order(&order, &ada()).await.unwrap_err();
            assert_eq!(error.kind(), kind, "{order:?}: {error}");
        }
        assert!(seen(&operator).await.all().is_empty());
        let error: OperateError = operator.tenants("chat", None).await.unwrap_err();
        assert_eq!(error.kind(), OperateErrorKind::NotFair);
    }
    let server = RedisServer::start();
    let operator = Patient::connect(&server.url()).await.0;
    let error = operator.order(&share_of("acme", 5, HOUR), &ada()).await;
    assert_eq!(
        error.unwrap_err().to_string(),
        "there is no operable replica"
    );
}

#[tokio::test]
async fn tenants_are_counted_over_all_replicas() {
    for (server, limiters, operator) in scenes().await {
        let (held, mut waiters) = crowd(&limiters).await;
        let limit = operator.limits().await.unwrap().rows.remove(0);
        assert!(limit.fair && !limit.differs);
        let tenants = rows(&operator, "gpu", None).await;
        let counts = |row: &TenantRow| (row.tenant, row.held, row.waiting, row.replicas);
        let of_acme = if server.is_some() { 2 } else { 1 };
        let expected = [
            (TenantDigest::of("acme"), 1, 3, of_acme),
            (TenantDigest::of("globex"), 0, 2, 1),
        ];
        assert!(tenants.iter().map(counts).eq(expected), "{tenants:?}");
        assert!(tenants.iter().all(|row| row.tenant_text.is_none()));
        assert!(tenants.iter().all(|row| row.oldest_wait_ms.is_some()));
        assert!(tenants.iter().all(|row| row.debt_ms == Some(0)));
        let key = KeyDigest::of("gpu", Key::SHARED);
        assert_eq!(rows(&operator, "gpu", Some(key)).await.len(), 2);
        let other = KeyDigest::of("gpu", "other");
        assert!(rows(&operator, "gpu", Some(other)).await.is_empty());

        // The first grant costs globex, with a share of 2, half a second in advance. Virtual time moves by a sixth of it.
        drop(held);
        let granted = waiters.remove(0).await.unwrap();
        let tenants = rows(&operator, "gpu", None).await;
        let behind: Vec<_> = tenants.iter().map(|row| row.debt_ms).collect();
        assert_eq!(behind, [Some(0), Some(416)]);
        assert_eq!((tenants[1].held, tenants[1].waiting), (1, 1));
        drop((granted, waiters));
    }
}

/// Its permit is paid in advance, though it waits no longer.
#[tokio::test]
async fn a_tenant_that_only_holds_is_behind() {
    for (_server, limiters, operator) in scenes().await {
        let held = gpu(&limiters[0], "acme").acquire().await.unwrap();
        let globex = wait_in_line(&gpu(&limiters[0], "globex")).await;
        let _acme = wait_in_line(&gpu(&limiters[0], "acme")).await;
        drop(held);
        let _granted = globex.await.unwrap();
        let tenants = rows(&operator, "gpu", None).await;
        let facts = |row: &TenantRow| (row.tenant, row.held, row.waiting, row.debt_ms);
        let expected = [
            (TenantDigest::of("acme"), 0, 1, Some(0)),
            (TenantDigest::of("globex"), 1, 0, Some(666)),
        ];
        assert!(tenants.iter().map(facts).eq(expected), "{tenants:?}");
    }
}

/// Without a key nothing says which of them a tenant is behind in.
#[tokio::test]
async fn tenants_are_behind_under_one_key() {
    for (_server, limiters, operator) in scenes().await {
        let mut kept = Vec::new();
        for key in ["a", "b"] {
            let acme = limiters[0]
                .semaphore(GPU, key)
                .unwrap()
                .tenant("acme")
                .unwrap();
            kept.push((acme.acquire().await.unwrap(), wait_in_line(&acme).await));
        }
        let tenants = rows(&operator, "gpu", None).await;
        let row = &tenants[0];
        assert_eq!((row.held, row.waiting, row.debt_ms), (2, 2, None));
        let tenants = rows(&operator, "gpu", Some(KeyDigest::of("gpu", "a"))).await;
        let row = &tenants[0];
        assert_eq!((row.held, row.waiting, row.debt_ms), (1, 1, Some(0)));
    }
}

#[tokio::test]
async fn tenants_are_shown_where_keys_are() {
    let server = RedisServer::start();
    let shows = builder("web-0").show_keys().connect(&server.url()).await;
    let shows = shows.unwrap();
    let hides = builder("web-1").connect(&server.url()).await.unwrap();
    let operator = Patient::connect(&server.url()).await;
    await_replicas(&operator, 2).await;
    let _held = gpu(&shows, "acme").acquire().await.unwrap();
    let _acme = wait_in_line(&gpu(&hides, "acme")).await;
    let _globex = wait_in_line(&gpu(&hides, "globex")).await;
    let none = hides.semaphore(GPU, Key::SHARED).unwrap();
    let _none = [wait_in_line(&none).await, wait_in_line(&none).await];
    let tenants = rows(&operator, "gpu", None).await;
    let texts = tenants.iter().map(|row| row.tenant_text.as_deref());
    let expected = [Some(""), Some("acme"), None];
    assert_eq!(texts.collect::<Vec<_>>(), expected);
    let permits = operator.permits("gpu", None).await.unwrap();
    let of = |row: usize| {
        let row = &permits.rows[row];
        (row.tenant, row.tenant_text.as_deref())
    };
    assert_eq!(of(0), (Some(TenantDigest::of("acme")), Some("acme")));
    assert_eq!(of(2), (Some(TenantDigest::of("globex")), None));
    assert_eq!(of(3), (Some(TenantDigest::of("")), Some("")));
}

#[tokio::test]
async fn a_request_that_waits_is_explained_by_its_tenant() {
    for (_server, limiters, operator) in scenes().await {
        let _crowd = crowd(&limiters).await;
        let key = KeyDigest::of("gpu", Key::SHARED);
        let ahead = |why: &Explanation| -> Vec<_> {
            let rows = why.permits.rows.iter();
            rows.map(|row| row.tenant_ahead).collect()
        };
        let expected = [None, Some(0), Some(1), Some(0), Some(1), Some(2)];
        // Rows are in the order of their ages, as of each replica's answer.
        let is_mixed = |why: &Explanation| ahead(why) != expected;
        let ask = async || operator.explain("gpu", key).await.unwrap();
        let tenants = again_while(is_mixed, ask)
            .await
            .tenants
            .expect("it is fair");
        assert_eq!((tenants.rows.len(), tenants.rows[0].waiting), (2, 3));
        // Under other limits nothing is said of tenants.
        let chat = limiters[0].semaphore(CHAT, "acme").unwrap();
        let _held = chat.acquire().await.unwrap();
        let why = operator.explain("chat", KeyDigest::of("chat", "acme"));
        let why = why.await.unwrap();
        assert_eq!((why.tenants, why.permits.rows[0].tenant), (None, None));
    }
}

/// A user without this right sees the rest.
#[tokio::test]
async fn how_far_tenants_are_behind_may_be_forbidden() {
    let server = RedisServer::start();
    let (limiters, _operator) = replicas(&server, 1).await;
    let acme = gpu(&limiters[0], "acme");
    let _kept = (acme.acquire().await.unwrap(), wait_in_line(&acme).await);
    server.cli(&[
        "ACL",
        "SETUSER",
        "asks",
        "on",
        ">password",
        "~*",
        "&*",
        "+@all",
        "-zmscore",
    ]);
    let url = server.url().replace("://", "://asks:password@");
    let operator = Patient::connect(&url).await;
    let tenants = rows(&operator, "gpu", None).await;
    assert_eq!((tenants[0].waiting, tenants[0].debt_ms), (1, None));
}
