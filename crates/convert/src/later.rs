//! What does not come along, and why. A key is looked up by the end of its path, the longest entry first.

/// Ends of paths and the reason of their loss. When KiCI learns a key, write it in the dialect's module and take its line out
/// of here.
pub const LATER: &[(&str, &str)] = &[
    // All dialects.
    ("cache.untracked", "which files git does not track is not asked; name them in `paths`"),
    ("cache.fallback_keys", "not carried over; write `restore_keys` by hand"),
    ("artifacts.exclude", "files cannot be left out; name those that are wanted"),
    ("artifacts.untracked", "which files git does not track is not asked; name them in `paths`"),
    ("artifacts.expose_as", "artifacts are listed with their run"),
    (
        "environment",
        "a job with an environment is held back until this version can give it; write `environment` by hand then",
    ),
    ("secrets", SECRETS),
    ("timeout", "no duration that can be carried over"),
    ("volumes", "host directories are not mounted"),
    ("privileged", "steps are not run privileged"),
    // GitHub Actions.
    ("permissions", "jobs get no token of the forge, so there is nothing to restrict"),
    ("workflow_call", "reusable workflows are not supported yet"),
    ("pull_request_target", "running with the rights of the base branch on foreign code is not offered"),
    ("strategy.fail-fast", "no truth value that can be carried over"),
    ("jobs.continue-on-error", "a job that may fail is not supported; its steps may be"),
    // GitLab CI.
    ("include", "other files are not read; convert them too, or paste them in"),
    ("extends", "a template that is not in this file"),
    ("trigger", "pipelines of other projects and files are not started"),
    ("interruptible", "write `concurrency` with `cancel_in_progress` by hand, else a newer run does not end this one"),
    ("coverage", "coverage is not read from logs"),
    ("id_tokens", "identity tokens are not supported yet"),
    ("release.tag_name", "releases are made by a step that calls the forge"),
    ("pages", "pages are not published"),
    ("inherit", "defaults are written into every job"),
    ("changes", "jobs are not chosen by changed files; the condition counts as met"),
    ("exists", "jobs are not chosen by files of the repository; the condition counts as met"),
    ("workflow.name", "a title of the pipeline with variables of GitLab"),
    ("auto_cancel", "write `concurrency` with `cancel_in_progress` by hand"),
    ("stages", "a stage of this name has no jobs"),
    ("spec", "inputs of included files are not supported"),
    // Woodpecker and Drone.
    ("settings", "plugins are not supported; write `commands` that do the same"),
    ("pull", CONTAINER),
    ("detach", "a step cannot stay behind as a service; start it with `&` in the step that needs it"),
    ("entrypoint", CONTAINER),
    ("dns", CONTAINER),
    ("user", CONTAINER),
    ("tty", CONTAINER),
    ("network_mode", CONTAINER),
    ("extra_hosts", CONTAINER),
    ("shm_size", CONTAINER),
    ("path", "steps are not chosen by changed files; the condition counts as met"),
    ("clone", "the checkout is KiCI's own"),
    ("node", "use `runs_on` labels"),
    ("image_pull_secrets", CONTAINER),
    ("workspace", "steps start in the checkout"),
    ("backend_options", CONTAINER),
    ("evaluate", "an expression of Woodpecker"),
    ("when.repo", "the repository is the one that the file is in"),
    ("when.instance", "there is one installation"),
];

const CONTAINER: &str = "this is not passed on to the container";
/// Why an image does not come along where nobody wants containers.
pub const NO_CONTAINERS: &str = "containers are left out; the steps run on the agent itself, which needs their tools";
/// Why secrets do not come along.
pub const SECRETS: &str = "secrets are not supported yet; the value is empty";

/// Why the key at the end of `path` does not come along.
pub fn reason(path: &str) -> &'static str {
    let fits =
        |(end, _): &&(&str, &str)| path == *end || path.strip_suffix(end).is_some_and(|rest| rest.ends_with('.'));
    let known = LATER.iter().filter(fits).max_by_key(|(end, _)| end.len());
    known.map_or("it has no counterpart", |(_, reason)| reason)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_end_of_a_path_gives_the_reason() {
        assert!(reason("steps.build.dns").starts_with("this is not passed on"));
        assert!(reason("workflow.name").starts_with("a title"));
        assert_eq!(reason("jobs.mydns"), "it has no counterpart");
        let mut ends: Vec<&str> = LATER.iter().map(|(end, _)| *end).collect();
        ends.sort_unstable();
        assert!(ends.windows(2).all(|pair| pair[0] != pair[1]), "{ends:?}");
    }
}
