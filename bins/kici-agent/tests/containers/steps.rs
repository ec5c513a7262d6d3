//! What steps find in a container, and what they leave for each other and for their job.

use std::process::Command;

use kici_engine::lock::{Group, Shell, Value};
use kici_protocol::agent::{CheckoutSource, GitAccess, GitHost};

use super::*;

/// A repository with a commit, and the name of that commit.
fn repository(dir: &std::path::Path) -> String {
    let git = |words: &[&str]| {
        let output = Command::new("git").args(words).current_dir(dir).env("HOME", dir).output().expect("git runs");
        assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).expect("UTF-8").trim().to_owned()
    };
    std::fs::create_dir_all(dir.join("sub")).expect("made");
    std::fs::write(dir.join("sub/run.sh"), "#!/bin/sh\necho from the commit\n").expect("written");
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(dir.join("sub/run.sh"), mode).expect("set");
    std::os::unix::fs::symlink("/etc/shadow", dir.join("link")).expect("made");
    git(&["init", "-q", "-b", "main"]);
    git(&["add", "."]);
    git(&["-c", "user.name=t", "-c", "user.email=t@t", "commit", "-q", "-m", "one"]);
    git(&["rev-parse", "HEAD"])
}

async fn a_job(kind: &str) {
    let Some(site) = Site::start(kind, &[]).await else { return };
    let source = site.dir.join("source");
    let sha = repository(&source);
    let first = "pwd; id -u; ls -ln sub; sub/run.sh; ls -l link; cat .git/HEAD
        command -v git || echo no git; command -v bash || echo no bash
        echo $OF_IMAGE $OF_JOB $CI; cat $KICI_EVENT_PATH; echo; echo err >&2
        echo one=1 >> $KICI_OUTPUT; printf 'text<<E\\na\\nb\\nE\\n' >> $KICI_OUTPUT
        echo LATER=there >> $KICI_ENV; mkdir -p bin; printf '#!/bin/sh\\necho found\\n' > bin/tool; chmod +x bin/tool
        echo $PWD/bin >> $KICI_PATH; echo '# Summary' >> $KICI_SUMMARY; (sleep 600; echo never) > /dev/null 2>&1 &";
    let second = "echo $LATER; tool; ps | grep -c '[s]leep 600'; exit 3";
    let more = json!({
        "container": {"image": {"static": engine::CI}, "env": {"OF_JOB": {"static": "set"}}},
        "context": {"event": {"kind": "push"}},
        "outputs": {"one": {"template": "${{ steps.a.outputs.one }}", "stage": "agent"}},
    });
    let mut steps = vec![script(first), script(second)];
    steps[0].id = Some("a".into());
    let checkout = CheckoutSource {
        url: format!("file://{}", source.display()),
        git_ref: "refs/heads/main".into(),
        sha: sha.clone(),
        depth: 1,
        basic: None,
        ..CheckoutSource::default()
    };
    let offer = JobOffer { checkout: Some(checkout), ..contained(&job(2, 1), steps, more) };
    let (result, text) = site.run_offer(offer, 2).await;
    says(&text, &["/workspace\n1000\n", "from the commit", "link -> /etc/shadow", &sha, "no git", "no bash"]);
    says(&text, &["there set true", r#"{"kind":"push"}"#, "err", "there\nfound\n1\n", "exit code 3"]);
    let file = text.lines().find(|line| line.ends_with(" run.sh")).expect("the file");
    assert_eq!(file.split_ascii_whitespace().collect::<Vec<_>>()[2..4], ["1000", "1000"], "{file}");
    let evidence = result.evidence.expect("evidence");
    assert_eq!((result.state.as_str(), result.reason.as_str(), evidence.exit_code), ("failed", "step_failed", Some(3)));
    assert!(evidence.strays_killed >= 1, "{evidence:?}");
    assert_eq!(result.outputs["one"], "1");
    site.nothing_left().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn acceptance_4_an_image_without_git_or_anything_of_ours_runs_a_job_in_docker() {
    a_job("docker").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn acceptance_4_an_image_without_git_or_anything_of_ours_runs_a_job_in_podman() {
    a_job("podman").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn steps_side_by_side_shells_directories_checks_and_hooks_work_inside() {
    let Some(site) = Site::start("docker", &[]).await else { return };
    let step = |text: &str| Step { group: Some(0), ..script(text) };
    let mut steps = vec![
        step("touch a; while [ ! -e b ]; do sleep 0.01; done; echo met"),
        step("touch b; while [ ! -e a ]; do sleep 0.01; done; echo met"),
    ];
    steps.push(Step {
        shell: Some(Shell::Command(vec!["awk".into(), "-f".into(), "{0}".into()])),
        ..script("BEGIN { print \"by awk\" }")
    });
    steps.push(Step { working_directory: Some(Value::fixed("made/here")), ..script("pwd") });
    steps.insert(2, script("mkdir -p made/here; ln -s / out"));
    let check = json!({"check": {"script": "echo differs >> $KICI_DRIFT", "apply": "cat $KICI_DRIFT; echo applied"}});
    let mut checked = serde_json::to_value(script("x")).expect("JSON");
    checked.as_object_mut().expect("a map").remove("run");
    merge(&mut checked, check);
    steps.push(serde_json::from_value(checked).expect("a step"));
    let groups =
        serde_json::to_value([Group { name: None, fail_fast: true, max_parallel: None, source: Default::default() }])
            .expect("JSON");
    let hook = serde_json::to_value(script("echo cleaned $KICI_OUTCOME_STATUS in $PWD")).expect("JSON");
    let more = json!({"groups": groups, "hooks": {"cleanup": [hook]}});
    let (result, text) = site.run_offer(contained(&job(2, 1), steps, more), 6).await;
    assert_eq!((result.state.as_str(), result.message.as_str()), ("success", ""), "{text}");
    says(&text, &["met\nmet\n", "by awk", "/workspace/made/here", "drift found", "differs\napplied"]);
    let cleanup = site.fake.sealed(&job(2, 1), "hook_cleanup--1-0").await;
    assert_eq!(cleanup, ["cleaned success in /workspace"]);
    for (n, place, why) in [(3, "../..", "lies outside"), (4, "nowhere", "does not exist"), (5, "/etc", "lies outside")]
    {
        let step = Step { working_directory: Some(Value::fixed(place)), ..script("pwd") };
        let (result, _) = site.run_offer(contained(&job(n, 1), vec![step], json!({})), 1).await;
        says(&result.message, &[why, place]);
    }
    let steps = vec![script("ln -s / out"), Step { working_directory: Some(Value::fixed("out/etc")), ..script("pwd") }];
    let (result, _) = site.run_offer(contained(&job(6, 1), steps, json!({})), 2).await;
    says(&result.message, &["out/etc", "lies outside the workspace"]);
    let step = Step { shell: Some(Shell::Bash), ..script("true") };
    let (result, _) = site.run_offer(contained(&job(7, 1), vec![step], json!({})), 1).await;
    says(&result.message, &["cannot start `bash`"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn much_output_comes_whole_and_in_order() {
    let Some(site) = Site::start("docker", &[]).await else { return };
    let (result, text) = site.run(&["seq 1 300000"], json!({})).await;
    assert_eq!(result.state, "success");
    let expected: String = (1..=300_000).map(|n| format!("{n}\n")).collect();
    assert!(text == expected, "{} of {} bytes", text.len(), expected.len());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn acceptance_4_git_in_a_container_asks_its_agent_and_what_it_gets_is_masked() {
    let Some(site) = Site::start("docker", &[]).await else { return };
    *site.fake.shared.credential.lock().expect("lock") = Some("s3cr3t-t0ken-of-the-forge".to_owned());
    let ask = "printf 'protocol=https\\nhost=git.test\\npath=acme/app.git\\n\\n'";
    let first = format!(
        "set +e; env | grep GIT_CONFIG_VALUE; {ask} | /opt/kici/kici-init credential-helper --socket $KICI_SOCK get
        {ask} | /opt/kici/kici-init credential-helper --socket $KICI_SOCK store && echo stored nothing
        kici git token > token; wc -c < token; kici git token | tr a-z b-za
        kici doctor; echo code $?; printf hidden-v4lue | kici mask && echo now hidden-v4lue; kici git with-write -- sh -c 'exit 5'; echo code $?"
    );
    let git = GitAccess {
        hosts: vec![GitHost { protocol: "https".into(), host: "git.test".into(), ignore_case: false }],
        repo: "acme/app".into(),
    };
    let offer = JobOffer { git: Some(git), ..contained(&job(2, 1), vec![script(&first)], json!({})) };
    let (result, text) = site.run_offer(offer, 1).await;
    assert_eq!(result.state, "success", "{} {text}", result.message);
    says(&text, &["/opt/kici/kici-init", "username=x-access-token", "password=***", "stored nothing", "\n26\n"]);
    says(&text, &["in a container there are", "code 2", "now ***", "code 5"]);
    assert!(!text.contains("s3cr3t-t0ken"), "{text}");
}
