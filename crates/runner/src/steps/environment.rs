//! The environment of a step, built from nothing in layers; later wins.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io;
use std::path::Path;

use kici_engine::ids::{JobId, RunId};
use kici_engine::jobspec::JobSpec;
use serde_json::Value as Json;

/// Variables of the host that steps see. Nothing else of the agent's environment reaches them.
pub const HOST_VARIABLES: &[&str] = &["PATH", "HOME", "USER", "SHELL", "LANG", "LC_ALL", "TERM", "TMPDIR", "TZ"];

/// Where commands are looked for when the host has no PATH.
pub const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// Most keys of git's configuration that a workflow may set by environment.
const MAX_GIT_KEYS: usize = 1000;

/// Names as text to text.
pub type Variables = BTreeMap<String, String>;

/// The `KICI_*` variables of a job, wherever it runs. The event is written into a file below `scratch`.
///
/// # Errors
/// When that file cannot be written.
pub fn job_facing(run: RunId, job: JobId, spec: &JobSpec, scratch: &Path) -> io::Result<Vec<(&'static str, String)>> {
    let text = |name: &str| spec.context.get(name).and_then(Json::as_str).unwrap_or_default().to_owned();
    let mut all = vec![
        ("KICI_RUN_ID", run.to_string()),
        ("KICI_JOB_ID", job.to_string()),
        ("KICI_JOB_NAME", spec.job.clone()),
        ("KICI_WORKFLOW", spec.workflow.clone()),
        ("KICI_REF", text("ref")),
        ("KICI_SHA", text("sha")),
        ("KICI_CHECK_MODE", spec.check_mode.as_str().to_owned()),
    ];
    if let Some(fanout) = &spec.fanout {
        all.extend([
            ("KICI_FANOUT_HOST", fanout.host.to_string()),
            ("KICI_FANOUT_INDEX", fanout.index.to_string()),
            ("KICI_FANOUT_TOTAL", fanout.total.to_string()),
        ]);
    }
    all.extend(spec.outcome.clone().map(|outcome| ("KICI_OUTCOME_STATUS", outcome)));
    if let Some(event) = spec.context.get("event") {
        let path = scratch.join("event.json");
        std::fs::write(&path, serde_json::to_vec(event)?)?;
        all.push(("KICI_EVENT_PATH", path.display().to_string()));
    }
    Ok(all)
}

/// The environment of one job as it grows with its steps.
#[derive(Clone, Debug, Default)]
pub struct Environment {
    /// Layers that no workflow can change: host, defaults and `KICI_*`.
    base: Variables,
    /// What `$KICI_ENV` of earlier steps set.
    exported: Variables,
    /// What `$KICI_PATH` of earlier steps put in front, the first one first.
    path: Vec<String>,
    /// Keys of git's configuration that steps have besides those that they set themselves.
    git: Vec<(String, String)>,
}

impl Environment {
    /// From the allowed variables of the host and the `KICI_*` of the job.
    pub fn new(host: &Variables, job_facing: impl IntoIterator<Item = (&'static str, String)>) -> Self {
        let mut base = host.clone();
        base.entry("PATH".to_owned()).or_insert_with(|| DEFAULT_PATH.to_owned());
        for name in ["CI", "KICI"] {
            base.insert(name.to_owned(), "true".to_owned());
        }
        base.insert("FORCE_COLOR".to_owned(), "1".to_owned());
        base.extend(job_facing.into_iter().map(|(name, value)| (name.to_owned(), value)));
        Self { base, exported: Variables::new(), path: Vec::new(), git: Vec::new() }
    }

    /// Adds keys of git's configuration.
    #[must_use]
    pub fn with_git(mut self, keys: &[(String, String)]) -> Self {
        self.git = keys.to_vec();
        self
    }

    /// The whole environment of a step. `layers` come in order, the job's before the step's; names that belong to the agent are
    /// left out of them and returned.
    pub fn of_step<'a>(
        &self,
        layers: impl IntoIterator<Item = &'a Variables>,
        files: impl IntoIterator<Item = (&'static str, &'a Path)>,
    ) -> (Variables, Vec<String>) {
        let mut all = self.base.clone();
        let mut refused = Vec::new();
        let layers: Vec<&Variables> = layers.into_iter().collect();
        for (name, value) in layers.into_iter().chain([&self.exported]).flatten() {
            if is_ours(name) {
                refused.push(name.clone());
            } else {
                all.insert(name.clone(), value.clone());
            }
        }
        if !self.path.is_empty() {
            let rest = all.get("PATH").cloned().unwrap_or_default();
            let mut dirs = self.path.clone();
            dirs.push(rest);
            all.insert("PATH".to_owned(), dirs.join(":"));
        }
        if !self.extend_git(&mut all) {
            refused.push("GIT_CONFIG_COUNT".to_owned());
        }
        all.extend(files.into_iter().map(|(name, path)| (name.to_owned(), path.display().to_string())));
        (all, refused)
    }

    /// Behind the keys that a workflow sets by `GIT_CONFIG_COUNT` (git-config(1)), never in their place. False for a count that
    /// is none: it is left out.
    fn extend_git(&self, all: &mut Variables) -> bool {
        if self.git.is_empty() {
            return true;
        }
        let count = all.get("GIT_CONFIG_COUNT").filter(|count| !count.is_empty());
        let read = count.map(|count| count.parse::<usize>().ok().filter(|count| *count <= MAX_GIT_KEYS));
        let theirs = read.flatten().unwrap_or(0);
        for (n, (key, value)) in (theirs..).zip(&self.git) {
            all.insert(format!("GIT_CONFIG_KEY_{n}"), key.clone());
            all.insert(format!("GIT_CONFIG_VALUE_{n}"), value.clone());
        }
        all.insert("GIT_CONFIG_COUNT".to_owned(), (theirs + self.git.len()).to_string());
        read != Some(None)
    }

    /// What a step wrote to `$KICI_ENV` that may be set, and the names that may not.
    pub fn acceptable(changes: Vec<(String, String)>) -> (Vec<(String, String)>, Vec<String>) {
        let refused = |name: &str| {
            is_ours(name) || name.starts_with("LD_") || name.starts_with("GIT_CONFIG_") || name.contains('-')
        };
        let (refused, accepted): (Vec<_>, Vec<_>) = changes.into_iter().partition(|(name, _)| refused(name));
        (accepted, refused.into_iter().map(|(name, _)| name).collect())
    }

    /// Sets what [`Environment::acceptable`] let pass.
    pub fn take(&mut self, changes: Vec<(String, String)>) {
        self.exported.extend(changes);
    }

    /// Takes what a step wrote to `$KICI_PATH`.
    pub fn extend_path(&mut self, text: &str) {
        let new = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.contains(':'));
        let mut path: Vec<String> = new.map(str::to_owned).collect();
        path.append(&mut self.path);
        self.path = path;
    }
}

fn is_ours(name: &str) -> bool {
    name.starts_with("KICI_")
}

/// As a process wants it.
pub fn to_os(variables: &Variables) -> Vec<(OsString, OsString)> {
    variables.iter().map(|(k, v)| (k.into(), v.into())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vars(pairs: &[(&str, &str)]) -> Variables {
        pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect()
    }

    #[test]
    fn later_layers_win_and_ours_cannot_be_set() {
        let mut env = Environment::new(&vars(&[("PATH", "/bin"), ("HOME", "/h")]), [("KICI_SHA", "abc".to_owned())]);
        let (job, step) = (vars(&[("A", "job"), ("B", "job"), ("KICI_SHA", "fake")]), vars(&[("B", "step")]));
        let (accepted, refused) =
            Environment::acceptable(vec![("C".into(), "1".into()), ("LD_PRELOAD".into(), "x".into())]);
        assert_eq!(refused, ["LD_PRELOAD"]);
        env.take(accepted);
        env.extend_path("/first\n/second\n");
        env.extend_path("/newest\n");
        let (all, refused) = env.of_step([&job, &step], [("KICI_OUTPUT", Path::new("/o"))]);
        assert_eq!(refused, ["KICI_SHA"]);
        let expected = vars(&[
            ("A", "job"),
            ("B", "step"),
            ("C", "1"),
            ("CI", "true"),
            ("FORCE_COLOR", "1"),
            ("HOME", "/h"),
            ("KICI", "true"),
            ("KICI_OUTPUT", "/o"),
            ("KICI_SHA", "abc"),
            ("PATH", "/newest:/first:/second:/bin"),
        ]);
        assert_eq!(all, expected);
    }

    #[test]
    fn keys_of_git_come_behind_those_of_the_workflow() {
        let keys = [("credential.helper".to_owned(), "x".to_owned()), ("a.b".to_owned(), String::new())];
        let env = Environment::new(&vars(&[]), []).with_git(&keys);
        let git = |env: Variables| env.into_iter().filter(|(name, _)| name.starts_with("GIT_")).collect::<Variables>();
        let ours = [
            ("GIT_CONFIG_COUNT", "2"),
            ("GIT_CONFIG_KEY_0", "credential.helper"),
            ("GIT_CONFIG_KEY_1", "a.b"),
            ("GIT_CONFIG_VALUE_0", "x"),
            ("GIT_CONFIG_VALUE_1", ""),
        ];
        assert_eq!(git(env.of_step([], []).0), vars(&ours));
        let theirs = vars(&[("GIT_CONFIG_COUNT", "1"), ("GIT_CONFIG_KEY_0", "c.d"), ("GIT_CONFIG_VALUE_0", "y")]);
        let both = git(env.of_step([&theirs], []).0);
        assert_eq!(both["GIT_CONFIG_COUNT"], "3");
        assert_eq!((both["GIT_CONFIG_KEY_0"].as_str(), both["GIT_CONFIG_KEY_2"].as_str()), ("c.d", "a.b"));
    }

    #[test]
    fn a_count_of_keys_that_is_none_is_left_out_and_told() {
        let env = Environment::new(&vars(&[]), []).with_git(&[("a.b".to_owned(), "x".to_owned())]);
        let of = |count: &str| {
            let (all, refused) = env.of_step([&vars(&[("GIT_CONFIG_COUNT", count)])], []);
            (all["GIT_CONFIG_COUNT"].clone(), all.get("GIT_CONFIG_KEY_0").cloned(), refused)
        };
        let told = || vec!["GIT_CONFIG_COUNT".to_owned()];
        for count in ["18446744073709551615", "1001", "-1", "many"] {
            assert_eq!(of(count), ("1".to_owned(), Some("a.b".to_owned()), told()), "{count}");
        }
        assert_eq!(of("1000"), ("1001".to_owned(), None, Vec::new()));
        assert_eq!(of(""), ("1".to_owned(), Some("a.b".to_owned()), Vec::new()));
    }
}
