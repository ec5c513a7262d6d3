//! The tables of the internal bus, and those of jobs that make jobs or wait for runs.

use super::backend;

diesel::table! {
    use diesel::sql_types::{BigInt, Binary, Bool, Json, Nullable, Text};
    use super::backend::sql::{Id, Ts};

    events (id) {
        id -> Id,
        org -> Text,
        name -> Text,
        payload -> Json,
        routing_key -> Nullable<Text>,
        source_repo -> Nullable<Text>,
        run_id -> Nullable<Id>,
        job_id -> Nullable<Id>,
        emitted_by -> Text,
        registration_id -> Nullable<Id>,
        target_repos -> Json,
        chain_depth -> BigInt,
        emit_key -> Nullable<Text>,
        status -> Text,
        matched_count -> BigInt,
        attempts -> BigInt,
        claimed_by -> Nullable<Text>,
        claimed_at -> Nullable<Ts>,
        next_attempt_at -> Nullable<Ts>,
        last_error -> Nullable<Text>,
        note -> Nullable<Text>,
        trace -> Nullable<Json>,
        run_ids -> Json,
        dlq_reason -> Nullable<Text>,
        request_id -> Text,
        created_at -> Ts,
        finished_at -> Nullable<Ts>,
        chain_root -> Nullable<Id>,
        claims -> BigInt,
    }
}

diesel::table! {
    use diesel::sql_types::{BigInt, Binary, Bool, Json, Nullable, Text};
    use super::backend::sql::{Id, Ts};

    schedule_state (registration_id, schedule_key) {
        registration_id -> Id,
        schedule_key -> Text,
        cursor_at -> Ts,
        last_fired_at -> Nullable<Ts>,
        last_event_id -> Nullable<Id>,
    }
}

diesel::table! {
    use diesel::sql_types::{BigInt, Binary, Bool, Json, Nullable, Text};
    use super::backend::sql::{Id, Ts};

    batch_windows (registration_id) {
        registration_id -> Id,
        opened_at -> Ts,
        closes_at -> Ts,
        total -> BigInt,
        runs -> Json,
    }
}

diesel::table! {
    use diesel::sql_types::{BigInt, Binary, Bool, Json, Nullable, Text};
    use super::backend::sql::{Id, Ts};

    event_trust (id) {
        id -> Id,
        org -> Text,
        source_routing_key -> Text,
        source_repo -> Text,
        target_routing_key -> Text,
        target_repo -> Text,
        allowed_events -> Nullable<Json>,
        enabled -> Bool,
        created_by -> Text,
        created_at -> Ts,
    }
}

diesel::table! {
    use diesel::sql_types::{BigInt, Binary, Bool, Json, Nullable, Text};
    use super::backend::sql::{Id, Ts};

    generated_jobs (job_id) {
        job_id -> Id,
        run_id -> Id,
        epoch -> BigInt,
        digest -> Text,
        job_count -> BigInt,
        wants_hosts -> Bool,
        reported_at -> Ts,
    }
}

diesel::table! {
    use diesel::sql_types::{BigInt, Binary, Bool, Json, Nullable, Text};
    use super::backend::sql::{Id, Ts};

    job_gates (job_id) {
        job_id -> Id,
        run_id -> Id,
        event_id -> Nullable<Id>,
        event_name -> Text,
        optional -> Bool,
        refused -> Nullable<Text>,
        created_at -> Ts,
        settled_at -> Nullable<Ts>,
    }
}
