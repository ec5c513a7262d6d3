//! A wire between one agent and the orchestrator that can be cut, made late, or stopped in one direction.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use anyhow::Result;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{broadcast, watch};
use tokio::task::JoinSet;

use super::plan::Weather;

/// Bytes taken at once; what is taken and not passed on is lost with a cut, as in the buffers of a real path.
const CHUNK: usize = 16 * 1024;

/// Runs until it is dropped.
pub(super) struct Proxy {
    address: SocketAddr,
    weather: watch::Sender<Option<Weather>>,
    cut: broadcast::Sender<()>,
    _accepting: JoinSet<()>,
}

impl Proxy {
    /// A wire to `target`.
    pub(super) async fn to(target: SocketAddr) -> Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let address = listener.local_addr()?;
        let (weather, seen) = watch::channel(None);
        let cut = broadcast::Sender::new(4);
        let cuts = cut.clone();
        let mut accepting = JoinSet::new();
        accepting.spawn(async move {
            let mut open = JoinSet::new();
            loop {
                let from = tokio::select! {
                    accepted = listener.accept() => match accepted { Ok((from, _)) => from, Err(_) => continue },
                    Some(_) = open.join_next() => continue,
                };
                if *seen.borrow() != Some(Weather::Cut) {
                    open.spawn(serve(from, target, seen.clone(), cuts.subscribe()));
                }
            }
        });
        Ok(Self { address, weather, cut, _accepting: accepting })
    }

    pub(super) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Lets the wire be like this from now on; none is well.
    pub(super) fn set(&self, weather: Option<Weather>) {
        self.weather.send_replace(weather);
        if weather == Some(Weather::Cut) {
            self.cut_open();
        }
    }

    /// Ends the connections that are open; new ones are let through.
    pub(super) fn cut_open(&self) {
        // Nobody may be connected.
        let _ = self.cut.send(());
    }
}

async fn serve(
    from: TcpStream,
    target: SocketAddr,
    weather: watch::Receiver<Option<Weather>>,
    mut cut: broadcast::Receiver<()>,
) {
    let Ok(to) = TcpStream::connect(target).await else { return };
    let _ = (from.set_nodelay(true), to.set_nodelay(true));
    let (from_agent, to_agent) = from.into_split();
    let (from_server, to_server) = to.into_split();
    tokio::select! {
        () = pass(from_agent, to_server, weather.clone(), Weather::StallUp) => {}
        () = pass(from_server, to_agent, weather, Weather::StallDown) => {}
        _ = cut.recv() => {}
    }
}

/// Passes bytes on in one direction, which stops while `stall` is the weather.
async fn pass(
    mut from: impl AsyncReadExt + Unpin,
    mut to: impl AsyncWriteExt + Unpin,
    mut weather: watch::Receiver<Option<Weather>>,
    stall: Weather,
) {
    let mut buffer = vec![0; CHUNK];
    loop {
        let Ok(count @ 1..) = from.read(&mut buffer).await else { return };
        let now = *weather.borrow();
        if let Some(Weather::Delay(late)) = now {
            tokio::time::sleep(late.min(Duration::from_secs(1))).await;
        }
        if weather.wait_for(|weather| *weather != Some(stall)).await.is_err() {
            return;
        }
        if to.write_all(&buffer[..count]).await.is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn pair() -> (Proxy, TcpStream, TcpStream) {
        let server = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let proxy = Proxy::to(server.local_addr().unwrap()).await.unwrap();
        let agent = TcpStream::connect(proxy.address).await.unwrap();
        let (orchestrator, _) = server.accept().await.unwrap();
        (proxy, agent, orchestrator)
    }

    #[tokio::test]
    async fn a_stall_holds_one_direction_back_and_loses_nothing() {
        let (proxy, mut agent, mut orchestrator) = pair().await;
        proxy.set(Some(Weather::StallUp));
        agent.write_all(b"up").await.unwrap();
        orchestrator.write_all(b"down").await.unwrap();
        let mut read = [0; 4];
        agent.read_exact(&mut read).await.unwrap();
        assert_eq!(&read, b"down");
        // The answer came, so the request would have come by now.
        assert!(orchestrator.try_read(&mut read).is_err());
        proxy.set(None);
        orchestrator.read_exact(&mut read[..2]).await.unwrap();
        assert_eq!(&read[..2], b"up");
    }

    #[tokio::test]
    async fn a_cut_ends_what_is_open_and_refuses_what_is_new_until_it_is_over() {
        let (proxy, mut agent, mut orchestrator) = pair().await;
        proxy.set(Some(Weather::Cut));
        let mut read = [0; 1];
        assert!(!matches!(agent.read(&mut read).await, Ok(1)));
        assert!(!matches!(orchestrator.read(&mut read).await, Ok(1)));
        let mut refused = TcpStream::connect(proxy.address).await.unwrap();
        assert!(!matches!(refused.read(&mut read).await, Ok(1)));
    }
}
