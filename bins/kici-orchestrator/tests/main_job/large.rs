//! Repositories that are large in one way or the other.

use std::io::Write as _;
use std::path::Path;
use std::process::Stdio;

use kici_engine::ids::RunId;
use kici_engine::state::RunStatus;

use crate::stack::{Process, Stack, clean};

/// What an agent may have resident, whatever it checks out.
const AGENT_MIB: u64 = 48;
const ORCHESTRATOR_MIB: u64 = 128;

const WORKFLOW: &str = r#"
on: push
jobs:
  look:
    runs_on: default
    run: |
      git rev-list --count HEAD
      du -sm .git | cut -f1
      find . -path ./.git -prune -o -type f -print | wc -l
"#;

/// Starts `git fast-import` in a new repository; what is written to it becomes `main`.
fn import(path: &Path, write: impl FnOnce(&mut dyn std::io::Write)) {
    std::fs::create_dir_all(path).unwrap();
    let git = |arguments: &[&str]| {
        let mut command = clean(Path::new("git"));
        command.current_dir(path).env("GIT_CONFIG_GLOBAL", "/dev/null").args(arguments);
        command
    };
    assert!(git(&["init", "-q", "--bare", "-b", "main"]).status().unwrap().success());
    let arguments = ["-c", "core.compression=0", "-c", "core.fsync=none", "fast-import", "--quiet", "--depth=0"];
    let mut child = git(&arguments).stdin(Stdio::piped()).spawn().unwrap();
    let mut out = std::io::BufWriter::with_capacity(1 << 20, child.stdin.take().unwrap());
    write(&mut out);
    out.flush().unwrap();
    drop(out);
    assert!(child.wait().unwrap().success());
}

fn commit(out: &mut dyn std::io::Write, number: usize) {
    writeln!(out, "commit refs/heads/main\ncommitter a <a@example.com> {} +0000\ndata 1\nx", 1_800_000_000 + number)
        .unwrap();
}

fn file(out: &mut dyn std::io::Write, name: &str, parts: &[&[u8]]) {
    let length: usize = parts.iter().map(|part| part.len()).sum();
    writeln!(out, "M 100644 inline {name}\ndata {length}").unwrap();
    parts.iter().for_each(|part| out.write_all(part).unwrap());
    out.write_all(b"\n").unwrap();
}

/// Pushes and returns what the job said.
async fn look(stack: &Stack, agent: &Process, name: &str) -> (RunId, Vec<u64>) {
    let repository = stack.known_repository(name).await;
    let run = stack.push_one(&repository, name).await;
    let ended = stack.ended(run).await;
    assert_eq!(ended.run.status, RunStatus::Success, "{:#?}\n{}", ended.jobs, stack.logs());
    let said = stack.log(run, "look").await.iter().map(|line| line.trim().parse().unwrap()).collect();
    let (agent, orchestrator) = (agent.peak_mib(), stack.orchestrator.as_ref().unwrap().peak_mib());
    assert!(agent <= AGENT_MIB, "the agent had {agent} MiB resident");
    assert!(orchestrator <= ORCHESTRATOR_MIB, "the orchestrator had {orchestrator} MiB resident");
    (run, said)
}

#[tokio::test]
async fn a_repository_with_20000_files_is_checked_out_whole() {
    let mut stack = Stack::unstarted(None);
    import(&stack.dir.path().join("repos/many"), |out| {
        commit(out, 1);
        file(out, ".kici/workflows/w.yaml", &[WORKFLOW.as_bytes()]);
        for n in 0..20_000 {
            file(out, &format!("d{}/d{}/f{n}", n % 20, n % 400), &[format!("file {n}\n").as_bytes()]);
        }
    });
    stack.start_orchestrator("127.0.0.1:0").await;
    let token = stack.agent_token().await;
    let agent = stack.start_agent("a1", token.token.expose(), &[]).await;
    let (_, said) = look(&stack, &agent, "many").await;
    assert_eq!((said[0], said[2]), (1, 20_001));
}

#[tokio::test]
async fn of_a_history_of_1_gib_only_the_commit_itself_is_fetched() {
    const BLOB: usize = 16 << 20;
    let mut stack = Stack::unstarted(None);
    import(&stack.dir.path().join("repos/deep"), |out| {
        let mut state = 88_172_645_463_325_252_u64;
        let mut noise = vec![0_u8; BLOB];
        for word in noise.chunks_exact_mut(8) {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            word.copy_from_slice(&state.to_le_bytes());
        }
        for n in 0..64 {
            commit(out, n);
            if n == 0 {
                file(out, ".kici/workflows/w.yaml", &[WORKFLOW.as_bytes()]);
            }
            // The same noise behind another beginning is another blob, and no deltas are made.
            file(out, "noise", &[format!("{n:08}").as_bytes(), &noise]);
        }
    });
    stack.start_orchestrator("127.0.0.1:0").await;
    let size = clean(Path::new("du")).arg("-sm").arg(stack.dir.path().join("repos/deep")).output().unwrap();
    let size = String::from_utf8(size.stdout).unwrap();
    assert!(size.split('\t').next().unwrap().parse::<u64>().unwrap() >= 1024, "{size}");
    let token = stack.agent_token().await;
    let agent = stack.start_agent("a1", token.token.expose(), &[]).await;
    let (_, said) = look(&stack, &agent, "deep").await;
    assert_eq!((said[0], said[2]), (1, 2));
    assert!(said[1] <= 20, "{} MiB of history were fetched", said[1]);
}
