//! Git credentials from end to end: a real git at a forge that asks for them, an agent, an orchestrator, a GitHub App.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use kici_api::dto::audit::{AuditFilter, AuditView};
use kici_api::page::PageQuery;
use kici_engine::ids::RunId;
use kici_engine::state::RunStatus;
use kici_store::testing::TestStore;

use crate::git_host::{GitHost, STATIC_PASSWORD};
use crate::stack::{Process, Stack, binary, clean, until};

/// The first part of every script: who commits, and where the forge is.
const PREPARE: &str = r#"
export GIT_AUTHOR_NAME=t GIT_AUTHOR_EMAIL=t@t GIT_COMMITTER_NAME=t GIT_COMMITTER_EMAIL=t@t
URL=$(git remote get-url origin); FORGE=${URL%/acme/*}
refused() { if "$@" 2>err; then echo "not refused: $*"; exit 1; else code=$?; sed 's/^/  | /' err; return 0; fi; }
"#;

fn workflow(git: &str, script: &str) -> String {
    let lines: String = format!("{PREPARE}{script}").lines().map(|line| format!("          {line}\n")).collect();
    format!(
        "name: ci\non: push\njobs:\n  build:\n    runs_on: default\n    timeout: 2m\n    git_credentials: {git}\n    steps:\n      - run: |\n{lines}"
    )
}

async fn agent(stack: &Stack) -> Process {
    let token = stack.agent_token().await;
    stack.start_agent("a1", token.token.expose(), &[("KICI_GIT_ALLOW_INSECURE_HTTP", "true")]).await
}

async fn start(database: Option<String>) -> (Stack, GitHost, Process) {
    let stack = Stack::start(database).await;
    let host = GitHost::start().await;
    host.add_to(&stack).await;
    let agent = agent(&stack).await;
    (stack, host, agent)
}

async fn succeeds(stack: &Stack, run: RunId) -> String {
    let ended = stack.ended(run).await;
    let log = stack.log(run, "build").await.join("\n");
    assert_eq!(ended.run.status, RunStatus::Success, "{log}\n{:#?}\n{}", ended.jobs, stack.logs());
    log
}

async fn audit(stack: &Stack, run: RunId) -> Vec<AuditView> {
    let filter = AuditFilter { run: Some(run), ..AuditFilter::default() };
    stack.client.audit(&filter, &PageQuery { limit: Some(200), cursor: None }).await.unwrap().items
}

/// Files below `dir` that hold `needle`.
fn holding(dir: &Path, needle: &str, found: &mut Vec<String>) {
    for entry in std::fs::read_dir(dir).unwrap().flatten() {
        let path = entry.path();
        let kind = entry.file_type().unwrap();
        if kind.is_dir() {
            holding(&path, needle, found);
        } else if kind.is_file() {
            let bytes = std::fs::read(&path).unwrap_or_default();
            if bytes.windows(needle.len()).any(|window| window == needle.as_bytes()) {
                found.push(path.display().to_string());
            }
        }
    }
}

/// What the whole way can do: clone, submodule, LFS, push inside and outside of windows, several repositories.
const EVERYTHING: &str = r#"
echo "== read"
git fetch -q origin main
git submodule --quiet update --init
test -f lib/lib.txt
git clone -q "$FORGE/acme/lib.git" ../lib
refused git clone -q "$FORGE/acme/secret.git" ../secret
printf 'protocol=http\nhost=%s\npath=acme/app.git/info/lfs\n\n' "${FORGE#http://}" | git credential fill > ../fill
grep -q '^password=ghs_' ../fill && rm ../fill
printf 'protocol=http\nhost=%s\n\n' "${FORGE#http://}" | refused git credential fill
echo "== push"
git commit -q --allow-empty -m out
refused git push -q origin HEAD:refs/heads/outside
kici git with-write -- git push -q origin HEAD:refs/heads/inside
refused git push -q origin HEAD:refs/heads/after
git -C ../lib commit -q --allow-empty -m lib
kici git with-write -- sh -c '! git -C ../lib push -q origin HEAD:refs/heads/no 2>&1'
kici git with-write --repo acme/lib -- git -C ../lib push -q origin HEAD:refs/heads/lib-inside
echo "== codes"
kici git with-write -- sh -c 'exit 7' && exit 1 || test $? = 7
kici git with-write -- sh -c 'kill -TERM $$' && exit 1 || test $? = 143
kici git with-write -- /does/not/exist && exit 1 || test $? = 127
kici git with-write --permission contents=write --permission workflows=write -- touch ../ran && exit 1 || test $? = 3
test ! -e ../ran
kici git token --credential nobody && exit 1 || test $? = 3
kici git with-write --ttl 0 -- true && exit 1 || test $? = 2
kici git with-write -- && exit 1 || test $? = 2
kici git with-write --repo acme/app/../x -- true && exit 1 || test $? = 3
echo "== disconnect"
kici git with-write -- sleep 300 & opener=$!
until git push -q origin HEAD:refs/heads/while-open 2>../no; do sleep 0.1; done
kill -9 $opener
n=0; while git push -q -f origin HEAD:refs/heads/late-$n 2>../no; do n=$((n+1)); test $n -lt 50; sleep 0.1; done
echo "== token"
test "$(kici git token | cut -c1-4)" = ghs_
kici git token
if grep -rq 'gh[s]_' .git; then exit 8; fi
if env | grep -q 'gh[s]_'; then exit 9; fi
kici git with-write -- sh -c 'git push -q origin HEAD:refs/heads/watched'
git remote -v
echo done
"#;

async fn everything(database: Option<String>) {
    let (stack, host, agent) = start(database).await;
    let lib = host.repository("acme/lib", &[("lib.txt", "lib")], &[]);
    host.repository("acme/secret", &[("x", "x")], &[]);
    let text = workflow("{ repos: [acme/lib], access: write }", EVERYTHING);
    let sha = host.repository("acme/app", &[(".kici/workflows/ci.yaml", &text)], &[("lib", "acme/lib", &lib)]);
    let run = host.push(&stack, "acme/app", &sha).await;
    let log = succeeds(&stack, run).await;

    assert!(log.contains("workflows=write (granted: none)"), "{log}");
    let branches = host.branches("acme/app");
    assert!(
        ["inside", "while-open", "watched", "main"].iter().all(|name| branches.iter().any(|b| b == name)),
        "{branches:?}"
    );
    assert!(!branches.iter().any(|name| name == "outside" || name == "after"), "{branches:?}");
    assert_eq!(host.branches("acme/lib"), ["lib-inside", "main"]);
    let seen = host.seen();
    assert!(
        seen.iter().all(|seen| seen.repo != "acme/secret" || seen.token.is_none()),
        "no token went there: {seen:?}"
    );
    let minted = host.minted();
    let write = |token: &str| minted.iter().any(|(minted, of)| minted == token && of.contains("write"));
    let pushed: Vec<_> = seen.iter().filter(|seen| seen.push && seen.status == 200).collect();
    assert!(pushed.iter().all(|seen| seen.token.as_deref().is_some_and(write)), "{pushed:?}");
    let read: Vec<_> = seen.iter().filter(|seen| !seen.push && seen.status == 200).collect();
    assert!(
        !read.is_empty() && read.iter().all(|seen| seen.token.as_deref().is_some_and(|token| !write(token))),
        "{read:?}"
    );

    assert_eq!(host.exposed(), Vec::<String>::new(), "while git used them");

    // The windows ended at the forge too.
    let alive: Vec<String> = host.fake.state().ends.keys().filter(|token| write(token)).cloned().collect();
    assert_eq!(alive, Vec::<String>::new());
    let rows = audit(&stack, run).await;
    let of =
        |action: &str, outcome: &str| rows.iter().filter(|row| row.action == action && row.outcome == outcome).count();
    assert!(of("git_credential.mint", "allowed") >= 8 && of("git_credential.revoke", "allowed") >= 6, "{rows:#?}");
    let reasons: Vec<&str> = rows.iter().filter_map(|row| row.metadata.as_ref()?["reason"].as_str()).collect();
    assert!(reasons.iter().any(|reason| reason.contains("neither the job's own nor listed")), "{reasons:?}");
    assert!(reasons.iter().any(|reason| reason.contains("no credential of that name")), "{reasons:?}");

    // Nobody kept a token: not the programs' directories and databases, not their logs, not the job's log.
    drop(agent);
    let mut found = Vec::new();
    for (token, _) in &minted {
        for form in [token.clone(), STANDARD.encode(format!("x-access-token:{token}"))] {
            assert!(!log.contains(&form), "{log}");
            holding(stack.dir.path(), &form, &mut found);
        }
    }
    assert_eq!(found, Vec::<String>::new());
    assert!(log.contains("***") && log.contains("done"), "{log}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn git_reads_what_is_declared_and_pushes_in_windows_and_no_token_is_kept() {
    everything(None).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn git_reads_what_is_declared_and_pushes_in_windows_and_no_token_is_kept_on_postgresql() {
    let Some(database) = TestStore::postgres().await else { return };
    everything(Some(database.url().to_owned())).await;
}

/// Waits for a branch of the forge, which the test makes once the tokens so far are too old.
const LONG: &str = r#"
kici git with-write -- git push -q origin HEAD:refs/heads/early
echo early
until git ls-remote -q origin refs/heads/later 2>/dev/null | grep -q later; do sleep 0.2; done
kici git with-write -- git push -q origin HEAD:refs/heads/late
git fetch -q origin main
"#;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn complaint_50_a_job_that_outlives_its_first_tokens_still_pushes() {
    let (stack, host, _agent) = start(None).await;
    let text = workflow("{ access: write }", LONG);
    let sha = host.repository("acme/app", &[(".kici/workflows/ci.yaml", &text)], &[]);
    let run = host.push(&stack, "acme/app", &sha).await;
    until("the first push", async || host.branches("acme/app").iter().any(|name| name == "early").then_some(())).await;
    host.fake.state().tokens_ahead = Duration::from_secs(70 * 60);
    host.make_branch("acme/app", "later");
    succeeds(&stack, run).await;
    assert!(host.branches("acme/app").iter().any(|name| name == "late"));
    let rows = audit(&stack, run).await;
    let mints = rows.iter().filter(|row| row.action == "git_credential.mint" && row.outcome == "allowed").count();
    assert!(mints >= 3, "each is in the audit log: {rows:#?}");
}

/// Everything that a job can lay its hands on goes into an artifact.
const COLLECT: &str = r#"
git fetch -q origin main
kici git with-write -- git push -q origin HEAD:refs/heads/collected
kici git with-write -- sh -c 'env > env-inside; cat /proc/[0-9]*/cmdline > lines-inside 2>/dev/null || true; cat /proc/[0-9]*/environ > all-inside 2>/dev/null || true'
env > env; cat /proc/[0-9]*/cmdline > lines 2>/dev/null || true; git config --list --show-origin > config
kici artifact upload everything .git '*inside' env lines config
"#;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn complaint_52_no_token_is_in_the_workspace_the_environment_or_an_artifact_of_them() {
    let (stack, host, _agent) = start(None).await;
    let text = workflow("{ access: write }", COLLECT);
    let sha = host.repository("acme/app", &[(".kici/workflows/ci.yaml", &text)], &[]);
    let run = host.push(&stack, "acme/app", &sha).await;
    succeeds(&stack, run).await;
    let got = stack.dir.path().join("got");
    let output = clean(&binary("kici-admin"))
        .args(["artifact", "download", &run.to_string(), "everything", "--dir"])
        .arg(&got)
        .env("KICI_ADMIN_URL", format!("http://{}", stack.address))
        .env("KICI_DATA_DIR", stack.data())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(got.join(".git/config").is_file() && got.join("lines-inside").is_file());
    let minted = host.minted();
    assert!(minted.len() >= 2, "{minted:?}");
    let mut found = Vec::new();
    for (token, _) in &minted {
        for form in [token.clone(), STANDARD.encode(format!("x-access-token:{token}"))] {
            holding(&got, &form, &mut found);
        }
    }
    assert_eq!(found, Vec::<String>::new());
}

/// What an operator sees of a run.
fn audit_on_screen(stack: &Stack, run: RunId) -> String {
    let output = clean(&binary("kici-admin"))
        .args(["audit", "list", "--run", &run.to_string()])
        .env("KICI_ADMIN_URL", format!("http://{}", stack.address))
        .env("KICI_DATA_DIR", stack.data())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// A password of the workflow's own: it cannot be narrowed.
const STATIC: &str = r#"
cat .kici/workflows/ci.yaml
git clone -q "$FORGE/acme/static.git" ../static
git -C ../static commit -q --allow-empty -m static
kici git with-write --repo acme/static --credential bot -- git -C ../static push -q origin HEAD:refs/heads/pushed
refused kici git with-write -- true
echo $code
"#;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_static_credential_works_with_a_note_and_reading_is_the_default() {
    let (stack, host, _agent) = start(None).await;
    host.repository("acme/static", &[("x", "x")], &[]);
    let git = format!(
        "{{ named: {{ bot: {{ kind: basic, user_value: bot, token_value: {STATIC_PASSWORD}, repos: [acme/static] }} }} }}"
    );
    let sha = host.repository("acme/app", &[(".kici/workflows/ci.yaml", &workflow(&git, STATIC))], &[]);
    let run = host.push(&stack, "acme/app", &sha).await;
    let log = succeeds(&stack, run).await;
    assert!(log.contains("static credential, permissions not verifiable") && log.ends_with('3'), "{log}");
    assert!(!log.contains(STATIC_PASSWORD), "{log}");
    assert_eq!(host.exposed(), Vec::<String>::new());
    assert!(host.branches("acme/static").iter().any(|name| name == "pushed"));
    let rows = audit(&stack, run).await;
    let screen = audit_on_screen(&stack, run);
    println!("{screen}");
    for part in ["git_credential.mint", "static, asked for contents=write", "access: write", "allowed", "denied"] {
        assert!(screen.contains(part), "{part} is not in\n{screen}");
    }
    let of_bot: Vec<_> = rows.iter().filter(|row| row.key.as_deref() == Some("bot")).collect();
    assert!(of_bot.iter().all(|row| {
        let metadata = row.metadata.as_ref().unwrap();
        metadata["scoped"] == false && metadata.get("granted").is_none()
    }));
    assert!(rows.iter().any(|row| row.outcome == "denied"
        && row.metadata.as_ref().unwrap()["reason"].as_str().unwrap().contains("access: write")));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_job_without_git_credentials_and_a_helper_without_an_agent_get_an_ordinary_error() {
    let (stack, host, _agent) = start(None).await;
    let script = "refused git fetch -q origin main\nset +e\nkici git token\ntest $? = 3\n";
    let sha = host.repository("acme/app", &[(".kici/workflows/ci.yaml", &workflow("false", script))], &[]);
    let run = host.push(&stack, "acme/app", &sha).await;
    let log = succeeds(&stack, run).await;
    assert!(log.contains("could not read Username"), "{log}");
    assert_eq!(audit(&stack, run).await, []);

    let program = binary("kici-agent");
    let helper = format!("!'{}' credential-helper --socket /nowhere/job.sock", program.display());
    let output = Command::new("git")
        .args(["-c", "credential.helper=", "-c", &format!("credential.helper={helper}")])
        .args(["ls-remote", &format!("{}/acme/app.git", host.url)])
        .env("GIT_TERMINAL_PROMPT", "0")
        .output()
        .unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && said.contains("could not read Username"), "{said}");
    assert_eq!(said.lines().count(), 1, "the helper adds nothing: {said}");
}
