//! Objects that caches and artifacts point to. Whoever adds or removes a pointer has the organisation's turn, so that an object
//! that nobody points to any more cannot be taken up again while it goes.

use diesel::prelude::*;
use diesel_async::RunQueryDsl;
use kici_engine::ids::UploadId;
use serde_json::json;
use sha2::{Digest, Sha256};

use super::backend::{Conn, take_turn};
use super::fleet::outbox_put;
use super::rows::{big, small};
use super::schema::{artifacts, cache_entries, stored_objects, uploads};
use crate::StoreError;
use crate::ctx::Ctx;
use crate::types::{DbId, DbTs};

/// Kind of the consequence that deletes an object.
const DELETE: &str = "blob.delete";

#[derive(Insertable)]
#[diesel(table_name = stored_objects)]
struct ObjectRow {
    id: DbId,
    space: String,
    sha256: String,
    size: i64,
    blob_key: String,
    created_at: DbTs,
}

/// Bytes of the rows of a query over a table with a column `size`.
pub(super) fn total() -> diesel::expression::SqlLiteral<diesel::sql_types::BigInt> {
    // The sum of big integers is a decimal on PostgreSQL.
    diesel::dsl::sql("CAST(COALESCE(SUM(size), 0) AS BIGINT)")
}

/// Waits until nobody else changes what is kept for the organisation.
pub(super) async fn turn(conn: &mut Conn, org: &str) -> Result<(), StoreError> {
    let digest = Sha256::digest(format!("kept|{org}"));
    let mut key = [0; 8];
    key.copy_from_slice(&digest[..8]);
    Ok(take_turn(conn, i64::from_be_bytes(key)).await?)
}

/// The object of this content in the space: the one that is there already, whose fresh copy is then deleted, or a new one.
pub(super) async fn keep(
    conn: &mut Conn,
    ctx: &Ctx,
    space: &str,
    (sha256, size): (&str, u64),
    blob_key: &str,
) -> Result<DbId, StoreError> {
    let found: Option<DbId> = stored_objects::table
        .filter(stored_objects::space.eq(space))
        .filter(stored_objects::sha256.eq(sha256))
        .select(stored_objects::id)
        .first(conn)
        .await
        .optional()?;
    if let Some(id) = found {
        delete_blob(conn, ctx, blob_key).await?;
        return Ok(id);
    }
    let row = ObjectRow {
        id: ctx.uuid().into(),
        space: space.to_owned(),
        sha256: sha256.to_owned(),
        size: big(size),
        blob_key: blob_key.to_owned(),
        created_at: ctx.now.into(),
    };
    diesel::insert_into(stored_objects::table).values(&row).execute(conn).await?;
    Ok(row.id)
}

/// Removes those of the objects that nobody points to any more.
pub(super) async fn release(conn: &mut Conn, ctx: &Ctx, ids: &[DbId]) -> Result<(), StoreError> {
    for id in ids {
        let cached: i64 =
            cache_entries::table.filter(cache_entries::object_id.eq(*id)).count().get_result(conn).await?;
        let held: i64 = artifacts::table.filter(artifacts::object_id.eq(*id)).count().get_result(conn).await?;
        if cached + held > 0 {
            continue;
        }
        let found: Option<String> =
            stored_objects::table.find(*id).select(stored_objects::blob_key).first(conn).await.optional()?;
        if let Some(blob_key) = found {
            diesel::delete(stored_objects::table.find(*id)).execute(conn).await?;
            delete_blob(conn, ctx, &blob_key).await?;
        }
    }
    Ok(())
}

/// Removes an upload with what its attempts left, but for the object `kept`.
pub(super) async fn drop_upload(
    conn: &mut Conn,
    ctx: &Ctx,
    id: UploadId,
    kept: Option<&str>,
) -> Result<(), StoreError> {
    let found: Option<(String, i64)> = uploads::table
        .find(DbId::from(id))
        .select((uploads::blob_prefix, uploads::attempts))
        .first(conn)
        .await
        .optional()?;
    let Some((prefix, attempts)) = found else { return Ok(()) };
    diesel::delete(uploads::table.find(DbId::from(id))).execute(conn).await?;
    for attempt in 1..=small(attempts) {
        let key = blob_key(&prefix, attempt);
        if kept != Some(key.as_str()) {
            delete_blob(conn, ctx, &key).await?;
        }
    }
    Ok(())
}

/// Name of the object of one attempt at an upload.
pub(super) fn blob_key(prefix: &str, attempt: u32) -> String {
    format!("{prefix}.{attempt}")
}

async fn delete_blob(conn: &mut Conn, ctx: &Ctx, key: &str) -> Result<(), StoreError> {
    outbox_put(conn, ctx, DELETE, &json!({ "key": key })).await.map(drop)
}
