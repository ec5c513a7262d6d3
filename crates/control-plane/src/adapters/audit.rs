//! The audit log of secrets, for people.

use async_trait::async_trait;
use kici_api::dto::audit::{AuditFilter, AuditView};
use kici_api::page::{PageRequest, Slice};
use kici_api::ports::{Answer, Audit, Caller};
use kici_store::{Store, model};

use super::{fault, views};

/// The audit log over the store.
pub(crate) struct AuditBook {
    pub(crate) store: Store,
}

#[async_trait]
impl Audit for AuditBook {
    async fn list(&self, _caller: &Caller, filter: &AuditFilter, page: PageRequest) -> Answer<Slice<AuditView>> {
        let wanted = model::SecretAuditFilter {
            run_id: filter.run,
            job_id: filter.job,
            action: filter.action.clone(),
            outcome: filter.outcome.clone(),
            actor_id: filter
                .actor
                .as_ref()
                .map(|actor| actor.split_once(':').map_or(actor.as_str(), |(_, id)| id).to_owned()),
            from: filter.from,
            to: filter.to,
        };
        let listed = self.store.secret_audit_list(wanted, views::page(page)).await.map_err(fault::store)?;
        Ok(views::slice(listed, |row| AuditView {
            id: row.id,
            actor: format!("{}:{}", row.entry.actor_type, row.entry.actor_id),
            action: row.entry.action,
            outcome: row.entry.outcome,
            scope: row.entry.scope,
            key: row.entry.key,
            run_id: row.entry.run_id,
            job_id: row.entry.job_id,
            metadata: row.entry.metadata,
            created_at: row.created_at,
        }))
    }
}
