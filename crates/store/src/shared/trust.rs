//! Which repositories may start workflows of others by events.

use diesel::prelude::*;
use diesel_async::RunQueryDsl;
use kici_engine::ids::TrustId;

use super::backend::{Conn, Db};
use super::rows::clean;
use super::schema::event_trust;
use crate::StoreError;
use crate::ctx::Ctx;
use crate::model::{EventTrust, NewTrust};
use crate::types::{DbId, DbTs, Doc};

#[derive(Queryable, Selectable, Insertable)]
#[diesel(table_name = event_trust, check_for_backend(Db), treat_none_as_default_value = false)]
struct TrustRow {
    id: DbId,
    org: String,
    source_routing_key: String,
    source_repo: String,
    target_routing_key: String,
    target_repo: String,
    allowed_events: Option<Doc<Vec<String>>>,
    enabled: bool,
    created_by: String,
    created_at: DbTs,
}

impl TrustRow {
    fn read(self) -> EventTrust {
        EventTrust {
            id: self.id.into(),
            trust: NewTrust {
                org: self.org,
                source_routing_key: self.source_routing_key,
                source_repo: self.source_repo,
                target_routing_key: self.target_routing_key,
                target_repo: self.target_repo,
                allowed_events: self.allowed_events.map(|list| list.0),
                created_by: self.created_by,
            },
            enabled: self.enabled,
            created_at: self.created_at.into(),
        }
    }
}

pub(crate) async fn event_trust_list(conn: &mut Conn, _: &Ctx, org: &str) -> Result<Vec<EventTrust>, StoreError> {
    let rows: Vec<TrustRow> = event_trust::table
        .filter(event_trust::org.eq(org))
        .order((event_trust::source_repo, event_trust::target_repo, event_trust::id))
        .select(TrustRow::as_select())
        .load(conn)
        .await?;
    Ok(rows.into_iter().map(TrustRow::read).collect())
}

pub(crate) async fn event_trust_add(conn: &mut Conn, ctx: &Ctx, new: &NewTrust) -> Result<EventTrust, StoreError> {
    let row = TrustRow {
        id: ctx.uuid().into(),
        org: new.org.clone(),
        source_routing_key: new.source_routing_key.clone(),
        source_repo: new.source_repo.clone(),
        target_routing_key: new.target_routing_key.clone(),
        target_repo: new.target_repo.clone(),
        allowed_events: new.allowed_events.clone().map(Doc),
        enabled: true,
        created_by: clean(&new.created_by),
        created_at: ctx.now.into(),
    };
    let added = diesel::insert_into(event_trust::table).values(&row).on_conflict_do_nothing().execute(conn).await?;
    if added == 0 {
        return Err(StoreError::Exists { what: "event trust", field: "source and target" });
    }
    Ok(row.read())
}

pub(crate) async fn event_trust_remove(conn: &mut Conn, _: &Ctx, id: &TrustId) -> Result<bool, StoreError> {
    Ok(diesel::delete(event_trust::table.find(DbId::from(*id))).execute(conn).await? == 1)
}
