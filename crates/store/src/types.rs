//! Column types: one Rust value each for what the two databases keep differently.

use std::io::Write;

use diesel::deserialize::{self, FromSql, FromSqlRow};
use diesel::expression::AsExpression;
use diesel::pg::data_types::PgTimestamp;
use diesel::pg::{Pg, PgValue};
use diesel::serialize::{self, IsNull, Output, ToSql};
use diesel::sql_types;
use diesel::sqlite::Sqlite;
use kici_engine::ids::{
    ArtifactId, CacheEntryId, DeliveryRowId, EventId, JobId, RegistrationId, RunId, SourceId, TokenId, TrustId,
    UploadId,
};
use kici_engine::time;
use serde::Serialize;
use serde::de::DeserializeOwned;
use uuid::Uuid;

/// An id: `uuid` on PostgreSQL, its hyphenated lower-case text on SQLite.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, AsExpression, FromSqlRow)]
#[diesel(sql_type = sql_types::Uuid)]
#[diesel(sql_type = sql_types::Text)]
pub(crate) struct DbId(pub(crate) Uuid);

impl ToSql<sql_types::Uuid, Pg> for DbId {
    fn to_sql<'b>(&'b self, out: &mut Output<'b, '_, Pg>) -> serialize::Result {
        <Uuid as ToSql<sql_types::Uuid, Pg>>::to_sql(&self.0, out)
    }
}

impl FromSql<sql_types::Uuid, Pg> for DbId {
    fn from_sql(value: PgValue<'_>) -> deserialize::Result<Self> {
        <Uuid as FromSql<sql_types::Uuid, Pg>>::from_sql(value).map(Self)
    }
}

impl ToSql<sql_types::Text, Sqlite> for DbId {
    fn to_sql<'b>(&'b self, out: &mut Output<'b, '_, Sqlite>) -> serialize::Result {
        out.set_value(self.0.hyphenated().to_string());
        Ok(IsNull::No)
    }
}

impl FromSql<sql_types::Text, Sqlite> for DbId {
    fn from_sql(value: <Sqlite as diesel::backend::Backend>::RawValue<'_>) -> deserialize::Result<Self> {
        let text = <String as FromSql<sql_types::Text, Sqlite>>::from_sql(value)?;
        Ok(Self(Uuid::try_parse(&text)?))
    }
}

macro_rules! from_typed_ids {
    ($($id:ident)*) => {$(
        impl From<$id> for DbId {
            fn from(id: $id) -> Self {
                Self(id.uuid())
            }
        }

        impl From<DbId> for $id {
            fn from(id: DbId) -> Self {
                Self::from_uuid(id.0)
            }
        }
    )*};
}

from_typed_ids!(ArtifactId CacheEntryId UploadId DeliveryRowId EventId JobId RegistrationId RunId SourceId TokenId TrustId);

impl From<Uuid> for DbId {
    fn from(id: Uuid) -> Self {
        Self(id)
    }
}

impl From<DbId> for Uuid {
    fn from(id: DbId) -> Self {
        id.0
    }
}

/// An instant: `timestamptz` on PostgreSQL, microseconds since 1970 on SQLite.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, AsExpression, FromSqlRow)]
#[diesel(sql_type = sql_types::Timestamptz)]
#[diesel(sql_type = sql_types::BigInt)]
pub(crate) struct DbTs(i64);

/// PostgreSQL counts from 2000-01-01T00:00:00Z.
const PG_EPOCH_MICROS: i64 = 946_684_800_000_000;

impl ToSql<sql_types::Timestamptz, Pg> for DbTs {
    fn to_sql<'b>(&'b self, out: &mut Output<'b, '_, Pg>) -> serialize::Result {
        let at = PgTimestamp(self.0.saturating_sub(PG_EPOCH_MICROS));
        <PgTimestamp as ToSql<sql_types::Timestamptz, Pg>>::to_sql(&at, &mut out.reborrow())
    }
}

impl FromSql<sql_types::Timestamptz, Pg> for DbTs {
    fn from_sql(value: PgValue<'_>) -> deserialize::Result<Self> {
        let at = <PgTimestamp as FromSql<sql_types::Timestamptz, Pg>>::from_sql(value)?;
        Ok(Self(at.0.saturating_add(PG_EPOCH_MICROS)))
    }
}

impl ToSql<sql_types::BigInt, Sqlite> for DbTs {
    fn to_sql<'b>(&'b self, out: &mut Output<'b, '_, Sqlite>) -> serialize::Result {
        out.set_value(self.0);
        Ok(IsNull::No)
    }
}

impl FromSql<sql_types::BigInt, Sqlite> for DbTs {
    fn from_sql(value: <Sqlite as diesel::backend::Backend>::RawValue<'_>) -> deserialize::Result<Self> {
        <i64 as FromSql<sql_types::BigInt, Sqlite>>::from_sql(value).map(Self)
    }
}

impl From<time::Ts> for DbTs {
    fn from(at: time::Ts) -> Self {
        Self(at.as_micros())
    }
}

impl From<DbTs> for time::Ts {
    fn from(at: DbTs) -> Self {
        Self::from_micros(at.0)
    }
}

/// A document: `json` on PostgreSQL, checked text on SQLite. Opaque to SQL. Not `jsonb`, which refuses the escape
/// `\u0000` that a commit message or an output may hold.
#[derive(Clone, Debug, PartialEq, AsExpression, FromSqlRow)]
#[diesel(sql_type = sql_types::Json)]
pub(crate) struct Doc<T>(pub(crate) T);

impl<T: Serialize + std::fmt::Debug> ToSql<sql_types::Json, Pg> for Doc<T> {
    fn to_sql<'b>(&'b self, out: &mut Output<'b, '_, Pg>) -> serialize::Result {
        out.write_all(&serde_json::to_vec(&self.0)?)?;
        Ok(IsNull::No)
    }
}

impl<T: DeserializeOwned> FromSql<sql_types::Json, Pg> for Doc<T> {
    fn from_sql(value: PgValue<'_>) -> deserialize::Result<Self> {
        Ok(Self(serde_json::from_slice(value.as_bytes())?))
    }
}

impl<T: Serialize + std::fmt::Debug> ToSql<sql_types::Json, Sqlite> for Doc<T> {
    fn to_sql<'b>(&'b self, out: &mut Output<'b, '_, Sqlite>) -> serialize::Result {
        out.set_value(serde_json::to_string(&self.0)?);
        Ok(IsNull::No)
    }
}

impl<T: DeserializeOwned> FromSql<sql_types::Json, Sqlite> for Doc<T> {
    fn from_sql(value: <Sqlite as diesel::backend::Backend>::RawValue<'_>) -> deserialize::Result<Self> {
        let text = <String as FromSql<sql_types::Text, Sqlite>>::from_sql(value)?;
        Ok(Self(serde_json::from_str(&text)?))
    }
}
