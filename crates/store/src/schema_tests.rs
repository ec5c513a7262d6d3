//! `shared/schema.rs` against what the migrations make.

use std::collections::BTreeMap;

use diesel::sql_types::Text;
use diesel::{Connection, QueryableByName, SqliteConnection, sql_query};
use diesel_async::{AsyncConnection, AsyncPgConnection};

use crate::testing::TestStore;

/// `table.column` to its type and whether it may be null, as `schema.rs` says.
fn declared() -> BTreeMap<String, (String, bool)> {
    let mut columns = BTreeMap::new();
    let mut table = String::new();
    for line in concat!(
        include_str!("shared/schema.rs"),
        include_str!("shared/schema/bus.rs"),
        include_str!("shared/schema/claims.rs"),
        include_str!("shared/schema/kept.rs")
    )
    .lines()
    {
        let line = line.trim();
        if let Some((name, kind)) = line.trim_end_matches(',').split_once(" -> ")
            && line.ends_with(',')
        {
            let inner = kind.strip_prefix("Nullable<").and_then(|rest| rest.strip_suffix('>'));
            columns.insert(format!("{table}.{name}"), (inner.unwrap_or(kind).to_owned(), inner.is_some()));
        } else if let Some((name, _)) = line.split_once(" (")
            && line.ends_with('{')
        {
            name.clone_into(&mut table);
        }
    }
    assert!(columns.len() > 200, "{}", columns.len());
    columns
}

fn sqlite(t: &TestStore) -> SqliteConnection {
    SqliteConnection::establish(t.url().trim_start_matches("sqlite:")).unwrap()
}

async fn postgres(t: &TestStore) -> AsyncPgConnection {
    AsyncPgConnection::establish(t.url()).await.unwrap()
}

#[derive(QueryableByName)]
struct Column {
    #[diesel(sql_type = Text)]
    name: String,
    #[diesel(sql_type = Text)]
    kind: String,
    #[diesel(sql_type = Text)]
    nullable: String,
}

fn found(rows: Vec<Column>, kinds: &[(&str, &str)]) -> BTreeMap<String, (String, bool)> {
    let kind = |found: &str| kinds.iter().find(|(db, _)| *db == found).map_or(found, |(_, ours)| *ours).to_owned();
    rows.into_iter().map(|row| (row.name.clone(), (kind(&row.kind), row.nullable == "1"))).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn sqlite_has_the_declared_columns() {
    let t = TestStore::sqlite().await;
    let sql = "SELECT m.name || '.' || c.name AS name, c.type AS kind, CAST(1 - c.\"notnull\" AS TEXT) AS nullable \
               FROM sqlite_master m JOIN pragma_table_info(m.name) c \
               WHERE m.type = 'table' AND m.name NOT LIKE '\\_\\_%' ESCAPE '\\' AND m.name NOT LIKE 'sqlite%'";
    let rows = diesel::RunQueryDsl::load::<Column>(sql_query(sql), &mut sqlite(&t)).unwrap();
    // SQLite has fewer types than we have.
    let fewer = |kind: &str| match kind {
        "Ts" | "BigInt" | "Bool" => "INTEGER",
        "Binary" => "BLOB",
        _ => "TEXT",
    };
    let declared: BTreeMap<_, _> =
        declared().into_iter().map(|(name, (kind, null))| (name, (fewer(&kind).to_owned(), null))).collect();
    assert_eq!(found(rows, &[]), declared);
}

#[tokio::test(flavor = "multi_thread")]
async fn postgres_has_the_declared_columns() {
    let Some(t) = TestStore::postgres().await else { return };
    let sql = "SELECT table_name || '.' || column_name AS name, data_type::text AS kind, \
               CASE is_nullable WHEN 'YES' THEN '1' ELSE '0' END AS nullable FROM information_schema.columns \
               WHERE table_schema = 'public' AND table_name NOT LIKE '\\_\\_%'";
    let rows = diesel_async::RunQueryDsl::load::<Column>(sql_query(sql), &mut postgres(&t).await).await.unwrap();
    let kinds = [
        ("uuid", "Id"),
        ("timestamp with time zone", "Ts"),
        ("bigint", "BigInt"),
        ("boolean", "Bool"),
        ("bytea", "Binary"),
        ("json", "Json"),
        ("text", "Text"),
    ];
    assert_eq!(found(rows, &kinds), declared());
}
