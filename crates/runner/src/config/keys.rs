//! The keys and the forms of their values.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use secrecy::SecretString;

/// What an agent token begins with; 64 hex digits and a checksum of 6 follow.
const TOKEN_PREFIX: &str = "kici_agent_";
/// What a claim code begins with; as many follow.
const CLAIM_PREFIX: &str = "kici_claim_";

/// One key.
#[derive(Clone, Copy, Debug)]
pub struct Key {
    /// In the file.
    pub name: &'static str,
    /// In the environment.
    pub env: &'static str,
    /// As a flag, without the dashes; empty for what must not stand in an argument list.
    pub flag: &'static str,
    /// What it is for.
    pub about: &'static str,
}

macro_rules! keys {
    ($($name:literal, $env:literal, $flag:literal, $about:literal;)*) => {
        /// Every key of an agent.
        pub const KEYS: &[Key] = &[$(Key { name: $name, env: $env, flag: $flag, about: $about },)*];
    };
}

keys! {
    "orchestrator_url", "KICI_ORCHESTRATOR_URL", "orchestrator-url", "where the orchestrator listens, http:// or https://";
    "agent_id", "KICI_AGENT_ID", "agent-id", "name of this agent; made at the first start otherwise";
    "agent_token", "KICI_AGENT_TOKEN", "", "token of this agent";
    "agent_token_file", "KICI_AGENT_TOKEN_FILE", "agent-token-file", "file that holds the token";
    "labels", "KICI_LABELS", "labels", "labels, separated by commas";
    "properties", "KICI_PROPERTIES", "properties", "facts for people, k=v separated by commas";
    "max_concurrency", "KICI_AGENT_MAX_CONCURRENCY", "max-concurrency", "jobs at once (1)";
    "log_level", "KICI_LOG_LEVEL", "log-level", "filter of the log (info)";
    "log_format", "KICI_LOG_FORMAT", "log-format", "form of the log: auto, json or pretty (auto)";
    "max_log_size_bytes", "KICI_MAX_LOG_SIZE_BYTES", "max-log-size-bytes", "log of one step, 0 is no limit (536870912)";
    "default_step_timeout_ms", "KICI_DEFAULT_STEP_TIMEOUT_MS", "default-step-timeout-ms", "limit of a step that names none (1800000)";
    "job_heartbeat_interval_ms", "KICI_JOB_HEARTBEAT_INTERVAL_MS", "job-heartbeat-interval-ms", "between two signs of life of a job (60000)";
    "log_spool_max_bytes", "KICI_LOG_SPOOL_MAX_BYTES", "log-spool-max-bytes", "unacknowledged log at which a job is paused (268435456)";
    "max_grace_period_ms", "KICI_MAX_GRACE_PERIOD_MS", "max-grace-period-ms", "longest time from SIGTERM to SIGKILL (30000)";
    "shutdown_grace_ms", "KICI_SHUTDOWN_GRACE_MS", "shutdown-grace-ms", "how long jobs may go on after SIGTERM to the agent (10000)";
    "git.timeout_ms", "KICI_GIT_TIMEOUT_MS", "git-timeout-ms", "limit of one git command (120000)";
    "git.allow_insecure_http", "KICI_GIT_ALLOW_INSECURE_HTTP", "git-allow-insecure-http", "git gets credentials for http:// too (false)";
    "git.inherit_host_helpers", "KICI_GIT_INHERIT_HOST_HELPERS", "git-inherit-host-helpers", "credential helpers of the host stay on beside the agent's, and may store what it gives (false)";
    "keep_running_when_fenced", "KICI_KEEP_RUNNING_WHEN_FENCED", "keep-running-when-fenced", "jobs go on after the lease is lost (false)";
    "state_dir", "KICI_STATE_DIR", "state-dir", "what must outlive a restart (/var/lib/kici-agent)";
    "work_dir", "KICI_WORK_DIR", "work-dir", "workspaces (<state_dir>/work)";
    "runtime_dir", "KICI_RUNTIME_DIR", "runtime-dir", "sockets of jobs; a short path (/run/kici-agent)";
    "execution_mode", "KICI_EXECUTION_MODE", "execution-mode", "where steps run that name no container: bare, container (bare)";
    "hardening", "KICI_HARDENING", "hardening", "keep steps from what builds do not need: auto, off (auto)";
    "writable_paths", "KICI_WRITABLE_PATHS", "writable-paths", "what hardened steps may write besides workspace and temporary files ($HOME)";
    "sandbox", "KICI_SANDBOX", "sandbox", "run steps in namespaces of their own, by bwrap (false)";
    "sandbox_network", "KICI_SANDBOX_NETWORK", "sandbox-network", "network of the sandbox: isolated, host (isolated)";
    "sandbox_memory_bytes", "KICI_SANDBOX_MEMORY_BYTES", "sandbox-memory-bytes", "memory of a job, 0 is no limit (0)";
    "sandbox_nano_cpus", "KICI_SANDBOX_NANO_CPUS", "sandbox-nano-cpus", "processor time of a job in billionths of a processor, 0 is no limit (0)";
    "sandbox_user", "KICI_SANDBOX_USER", "sandbox-user", "user that steps run as, where the agent is root";
    "container_socket", "KICI_CONTAINER_SOCKET", "container-socket", "socket of Docker or Podman (that of DOCKER_HOST, else where they put theirs)";
    "container_image", "KICI_CONTAINER_IMAGE", "container-image", "image of jobs that name none, with execution_mode = container";
    "container_allow_privileged", "KICI_CONTAINER_ALLOW_PRIVILEGED", "container-allow-privileged", "workflows may ask for privileged containers, which have all rights on this host (false)";
    "container_allow_capabilities", "KICI_CONTAINER_ALLOW_CAPABILITIES", "container-allow-capabilities", "capabilities that workflows may ask for besides the harmless ones, separated by commas";
    "docker_keep_failed", "KICI_DOCKER_KEEP_FAILED", "docker-keep-failed", "containers of failed jobs are ended but kept until the next start (false)";
    "job_image_agent", "KICI_JOB_IMAGE_AGENT", "job-image-agent", "this agent runs inside of the job's image already (false)";
    "orphan_cleanup", "KICI_AGENT_ORPHAN_CLEANUP", "orphan-cleanup", "end what a job leaves running (true)";
    "between_jobs_reset_command", "KICI_AGENT_BETWEEN_JOBS_RESET_COMMAND", "between-jobs-reset-command", "command for sh between two jobs";
    "between_jobs_reset_timeout_ms", "KICI_AGENT_BETWEEN_JOBS_RESET_TIMEOUT_MS", "between-jobs-reset-timeout-ms", "limit of that command (60000)";
    "between_jobs_reset_run_on", "KICI_AGENT_BETWEEN_JOBS_RESET_RUN_ON", "between-jobs-reset-run-on", "after which jobs: always, on-failure (always)";
    "drain_on_reset_failure", "KICI_AGENT_DRAIN_ON_RESET_FAILURE", "drain-on-reset-failure", "take no more work after failures of that command (false)";
    "reset_failure_threshold", "KICI_AGENT_RESET_FAILURE_THRESHOLD", "reset-failure-threshold", "how many in a row (3)";
    "scaler_managed", "KICI_SCALER_MANAGED", "scaler-managed", "a scaler started this agent; it ends without work (false)";
    "scaler_claim_code", "KICI_SCALER_CLAIM_CODE", "", "code that buys this agent its token, once; not used where a token is set";
    "scaler_idle_timeout_ms", "KICI_SCALER_IDLE_TIMEOUT", "scaler-idle-timeout-ms", "how long it stays without work (5000)";
    "scaler_pending_dispatch_timeout_ms", "KICI_SCALER_PENDING_DISPATCH_TIMEOUT", "scaler-pending-dispatch-timeout-ms", "how long it waits for the job that it was started for (60000)";
    "backpressure_mode", "KICI_BACKPRESSURE_MODE", "backpressure-mode", "when too much log waits: pause, drop (pause)";
    "port", "KICI_PORT", "port", "port of health and metrics, 0 for none (8080)";
    "bind", "KICI_BIND", "bind", "address of health and metrics (127.0.0.1)";
    "pass_env", "KICI_PASS_ENV", "pass-env", "further variables of the host that steps see, separated by commas";
}

/// Names that our programs meet when they run inside one of our jobs, beside another of our programs or in our tests.
const JOB_FACING: &[&str] = &[
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
    "KICI_REQUIRE_PG",
    "KICI_DEV",
];

/// True for `KICI_*` names that are none of an agent's and not a typing error either.
pub(super) fn is_foreign(name: &str) -> bool {
    let prefixes = ["KICI_ADMIN_", "KICI_TEST_", "KICI_IS_GLOBAL_", "KICI_WORKFLOW_REPO", "KICI_SOURCE_"];
    JOB_FACING.contains(&name) || prefixes.iter().any(|prefix| name.starts_with(prefix))
}

pub(super) fn list(text: &str) -> Vec<String> {
    text.split(',').map(str::trim).filter(|item| !item.is_empty()).map(str::to_owned).collect()
}

pub(super) fn log_format(text: &str) -> Result<String, String> {
    match text {
        "auto" | "json" | "pretty" => Ok(text.to_owned()),
        _ => Err(format!("`{text}` is not auto, json or pretty")),
    }
}

/// Absolute, since steps start elsewhere.
pub(super) fn directory(text: &str) -> Result<PathBuf, String> {
    std::path::absolute(text).map_err(|error| format!("`{text}` is not a directory: {error}"))
}

pub(super) fn url(text: &str) -> Result<String, String> {
    let rest = text.strip_prefix("http://").or_else(|| text.strip_prefix("https://"));
    match rest {
        Some(host) if !host.is_empty() && !host.contains('@') && text.parse::<http::Uri>().is_ok() => {
            Ok(text.trim_end_matches('/').to_owned())
        }
        _ => Err(format!("`{text}` is not a URL like https://kici.example:4000")),
    }
}

pub(super) fn token(text: &str) -> Result<SecretString, String> {
    digits(text, TOKEN_PREFIX)
        .ok_or_else(|| format!("is not an agent token: it begins with {TOKEN_PREFIX} and 70 hex digits follow"))
}

pub(super) fn claim_code(text: &str) -> Result<SecretString, String> {
    digits(text, CLAIM_PREFIX)
        .ok_or_else(|| format!("the value is not a claim code: it begins with {CLAIM_PREFIX} and 70 hex digits follow"))
}

fn digits(text: &str, prefix: &str) -> Option<SecretString> {
    let rest = text.strip_prefix(prefix)?;
    let hex = rest.len() == 70 && rest.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
    hex.then(|| SecretString::from(text))
}

/// `[a-z0-9._:/@+-]{1,128}` in lower case; `kici:` is the orchestrator's, and its scalers': it judges what an agent of one
/// says.
pub(super) fn labels(text: &str, of_scaler: bool) -> Result<Vec<String>, String> {
    let mut labels = Vec::new();
    for label in list(text) {
        let label = label.to_lowercase();
        let legal = |b: u8| b.is_ascii_alphanumeric() || b"._:/@+-".contains(&b);
        if label.len() > 128 || !label.bytes().all(legal) {
            return Err(format!("`{label}` is not a label; use 1 to 128 of letters, digits and . _ : / @ + -"));
        }
        if label.starts_with("kici:") && !of_scaler {
            return Err(format!("`{label}` cannot be claimed: kici: labels are derived by the orchestrator"));
        }
        labels.push(label);
    }
    labels.sort();
    labels.dedup();
    Ok(labels)
}

pub(super) fn properties(text: &str) -> Result<BTreeMap<String, String>, String> {
    let mut properties = BTreeMap::new();
    for item in list(text) {
        let Some((key, value)) = item.split_once('=') else { return Err(format!("`{item}` is not key=value")) };
        if key.to_lowercase().starts_with("kici:") {
            return Err(format!("`{key}` cannot be set: kici: keys are the orchestrator's"));
        }
        properties.insert(key.trim().to_owned(), value.trim().to_owned());
    }
    Ok(properties)
}

/// The first of the usual places for sockets that can be written.
pub(super) fn default_runtime_dir(env: &BTreeMap<String, String>, state_dir: &Path) -> PathBuf {
    let system = Path::new("/run/kici-agent");
    let ours = |path: &Path| {
        path.metadata().is_ok_and(|meta| std::os::unix::fs::MetadataExt::uid(&meta) == kici_sys::host::uid())
    };
    if kici_sys::host::uid() == 0 || ours(system) {
        return system.to_owned();
    }
    let of_user = env.get("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|dir| dir.is_absolute() && ours(dir));
    of_user.map_or_else(|| state_dir.join("run"), |dir| dir.join("kici-agent"))
}

/// The first of the usual places that can be written.
pub(super) fn default_state_dir(env: &BTreeMap<String, String>) -> PathBuf {
    let system = Path::new("/var/lib/kici-agent");
    let home = || {
        let data = env.get("XDG_STATE_HOME").cloned();
        let data = data.or_else(|| env.get("HOME").map(|home| format!("{home}/.local/state")));
        data.map(|dir| Path::new(&dir).join("kici-agent"))
    };
    let writable = kici_sys::host::uid() == 0
        || system.metadata().is_ok_and(|meta| std::os::unix::fs::MetadataExt::uid(&meta) == kici_sys::host::uid());
    if writable { system.to_owned() } else { home().unwrap_or_else(|| system.to_owned()) }
}
