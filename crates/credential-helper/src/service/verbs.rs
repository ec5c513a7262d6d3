//! The verbs of `git` over the socket: `get`, `erase`, `token`, `open`, `close`.

use std::sync::Arc;

use async_trait::async_trait;
use serde::Serialize;
use serde_json::Value as Json;

use super::GitCredentials;
use crate::grants::GrantId;
use crate::server::{Conversation, Service};
use crate::wire::git::Close;
use crate::wire::{self, Code, Refusal};

/// The verbs of `git` over the socket.
pub struct GitService(pub Arc<GitCredentials>);

struct GitConversation {
    credentials: Arc<GitCredentials>,
    /// What this caller opened: it closes with the connection.
    open: Vec<GrantId>,
}

#[async_trait]
impl Service for GitService {
    fn meet(&self) -> Box<dyn Conversation> {
        Box::new(GitConversation { credentials: Arc::clone(&self.0), open: Vec::new() })
    }
}

fn answer(value: impl Serialize) -> Result<Json, Refusal> {
    serde_json::to_value(value).map_err(|_| Refusal::new(Code::Failed, "the answer cannot be written"))
}

#[async_trait]
impl Conversation for GitConversation {
    async fn call(&mut self, verb: &str, body: Json) -> Result<Json, Refusal> {
        match verb {
            "get" => answer(self.credentials.get(&wire::arguments(body)?).await?),
            "erase" => {
                self.credentials.erase(&wire::arguments(body)?);
                Ok(Json::Null)
            }
            "token" => answer(self.credentials.token(wire::arguments(body)?).await?),
            "open" => {
                let (id, window) = self.credentials.open(wire::arguments(body)?).await?;
                self.open.push(id);
                answer(window)
            }
            "close" => {
                let Close { window } = wire::arguments(body)?;
                let id: GrantId =
                    window.parse().map_err(|_| Refusal::new(Code::Usage, "the window is not one that was opened"))?;
                // Only its own: to close somebody else's would break their push.
                if let Some(at) = self.open.iter().position(|open| *open == id) {
                    self.open.remove(at);
                    self.credentials.close(id).await;
                }
                Ok(Json::Null)
            }
            _ => Err(Refusal::new(Code::Usage, "this agent does not know this verb of git")),
        }
    }

    async fn end(&mut self) {
        self.credentials.close_all(&std::mem::take(&mut self.open)).await;
    }
}
