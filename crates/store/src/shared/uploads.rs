//! Uploads of jobs: begun, received in attempts, committed. Each checks in its own transaction that the job is still the agent's
//! at this epoch: what an abandoned attempt brings is refused.

use diesel::prelude::*;
use diesel_async::RunQueryDsl;
use kici_engine::cache::CacheScope;
use kici_engine::ids::{AgentId, UploadId};
use kici_engine::time::Ts;

use super::backend::{Conn, Db};
use super::objects::{self, blob_key};
use super::rows::{big, count, db_ts, small, word};
use super::schema::{jobs, uploads};
use super::{artifacts as kept_artifacts, caches};
use crate::StoreError;
use crate::ctx::Ctx;
use crate::model::{CommitUpload, Committed, JobRef, NewUpload, Upload, UploadBegun, UploadKind};
use crate::types::{DbId, DbTs};

#[derive(Queryable, Selectable, Insertable)]
#[diesel(table_name = uploads, check_for_backend(Db), treat_none_as_default_value = false)]
pub(super) struct UploadRow {
    pub(super) id: DbId,
    pub(super) kind: String,
    pub(super) org: String,
    pub(super) job_id: DbId,
    pub(super) run_id: DbId,
    pub(super) epoch: i64,
    pub(super) source_id: DbId,
    pub(super) repo: String,
    pub(super) scope: String,
    pub(super) job_name: String,
    pub(super) name: String,
    pub(super) keep_until: Option<DbTs>,
    pub(super) max_bytes: i64,
    pub(super) blob_prefix: String,
    pub(super) attempts: i64,
    pub(super) received: Option<i64>,
    pub(super) sha256: Option<String>,
    pub(super) size: Option<i64>,
    pub(super) created_at: DbTs,
}

/// The job's key in its workflow, if the agent holds it at this epoch and it is not over. Locks its row: nobody takes it away
/// before this transaction ends.
async fn held(conn: &mut Conn, job: JobRef, agent: &AgentId) -> Result<Option<String>, StoreError> {
    type Columns = (DbId, i64, Option<String>, Option<DbTs>, String);
    let query = jobs::table.find(DbId::from(job.job_id)).select((
        jobs::run_id,
        jobs::dispatch_epoch,
        jobs::agent_id,
        jobs::finished_at,
        jobs::base_name,
    ));
    let found: Option<Columns> = lock_row!(query).first(conn).await.optional()?;
    Ok(found.and_then(|(run, epoch, holder, finished, name)| {
        let same = run == DbId::from(job.run_id)
            && small(epoch) == job.epoch
            && holder.as_deref() == Some(agent.as_str())
            && finished.is_none();
        same.then_some(name)
    }))
}

pub(crate) async fn upload_begin(conn: &mut Conn, ctx: &Ctx, new: &NewUpload) -> Result<UploadBegun, StoreError> {
    let Some(job_name) = held(conn, new.job, &new.agent_id).await? else { return Ok(UploadBegun::NotHeld) };
    let open: i64 = uploads::table
        .filter(uploads::job_id.eq(DbId::from(new.job.job_id)))
        .filter(uploads::epoch.eq(i64::from(new.job.epoch)))
        .count()
        .get_result(conn)
        .await?;
    if open >= i64::from(new.limits.open) {
        return Ok(UploadBegun::Full);
    }
    match new.kind {
        UploadKind::Cache => {
            if caches::exists(conn, &new.space, &new.name).await? {
                return Ok(UploadBegun::Exists);
            }
        }
        UploadKind::Artifact => {
            let verdict = kept_artifacts::room(conn, new.job, &new.space.org, &new.name, 0, new.limits).await?;
            if verdict != UploadBegun::Open {
                return Ok(verdict);
            }
        }
    }
    let row = UploadRow {
        id: new.id.into(),
        kind: new.kind.as_str().to_owned(),
        org: new.space.org.clone(),
        job_id: new.job.job_id.into(),
        run_id: new.job.run_id.into(),
        epoch: new.job.epoch.into(),
        source_id: new.space.source_id.into(),
        repo: new.space.repo.clone(),
        scope: new.space.scope.as_str().to_owned(),
        job_name,
        name: new.name.clone(),
        keep_until: db_ts(new.keep_until),
        max_bytes: big(new.limits.max_bytes),
        blob_prefix: new.blob_prefix.clone(),
        attempts: 0,
        received: None,
        sha256: None,
        size: None,
        created_at: ctx.now.into(),
    };
    diesel::insert_into(uploads::table).values(&row).execute(conn).await?;
    Ok(UploadBegun::Open)
}

pub(crate) async fn upload_take(
    conn: &mut Conn,
    _: &Ctx,
    id: &UploadId,
    most: &u32,
) -> Result<Option<Upload>, StoreError> {
    let open = uploads::table.find(DbId::from(*id)).filter(uploads::attempts.lt(i64::from(*most)));
    let taken = diesel::update(open).set(uploads::attempts.eq(uploads::attempts + 1)).execute(conn).await?;
    if taken == 0 {
        return Ok(None);
    }
    let row: UploadRow = uploads::table.find(DbId::from(*id)).select(UploadRow::as_select()).first(conn).await?;
    let attempts = small(row.attempts);
    Ok(Some(Upload {
        id: *id,
        kind: word("upload kind", &row.kind)?,
        max_bytes: count(row.max_bytes),
        attempts,
        blob_key: blob_key(&row.blob_prefix, attempts),
    }))
}

pub(crate) async fn upload_received(
    conn: &mut Conn,
    _: &Ctx,
    id: &UploadId,
    attempt: &u32,
    sha256: &str,
    size: &u64,
) -> Result<bool, StoreError> {
    // A later attempt that was begun meanwhile does not make this one void: it is complete. But never back to an earlier one.
    let open = uploads::table
        .find(DbId::from(*id))
        .filter(uploads::received.is_null().or(uploads::received.lt(i64::from(*attempt))));
    let noted = diesel::update(open)
        .set((
            uploads::received.eq(Some(i64::from(*attempt))),
            uploads::sha256.eq(Some(sha256)),
            uploads::size.eq(Some(big(*size))),
        ))
        .execute(conn)
        .await?;
    Ok(noted == 1)
}

pub(crate) async fn upload_commit(conn: &mut Conn, ctx: &Ctx, commit: &CommitUpload) -> Result<Committed, StoreError> {
    objects::turn(conn, &commit.space.org).await?;
    if held(conn, commit.job, &commit.agent_id).await?.is_none() {
        return Ok(Committed::NotHeld);
    }
    let row: Option<UploadRow> = uploads::table
        .find(DbId::from(commit.id))
        .filter(uploads::kind.eq(commit.kind.as_str()))
        .filter(uploads::job_id.eq(DbId::from(commit.job.job_id)))
        .filter(uploads::epoch.eq(i64::from(commit.job.epoch)))
        .filter(uploads::name.eq(&commit.name))
        .select(UploadRow::as_select())
        .first(conn)
        .await
        .optional()?;
    // Said again, after an answer that got lost.
    let Some(row) = row else {
        return match commit.kind {
            UploadKind::Cache => caches::committed(conn, commit).await,
            UploadKind::Artifact => kept_artifacts::committed(conn, commit).await,
        };
    };
    let (Some(attempt), Some(sha256), Some(size)) = (row.received, row.sha256.clone(), row.size) else {
        return Ok(Committed::NotReceived);
    };
    if sha256 != commit.sha256 {
        return Ok(Committed::Mismatch);
    }
    let (key, size) = (blob_key(&row.blob_prefix, small(attempt)), count(size));
    let scope: CacheScope = word("cache scope", &row.scope)?;
    let done = match commit.kind {
        UploadKind::Cache => caches::commit(conn, ctx, &row, scope, (&sha256, size), &key, commit.limits).await?,
        UploadKind::Artifact => kept_artifacts::commit(conn, ctx, &row, (&sha256, size), &key, commit.limits).await?,
    };
    let kept = matches!(done, Committed::Stored { .. }).then_some(key.as_str());
    objects::drop_upload(conn, ctx, commit.id, kept).await?;
    Ok(done)
}

pub(crate) async fn uploads_abandon(conn: &mut Conn, ctx: &Ctx, before: &Ts, limit: &u32) -> Result<u64, StoreError> {
    let old: Vec<DbId> = uploads::table
        .filter(uploads::created_at.lt(DbTs::from(*before)))
        .order((uploads::created_at, uploads::id))
        .limit(i64::from(*limit))
        .select(uploads::id)
        .load(conn)
        .await?;
    for id in &old {
        objects::drop_upload(conn, ctx, (*id).into(), None).await?;
    }
    Ok(old.len() as u64)
}
