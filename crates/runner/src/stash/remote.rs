//! The orchestrator as a depot: it is asked over the agent's connection, the bytes travel by addresses that it signs.

use std::sync::OnceLock;
use std::time::Duration;

use async_trait::async_trait;
use futures::{StreamExt as _, TryStreamExt as _};
use kici_protocol::SESSION_ID_HEADER;
use kici_protocol::agent::{
    ArtifactBeginRequest, ArtifactCommitRequest, ArtifactDownloadRequest, CacheBeginSaveRequest,
    CacheCommitSaveRequest, CacheRestoreRequest, StoredArchive, UploadTarget,
};
use secrecy::SecretString;
use tokio::sync::watch;
use tonic::{Code, Request, Status};

use super::depot::{Archive, Depot, DepotError, Pieces, Place, Target};
use crate::key::JobKey;
use crate::session::{Session, authorize};

/// How long a call may take with all its tries: sessions come and go.
const DEADLINE: Duration = Duration::from_secs(30);
/// One try.
const ANSWER_LIMIT: Duration = Duration::from_secs(15);
/// Before the same session is asked again.
const PAUSE: Duration = Duration::from_millis(500);
/// A new session may know its jobs a little later.
const MAX_REFUSALS: u32 = 6;
/// A peer that sends or takes nothing for this long is gone.
const IDLE: Duration = Duration::from_secs(60);

/// See the module.
pub struct Remote {
    job: JobKey,
    base: String,
    token: Option<SecretString>,
    sessions: watch::Receiver<Option<Session>>,
    http: OnceLock<Result<reqwest::Client, String>>,
}

impl Remote {
    /// For one job; `base` is the address of the orchestrator.
    pub fn new(
        job: JobKey,
        base: &str,
        token: Option<SecretString>,
        sessions: watch::Receiver<Option<Session>>,
    ) -> Self {
        Self { job, base: base.trim_end_matches('/').to_owned(), token, sessions, http: OnceLock::new() }
    }

    /// Made when it is needed: most jobs keep nothing, and reading the certificates of the host takes its time.
    fn http(&self) -> Result<&reqwest::Client, DepotError> {
        let made = self.http.get_or_init(|| {
            reqwest::Client::builder()
                .user_agent(concat!("kici-agent/", env!("CARGO_PKG_VERSION")))
                .connect_timeout(Duration::from_secs(10))
                .read_timeout(IDLE)
                // A signed address leads to what it names and nowhere else; it goes to nobody in between.
                .redirect(reqwest::redirect::Policy::none())
                .no_proxy()
                .build()
                .map_err(|error| error.to_string())
        });
        made.as_ref().map_err(|error| DepotError::Refused(format!("no HTTP client: {error}")))
    }

    fn address(&self, place: &Place) -> String {
        if place.0.starts_with('/') { format!("{}{}", self.base, place.0) } else { place.0.clone() }
    }

    /// Asks until there is an answer, within [`DEADLINE`].
    async fn ask<B, A, F>(&self, body: B, call: impl Fn(Session, Request<B>) -> F) -> Result<A, DepotError>
    where
        B: Clone,
        F: Future<Output = Result<tonic::Response<A>, Status>>,
    {
        let mut sessions = self.sessions.clone();
        let mut refusals = 0;
        let tries = async {
            loop {
                let session = match sessions.wait_for(Option::is_some).await {
                    Ok(session) => session.clone(),
                    Err(_) => return Err(DepotError::Unavailable("the agent ends".to_owned())),
                };
                let Some(session) = session else { continue };
                let mut request = Request::new(body.clone());
                authorize(&mut request, self.token.as_ref());
                if let Ok(id) = session.id.parse() {
                    request.metadata_mut().insert(SESSION_ID_HEADER, id);
                }
                let id = session.id.clone();
                match tokio::time::timeout(ANSWER_LIMIT, call(session, request)).await {
                    Ok(Ok(answer)) => return Ok(answer.into_inner()),
                    Ok(Err(status)) => match status.code() {
                        Code::Unimplemented => {
                            let text = "this orchestrator keeps no caches and artifacts; update it";
                            return Err(DepotError::Refused(text.to_owned()));
                        }
                        Code::PermissionDenied if refusals < MAX_REFUSALS => refusals += 1,
                        Code::Unavailable | Code::Unknown | Code::Cancelled | Code::Unauthenticated => {}
                        Code::DataLoss => return Err(DepotError::Unavailable(status.message().to_owned())),
                        _ => return Err(DepotError::Refused(status.message().to_owned())),
                    },
                    Err(_) => {}
                }
                let changed = sessions.wait_for(|now| now.as_ref().is_none_or(|now| now.id != id));
                let _ = tokio::time::timeout(PAUSE, changed).await;
            }
        };
        let late = |_| DepotError::Unavailable("the orchestrator did not answer in time".to_owned());
        tokio::time::timeout(DEADLINE, tries).await.map_err(late)?
    }
}

fn target(upload: UploadTarget) -> Target {
    Target { id: upload.upload_id, place: Place(upload.url), max_bytes: upload.max_bytes }
}

fn archive(stored: Option<StoredArchive>) -> Result<Archive, DepotError> {
    let stored = stored.ok_or_else(|| DepotError::Refused("the orchestrator names no archive".to_owned()))?;
    Ok(Archive { place: Place(stored.url), size: stored.size, sha256: stored.sha256 })
}

/// In words, without the address.
fn failed(error: reqwest::Error) -> DepotError {
    DepotError::Unavailable(crate::session::chain(&error.without_url()))
}

/// What an answer that is no success means.
fn judged(status: reqwest::StatusCode) -> DepotError {
    let text = match status.as_u16() {
        413 => "the archive is larger than the orchestrator allows",
        409 => "the upload was completed by an earlier attempt",
        _ => "",
    };
    if text.is_empty() {
        return DepotError::Unavailable(format!("the object store answered {status}"));
    }
    DepotError::Refused(text.to_owned())
}

#[async_trait]
impl Depot for Remote {
    async fn find_cache(&self, key: &str, restore_keys: &[String]) -> Result<Option<(String, Archive)>, DepotError> {
        let job = Some(self.job.to_ref());
        let body = CacheRestoreRequest { job, key: key.to_owned(), restore_keys: restore_keys.to_vec() };
        let answer = self.ask(body, |mut s, request| async move { s.client.cache_restore(request).await }).await?;
        answer.hit.map(|hit| Ok((hit.matched_key, archive(hit.archive)?))).transpose()
    }

    async fn begin_cache(&self, key: &str) -> Result<Option<Target>, DepotError> {
        let body = CacheBeginSaveRequest { job: Some(self.job.to_ref()), key: key.to_owned() };
        let answer = self.ask(body, |mut s, request| async move { s.client.cache_begin_save(request).await }).await?;
        Ok(answer.upload.map(target))
    }

    async fn commit_cache(&self, target: &Target, key: &str, sha256: &str) -> Result<bool, DepotError> {
        let (upload_id, key, sha256) = (target.id.clone(), key.to_owned(), sha256.to_owned());
        let body = CacheCommitSaveRequest { job: Some(self.job.to_ref()), upload_id, key, sha256 };
        let answer = self.ask(body, |mut s, request| async move { s.client.cache_commit_save(request).await }).await?;
        Ok(!answer.already_exists)
    }

    async fn begin_artifact(&self, name: &str, expire_in_ms: Option<u64>) -> Result<Target, DepotError> {
        let job = Some(self.job.to_ref());
        let body = ArtifactBeginRequest { job, name: name.to_owned(), expire_in_ms: expire_in_ms.unwrap_or(0) };
        let answer = self.ask(body, |mut s, request| async move { s.client.artifact_begin(request).await }).await?;
        answer.upload.map(target).ok_or_else(|| DepotError::Refused("the orchestrator names no place".to_owned()))
    }

    async fn commit_artifact(&self, target: &Target, name: &str, sha256: &str) -> Result<(), DepotError> {
        let (upload_id, name, sha256) = (target.id.clone(), name.to_owned(), sha256.to_owned());
        let body = ArtifactCommitRequest { job: Some(self.job.to_ref()), upload_id, name, sha256 };
        self.ask(body, |mut s, request| async move { s.client.artifact_commit(request).await }).await.map(drop)
    }

    async fn find_artifact(&self, name: &str, from: Option<&str>) -> Result<Option<Archive>, DepotError> {
        let from = from.unwrap_or_default().to_owned();
        let body = ArtifactDownloadRequest { job: Some(self.job.to_ref()), name: name.to_owned(), from };
        // Only this call has an answer for what is not there.
        let asked = self
            .ask(body, |mut s, request| async move {
                match s.client.artifact_download(request).await {
                    Ok(answer) => Ok(tonic::Response::new(Some(answer.into_inner()))),
                    Err(status) if status.code() == Code::NotFound => Ok(tonic::Response::new(None)),
                    Err(status) => Err(status),
                }
            })
            .await?;
        asked.map(|answer| archive(answer.archive)).transpose()
    }

    async fn fetch(&self, wanted: &Archive) -> Result<Pieces, DepotError> {
        let answer = self.http()?.get(self.address(&wanted.place)).send().await.map_err(failed)?;
        if !answer.status().is_success() {
            return Err(judged(answer.status()));
        }
        let pieces = answer.bytes_stream().map_err(|error| std::io::Error::other(error.without_url()));
        Ok(pieces.boxed())
    }

    async fn send(&self, target: &Target, pieces: Pieces) -> Result<(), DepotError> {
        let body = reqwest::Body::wrap_stream(pieces);
        let answer = self.http()?.put(self.address(&target.place)).body(body).send().await.map_err(failed)?;
        if answer.status().is_success() { Ok(()) } else { Err(judged(answer.status())) }
    }
}
