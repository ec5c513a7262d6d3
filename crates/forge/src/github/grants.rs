//! Tokens for jobs: made for one use, with what the use needs, and ended when it is over.
//! <https://docs.github.com/en/rest/apps/apps#create-an-installation-access-token-for-an-app>

use std::collections::BTreeMap;

use kici_engine::time::Ts;
use secrecy::SecretString;
use serde::Deserialize;
use serde_json::json;

use super::api::Api;
use super::auth::App;
use crate::forge::{BasicAuth, ForgeError, Minted};

/// User name of a token at git over HTTP.
pub(super) const TOKEN_USER: &str = "x-access-token";

/// Permissions by name.
type Permissions = BTreeMap<String, String>;

#[derive(Deserialize)]
struct Answer {
    token: String,
    expires_at: Ts,
    #[serde(default)]
    permissions: Permissions,
    #[serde(default)]
    repositories: Vec<Repository>,
}

#[derive(Deserialize)]
struct Repository {
    full_name: String,
}

impl App {
    /// A token for one repository. Where the installation has less than what is asked for, GitHub refuses the whole request: then
    /// the token gets what there is, and the caller sees what is missing.
    pub(super) async fn grant(&self, api: &Api, repo: &str, wanted: &Permissions) -> Result<Minted, ForgeError> {
        let installation = match self.known_installation(repo) {
            Some(known) => known,
            None => self.installation(api, repo, &self.statement()?).await?,
        };
        match self.token_for(api, installation, repo, wanted).await {
            Err(ForgeError::NotFound { .. }) => {}
            other => return other,
        }
        // Either the App was installed again under another number, or it lacks a permission.
        let installation = self.installation(api, repo, &self.statement()?).await?;
        let held = self.permissions_of(api, installation, repo).await?;
        let less: Permissions = wanted
            .iter()
            .filter_map(|(name, level)| {
                let held = held.get(name)?;
                Some((name.clone(), if rank(held) < rank(level) { held } else { level }.clone()))
            })
            .collect();
        if less.is_empty() {
            let what = format!("access to `{repo}`");
            let message = "the App's installation has none of the permissions that are asked for".to_owned();
            return Err(ForgeError::Refused { what, status: 422, message });
        }
        self.token_for(api, installation, repo, &less).await
    }

    async fn token_for(
        &self,
        api: &Api,
        installation: u64,
        repo: &str,
        permissions: &Permissions,
    ) -> Result<Minted, ForgeError> {
        let (_, name) = repo.split_once('/').unwrap_or_default();
        let body = json!({"repositories": [name], "permissions": permissions});
        let url = api.url(&["app/installations", &installation.to_string(), "access_tokens"])?;
        let answer: Answer = api.post(&format!("access to `{repo}`"), url, &self.statement()?, &body).await?;
        let password = SecretString::from(answer.token);
        if let Some(other) = answer.repositories.iter().find(|of| !of.full_name.eq_ignore_ascii_case(repo)) {
            // Best effort: nobody gets it.
            let _ = self.revoke(api, &password).await;
            let what = format!("access to `{repo}`");
            return Err(ForgeError::NotFound { what, hint: format!("the token would be for `{}`", other.full_name) });
        }
        Ok(Minted {
            auth: BasicAuth { username: TOKEN_USER.to_owned(), password },
            permissions: answer.permissions,
            expires_at: answer.expires_at,
        })
    }

    async fn permissions_of(&self, api: &Api, installation: u64, repo: &str) -> Result<Permissions, ForgeError> {
        #[derive(Deserialize)]
        struct Installation {
            #[serde(default)]
            permissions: Permissions,
        }
        let url = api.url(&["app/installations", &installation.to_string()])?;
        let found: Installation =
            api.get(&format!("installation of the App on `{repo}`"), url, &self.statement()?).await?;
        Ok(found.permissions)
    }

    /// Ends a token. GitHub takes the token itself as the proof.
    pub(super) async fn revoke(&self, api: &Api, token: &SecretString) -> Result<(), ForgeError> {
        match api.delete("the end of a token", api.url(&["installation/token"])?, token).await {
            // It is over already.
            Err(ForgeError::Refused { status: 401, .. } | ForgeError::NotFound { .. }) => Ok(()),
            other => other,
        }
    }
}

fn rank(level: &str) -> u8 {
    match level {
        "read" => 1,
        "write" => 2,
        "admin" => 3,
        _ => 0,
    }
}
