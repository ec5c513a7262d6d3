//! From a claimed job to the frame that offers it.

use std::time::Duration;

use bytes::Bytes;
use kici_engine::ids::JobId;
use kici_engine::lock::{CredentialMaterial, GitCredentials, Job};
use kici_engine::plan::{self, Scope};
use kici_engine::state::FailureReason;
use kici_engine::time::Ts;
use kici_protocol::MAX_MESSAGE_BYTES;
use kici_protocol::agent::{BasicAuth, CheckoutSource, GitAccess, GitHost, JobOffer};
use kici_protocol::common;
use kici_store::Store;
use kici_store::model::{ClaimedJob, JobRef};
use secrecy::ExposeSecret;

use crate::activate::{needs_of, run_info};
use crate::config::DispatchConfig;
use crate::locks::{LockError, Locks};
use crate::ports::{self, CloneError, CloneRequest, Clones};

/// Room for the frame around the offer.
const FRAME_OVERHEAD: usize = 64;

/// An offer that cannot be made.
#[derive(Debug)]
pub(crate) enum OfferError {
    /// The delivery is undone and tried again, within the job's budget.
    Undo(String),
    /// The job fails.
    Fail(FailureReason, String),
}

/// The reference of a job on the wire; ids are bare there.
pub(crate) fn wire_ref(job: JobRef) -> common::JobRef {
    common::JobRef {
        run_id: job.run_id.uuid().to_string(),
        job_id: job.job_id.uuid().to_string(),
        dispatch_epoch: job.epoch,
    }
}

/// Reads a reference from the wire.
pub(crate) fn read_ref(job: Option<&common::JobRef>) -> Result<JobRef, String> {
    let job = job.ok_or("the frame names no job")?;
    Ok(JobRef {
        run_id: job.run_id.parse().map_err(|error| format!("job.run_id: {error}"))?,
        job_id: job.job_id.parse::<JobId>().map_err(|error| format!("job.job_id: {error}"))?,
        epoch: job.dispatch_epoch,
    })
}

/// What offers are made with.
pub(crate) struct OfferMaker<'a> {
    pub config: &'a DispatchConfig,
    pub store: &'a Store,
    pub locks: &'a Locks,
    pub clones: &'a dyn Clones,
    pub now: Ts,
}

impl OfferMaker<'_> {
    /// The offer of a claimed job.
    pub async fn make(&self, claimed: &ClaimedJob) -> Result<JobOffer, OfferError> {
        let workflow = match self.locks.load(self.store, &claimed.run.lock_digest).await {
            Ok(workflow) => workflow,
            Err(LockError::Store(error)) => return Err(OfferError::Undo(error.to_string())),
            Err(error) => return Err(OfferError::Fail(FailureReason::ExprError, error.to_string())),
        };
        let needs = needs_of(&claimed.needs);
        let matrix = claimed.job.matrix.clone().unwrap_or_default();
        let scope = Scope { workflow: &workflow, event: &claimed.run.event, run: run_info(&claimed.run) };
        let job_index = claimed.job.job_index as usize;
        let fanout = claimed.job.fanout.as_ref();
        let job = plan::JobRef { name: &claimed.job.name, job_index, matrix: &matrix, fanout, needs: &needs };
        let spec = plan::job_spec(scope, job).map_err(|message| OfferError::Fail(FailureReason::ExprError, message))?;
        let lock_job = workflow.jobs.get(job_index).ok_or_else(|| {
            let message = format!("the stored workflow has no job {job_index}; run it again from a new event");
            OfferError::Fail(FailureReason::ExprError, message)
        })?;
        let spec_json =
            serde_json::to_vec(&spec).map_err(|error| OfferError::Fail(FailureReason::ExprError, error.to_string()))?;
        let declared = lock_job.git_credentials.as_ref();
        let (checkout, host) = if lock_job.checkout.enabled {
            let (path, other_ref) =
                plan::checkout_of(scope, job).map_err(|message| OfferError::Fail(FailureReason::ExprError, message))?;
            let (checkout, host) = self.checkout(claimed, lock_job.checkout.depth).await?;
            let asked = &lock_job.checkout;
            let (submodules, lfs, tags) = (asked.submodules, asked.lfs, asked.tags);
            let checkout = CheckoutSource { submodules, lfs, tags, path, other_ref, ..checkout };
            (Some(checkout), host)
        } else if declared.is_some_and(|declared| !declared.enabled) {
            (None, None)
        } else {
            // A job that fetches nothing does not fail for a source that cannot be used now: its git gets no credentials.
            let host = self.clones.git_host(claimed.run.source_id).await.unwrap_or_else(|error| {
                tracing::warn!(job = %claimed.job.id, ?error, "where the source of a job lies cannot be told");
                None
            });
            (None, host)
        };
        let git = git_access(&claimed.run.repo, declared, host);
        let of_checkout = checkout.iter().filter_map(|c| c.basic.as_ref()).map(|basic| basic.secret.clone());
        let mask =
            of_checkout.chain(declared.into_iter().flat_map(secrets_of)).chain(registry_secrets(lock_job)).collect();
        let grace = lock_job.grace_period_ms.map_or(self.config.default_grace, Duration::from_millis);
        let offer = JobOffer {
            job: Some(wire_ref(claimed.job_ref)),
            workflow: claimed.run.workflow_name.clone(),
            job_name: claimed.job.name.clone(),
            display_name: claimed.job.display_name.clone(),
            spec_json: Bytes::from(spec_json),
            checkout,
            mask,
            max_log_bytes: self.config.max_log_bytes,
            request_id: claimed.run.request_id.clone(),
            job_timeout_ms: claimed.job.timeout.map_or(0, millis),
            grace_period_ms: millis(grace.min(self.config.max_grace)),
            issued_at_us: self.now.as_micros(),
            git,
        };
        fits(&offer)?;
        Ok(offer)
    }

    async fn checkout(
        &self,
        claimed: &ClaimedJob,
        depth: u32,
    ) -> Result<(CheckoutSource, Option<ports::GitHost>), OfferError> {
        let request = CloneRequest {
            run_id: claimed.run.id,
            job_id: claimed.job.id,
            source_id: claimed.run.source_id,
            repo: claimed.run.repo.clone(),
            git_ref: claimed.run.git_ref.clone(),
            sha: claimed.run.sha.clone(),
        };
        let source = self.clones.source(&request).await.map_err(refused)?;
        let basic = source.basic.map(|(user, secret)| BasicAuth { user, secret: secret.expose_secret().to_owned() });
        let checkout = CheckoutSource {
            url: source.url,
            git_ref: request.git_ref.unwrap_or_default(),
            sha: request.sha,
            depth,
            basic,
            ..CheckoutSource::default()
        };
        Ok((checkout, source.git_host))
    }
}

/// The secret parts of what a workflow declares: they stand in its file, which a step may print before it asks for one.
fn secrets_of(declared: &GitCredentials) -> impl Iterator<Item = String> {
    declared.named.values().map(|named| match &named.material {
        CredentialMaterial::Basic { token, .. } => token.value().to_owned(),
        CredentialMaterial::GithubApp { private_key, .. } => private_key.value().to_owned(),
    })
}

/// The same of the registries of its containers.
fn registry_secrets(job: &Job) -> impl Iterator<Item = String> {
    let of_container = job.container.iter().filter_map(|container| container.credentials.as_ref());
    let of_services = job.services.values().filter_map(|service| service.credentials.as_ref());
    of_container.chain(of_services).map(|credentials| credentials.token.value().to_owned())
}

/// What git may ask credentials for: the source's host, and those of the credentials that the workflow brings.
fn git_access(repo: &str, declared: Option<&GitCredentials>, source: Option<ports::GitHost>) -> Option<GitAccess> {
    if declared.is_some_and(|declared| !declared.enabled) {
        return None;
    }
    let repo = source.as_ref().map_or_else(String::new, |_| repo.to_owned());
    let mut hosts: Vec<GitHost> = source
        .into_iter()
        .map(|host| GitHost { protocol: host.protocol, host: host.host, ignore_case: host.ignore_case })
        .collect();
    let named = declared.into_iter().flat_map(|declared| declared.named.values());
    for host in named.filter_map(|credential| credential.host.as_ref()) {
        if !hosts.iter().any(|known| known.host == *host) {
            hosts.push(GitHost { protocol: "https".to_owned(), host: host.clone(), ignore_case: false });
        }
    }
    (!hosts.is_empty()).then_some(GitAccess { hosts, repo })
}

fn refused(error: CloneError) -> OfferError {
    match error {
        CloneError::Transient(message) => OfferError::Undo(message),
        CloneError::Permanent { reason, message } => OfferError::Fail(reason, message),
    }
}

/// Milliseconds, saturating.
pub(crate) fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// An offer larger than a frame is never sent: the job fails and names what is large.
fn fits(offer: &JobOffer) -> Result<(), OfferError> {
    let size = prost::Message::encoded_len(offer) + FRAME_OVERHEAD;
    if size <= MAX_MESSAGE_BYTES {
        return Ok(());
    }
    let spec = offer.spec_json.len();
    let message = format!(
        "the offer has {size} bytes and a frame may have {MAX_MESSAGE_BYTES}; the largest part is the job's specification with {spec} bytes: make its steps, environment or the outputs it needs smaller"
    );
    Err(OfferError::Fail(FailureReason::OfferTooLarge, message))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_offer_above_the_frame_limit_fails_the_job_and_one_below_passes() {
        let offer = |spec: usize| JobOffer { spec_json: vec![b'x'; spec].into(), ..Default::default() };
        assert!(fits(&offer(MAX_MESSAGE_BYTES - 100)).is_ok());
        let Err(OfferError::Fail(reason, message)) = fits(&offer(MAX_MESSAGE_BYTES)) else { panic!("too large") };
        assert_eq!(reason, FailureReason::OfferTooLarge);
        assert!(message.contains("specification"), "{message}");
    }

    #[test]
    fn references_are_bare_on_the_wire_and_bad_ones_name_the_field() {
        let uuid = uuid::Uuid::from_u128(9);
        let job = JobRef { run_id: kici_engine::ids::RunId::from_uuid(uuid), job_id: JobId::from_uuid(uuid), epoch: 3 };
        let wire = wire_ref(job);
        assert_eq!(wire.job_id, uuid.to_string());
        assert_eq!(read_ref(Some(&wire)), Ok(job));
        let bad = common::JobRef { job_id: "nope".into(), ..wire };
        assert!(read_ref(Some(&bad)).unwrap_err().starts_with("job.job_id: "));
    }

    #[test]
    fn git_asks_at_the_source_first_and_at_the_hosts_of_declared_credentials() {
        use kici_engine::lock::{CredentialMaterial, Material, NamedCredential};
        let value = |text: &str| Material::Value(text.to_owned());
        let material = CredentialMaterial::Basic { user: value("u"), token: value("t") };
        let named = |host: Option<&str>| NamedCredential {
            host: host.map(str::to_owned),
            repos: Vec::new(),
            material: material.clone(),
        };
        let all = [("a", named(Some("mirror.example"))), ("b", named(None)), ("c", named(Some("forge.example")))];
        let all = all.map(|(name, credential)| (name.to_owned(), credential)).into();
        let declared = GitCredentials { named: all, ..GitCredentials::default() };
        let off = GitCredentials { enabled: false, ..declared.clone() };
        let source = || {
            let (protocol, host) = ("https".to_owned(), "forge.example".to_owned());
            Some(ports::GitHost { protocol, host, ignore_case: true })
        };
        let hosts = |declared: Option<&GitCredentials>, source| {
            let access = git_access("acme/app", declared, source)?;
            let hosts: Vec<String> = access.hosts.into_iter().map(|host| host.host).collect();
            Some((hosts.join(" "), access.repo))
        };
        let of = |hosts: &str, repo: &str| Some((hosts.to_owned(), repo.to_owned()));
        assert_eq!(hosts(None, source()), of("forge.example", "acme/app"));
        assert_eq!(hosts(Some(&declared), source()), of("forge.example mirror.example", "acme/app"));
        assert_eq!(hosts(Some(&declared), None), of("mirror.example forge.example", ""));
        assert_eq!((hosts(Some(&off), source()), hosts(None, None)), (None, None));
    }
}
