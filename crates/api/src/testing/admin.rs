//! Everything of the fake that operators administer.

use std::collections::BTreeMap;

use async_trait::async_trait;
use kici_access::AccessEntry;
use kici_engine::ids::{AgentId, DeliveryRowId, JobId, RunId, SourceId, TokenId};
use kici_engine::state::QueueStatus;

use super::{Fake, NOW, World};
use crate::dto::SecretText;
use crate::dto::access_log::{AccessFilter, AccessView};
use crate::dto::agents::{AgentFilter, AgentStatus, AgentView, DrainAgent};
use crate::dto::audit::{AuditFilter, AuditView};
use crate::dto::bus::{DeadLetter, LetterId, LetterRetried};
use crate::dto::events::{DeliveryFilter, DeliveryView, Explanation, Payload};
use crate::dto::queue::{AgentVerdict, QueueEntry, QueueExplanation, QueueFilter};
use crate::dto::sources::{AddSource, DeliveryAccepted, SetSecrets, SourceKind, SourceView, TriggerSource};
use crate::dto::system::{
    BuildInfo, Capabilities, Check, CheckStatus, Diagnosis, Drain, DrainState, Health, OrchestratorStatus, Ready,
    ReconcilerView,
};
use crate::dto::tokens::{
    AdminTokenView, AgentTokenView, CreateAdminToken, CreateAgentToken, TokenCreated, TokenRevoked,
};
use crate::page::{PageRequest, Slice};
use crate::ports::{
    AccessLog, AdminTokens, AgentTokens, Agents, Answer, Audit, Caller, Events, Queue, Sources, System,
};
use crate::problem::{Code, Problem};

impl Fake {
    /// A local source.
    pub fn add_source(&self, name: &str) -> SourceView {
        let view = SourceView {
            id: SourceId::mint(self),
            name: name.to_owned(),
            kind: SourceKind::Local,
            routing_key: format!("local:{name}"),
            config: serde_json::json!({ "path": format!("/srv/git/{name}") }),
            secrets: vec![],
            webhook_path: format!("/webhooks/default/{name}"),
            enabled: true,
            version: 1,
            created_at: NOW,
        };
        self.world().sources.push(view.clone());
        view
    }

    /// A delivery of `source` with this status.
    pub fn add_delivery(&self, source: &str, status: &str) -> DeliveryRowId {
        let id = DeliveryRowId::mint(self);
        self.world().deliveries.insert(
            0,
            DeliveryView {
                id,
                delivery_id: format!("d-{}", id.uuid().simple()),
                source: source.to_owned(),
                provider: "local".to_owned(),
                channel: "direct".to_owned(),
                event: "push".to_owned(),
                action: None,
                status: status.to_owned(),
                matched_count: 1,
                repo: Some("acme/app".to_owned()),
                git_ref: Some("refs/heads/main".to_owned()),
                sha: None,
                first_run_id: None,
                error: None,
                note: Some("ci: trigger 0 matched".to_owned()),
                attempts: 1,
                payload_bytes: 2,
                payload_sha256: "00".repeat(32),
                payload_omitted: None,
                next_attempt_at: None,
                received_at: NOW,
                finished_at: Some(NOW),
                request_id: None,
            },
        );
        id
    }

    /// A connected agent.
    pub fn add_agent(&self, name: &str) {
        let Ok(id) = AgentId::new(name) else { return };
        self.world().agents.push(AgentView {
            id,
            status: AgentStatus::Ready,
            drain_reason: None,
            labels: vec!["default".to_owned(), "linux".to_owned()],
            mandatory_labels: vec![],
            platform: Some("linux".to_owned()),
            arch: Some("x64".to_owned()),
            hostname: Some(name.to_owned()),
            version: Some("0.1.0".to_owned()),
            jobs: vec![],
            max_concurrency: 2,
            scaler_managed: false,
            instance: None,
            token_id: None,
            last_seen_at: Some(NOW),
            connected_at: Some(NOW),
        });
    }
}

fn source<'a>(world: &'a mut World, caller: &Caller, name: &str) -> Answer<&'a mut SourceView> {
    let found = world.sources.iter_mut().find(|source| source.name == name && caller.sees(&source.routing_key));
    found.ok_or_else(|| Problem::not_found(format_args!("source `{name}`")))
}

#[async_trait]
impl Sources for Fake {
    async fn list(&self, caller: &Caller) -> Answer<Vec<SourceView>> {
        Ok(self.reach()?.sources.iter().filter(|source| caller.sees(&source.routing_key)).cloned().collect())
    }

    async fn get(&self, caller: &Caller, name: &str) -> Answer<SourceView> {
        source(&mut *self.reach()?, caller, name).cloned()
    }

    async fn add(&self, _: &Caller, request: &AddSource) -> Answer<SourceView> {
        if self.reach()?.sources.iter().any(|source| source.name == request.name) {
            let detail = format!("a source `{}` exists; choose another name or remove it first", request.name);
            return Err(Problem::new(Code::Exists, detail));
        }
        let mut view = self.add_source(&request.name);
        view.kind = request.kind;
        view.config.clone_from(&request.config);
        view.secrets = request.secrets.keys().cloned().collect();
        Ok(view)
    }

    async fn remove(&self, caller: &Caller, name: &str) -> Answer<()> {
        source(&mut *self.reach()?, caller, name)?;
        self.world().sources.retain(|source| source.name != name);
        Ok(())
    }

    async fn set_enabled(&self, caller: &Caller, name: &str, enabled: bool) -> Answer<SourceView> {
        let mut world = self.reach()?;
        let source = source(&mut world, caller, name)?;
        source.enabled = enabled;
        Ok(source.clone())
    }

    async fn set_secrets(&self, caller: &Caller, name: &str, request: &SetSecrets) -> Answer<SourceView> {
        let mut world = self.reach()?;
        let source = source(&mut world, caller, name)?;
        source.secrets = request.secrets.keys().cloned().collect();
        Ok(source.clone())
    }

    async fn trigger(&self, caller: &Caller, name: &str, _: &TriggerSource) -> Answer<DeliveryAccepted> {
        source(&mut *self.reach()?, caller, name)?;
        Ok(DeliveryAccepted { delivery_id: self.add_delivery(name, "received") })
    }
}

fn created(fake: &Fake, prefix: &str) -> TokenCreated {
    let token = SecretText::new(format!("{prefix}{}", "0".repeat(70)));
    TokenCreated { id: TokenId::mint(fake), token, prefix: "00000000".to_owned() }
}

const REVOKED: TokenRevoked = TokenRevoked { revoked: true, sessions_closed: 1, peers_notified: 0 };

#[async_trait]
impl AgentTokens for Fake {
    async fn create(&self, _: &Caller, _: &CreateAgentToken) -> Answer<TokenCreated> {
        Ok(created(self, "kici_agent_"))
    }

    async fn list(&self, _: &Caller, _: Option<&str>) -> Answer<Vec<AgentTokenView>> {
        Ok(vec![])
    }

    async fn revoke(&self, _: &Caller, _: TokenId) -> Answer<TokenRevoked> {
        Ok(REVOKED)
    }
}

#[async_trait]
impl AdminTokens for Fake {
    async fn create(&self, _: &Caller, _: &CreateAdminToken) -> Answer<TokenCreated> {
        Ok(created(self, "kici_admin_"))
    }

    async fn list(&self, _: &Caller) -> Answer<Vec<AdminTokenView>> {
        Ok(vec![])
    }

    async fn revoke(&self, _: &Caller, _: TokenId) -> Answer<TokenRevoked> {
        Ok(REVOKED)
    }
}

#[async_trait]
impl Agents for Fake {
    async fn list(&self, _: &Caller, filter: &AgentFilter) -> Answer<Vec<AgentView>> {
        let wanted = |agent: &&AgentView| {
            filter.label.as_ref().is_none_or(|label| agent.labels.contains(label))
                && filter.status.is_none_or(|status| agent.status == status)
        };
        Ok(self.reach()?.agents.iter().filter(wanted).cloned().collect())
    }

    async fn drain(&self, _: &Caller, id: &AgentId, request: &DrainAgent) -> Answer<AgentView> {
        let mut world = self.reach()?;
        let agent = world.agents.iter_mut().find(|agent| agent.id == *id);
        let agent = agent.ok_or_else(|| Problem::not_found(format_args!("agent `{id}`")))?;
        agent.status = if request.drain { AgentStatus::Draining } else { AgentStatus::Ready };
        agent.drain_reason.clone_from(&request.reason);
        Ok(agent.clone())
    }
}

fn delivery(world: &mut World, caller: &Caller, id: DeliveryRowId) -> Answer<DeliveryView> {
    let visible = |d: &&DeliveryView| d.id == id && caller.sees(&format!("local:{}", d.source));
    world.deliveries.iter().find(visible).cloned().ok_or_else(|| Problem::not_found(format_args!("delivery {id}")))
}

fn not_dead(delivery: &DeliveryView) -> Answer<()> {
    if delivery.status == "dead" {
        return Ok(());
    }
    Err(Problem::new(Code::NotDeadLetter, format!("{} is `{}`, not a dead letter", delivery.id, delivery.status)))
}

#[async_trait]
impl Events for Fake {
    async fn list(&self, caller: &Caller, filter: &DeliveryFilter, _: PageRequest) -> Answer<Slice<DeliveryView>> {
        let wanted = |d: &&DeliveryView| {
            caller.sees(&format!("local:{}", d.source)) && filter.status.as_ref().is_none_or(|s| d.status == *s)
        };
        Ok(Slice { items: self.reach()?.deliveries.iter().filter(wanted).cloned().collect(), next: None })
    }

    async fn get(&self, caller: &Caller, id: DeliveryRowId) -> Answer<DeliveryView> {
        delivery(&mut *self.reach()?, caller, id)
    }

    async fn payload(&self, caller: &Caller, id: DeliveryRowId) -> Answer<Payload> {
        delivery(&mut *self.reach()?, caller, id)?;
        Ok(Payload { content_type: "application/json".to_owned(), body: b"{}".to_vec() })
    }

    async fn explain(&self, caller: &Caller, id: DeliveryRowId) -> Answer<Explanation> {
        let delivery = delivery(&mut *self.reach()?, caller, id)?;
        let checks = serde_json::json!([
            { "check": "branches", "expected": "main", "actual": "dev", "passed": false, "note": null }
        ]);
        let trace = serde_json::json!([{ "workflow": "ci", "outcome": "no_match",
            "triggers": [{ "trigger": 0, "kind": "push", "matched": false, "checks": checks }] }]);
        Ok(Explanation { delivery, trace: Some(trace), runs: vec![] })
    }

    async fn redeliver(&self, caller: &Caller, id: DeliveryRowId) -> Answer<DeliveryAccepted> {
        let source = delivery(&mut *self.reach()?, caller, id)?.source;
        Ok(DeliveryAccepted { delivery_id: self.add_delivery(&source, "received") })
    }

    async fn dlq_list(&self, caller: &Caller, page: PageRequest) -> Answer<Slice<DeadLetter>> {
        let filter = DeliveryFilter { status: Some("dead".to_owned()), ..DeliveryFilter::default() };
        let listed = Events::list(self, caller, &filter, page).await?;
        let letter = |d: DeliveryView| DeadLetter {
            kind: "delivery".to_owned(),
            id: LetterId::Delivery(d.id),
            event: d.event,
            source: Some(d.source),
            repo: d.repo,
            attempts: d.attempts,
            error: d.error,
            reason: "exhausted_retries".to_owned(),
            created_at: d.received_at,
            dead_at: d.finished_at,
        };
        Ok(Slice { items: listed.items.into_iter().map(letter).collect(), next: None })
    }

    async fn dlq_count(&self, _: &Caller) -> Answer<u64> {
        Ok(self.reach()?.deliveries.iter().filter(|d| d.status == "dead").count() as u64)
    }

    async fn dlq_retry(&self, caller: &Caller, id: LetterId) -> Answer<LetterRetried> {
        not_dead(&letter(&mut *self.reach()?, caller, id)?)?;
        Ok(LetterRetried { id })
    }

    async fn dlq_discard(&self, caller: &Caller, id: LetterId, _: &str) -> Answer<()> {
        not_dead(&letter(&mut *self.reach()?, caller, id)?)
    }
}

/// The fake's bus is empty: its dead letters are deliveries.
fn letter(world: &mut World, caller: &Caller, id: LetterId) -> Answer<DeliveryView> {
    match id {
        LetterId::Delivery(id) => delivery(world, caller, id),
        LetterId::Event(id) => Err(Problem::not_found(format_args!("event {id}"))),
    }
}

fn entry(world: &World, job: JobId) -> Answer<QueueEntry> {
    let view = world.jobs.iter().find(|view| view.id == job);
    let view = view.ok_or_else(|| Problem::not_found(format_args!("queue entry {job}")))?;
    Ok(QueueEntry {
        job_id: job,
        run_id: view.run_id,
        workflow: "ci".to_owned(),
        job: view.name.clone(),
        status: QueueStatus::Pending,
        labels: vec!["gpu".to_owned()],
        exclude: vec![],
        attempts: 0,
        epoch: 0,
        agent_id: None,
        routing_reason: Some("no agent offers label `gpu`".to_owned()),
        last_provisioning_error: None,
        created_at: NOW,
        expires_at: None,
        dispatched_at: None,
        ack_deadline: None,
        recovery_deadline: None,
        unroutable_since: Some(NOW),
    })
}

#[async_trait]
impl Queue for Fake {
    async fn list(&self, _: &Caller, filter: &QueueFilter, _: PageRequest) -> Answer<Slice<QueueEntry>> {
        let world = self.reach()?;
        let wanted = |run: RunId| filter.run.is_none_or(|wanted| wanted == run);
        let jobs = world.jobs.iter().filter(|job| wanted(job.run_id));
        Ok(Slice { items: jobs.map(|job| entry(&world, job.id)).collect::<Result<_, _>>()?, next: None })
    }

    async fn get(&self, _: &Caller, job: JobId) -> Answer<QueueEntry> {
        entry(&*self.reach()?, job)
    }

    async fn explain(&self, _: &Caller, job: JobId) -> Answer<QueueExplanation> {
        let world = self.reach()?;
        let verdict = |agent: &AgentView| AgentVerdict {
            agent_id: agent.id.clone(),
            eligible: false,
            reason: "missing label `gpu`".to_owned(),
        };
        let agents = world.agents.iter().map(verdict).collect();
        Ok(QueueExplanation { entry: entry(&world, job)?, verdict: "no agent offers label `gpu`".to_owned(), agents })
    }
}

#[async_trait]
impl System for Fake {
    fn health(&self) -> Health {
        Health {
            status: "ok".to_owned(),
            instance_id: "test".to_owned(),
            role: "coordinator".to_owned(),
            version: "0.1.0".to_owned(),
            build: BuildInfo { commit: "unknown".to_owned(), target: "test".to_owned() },
            uptime_s: 1,
        }
    }

    async fn ready(&self) -> Ready {
        let database = self.reach().map_or_else(|problem| problem.detail, |_| "ok".to_owned());
        let draining = self.world().draining;
        Ready { ready: database == "ok", draining, checks: BTreeMap::from([("db".to_owned(), database)]) }
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { version: "0.1.0".to_owned(), api: "v1".to_owned(), features: vec![] }
    }

    fn metrics(&self) -> String {
        "# TYPE kici_orch_up gauge\nkici_orch_up 1\n".to_owned()
    }

    async fn drain_state(&self, _: &Caller) -> Answer<DrainState> {
        Ok(DrainState { draining: self.reach()?.draining, reason: None, jobs_running: 0 })
    }

    async fn drain(&self, caller: &Caller, request: &Drain) -> Answer<DrainState> {
        self.reach()?.draining = request.drain;
        self.drain_state(caller).await
    }

    async fn status(&self, caller: &Caller) -> Answer<OrchestratorStatus> {
        let drain = self.drain_state(caller).await?;
        let sweep = ReconcilerView {
            name: "sweep".to_owned(),
            interval_ms: 10_000,
            leader_only: true,
            running: false,
            runs: 3,
            failures: 1,
            last_started_at: None,
            last_duration_ms: Some(2),
            last_changed: None,
            last_error: Some("no database".to_owned()),
        };
        Ok(OrchestratorStatus { instance_id: "test".to_owned(), leader: true, drain, reconcilers: vec![sweep] })
    }

    async fn diagnose(&self, _: &Caller) -> Answer<Diagnosis> {
        let status = CheckStatus::Pass;
        let check = Check { name: "database".to_owned(), status, message: "answers".to_owned(), duration_ms: 1 };
        Ok(Diagnosis { status, checks: vec![check] })
    }
}

#[async_trait]
impl AccessLog for Fake {
    fn record(&self, entry: AccessEntry) {
        self.world().access.push(entry);
    }

    async fn list(&self, _: &Caller, _: &AccessFilter, _: PageRequest) -> Answer<Slice<AccessView>> {
        let view = |entry: &AccessEntry| AccessView {
            id: kici_engine::ids::IdSource::uuid(self),
            actor: entry.actor.to_string(),
            action: entry.action.to_string(),
            source: entry.source.to_string(),
            outcome: entry.outcome.to_string(),
            target_type: entry.target.as_ref().map(|(kind, _)| kind.to_string()),
            target_id: entry.target.as_ref().map(|(_, id)| id.clone()),
            request_id: entry.request_id.clone(),
            error_message: entry.error_message.clone(),
            created_at: entry.created_at,
        };
        Ok(Slice { items: self.reach()?.access.iter().map(view).collect(), next: None })
    }
}

#[async_trait]
impl Audit for Fake {
    async fn list(&self, _: &Caller, filter: &AuditFilter, _: PageRequest) -> Answer<Slice<AuditView>> {
        drop(self.reach()?);
        let entry = AuditView {
            id: kici_engine::ids::IdSource::uuid(self),
            actor: "agent:a1".to_owned(),
            action: "git_credential.mint".to_owned(),
            outcome: "allowed".to_owned(),
            scope: Some("git.example/acme/app".to_owned()),
            key: Some("source".to_owned()),
            run_id: filter.run,
            job_id: filter.job,
            metadata: Some(serde_json::json!({"scoped": true, "granted": {"contents": "read"}})),
            created_at: kici_engine::time::Ts::from_micros(1_700_000_000_000_000),
        };
        let fits = filter.outcome.as_ref().is_none_or(|outcome| *outcome == entry.outcome);
        Ok(Slice { items: if fits { vec![entry] } else { Vec::new() }, next: None })
    }
}
