//! Names of events on the internal bus (workflows-and-events R30).

/// Longest name, in bytes.
pub const MAX_BYTES: usize = 128;
/// A run ended.
pub const WORKFLOW_COMPLETE: &str = "__workflow_complete";
/// A job ended.
pub const JOB_COMPLETE: &str = "__job_complete";
/// A schedule fired.
pub const SCHEDULE_FIRE: &str = "__schedule_fire";
/// The registered workflows of a repository changed.
pub const REGISTRATION_UPDATED: &str = "__registration_updated";
/// Runs failed in a window of time.
pub const WORKFLOWS_FAILED_BATCH: &str = "__workflows_failed_batch";
/// What `lifecycle` triggers may name.
pub const LIFECYCLE: [&str; 4] = ["job_complete", "job_failed", "registration_updated", "workflow_complete"];

/// Whether a job that ended with this status failed, for those who listen to `job_failed`.
pub fn is_failure(status: &str) -> bool {
    !matches!(status, "success" | "skipped" | "cancelled")
}

/// A name that nobody may emit.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EventNameError {
    /// It breaks the form.
    #[error(
        "`{0}` is not the name of an event; use 1 to {MAX_BYTES} of lower-case letters, digits, `.`, `_` and `-`, starting \
         with a letter or digit"
    )]
    Form(String),
    /// The system's own.
    #[error("event names that begin with `__` or `kici.` are reserved; `{0}` cannot be emitted")]
    Reserved(String),
}

/// Checks a name that a step or a person wants to emit.
///
/// # Errors
/// [`EventNameError`].
pub fn check(name: &str) -> Result<(), EventNameError> {
    let shown = || crate::yaml::shorten(name);
    if name.starts_with("__") || name.starts_with("kici.") {
        return Err(EventNameError::Reserved(shown()));
    }
    let first = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
    let legal = name.starts_with(first) && name.chars().all(|c| first(c) || matches!(c, '.' | '_' | '-'));
    if legal && name.len() <= MAX_BYTES { Ok(()) } else { Err(EventNameError::Form(shown())) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_checked_and_the_systems_are_reserved() {
        for good in ["a", "ci-broken", "deploy.done_2", "0"] {
            assert_eq!(check(good), Ok(()), "{good}");
        }
        for bad in ["", "A", "-a", "a b", "a/b", "ä", "_a", &"x".repeat(129)] {
            assert!(matches!(check(bad), Err(EventNameError::Form(_))), "{bad}");
        }
        for reserved in
            [WORKFLOW_COMPLETE, JOB_COMPLETE, SCHEDULE_FIRE, WORKFLOWS_FAILED_BATCH, "kici.scaler.scale-up", "__x"]
        {
            assert!(matches!(check(reserved), Err(EventNameError::Reserved(_))), "{reserved}");
        }
    }
}
