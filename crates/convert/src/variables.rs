//! Variables that other systems set for scripts, and what sets them here.

use kici_engine::yaml::Pos;

use crate::Dialect;
use crate::cel;
use crate::source::Report;
use crate::target::{Map, Y};

/// Where a variable's value comes from.
enum Value {
    /// An expression.
    Cel(&'static str),
    /// A line of shell, run in front of the script.
    Shell(&'static str),
    /// A fixed text.
    Fixed(&'static str),
}

use Value::{Cel, Fixed, Shell};

const GITHUB: &[(&str, Value)] = &[
    ("GITHUB_ACTOR", Cel(cel::SENDER)),
    ("GITHUB_BASE_REF", Cel(cel::BASE)),
    ("GITHUB_EVENT_NAME", Cel("event.raw_name")),
    ("GITHUB_HEAD_REF", Cel(cel::HEAD)),
    ("GITHUB_REF_NAME", Cel(cel::REF_NAME)),
    ("GITHUB_REPOSITORY", Cel("repo")),
    ("GITHUB_RUN_ATTEMPT", Cel("run.attempt")),
    ("GITHUB_RUN_ID", Cel("run.id")),
    ("GITHUB_WORKFLOW", Shell("$KICI_WORKFLOW")),
    ("GITHUB_JOB", Shell("$KICI_JOB_NAME")),
    ("GITHUB_WORKSPACE", Shell("$PWD")),
    ("RUNNER_OS", Fixed("Linux")),
    ("RUNNER_TEMP", Shell("$(mktemp -d)")),
    ("GITHUB_ACTIONS", Fixed("true")),
];

const GITLAB: &[(&str, Value)] = &[
    ("CI_COMMIT_BRANCH", Cel(cel::PUSHED_BRANCH)),
    ("CI_COMMIT_MESSAGE", Cel(cel::MESSAGE)),
    ("CI_COMMIT_REF_NAME", Cel(cel::REF_NAME)),
    ("CI_COMMIT_SHA", Shell("$KICI_SHA")),
    ("CI_COMMIT_SHORT_SHA", Shell("$(printf %.8s \"$KICI_SHA\")")),
    ("CI_COMMIT_TAG", Cel(cel::TAG)),
    ("CI_DEFAULT_BRANCH", Cel(cel::DEFAULT_BRANCH)),
    ("CI_JOB_ID", Shell("$KICI_JOB_ID")),
    ("CI_JOB_NAME", Shell("$KICI_JOB_NAME")),
    ("CI_MERGE_REQUEST_IID", Cel(cel::PR_NUMBER)),
    ("CI_MERGE_REQUEST_SOURCE_BRANCH_NAME", Cel(cel::HEAD)),
    ("CI_MERGE_REQUEST_TARGET_BRANCH_NAME", Cel(cel::BASE)),
    ("CI_PIPELINE_ID", Shell("$KICI_RUN_ID")),
    ("CI_PROJECT_DIR", Shell("$PWD")),
    ("CI_PROJECT_PATH", Cel("repo")),
    ("CI_PROJECT_NAME", Shell("${PWD##*/}")),
    ("GITLAB_CI", Fixed("true")),
    ("GITLAB_USER_LOGIN", Cel(cel::SENDER)),
];

const WOODPECKER: &[(&str, Value)] = &[
    ("CI_COMMIT_AUTHOR", Cel(cel::SENDER)),
    ("CI_COMMIT_BRANCH", Cel(cel::REF_NAME)),
    ("CI_COMMIT_MESSAGE", Cel(cel::MESSAGE)),
    ("CI_COMMIT_PULL_REQUEST", Cel(cel::PR_NUMBER)),
    ("CI_COMMIT_REF", Shell("$KICI_REF")),
    ("CI_COMMIT_SHA", Shell("$KICI_SHA")),
    ("CI_COMMIT_SOURCE_BRANCH", Cel(cel::HEAD)),
    ("CI_COMMIT_TAG", Cel(cel::TAG)),
    ("CI_COMMIT_TARGET_BRANCH", Cel(cel::BASE)),
    ("CI_PIPELINE_EVENT", Cel("event.raw_name")),
    ("CI_PIPELINE_NUMBER", Shell("$KICI_RUN_ID")),
    ("CI_REPO", Cel("repo")),
    ("CI_REPO_DEFAULT_BRANCH", Cel(cel::DEFAULT_BRANCH)),
    ("CI_STEP_NAME", Shell("$KICI_JOB_NAME")),
    ("CI_WORKSPACE", Shell("$PWD")),
    ("DRONE_BRANCH", Cel(cel::REF_NAME)),
    ("DRONE_BUILD_EVENT", Cel("event.raw_name")),
    ("DRONE_BUILD_NUMBER", Shell("$KICI_RUN_ID")),
    ("DRONE_COMMIT", Shell("$KICI_SHA")),
    ("DRONE_COMMIT_BRANCH", Cel(cel::REF_NAME)),
    ("DRONE_COMMIT_SHA", Shell("$KICI_SHA")),
    ("DRONE_PULL_REQUEST", Cel(cel::PR_NUMBER)),
    ("DRONE_REPO", Cel("repo")),
    ("DRONE_TAG", Cel(cel::TAG)),
    ("DRONE_WORKSPACE", Shell("$PWD")),
];

/// Gives a script the variables of `dialect` that it reads: expressions go to `env`, the others in front of the script.
/// Those that nothing sets are lost.
pub(crate) fn provide(dialect: Dialect, script: &str, env: &mut Map, from: Pos, path: &str, report: &Report) -> String {
    let (known, prefixes): (&[(&str, Value)], &[&str]) = match dialect {
        Dialect::Github => (GITHUB, &["GITHUB_", "RUNNER_", "ACTIONS_"]),
        Dialect::Gitlab => (GITLAB, &["CI_", "GITLAB_"]),
        Dialect::Woodpecker | Dialect::Drone => (WOODPECKER, &["CI_", "DRONE_", "WOODPECKER_"]),
    };
    let mut head = String::new();
    for name in read(script, prefixes) {
        // What the script or the file sets is theirs.
        if env.has(name) || sets(script, name) {
            continue;
        }
        match known.iter().find(|(known, _)| *known == name) {
            Some((_, Cel(expression))) => env.text(name, from, format!("${{{{ {expression} }}}}")),
            Some((_, Fixed(text))) => env.put(name, from, Y::Text((*text).to_owned())),
            Some((_, Shell(line))) => head.push_str(&format!("export {name}=\"{line}\"\n")),
            None => report.lose(from, path, format!("the script reads {name}, which nothing sets here")),
        }
    }
    head + script
}

/// The variables with one of these beginnings that a script reads, each once.
fn read<'a>(script: &'a str, prefixes: &[&str]) -> Vec<&'a str> {
    let mut names: Vec<&str> = Vec::new();
    for (at, _) in script.match_indices('$') {
        let rest = script[at + 1..].trim_start_matches('{').trim_start_matches("env:");
        let end = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(rest.len());
        let name = &rest[..end];
        if prefixes.iter().any(|prefix| name.starts_with(prefix)) && !names.contains(&name) {
            names.push(name);
        }
    }
    names
}

fn sets(script: &str, name: &str) -> bool {
    let assigned = format!("{name}=");
    script.lines().any(|line| {
        let line = line.trim_start();
        line.strip_prefix("export ").unwrap_or(line).starts_with(&assigned)
    })
}

/// Words of a script that have the same meaning under another name here.
pub(crate) fn renamed(script: &str, names: &[(&str, &str)]) -> String {
    let mut out = script.to_owned();
    for (from, to) in names {
        let mut next = String::with_capacity(out.len());
        let mut rest = out.as_str();
        while let Some(at) = rest.find(from) {
            let word = |c: char| c.is_ascii_alphanumeric() || c == '_';
            let before = rest[..at].chars().next_back().is_some_and(word);
            let after = rest[at + from.len()..].chars().next().is_some_and(word);
            next.push_str(&rest[..at]);
            next.push_str(if before || after { from } else { to });
            rest = &rest[at + from.len()..];
        }
        next.push_str(rest);
        out = next;
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scripts_get_what_they_read_and_the_rest_is_named() {
        let (report, mut env) = (Report::default(), Map::default());
        let script = "echo $CI_COMMIT_TAG ${CI_PROJECT_DIR} $CI_NONE $OTHER\nCI_OWN=1; echo $CI_OWN\n";
        let out = provide(Dialect::Gitlab, script, &mut env, Pos { line: 3, col: 1 }, "a.script", &report);
        assert!(out.starts_with("export CI_PROJECT_DIR=\"$PWD\"\necho"), "{out}");
        assert!(env.has("CI_COMMIT_TAG") && !env.has("CI_OWN"));
        let losses = report.losses();
        assert!(losses.len() == 1 && losses[0].reason.contains("CI_NONE"), "{losses:?}");
    }

    #[test]
    fn only_whole_words_are_renamed() {
        assert_eq!(renamed("$A_B $A_BC $XA_B ${A_B}", &[("A_B", "Z")]), "$Z $A_BC $XA_B ${Z}");
    }
}
