//! The tables, once for both databases; a test compares them with what the migrations make.

mod bus;
mod claims;
mod kept;

pub(crate) use bus::{batch_windows, event_trust, events, generated_jobs, job_gates, schedule_state};
pub(crate) use claims::scaler_claims;
pub(crate) use kept::{artifacts, cache_entries, stored_objects, uploads};

use super::backend;

diesel::table! {
    use diesel::sql_types::{BigInt, Binary, Bool, Json, Nullable, Text};
    use super::backend::sql::{Id, Ts};

    schema_compat (migration) {
        migration -> Text,
        min_version -> Text,
    }
}

diesel::table! {
    use diesel::sql_types::{BigInt, Binary, Bool, Json, Nullable, Text};
    use super::backend::sql::{Id, Ts};

    meta (key) {
        key -> Text,
        value -> Text,
    }
}

diesel::table! {
    use diesel::sql_types::{BigInt, Binary, Bool, Json, Nullable, Text};
    use super::backend::sql::{Id, Ts};

    cluster_instances (instance_id) {
        instance_id -> Text,
        incarnation -> Id,
        role -> Text,
        address -> Nullable<Text>,
        version -> Text,
        started_at -> Ts,
        last_seen_at -> Ts,
        draining -> Bool,
    }
}

diesel::table! {
    use diesel::sql_types::{BigInt, Binary, Bool, Json, Nullable, Text};
    use super::backend::sql::{Id, Ts};

    leases (name) {
        name -> Text,
        holder -> Text,
        term -> BigInt,
        expires_at -> Ts,
        renewed_at -> Ts,
        incarnation -> Nullable<Id>,
    }
}

diesel::table! {
    use diesel::sql_types::{BigInt, Binary, Bool, Json, Nullable, Text};
    use super::backend::sql::{Id, Ts};

    sources (id) {
        id -> Id,
        org -> Text,
        name -> Text,
        kind -> Text,
        routing_key -> Text,
        config -> Json,
        sealed_secrets -> Nullable<Text>,
        enabled -> Bool,
        deleted_at -> Nullable<Ts>,
        version -> BigInt,
        created_at -> Ts,
    }
}

diesel::table! {
    use diesel::sql_types::{BigInt, Binary, Bool, Json, Nullable, Text};
    use super::backend::sql::{Id, Ts};

    deliveries (id) {
        id -> Id,
        org -> Text,
        source_id -> Id,
        delivery_id -> Text,
        event -> Text,
        action -> Nullable<Text>,
        provider -> Text,
        channel -> Text,
        status -> Text,
        matched_count -> BigInt,
        repo -> Nullable<Text>,
        git_ref -> Nullable<Text>,
        sha -> Nullable<Text>,
        first_run_id -> Nullable<Id>,
        error -> Nullable<Text>,
        note -> Nullable<Text>,
        payload_key -> Nullable<Text>,
        payload_sha256 -> Text,
        payload_bytes -> BigInt,
        payload_omitted -> Nullable<Text>,
        attempts -> BigInt,
        claimed_by -> Nullable<Text>,
        claimed_at -> Nullable<Ts>,
        next_attempt_at -> Nullable<Ts>,
        received_at -> Ts,
        finished_at -> Nullable<Ts>,
        request_id -> Text,
        claims -> BigInt,
    }
}

diesel::table! {
    use diesel::sql_types::{BigInt, Binary, Bool, Json, Nullable, Text};
    use super::backend::sql::{Id, Ts};

    delivery_bodies (delivery_id) {
        delivery_id -> Id,
        headers -> Json,
        body -> Binary,
    }
}

diesel::table! {
    use diesel::sql_types::{BigInt, Binary, Bool, Json, Nullable, Text};
    use super::backend::sql::{Id, Ts};

    decision_traces (delivery_id) {
        delivery_id -> Id,
        body -> Json,
        created_at -> Ts,
    }
}

diesel::table! {
    use diesel::sql_types::{BigInt, Binary, Bool, Json, Nullable, Text};
    use super::backend::sql::{Id, Ts};

    registrations (id) {
        id -> Id,
        org -> Text,
        routing_key -> Text,
        source_id -> Id,
        repo -> Text,
        workflow_name -> Text,
        lock_digest -> Text,
        sha -> Text,
        default_branch -> Nullable<Text>,
        trigger_types -> Json,
        enabled -> Bool,
        disabled_by -> Nullable<Text>,
        updated_at -> Ts,
    }
}

diesel::table! {
    use diesel::sql_types::{BigInt, Binary, Bool, Json, Nullable, Text};
    use super::backend::sql::{Id, Ts};

    registry_version (id) {
        id -> BigInt,
        version -> BigInt,
    }
}

diesel::table! {
    use diesel::sql_types::{BigInt, Binary, Bool, Json, Nullable, Text};
    use super::backend::sql::{Id, Ts};

    lock_documents (digest) {
        digest -> Text,
        body -> Binary,
        created_at -> Ts,
    }
}

diesel::table! {
    use diesel::sql_types::{BigInt, Binary, Bool, Json, Nullable, Text};
    use super::backend::sql::{Id, Ts};

    runs (id) {
        id -> Id,
        org -> Text,
        source_id -> Id,
        delivery_row_id -> Nullable<Id>,
        dedup_key -> Text,
        repo -> Text,
        git_ref -> Nullable<Text>,
        sha -> Text,
        workflow_name -> Text,
        run_name -> Text,
        lock_digest -> Text,
        event -> Json,
        trigger_kind -> Text,
        status -> Text,
        failure_reason -> Nullable<Text>,
        failure_message -> Nullable<Text>,
        cancel_requested_at -> Nullable<Ts>,
        cancelled_by -> Nullable<Text>,
        attempt -> BigInt,
        parent_run_id -> Nullable<Id>,
        inputs -> Json,
        request_id -> Text,
        chain_depth -> BigInt,
        created_at -> Ts,
        started_at -> Nullable<Ts>,
        finished_at -> Nullable<Ts>,
        timeout_ms -> Nullable<BigInt>,
        deadline -> Nullable<Ts>,
        concurrency -> Nullable<Json>,
        logs_expired_at -> Nullable<Ts>,
    }
}

diesel::table! {
    use diesel::sql_types::{BigInt, Binary, Bool, Json, Nullable, Text};
    use super::backend::sql::{Id, Ts};

    jobs (id) {
        id -> Id,
        run_id -> Id,
        name -> Text,
        base_name -> Text,
        job_index -> BigInt,
        position -> BigInt,
        variant_label -> Nullable<Text>,
        matrix -> Nullable<Json>,
        display_name -> Text,
        status -> Text,
        needs_satisfied -> Bool,
        ready_at -> Nullable<Ts>,
        max_parallel -> Nullable<BigInt>,
        fail_fast -> Bool,
        group_name -> Nullable<Text>,
        failure_reason -> Nullable<Text>,
        failure_class -> Nullable<Text>,
        failure_message -> Nullable<Text>,
        evidence -> Nullable<Json>,
        agent_id -> Nullable<Text>,
        dispatch_epoch -> BigInt,
        attempt -> BigInt,
        outputs -> Json,
        routing_reason -> Nullable<Text>,
        log_bytes -> BigInt,
        created_at -> Ts,
        started_at -> Nullable<Ts>,
        finished_at -> Nullable<Ts>,
        last_heartbeat_at -> Nullable<Ts>,
        timeout_ms -> Nullable<BigInt>,
        cancel_deadline -> Nullable<Ts>,
        fanout -> Nullable<Json>,
    }
}

diesel::table! {
    use diesel::sql_types::{BigInt, Binary, Bool, Json, Nullable, Text};
    use super::backend::sql::{Id, Ts};

    job_needs (run_id, job_name, upstream_name) {
        run_id -> Id,
        job_name -> Text,
        upstream_name -> Text,
        run_on -> Json,
        group_name -> Nullable<Text>,
        generator -> Nullable<Text>,
        resolved -> Bool,
    }
}

diesel::table! {
    use diesel::sql_types::{BigInt, Binary, Bool, Json, Nullable, Text};
    use super::backend::sql::{Id, Ts};

    steps (job_id, epoch, step_key) {
        job_id -> Id,
        epoch -> BigInt,
        step_key -> Text,
        ordinal -> BigInt,
        name -> Text,
        status -> Text,
        exit_code -> Nullable<BigInt>,
        message -> Nullable<Text>,
        outputs -> Json,
        started_at -> Nullable<Ts>,
        finished_at -> Nullable<Ts>,
        log_bytes -> BigInt,
        log_lines -> BigInt,
        missing_bytes -> BigInt,
        missing_lines -> BigInt,
        failure_allowed -> Bool,
        summary -> Nullable<Text>,
        log_state -> Nullable<Text>,
        attempt -> BigInt,
        check_result -> Nullable<Text>,
        drift -> Nullable<Text>,
        group_name -> Nullable<Text>,
    }
}

diesel::table! {
    use diesel::sql_types::{BigInt, Binary, Bool, Json, Nullable, Text};
    use super::backend::sql::{Id, Ts};

    queue_selectors (digest) {
        digest -> Text,
        selector -> Json,
        requires_machine_id -> Nullable<Text>,
        created_at -> Ts,
        pinned_agent_id -> Nullable<Text>,
    }
}

diesel::table! {
    use diesel::sql_types::{BigInt, Binary, Bool, Json, Nullable, Text};
    use super::backend::sql::{Id, Ts};

    dispatch_queue (id) {
        id -> Id,
        run_id -> Id,
        workflow_name -> Text,
        job_name -> Text,
        status -> Text,
        priority -> BigInt,
        selector_digest -> Text,
        created_at -> Ts,
        expires_at -> Nullable<Ts>,
        dispatched_at -> Nullable<Ts>,
        dispatch_attempts -> BigInt,
        dispatch_epoch -> BigInt,
        agent_id -> Nullable<Text>,
        owner_instance_id -> Nullable<Text>,
        ack_deadline -> Nullable<Ts>,
        ack_agent_id -> Nullable<Text>,
        acked_at -> Nullable<Ts>,
        started_at -> Nullable<Ts>,
        recovery_deadline -> Nullable<Ts>,
        recovery_agent_id -> Nullable<Text>,
        unroutable_since -> Nullable<Ts>,
        pinned_agent_id -> Nullable<Text>,
        finished_at -> Nullable<Ts>,
        last_provisioning_error -> Nullable<Text>,
    }
}

diesel::table! {
    use diesel::sql_types::{BigInt, Binary, Bool, Json, Nullable, Text};
    use super::backend::sql::{Id, Ts};

    dispatch_history (job_id, dispatch_epoch) {
        job_id -> Id,
        dispatch_epoch -> BigInt,
        agent_id -> Text,
        instance_id -> Text,
        dispatched_at -> Ts,
        ended_at -> Nullable<Ts>,
        outcome -> Nullable<Text>,
        reason -> Nullable<Text>,
    }
}

diesel::table! {
    use diesel::sql_types::{BigInt, Binary, Bool, Json, Nullable, Text};
    use super::backend::sql::{Id, Ts};

    agent_tokens (id) {
        id -> Id,
        token_hash -> Text,
        token_prefix -> Text,
        label -> Nullable<Text>,
        labels -> Nullable<Json>,
        mandatory_labels -> Nullable<Json>,
        agent_type -> Text,
        kind -> Text,
        bound_agent_id -> Nullable<Text>,
        created_by -> Text,
        created_at -> Ts,
        last_seen_at -> Nullable<Ts>,
        expires_at -> Nullable<Ts>,
        revoked_at -> Nullable<Ts>,
        consumed_at -> Nullable<Ts>,
    }
}

diesel::table! {
    use diesel::sql_types::{BigInt, Binary, Bool, Json, Nullable, Text};
    use super::backend::sql::{Id, Ts};

    admin_tokens (id) {
        id -> Id,
        token_hash -> Text,
        token_prefix -> Text,
        label -> Text,
        role -> Text,
        routing_key -> Nullable<Text>,
        created_by -> Text,
        created_at -> Ts,
        last_used_at -> Nullable<Ts>,
        expires_at -> Nullable<Ts>,
        revoked_at -> Nullable<Ts>,
    }
}

diesel::table! {
    use diesel::sql_types::{BigInt, Binary, Bool, Json, Nullable, Text};
    use super::backend::sql::{Id, Ts};

    host_roster (agent_id) {
        agent_id -> Text,
        token_id -> Nullable<Id>,
        lifecycle_class -> Text,
        scaler_managed -> Bool,
        labels -> Json,
        hostname -> Nullable<Text>,
        platform -> Nullable<Text>,
        arch -> Nullable<Text>,
        version -> Nullable<Text>,
        machine_id -> Nullable<Text>,
        connected_instance_id -> Nullable<Text>,
        last_seen -> Nullable<Ts>,
        host_properties -> Json,
        created_at -> Ts,
        updated_at -> Ts,
        declared_at -> Nullable<Ts>,
        declared_by -> Nullable<Text>,
        declared_hostname -> Nullable<Text>,
        declared_labels -> Nullable<Json>,
        boot_id -> Nullable<Text>,
        reboot_pending_until -> Nullable<Ts>,
        reboot_job_id -> Nullable<Id>,
        reboot_boot_id -> Nullable<Text>,
        reboot_by -> Nullable<Text>,
    }
}

diesel::table! {
    use diesel::sql_types::{BigInt, Binary, Bool, Json, Nullable, Text};
    use super::backend::sql::{Id, Ts};

    access_log (id) {
        id -> Id,
        org -> Nullable<Text>,
        actor_type -> Text,
        actor_id -> Text,
        actor_meta -> Nullable<Json>,
        action -> Text,
        source -> Text,
        outcome -> Text,
        target_type -> Nullable<Text>,
        target_id -> Nullable<Text>,
        request_id -> Nullable<Text>,
        routing_key -> Nullable<Text>,
        error_message -> Nullable<Text>,
        created_at -> Ts,
    }
}

diesel::table! {
    use diesel::sql_types::{BigInt, Binary, Bool, Json, Nullable, Text};
    use super::backend::sql::{Id, Ts};

    job_git_credentials (job_id) {
        job_id -> Id,
        declared -> Json,
    }
}

diesel::table! {
    use diesel::sql_types::{BigInt, Binary, Bool, Json, Nullable, Text};
    use super::backend::sql::{Id, Ts};

    secret_audit_log (id) {
        id -> Id,
        org -> Text,
        actor_type -> Text,
        actor_id -> Text,
        role -> Nullable<Text>,
        action -> Text,
        scope -> Nullable<Text>,
        key -> Nullable<Text>,
        context_name -> Nullable<Text>,
        run_id -> Nullable<Id>,
        job_id -> Nullable<Id>,
        outcome -> Text,
        metadata -> Nullable<Json>,
        created_at -> Ts,
    }
}

diesel::table! {
    use diesel::sql_types::{BigInt, Binary, Bool, Json, Nullable, Text};
    use super::backend::sql::{Id, Ts};

    request_keys (scope, key) {
        scope -> Text,
        key -> Text,
        result_id -> Id,
        created_at -> Ts,
    }
}

diesel::table! {
    use diesel::sql_types::{BigInt, Binary, Bool, Json, Nullable, Text};
    use super::backend::sql::{Id, Ts};

    outbox (id) {
        id -> Id,
        kind -> Text,
        payload -> Json,
        created_at -> Ts,
        attempts -> BigInt,
        next_attempt_at -> Ts,
    }
}

diesel::table! {
    use diesel::sql_types::{BigInt, Binary, Bool, Json, Nullable, Text};
    use super::backend::sql::{Id, Ts};

    concurrency_slots (id) {
        id -> Id,
        org -> Text,
        repo -> Text,
        group_key -> Text,
        run_id -> Id,
        holder_id -> Id,
        max_active -> BigInt,
        status -> Text,
        superseded_by -> Nullable<Id>,
        applied -> Bool,
        run_created_at -> Ts,
        position -> BigInt,
        created_at -> Ts,
        acquired_at -> Nullable<Ts>,
        ended_at -> Nullable<Ts>,
    }
}

diesel::allow_tables_to_appear_in_same_query!(
    schema_compat,
    meta,
    cluster_instances,
    leases,
    sources,
    deliveries,
    delivery_bodies,
    decision_traces,
    registrations,
    registry_version,
    lock_documents,
    runs,
    jobs,
    job_needs,
    steps,
    queue_selectors,
    dispatch_queue,
    dispatch_history,
    agent_tokens,
    admin_tokens,
    host_roster,
    access_log,
    job_git_credentials,
    secret_audit_log,
    request_keys,
    scaler_claims,
    outbox,
    concurrency_slots,
    generated_jobs,
    job_gates,
    events,
    schedule_state,
    batch_windows,
    event_trust,
    stored_objects,
    cache_entries,
    artifacts,
    uploads
);

diesel::joinable!(concurrency_slots -> runs (run_id));
diesel::joinable!(steps -> jobs (job_id));
diesel::joinable!(job_gates -> jobs (job_id));
diesel::joinable!(dispatch_queue -> jobs (id));
diesel::joinable!(dispatch_queue -> queue_selectors (selector_digest));
