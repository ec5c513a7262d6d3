use std::sync::atomic::{AtomicUsize, Ordering};

use kici_engine::time::ManualClock;

use super::*;
use crate::repository::Case;
use crate::server::Service as _;

/// A forge that gives what it is asked for, as far as it goes, and writes down all of it.
#[derive(Default)]
struct Forge {
    asked: Mutex<Vec<String>>,
    revoked: Mutex<Vec<String>>,
    /// The most it gives; none is a static credential.
    limit: Option<Permissions>,
    error: Option<MintError>,
    ttl: Option<Duration>,
    masks: Mutex<Vec<String>>,
    served: AtomicUsize,
    hangs: bool,
}

#[async_trait]
impl Upstream for Forge {
    async fn mint(&self, ask: &Ask) -> Result<Minted, MintError> {
        let number = {
            let mut asked = self.asked.lock().unwrap();
            let name = ask.credential.as_ref().map_or(String::new(), |name| format!(" by {name}"));
            asked.push(format!("{} {}{name}", ask.repository, ask.permissions));
            asked.len()
        };
        tokio::task::yield_now().await;
        if let Some(error) = self.error {
            return Err(error);
        }
        let granted = self.limit.clone().map_or(Granted::Unscoped, Granted::Scoped);
        let expires_at = self.ttl.map(|ttl| Ts::from_micros(1_000_000).plus(ttl));
        Ok(Minted { user: "x".into(), secret: format!("token-{number}").into(), granted, expires_at })
    }

    async fn revoke(&self, _: &Ask, secret: &SecretString) {
        if self.hangs {
            std::future::pending::<()>().await;
        }
        self.revoked.lock().unwrap().push(secret.expose_secret().to_owned());
    }
}

impl Watch for Forge {
    fn mask(&self, values: &[&str]) {
        self.masks.lock().unwrap().extend(values.iter().map(|value| (*value).to_owned()));
    }

    fn count(&self, outcome: &'static str) {
        if outcome == "served" {
            self.served.fetch_add(1, Ordering::SeqCst);
        }
    }
}

impl Forge {
    fn giving(limit: &[&str]) -> Self {
        Self {
            limit: Some(Permissions::parse(limit).unwrap()),
            ttl: Some(Duration::from_secs(3600)),
            ..Self::default()
        }
    }

    fn asked(&self) -> Vec<String> {
        self.asked.lock().unwrap().clone()
    }

    fn revoked(&self) -> Vec<String> {
        self.revoked.lock().unwrap().clone()
    }
}

fn of(forge: Forge) -> (Arc<GitCredentials>, Arc<Forge>) {
    let forge = Arc::new(forge);
    let host = |host: &str, case| Host { protocol: "https".into(), host: host.into(), case };
    let scope = Scope {
        hosts: vec![host("git.example", Case::Ignored), host("mirror.example:8443", Case::Significant)],
        own: Repository::parse("https", "git.example", "acme/app", Case::Ignored).ok(),
    };
    let clock = Arc::new(ManualClock::new(Ts::from_micros(1_000_000)));
    (GitCredentials::new(scope, forge.clone(), forge.clone(), clock), forge)
}

fn query(protocol: &str, host: &str, path: &str) -> Query {
    Query { protocol: protocol.into(), host: host.into(), path: path.into() }
}

fn app() -> Query {
    query("https", "git.example", "Acme/App.git")
}

fn want(pairs: &[&str]) -> Want {
    Want { permissions: Permissions::parse(pairs).unwrap(), ..Want::default() }
}

#[tokio::test(start_paused = true)]
async fn git_gets_read_only_credentials_and_they_are_masked_first() {
    let (git, forge) = of(Forge::giving(&["contents=write", "metadata=read"]));
    let found = git.get(&app()).await.unwrap();
    assert_eq!((found.user.as_str(), found.secret.as_str(), found.expires_at), ("x", "token-1", Some(3601)));
    assert_eq!(forge.asked(), ["git.example/acme/app contents=read"]);
    assert_eq!(*forge.masks.lock().unwrap(), ["token-1", "eDp0b2tlbi0x"]);
}

#[tokio::test(start_paused = true)]
async fn addresses_that_are_not_the_jobs_get_nothing_and_nobody_is_asked() {
    let (git, forge) = of(Forge::giving(&["contents=write"]));
    for (protocol, host, path) in [
        ("http", "git.example", "acme/app"),
        ("https", "git.example", ""),
        ("https", "git.example", "/"),
        ("https", "git.example:8443", "acme/app"),
        ("https", "evil.example", "acme/app"),
        ("https", "mirror.example", "acme/app"),
        ("ssh", "git.example", "acme/app"),
        ("https", "git.example", "a/../b"),
    ] {
        assert!(git.get(&query(protocol, host, path)).await.is_err(), "{protocol} {host} {path}");
    }
    assert_eq!(forge.asked().len(), 0);
}

#[tokio::test(start_paused = true)]
async fn one_answer_serves_a_minute_and_all_who_ask_at_once() {
    let (git, forge) = of(Forge::giving(&["contents=read"]));
    let query = app();
    let (a, b, c) = tokio::join!(git.get(&query), git.get(&query), git.get(&query));
    assert!([a, b, c].into_iter().all(|found| found.unwrap().secret == "token-1"));
    tokio::time::advance(Duration::from_secs(59)).await;
    assert_eq!(git.get(&query).await.unwrap().secret, "token-1");
    tokio::time::advance(Duration::from_secs(1)).await;
    assert_eq!(git.get(&query).await.unwrap().secret, "token-2");
    git.erase(&query);
    assert_eq!(git.get(&query).await.unwrap().secret, "token-3");
    assert_eq!((forge.asked().len(), forge.served.load(Ordering::SeqCst)), (3, 6));
}

#[tokio::test(start_paused = true)]
async fn a_token_that_ends_soon_is_not_given_out_twice() {
    let (git, _) = of(Forge { ttl: Some(Duration::from_secs(300)), ..Forge::giving(&["contents=read"]) });
    assert_eq!(git.get(&app()).await.unwrap().secret, "token-1");
    assert_eq!(git.get(&app()).await.unwrap().secret, "token-2");
}

#[tokio::test(start_paused = true)]
async fn a_window_lets_its_repository_write_and_no_other() {
    let (git, forge) = of(Forge::giving(&["contents=write"]));
    let (id, window) = git.open(want(&[])).await.unwrap();
    assert_eq!((window.repository.as_str(), window.note, git.windows()), ("git.example/acme/app", None, 1));
    assert_eq!(git.get(&app()).await.unwrap().secret, "token-1", "the one of the pre-flight");
    git.get(&query("https", "git.example", "acme/lib")).await.unwrap();
    git.close(id).await;
    assert_eq!((git.windows(), forge.revoked()), (0, vec!["token-1".to_owned()]));
    git.get(&app()).await.unwrap();
    assert_eq!(
        forge.asked(),
        [
            "git.example/acme/app contents=write",
            "git.example/acme/lib contents=read",
            "git.example/acme/app contents=read"
        ]
    );
    git.close(id).await;
    assert_eq!(forge.revoked().len(), 1, "closing again changes nothing");
}

#[tokio::test(start_paused = true)]
async fn what_the_forge_does_not_grant_is_listed_and_no_window_opens() {
    let (git, forge) = of(Forge::giving(&["contents=read"]));
    let error = git.open(want(&["contents=write", "workflows=write"])).await.unwrap_err();
    assert_eq!(error.code, Code::Refused);
    assert!(
        error.message.contains("contents=write (granted: read), workflows=write (granted: none)"),
        "{}",
        error.message
    );
    assert_eq!((git.windows(), forge.revoked()), (0, vec!["token-1".to_owned()]));
}

#[tokio::test(start_paused = true)]
async fn a_static_credential_opens_a_window_with_a_note_and_is_never_revoked() {
    let (git, forge) = of(Forge::default());
    let want =
        Want { repo: Some("mirror.example:8443/Team/X".into()), credential: Some("mirror".into()), ..Want::default() };
    let (id, window) = git.open(want).await.unwrap();
    assert_eq!(window.note.as_deref(), Some("static credential, permissions not verifiable"));
    git.get(&query("https", "mirror.example:8443", "Team/X")).await.unwrap();
    git.get(&query("https", "mirror.example:8443", "team/x")).await.unwrap();
    assert_eq!(
        forge.asked(),
        ["mirror.example:8443/Team/X contents=write by mirror", "mirror.example:8443/team/x contents=read"]
    );
    git.close(id).await;
    assert!(forge.revoked().is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_window_that_nobody_closes_ends_by_itself_at_the_forge_too() {
    let (git, forge) = of(Forge::giving(&["contents=write"]));
    let (_, _) = git.open(Want { ttl_s: Some(30), ..want(&[]) }).await.unwrap();
    tokio::time::sleep(Duration::from_secs(31)).await;
    assert_eq!((git.windows(), forge.revoked()), (0, vec!["token-1".to_owned()]));
    for ttl_s in [0, 3601] {
        let error = git.open(Want { ttl_s: Some(ttl_s), ..want(&[]) }).await.unwrap_err();
        assert_eq!(error.code, Code::Usage);
    }
}

#[tokio::test(start_paused = true)]
async fn a_caller_that_goes_away_takes_its_windows_with_it_and_no_other() {
    let (git, forge) = of(Forge::giving(&["contents=write"]));
    let service = GitService(git.clone());
    let (mut one, mut two) = (service.meet(), service.meet());
    let opened = one.call("open", serde_json::json!({})).await.unwrap();
    two.call("open", serde_json::json!({})).await.unwrap();
    two.call("close", serde_json::json!({"window": opened["window"]})).await.unwrap();
    assert_eq!(git.windows(), 2, "a window is closed by who opened it");
    one.end().await;
    assert_eq!((git.windows(), forge.revoked()), (1, vec!["token-1".to_owned()]));
    two.end().await;
    assert_eq!(git.windows(), 0);
}

#[tokio::test(start_paused = true)]
async fn the_end_of_the_job_ends_everything_even_if_the_forge_hangs() {
    let (git, forge) = of(Forge::giving(&["contents=write"]));
    git.open(want(&[])).await.unwrap();
    git.token(want(&["contents=write"])).await.unwrap();
    git.token(want(&[])).await.unwrap();
    git.shut().await;
    let mut revoked = forge.revoked();
    revoked.sort();
    assert_eq!(revoked, ["token-1", "token-2"], "what could write");
    assert!(git.open(want(&[])).await.is_err());

    let (git, _) = of(Forge { hangs: true, ..Forge::giving(&["contents=write"]) });
    git.open(want(&[])).await.unwrap();
    let began = Instant::now();
    git.shut().await;
    assert!(began.elapsed() <= REVOKE_LIMIT);
}

#[tokio::test(start_paused = true)]
async fn refusals_say_where_to_look_and_nothing_of_the_reason() {
    let cases = [(MintError::Refused, Code::Refused), (MintError::Unavailable, Code::Unavailable)];
    for (error, code) in cases {
        let (git, forge) = of(Forge { error: Some(error), ..Forge::default() });
        assert_eq!(git.get(&app()).await.err().map(|refusal| refusal.code), Some(code));
        assert_eq!(git.open(want(&[])).await.unwrap_err().code, code);
        assert!(forge.masks.lock().unwrap().is_empty());
    }
}

#[tokio::test(start_paused = true)]
async fn a_job_cannot_use_up_what_the_forge_allows() {
    let (git, forge) = of(Forge::giving(&["contents=read"]));
    for _ in 0..60 {
        git.token(want(&[])).await.unwrap();
    }
    assert_eq!(git.token(want(&[])).await.err().map(|refusal| refusal.code), Some(Code::Unavailable));
    assert_eq!(forge.asked().len(), 60);
    tokio::time::advance(Duration::from_secs(60)).await;
    git.token(want(&[])).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn many_windows_of_one_caller_close_in_the_time_of_one() {
    let (git, _) = of(Forge { hangs: true, ..Forge::giving(&["contents=write"]) });
    let mut caller = GitService(git.clone()).meet();
    for _ in 0..50 {
        caller.call("open", serde_json::json!({})).await.unwrap();
    }
    let began = Instant::now();
    caller.end().await;
    assert_eq!((git.windows(), began.elapsed() <= REVOKE_LIMIT), (0, true));
}

#[tokio::test(start_paused = true)]
async fn what_comes_after_the_end_of_the_job_is_ended_at_once() {
    let (git, forge) = of(Forge::giving(&["contents=write"]));
    git.shut().await;
    assert_eq!(git.open(want(&[])).await.unwrap_err().message, "the job is over");
    let token = git.token(want(&["contents=write"])).await;
    assert_eq!(token.err().map(|refusal| refusal.message).as_deref(), Some("the job is over"));
    assert_eq!((git.windows(), forge.revoked()), (0, vec!["token-1".to_owned(), "token-2".to_owned()]));
}

#[tokio::test(start_paused = true)]
async fn a_name_without_a_host_is_never_looked_for_at_the_host_of_another_credential() {
    let host = Host { protocol: "https".into(), host: "mirror.example".into(), case: Case::Significant };
    let (scope, forge) = (Scope { hosts: vec![host], own: None }, Arc::new(Forge::giving(&["contents=write"])));
    let clock = Arc::new(ManualClock::new(Ts::from_micros(1_000_000)));
    let git = GitCredentials::new(scope, forge.clone(), forge.clone(), clock);
    for repo in [None, Some("acme/app".to_owned())] {
        let error = git.open(Want { repo, ..want(&[]) }).await.unwrap_err();
        assert_eq!(error.code, Code::Refused);
    }
    git.open(Want { repo: Some("mirror.example/acme/app".into()), ..want(&[]) }).await.unwrap();
    assert_eq!(forge.asked(), ["mirror.example/acme/app contents=write"]);
}
