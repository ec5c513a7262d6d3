//! Claim codes of agents that a scaler starts.

use std::time::Duration;

use diesel::prelude::*;
use diesel_async::RunQueryDsl;
use kici_engine::ids::AgentId;
use kici_engine::time::Ts;

use super::backend::{Conn, Db};
use super::rows::{agent, big, clean, count};
use super::schema::scaler_claims;
use crate::StoreError;
use crate::ctx::Ctx;
use crate::model::{Claim, ClaimRefused, NewClaim, Redeemed};
use crate::types::{DbTs, Doc};

#[derive(Queryable, Selectable, Insertable)]
#[diesel(table_name = scaler_claims, check_for_backend(Db))]
struct ClaimRow {
    claim_hash: String,
    claim_prefix: String,
    agent_id: String,
    scaler_name: String,
    labels: Doc<Vec<String>>,
    mandatory_labels: Doc<Vec<String>>,
    agent_token_ttl_ms: i64,
    orchestrator_url: String,
    created_at: DbTs,
    expires_at: DbTs,
    consumed_at: Option<DbTs>,
    consumed_by: Option<String>,
    revoked_at: Option<DbTs>,
}

impl ClaimRow {
    fn read(self) -> Result<Claim, StoreError> {
        Ok(Claim {
            agent_id: agent(self.agent_id)?,
            scaler_name: self.scaler_name,
            labels: self.labels.0,
            mandatory_labels: self.mandatory_labels.0,
            agent_token_ttl: Duration::from_millis(count(self.agent_token_ttl_ms)),
            orchestrator_url: self.orchestrator_url,
        })
    }
}

pub(crate) async fn claim_create(conn: &mut Conn, ctx: &Ctx, new: &NewClaim) -> Result<(), StoreError> {
    let claim = &new.claim;
    let row = ClaimRow {
        claim_hash: new.claim_hash.clone(),
        claim_prefix: new.claim_prefix.clone(),
        agent_id: claim.agent_id.as_str().to_owned(),
        scaler_name: clean(&claim.scaler_name),
        labels: Doc(claim.labels.clone()),
        mandatory_labels: Doc(claim.mandatory_labels.clone()),
        agent_token_ttl_ms: big(u64::try_from(claim.agent_token_ttl.as_millis()).unwrap_or(u64::MAX)),
        orchestrator_url: clean(&claim.orchestrator_url),
        created_at: ctx.now.into(),
        expires_at: new.expires_at.into(),
        consumed_at: None,
        consumed_by: None,
        revoked_at: None,
    };
    let stored = diesel::insert_into(scaler_claims::table).values(&row).on_conflict_do_nothing().execute(conn).await?;
    if stored == 0 {
        return Err(StoreError::Exists { what: "claim code", field: "hash" });
    }
    Ok(())
}

pub(crate) async fn claim_redeem(conn: &mut Conn, ctx: &Ctx, hash: &str, by: &str) -> Result<Redeemed, StoreError> {
    let now = DbTs::from(ctx.now);
    let taken: Option<ClaimRow> = diesel::update(scaler_claims::table.find(hash))
        .filter(scaler_claims::consumed_at.is_null())
        .filter(scaler_claims::revoked_at.is_null())
        .filter(scaler_claims::expires_at.gt(now))
        .set((scaler_claims::consumed_at.eq(now), scaler_claims::consumed_by.eq(clean(by))))
        .returning(ClaimRow::as_returning())
        .get_result(conn)
        .await
        .optional()?;
    if let Some(taken) = taken {
        return Ok(Redeemed::Claim(taken.read()?));
    }
    let found: Option<(Option<DbTs>, Option<DbTs>)> = scaler_claims::table
        .find(hash)
        .select((scaler_claims::consumed_at, scaler_claims::revoked_at))
        .first(conn)
        .await
        .optional()?;
    Ok(Redeemed::Refused(match found {
        None => ClaimRefused::Invalid,
        Some((Some(_), _)) => ClaimRefused::Consumed,
        Some((None, Some(_))) => ClaimRefused::Revoked,
        Some((None, None)) => ClaimRefused::Expired,
    }))
}

pub(crate) async fn claims_revoke(conn: &mut Conn, ctx: &Ctx, agent_id: &AgentId) -> Result<u64, StoreError> {
    let open = scaler_claims::table
        .filter(scaler_claims::agent_id.eq(agent_id.as_str()))
        .filter(scaler_claims::consumed_at.is_null())
        .filter(scaler_claims::revoked_at.is_null());
    let revoked = diesel::update(open).set(scaler_claims::revoked_at.eq(DbTs::from(ctx.now))).execute(conn).await?;
    Ok(revoked as u64)
}

pub(crate) async fn claims_reap(conn: &mut Conn, _: &Ctx, before: &Ts) -> Result<u64, StoreError> {
    let old = scaler_claims::table.filter(scaler_claims::expires_at.lt(DbTs::from(*before)));
    Ok(diesel::delete(old).execute(conn).await? as u64)
}
