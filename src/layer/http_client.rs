//! Makes a client with its own request and response types, such as reqwest's, a service that can be layered.
//!
//! Tests: `tests/layer/clients.rs`.

use std::{
    fmt,
    future::Future,
    marker::PhantomData,
    pin::Pin,
    task::{Context, Poll},
};

use futures_util::future::{Either, Ready, ready};
use http::{Request, Response};
use pin_project_lite::pin_project;
use tower_service::Service;

/// Adapts a client with its own types to a service with the types of the crate `http`.
///
/// `Q` is the client's request type, and `B` the body of its responses. The type of the layered client can be named, so the
/// client can be kept in a struct:
///
/// ```
/// use tower::Layer;
/// use tower_turnstile::{Limit, Limiter, layer::{HttpClient, Limited}};
///
/// type PartnerClient = Limited<HttpClient<reqwest::Client, reqwest::Request, reqwest::Body>>;
///
/// struct Partner {
///     client: PartnerClient,
/// }
///
/// let layer = Limiter::in_memory().layer(Limit::concurrent("partner", 20))?;
/// let partner = Partner {
///     client: layer.layer(HttpClient::new(reqwest::Client::new())),
/// };
/// # drop(partner.client);
/// # Ok::<(), tower_turnstile::ConfigError>(())
/// ```
pub struct HttpClient<C, Q, B> {
    client: C,
    types: PhantomData<fn(Q) -> B>,
}

impl<C, Q, B> HttpClient<C, Q, B> {
    /// Creates a service that sends its requests through this client.
    pub fn new(client: C) -> Self {
        Self {
            client,
            types: PhantomData,
        }
    }

    /// Returns a reference to the client.
    pub fn get_ref(&self) -> &C {
        &self.client
    }
}

impl<C: Clone, Q, B> Clone for HttpClient<C, Q, B> {
    fn clone(&self) -> Self {
        Self::new(self.client.clone())
    }
}

impl<C: fmt::Debug, Q, B> fmt::Debug for HttpClient<C, Q, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("HttpClient").field(&self.client).finish()
    }
}

impl<C, Q, B, P> Service<Request<P>> for HttpClient<C, Q, B>
where
    C: Service<Q>,
    C::Response: Into<Response<B>>,
    Q: TryFrom<Request<P>>,
    Q::Error: Into<C::Error>,
{
    type Response = Response<B>;
    type Error = C::Error;
    type Future = HttpClientFuture<C::Future, B>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), C::Error>> {
        self.client.poll_ready(cx)
    }

    /// A request that cannot be converted, for example for lack of a host, fails with the client's error.
    fn call(&mut self, request: Request<P>) -> Self::Future {
        let sent = match Q::try_from(request) {
            Ok(request) => Either::Left(self.client.call(request)),
            Err(error) => Either::Right(ready(Err(error.into()))),
        };
        let body = PhantomData;
        HttpClientFuture { sent, body }
    }
}

pin_project! {
    /// Future of an [`HttpClient`].
    pub struct HttpClientFuture<F: Future, B> {
        // Failed already, if the request has no form of the client.
        #[pin]
        sent: Either<F, Ready<F::Output>>,
        body: PhantomData<fn() -> B>,
    }
}

impl<F, R, E, B> Future for HttpClientFuture<F, B>
where
    F: Future<Output = Result<R, E>>,
    R: Into<Response<B>>,
{
    type Output = Result<Response<B>, E>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.project().sent.poll(cx).map_ok(Into::into)
    }
}

impl<F: Future, B> fmt::Debug for HttpClientFuture<F, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HttpClientFuture").finish_non_exhaustive()
    }
}
