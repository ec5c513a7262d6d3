use std::process::Command;

use kici_engine::time::{ManualClock, Ts};
use tempfile::TempDir;

use super::*;
use crate::key::checkout_key;
use crate::spool::{Limits, Next, Spool};

fn git(dir: &Path, args: &[&str]) -> String {
    let output = Command::new("git")
        .args([
            "-c",
            "user.name=t",
            "-c",
            "user.email=t@t",
            "-c",
            "init.defaultBranch=main",
            "-c",
            "commit.gpgsign=false",
        ])
        .args(args)
        .current_dir(dir)
        .output()
        .expect("git runs");
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("UTF-8").trim().to_owned()
}

/// A repository with `commits` commits on `main`; their names, oldest first.
fn repository(dir: &Path, commits: usize) -> Vec<String> {
    std::fs::create_dir_all(dir).expect("made");
    git(dir, &["init", "-q"]);
    (0..commits)
        .map(|n| {
            std::fs::write(dir.join("file"), n.to_string()).expect("written");
            git(dir, &["add", "."]);
            git(dir, &["commit", "-qm", "c"]);
            git(dir, &["rev-parse", "HEAD"])
        })
        .collect()
}

struct Bench {
    dir: TempDir,
    spool: Arc<Spool>,
    log: String,
    home: PathBuf,
    started: std::sync::atomic::AtomicUsize,
}

impl Bench {
    fn new() -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let limits =
            Limits { max_step_bytes: 0, max_unacked_bytes: u64::MAX, pressure: crate::config::Pressure::Pause };
        let spool = Spool::create(&dir.path().join("spool"), limits).expect("made");
        let home = dir.path().join("home");
        Self { dir, spool, log: String::new(), home, started: Default::default() }
    }

    fn workspace(&self) -> PathBuf {
        self.dir.path().join("workspace")
    }

    async fn checkout(&mut self, source: &Source, stop: Stop) -> Result<(), CheckoutError> {
        std::fs::create_dir_all(self.workspace()).expect("made");
        let mut log = self.spool.open(&checkout_key()).await.expect("opened");
        let (_tx, mut stop) = watch::channel(stop);
        let home = self.home.display().to_string();
        let host = [
            ("PATH".to_owned(), "/usr/local/bin:/usr/bin:/bin".to_owned()),
            ("XDG_CONFIG_HOME".to_owned(), format!("{home}/.config")),
            ("HOME".to_owned(), home),
        ]
        .into();
        let start = |spawn: Spawn| -> io::Result<(Tree, Pipes)> {
            self.started.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            Tree::spawn(&spawn)
        };
        let result = Checkout {
            workspace: &self.workspace(),
            scratch: self.dir.path(),
            host: &host,
            start: &start,
            timeout: Duration::from_secs(60),
            deadline: None,
            log: &mut log,
            masker: &Arc::new(Masker::default()),
            helper: None,
            clock: &ManualClock::new(Ts::from_micros(1)),
            stop: &mut stop,
        }
        .run(source)
        .await;
        log.close(Ts::from_micros(1)).await.expect("closed");
        while let Ok(Next::Data(_, _, bytes)) = self.spool.next(1 << 20, u64::MAX) {
            self.log.push_str(&String::from_utf8_lossy(&bytes));
        }
        result
    }
}

fn source(dir: &Path, sha: &str) -> Source {
    Source {
        url: format!("file://{}", dir.display()),
        git_ref: "refs/heads/main".into(),
        sha: sha.into(),
        depth: 1,
        basic: None,
        submodules: false,
        lfs: false,
        tags: false,
        ssh: None,
    }
}

#[tokio::test]
async fn an_old_commit_is_checked_out_exactly_and_shallow() {
    let mut bench = Bench::new();
    let origin = bench.dir.path().join("origin");
    let commits = repository(&origin, 3);
    bench.checkout(&source(&origin, &commits[1]), Stop::Run).await.expect("checked out");
    let workspace = bench.workspace();
    assert_eq!(git(&workspace, &["rev-parse", "HEAD"]), commits[1]);
    assert_eq!(std::fs::read_to_string(workspace.join("file")).expect("there"), "1");
    assert_eq!(git(&workspace, &["rev-list", "--count", "HEAD"]), "1");
    assert_eq!(git(&workspace, &["status", "--porcelain"]), "");
}

#[tokio::test]
async fn depth_0_is_all_history_and_no_sha_is_the_tip() {
    let mut bench = Bench::new();
    let origin = bench.dir.path().join("origin");
    let commits = repository(&origin, 3);
    let all = Source { depth: 0, sha: String::new(), ..source(&origin, "") };
    bench.checkout(&all, Stop::Run).await.expect("checked out");
    assert_eq!(git(&bench.workspace(), &["rev-parse", "HEAD"]), commits[2]);
    assert_eq!(git(&bench.workspace(), &["rev-list", "--count", "HEAD"]), "3");
}

#[tokio::test]
async fn what_a_step_left_in_the_home_of_the_agent_is_not_read() {
    let mut bench = Bench::new();
    let origin = bench.dir.path().join("origin");
    let tip = repository(&origin, 1).remove(0);
    let ran = bench.dir.path().join("ran");
    let config = format!(
        "[core]\n\tattributesFile = {0}/attributes\n[filter \"evil\"]\n\tsmudge = touch {1}; cat\n",
        bench.home.display(),
        ran.display()
    );
    std::fs::create_dir_all(bench.home.join(".config/git")).expect("made");
    std::fs::write(bench.home.join("attributes"), "* filter=evil\n").expect("written");
    std::fs::write(bench.home.join(".config/git/attributes"), "* filter=evil\n").expect("written");
    for path in [".gitconfig", ".config/git/config"] {
        std::fs::write(bench.home.join(path), &config).expect("written");
    }
    bench.checkout(&source(&origin, &tip), Stop::Run).await.expect("checked out");
    assert!(bench.workspace().join("file").is_file() && !ran.exists());
    assert!(*bench.started.get_mut() >= 2, "every git is known to the job");
}

#[tokio::test]
async fn an_unknown_commit_names_both_sides() {
    let mut bench = Bench::new();
    let origin = bench.dir.path().join("origin");
    let tip = repository(&origin, 1).remove(0);
    let unknown = "1".repeat(40);
    let error = bench.checkout(&source(&origin, &unknown), Stop::Run).await.expect_err("unknown").to_string();
    assert!(error.contains(&unknown) && error.contains(&tip), "{error}\n{}", bench.log);
}

#[tokio::test]
async fn odd_sources_are_refused_before_git_runs() {
    let base = source(Path::new("/x"), "");
    let cases = [
        Source { url: "--upload-pack=evil".into(), ..base.clone() },
        Source { url: "ext::sh -c evil".into(), ..base.clone() },
        Source { url: "https://user:pw@host/x".into(), ..base.clone() },
        Source { git_ref: "--evil".into(), ..base.clone() },
        Source { git_ref: "a:b".into(), ..base.clone() },
        Source { sha: "abc".into(), ..base },
    ];
    for case in cases {
        let error = Bench::new().checkout(&case, Stop::Run).await;
        assert!(matches!(error, Err(CheckoutError::Refused(_))), "{case:?}");
    }
}

#[tokio::test]
async fn a_missing_repository_says_so_and_a_cancel_ends_it() {
    let mut bench = Bench::new();
    let gone = bench.dir.path().join("gone");
    let error = bench.checkout(&source(&gone, &"1".repeat(40)), Stop::Run).await.expect_err("gone").to_string();
    assert!(error.contains("does not appear to be a git repository") || error.contains("not exist"), "{error}");
    let mut bench = Bench::new();
    let told = Stop::Force { reason: kici_engine::state::FailureReason::CancelledByUser, message: String::new() };
    let error = bench.checkout(&source(&gone, &"1".repeat(40)), told).await;
    assert!(matches!(error, Err(CheckoutError::Stopped(_))));
}

#[test]
fn the_header_is_bound_to_the_host() {
    assert_eq!(origin("https://git.example:8443/a/b.git"), "https://git.example:8443/");
}
