//! The exchange of a claim code for this agent's token, before it registers for the first time.

use std::time::Duration;

use kici_engine::ids::AgentId;
use kici_protocol::agent::agent_bootstrap_client::AgentBootstrapClient;
use kici_protocol::agent::{AgentCredentials, ClaimCredentialsRequest, claim_credentials_response};
use secrecy::{ExposeSecret, SecretString};
use tokio::time::timeout;
use tonic::{Code, Request};

use crate::config::Config;
use crate::session::{EXIT_CONFIG, chain, connect, pause};

/// Longest wait for the answer.
const ANSWER_LIMIT: Duration = Duration::from_secs(20);

/// There will be no token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NoToken {
    /// Why.
    pub message: String,
    /// What the program exits with.
    pub exit: u8,
}

fn refused(message: impl Into<String>) -> NoToken {
    NoToken { message: message.into(), exit: EXIT_CONFIG }
}

/// Makes the configuration that of the agent which the code is for. Without a code, or with a token, nothing is asked. Asks with
/// the same code until there is an answer.
///
/// # Errors
/// [`NoToken`] when the orchestrator refuses the code: whoever started this agent must start another one.
pub(crate) async fn exchange(config: &mut Config) -> Result<(), NoToken> {
    // Never again, and in no dump of the configuration.
    let Some(code) = config.scaled.claim_code.take().filter(|_| config.agent_token.is_none()) else { return Ok(()) };
    let mut tries = 0;
    let credentials = loop {
        match ask(&config.orchestrator_url, &code).await? {
            Some(credentials) => break credentials,
            None => tokio::time::sleep(pause(tries, false)).await,
        }
        tries += 1;
    };
    let AgentCredentials { agent_token, agent_id, orchestrator_url, labels } = credentials;
    let id = AgentId::new(agent_id)
        .map_err(|error| refused(format!("the orchestrator names an agent that is none: {error}")))?;
    tracing::info!(agent = %id, "the claim code was exchanged for a token");
    config.agent_id = Some(id);
    config.agent_token = Some(SecretString::from(agent_token));
    config.labels = labels;
    config.scaled.managed = true;
    if !orchestrator_url.is_empty() {
        config.orchestrator_url = orchestrator_url;
    }
    Ok(())
}

/// None: it is worth another try.
async fn ask(url: &str, code: &SecretString) -> Result<Option<AgentCredentials>, NoToken> {
    let channel = match connect(url).await {
        Ok(channel) => channel,
        Err(error) => {
            tracing::warn!(url, error = chain(&error), "the orchestrator cannot be reached for a token");
            return Ok(None);
        }
    };
    let request = Request::new(ClaimCredentialsRequest { claim_code: code.expose_secret().to_owned() });
    let answer = match timeout(ANSWER_LIMIT, AgentBootstrapClient::new(channel).claim_credentials(request)).await {
        Ok(Ok(answer)) => answer.into_inner(),
        Ok(Err(status)) => {
            let permanent =
                [Code::FailedPrecondition, Code::Unimplemented, Code::InvalidArgument, Code::PermissionDenied];
            if permanent.contains(&status.code()) {
                return Err(refused(format!("the orchestrator takes no claim code: {}", status.message())));
            }
            tracing::warn!(code = %status.code(), why = chain(&status), "a claim code was not answered");
            return Ok(None);
        }
        Err(_) => {
            tracing::warn!("a claim code was not answered in time");
            return Ok(None);
        }
    };
    match answer.result {
        Some(claim_credentials_response::Result::Credentials(credentials)) => Ok(Some(credentials)),
        Some(claim_credentials_response::Result::ErrorReason(reason)) => Err(refused(format!(
            "the orchestrator refuses the claim code: it is {reason}; start the agent with another one"
        ))),
        None => Err(refused("the orchestrator's answer to the claim code is of a newer version; update the agent")),
    }
}
