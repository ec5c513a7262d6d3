//! The tables of caches and artifacts.

use super::backend;

diesel::table! {
    use diesel::sql_types::{BigInt, Binary, Bool, Json, Nullable, Text};
    use super::backend::sql::{Id, Ts};

    stored_objects (id) {
        id -> Id,
        space -> Text,
        sha256 -> Text,
        size -> BigInt,
        blob_key -> Text,
        created_at -> Ts,
    }
}

diesel::table! {
    use diesel::sql_types::{BigInt, Binary, Bool, Json, Nullable, Text};
    use super::backend::sql::{Id, Ts};

    cache_entries (id) {
        id -> Id,
        org -> Text,
        source_id -> Id,
        repo -> Text,
        scope -> Text,
        run_id -> Id,
        key -> Text,
        object_id -> Id,
        size -> BigInt,
        created_at -> Ts,
        last_read_at -> Ts,
    }
}

diesel::table! {
    use diesel::sql_types::{BigInt, Binary, Bool, Json, Nullable, Text};
    use super::backend::sql::{Id, Ts};

    artifacts (id) {
        id -> Id,
        org -> Text,
        run_id -> Id,
        job_id -> Id,
        job_name -> Text,
        epoch -> BigInt,
        name -> Text,
        object_id -> Id,
        size -> BigInt,
        sha256 -> Text,
        created_at -> Ts,
        expires_at -> Nullable<Ts>,
    }
}

diesel::table! {
    use diesel::sql_types::{BigInt, Binary, Bool, Json, Nullable, Text};
    use super::backend::sql::{Id, Ts};

    uploads (id) {
        id -> Id,
        kind -> Text,
        org -> Text,
        job_id -> Id,
        run_id -> Id,
        epoch -> BigInt,
        source_id -> Id,
        repo -> Text,
        scope -> Text,
        job_name -> Text,
        name -> Text,
        keep_until -> Nullable<Ts>,
        max_bytes -> BigInt,
        blob_prefix -> Text,
        attempts -> BigInt,
        received -> Nullable<BigInt>,
        sha256 -> Nullable<Text>,
        size -> Nullable<BigInt>,
        created_at -> Ts,
    }
}

diesel::joinable!(cache_entries -> stored_objects (object_id));
diesel::joinable!(artifacts -> stored_objects (object_id));
