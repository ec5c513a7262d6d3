//! Authentication and registration of agents.

use std::collections::HashMap;
use std::sync::Arc;

use kici_engine::hosts::is_reserved_property;
use kici_engine::ids::{JobId, SessionId, TokenId};
use kici_engine::scaling::is_scaler_agent;
use kici_engine::state::QueueStatus;
use kici_protocol::agent::orchestrator_frame::Frame;
use kici_protocol::agent::{JobCancel, JobVerdict, Register, RegisterAck, Verdict};
use kici_protocol::close::CloseReason;
use kici_protocol::{CAPABILITIES, agent};
use kici_store::model::{AgentType, JobRef, Resumed, RosterEntry, TokenKind};
use sha2::{Digest, Sha256};
use tokio::time::{Instant, timeout};
use tonic::metadata::MetadataMap;
use tonic::{Code, Status};

use crate::config::AgentAuth;
use crate::decide::gates::{Admitted, Holder, Refused, TokenFacts, admit, no_collision};
use crate::decide::reconcile::{Held, reconcile};
use crate::dispatcher::{Dispatcher, KnownHosts};
use crate::link::Link;
use crate::meters;
use crate::offer::{millis, read_ref, wire_ref};
use crate::ports::{Change, Spawned};
use crate::registry::{Identity, Tracked};
use crate::timers::{OUTBOX_GRACE, Timer};

/// Authentication must be over within this time.
const AUTH_LIMIT: std::time::Duration = std::time::Duration::from_secs(5);
/// How long the host names of the roster are used without reading it again.
const HOSTS_FRESH: std::time::Duration = std::time::Duration::from_secs(30);
/// Longest property bag entry, key or value.
const MAX_PROPERTY: usize = 1024;
/// Most properties of one agent.
const MAX_PROPERTIES: usize = 100;

fn refused(reason: CloseReason, message: &str) -> Status {
    reason.status(message)
}

/// Verdicts on the jobs an agent came back with, and what must happen once it knows them.
#[derive(Default)]
struct Reconciled {
    verdicts: Vec<JobVerdict>,
    held: Vec<Tracked>,
    forgotten: Vec<(JobRef, bool)>,
}

impl Dispatcher {
    /// Checks the token of a session. None: authentication is off.
    ///
    /// A database that does not answer is `UNAVAILABLE`: `UNAUTHENTICATED` would stop agents for good.
    pub(crate) async fn authenticate(&self, metadata: &MetadataMap) -> Result<Option<TokenFacts>, Status> {
        if self.config.auth == AgentAuth::None {
            return Ok(None);
        }
        let Some(hash) = bearer_hash(metadata) else {
            let message = "no agent token; set KICI_AGENT_TOKEN to one that `kici-admin agent-token create` printed";
            return Err(refused(CloseReason::AuthFailed, message));
        };
        let found = match timeout(AUTH_LIMIT, self.store.agent_token_by_hash(hash.clone())).await {
            Ok(Ok(found)) => found,
            Ok(Err(error)) => {
                tracing::warn!(%error, "an agent token could not be looked up");
                return Err(Status::new(Code::Unavailable, "the token cannot be checked now; try again"));
            }
            Err(_) => return Err(refused(CloseReason::AuthTimeout, "the token could not be checked in time")),
        };
        let Some(found) = found else { return Err(refused(CloseReason::AuthFailed, "the agent token is not known")) };
        let now = self.clock.now();
        let fault = if found.revoked_at.is_some() {
            Some((CloseReason::AuthRevoked, "the agent token was revoked"))
        } else if found.consumed_at.is_some() {
            Some((CloseReason::AuthFailed, "the agent token was used already"))
        } else if found.expires_at.is_some_and(|at| at <= now) {
            Some((CloseReason::AuthFailed, "the agent token has expired"))
        } else {
            None
        };
        if let Some((reason, message)) = fault {
            return Err(refused(reason, message));
        }
        let facts = TokenFacts::read(&found, hash).map_err(|label| {
            tracing::error!(token = %found.id, label, "a stored label of an agent token is not one; the token is refused");
            refused(CloseReason::AuthFailed, "the agent token is damaged; create another one")
        })?;
        Ok(Some(facts))
    }

    /// Gates that need no other agent, then those that do.
    pub(crate) async fn gates(&self, register: &Register, token: Option<&TokenFacts>) -> Result<Admitted, Refused> {
        let mut admitted = admit(register, token)?;
        let token_id = token.map(|token| token.id);
        let unavailable = |error: kici_store::StoreError| {
            tracing::warn!(%error, "a registration could not be checked");
            Refused {
                reason: CloseReason::Internal,
                message: "the registration cannot be checked now; try again".into(),
            }
        };
        let known = self.known_hosts().await.map_err(unavailable)?;
        if let Some(hostname) = known.declared.get(&admitted.agent_id) {
            admitted.rename_host(hostname);
        }
        let same_name = match self.registry.agent(&admitted.agent_id) {
            Some(live) => Some(Holder { agent_id: live.agent_id, token_id: live.token_id }),
            None => {
                let row = self.store.roster_get(admitted.agent_id.clone()).await.map_err(unavailable)?;
                let elsewhere = row.filter(|host| {
                    host.connected_instance_id.as_ref().is_some_and(|instance| *instance != self.config.instance)
                });
                elsewhere.map(|host| Holder { agent_id: host.agent_id, token_id: host.token_id })
            }
        };
        let same_host = self.host_owner(&admitted, token_id, &known);
        no_collision(&admitted, token_id, same_name.as_ref(), same_host.as_ref())?;
        Ok(admitted)
    }

    /// A static host with the same host name and another token, connected or not. A host name that is declared for this
    /// agent is its own.
    fn host_owner(&self, admitted: &Admitted, token: Option<TokenId>, known: &KnownHosts) -> Option<Holder> {
        let hostname = admitted.hostname.as_deref()?;
        if let Some(live) = self.registry.host_holder(hostname, &admitted.agent_id, token) {
            return Some(live);
        }
        let holders = known.by_name.get(&hostname.to_ascii_lowercase())?;
        let other = |holder: &&Holder| holder.agent_id != admitted.agent_id && holder.token_id != token;
        holders.iter().find(other).cloned()
    }

    /// The names of the roster's static hosts, read once for a crowd of agents that come back together.
    async fn known_hosts(&self) -> Result<Arc<KnownHosts>, kici_store::StoreError> {
        let mut known = self.known_hosts.lock().await;
        if let Some(fresh) = known.as_ref().filter(|known| known.read_at.elapsed() <= HOSTS_FRESH) {
            return Ok(fresh.clone());
        }
        let mut hosts = KnownHosts { read_at: Instant::now(), by_name: HashMap::new(), declared: HashMap::new() };
        for host in self.store.roster_list().await?.into_iter().filter(|host| host.lifecycle == AgentType::Static) {
            if let Some(name) = &host.declared_hostname {
                hosts.declared.insert(host.agent_id.clone(), name.clone());
            }
            let Some(name) = host.hostname else { continue };
            let holder = Holder { agent_id: host.agent_id, token_id: host.token_id };
            hosts.by_name.entry(name.to_ascii_lowercase()).or_default().push(holder);
        }
        Ok(known.insert(Arc::new(hosts)).clone())
    }

    /// The first `Register` of a session: gates, one-time token, registry, roster, jobs under way, answer. No offer
    /// precedes the answer.
    pub(crate) async fn register(
        self: &Arc<Self>,
        link: &Link,
        register: &Register,
        token: Option<&TokenFacts>,
    ) -> Result<(), Refused> {
        let mut admitted = self.gates(register, token).await?;
        let spawned = self.spawned(&admitted, token).await?;
        self.use_up(token).await?;
        if let Some(spawned) = &spawned {
            admitted.facts.mandatory.extend(spawned.mandatory.iter().cloned());
        }
        let mut identity = self.identity(link.session_id(), register, token, &admitted);
        identity.scaler_managed |= spawned.is_some();
        let bound = self.bound_job(spawned.as_ref()).await?;
        let reboot = self.reboot_at_register(&identity, &register.boot_id).await.map_err(|error| {
            tracing::warn!(agent = %identity.agent_id, %error, "whether a host restarted could not be read");
            Refused { reason: CloseReason::Internal, message: "the host cannot be read now; try again".into() }
        })?;
        // Its last session may be ending: that must be over, or not have begun, before its jobs are looked at.
        let door = self.comings.door(&identity.agent_id).await;
        let reconciled = self.reconcile(register, &identity).await.map_err(|error| {
            tracing::warn!(agent = %identity.agent_id, %error, "the jobs of an agent could not be reconciled");
            Refused {
                reason: CloseReason::Internal,
                message: "the jobs under way cannot be read now; try again".into(),
            }
        })?;
        let mut ack = self.register_ack(&identity, reconciled.verdicts.clone());
        ack.pending_dispatch = bound.is_some();
        ack.warm_pool = spawned.is_some_and(|spawned| spawned.warm);
        let cancelling: Vec<Tracked> = reconciled.held.iter().filter(|job| job.cancelling).cloned().collect();
        let answer = Frame::RegisterAck(ack);
        // The slot of the job that it was started for is set aside in the same step: no other job gets it.
        let reserved = u32::from(bound.is_some());
        let (held, draining) = (reconciled.held, register.draining);
        let replaced = self.registry.insert(identity.clone(), link.clone(), held, draining, reboot, reserved, answer);
        drop(door);
        let mut forgotten = reconciled.forgotten;
        if let Some(replaced) = replaced {
            let known: Vec<JobRef> = forgotten.iter().map(|(job, _)| *job).collect();
            let left = replaced.left.iter().filter(|job| !known.contains(&job.job));
            forgotten.extend(left.map(|job| (job.job, job.started)));
            replaced.link.close(CloseReason::Superseded, "a newer session of this agent took over");
            tracing::info!(agent = %identity.agent_id, "a session was replaced");
        }
        for job in cancelling {
            let cancel = JobCancel {
                job: Some(wire_ref(job.job)),
                reason: "the run was cancelled".into(),
                ..Default::default()
            };
            let _ = link.send(Frame::JobCancel(cancel)).await;
        }
        for (job, started) in forgotten {
            self.forgotten(job, &identity, started, false).await;
        }
        // Without the id of the session, which calls next to it are made with.
        tracing::info!(agent = %identity.agent_id, version = identity.version, "an agent registered");
        meters::agents_active(self.registry.counts().0);
        self.changes.publish(Change::Agent { agent_id: identity.agent_id.to_string(), connected: true });
        self.write_roster(&identity, register, token);
        if let Some(job) = bound {
            let (this, session) = (self.clone(), identity.session_id);
            self.tasks.spawn(async move { this.give_bound(session, &identity.agent_id, job).await });
        }
        self.wake();
        self.routing.notify_one();
        Ok(())
    }

    /// What the scaler knows of an agent that says it is one of its; none where there is no scaler, or it is another agent.
    async fn spawned(&self, admitted: &Admitted, token: Option<&TokenFacts>) -> Result<Option<Spawned>, Refused> {
        let Some(scaler) = &self.scaler else { return Ok(None) };
        let agent = &admitted.agent_id;
        if !token.map_or_else(|| is_scaler_agent(agent), |token| token.kind == TokenKind::Scaler) {
            return Ok(None);
        }
        match scaler.registering(agent).await {
            // Never let in as any other agent: it would have no gate.
            Ok(None) => Err(Refused::unauthorized(format!(
                "no scaler has started an agent {agent}, or it is not wanted any more"
            ))),
            Ok(spawned) => Ok(spawned),
            Err(error) => {
                tracing::warn!(%agent, %error, "the scaler's record of an agent could not be read");
                Err(Refused { reason: CloseReason::Internal, message: "scaler state unavailable; try again".into() })
            }
        }
    }

    /// The job that an agent was started for, if it still waits.
    async fn bound_job(&self, spawned: Option<&Spawned>) -> Result<Option<JobId>, Refused> {
        let Some(job) = spawned.and_then(|spawned| spawned.bound_job) else { return Ok(None) };
        match self.store.queue_get(job).await {
            Ok(row) => Ok(row.filter(|row| row.status == QueueStatus::Pending).map(|row| row.job_id)),
            Err(error) => {
                tracing::warn!(%job, %error, "the job of an agent could not be read");
                Err(Refused { reason: CloseReason::Internal, message: "the job cannot be read now; try again".into() })
            }
        }
    }

    /// Another `Register` of the same session: the same gates; taints and life cycle stay as they were.
    pub(crate) async fn register_again(
        self: &Arc<Self>,
        link: &Link,
        register: &Register,
        token: Option<&TokenFacts>,
    ) -> Result<(), Refused> {
        let admitted = self.gates(register, token).await?;
        let session = link.session_id();
        let Some(current) = self.registry.identity(session) else { return Ok(()) };
        if admitted.agent_id != current.agent_id {
            return Err(Refused::unauthorized("an agent cannot change its id within a session"));
        }
        let mut identity = self.identity(session, register, token, &admitted);
        // A gate that the scaler gave is in no token.
        let mut facts = (*identity.facts).clone();
        facts.mandatory.extend(current.facts.mandatory.iter().cloned());
        identity.facts = Arc::new(facts);
        identity.scaler_managed = current.scaler_managed;
        identity.lifecycle = current.lifecycle;
        identity.registered_at = current.registered_at;
        let listed = register.in_flight_jobs.iter().filter_map(|job| Some((job, read_ref(job.job.as_ref()).ok()?)));
        let verdicts = listed
            .map(|(job, job_ref)| {
                let started = self.registry.with_job(session, job_ref, |tracked| tracked.started);
                let verdict = if started.is_some() { Verdict::Resume } else { Verdict::Abandon };
                JobVerdict { job: job.job.clone(), verdict: verdict.into(), started: started.unwrap_or_default() }
            })
            .collect();
        let ack = self.register_ack(&identity, verdicts);
        if self.registry.update(session, identity.clone(), register.draining) {
            let _ = link.send(Frame::RegisterAck(ack)).await;
            self.write_roster(&identity, register, token);
            self.wake();
        }
        Ok(())
    }

    /// A bootstrap token is used up before the agent is in: of two that race, one gets in.
    async fn use_up(&self, token: Option<&TokenFacts>) -> Result<(), Refused> {
        let Some(token) = token.filter(|token| token.kind == TokenKind::Bootstrap) else { return Ok(()) };
        match self.store.agent_token_consume(token.id).await {
            Ok(true) => Ok(()),
            Ok(false) => {
                Err(Refused { reason: CloseReason::AuthFailed, message: "the agent token was used already".into() })
            }
            Err(error) => {
                tracing::warn!(%error, "a bootstrap token could not be used up");
                Err(Refused {
                    reason: CloseReason::Internal,
                    message: "the token cannot be used now; try again".into(),
                })
            }
        }
    }

    fn identity(
        &self,
        session_id: SessionId,
        register: &Register,
        token: Option<&TokenFacts>,
        admitted: &Admitted,
    ) -> Identity {
        Identity {
            agent_id: admitted.agent_id.clone(),
            session_id,
            facts: Arc::new(admitted.facts.clone()),
            token_id: token.map(|token| token.id),
            token_hash: token.map(|token| token.hash.clone()),
            lifecycle: token.map_or(AgentType::Static, |token| token.lifecycle),
            scaler_managed: token.is_some_and(|token| token.kind == TokenKind::Scaler),
            max_concurrency: admitted.max_concurrency,
            platform: register.platform.clone(),
            arch: register.arch.clone(),
            version: register.version.clone(),
            hostname: admitted.hostname.clone(),
            capabilities: register.capabilities.clone(),
            registered_at: self.clock.now(),
        }
    }

    fn register_ack(&self, identity: &Identity, job_verdicts: Vec<JobVerdict>) -> RegisterAck {
        RegisterAck {
            agent_id: identity.agent_id.to_string(),
            session_id: identity.session_id.uuid().to_string(),
            cluster_id: self.config.cluster_id.clone(),
            labels: identity.facts.labels.iter().map(ToString::to_string).collect(),
            scaler_managed: identity.scaler_managed,
            pending_dispatch: false,
            warm_pool: false,
            recovery_window_ms: millis(self.window_of(identity)),
            heartbeat_interval_ms: millis(self.config.heartbeat_interval),
            job_heartbeat_interval_ms: millis(self.config.job_heartbeat_interval),
            job_verdicts,
            min_agent_version: self.config.min_agent_version.clone(),
            capabilities: CAPABILITIES.iter().map(|name| (*name).to_owned()).collect(),
        }
    }

    /// Both sides' lists of jobs made one. The row is the arbiter: an agent may come back to any orchestrator.
    async fn reconcile(&self, register: &Register, agent: &Identity) -> Result<Reconciled, kici_store::StoreError> {
        let rows = self.store.queue_owned_by(agent.agent_id.clone()).await?;
        let held = |job: JobRef| Held { job: (job.run_id, job.job_id), epoch: job.epoch };
        let job_ref = |held: &Held<_>| {
            let (run_id, job_id) = held.job;
            JobRef { run_id, job_id, epoch: held.epoch }
        };
        let read = |jobs: Vec<Option<&kici_protocol::common::JobRef>>| -> Vec<_> {
            jobs.into_iter().filter_map(|job| read_ref(job).ok()).map(held).collect()
        };
        let listed = read(register.in_flight_jobs.iter().map(|job| job.job.as_ref()).collect());
        let outbox = read(register.outbox_pending.iter().map(Some).collect());
        let owned: Vec<_> = rows.iter().map(|row| held(row.job_ref())).collect();
        let decided = reconcile(&listed, &outbox, &owned);
        let mut out = Reconciled::default();
        for job in decided.abandon.iter().map(job_ref) {
            // A job that is over and whose result waits in the outbox is not running: nothing to abandon.
            if !outbox.contains(&held(job)) {
                out.verdicts.push(verdict(job, Verdict::Abandon, false));
            }
        }
        for (list, awaiting_outbox) in [(&decided.try_resume, false), (&decided.awaiting_outbox, true)] {
            for job in list.iter().map(job_ref) {
                self.resume(job, agent, awaiting_outbox, &mut out).await?;
            }
        }
        for job in decided.forgotten.iter().map(job_ref) {
            // Recovering rows come back first: only then can they be handed to somebody else as not started.
            let resumed = self.store.queue_resume(job, agent.agent_id.clone()).await?;
            if let Resumed::Resumed { started, .. } = resumed {
                self.deadlines.cancel(&Timer::Recovery(job));
                out.forgotten.push((job, started));
            }
        }
        Ok(out)
    }

    async fn resume(
        &self,
        job: JobRef,
        agent: &Identity,
        awaiting_outbox: bool,
        out: &mut Reconciled,
    ) -> Result<(), kici_store::StoreError> {
        match self.store.queue_resume(job, agent.agent_id.clone()).await? {
            Resumed::Resumed { started, cancelling } => {
                meters::recovered("resumed");
                self.deadlines.cancel(&Timer::Recovery(job));
                let mut tracked = Tracked::new(job, self.clock.now());
                tracked.acked = true;
                tracked.started = started;
                tracked.cancelling = cancelling;
                tracked.awaiting_outbox = awaiting_outbox;
                tracked.grace = self.config.default_grace;
                if awaiting_outbox {
                    self.deadlines.set(Timer::Outbox(job), Instant::now() + OUTBOX_GRACE);
                } else {
                    out.verdicts.push(verdict(job, Verdict::Resume, started));
                }
                out.held.push(tracked);
            }
            Resumed::Abandon if awaiting_outbox => {}
            Resumed::Abandon => out.verdicts.push(verdict(job, Verdict::Abandon, false)),
        }
        Ok(())
    }

    /// Apart from the answer to the agent: the roster only informs operators and other instances.
    fn write_roster(self: &Arc<Self>, identity: &Identity, register: &Register, token: Option<&TokenFacts>) {
        let entry = RosterEntry {
            agent_id: identity.agent_id.clone(),
            token_id: identity.token_id,
            lifecycle: identity.lifecycle,
            scaler_managed: identity.scaler_managed,
            labels: identity.facts.labels.iter().map(ToString::to_string).collect(),
            hostname: identity.hostname.clone(),
            platform: Some(identity.platform.clone()),
            arch: Some(identity.arch.clone()),
            version: Some(identity.version.clone()),
            machine_id: identity.facts.machine_id.clone(),
            boot_id: Some(register.boot_id.clone()).filter(|id| !id.is_empty()),
            keeps_running: register.keep_running_when_fenced,
            properties: properties(register),
        };
        let seen = token.map(|token| (token.id, self.clock.now()));
        let this = self.clone();
        self.tasks.spawn(async move {
            let agent = entry.agent_id.clone();
            let touched = async {
                this.store.roster_upsert(entry).await?;
                if let Some(seen) = seen {
                    this.store.agent_token_touch(vec![seen]).await?;
                }
                Ok::<_, kici_store::StoreError>(())
            };
            if let Err(error) = touched.await {
                tracing::warn!(%agent, %error, "an agent could not be written to the roster");
            }
        });
    }
}

fn verdict(job: JobRef, verdict: Verdict, started: bool) -> JobVerdict {
    JobVerdict { job: Some(wire_ref(job)), verdict: verdict.into(), started }
}

/// Properties that an agent may set: none of the reserved `kici:` ones, in any case, and none too long.
fn properties(register: &agent::Register) -> std::collections::BTreeMap<String, serde_json::Value> {
    let legal = register
        .properties
        .iter()
        .filter(|(key, value)| !is_reserved_property(key) && key.len() <= MAX_PROPERTY && value.len() <= MAX_PROPERTY);
    legal.take(MAX_PROPERTIES).map(|(key, value)| (key.clone(), typed(value))).collect()
}

/// `true` and `false` are booleans, numbers are numbers, the rest is text.
fn typed(value: &str) -> serde_json::Value {
    match serde_json::from_str(value) {
        Ok(value @ (serde_json::Value::Bool(_) | serde_json::Value::Number(_))) => value,
        _ => serde_json::Value::String(value.to_owned()),
    }
}

/// SHA-256 of the token that a call brings, in hex; none when it brings none.
pub(crate) fn bearer_hash(metadata: &MetadataMap) -> Option<String> {
    let value = metadata.get("authorization")?.to_str().ok()?;
    let token = value.strip_prefix("Bearer ").map(str::trim).filter(|token| !token.is_empty())?;
    Some(hex(&Sha256::digest(token.as_bytes())))
}

fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write;
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
        // Writing to a String cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reserved_properties_are_stripped_in_any_case_and_values_are_typed() {
        let register = Register {
            properties: [("KICI:staged-agent-version", "9"), ("racks", "3"), ("ssd", "true"), ("zone", "b")]
                .map(|(k, v)| (k.to_owned(), v.to_owned()))
                .into(),
            ..Default::default()
        };
        let expected = serde_json::json!({"racks": 3, "ssd": true, "zone": "b"});
        assert_eq!(serde_json::to_value(properties(&register)).unwrap(), expected);
    }
}
