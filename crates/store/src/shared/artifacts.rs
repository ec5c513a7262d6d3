//! Artifacts of runs.

use diesel::prelude::*;
use diesel_async::RunQueryDsl;
use kici_engine::ids::{ArtifactId, RunId};

use super::backend::{Conn, Db};
use super::objects;
use super::rows::{big, count, small};
use super::schema::{artifacts, runs, stored_objects};
use super::uploads::UploadRow;
use crate::StoreError;
use crate::ctx::Ctx;
use crate::model::{Artifact, CommitUpload, Committed, JobRef, StoredTotals, UploadBegun, UploadLimits};
use crate::types::{DbId, DbTs};

#[derive(Queryable, Selectable, Insertable)]
#[diesel(table_name = artifacts, check_for_backend(Db), treat_none_as_default_value = false)]
struct ArtifactRow {
    id: DbId,
    org: String,
    run_id: DbId,
    job_id: DbId,
    job_name: String,
    epoch: i64,
    name: String,
    object_id: DbId,
    size: i64,
    sha256: String,
    created_at: DbTs,
    expires_at: Option<DbTs>,
}

impl ArtifactRow {
    fn read(self, blob_key: String) -> Artifact {
        Artifact {
            id: self.id.into(),
            run_id: self.run_id.into(),
            job_id: self.job_id.into(),
            job_name: self.job_name,
            name: self.name,
            size: count(self.size),
            sha256: self.sha256,
            blob_key,
            created_at: self.created_at.into(),
            expires_at: self.expires_at.map(Into::into),
        }
    }
}

async fn named(conn: &mut Conn, run: RunId, name: &str) -> Result<Option<ArtifactRow>, StoreError> {
    let query = artifacts::table.filter(artifacts::run_id.eq(DbId::from(run))).filter(artifacts::name.eq(name));
    Ok(query.select(ArtifactRow::as_select()).first(conn).await.optional()?)
}

/// Whether the job may store an artifact of this name and size. Its own of an earlier attempt gives way.
pub(super) async fn room(
    conn: &mut Conn,
    job: JobRef,
    org: &str,
    name: &str,
    size: u64,
    limits: UploadLimits,
) -> Result<UploadBegun, StoreError> {
    let earlier = named(conn, job.run_id, name).await?;
    if earlier.as_ref().is_some_and(|row| row.job_id != DbId::from(job.job_id) || small(row.epoch) >= job.epoch) {
        return Ok(UploadBegun::Exists);
    }
    let in_run: i64 =
        artifacts::table.filter(artifacts::run_id.eq(DbId::from(job.run_id))).count().get_result(conn).await?;
    let bytes: i64 = artifacts::table.filter(artifacts::org.eq(org)).select(objects::total()).first(conn).await?;
    let given_back = earlier.as_ref().map_or(0, |row| count(row.size));
    let full = (earlier.is_none() && in_run >= i64::from(limits.per_run))
        || count(bytes).saturating_sub(given_back).saturating_add(size.max(1)) > limits.quota_bytes;
    Ok(if full { UploadBegun::Full } else { UploadBegun::Open })
}

/// The answer to a commit whose upload is gone.
pub(super) async fn committed(conn: &mut Conn, commit: &CommitUpload) -> Result<Committed, StoreError> {
    let found = named(conn, commit.job.run_id, &commit.name).await?;
    Ok(match found {
        Some(row)
            if row.job_id == DbId::from(commit.job.job_id)
                && small(row.epoch) == commit.job.epoch
                && row.sha256 == commit.sha256 =>
        {
            Committed::Stored { size: count(row.size) }
        }
        Some(_) => Committed::Exists,
        None => Committed::NotReceived,
    })
}

pub(super) async fn commit(
    conn: &mut Conn,
    ctx: &Ctx,
    upload: &UploadRow,
    (sha256, size): (&str, u64),
    blob_key: &str,
    limits: UploadLimits,
) -> Result<Committed, StoreError> {
    let job = JobRef { run_id: upload.run_id.into(), job_id: upload.job_id.into(), epoch: small(upload.epoch) };
    match room(conn, job, &upload.org, &upload.name, size, limits).await? {
        UploadBegun::Open => {}
        UploadBegun::Exists => return Ok(Committed::Exists),
        UploadBegun::Full | UploadBegun::NotHeld => return Ok(Committed::Full),
    }
    if let Some(earlier) = named(conn, job.run_id, &upload.name).await? {
        remove(conn, ctx, &[(earlier.id, earlier.object_id)]).await?;
    }
    let space = format!("artifact/{}", job.run_id.uuid());
    let object_id = objects::keep(conn, ctx, &space, (sha256, size), blob_key).await?;
    let row = ArtifactRow {
        id: ctx.uuid().into(),
        org: upload.org.clone(),
        run_id: upload.run_id,
        job_id: upload.job_id,
        job_name: upload.job_name.clone(),
        epoch: upload.epoch,
        name: upload.name.clone(),
        object_id,
        size: big(size),
        sha256: sha256.to_owned(),
        created_at: ctx.now.into(),
        expires_at: upload.keep_until,
    };
    diesel::insert_into(artifacts::table).values(&row).execute(conn).await?;
    Ok(Committed::Stored { size })
}

async fn remove(conn: &mut Conn, ctx: &Ctx, gone: &[(DbId, DbId)]) -> Result<(), StoreError> {
    let ids: Vec<DbId> = gone.iter().map(|(id, _)| *id).collect();
    diesel::delete(artifacts::table.filter(artifacts::id.eq_any(&ids))).execute(conn).await?;
    let mut of: Vec<DbId> = gone.iter().map(|(_, object)| *object).collect();
    of.sort();
    of.dedup();
    objects::release(conn, ctx, &of).await
}

pub(crate) async fn artifact_list(conn: &mut Conn, ctx: &Ctx, run: &RunId) -> Result<Vec<Artifact>, StoreError> {
    let rows: Vec<(ArtifactRow, String)> = artifacts::table
        .inner_join(stored_objects::table)
        .filter(artifacts::run_id.eq(DbId::from(*run)))
        .filter(artifacts::expires_at.is_null().or(artifacts::expires_at.gt(DbTs::from(ctx.now))))
        .order(artifacts::name)
        .select((ArtifactRow::as_select(), stored_objects::blob_key))
        .load(conn)
        .await?;
    Ok(rows.into_iter().map(|(row, key)| row.read(key)).collect())
}

pub(crate) async fn artifact_find(
    conn: &mut Conn,
    ctx: &Ctx,
    run: &RunId,
    name: &str,
) -> Result<Option<Artifact>, StoreError> {
    let found: Option<(ArtifactRow, String)> = artifacts::table
        .inner_join(stored_objects::table)
        .filter(artifacts::run_id.eq(DbId::from(*run)))
        .filter(artifacts::name.eq(name))
        .filter(artifacts::expires_at.is_null().or(artifacts::expires_at.gt(DbTs::from(ctx.now))))
        .select((ArtifactRow::as_select(), stored_objects::blob_key))
        .first(conn)
        .await
        .optional()?;
    Ok(found.map(|(row, key)| row.read(key)))
}

pub(crate) async fn artifact_by_id(conn: &mut Conn, _: &Ctx, id: &ArtifactId) -> Result<Option<Artifact>, StoreError> {
    let found: Option<(ArtifactRow, String)> = artifacts::table
        .inner_join(stored_objects::table)
        .filter(artifacts::id.eq(DbId::from(*id)))
        .select((ArtifactRow::as_select(), stored_objects::blob_key))
        .first(conn)
        .await
        .optional()?;
    Ok(found.map(|(row, key)| row.read(key)))
}

pub(crate) async fn artifact_totals(conn: &mut Conn, _: &Ctx) -> Result<StoredTotals, StoreError> {
    let entries: i64 = artifacts::table.count().get_result(conn).await?;
    let bytes: i64 = artifacts::table.select(objects::total()).first(conn).await?;
    let oldest: Option<DbTs> =
        artifacts::table.order(artifacts::created_at).select(artifacts::created_at).first(conn).await.optional()?;
    Ok(StoredTotals { entries: count(entries), bytes: count(bytes), oldest: oldest.map(Into::into) })
}

pub(crate) async fn artifact_expire(conn: &mut Conn, ctx: &Ctx, limit: &u32) -> Result<u64, StoreError> {
    let over: Vec<(DbId, DbId, String)> = artifacts::table
        .filter(artifacts::expires_at.le(DbTs::from(ctx.now)))
        .order((artifacts::expires_at, artifacts::id))
        .limit(i64::from(*limit))
        .select((artifacts::id, artifacts::object_id, artifacts::org))
        .load(conn)
        .await?;
    // Runs go by themselves once they are old.
    let orphans: Vec<(DbId, DbId, String)> = artifacts::table
        .filter(diesel::dsl::not(diesel::dsl::exists(runs::table.filter(runs::id.eq(artifacts::run_id)))))
        .limit(i64::from(*limit))
        .select((artifacts::id, artifacts::object_id, artifacts::org))
        .load(conn)
        .await?;
    let mut gone = over;
    gone.extend(orphans);
    gone.sort();
    gone.dedup();
    let mut orgs: Vec<&String> = gone.iter().map(|(_, _, org)| org).collect();
    orgs.sort();
    orgs.dedup();
    for org in orgs {
        objects::turn(conn, org).await?;
    }
    let gone: Vec<(DbId, DbId)> = gone.into_iter().map(|(id, object, _)| (id, object)).collect();
    remove(conn, ctx, &gone).await?;
    Ok(gone.len() as u64)
}
