//! Every configuration key, once: its default, what it may hold, its variable and what it is for. Loading, the checks for
//! unknown keys, `config check` and `docs/configuration.md` all read this table.

/// What a key may hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Any text.
    Text,
    /// A file system path.
    Path,
    /// `HOST:PORT`.
    Address,
    /// `true` or `false`.
    Bool,
    /// A whole number between the two, both included.
    Number(u64, u64),
    /// One of these words.
    Word(&'static [&'static str]),
    /// Paths; in a variable separated by `:`.
    Paths,
}

/// One key.
#[derive(Debug)]
pub struct Key {
    /// `section.key`, as in the TOML file.
    pub name: &'static str,
    /// What it may hold.
    pub kind: Kind,
    /// Default, in the form a variable has; `None` where it is absent or computed.
    pub default: Option<&'static str>,
    /// Other variables that set it, besides `KICI_SECTION_KEY`.
    pub aliases: &'static [&'static str],
    /// Never printed.
    pub secret: bool,
    /// What it is for, for people.
    pub help: &'static str,
}

impl Key {
    /// The variable that sets this key: `a.b_c` is `KICI_A_B_C`.
    pub fn variable(&self) -> String {
        format!("KICI_{}", self.name.replace('.', "_").to_ascii_uppercase())
    }
}

const fn key(name: &'static str, kind: Kind, default: Option<&'static str>, help: &'static str) -> Key {
    Key { name, kind, default, aliases: &[], secret: false, help }
}

const fn alias(mut key: Key, aliases: &'static [&'static str]) -> Key {
    key.aliases = aliases;
    key
}

const fn secret(mut key: Key) -> Key {
    key.secret = true;
    key
}

const MS_MAX: u64 = 31 * 24 * 3_600_000;

/// All keys, by section.
pub const KEYS: &[Key] = &[
    key(
        "instance.id",
        Kind::Text,
        None,
        "Name of this process in the cluster; generated once and kept in the data directory.",
    ),
    alias(
        key(
            "instance.data_dir",
            Kind::Path,
            None,
            "Where everything local is kept; the first writable of `/var/lib/kici/default` and `$XDG_STATE_HOME/kici/default`.",
        ),
        &["KICI_DATA_DIR"],
    ),
    key(
        "server.listen",
        Kind::Address,
        Some("127.0.0.1:4000"),
        "Address of REST, webhooks, metrics and gRPC, all on one port.",
    ),
    key("server.public_url", Kind::Text, None, "How browsers and forges reach this server; used in links."),
    alias(
        key(
            "database.url",
            Kind::Text,
            None,
            "`sqlite:PATH` or `postgres://…`; by default a SQLite file in the data directory.",
        ),
        &["KICI_DATABASE_URL"],
    ),
    key("database.pool_max", Kind::Number(2, 1000), Some("16"), "Connections for reads (PostgreSQL)."),
    key(
        "database.durability",
        Kind::Word(&["full", "normal"]),
        Some("full"),
        "`full` survives a power cut; `normal` may lose the last commits of SQLite to one.",
    ),
    key("object_store.url", Kind::Text, None, "Where finished logs go: `file:PATH`; by default `<data>/objects`."),
    secret(alias(
        key(
            "secrets.key",
            Kind::Text,
            None,
            "Key that seals secrets at rest: 32 bytes in hex or base64. Generated to `<data>/secret.key` when unset.",
        ),
        &["KICI_SECRET_KEY"],
    )),
    alias(key("secrets.key_file", Kind::Path, None, "File that holds `secrets.key`."), &["KICI_SECRET_KEY_FILE"]),
    key("sources.local_paths", Kind::Paths, Some(""), "Directories that repositories of `local` sources must lie in."),
    key("ingest.max_body_bytes", Kind::Number(1024, 104_857_600), Some("26214400"), "Largest webhook body."),
    key("ingest.workers", Kind::Number(1, 256), Some("16"), "Deliveries processed at the same time."),
    key(
        "ingest.max_in_flight",
        Kind::Number(1, 100_000),
        Some("256"),
        "Deliveries stored at the same time; more wait for their turn.",
    ),
    key("ingest.per_org", Kind::Number(1, 100_000), Some("32"), "Of these, those of one organisation."),
    key("ingest.queue_depth", Kind::Number(0, 1_000_000), Some("1000"), "Deliveries that may wait for their turn."),
    key(
        "ingest.queue_wait_ms",
        Kind::Number(0, 60_000),
        Some("3000"),
        "How long each may wait; then it is kept as overflow and answered with 429.",
    ),
    key(
        "ingest.overflow_rows",
        Kind::Number(0, 1_000_000),
        Some("5000"),
        "Deliveries kept as overflow; more are answered with 429 and not kept.",
    ),
    key(
        "ingest.overflow_age_ms",
        Kind::Number(1000, MS_MAX),
        Some("900000"),
        "Deliveries that waited longer as overflow go to the dead letters.",
    ),
    key(
        "ingest.claim_timeout_ms",
        Kind::Number(1000, MS_MAX),
        Some("900000"),
        "After this a delivery claimed by a silent process is taken over.",
    ),
    key(
        "ingest.max_attempts",
        Kind::Number(1, 100),
        Some("5"),
        "Attempts at a delivery before it goes to the dead letters.",
    ),
    key(
        "event_log.max_payload_bytes",
        Kind::Number(0, 104_857_600),
        Some("5242880"),
        "Larger bodies are processed but not kept.",
    ),
    key(
        "event_log.payload_days",
        Kind::Number(0, 36_500),
        Some("30"),
        "Bodies older than this are removed; 0 keeps them.",
    ),
    key(
        "event_log.row_days",
        Kind::Number(0, 36_500),
        Some("90"),
        "Delivery rows older than this are removed; 0 keeps them.",
    ),
    key(
        "events.max_chain_depth",
        Kind::Number(1, 1000),
        Some("10"),
        "Longest chain of events of which each led to the next; what goes beyond is refused.",
    ),
    key(
        "events.rate_per_workflow_per_minute",
        Kind::Number(1, 1_000_000),
        Some("100"),
        "Events of one name that steps of one source, or operators, may emit in a minute.",
    ),
    key(
        "events.ttl_seconds",
        Kind::Number(0, 315_360_000),
        Some("604800"),
        "Events that are done with are removed after this; dead ones stay. 0 keeps all.",
    ),
    key(
        "events.max_attempts",
        Kind::Number(1, 100),
        Some("5"),
        "Attempts to deliver an event before it is a dead letter.",
    ),
    key(
        "events.lease_ms",
        Kind::Number(5000, MS_MAX),
        Some("60000"),
        "A claim on an event older than this is void; one attempt takes less.",
    ),
    key(
        "events.retry_base_ms",
        Kind::Number(10, MS_MAX),
        Some("5000"),
        "Pause after the first failed attempt to deliver an event; it doubles.",
    ),
    key(
        "events.retry_max_ms",
        Kind::Number(10, MS_MAX),
        Some("300000"),
        "Longest pause between two attempts to deliver an event.",
    ),
    key(
        "events.retry_scan_ms",
        Kind::Number(10, MS_MAX),
        Some("5000"),
        "How often events are looked for that no signal told of.",
    ),
    key(
        "cron.tick_ms",
        Kind::Number(100, 3_600_000),
        Some("30000"),
        "How often the times of schedules are looked at; the most that a schedule is late.",
    ),
    key(
        "lockfile_cache.max",
        Kind::Number(1, 100_000),
        Some("500"),
        "Workflow sets kept in memory, one per repository and commit.",
    ),
    key(
        "agent.dispatch_ack_timeout_ms",
        Kind::Number(1000, MS_MAX),
        Some("10000"),
        "An agent must acknowledge an offer within this time.",
    ),
    key(
        "agent.recovery_window_ms",
        Kind::Number(1000, MS_MAX),
        Some("120000"),
        "How long a lost agent may take to come back to a started job.",
    ),
    key(
        "agent.ownership_check_timeout_ms",
        Kind::Number(100, MS_MAX),
        Some("5000"),
        "Limit of the question whether a job is an agent's.",
    ),
    alias(
        key(
            "queue.max_depth",
            Kind::Number(1, 10_000_000),
            Some("1000"),
            "Jobs that may wait; more fail at once with `queue_full`.",
        ),
        &["KICI_QUEUE_MAX_DEPTH"],
    ),
    key(
        "queue.backpressure_threshold",
        Kind::Number(0, 10_000_000),
        Some("100"),
        "More waiting jobs than this for two measurements, 5 s apart, are warned about; 0 never warns.",
    ),
    key(
        "queue.timeout_ms",
        Kind::Number(0, MS_MAX),
        Some("3600000"),
        "A job that waited this long for an agent fails; 0 waits for ever.",
    ),
    key(
        "queue.max_attempts",
        Kind::Number(1, 100),
        Some("5"),
        "Deliveries of a job to agents before it fails with `gave_up`.",
    ),
    key(
        "queue.row_ttl_days",
        Kind::Number(0, 36_500),
        Some("30"),
        "Rows of ended jobs leave the queue after this; 0 keeps them.",
    ),
    key(
        "retention.logs_days",
        Kind::Number(0, 36_500),
        Some("90"),
        "Logs of runs that ended this long ago are removed; 0 keeps them.",
    ),
    key(
        "retention.runs_days",
        Kind::Number(0, 36_500),
        Some("365"),
        "Runs that ended this long ago are removed, with their logs; 0 keeps them.",
    ),
    key(
        "retention.audit_days",
        Kind::Number(0, 36_500),
        Some("365"),
        "Entries of the audit log of secrets are removed after this; 0 keeps them.",
    ),
    key(
        "retention.artifacts_days",
        Kind::Number(0, 36_500),
        Some("30"),
        "Artifacts whose workflow names no `expire_in` are removed after this; 0 keeps them.",
    ),
    key("artifacts.max_bytes", Kind::Number(1024, 1 << 40), Some("1073741824"), "Largest artifact, packed."),
    key("artifacts.max_per_run", Kind::Number(1, 1000), Some("50"), "Artifacts of one run."),
    key(
        "artifacts.quota_bytes",
        Kind::Number(1024, 1 << 50),
        Some("21474836480"),
        "All artifacts of an organisation together; beyond that uploads are refused.",
    ),
    key(
        "cache.user_quota_bytes",
        Kind::Number(1024, 1 << 50),
        Some("5368709120"),
        "All caches of an organisation together; beyond that the ones not read for longest are removed.",
    ),
    key(
        "cache.user_ttl_ms",
        Kind::Number(60_000, 366 * 24 * 3_600_000),
        Some("604800000"),
        "Entries of caches that were not read for this long are removed.",
    ),
    key(
        "queue.unroutable_grace_ms",
        Kind::Number(0, MS_MAX),
        Some("120000"),
        "A job that no known agent could ever run fails after this; 0 lets it wait.",
    ),
    key(
        "scaler.pending_sweep_interval_ms",
        Kind::Number(1000, MS_MAX),
        Some("10000"),
        "How often waiting jobs are offered to the scaler again, besides when room comes free.",
    ),
    key(
        "scaler.reconnect_grace_ms",
        Kind::Number(1000, MS_MAX),
        Some("90000"),
        "How long an agent that a scaler started may be away from a job that it started.",
    ),
    key(
        "roster.grace_ms",
        Kind::Number(120_000, MS_MAX),
        Some("300000"),
        "A connected host that was silent for longer counts as out of contact; signs of life are written once a minute.",
    ),
    key(
        "roster.ttl_ms",
        Kind::Number(1000, MS_MAX),
        Some("1800000"),
        "Ephemeral hosts that are gone stay known for this long; static ones until they are removed.",
    ),
    alias(
        key(
            "roster.reboot_deadline_ms",
            Kind::Number(1000, 86_400_000),
            Some("900000"),
            "How long a host that announced a restart is kept from work, unless it says otherwise.",
        ),
        &["KICI_HOST_REBOOT_DEADLINE_MS"],
    ),
    alias(
        key(
            "roster.max_fanout_hosts",
            Kind::Number(1, 4096),
            Some("1024"),
            "Most hosts that one `runs_on_all` job goes to; a job that means more fails.",
        ),
        &["KICI_MAX_FANOUT_HOSTS"],
    ),
    key(
        "concurrency.wait_timeout_ms",
        Kind::Number(1000, MS_MAX),
        Some("3600000"),
        "A run or job that waited this long for a slot of its concurrency group fails.",
    ),
    key(
        "stale.job_heartbeat_ms",
        Kind::Number(1000, MS_MAX),
        Some("60000"),
        "How often an agent reports a job as alive.",
    ),
    key(
        "stale.threshold_multiplier",
        Kind::Number(2, 100),
        Some("2"),
        "Missed reports after which a job counts as stale.",
    ),
    key("log.level", Kind::Text, Some("info"), "Filter of the program's own log, as in `info,kici_dispatch=debug`."),
    key(
        "log.format",
        Kind::Word(&["auto", "json", "pretty"]),
        Some("auto"),
        "`auto` is JSON unless the output is a terminal.",
    ),
    key("shutdown.grace_ms", Kind::Number(0, MS_MAX), Some("30000"), "Limit of an orderly stop."),
    key(
        "startup.backoff_ms",
        Kind::Number(0, MS_MAX),
        Some("30000"),
        "Wait before exiting on a faulty configuration, so that a supervisor does not spin.",
    ),
];

/// Variables of our programs that are no keys of the orchestrator: names that jobs see, the CLI's and the tests'.
pub fn is_foreign_variable(name: &str) -> bool {
    const PREFIXES: &[&str] = &["KICI_ADMIN_", "KICI_TEST_", "KICI_IS_GLOBAL_", "KICI_SOURCE_", "KICI_WORKFLOW_"];
    const NAMES: &[&str] = &[
        "KICI_CONFIG",
        "KICI_DEV",
        "KICI_REQUIRE_PG",
        "KICI_RUN_ID",
        "KICI_JOB_ID",
        "KICI_JOB_NAME",
        "KICI_WORKFLOW",
        "KICI_EVENT_PATH",
        "KICI_REF",
        "KICI_SHA",
        "KICI_ENV",
        "KICI_PATH",
        "KICI_OUTPUT",
        "KICI_SUMMARY",
        "KICI_DRIFT",
        "KICI_JOBS",
        "KICI_SOCK",
        "KICI_CHECK_MODE",
        "KICI_FANOUT_HOST",
        "KICI_FANOUT_INDEX",
        "KICI_FANOUT_TOTAL",
    ];
    NAMES.contains(&name) || PREFIXES.iter().any(|p| name.starts_with(p))
}
