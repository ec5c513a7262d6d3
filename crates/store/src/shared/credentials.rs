//! What jobs declare for git, and the audit log of secrets.

use diesel::prelude::*;
use diesel_async::RunQueryDsl;
use kici_engine::ids::{JobId, RunId};
use kici_engine::lock::GitCredentials;
use kici_engine::time::Ts;
use serde_json::Value as Json;

use super::backend::{Conn, Db};
use super::rows::{clean, clean_opt, next};
use super::schema::{job_git_credentials, secret_audit_log};
use crate::StoreError;
use crate::advance::RunState;
use crate::ctx::Ctx;
use crate::model::{Cursor, Listed, NewSecretAudit, Page, SecretAudit, SecretAuditFilter};
use crate::types::{DbId, DbTs, Doc};

#[derive(Insertable)]
#[diesel(table_name = job_git_credentials, check_for_backend(Db))]
struct DeclaredRow {
    job_id: DbId,
    declared: Doc<GitCredentials>,
}

/// Keeps what newly queued jobs declare, in the transaction that queues them.
pub(crate) async fn declare(conn: &mut Conn, state: &RunState) -> Result<(), StoreError> {
    let declared =
        state.enqueued.iter().filter_map(|(job, entry)| Some((*job, entry.git_credentials.as_deref().cloned()?)));
    let rows: Vec<DeclaredRow> =
        declared.map(|(job, of)| DeclaredRow { job_id: job.into(), declared: Doc(of) }).collect();
    for row in rows {
        // Few jobs declare anything; one that is queued again has its row.
        diesel::insert_into(job_git_credentials::table).values(row).on_conflict_do_nothing().execute(conn).await?;
    }
    Ok(())
}

pub(crate) async fn job_git_credentials(
    conn: &mut Conn,
    _: &Ctx,
    job: &JobId,
) -> Result<Option<GitCredentials>, StoreError> {
    let row: Option<Doc<GitCredentials>> = job_git_credentials::table
        .find(DbId::from(*job))
        .select(job_git_credentials::declared)
        .first(conn)
        .await
        .optional()?;
    Ok(row.map(|declared| declared.0))
}

#[derive(Queryable, Selectable, Insertable)]
#[diesel(table_name = secret_audit_log, check_for_backend(Db))]
struct AuditRow {
    id: DbId,
    org: String,
    actor_type: String,
    actor_id: String,
    role: Option<String>,
    action: String,
    scope: Option<String>,
    key: Option<String>,
    context_name: Option<String>,
    run_id: Option<DbId>,
    job_id: Option<DbId>,
    outcome: String,
    metadata: Option<Doc<Json>>,
    created_at: DbTs,
}

impl AuditRow {
    fn read(self) -> SecretAudit {
        SecretAudit {
            id: self.id.into(),
            created_at: self.created_at.into(),
            entry: NewSecretAudit {
                org: self.org,
                actor_type: self.actor_type,
                actor_id: self.actor_id,
                role: self.role,
                action: self.action,
                scope: self.scope,
                key: self.key,
                context_name: self.context_name,
                run_id: self.run_id.map(RunId::from),
                job_id: self.job_id.map(JobId::from),
                outcome: self.outcome,
                metadata: self.metadata.map(|metadata| metadata.0),
            },
        }
    }
}

pub(crate) async fn secret_audit_insert(conn: &mut Conn, ctx: &Ctx, entry: &NewSecretAudit) -> Result<(), StoreError> {
    let row = AuditRow {
        id: ctx.uuid().into(),
        org: entry.org.clone(),
        actor_type: entry.actor_type.clone(),
        actor_id: clean(&entry.actor_id),
        role: entry.role.clone(),
        action: entry.action.clone(),
        scope: clean_opt(entry.scope.as_deref()),
        key: clean_opt(entry.key.as_deref()),
        context_name: entry.context_name.clone(),
        run_id: entry.run_id.map(Into::into),
        job_id: entry.job_id.map(Into::into),
        outcome: entry.outcome.clone(),
        metadata: entry.metadata.clone().map(Doc),
        created_at: ctx.now.into(),
    };
    diesel::insert_into(secret_audit_log::table).values(row).execute(conn).await?;
    Ok(())
}

pub(crate) async fn secret_audit_list(
    conn: &mut Conn,
    _: &Ctx,
    filter: &SecretAuditFilter,
    page: &Page,
) -> Result<Listed<SecretAudit>, StoreError> {
    let mut query = secret_audit_log::table.into_boxed::<Db>();
    if let Some(run) = filter.run_id {
        query = query.filter(secret_audit_log::run_id.eq(DbId::from(run)));
    }
    if let Some(job) = filter.job_id {
        query = query.filter(secret_audit_log::job_id.eq(DbId::from(job)));
    }
    if let Some(action) = &filter.action {
        query = query.filter(secret_audit_log::action.eq(action));
    }
    if let Some(outcome) = &filter.outcome {
        query = query.filter(secret_audit_log::outcome.eq(outcome));
    }
    if let Some(actor_id) = &filter.actor_id {
        query = query.filter(secret_audit_log::actor_id.eq(actor_id));
    }
    if let Some(from) = filter.from {
        query = query.filter(secret_audit_log::created_at.ge(DbTs::from(from)));
    }
    if let Some(to) = filter.to {
        query = query.filter(secret_audit_log::created_at.lt(DbTs::from(to)));
    }
    if let Some(Cursor { at, id }) = page.after {
        let (at, id) = (DbTs::from(at), DbId::from(id));
        let before = secret_audit_log::created_at.eq(at).and(secret_audit_log::id.lt(id));
        query = query.filter(secret_audit_log::created_at.lt(at).or(before));
    }
    let limit = page.limit.clamp(1, 500);
    let rows: Vec<AuditRow> = query
        .order((secret_audit_log::created_at.desc(), secret_audit_log::id.desc()))
        .limit(i64::from(limit))
        .select(AuditRow::as_select())
        .load(conn)
        .await?;
    let items: Vec<SecretAudit> = rows.into_iter().map(AuditRow::read).collect();
    let next = next(&items, limit, |row| Cursor { at: row.created_at, id: row.id });
    Ok(Listed { items, next })
}

pub(crate) async fn secret_audit_prune(conn: &mut Conn, _: &Ctx, before: &Ts, limit: &u32) -> Result<u64, StoreError> {
    let old: Vec<DbId> = secret_audit_log::table
        .filter(secret_audit_log::created_at.lt(DbTs::from(*before)))
        .order((secret_audit_log::created_at, secret_audit_log::id))
        .limit(i64::from(*limit))
        .select(secret_audit_log::id)
        .load(conn)
        .await?;
    Ok(diesel::delete(secret_audit_log::table.filter(secret_audit_log::id.eq_any(&old))).execute(conn).await? as u64)
}
