//! Configuration: flags over `KICI_*` variables over the TOML file over defaults. Every problem is found at once, each
//! names its key, the layer it came from and the remedy.

mod keys;
mod load;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

pub use keys::{KEYS, Key, Kind};
use kici_events::AdmissionConfig;
pub use load::{Layer, Layers, Origin, reference_page};
use secrecy::SecretString;

/// Delay of the runtime's timers above which no delivery waits for its turn.
const MAX_LAG: Duration = Duration::from_millis(200);

/// The effective configuration of an orchestrator.
#[derive(Debug)]
pub struct Config {
    /// `instance.id`; generated when absent.
    pub instance_id: Option<String>,
    /// `instance.data_dir`; chosen at start when absent.
    pub data_dir: Option<PathBuf>,
    /// `server.listen`.
    pub listen: SocketAddr,
    /// `server.public_url`.
    pub public_url: Option<String>,
    /// `database.*`.
    pub database: DatabaseConfig,
    /// `object_store.url` as a directory.
    pub objects_dir: Option<PathBuf>,
    /// `secrets.key`, or the contents of `secrets.key_file`.
    pub secrets_key: Option<SecretString>,
    /// `sources.local_paths`.
    pub local_paths: Vec<PathBuf>,
    /// `ingest.*`.
    pub ingest: IngestConfig,
    /// `event_log.*`.
    pub event_log: EventLogConfig,
    /// `retention.*` and its kin.
    pub retention: RetentionConfig,
    /// Caches and artifacts.
    pub stored: StoredConfig,
    /// `events.*` and `cron.*`.
    pub events: EventKeys,
    /// `lockfile_cache.max`.
    pub workflow_cache_entries: usize,
    /// `agent.*`, `queue.*` and `stale.*`.
    pub dispatch: DispatchKeys,
    /// `roster.*`.
    pub roster: RosterKeys,
    /// `log.level`.
    pub log_level: String,
    /// `log.format`.
    pub log_format: String,
    /// `shutdown.grace_ms`.
    pub shutdown_grace: Duration,
    /// `startup.backoff_ms`.
    pub startup_backoff: Duration,
}

/// `database.*`.
#[derive(Debug)]
pub struct DatabaseConfig {
    /// `database.url`; a file in the data directory when absent. May hold a password.
    pub url: Option<SecretString>,
    /// `database.pool_max`.
    pub pool_max: usize,
    /// `database.durability` is `full`.
    pub durable: bool,
}

/// `ingest.*`.
#[derive(Clone, Debug)]
pub struct IngestConfig {
    /// Largest body in bytes.
    pub max_body_bytes: usize,
    /// Deliveries processed at the same time.
    pub workers: usize,
    /// Who is let in.
    pub admission: AdmissionConfig,
    /// Deliveries kept as overflow.
    pub overflow_rows: u32,
    /// Age at which one of them is dead.
    pub overflow_age: Duration,
    /// Age at which a claim of a silent process is void.
    pub claim_timeout: Duration,
    /// Attempts before a delivery is dead.
    pub max_attempts: u32,
}

/// What is kept for how many days; 0 is for ever.
#[derive(Clone, Copy, Debug)]
pub struct RetentionConfig {
    /// `event_log.payload_days`; also for decision traces.
    pub payload_days: u32,
    /// `event_log.row_days`.
    pub delivery_days: u32,
    /// `queue.row_ttl_days`.
    pub queue_days: u32,
    /// `retention.logs_days`.
    pub logs_days: u32,
    /// `retention.runs_days`.
    pub runs_days: u32,
    /// `retention.audit_days`.
    pub audit_days: u32,
}

/// `cache.*`, `artifacts.*` and `retention.artifacts_days`.
#[derive(Clone, Copy, Debug)]
pub struct StoredConfig {
    /// `cache.user_quota_bytes`: of all caches of an organisation, so also of one.
    pub cache_quota: u64,
    /// `cache.user_ttl_ms`, from the last reading.
    pub cache_ttl: Duration,
    /// `artifacts.max_bytes`: of one.
    pub artifact_bytes: u64,
    /// `artifacts.max_per_run`.
    pub artifacts_per_run: u32,
    /// `artifacts.quota_bytes`: of all of an organisation.
    pub artifact_quota: u64,
    /// `retention.artifacts_days`; none keeps them.
    pub artifact_ttl: Option<Duration>,
}

/// `event_log.*`.
#[derive(Clone, Debug)]
pub struct EventLogConfig {
    /// Largest body that is kept, in bytes.
    pub max_payload_bytes: usize,
}

/// `agent.*`, `queue.*` and `stale.*`: what dispatching is tuned by.
#[derive(Clone, Debug)]
pub struct DispatchKeys {
    /// `agent.dispatch_ack_timeout_ms`.
    pub ack_timeout: Duration,
    /// `agent.recovery_window_ms`.
    pub recovery_window: Duration,
    /// `agent.ownership_check_timeout_ms`.
    pub ownership_check_timeout: Duration,
    /// `queue.max_depth`.
    pub max_depth: u64,
    /// `queue.backpressure_threshold`; 0 never warns.
    pub backpressure_threshold: u64,
    /// `queue.timeout_ms`; none waits for ever.
    pub queue_timeout: Option<Duration>,
    /// `queue.max_attempts`.
    pub max_attempts: u32,
    /// `queue.unroutable_grace_ms`; none waits.
    pub unroutable_grace: Option<Duration>,
    /// `scaler.pending_sweep_interval_ms`.
    pub pending_sweep: Duration,
    /// `scaler.reconnect_grace_ms`.
    pub scaler_grace: Duration,
    /// `concurrency.wait_timeout_ms`.
    pub concurrency_wait: Duration,
    /// `stale.job_heartbeat_ms`.
    pub job_heartbeat: Duration,
    /// `stale.threshold_multiplier`.
    pub stale_multiplier: u32,
}

/// `events.*` and `cron.*`: the internal bus.
#[derive(Clone, Copy, Debug)]
pub struct EventKeys {
    /// `events.max_chain_depth`.
    pub max_chain_depth: u32,
    /// `events.rate_per_workflow_per_minute`.
    pub per_minute: u32,
    /// `events.ttl_seconds`; none keeps them.
    pub ttl: Option<Duration>,
    /// `events.max_attempts`.
    pub max_attempts: u32,
    /// `events.lease_ms`.
    pub lease: Duration,
    /// `events.retry_base_ms`.
    pub retry_base: Duration,
    /// `events.retry_max_ms`.
    pub retry_max: Duration,
    /// `events.retry_scan_ms`.
    pub scan: Duration,
    /// `cron.tick_ms`.
    pub cron_tick: Duration,
}

/// `roster.*`: what is known of hosts, and for how long.
#[derive(Clone, Copy, Debug)]
pub struct RosterKeys {
    /// `roster.grace_ms`.
    pub grace: Duration,
    /// `roster.ttl_ms`.
    pub ttl: Duration,
    /// `roster.reboot_deadline_ms`.
    pub reboot_deadline: Duration,
    /// `roster.max_fanout_hosts`.
    pub max_fanout_hosts: usize,
}

/// All that is wrong with a configuration.
#[derive(Debug, thiserror::Error)]
#[error("{} in the configuration:\n{}", plural(.problems.len()), .problems.join("\n"))]
pub struct ConfigError {
    /// One line per problem: `key: problem (value from layer)`.
    pub problems: Vec<String>,
}

fn plural(count: usize) -> String {
    if count == 1 { "1 problem".to_owned() } else { format!("{count} problems") }
}

/// A duration of `ms`; 0 means no limit.
fn limit(ms: u64) -> Option<Duration> {
    (ms > 0).then(|| Duration::from_millis(ms))
}

impl Config {
    /// Merges and checks the layers.
    ///
    /// # Errors
    /// [`ConfigError`] with every problem found.
    pub fn load(layers: &Layers) -> Result<Self, ConfigError> {
        let mut values = load::merge(layers)?;
        let config = Self {
            instance_id: values.text_opt("instance.id"),
            data_dir: values.path_opt("instance.data_dir"),
            listen: values.address("server.listen"),
            public_url: values.text_opt("server.public_url"),
            database: DatabaseConfig {
                url: values.secret_opt("database.url"),
                pool_max: values.size("database.pool_max"),
                durable: values.text("database.durability") == "full",
            },
            objects_dir: values.file_url_opt("object_store.url"),
            secrets_key: values.secret_or_file("secrets.key", "secrets.key_file"),
            local_paths: values.paths("sources.local_paths"),
            ingest: IngestConfig {
                max_body_bytes: values.size("ingest.max_body_bytes"),
                workers: values.size("ingest.workers"),
                admission: AdmissionConfig {
                    max_in_flight: values.size("ingest.max_in_flight"),
                    per_org: values.size("ingest.per_org"),
                    queue_depth: values.size("ingest.queue_depth"),
                    queue_wait: values.millis("ingest.queue_wait_ms"),
                    max_lag: MAX_LAG,
                },
                overflow_rows: values.small("ingest.overflow_rows"),
                overflow_age: values.millis("ingest.overflow_age_ms"),
                claim_timeout: values.millis("ingest.claim_timeout_ms"),
                max_attempts: values.small("ingest.max_attempts"),
            },
            event_log: EventLogConfig { max_payload_bytes: values.size("event_log.max_payload_bytes") },
            retention: RetentionConfig {
                payload_days: values.small("event_log.payload_days"),
                delivery_days: values.small("event_log.row_days"),
                queue_days: values.small("queue.row_ttl_days"),
                logs_days: values.small("retention.logs_days"),
                runs_days: values.small("retention.runs_days"),
                audit_days: values.small("retention.audit_days"),
            },
            stored: StoredConfig {
                cache_quota: values.number("cache.user_quota_bytes"),
                cache_ttl: values.millis("cache.user_ttl_ms"),
                artifact_bytes: values.number("artifacts.max_bytes"),
                artifacts_per_run: values.small("artifacts.max_per_run"),
                artifact_quota: values.number("artifacts.quota_bytes"),
                artifact_ttl: limit(values.number("retention.artifacts_days").saturating_mul(86_400_000)),
            },
            events: EventKeys {
                max_chain_depth: values.small("events.max_chain_depth"),
                per_minute: values.small("events.rate_per_workflow_per_minute"),
                ttl: limit(values.number("events.ttl_seconds").saturating_mul(1000)),
                max_attempts: values.small("events.max_attempts"),
                lease: values.millis("events.lease_ms"),
                retry_base: values.millis("events.retry_base_ms"),
                retry_max: values.millis("events.retry_max_ms"),
                scan: values.millis("events.retry_scan_ms"),
                cron_tick: values.millis("cron.tick_ms"),
            },
            workflow_cache_entries: values.size("lockfile_cache.max"),
            dispatch: DispatchKeys {
                ack_timeout: values.millis("agent.dispatch_ack_timeout_ms"),
                recovery_window: values.millis("agent.recovery_window_ms"),
                ownership_check_timeout: values.millis("agent.ownership_check_timeout_ms"),
                max_depth: values.number("queue.max_depth"),
                backpressure_threshold: values.number("queue.backpressure_threshold"),
                queue_timeout: limit(values.number("queue.timeout_ms")),
                max_attempts: values.small("queue.max_attempts"),
                unroutable_grace: limit(values.number("queue.unroutable_grace_ms")),
                pending_sweep: values.millis("scaler.pending_sweep_interval_ms"),
                scaler_grace: values.millis("scaler.reconnect_grace_ms"),
                concurrency_wait: values.millis("concurrency.wait_timeout_ms"),
                job_heartbeat: values.millis("stale.job_heartbeat_ms"),
                stale_multiplier: values.small("stale.threshold_multiplier"),
            },
            roster: RosterKeys {
                grace: values.millis("roster.grace_ms"),
                ttl: values.millis("roster.ttl_ms"),
                reboot_deadline: values.millis("roster.reboot_deadline_ms"),
                max_fanout_hosts: values.size("roster.max_fanout_hosts"),
            },
            log_level: values.text("log.level"),
            log_format: values.text("log.format"),
            shutdown_grace: values.millis("shutdown.grace_ms"),
            startup_backoff: values.millis("startup.backoff_ms"),
        };
        values.finish()?;
        Ok(config)
    }
}
