//! Permits revoked by operators.

use std::{convert::Infallible, future::pending, time::Duration};

use bytes::Bytes;
use futures_util::{StreamExt, stream};
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt, StreamBody, combinators::BoxBody};
use serde_json::Value;
use tower::{Layer, ServiceExt, service_fn};
use tower_turnstile::{
    Limit, LimitLayer, Limiter, LostErrorKind, OnLost, Permit, Refusal, RefusalKind,
    layer::{LostError, ResponseBody, Slot},
};
use tower_turnstile_operate::{
    Answers, By, KeyDigest, OperateErrorKind, Operator, Order, Outcome, PermitRow, PermitState,
    Revocation, Revoked,
};

use crate::{
    scene::{
        CHAT, HOUR, Orders as _, Patient, again_while, await_replicas, builder, connection,
        replica, replicas, soon,
    },
    support::{queue::wait_in_line, redis_server::RedisServer},
};

fn ada() -> By {
    By::new("ada", "runaway export").unwrap()
}

async fn revoke(operator: &Patient, permit: &Permit) -> Answers<PermitRow> {
    let whose = Revocation::Permit(permit.id().expect("it has a slot"));
    operator.revoke(&whose, &ada()).await.unwrap()
}

fn states(answers: &Answers<PermitRow>) -> Vec<PermitState> {
    answers.rows.iter().map(|row| row.state).collect()
}

/// Repeats a scene until all replicas have answered in time: of the others there are no rows.
async fn revoked(scene: impl AsyncFn() -> Answers<PermitRow>) -> Answers<PermitRow> {
    again_while(|answers: &Answers<PermitRow>| !answers.are_all(), scene).await
}

type Body = ResponseBody<BoxBody<Bytes, Infallible>>;

/// An endless stream of one frame, behind a layer.
async fn open(layer: &LimitLayer) -> (Body, Slot) {
    let service = service_fn(|request: Request<()>| async move {
        let slot = request.extensions().get::<Slot>().unwrap().clone();
        let frames = stream::pending::<Result<http_body::Frame<Bytes>, Infallible>>();
        let mut response = Response::new(BodyExt::boxed(StreamBody::new(frames)));
        response.extensions_mut().insert(slot);
        Ok::<_, Infallible>(response)
    });
    let service = layer.layer(service);
    let (head, body) = service
        .oneshot(Request::new(()))
        .await
        .unwrap()
        .into_parts();
    (body, head.extensions.get::<Slot>().unwrap().clone())
}

/// Its client sees the error, and another replica has its slot long before its lease ends.
#[tokio::test]
async fn a_stream_on_another_replica_ends_and_its_slot_is_anothers() {
    let server = RedisServer::start();
    let one = Limit::concurrent("one", 1).wait_up_to(HOUR);
    let (limiters, operator) = replicas(&server, 2).await;
    for on_lost in [OnLost::Abort, OnLost::Continue] {
        let answers = revoked(async || {
            let (mut body, slot) = open(&limiters[0].layer(&one).unwrap().on_lost(on_lost)).await;
            let waiter = wait_in_line(&limiters[1].semaphore(&one, "").unwrap()).await;
            let whose = Revocation::Permit(slot.id().expect("it has a slot"));
            let answers = operator.0.revoke(&whose, &ada()).await.unwrap();
            let error = soon(body.frame()).await.unwrap().unwrap_err();
            let lost = error.downcast_ref::<LostError>().expect("it is revoked");
            assert_eq!(lost.kind(), LostErrorKind::Revoked);
            soon(waiter).await.unwrap().release().await.unwrap();
            assert!(slot.is_lost());
            answers
        });
        let answers = answers.await;
        assert_eq!(states(&answers), [PermitState::Ended]);
        assert_eq!(answers.answered, 2);
        let row = &answers.rows[0];
        assert_eq!((&*row.limit, &*row.replica_label), ("one", "web-0"));
    }
}

/// As `turnstile run` does, whose operator would hear of nobody: it answers before it leaves.
#[tokio::test]
async fn a_process_that_ends_with_its_permit_answers_first() {
    let server = RedisServer::start();
    let limiter = replica(&server, "job").await;
    let operator = Patient::connect(&server.url()).await;
    let replica = await_replicas(&operator, 1).await.remove(0).replica;
    let semaphore = limiter.semaphore(Limit::concurrent("two", 2), "").unwrap();
    let permit = semaphore.acquire().await.unwrap();
    // Its task does not stop in time, so the answer takes a quarter of a second.
    let _other = semaphore.acquire().await.unwrap();
    let client = redis::Client::open(server.url()).unwrap();
    let mut heard = client.get_async_pubsub().await.unwrap();
    heard.psubscribe("turnstile:answer:*").await.unwrap();
    let ends = async {
        permit.lost().await;
        drop(permit);
        limiter.shutdown(Duration::ZERO).await;
        // Here the process would end.
        server.cli(&["PUBLISH", "turnstile:answer:end", "{}"]);
    };
    let (whose, by) = (Revocation::Replica(replica), ada());
    let (_, ()) = tokio::join!(operator.0.revoke(&whose, &by), ends);
    let mut heard = heard.on_message();
    let mut revoked = Vec::new();
    loop {
        let message = soon(heard.next()).await.unwrap();
        let message: Value = serde_json::from_slice(message.get_payload_bytes()).unwrap();
        match message["body"]["revoked"]["permits"].as_array() {
            Some(permits) => revoked.push(permits.len()),
            None => break,
        }
    }
    assert_eq!(revoked, [2], "before its end");
}

/// Its task is notified, and keeps the slot until it is done.
#[tokio::test]
async fn a_job_is_told_and_keeps_its_slot() {
    let server = RedisServer::start();
    let one = Limit::concurrent("one", 1);
    let (limiters, operator) = replicas(&server, 2).await;
    let semaphore = limiters[0].semaphore(&one, "").unwrap();
    let permit = semaphore.acquire().await.unwrap();
    let answers = revoke(&operator, &permit).await;
    assert_eq!(states(&answers), [PermitState::Held]);
    assert_eq!(permit.lost().await, LostErrorKind::Revoked);
    assert!(permit.is_lost());
    // The permit is still renewed.
    assert!(permit.deadline().is_some());
    limiters[1]
        .semaphore(&one, "")
        .unwrap()
        .try_acquire()
        .await
        .unwrap_err();
    permit.release().await.unwrap();
    let next = limiters[1]
        .semaphore(&one, "")
        .unwrap()
        .try_acquire()
        .await
        .unwrap();
    assert!(!next.is_lost());
}

/// A slot that serves several permits in turn: the order names a single permit.
#[tokio::test]
async fn under_reuse_the_successor_is_not_meant() {
    let limiter = Limiter::in_memory();
    let operator = Patient(Operator::of(&limiter));
    let semaphore = limiter
        .semaphore(Limit::concurrent("jobs", 1).reuse(), "acme")
        .unwrap();
    let first = semaphore.acquire().await.unwrap();
    let first_id = first.id().unwrap();
    assert_eq!(
        states(&revoke(&operator, &first).await),
        [PermitState::Held]
    );
    assert!(first.is_lost());
    drop(first);
    let second = semaphore.acquire().await.unwrap();
    assert_ne!(second.id(), Some(first_id));
    assert_eq!(
        second.id().unwrap().to_string(),
        format!("{first_id}.1"),
        "the slot is the same"
    );
    assert!(!second.is_lost());
    // A late order.
    let late = operator.revoke(&Revocation::Permit(first_id), &ada()).await;
    assert_eq!(late.unwrap_err().kind(), OperateErrorKind::NotFound);
    assert!(!second.is_lost());
    assert_eq!(
        states(&revoke(&operator, &second).await),
        [PermitState::Held]
    );
    assert!(second.is_lost());
}

/// Under several limits a permit has several ids. Each of them revokes the whole permit.
#[tokio::test]
async fn a_permit_of_several_limits_goes_whole() {
    let server = RedisServer::start();
    let limits = [Limit::concurrent("all", 5), Limit::concurrent("tenant", 2)];
    let (limiters, operator) = replicas(&server, 1).await;
    for limit in ["all", "tenant"] {
        let answers = revoked(async || {
            let layer = limiters[0].layer(limits.clone()).unwrap();
            let (mut body, _) = open(&layer).await;
            let id = operator.permits(limit, None).await.unwrap().rows[0].id;
            let whose = Revocation::Permit(id);
            let answers = operator.0.revoke(&whose, &ada()).await.unwrap();
            soon(body.frame()).await.unwrap().unwrap_err();
            for limit in ["all", "tenant"] {
                assert!(operator.permits(limit, None).await.unwrap().rows.is_empty());
            }
            answers
        });
        assert_eq!(states(&answers.await), [PermitState::Ended]);
    }
}

#[tokio::test]
async fn the_permits_of_a_caller_and_of_a_replica() {
    let server = RedisServer::start();
    let (limiters, operator) = replicas(&server, 3).await;
    let mut held = Vec::new();
    for limiter in &limiters {
        for key in ["acme", "other"] {
            held.push((
                key,
                limiter
                    .semaphore(CHAT, key)
                    .unwrap()
                    .acquire()
                    .await
                    .unwrap(),
            ));
        }
    }
    let waiting = {
        let full = Limit::concurrent("full", 1).wait_up_to(HOUR);
        let semaphore = limiters[0].semaphore(full, "acme").unwrap();
        held.push(("full", semaphore.acquire().await.unwrap()));
        wait_in_line(&semaphore).await
    };
    let lost = |held: &[(&str, Permit)]| -> Vec<bool> {
        held.iter().map(|(_, permit)| permit.is_lost()).collect()
    };
    let key = KeyDigest::of("chat", "acme");
    let limit = "chat".to_owned();
    let whose = Revocation::Key { limit, key };
    let answers = operator.revoke(&whose, &ada()).await.unwrap();
    assert_eq!(states(&answers), [PermitState::Held; 3]);
    assert!(answers.rows.iter().all(|row| row.key == key));
    assert_eq!(lost(&held), [true, false, true, false, true, false, false]);

    let rows = await_replicas(&operator, 3).await;
    let web_0 = rows.iter().find(|row| row.label == "web-0").unwrap();
    let whose = Revocation::Replica(web_0.replica.clone());
    let answers = operator.revoke(&whose, &ada()).await.unwrap();
    assert_eq!(states(&answers), [PermitState::Held; 3]);
    assert_eq!(lost(&held), [true, true, true, false, true, false, true]);
    drop(held);
    // A waiting request is not revoked.
    drop(soon(waiting).await.unwrap());
}

/// Before its response the call is cancelled and refused.
#[tokio::test]
async fn a_call_without_a_response_is_refused() {
    let limiter = builder("web-0").in_memory().unwrap();
    let operator = Operator::of(&limiter);
    let service = service_fn(|_: Request<()>| pending::<Result<Response<String>, Infallible>>());
    let service = limiter
        .layer(Limit::concurrent("calls", 1))
        .unwrap()
        .layer(service);
    let call = tokio::spawn(service.oneshot(Request::new(())));
    let id = loop {
        // The limit is known from the first request on.
        if let Ok(answers) = operator.permits("calls", None).await
            && let [row] = &answers.rows[..]
        {
            break row.id;
        }
        tokio::task::yield_now().await;
    };
    let answers = operator
        .revoke(&Revocation::Permit(id), &ada())
        .await
        .unwrap();
    assert_eq!(states(&answers), [PermitState::Ended]);
    let response = call.await.unwrap().unwrap();
    assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
    let refusal = response.extensions().get::<Refusal>().expect("a refusal");
    assert_eq!(refusal.kind(), RefusalKind::Revoked);
}

/// More permits than an answer has room for: the numbers are exact.
#[tokio::test]
async fn many_permits_are_revoked_and_counted() {
    let server = RedisServer::start();
    let (limiters, operator) = replicas(&server, 2).await;
    let many = Limit::concurrent("many", 1_000);
    let job = limiters[0]
        .semaphore(&many, "")
        .unwrap()
        .acquire()
        .await
        .unwrap();
    let replica = operator.replicas().await.unwrap().rows;
    let replica = replica.iter().find(|row| row.label == "web-0").unwrap();
    let order = Order::Revoke(Revocation::Replica(replica.replica.clone()));
    let layer = limiters[0].layer(&many).unwrap();
    let revoke_300 = async || {
        let mut streams = Vec::new();
        for _ in 0..300 {
            streams.push(open(&layer).await);
        }
        match operator.0.order(&order, &ada()).await.unwrap() {
            Outcome::Revoked(revoked) => revoked,
            outcome => panic!("{outcome:?}"),
        }
    };
    // Streams may end too late to be counted so.
    let is_late = |revoked: &Revoked| !revoked.permits.are_all() || revoked.running > 1;
    let revoked = again_while(is_late, revoke_300).await;
    assert_eq!((revoked.ended, revoked.running), (300, 1));
    assert!(revoked.permits.left_out > 0 && !revoked.is_done());
    drop(job);
}

#[tokio::test]
async fn what_nobody_holds_is_not_found() {
    let server = RedisServer::start();
    let (limiters, operator) = replicas(&server, 2).await;
    let semaphore = limiters[0].semaphore(CHAT, "acme").unwrap();
    let permit = semaphore.acquire().await.unwrap();
    let id = permit.id().unwrap();
    permit.release().await.unwrap();
    let key = KeyDigest::of("chat", "acme");
    for whose in [
        Revocation::Permit(id),
        Revocation::Key {
            limit: "chat".into(),
            key,
        },
        Revocation::Key {
            limit: "unknown".into(),
            key,
        },
        Revocation::Replica("-".repeat(16)),
    ] {
        let error = operator.revoke(&whose, &ada()).await.unwrap_err();
        assert_eq!(error.kind(), OperateErrorKind::NotFound, "{whose:?}");
    }
    for whose in [
        Revocation::Key {
            limit: String::new(),
            key,
        },
        Revocation::Key {
            limit: "x".repeat(129),
            key,
        },
        Revocation::Replica("web-0".into()),
    ] {
        let error = operator.revoke(&whose, &ada()).await.unwrap_err();
        assert_eq!(error.kind(), OperateErrorKind::Value, "{whose:?}");
    }
}

/// An order that an attacker has recorded and publishes again, before or after it expires.
#[tokio::test]
async fn an_order_does_not_count_twice() {
    let server = RedisServer::start();
    let limiter = replica(&server, "web-0").await;
    let operator = Patient::connect(&server.url()).await;
    await_replicas(&operator, 1).await;
    let client = redis::Client::open(server.url()).unwrap();
    let mut recorder = client.get_async_pubsub().await.unwrap();
    recorder.psubscribe("turnstile:control:*").await.unwrap();
    let semaphore = limiter.semaphore(CHAT, "acme").unwrap();
    let first = semaphore.acquire().await.unwrap();
    let key = KeyDigest::of("chat", "acme");
    let whose = Revocation::Key {
        limit: "chat".into(),
        key,
    };
    operator.revoke(&whose, &ada()).await.unwrap();
    assert!(first.is_lost());
    let second = semaphore.acquire().await.unwrap();
    // The recorder subscribed after the questions of `await_replicas`.
    let recorded = recorder.on_message().next().await.unwrap();
    let (channel, order) = (
        recorded.get_channel_name().to_owned(),
        recorded.get_payload_bytes(),
    );
    let text = std::str::from_utf8(order).unwrap();
    assert!(text.contains("revoke"), "{text}");
    let mut publisher = connection(&server.url()).await;
    let replay = async |message: &str, publisher: &mut redis::aio::MultiplexedConnection| {
        let mut publish = redis::cmd("PUBLISH");
        let publish = publish.arg(&channel).arg(message);
        let () = publish.query_async(publisher).await.unwrap();
    };
    replay(text, &mut publisher).await;
    // With another number it is a different order, but it has expired.
    let mut stale: serde_json::Value = serde_json::from_str(text).unwrap();
    stale["number"] = 1_000.into();
    stale["not_after_ms"] = (stale["not_after_ms"].as_u64().unwrap() - 60_000).into();
    replay(&stale.to_string(), &mut publisher).await;
    // Messages are read in order: this answer follows all earlier ones.
    operator.replicas().await.unwrap();
    assert!(!second.is_lost());
}
