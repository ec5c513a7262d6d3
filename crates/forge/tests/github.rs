//! The GitHub client against a fake GitHub.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use kici_engine::event::{ChangedFiles, Event, EventKind};
use kici_engine::ids::SourceId;
use kici_engine::time::{Clock, ManualClock, Ts};
use kici_forge::github::{Github, Retry};
use kici_forge::normalise::blank;
use kici_forge::testing::{FakeDelivery, FakeGithub, FakeRepo, Fault, PRIVATE_KEY};
use kici_forge::{Forge, ForgeError, GithubConfig, Limits, Source, SourceConfig, WorkflowCache};
use secrecy::ExposeSecret;
use uuid::Uuid;

const REPO: &str = "octo/hello";

fn sha(letter: char) -> String {
    letter.to_string().repeat(40)
}

struct World {
    fake: FakeGithub,
    clock: Arc<ManualClock>,
    source: Source,
    github: Github,
}

async fn world() -> World {
    rustls::crypto::ring::default_provider().install_default().ok();
    let clock = Arc::new(ManualClock::new(Ts::from_micros(1_700_000_000_000_000)));
    let fake = FakeGithub::start(Arc::clone(&clock) as Arc<dyn Clock>).await.unwrap();
    let mut commits = BTreeMap::new();
    let files = [(".kici/workflows/ci.yaml", "ci"), (".kici/workflows/x.link.yaml", "ci.yaml"), ("src/a", "a")];
    let files = files.into_iter().map(|(p, c)| (p.to_owned(), c.as_bytes().to_vec())).collect();
    commits.insert(sha('a'), files);
    commits.insert(sha('b'), BTreeMap::from([("README".to_owned(), b"r".to_vec())]));
    let repo = FakeRepo {
        installation: Some(5),
        default_branch: "main".into(),
        branches: BTreeMap::from([("main".into(), sha('b')), ("feature/x".into(), sha('a'))]),
        commits,
        ..FakeRepo::default()
    };
    fake.state().repos.insert(REPO.into(), repo);
    let config = GithubConfig { base_url: fake.base_url().to_owned(), ..GithubConfig::new(7) };
    let source = Source {
        id: SourceId::from_uuid(Uuid::nil()),
        org: "default".into(),
        name: "gh".into(),
        version: 1,
        config: SourceConfig::Github(config.clone()),
    };
    let shared = (reqwest::Client::new(), Arc::clone(&clock) as Arc<dyn Clock>, Arc::new(WorkflowCache::default()));
    let github = Github::new(&source, &config, Some(&PRIVATE_KEY.into()), shared, Limits::default()).unwrap();
    let github = github.with_retry(Retry { delay: Duration::from_millis(1), times: 3 });
    World { fake, clock, source, github }
}

impl World {
    fn fault(&self, call: &str, status: u16, headers: &[(&'static str, &str)]) {
        let headers = headers.iter().map(|(n, v)| (*n, (*v).to_owned())).collect();
        self.fake.state().faults.push_back(Fault { call: call.to_owned(), status, headers });
    }

    fn event(&self, kind: EventKind) -> Event {
        Event {
            repo: Some(REPO.into()),
            sha: Some(sha('a')),
            base_sha: Some(sha('b')),
            target_branch: Some("main".into()),
            default_branch: Some("main".into()),
            ..blank(&self.source, kind, "x")
        }
    }

    fn edit(&self, edit: impl FnOnce(&mut FakeRepo)) {
        edit(self.fake.state().repos.get_mut(REPO).unwrap());
    }
}

#[tokio::test]
async fn workflows_are_read_once_with_one_token() {
    let w = world().await;
    let calls = (0..5).map(|_| {
        let a = sha('a');
        let github = &w.github;
        async move { github.workflows_at(REPO, &a).await.unwrap() }
    });
    for files in futures::future::join_all(calls).await {
        let got: Vec<_> = files.files.iter().map(|f| (f.path.as_str(), f.content.as_str())).collect();
        assert_eq!(got, [(".kici/workflows/ci.yaml", "ci")], "a symbolic link is not a workflow");
    }
    assert!(w.github.workflows_at(REPO, &sha('b')).await.unwrap().is_empty());
    assert_eq!(w.fake.calls("git/trees"), 3, "two for the first commit, one for the second");
    assert_eq!((w.fake.calls("access_tokens"), w.fake.calls("/installation")), (1, 2), "{:?}", w.fake.state().calls);
    assert_eq!(w.fake.state().minted[0].2, r#"{"contents":"read","metadata":"read"}"#);
}

#[tokio::test]
async fn tokens_are_renewed_before_they_end() {
    let w = world().await;
    let head = async || w.github.head(REPO, None).await.unwrap();
    assert_eq!(head().await.sha, sha('b'));
    w.clock.advance(Duration::from_secs(49 * 60));
    head().await;
    assert_eq!(w.fake.calls("access_tokens"), 1);
    w.clock.advance(Duration::from_secs(2 * 60));
    head().await;
    assert_eq!(w.fake.calls("access_tokens"), 2);

    w.fake.state().minted.clear();
    let refused = w.github.head(REPO, Some("main")).await.unwrap_err();
    assert!(matches!(refused, ForgeError::Refused { status: 401, .. }), "{refused}");
    assert_eq!(w.github.head(REPO, Some("feature/x")).await.unwrap().sha, sha('a'), "a refused token is forgotten");
}

#[tokio::test]
async fn job_credentials_are_their_own_and_short_lived() {
    let w = world().await;
    let token = async || {
        let clone = w.github.clone_source(REPO, &sha('a'), Some("refs/heads/main")).await.unwrap();
        assert!(!format!("{clone:?}").contains("ghs_"));
        assert_eq!(clone.url, format!("{}/{REPO}.git", w.fake.base_url()));
        let auth = clone.auth.unwrap();
        assert_eq!(auth.username, "x-access-token");
        auth.password.expose_secret().to_owned()
    };
    w.github.head(REPO, None).await.unwrap();
    let first = token().await;
    assert_eq!(token().await, first);
    assert_ne!(first, w.fake.state().minted[0].0, "never the token that we use ourselves");
    w.clock.advance(Duration::from_secs(61));
    assert_ne!(token().await, first);
}

#[tokio::test]
async fn pull_request_files_come_page_by_page() {
    let w = world().await;
    let files = |n: usize| (0..n).map(|i| format!("f{i}")).collect::<Vec<_>>();
    w.edit(|r| r.pulls = BTreeMap::from([(1, files(250)), (2, files(3200)), (3, vec!["old -> new".into()])]));
    let of = |number| Event { pr_number: Some(number), ..w.event(EventKind::Pr) };
    assert_eq!(w.github.changed_files(&of(1)).await, ChangedFiles::Known(files(250)));
    assert_eq!(w.fake.calls("pulls/1/files"), 3);
    assert_eq!(w.github.changed_files(&of(2)).await, ChangedFiles::Truncated(files(3000)));
    assert_eq!(w.fake.calls("pulls/2/files"), 30);
    assert_eq!(w.github.changed_files(&of(3)).await, ChangedFiles::Known(vec!["old".into(), "new".into()]));
    assert!(matches!(w.github.changed_files(&of(4)).await, ChangedFiles::Unavailable(r) if r.contains("not found")));
}

#[tokio::test]
async fn pushes_are_compared() {
    let w = world().await;
    let range = format!("{}...{}", sha('b'), sha('a'));
    let files = |n: usize| (0..n).map(|i| format!("f{i}")).collect::<Vec<_>>();
    let zero = Some("0".repeat(40));
    w.edit(|r| {
        r.compares = BTreeMap::from([(range.clone(), files(2)), (format!("main...{}", sha('a')), files(1))]);
    });
    let push = w.event(EventKind::Push);
    assert_eq!(w.github.changed_files(&push).await, ChangedFiles::Known(files(2)));
    w.edit(|r| drop(r.compares.insert(range.clone(), files(301))));
    assert_eq!(w.github.changed_files(&push).await, ChangedFiles::Truncated(files(300)));

    let new_branch = Event { base_sha: zero.clone(), target_branch: Some("topic".into()), ..push.clone() };
    assert_eq!(w.github.changed_files(&new_branch).await, ChangedFiles::Known(files(1)));
    let first_push = Event { base_sha: zero, ..push };
    assert!(matches!(w.github.changed_files(&first_push).await, ChangedFiles::Unavailable(_)));
    assert!(matches!(w.github.changed_files(&w.event(EventKind::Tag)).await, ChangedFiles::Unavailable(_)));
}

#[tokio::test]
async fn limits_and_faults_are_waited_out_within_reason() {
    let w = world().await;
    w.fault("/repos/octo/hello ", 500, &[]);
    w.fault("GET /repos/octo/hello/git/ref", 429, &[("retry-after", "0")]);
    w.fault("GET /repos/octo/hello/git/ref", 502, &[]);
    w.fault("access_tokens", 403, &[("x-ratelimit-remaining", "0"), ("x-ratelimit-reset", "1700000000")]);
    assert_eq!(w.github.head(REPO, Some("main")).await.unwrap().sha, sha('b'));
    assert_eq!(w.fake.calls("git/ref"), 3);

    w.fault("git/ref", 429, &[("retry-after", "120")]);
    let limited = w.github.head(REPO, Some("main")).await.unwrap_err();
    assert_eq!(limited, ForgeError::RateLimited { retry_after_s: 120 });
    assert!(limited.is_retryable());
    assert_eq!(w.fake.calls("git/ref"), 4, "two minutes are not waited for here");

    w.fault("git/ref", 403, &[("x-ratelimit-remaining", "0"), ("x-ratelimit-reset", "1700000090")]);
    let spent = w.github.head(REPO, Some("main")).await.unwrap_err();
    assert_eq!(spent, ForgeError::RateLimited { retry_after_s: 90 });

    for _ in 0..4 {
        w.fault("git/ref", 503, &[]);
    }
    let down = w.github.head(REPO, Some("main")).await.unwrap_err();
    assert!(matches!(down, ForgeError::Unavailable { .. }), "{down}");

    w.fault("git/ref", 403, &[]);
    let refused = w.github.head(REPO, Some("main")).await.unwrap_err();
    assert!(matches!(refused, ForgeError::Refused { status: 403, .. }) && !refused.is_retryable(), "{refused}");
}

#[tokio::test]
async fn what_is_missing_is_named_with_the_remedy() {
    let w = world().await;
    let text = |e: ForgeError| e.to_string();
    w.edit(|r| r.installation = None);
    let error = text(w.github.head(REPO, None).await.unwrap_err());
    assert!(error.contains("install the App on the repository"), "{error}");
    w.edit(|r| r.installation = Some(5));
    w.github.head(REPO, None).await.unwrap();
    w.edit(|r| r.installation = Some(6));
    w.clock.advance(Duration::from_secs(3600));
    w.github.head(REPO, None).await.unwrap();

    let unknown = w.github.workflows_at(REPO, &sha('f')).await.unwrap_err();
    assert!(matches!(unknown, ForgeError::NotFound { .. }), "{unknown}");
    for repo in ["x", "a/../b", "a/b/c", "a/b?c", "../.."] {
        assert!(matches!(w.github.head(repo, None).await, Err(ForgeError::NotFound { .. })), "{repo}");
    }

    let SourceConfig::Github(config) = &w.source.config else { unreachable!() };
    for (key, word) in [(None, "no private key"), (Some("nonsense"), "not an RSA key")] {
        let shared = (reqwest::Client::new(), Arc::clone(&w.clock) as Arc<dyn Clock>, Arc::default());
        let key = key.map(Into::into);
        let error = Github::new(&w.source, config, key.as_ref(), shared, Limits::default()).unwrap_err();
        assert!(text(error.clone()).contains(word) && !error.is_retryable(), "{error}");
    }
}

#[tokio::test]
async fn failed_deliveries_are_found_and_ordered_again() {
    let w = world().await;
    let now = w.clock.now();
    let attempt = |id: u64, guid: &str, age: u64, status| FakeDelivery {
        id,
        guid: guid.to_owned(),
        at: now.minus(Duration::from_secs(age)),
        status,
    };
    let mut deliveries = vec![
        attempt(9, "lost", 10, 0),
        attempt(8, "repaired", 20, 200),
        attempt(7, "refused", 30, 502),
        attempt(6, "repaired", 40, 500),
        attempt(5, "lost", 50, 500),
        attempt(4, "arrived once", 55, 500),
        attempt(3, "arrived once", 60, 202),
    ];
    deliveries.extend((0..200).map(|n| attempt(1000 + n, &format!("ok{n}"), 70, 200)));
    deliveries.push(attempt(2, "second page", 80, 500));
    deliveries.push(attempt(1, "too old", 5000, 500));
    w.fake.state().deliveries = deliveries;
    let failed = w.github.failed_deliveries(now.minus(Duration::from_secs(3600))).await.unwrap();
    let got: Vec<_> = failed.iter().map(|f| (f.id.as_str(), f.guid.as_str(), f.status)).collect();
    assert_eq!(got, [("2", "second page", 500), ("7", "refused", 502), ("9", "lost", 0)]);
    w.github.redeliver("7").await.unwrap();
    assert_eq!(w.fake.calls("POST /app/hook/deliveries/7/attempts"), 1);
    for bad in ["", "x", "7/../8", "77"] {
        assert!(matches!(w.github.redeliver(bad).await, Err(ForgeError::NotFound { .. })), "{bad}");
    }
}

#[tokio::test]
async fn one_file_is_read_at_a_commit_if_it_is_small_enough() {
    let w = world().await;
    let read = async |path: &str, max| w.github.file_at(REPO, &sha('a'), path, max).await;
    assert_eq!(read(".kici/workflows/ci.yaml", 100).await, Ok(Some(b"ci".to_vec())));
    assert_eq!(read("nothing", 100).await, Ok(None));
    assert!(read(".kici/workflows/ci.yaml", 1).await.is_err());
    w.fault("contents", 403, &[]);
    assert!(read(".kici/workflows/ci.yaml", 100).await.is_err(), "no answer is not \"not there\"");
}

fn permissions(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
    pairs.iter().map(|(name, level)| ((*name).to_owned(), (*level).to_owned())).collect()
}

#[tokio::test]
async fn a_token_for_a_job_is_fresh_each_time_and_ends_when_it_is_revoked() {
    let w = world().await;
    let wanted = permissions(&[("contents", "write")]);
    let first = w.github.mint(REPO, &wanted).await.unwrap();
    let second = w.github.mint(REPO, &wanted).await.unwrap();
    let (one, two) = (first.auth.password.expose_secret(), second.auth.password.expose_secret());
    assert_ne!(one, two);
    assert_eq!((&first.permissions, first.expires_at), (&wanted, w.clock.now().plus(Duration::from_secs(3600))));
    assert!(!format!("{first:?}").contains(one));
    let admits = |token: &str, write| w.fake.state().admits(token, REPO, write, w.clock.now());
    assert!(admits(one, true) && admits(two, true));
    w.github.revoke(&first.auth.password).await.unwrap();
    w.github.revoke(&first.auth.password).await.unwrap();
    assert!(!admits(one, false) && admits(two, false));
    w.clock.advance(Duration::from_secs(3600));
    assert!(!admits(two, false));
}

#[tokio::test]
async fn a_token_holds_what_the_installation_has_and_says_so() {
    let w = world().await;
    let held = permissions(&[("contents", "read"), ("metadata", "read")]);
    w.fake.state().repos.get_mut(REPO).unwrap().permissions = held;
    let wanted = permissions(&[("contents", "write"), ("workflows", "write")]);
    let minted = w.github.mint(REPO, &wanted).await.unwrap();
    assert_eq!(minted.permissions, permissions(&[("contents", "read")]));
    let error = w.github.mint(REPO, &permissions(&[("workflows", "write")])).await.unwrap_err();
    assert!(!error.is_retryable() && error.to_string().contains("none of the permissions"), "{error}");
    assert_eq!(w.github.git_host().map(|host| (host.protocol, host.ignore_case)), Some(("http".into(), true)));
}

#[tokio::test]
async fn a_fixed_installation_reaches_no_repository_of_another_owner_that_has_the_same_name() {
    let w = world().await;
    let name = REPO.split_once('/').unwrap().1;
    let other = format!("other/{name}");
    let repo = FakeRepo { installation: Some(9), ..w.fake.state().repos[REPO].clone() };
    w.fake.state().repos.insert(other.clone(), repo);
    let wanted = permissions(&[("contents", "write")]);
    let (fake, github) = (w.fake, w.github.with_installation(9));
    let error = github.mint(REPO, &wanted).await.unwrap_err();
    assert!(!error.is_retryable() && error.to_string().contains("installation that the credential names"), "{error}");
    assert!(fake.state().minted.is_empty());
    let minted = github.mint(&other, &wanted).await.unwrap();
    let admits = |repo: &str| fake.state().admits(minted.auth.password.expose_secret(), repo, true, w.clock.now());
    assert!(admits(&other) && !admits(REPO));
}
