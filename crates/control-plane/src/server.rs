//! The one listener: REST, webhooks and metrics over HTTP/1.1 or HTTP/2, gRPC over HTTP/2, told apart by content type.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::ConnectInfo;
use http::{Request, Response, header};
use hyper::body::Incoming;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use hyper_util::server::graceful::GracefulShutdown;
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;
use tower::ServiceExt as _;

/// A dead peer is noticed within keep-alive plus time-out.
const KEEP_ALIVE: Duration = Duration::from_secs(10);
const KEEP_ALIVE_TIMEOUT: Duration = Duration::from_secs(5);
/// A client that does not send its request head by then is cut off.
const HEADER_TIMEOUT: Duration = Duration::from_secs(15);
/// Bytes a sender may have under way on one stream and on one connection; enough for logs on a fast network.
const STREAM_WINDOW: u32 = 1024 * 1024;
const CONNECTION_WINDOW: u32 = 8 * 1024 * 1024;
/// Streams an agent may open on its connection: its session, one log stream per job and some calls.
const MAX_STREAMS: u32 = 1024;

/// The two halves that share the listener.
#[derive(Clone)]
pub(crate) struct Halves {
    pub(crate) http: Router,
    pub(crate) grpc: Router,
}

impl Halves {
    async fn answer(self, mut request: Request<Incoming>, peer: SocketAddr) -> Result<Response<Body>, Infallible> {
        request.extensions_mut().insert(ConnectInfo(peer));
        let half = if is_grpc(&request) { self.grpc } else { self.http };
        half.oneshot(request.map(Body::new)).await
    }
}

fn is_grpc<B>(request: &Request<B>) -> bool {
    let kind = request.headers().get(header::CONTENT_TYPE);
    kind.is_some_and(|kind| kind.as_bytes().starts_with(b"application/grpc"))
}

/// Serves until `stop`, then lets open requests finish for at most `grace`.
pub(crate) async fn serve(listener: TcpListener, halves: Halves, stop: CancellationToken, grace: Duration) {
    let builder = builder();
    let graceful = GracefulShutdown::new();
    let connections = tokio_util::task::TaskTracker::new();
    loop {
        let accepted = tokio::select! {
            () = stop.cancelled() => break,
            accepted = listener.accept() => accepted,
        };
        match accepted {
            Ok((stream, peer)) => {
                serve_connection(&builder, &graceful, &connections, stream, peer, halves.clone());
            }
            Err(error) => {
                // Out of file descriptors, mostly: accepting again at once would spin.
                tracing::warn!(%error, "a connection cannot be accepted");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
    drop(listener);
    connections.close();
    if tokio::time::timeout(grace, graceful.shutdown()).await.is_err() {
        tracing::warn!("connections were still open at the end of the grace period");
    }
}

fn builder() -> auto::Builder<TokioExecutor> {
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder.http1().timer(TokioTimer::new()).header_read_timeout(HEADER_TIMEOUT);
    builder
        .http2()
        .timer(TokioTimer::new())
        .keep_alive_interval(KEEP_ALIVE)
        .keep_alive_timeout(KEEP_ALIVE_TIMEOUT)
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_concurrent_streams(MAX_STREAMS);
    builder
}

fn serve_connection(
    builder: &auto::Builder<TokioExecutor>,
    graceful: &GracefulShutdown,
    connections: &tokio_util::task::TaskTracker,
    stream: TcpStream,
    peer: SocketAddr,
    halves: Halves,
) {
    // Frames are small and answered at once; waiting to fill packets would cost each of them up to 40 ms.
    let _ = stream.set_nodelay(true);
    let service = hyper::service::service_fn(move |request| halves.clone().answer(request, peer));
    let connection = builder.serve_connection(TokioIo::new(stream), service).into_owned();
    let watched = graceful.watch(connection);
    connections.spawn(async move {
        if let Err(error) = watched.await {
            tracing::debug!(%peer, %error, "connection ended");
        }
    });
}
