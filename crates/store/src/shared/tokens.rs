//! Tokens of agents and of operators.

use diesel::prelude::*;
use diesel_async::RunQueryDsl;
use kici_engine::ids::TokenId;
use kici_engine::time::Ts;

use super::backend::{Conn, Db};
use super::rows::{agent_opt, clean, clean_opt, db_ts, ts_opt, word};
use super::schema::{admin_tokens, agent_tokens};
use crate::StoreError;
use crate::ctx::Ctx;
use crate::model::{AdminToken, AgentToken, AgentType, NewAdminToken, NewAgentToken, TokenKind};
use crate::notify::Topic;
use crate::types::{DbId, DbTs, Doc};

#[derive(Queryable, Selectable, Insertable)]
#[diesel(table_name = agent_tokens, check_for_backend(Db))]
struct AgentTokenRow {
    id: DbId,
    token_hash: String,
    token_prefix: String,
    label: Option<String>,
    labels: Option<Doc<Vec<String>>>,
    mandatory_labels: Option<Doc<Vec<String>>>,
    agent_type: String,
    kind: String,
    bound_agent_id: Option<String>,
    created_by: String,
    created_at: DbTs,
    last_seen_at: Option<DbTs>,
    expires_at: Option<DbTs>,
    revoked_at: Option<DbTs>,
    consumed_at: Option<DbTs>,
}

impl AgentTokenRow {
    fn read(self) -> Result<AgentToken, StoreError> {
        Ok(AgentToken {
            id: self.id.into(),
            token_prefix: self.token_prefix,
            label: self.label,
            labels: self.labels.map(|labels| labels.0),
            mandatory_labels: self.mandatory_labels.map(|labels| labels.0),
            agent_type: word("agent type", &self.agent_type)?,
            kind: word("token kind", &self.kind)?,
            bound_agent_id: agent_opt(self.bound_agent_id)?,
            created_by: self.created_by,
            created_at: self.created_at.into(),
            last_seen_at: ts_opt(self.last_seen_at),
            expires_at: ts_opt(self.expires_at),
            revoked_at: ts_opt(self.revoked_at),
            consumed_at: ts_opt(self.consumed_at),
        })
    }
}

pub(crate) async fn agent_token_create(
    conn: &mut Conn,
    ctx: &Ctx,
    new: &NewAgentToken,
) -> Result<AgentToken, StoreError> {
    let row = AgentTokenRow {
        id: ctx.uuid().into(),
        token_hash: new.token_hash.clone(),
        token_prefix: new.token_prefix.clone(),
        label: clean_opt(new.label.as_deref()),
        labels: new.labels.clone().map(Doc),
        mandatory_labels: new.mandatory_labels.clone().map(Doc),
        agent_type: new.agent_type.as_str().to_owned(),
        kind: new.kind.as_str().to_owned(),
        bound_agent_id: new.bound_agent_id.as_ref().map(|id| id.as_str().to_owned()),
        created_by: clean(&new.created_by),
        created_at: ctx.now.into(),
        last_seen_at: None,
        expires_at: db_ts(new.expires_at),
        revoked_at: None,
        consumed_at: None,
    };
    let inserted = diesel::insert_into(agent_tokens::table).values(&row).on_conflict_do_nothing().execute(conn).await?;
    if inserted == 0 {
        return Err(StoreError::Exists { what: "token", field: "hash" });
    }
    row.read()
}

pub(crate) async fn agent_token_list(conn: &mut Conn, _: &Ctx) -> Result<Vec<AgentToken>, StoreError> {
    let rows: Vec<AgentTokenRow> = agent_tokens::table
        .order((agent_tokens::created_at.desc(), agent_tokens::id.desc()))
        .select(AgentTokenRow::as_select())
        .load(conn)
        .await?;
    rows.into_iter().map(AgentTokenRow::read).collect()
}

pub(crate) async fn agent_token_by_hash(
    conn: &mut Conn,
    _: &Ctx,
    hash: &str,
) -> Result<Option<AgentToken>, StoreError> {
    let row: Option<AgentTokenRow> = agent_tokens::table
        .filter(agent_tokens::token_hash.eq(hash))
        .select(AgentTokenRow::as_select())
        .first(conn)
        .await
        .optional()?;
    row.map(AgentTokenRow::read).transpose()
}

pub(crate) async fn agent_token_revoke(conn: &mut Conn, ctx: &Ctx, id: &TokenId) -> Result<bool, StoreError> {
    let open = agent_tokens::table.find(DbId::from(*id)).filter(agent_tokens::revoked_at.is_null());
    let revoked = diesel::update(open).set(agent_tokens::revoked_at.eq(DbTs::from(ctx.now))).execute(conn).await?;
    ctx.wake(Topic::Revocations);
    Ok(revoked == 1)
}

pub(crate) async fn agent_token_consume(conn: &mut Conn, ctx: &Ctx, id: &TokenId) -> Result<bool, StoreError> {
    let changed = diesel::update(agent_tokens::table.find(DbId::from(*id)))
        .filter(agent_tokens::consumed_at.is_null())
        .set(agent_tokens::consumed_at.eq(DbTs::from(ctx.now)))
        .execute(conn)
        .await?;
    Ok(changed == 1)
}

pub(crate) async fn agent_token_touch(conn: &mut Conn, _: &Ctx, seen: &[(TokenId, Ts)]) -> Result<(), StoreError> {
    for (id, at) in seen {
        diesel::update(agent_tokens::table.find(DbId::from(*id)))
            .set(agent_tokens::last_seen_at.eq(DbTs::from(*at)))
            .execute(conn)
            .await?;
    }
    Ok(())
}

pub(crate) async fn agent_token_reap(
    conn: &mut Conn,
    _: &Ctx,
    before: &Ts,
    except: &[TokenId],
) -> Result<Vec<TokenId>, StoreError> {
    let except: Vec<DbId> = except.iter().map(|id| DbId::from(*id)).collect();
    let passing = agent_tokens::agent_type
        .eq(AgentType::Ephemeral.as_str())
        .or(agent_tokens::kind.eq(TokenKind::Bootstrap.as_str()));
    let gone: Vec<DbId> = diesel::delete(agent_tokens::table)
        .filter(passing)
        .filter(agent_tokens::expires_at.lt(DbTs::from(*before)))
        .filter(agent_tokens::id.ne_all(except))
        .returning(agent_tokens::id)
        .get_results(conn)
        .await?;
    Ok(gone.into_iter().map(Into::into).collect())
}

#[derive(Queryable, Selectable, Insertable)]
#[diesel(table_name = admin_tokens, check_for_backend(Db))]
struct AdminTokenRow {
    id: DbId,
    token_hash: String,
    token_prefix: String,
    label: String,
    role: String,
    routing_key: Option<String>,
    created_by: String,
    created_at: DbTs,
    last_used_at: Option<DbTs>,
    expires_at: Option<DbTs>,
    revoked_at: Option<DbTs>,
}

impl AdminTokenRow {
    fn read(self) -> Result<AdminToken, StoreError> {
        Ok(AdminToken {
            id: self.id.into(),
            token_prefix: self.token_prefix,
            label: self.label,
            role: word("role", &self.role)?,
            routing_key: self.routing_key,
            created_by: self.created_by,
            created_at: self.created_at.into(),
            last_used_at: ts_opt(self.last_used_at),
            expires_at: ts_opt(self.expires_at),
            revoked_at: ts_opt(self.revoked_at),
        })
    }
}

pub(crate) async fn admin_token_create(
    conn: &mut Conn,
    ctx: &Ctx,
    new: &NewAdminToken,
) -> Result<AdminToken, StoreError> {
    let row = AdminTokenRow {
        id: ctx.uuid().into(),
        token_hash: new.token_hash.clone(),
        token_prefix: new.token_prefix.clone(),
        label: clean(&new.label),
        role: new.role.as_str().to_owned(),
        routing_key: new.routing_key.clone(),
        created_by: clean(&new.created_by),
        created_at: ctx.now.into(),
        last_used_at: None,
        expires_at: db_ts(new.expires_at),
        revoked_at: None,
    };
    let inserted = diesel::insert_into(admin_tokens::table).values(&row).on_conflict_do_nothing().execute(conn).await?;
    if inserted == 0 {
        return Err(StoreError::Exists { what: "token", field: "hash" });
    }
    row.read()
}

pub(crate) async fn admin_token_list(conn: &mut Conn, _: &Ctx) -> Result<Vec<AdminToken>, StoreError> {
    let rows: Vec<AdminTokenRow> = admin_tokens::table
        .order((admin_tokens::created_at.desc(), admin_tokens::id.desc()))
        .select(AdminTokenRow::as_select())
        .load(conn)
        .await?;
    rows.into_iter().map(AdminTokenRow::read).collect()
}

pub(crate) async fn admin_token_by_hash(
    conn: &mut Conn,
    _: &Ctx,
    hash: &str,
) -> Result<Option<AdminToken>, StoreError> {
    let row: Option<AdminTokenRow> = admin_tokens::table
        .filter(admin_tokens::token_hash.eq(hash))
        .select(AdminTokenRow::as_select())
        .first(conn)
        .await
        .optional()?;
    row.map(AdminTokenRow::read).transpose()
}

pub(crate) async fn admin_token_revoke(conn: &mut Conn, ctx: &Ctx, id: &TokenId) -> Result<bool, StoreError> {
    let open = admin_tokens::table.find(DbId::from(*id)).filter(admin_tokens::revoked_at.is_null());
    let revoked = diesel::update(open).set(admin_tokens::revoked_at.eq(DbTs::from(ctx.now))).execute(conn).await?;
    ctx.wake(Topic::Revocations);
    Ok(revoked == 1)
}

pub(crate) async fn admin_token_touch(conn: &mut Conn, _: &Ctx, seen: &[(TokenId, Ts)]) -> Result<(), StoreError> {
    for (id, at) in seen {
        diesel::update(admin_tokens::table.find(DbId::from(*id)))
            .set(admin_tokens::last_used_at.eq(DbTs::from(*at)))
            .execute(conn)
            .await?;
    }
    Ok(())
}
