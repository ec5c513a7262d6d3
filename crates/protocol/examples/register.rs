//! Registers a draining agent, which is offered no jobs, and prints the orchestrator's first answer.
//!
//! `cargo run --package kici-protocol --example register -- http://127.0.0.1:4000 kici_agent_...`

use kici_protocol::PROTOCOL_VERSION;
use kici_protocol::agent::agent_gateway_client::AgentGatewayClient;
use kici_protocol::agent::{AgentFrame, Register, agent_frame::Frame};
use tonic::Request;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [url, token] = arguments.as_slice() else {
        return Err("usage: register URL TOKEN".into());
    };
    let mut gateway = AgentGatewayClient::connect(url.clone()).await?;

    let register = Register {
        agent_id: "example".into(),
        platform: std::env::consts::OS.into(),
        arch: std::env::consts::ARCH.into(),
        version: env!("CARGO_PKG_VERSION").into(),
        max_concurrency: 1,
        protocol_version: PROTOCOL_VERSION,
        draining: true,
        ..Register::default()
    };
    let first = AgentFrame { seq: 1, frame: Some(Frame::Register(register)) };
    let mut request = Request::new(tokio_stream::iter([first]));
    request.metadata_mut().insert("authorization", format!("Bearer {token}").parse()?);

    let mut answers = gateway.session(request).await?.into_inner();
    println!("{:#?}", answers.message().await?);
    Ok(())
}
