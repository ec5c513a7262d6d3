//! Real repositories on disk: work tree, linked work tree, bare, shallow, detached HEAD.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use kici_engine::event::{ChangedFiles, Event, EventKind};
use kici_engine::ids::SourceId;
use kici_engine::time::{ManualClock, Ts};
use kici_forge::local::Local;
use kici_forge::normalise::blank;
use kici_forge::{Forge, ForgeError, Forges, Limits, LocalConfig, Source, SourceConfig, SourceSecrets, WorkflowCache};
use uuid::Uuid;

struct Repo {
    dir: tempfile::TempDir,
}

fn git(path: &Path, args: &[&str]) -> String {
    let out = Command::new("git")
        .args(["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false", "-C"])
        .arg(path)
        .args(args)
        .env("GIT_CONFIG_GLOBAL", "/dev/null")
        .output()
        .unwrap();
    assert!(out.status.success(), "git {args:?}: {}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8(out.stdout).unwrap().trim().to_owned()
}

impl Repo {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        git(dir.path(), &["init", "-q", "-b", "main", "work"]);
        Self { dir }
    }

    fn path(&self) -> PathBuf {
        self.dir.path().join("work")
    }

    fn commit(&self, files: &[(&str, &str)], message: &str) -> String {
        for (name, content) in files {
            let path = self.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        }
        git(&self.path(), &["add", "-A"]);
        git(&self.path(), &["commit", "-q", "--allow-empty", "-m", message]);
        git(&self.path(), &["rev-parse", "HEAD"])
    }
}

fn source(path: &Path) -> Source {
    let config = SourceConfig::Local(LocalConfig::new(path));
    Source { id: SourceId::from_uuid(Uuid::nil()), org: "default".into(), name: "s".into(), version: 1, config }
}

fn open_with(path: &Path, limits: Limits) -> Local {
    let s = source(path);
    let SourceConfig::Local(config) = &s.config else { unreachable!() };
    Local::new(&s, config, Arc::new(WorkflowCache::default()), limits)
}

fn open(path: &Path) -> Local {
    open_with(path, Limits::default())
}

async fn paths(local: &Local, sha: &str) -> Vec<String> {
    let files = local.workflows_at("local/s", sha).await.unwrap();
    files.files.iter().map(|f| f.path.clone()).collect()
}

const CI: (&str, &str) = (".kici/workflows/ci.yaml", "on: push\n");

#[tokio::test]
async fn the_files_of_exactly_one_commit_are_read() {
    let repo = Repo::new();
    let empty = repo.commit(&[("a", "1")], "first");
    let files = [CI, (".kici/workflows/b.yml", "b"), (".kici/workflows/_part.yaml", "p"), (".kici/config.yaml", "c")];
    let more = [(".kici/workflows/sub/x.yaml", "x"), (".kici/kici.lock.json", "{}"), (".kici/notes.txt", "n")];
    let full = repo.commit(&[&files[..], &more[..]].concat(), "second\n\nwith [skip ci]");
    std::os::unix::fs::symlink("ci.yaml", repo.path().join(".kici/workflows/link.yaml")).unwrap();
    let linked = repo.commit(&[(".kici/workflows/ci.yaml", "changed")], "third");
    fs::write(repo.path().join(".kici/workflows/ci.yaml"), "not committed").unwrap();

    let local = open(&repo.path());
    assert!(local.workflows_at("local/s", &empty).await.unwrap().is_empty());
    let files = local.workflows_at("local/s", &full).await.unwrap();
    let got: Vec<_> = files.files.iter().map(|f| (f.path.as_str(), f.content.as_str())).collect();
    assert_eq!(got, [(".kici/workflows/b.yml", "b"), CI]);
    assert_eq!((files.config.as_deref(), files.lock.as_deref()), (Some("c"), Some("{}")));
    assert_eq!(files.commit_message.as_deref(), Some("second\n\nwith [skip ci]\n"));
    let third = local.workflows_at("local/s", &linked).await.unwrap();
    assert_eq!(third.files.len(), 2, "a symbolic link is not a workflow");
    assert_eq!(third.files[1].content, "changed");
}

#[tokio::test]
async fn every_shape_of_repository_works() {
    let repo = Repo::new();
    repo.commit(&[CI], "one");
    let sha = repo.commit(&[("x", "y")], "two");
    let root = repo.dir.path();
    git(&repo.path(), &["worktree", "add", "-q", "--detach", "../linked", &sha]);
    git(root, &["clone", "-q", "--bare", "work", "bare.git"]);
    let url = format!("file://{}", repo.path().display());
    git(root, &["clone", "-q", "--depth", "1", &url, "shallow"]);
    git(root, &["clone", "-q", "work", "detached"]);
    git(&root.join("detached"), &["checkout", "-q", "--detach"]);
    git(&root.join("detached"), &["remote", "remove", "origin"]);
    git(&root.join("detached"), &["pack-refs", "--all"]);

    for (name, branch) in [
        ("work", Some("main")),
        ("linked", None),
        ("bare.git", Some("main")),
        ("shallow", Some("main")),
        ("detached", None),
    ] {
        let local = open(&root.join(name));
        assert_eq!(paths(&local, &sha).await, [CI.0], "{name}");
        let head = local.head("local/s", None).await.unwrap();
        assert_eq!((head.sha.as_str(), head.branch.as_deref()), (sha.as_str(), branch), "{name}");
        let clone = local.clone_source("local/s", &sha, Some("refs/heads/main")).await.unwrap();
        assert_eq!(clone.url, format!("file://{}", root.join(name).display()));
    }
    let main = open(&repo.path()).head("local/s", Some("main")).await.unwrap();
    assert_eq!(main.sha, sha);
    assert!(matches!(open(&repo.path()).head("local/s", Some("nope")).await, Err(ForgeError::NotFound { .. })));
    assert!(matches!(open(&repo.path()).head("local/s", Some("--all")).await, Err(ForgeError::NotFound { .. })));
}

#[tokio::test]
async fn commits_made_later_and_repositories_made_anew_are_found() {
    let repo = Repo::new();
    let first = repo.commit(&[CI], "one");
    let local = open(&repo.path());
    assert_eq!(paths(&local, &first).await.len(), 1);
    let second = repo.commit(&[(".kici/workflows/more.yaml", "m")], "two");
    git(&repo.path(), &["repack", "-adq"]);
    assert_eq!(paths(&local, &second).await.len(), 2, "the open reader sees new packs");

    fs::remove_dir_all(repo.path()).unwrap();
    git(repo.dir.path(), &["init", "-q", "-b", "main", "work"]);
    let anew = repo.commit(&[(".kici/workflows/new.yaml", "n")], "anew");
    assert_eq!(paths(&local, &anew).await, [".kici/workflows/new.yaml"]);
}

#[tokio::test]
async fn what_is_not_there_is_told() {
    let repo = Repo::new();
    let sha = repo.commit(&[CI], "one");
    let local = open(&repo.path());
    let unknown = local.workflows_at("local/s", &"d".repeat(40)).await.unwrap_err();
    assert!(matches!(&unknown, ForgeError::NotFound { .. }) && !unknown.is_retryable(), "{unknown}");
    for bad in ["HEAD", "main", "--help", "", &sha[..12], &sha.to_uppercase()] {
        assert!(matches!(local.workflows_at("local/s", bad).await, Err(ForgeError::NotFound { .. })), "{bad}");
    }
    let tree = git(&repo.path(), &["rev-parse", "HEAD^{tree}"]);
    assert!(local.workflows_at("local/s", &tree).await.is_err(), "a tree is not a commit");
    let foreign = local.workflows_at("local/other", &sha).await.unwrap_err().to_string();
    assert!(foreign.contains("`local/other`") && foreign.contains("`local/s`"), "{foreign}");

    let nothing = open(&repo.dir.path().join("nothing")).workflows_at("local/s", &sha).await.unwrap_err();
    assert!(nothing.to_string().contains("No such file"), "{nothing}");
    let plain = open(repo.dir.path()).workflows_at("local/s", &sha).await.unwrap_err();
    assert!(plain.to_string().contains("not a git repository"), "{plain}");
    assert!(
        open(repo.dir.path()).head("local/s", None).await.unwrap_err().to_string().contains("not a git repository")
    );
}

#[tokio::test]
async fn limits_hold_for_hostile_repositories() {
    let repo = Repo::new();
    let big = "x".repeat(3000);
    let sha = repo.commit(&[CI, (".kici/workflows/big.yaml", &big), (".kici/workflows/z.yaml", "z")], "one");
    let limits = Limits { max_files: 2, max_file_bytes: 2000, max_lock_bytes: 10 };
    let files = open_with(&repo.path(), limits).workflows_at("local/s", &sha).await.unwrap();
    let skipped: Vec<_> = files.skipped.iter().map(|s| s.path.as_str()).collect();
    assert_eq!(files.files.len(), 1);
    assert_eq!(skipped, [".kici/workflows/z.yaml", ".kici/workflows/big.yaml"]);

    // Replacement refs must not change what a commit means.
    let other = repo.commit(&[(".kici/workflows/ci.yaml", "evil")], "two");
    git(&repo.path(), &["replace", &sha, &other]);
    let files = open(&repo.path()).workflows_at("local/s", &sha).await.unwrap();
    assert!(files.files.iter().any(|f| f.content == CI.1), "{files:?}");
}

#[tokio::test]
async fn twenty_thousand_files_do_not_matter() {
    let repo = Repo::new();
    git(&repo.path(), &["config", "core.fsync", "none"]);
    let mut import = String::from("commit refs/heads/main\ncommitter t <t@example.org> 0 +0000\ndata 1\nm\n");
    for n in 0..20_000 {
        import.push_str(&format!("M 100644 inline dir{}/f{n}\ndata 1\nx\n", n % 100));
    }
    import.push_str("M 100644 inline .kici/workflows/ci.yaml\ndata 1\nx\n");
    let file = repo.dir.path().join("import");
    fs::write(&file, import).unwrap();
    let mut command = Command::new("git");
    command.arg("-C").arg(repo.path()).args(["fast-import", "--quiet"]).stdin(fs::File::open(file).unwrap());
    assert!(command.status().unwrap().success());
    let sha = git(&repo.path(), &["rev-parse", "main"]);
    assert_eq!(paths(&open(&repo.path()), &sha).await, [CI.0]);
}

#[tokio::test]
async fn one_file_is_read_if_it_is_a_regular_one_and_small_enough() {
    let repo = Repo::new();
    std::os::unix::fs::symlink("package.json", repo.path().join("link")).unwrap();
    let sha = repo.commit(&[("package.json", "{}"), ("sub/x.json", "[1]"), ("*", "star")], "files");
    let local = open(&repo.path());
    let name = source(&repo.path()).local_repo().unwrap();
    let read =
        async |path: &str| local.file_at(&name, &sha, path, 100).await.unwrap().map(|b| String::from_utf8(b).unwrap());
    assert_eq!(read("package.json").await.as_deref(), Some("{}"));
    assert_eq!(read("sub/x.json").await.as_deref(), Some("[1]"));
    for absent in ["nothing", "sub", "link", "sub/*", "x.json"] {
        assert_eq!(read(absent).await, None, "{absent}");
    }
    assert!(
        local.file_at(&name, &sha, "package.json", 1).await.unwrap_err().to_string().contains("at most 1 are read")
    );
}

fn push(local_source: &Source, branch: &str, before: &str, after: &str) -> Event {
    let mut event = blank(local_source, EventKind::Push, "push");
    event.target_branch = Some(branch.to_owned());
    event.base_sha = Some(before.to_owned());
    event.sha = Some(after.to_owned());
    event
}

#[tokio::test]
async fn changed_files_are_known_or_the_reason_is() {
    let repo = Repo::new();
    let one = repo.commit(&[("a", "1"), ("b", "1")], "one");
    let two = repo.commit(&[("a", "2"), ("sub dir/ä\n.txt", "x")], "two");
    git(&repo.path(), &["checkout", "-q", "-b", "topic", &one]);
    let topic = repo.commit(&[("t", "1")], "topic");
    git(&repo.path(), &["checkout", "-q", "main"]);
    let (local, s) = (open(&repo.path()), source(&repo.path()));
    let zero = "0".repeat(40);

    let known = |files: &[&str]| ChangedFiles::Known(files.iter().map(|f| (*f).to_owned()).collect());
    let changed = local.changed_files(&push(&s, "main", &one, &two)).await;
    assert_eq!(changed, known(&["a", "sub dir/ä\n.txt"]));
    assert_eq!(local.changed_files(&push(&s, "main", &two, &two)).await, known(&[]));
    let new_branch = local.changed_files(&push(&s, "topic", &zero, &topic)).await;
    assert_eq!(new_branch, known(&["t"]), "a new branch is compared with where it left the default branch");

    for event in [
        push(&s, "main", &zero, &two),
        push(&s, "main", &"d".repeat(40), &two),
        Event { sha: None, ..push(&s, "main", &one, &two) },
        Event { kind: EventKind::Tag, ..push(&s, "main", &one, &two) },
    ] {
        let answer = local.changed_files(&event).await;
        assert!(matches!(&answer, ChangedFiles::Unavailable(reason) if !reason.is_empty()), "{answer:?}");
    }
}

#[tokio::test]
async fn forges_are_kept_until_the_source_changes() {
    let repo = Repo::new();
    rustls::crypto::ring::default_provider().install_default().ok();
    let clock = Arc::new(ManualClock::new(Ts::from_micros(0)));
    let forges = Forges::new(reqwest::Client::new(), clock, vec![repo.dir.path().to_owned()]);
    let secrets = || Ok(SourceSecrets::default());
    let mut s = source(&repo.path());
    let first = forges.get(&s, secrets).unwrap();
    assert!(Arc::ptr_eq(&first, &forges.get(&s, secrets).unwrap()));
    s.version += 1;
    assert!(!Arc::ptr_eq(&first, &forges.get(&s, secrets).unwrap()));

    let outside = Source { id: SourceId::from_uuid(Uuid::max()), ..source(Path::new("/")) };
    let refused = forges.get(&outside, secrets).err().unwrap();
    assert!(refused.to_string().contains("sources.local_paths") && !refused.is_retryable(), "{refused}");
}
