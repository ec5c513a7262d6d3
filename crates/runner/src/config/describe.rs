//! The settings in force, for people.

use std::time::Duration;

use super::{Config, Isolation, Reset};

impl Config {
    /// The settings as lines `key = value`, without secrets.
    pub fn describe(&self) -> String {
        let ms = |duration: Duration| duration.as_millis().to_string();
        let none = || "(none)".to_owned();
        let mut lines = vec![
            ("orchestrator_url", self.orchestrator_url.clone()),
            ("agent_id", self.agent_id.as_ref().map_or("(made at the first start)".into(), ToString::to_string)),
            ("agent_token", if self.agent_token.is_some() { "(set)".into() } else { none() }),
            ("labels", self.labels.join(",")),
            ("properties", self.properties.iter().map(|(k, v)| format!("{k}={v}")).collect::<Vec<_>>().join(",")),
            ("max_concurrency", self.max_concurrency.to_string()),
            ("log_level", self.log_level.clone()),
            ("log_format", self.log_format.clone()),
            ("default_step_timeout_ms", ms(self.default_step_timeout)),
            ("max_grace_period_ms", ms(self.max_grace_period)),
            ("shutdown_grace_ms", ms(self.shutdown_grace)),
            ("git.timeout_ms", ms(self.git_timeout)),
            ("git.allow_insecure_http", self.git_allow_insecure_http.to_string()),
            ("git.inherit_host_helpers", self.git_inherit_host_helpers.to_string()),
            ("log_spool_max_bytes", self.log_spool_max_bytes.to_string()),
            ("backpressure_mode", self.pressure.as_str().to_owned()),
            ("max_log_size_bytes", self.max_log_size_bytes.to_string()),
            ("job_heartbeat_interval_ms", ms(self.job_heartbeat_interval)),
            ("keep_running_when_fenced", self.keep_running_when_fenced.to_string()),
            (
                "port",
                self.listen
                    .map_or_else(|| "0 (nothing listens)".to_owned(), |listen| listen.address.port().to_string()),
            ),
            ("bind", self.listen.map_or_else(none, |listen| listen.address.ip().to_string())),
        ];
        lines.extend(self.containers.describe());
        lines.extend(self.isolation.describe());
        lines.extend(self.reset.describe());
        lines.extend([
            ("scaler_managed", self.scaled.managed.to_string()),
            ("scaler_claim_code", if self.scaled.claim_code.is_some() { "(set)".into() } else { none() }),
            ("scaler_idle_timeout_ms", ms(self.scaled.idle)),
            ("scaler_pending_dispatch_timeout_ms", ms(self.scaled.pending_dispatch)),
            ("state_dir", self.state_dir.display().to_string()),
            ("work_dir", self.work_dir.display().to_string()),
            ("runtime_dir", self.runtime_dir.display().to_string()),
            ("host variables of steps", self.host_env.keys().cloned().collect::<Vec<_>>().join(" ")),
        ]);
        lines.iter().map(|(key, value)| format!("{key} = {value}\n")).collect()
    }
}

impl Isolation {
    fn describe(&self) -> Vec<(&'static str, String)> {
        let limit = |limit: Option<u64>| limit.map_or_else(|| "0 (no limit)".to_owned(), |limit| limit.to_string());
        let paths: Vec<String> = self.writable.iter().map(|path| path.display().to_string()).collect();
        vec![
            ("hardening", self.hardening.as_str().to_owned()),
            ("writable_paths", paths.join(",")),
            ("sandbox", self.sandbox.to_string()),
            ("sandbox_network", if self.network { "host" } else { "isolated" }.to_owned()),
            ("sandbox_memory_bytes", limit(self.limits.memory_bytes)),
            ("sandbox_nano_cpus", limit(self.limits.nano_cpus)),
            ("sandbox_user", self.user.as_ref().map_or_else(|| "(the agent's)".to_owned(), |user| user.name.clone())),
            ("orphan_cleanup", self.orphan_cleanup.to_string()),
        ]
    }
}

impl Reset {
    fn describe(&self) -> Vec<(&'static str, String)> {
        vec![
            ("between_jobs_reset_command", self.command.clone().unwrap_or_else(|| "(none)".to_owned())),
            ("between_jobs_reset_timeout_ms", self.timeout.as_millis().to_string()),
            ("between_jobs_reset_run_on", self.on.as_str().to_owned()),
            ("drain_on_reset_failure", self.drain_on_failure.to_string()),
            ("reset_failure_threshold", self.threshold.to_string()),
        ]
    }
}
