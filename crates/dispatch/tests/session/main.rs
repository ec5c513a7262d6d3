//! Sessions of agents against a dispatcher over a real store: the acceptance list of dispatch, by number.

mod claims;
mod crashes;
mod ending;
mod fanout;
mod handover;
mod inventory;
mod placing;
mod reboot;
mod registration;
mod scaling;
mod services;
mod siblings;
mod support;
mod turns;

use kici_protocol::agent::FrameNack;
use kici_protocol::agent::orchestrator_frame::Frame as Down;
use support::Agent;

async fn nack(agent: &mut Agent) -> FrameNack {
    match agent.next().await {
        Down::FrameNack(nack) => nack,
        other => panic!("a refusal was due, not {other:?}"),
    }
}
