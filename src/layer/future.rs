//! The response future: a turn in the line, then the service.

use std::{
    fmt,
    future::Future,
    mem,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use http::{Request, Response, request::Parts};
use http_body::Body;
use pin_project_lite::pin_project;
use tower_service::Service;

use super::{
    body::ResponseBody,
    gate::{Gate, Turn},
    guard::Guard,
    refusal::Refusal,
};
use crate::permit::Permit;

pin_project! {
    /// Response future of a [`Limited`](super::Limited) service.
    ///
    /// Dropping it gives up the place in the line, or the slot.
    #[project = ResponseFutureProj]
    pub struct ResponseFuture<S, Q>
    where
        S: Service<Request<Q>>,
    {
        gate: Arc<Gate>,
        #[pin]
        state: State<S, Q>,
    }
}

pin_project! {
    #[project = StateProj]
    enum State<S, Q>
    where
        S: Service<Request<Q>>,
    {
        // The service is ready, and is called once the request has its slot.
        Waiting {
            turn: Turn,
            call: Option<(S, Request<Q>)>,
        },
        Running {
            #[pin]
            future: S::Future,
            guard: Guard,
            head: Option<Box<Parts>>,
        },
        Done,
    }
}

impl<S, Q> ResponseFuture<S, Q>
where
    S: Service<Request<Q>>,
{
    pub(super) fn new(gate: Arc<Gate>, service: S, request: Request<Q>) -> Self {
        let (turn, request) = gate.turn(request);
        let state = State::Waiting {
            turn,
            call: Some((service, request)),
        };
        Self { gate, state }
    }
}

impl<S, Q, R> Future for ResponseFuture<S, Q>
where
    S: Service<Request<Q>, Response = Response<R>>,
    R: Body,
{
    type Output = Result<Response<ResponseBody<R>>, S::Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let ResponseFutureProj { gate, mut state } = self.project();
        if let StateProj::Waiting { turn, call } = state.as_mut().project() {
            let turn = ready!(turn.poll(gate, cx));
            let Some((service, request)) = call.take() else {
                panic!("`ResponseFuture` polled after a panic");
            };
            match turn {
                Ok(permit) => state.set(State::run(gate, service, request, permit)),
                Err(error) => {
                    state.set(State::Done);
                    let (head, _) = request.into_parts();
                    let refusal = Refusal::new(gate, &error);
                    return Poll::Ready(Ok(gate.refuse(refusal, Some(&head))));
                }
            }
        }
        let StateProj::Running {
            future,
            guard,
            head,
        } = state.as_mut().project()
        else {
            panic!("`ResponseFuture` polled after completion");
        };
        let result = match ready!(guard.poll(cx, |cx| future.poll(cx))) {
            Some(result) => {
                let guard = mem::take(guard);
                result.map(|response| gate.hand_over(guard, response))
            }
            None => Ok(gate.refuse(Refusal::lost(gate), head.as_deref())),
        };
        state.set(State::Done);
        Poll::Ready(result)
    }
}

impl<S, Q> State<S, Q>
where
    S: Service<Request<Q>>,
{
    fn run(
        gate: &Arc<Gate>,
        mut service: S,
        mut request: Request<Q>,
        permit: Option<Permit>,
    ) -> Self {
        let (mut guard, mut head) = (Guard::default(), None);
        if let Some(permit) = permit {
            guard = gate.admit(permit, &mut request);
            (head, request) = gate.spare_head(request);
        }
        let future = service.call(request);
        Self::Running {
            future,
            guard,
            head,
        }
    }
}

impl<S, Q> fmt::Debug for ResponseFuture<S, Q>
where
    S: Service<Request<Q>>,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResponseFuture").finish_non_exhaustive()
    }
}
