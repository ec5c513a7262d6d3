//! Sources.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use async_trait::async_trait;
use kici_api::dto::SecretText;
use kici_api::dto::sources::{AddSource, DeliveryAccepted, SetSecrets, SourceKind, SourceView, TriggerSource};
use kici_api::ports::{Answer, Caller, Sources};
use kici_api::problem::{Code, Problem};
use kici_engine::ids::{IdSource, SourceId};
use kici_events::{Call, Inbox, Planner, Route, SourceBook, typed};
use kici_forge::github::check_private_key;
use kici_forge::{Headers, SourceConfig, SourceSecrets};
use kici_store::{Store, model};
use secrecy::{ExposeSecret as _, SecretString};
use serde_json::json;

use super::{DEFAULT_ORG, fault};
use crate::sealing::Sealing;

/// Sources over the store.
pub(crate) struct SourceShelf {
    pub(crate) store: Store,
    pub(crate) sources: SourceBook,
    pub(crate) sealing: Arc<Sealing>,
    pub(crate) ids: Arc<dyn IdSource>,
    pub(crate) inbox: Arc<Inbox>,
    pub(crate) planner: Arc<Planner>,
    pub(crate) local_paths: Vec<PathBuf>,
}

/// Names of secrets that a source may have.
const WEBHOOK: &str = "webhook_secret";
const PRIVATE_KEY: &str = "private_key";

impl SourceShelf {
    fn view(&self, source: &model::Source) -> SourceView {
        let mut secrets = Vec::new();
        if let Ok(open) = self.sources.open(source) {
            if !open.secrets.webhook.is_empty() {
                secrets.push(WEBHOOK.to_owned());
            }
            if open.secrets.private_key.is_some() {
                secrets.push(PRIVATE_KEY.to_owned());
            }
        }
        let webhook_path = match (source.kind, typed(source).map(|typed| typed.config)) {
            (_, Ok(SourceConfig::Github(github))) => format!("/webhooks/github/{}", github.app_id),
            _ => format!("/webhooks/{}/{}", source.org, source.name),
        };
        SourceView {
            id: source.id,
            name: source.name.clone(),
            kind: match source.kind {
                model::SourceKind::Github => SourceKind::Github,
                model::SourceKind::Generic => SourceKind::Generic,
                model::SourceKind::Local => SourceKind::Local,
            },
            routing_key: source.routing_key.clone(),
            config: source.config.clone(),
            secrets,
            webhook_path,
            enabled: source.enabled,
            version: source.version,
            created_at: source.created_at,
        }
    }

    /// A source of the caller's scope, by name or id.
    async fn find(&self, caller: &Caller, name: &str) -> Answer<model::Source> {
        let found = match name.parse::<SourceId>() {
            Ok(id) => self.store.source_by_id(id).await.map_err(fault::store)?.filter(|s| s.deleted_at.is_none()),
            Err(_) => self.store.source_get(DEFAULT_ORG.to_owned(), name.to_owned()).await.map_err(fault::store)?,
        };
        found
            .filter(|source| caller.sees(&source.routing_key))
            .ok_or_else(|| Problem::not_found(format!("source `{name}`")))
    }

    fn seal(&self, id: SourceId, secrets: &SourceSecrets) -> Answer<Option<String>> {
        self.sealing.seal_source(id, secrets).map_err(|error| {
            tracing::error!(%error, "secrets cannot be sealed");
            Problem::unavailable("secrets cannot be sealed now; check secrets.key", 10)
        })
    }

    fn checked(&self, request: &AddSource) -> Answer<SourceConfig> {
        let kind = match request.kind {
            SourceKind::Github => kici_forge::SourceKind::Github,
            SourceKind::Generic => kici_forge::SourceKind::Generic,
            SourceKind::Local => kici_forge::SourceKind::Local,
        };
        let rejected = |error: kici_forge::ConfigError| {
            Problem::rejected(format!("config.{}", error.field), format!("{}; {}", error.problem, error.remedy))
        };
        let config = SourceConfig::from_json(kind, request.config.clone()).map_err(rejected)?;
        if let SourceConfig::Local(local) = &config {
            local.check_allowed(&self.local_paths).and_then(|()| local.check_repository()).map_err(rejected)?;
        }
        Ok(config)
    }
}

/// A name that stands in paths: `[a-z0-9][a-z0-9._-]{0,63}`, and not the one that GitHub's route has.
fn check_name(name: &str) -> Answer<()> {
    let legal = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || matches!(b, b'.' | b'_' | b'-');
    let starts = name.bytes().next().is_some_and(|b| b.is_ascii_lowercase() || b.is_ascii_digit());
    if starts && name.len() <= 64 && name.bytes().all(legal) {
        Ok(())
    } else {
        Err(Problem::rejected("name", "must be 1 to 64 of `a-z 0-9 . _ -`, starting with a letter or digit"))
    }
}

fn read(given: &BTreeMap<String, SecretText>) -> Answer<SourceSecrets> {
    let mut secrets = SourceSecrets::default();
    for (name, value) in given {
        match name.as_str() {
            WEBHOOK if value.expose().len() < 8 => {
                return Err(Problem::rejected(format!("secrets.{name}"), "must have at least 8 characters"));
            }
            WEBHOOK => secrets.webhook.push(SecretString::from(value.expose().to_owned())),
            PRIVATE_KEY => {
                let pem = SecretString::from(value.expose().to_owned());
                check_private_key(&pem).map_err(|problem| Problem::rejected(format!("secrets.{name}"), problem))?;
                secrets.private_key = Some(pem);
            }
            _ => {
                let detail = format!("is not a secret of a source; there are {WEBHOOK} and {PRIVATE_KEY}");
                return Err(Problem::rejected(format!("secrets.{name}"), detail));
            }
        }
    }
    Ok(secrets)
}

/// Webhook secrets of a source that are valid at the same time.
const MAX_VALID: usize = 4;

/// Puts new secrets in the place of old ones. The newest webhook secret stands first.
fn replace(secrets: &mut SourceSecrets, given: SourceSecrets, keep_old: bool) {
    if !given.webhook.is_empty() {
        let old = std::mem::replace(&mut secrets.webhook, given.webhook);
        if keep_old {
            let known: Vec<String> = secrets.webhook.iter().map(|s| s.expose_secret().to_owned()).collect();
            secrets.webhook.extend(old.into_iter().filter(|secret| !known.iter().any(|k| k == secret.expose_secret())));
            secrets.webhook.truncate(MAX_VALID);
        }
    }
    if given.private_key.is_some() {
        secrets.private_key = given.private_key;
    }
}

#[async_trait]
impl Sources for SourceShelf {
    async fn list(&self, caller: &Caller) -> Answer<Vec<SourceView>> {
        let sources = self.store.source_list(DEFAULT_ORG.to_owned()).await.map_err(fault::store)?;
        Ok(sources.iter().filter(|source| caller.sees(&source.routing_key)).map(|source| self.view(source)).collect())
    }

    async fn get(&self, caller: &Caller, name: &str) -> Answer<SourceView> {
        Ok(self.view(&self.find(caller, name).await?))
    }

    async fn add(&self, _caller: &Caller, request: &AddSource) -> Answer<SourceView> {
        check_name(&request.name)?;
        let config = self.checked(request)?;
        let secrets = read(&request.secrets)?;
        let id = SourceId::mint(&*self.ids);
        let source =
            kici_forge::Source { id, org: DEFAULT_ORG.to_owned(), name: request.name.clone(), version: 1, config };
        let sealed = self.seal(id, &secrets)?;
        let new = model::NewSource {
            id,
            org: source.org.clone(),
            name: source.name.clone(),
            kind: match request.kind {
                SourceKind::Github => model::SourceKind::Github,
                SourceKind::Generic => model::SourceKind::Generic,
                SourceKind::Local => model::SourceKind::Local,
            },
            routing_key: source.routing_key(),
            config: source.config.to_json(),
            sealed_secrets: sealed,
            enabled: true,
        };
        let stored = self.store.source_create(new).await.map_err(fault::store)?;
        if let (Some(repo), Ok(open)) = (source.local_repo(), self.sources.open(&stored)) {
            // Hooks find its workflows from now on; a repository without commits yet has none.
            if let Err(error) = self.planner.register_default_branch(&open, &repo).await {
                tracing::info!(source = stored.name, %error, "no workflows were registered from the default branch");
            }
        }
        Ok(self.view(&stored))
    }

    async fn remove(&self, caller: &Caller, name: &str) -> Answer<()> {
        let source = self.find(caller, name).await?;
        match self.store.source_remove(source.id).await.map_err(fault::store)? {
            true => Ok(()),
            false => Err(Problem::not_found(format!("source `{name}`"))),
        }
    }

    async fn set_enabled(&self, caller: &Caller, name: &str, enabled: bool) -> Answer<SourceView> {
        let source = self.find(caller, name).await?;
        if source.enabled == enabled {
            return Ok(self.view(&source));
        }
        let change = model::SourceChange { enabled: Some(enabled), ..model::SourceChange::default() };
        let changed = self.store.source_update(source.id, source.version, change).await.map_err(fault::store)?;
        Ok(self.view(&changed))
    }

    async fn set_secrets(&self, caller: &Caller, name: &str, request: &SetSecrets) -> Answer<SourceView> {
        if request.secrets.is_empty() {
            return Err(Problem::rejected("secrets", format!("must name at least one of {WEBHOOK} and {PRIVATE_KEY}")));
        }
        let source = self.find(caller, name).await?;
        let given = read(&request.secrets)?;
        let mut secrets =
            self.sources.open(&source).map_err(|error| Problem::new(Code::Conflict, error.to_string()))?.secrets;
        replace(&mut secrets, given, request.keep_old);
        let sealed = self.seal(source.id, &secrets)?;
        let change = model::SourceChange { sealed_secrets: sealed, ..model::SourceChange::default() };
        let changed = self.store.source_update(source.id, source.version, change).await.map_err(fault::store)?;
        Ok(self.view(&changed))
    }

    async fn trigger(&self, caller: &Caller, name: &str, request: &TriggerSource) -> Answer<DeliveryAccepted> {
        let stored = self.find(caller, name).await?;
        let open = self.sources.open(&stored).map_err(|error| Problem::new(Code::Conflict, error.to_string()))?;
        let repo = open.source.local_repo().ok_or_else(|| {
            let detail = format!("source `{name}` is not local; its forge sends the pushes. Use `run trigger` instead");
            Problem::new(Code::Conflict, detail)
        })?;
        let forge = self.sources.forge(&open).map_err(|error| fault::forge(&error))?;
        let head = forge.head(&repo, request.git_ref.as_deref()).await.map_err(|error| fault::forge(&error))?;
        let git_ref = head.branch.as_ref().map_or_else(|| "HEAD".to_owned(), |branch| format!("refs/heads/{branch}"));
        let body = json!({
            "ref": git_ref,
            "before": "0".repeat(head.sha.len()),
            "after": head.sha,
            "pusher": {"name": caller.actor.to_string()},
        });
        let call = Call {
            route: Route::Named { org: stored.org.clone(), source: stored.name.clone() },
            headers: Headers::from_iter([
                ("content-type", "application/json".to_owned()),
                ("x-event-type", "push".to_owned()),
                ("x-delivery-id", format!("trigger:{}", self.ids.uuid())),
            ]),
            remote: None,
            // A document of four plain fields.
            body: serde_json::to_vec(&body).unwrap_or_default().into(),
            request_id: caller.request_id.clone(),
        };
        let accepted = self.inbox.accept_own(call).await.map_err(fault::refusal)?;
        Ok(DeliveryAccepted { delivery_id: accepted.id })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_that_cannot_work_are_refused_by_name_and_never_repeated() {
        for (name, value, field) in [
            (WEBHOOK, "1234567", "secrets.webhook_secret"),
            (PRIVATE_KEY, "hush", "secrets.private_key"),
            ("token", "hush", "secrets.token"),
        ] {
            let problem = read(&[(name.to_owned(), SecretText::new(value))].into()).unwrap_err();
            assert_eq!(problem.errors[0].field, field);
            assert!(!format!("{problem:?}").contains(value), "{problem:?}");
        }
    }
}
