//! The agent's half: answers git and the steps of one job, opens and closes write windows, and asks the orchestrator for a
//! credential each time one is needed.

mod memo;
mod scope;
#[cfg(test)]
mod tests;
mod verbs;

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use kici_engine::time::{Clock, Ts};
use secrecy::{ExposeSecret, SecretString};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use zeroize::Zeroizing;

use crate::grants::{DEFAULT_TTL, GrantId, GrantTable, MAX_TTL, Moment};
use crate::permission::Permissions;
use crate::repository::Repository;
use crate::wire::git::{Query, Secret, Want, Window};
use crate::wire::{Code, Refusal};
use memo::{Key, Memo};

pub use scope::{Host, Scope};
pub use verbs::GitService;

/// How long a revocation at the forge may take; after that the token lives until it expires by itself.
const REVOKE_LIMIT: Duration = Duration::from_secs(5);
/// Credentials that one job may ask for in [`RATE_WINDOW`]: a step must not use up what the forge allows all jobs together.
const MAX_PER_MINUTE: usize = 60;
const RATE_WINDOW: Duration = Duration::from_secs(60);
/// Windows of one job at once.
const MAX_WINDOWS: usize = 64;

/// What a credential is wanted for.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Ask {
    /// Which repository.
    pub repository: Repository,
    /// What it must allow.
    pub permissions: Permissions,
    /// A named credential; none is the one that applies by itself.
    pub credential: Option<String>,
}

/// What the forge gave.
#[derive(Clone, Debug)]
pub struct Minted {
    /// User name.
    pub user: String,
    /// Password or token.
    pub secret: SecretString,
    /// What it allows.
    pub granted: Granted,
    /// When it ends.
    pub expires_at: Option<Ts>,
}

/// How far a credential goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Granted {
    /// The forge said so.
    Scoped(Permissions),
    /// Nobody knows: a password, a personal token, a key.
    Unscoped,
}

/// Why there is no credential.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MintError {
    /// The job may not have it.
    Refused,
    /// It may work later.
    Unavailable,
}

/// The orchestrator, as the agent asks it.
#[async_trait]
pub trait Upstream: Send + Sync {
    /// A fresh credential.
    ///
    /// # Errors
    /// [`MintError`]; the reason stays with the orchestrator.
    async fn mint(&self, ask: &Ask) -> Result<Minted, MintError>;

    /// Ends a token at the forge; best effort.
    async fn revoke(&self, ask: &Ask, secret: &SecretString);
}

/// Where secrets are made known before anybody sees them, and how requests went.
pub trait Watch: Send + Sync {
    /// These values must not be shown from now on.
    fn mask(&self, values: &[&str]);
    /// One request ended so: `served`, `refused`, `unavailable`, `invalid`, `opened` or `closed`. Nothing else is told of it.
    fn count(&self, outcome: &'static str);
}

/// A token that is to be ended at the forge.
struct Live {
    ask: Ask,
    secret: SecretString,
    /// The windows that it was made for; none for `git token`, which lasts until the job ends.
    grants: Vec<GrantId>,
}

#[derive(Default)]
struct State {
    grants: GrantTable,
    live: Vec<Live>,
    /// When credentials were asked for, of late.
    asked: VecDeque<Instant>,
    closed: bool,
}

/// The git credentials of one job.
pub struct GitCredentials {
    scope: Scope,
    upstream: Arc<dyn Upstream>,
    watch: Arc<dyn Watch>,
    clock: Arc<dyn Clock>,
    began: Instant,
    memo: Memo,
    state: Mutex<State>,
    stop: CancellationToken,
    tasks: TaskTracker,
}

impl GitCredentials {
    /// Credentials within `scope`.
    pub fn new(scope: Scope, upstream: Arc<dyn Upstream>, watch: Arc<dyn Watch>, clock: Arc<dyn Clock>) -> Arc<Self> {
        Arc::new(Self {
            scope,
            upstream,
            watch,
            clock,
            began: Instant::now(),
            memo: Memo::default(),
            state: Mutex::default(),
            stop: CancellationToken::new(),
            tasks: TaskTracker::new(),
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now(&self) -> Moment {
        let wall = u64::try_from(self.clock.now().as_micros()).unwrap_or(0);
        Moment { monotonic: self.began.elapsed(), wall: Duration::from_micros(wall) }
    }

    /// How many windows are open.
    pub fn windows(&self) -> usize {
        let now = self.now();
        self.state().grants.size(now)
    }

    /// A credential for git: what the open windows of the repository allow, else what is needed to fetch.
    ///
    /// # Errors
    /// A [`Refusal`], which git never sees.
    pub async fn get(&self, query: &Query) -> Result<Secret, Refusal> {
        let Some(repository) = self.scope.repository(&query.protocol, &query.host, &query.path) else {
            return Err(self.turned_down("invalid", Code::Refused, "no credentials are given for this address"));
        };
        let now = self.now();
        let allowed = self.state().grants.lookup(&repository, now);
        let (permissions, credential, grants) = match allowed {
            Some(allowed) => (allowed.permissions, allowed.credential, allowed.grants),
            None => (Permissions::fetch(), None, Vec::new()),
        };
        let ask = Ask { repository, permissions, credential };
        let minted = self.minted(&ask, &grants).await?;
        self.watch.count("served");
        Ok(secret(&minted))
    }

    /// git says that the credential of a repository did not work: the next one is a fresh one.
    pub fn erase(&self, query: &Query) {
        if let Some(repository) = self.scope.repository(&query.protocol, &query.host, &query.path) {
            self.memo.forget(|key| key.ask.repository == repository);
        }
    }

    /// A token for a step's own use.
    ///
    /// # Errors
    /// A [`Refusal`] for the step.
    pub async fn token(&self, want: Want) -> Result<Secret, Refusal> {
        let ask = self.ask(want, Permissions::fetch())?;
        let minted = self.checked(&ask).await?;
        if ask.permissions.writes() && minted.granted != Granted::Unscoped {
            let live = Live { ask, secret: minted.secret.clone(), grants: Vec::new() };
            self.keep(Some(live), |_| Ok(())).await?;
        }
        self.watch.count("served");
        Ok(secret(&minted))
    }

    /// Opens a write window, once the forge was seen to give what is asked for.
    ///
    /// # Errors
    /// A [`Refusal`] that lists what is missing; then no window is open.
    pub async fn open(self: &Arc<Self>, want: Want) -> Result<(GrantId, Window), Refusal> {
        let ttl = want.ttl_s.map_or(DEFAULT_TTL, Duration::from_secs);
        if ttl.is_zero() || ttl > MAX_TTL {
            let message = format!("the ttl must be 1 to {} seconds", MAX_TTL.as_secs());
            return Err(self.turned_down("invalid", Code::Usage, message));
        }
        let ask = self.ask(want, Permissions::push())?;
        let now = self.now();
        room(&mut self.state(), now).map_err(|message| self.turned_down("refused", Code::Refused, message))?;
        let mut id = GrantId([0; 16]);
        if getrandom::fill(&mut id.0).is_err() {
            return Err(self.turned_down("unavailable", Code::Unavailable, "the system gives no randomness"));
        }
        let minted = self.checked(&ask).await?;
        let now = self.now();
        let live = || Live { ask: ask.clone(), secret: minted.secret.clone(), grants: vec![id] };
        let live = (minted.granted != Granted::Unscoped).then(live);
        self.keep(live, |state| {
            room(state, now)?;
            state.grants.add(id, ask.repository.clone(), ask.permissions.clone(), ask.credential.clone(), ttl, now);
            Ok(())
        })
        .await?;
        let note =
            (minted.granted == Granted::Unscoped).then(|| "static credential, permissions not verifiable".to_owned());
        let repository = ask.repository.to_string();
        self.memo.keep(Key { ask, grants: vec![id] }, minted, self.clock.now()).await;
        let (this, stop) = (Arc::clone(self), self.stop.clone());
        self.tasks.spawn(async move {
            tokio::select! {
                () = tokio::time::sleep(ttl) => this.close(id).await,
                () = stop.cancelled() => {}
            }
        });
        self.watch.count("opened");
        Ok((id, Window { window: id.to_string(), repository, note }))
    }

    /// Notes a token that is to be ended later, if it can be, and what `more` notes with it, unless the job is over: a token
    /// that came too late is ended at once.
    async fn keep(
        &self,
        live: Option<Live>,
        more: impl FnOnce(&mut State) -> Result<(), String> + Send,
    ) -> Result<(), Refusal> {
        let message = {
            let mut state = self.state();
            let noted = if state.closed { Err("the job is over".to_owned()) } else { more(&mut state) };
            match noted {
                Ok(()) => {
                    state.live.extend(live);
                    return Ok(());
                }
                Err(message) => message,
            }
        };
        self.end_tokens(live.into_iter().collect()).await;
        Err(self.turned_down("refused", Code::Refused, message))
    }

    /// Closes a window and ends its tokens at the forge. Nothing happens when it is closed already.
    pub async fn close(&self, id: GrantId) {
        self.close_all(&[id]).await;
    }

    /// Closes windows, all at once: however many they are, it takes no longer than one.
    pub async fn close_all(&self, ids: &[GrantId]) {
        let over = {
            let mut state = self.state();
            let mut over = Vec::new();
            for id in ids {
                if state.grants.revoke(*id).is_some() {
                    self.watch.count("closed");
                }
                // A token of several windows lives as long as the last of them.
                for live in &mut state.live {
                    if live.grants.len() > 1 {
                        live.grants.retain(|grant| grant != id);
                    }
                }
                over.extend(state.live.extract_if(.., |live| live.grants == [*id]));
            }
            over
        };
        self.memo.forget(|key| key.grants.iter().any(|grant| ids.contains(grant)));
        self.end_tokens(over).await;
    }

    /// The end of the job: closes all windows and ends all tokens that could change something.
    pub async fn shut(&self) {
        self.stop.cancel();
        let over = {
            let mut state = self.state();
            state.closed = true;
            state.grants.clear();
            std::mem::take(&mut state.live)
        };
        self.memo.forget(|_| true);
        self.end_tokens(over).await;
        self.tasks.close();
        self.tasks.wait().await;
    }

    async fn end_tokens(&self, tokens: Vec<Live>) {
        let ended = tokens.into_iter().map(|live| {
            let upstream = Arc::clone(&self.upstream);
            // Best effort: without it the token lives until it expires.
            async move { drop(tokio::time::timeout(REVOKE_LIMIT, upstream.revoke(&live.ask, &live.secret)).await) }
        });
        let tasks: Vec<_> = ended.map(|end| self.tasks.spawn(end)).collect();
        for task in tasks {
            let _ = task.await;
        }
    }

    fn ask(&self, want: Want, default: Permissions) -> Result<Ask, Refusal> {
        let repository = match &want.repo {
            Some(text) => self.scope.named(text),
            None => self.scope.own.clone(),
        };
        let Some(repository) = repository else {
            let message = match want.repo {
                Some(_) => {
                    "the repository is not OWNER/NAME, HOST/OWNER/NAME or a URL of a host that this job has credentials for"
                }
                None => "this job has no repository of its own that needs credentials; name one with --repo",
            };
            return Err(self.turned_down("invalid", Code::Refused, message));
        };
        let permissions = if want.permissions.is_empty() { default } else { want.permissions };
        Ok(Ask { repository, permissions, credential: want.credential })
    }

    /// A fresh credential that holds what was asked for; what falls short is ended again at once.
    async fn checked(&self, ask: &Ask) -> Result<Minted, Refusal> {
        let minted = self.fresh(ask).await?;
        let Granted::Scoped(granted) = &minted.granted else { return Ok(minted) };
        let missing: Vec<String> = ask.permissions.missing_in(granted).iter().map(ToString::to_string).collect();
        if missing.is_empty() {
            return Ok(minted);
        }
        let short = Live { ask: ask.clone(), secret: minted.secret.clone(), grants: Vec::new() };
        self.end_tokens(vec![short]).await;
        let message = format!(
            "the forge does not grant {} for {}; give the App these permissions, or ask for less",
            missing.join(", "),
            ask.repository
        );
        Err(self.turned_down("refused", Code::Refused, message))
    }

    async fn minted(&self, ask: &Ask, grants: &[GrantId]) -> Result<Minted, Refusal> {
        let key = Key { ask: ask.clone(), grants: grants.to_vec() };
        let slot = self.memo.slot(&key);
        // Held meanwhile: who asks for the same waits for one answer.
        let mut kept = slot.lock().await;
        if let Some(minted) = kept.as_ref().and_then(|kept| kept.good(self.clock.now())) {
            return Ok(minted);
        }
        let minted = self.fresh(ask).await?;
        if !grants.is_empty() && minted.granted != Granted::Unscoped {
            let live = Live { ask: ask.clone(), secret: minted.secret.clone(), grants: grants.to_vec() };
            let now = self.now();
            let late = {
                let mut state = self.state();
                let open = state.grants.lookup(&ask.repository, now);
                if open.is_some_and(|open| open.grants.iter().any(|id| grants.contains(id))) {
                    state.live.push(live);
                    None
                } else {
                    Some(live)
                }
            };
            if let Some(live) = late {
                self.end_tokens(vec![live]).await;
                return Err(self.turned_down("refused", Code::Refused, "the write window was closed meanwhile"));
            }
        }
        *kept = Some(memo::Kept::new(minted.clone()));
        Ok(minted)
    }

    /// Asks the orchestrator, and makes the secret known to the masks before anybody gets it.
    async fn fresh(&self, ask: &Ask) -> Result<Minted, Refusal> {
        if !self.within_rate() {
            let message =
                format!("more than {MAX_PER_MINUTE} credentials were asked for within a minute; wait a little");
            return Err(self.turned_down("unavailable", Code::Unavailable, message));
        }
        match self.upstream.mint(ask).await {
            Ok(minted) => {
                let encoded = basic(&minted.user, minted.secret.expose_secret());
                self.watch.mask(&[minted.secret.expose_secret(), encoded.expose_secret()]);
                Ok(minted)
            }
            Err(MintError::Refused) => {
                let message = format!(
                    "no credential is available for {} with {}; the workflow's `git_credentials` decide what a job may have, and the orchestrator's audit log says why",
                    ask.repository, ask.permissions
                );
                Err(self.turned_down("refused", Code::Refused, message))
            }
            Err(MintError::Unavailable) => {
                let message = "the orchestrator or the forge gives no credential now; try again";
                Err(self.turned_down("unavailable", Code::Unavailable, message))
            }
        }
    }

    /// Counts one more; false when there were too many of late.
    fn within_rate(&self) -> bool {
        let now = Instant::now();
        let mut state = self.state();
        while state.asked.front().is_some_and(|at| now.duration_since(*at) >= RATE_WINDOW) {
            state.asked.pop_front();
        }
        let within = state.asked.len() < MAX_PER_MINUTE;
        if within {
            state.asked.push_back(now);
        }
        within
    }

    fn turned_down(&self, outcome: &'static str, code: Code, message: impl Into<String>) -> Refusal {
        self.watch.count(outcome);
        Refusal::new(code, message)
    }
}

/// Whether one more window may be open.
fn room(state: &mut State, now: Moment) -> Result<(), String> {
    match state.grants.size(now) {
        MAX_WINDOWS.. => Err(format!("{MAX_WINDOWS} write windows are open already; close some")),
        _ => Ok(()),
    }
}

/// `user:secret` as HTTP carries it (RFC 7617).
fn basic(user: &str, secret: &str) -> SecretString {
    STANDARD.encode(Zeroizing::new(format!("{user}:{secret}"))).into()
}

fn secret(minted: &Minted) -> Secret {
    let expires_at = minted.expires_at.and_then(|at| u64::try_from(at.as_micros() / 1_000_000).ok());
    Secret { user: minted.user.clone(), secret: minted.secret.expose_secret().to_owned(), expires_at }
}
