//! The response future: a turn in the queue, then the service.
//!
//! Tests: `tests/layer/releases.rs`, `refusals.rs`.

use std::{
    fmt,
    future::Future,
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
    gates::{Admission, Admitted, Gate, Refused},
    keys::CallDeadline,
    refusal::{Form, Refusal},
    response::{SlotGuard, Tied},
};
use crate::permit::{Permit, Share};

pin_project! {
    /// Response future of a [`Limited`](super::Limited) service.
    ///
    /// Dropping the future leaves the queue, or releases the slot.
    #[project = ResponseFutureProj]
    pub struct ResponseFuture<S, Q>
    where
        S: Service<Request<Q>>,
    {
        gate: Arc<Gate>,
        #[pin]
        phase: Phase<S, Q>,
    }
}

pin_project! {
    #[project = PhaseProj]
    enum Phase<S, Q>
    where
        S: Service<Request<Q>>,
    {
        // The service is ready, and is called once the request has its slot.
        Waiting {
            admission: Admission,
            call: Option<(S, Parts, Q)>,
        },
        Running {
            #[pin]
            future: S::Future,
            share: Option<Share>,
            admitted: Admitted,
        },
        // Running, and may still be refused.
        Tied {
            future: Tied<S::Future>,
            admitted: Admitted,
            form: Form,
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
        let (mut head, body) = request.into_parts();
        CallDeadline::note(&mut head);
        Self {
            phase: Phase::Waiting {
                admission: gate.admission(&head),
                call: Some((service, head, body)),
            },
            gate,
        }
    }

    /// The request's body, while it waits for its admission.
    pub(super) fn waiting(self: Pin<&mut Self>) -> Option<&mut Q> {
        match self.project().phase.project() {
            PhaseProj::Waiting { call, .. } => call.as_mut().map(|(.., body)| body),
            _ => None,
        }
    }

    /// Refuses the request, which leaves the queue if it waits.
    pub(super) fn refuse<R>(
        self: Pin<&mut Self>,
        refusal: impl FnOnce(&Gate) -> Refusal,
    ) -> Response<ResponseBody<R>> {
        let ResponseFutureProj { gate, mut phase } = self.project();
        let head = match phase.as_mut().project() {
            PhaseProj::Waiting { call, .. } => call.take(),
            _ => None,
        }
        .map(|(_, head, _)| head);
        phase.set(Phase::Done);
        let form = head.as_ref().map(Form::of).unwrap_or_default();
        gate.refuse(refusal(gate), form, head.as_ref())
    }
}

impl<S, Q> ResponseFuture<S, Q>
where
    S: Service<Request<Q>, Future: Send + 'static>,
{
    /// Calls the service once the request is admitted. An error: the request is kept until it is
    /// [refused](Self::refuse).
    #[inline]
    pub(super) fn poll_admission(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Result<(), Refused>> {
        let ResponseFutureProj { gate, mut phase } = self.project();
        if let PhaseProj::Waiting { admission, call } = phase.as_mut().project() {
            let permit = ready!(admission.poll(gate, cx))?;
            let Some((service, head, body)) = call.take() else {
                panic!("`ResponseFuture` polled after a panic");
            };
            phase.set(Phase::run(gate, service, head, body, permit));
        }
        Poll::Ready(Ok(()))
    }
}

impl<S, Q, R> Future for ResponseFuture<S, Q>
where
    S: Service<Request<Q>, Response = Response<R>, Future: Send + 'static>,
    R: Body + Send + 'static,
{
    type Output = Result<Response<ResponseBody<R>>, S::Error>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        if let Err(reason) = ready!(self.as_mut().poll_admission(cx)) {
            return Poll::Ready(Ok(self.refuse(|gate| gate.refusal_of(&reason))));
        }
        let ResponseFutureProj { gate, mut phase } = self.project();
        let result = match phase.as_mut().project() {
            PhaseProj::Running {
                future,
                share,
                admitted,
            } => {
                let result = ready!(future.poll(cx));
                let guard = SlotGuard::Plain(share.take());
                result.map(|response| gate.hand_over(guard, admitted, response, Form::Http))
            }
            PhaseProj::Tied {
                future,
                admitted,
                form,
                head,
            } => {
                let result = match ready!(future.poll(cx, |future, cx| future.poll(cx))) {
                    Ok(Ok(response)) => future.detach().map(|tie| Ok((tie, response))),
                    Ok(Err(error)) => Ok(Err(error)),
                    Err(kind) => Err(kind),
                };
                match result {
                    Ok(result) => result.map(|(tie, response)| {
                        gate.hand_over(SlotGuard::Tied(tie), admitted, response, *form)
                    }),
                    Err(kind) => {
                        let refusal = gate.refusal(kind.into());
                        Ok(gate.refuse(refusal, *form, head.as_deref()))
                    }
                }
            }
            PhaseProj::Waiting { .. } | PhaseProj::Done => {
                panic!("`ResponseFuture` polled after completion")
            }
        };
        phase.set(Phase::Done);
        Poll::Ready(result)
    }
}

impl<S, Q> Phase<S, Q>
where
    S: Service<Request<Q>, Future: Send + 'static>,
{
    fn run(
        gate: &Arc<Gate>,
        mut service: S,
        mut head: Parts,
        body: Q,
        permit: Option<Permit>,
    ) -> Self {
        let (guard, admitted) = gate.admit(permit, &mut head);
        match guard {
            SlotGuard::Plain(share) => Self::Running {
                future: service.call(Request::from_parts(head, body)),
                share,
                admitted,
            },
            SlotGuard::Tied(tie) => {
                let form = Form::of(&head);
                let kept_head = gate.refuse.is_some().then(|| Box::new(head.clone()));
                let future = service.call(Request::from_parts(head, body));
                Self::Tied {
                    future: Tied::new(future, tie),
                    admitted,
                    form,
                    head: kept_head,
                }
            }
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
