//! The access log: what an entry holds, and which accesses are worth one.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use kici_engine::time::Ts;
use serde::{Deserialize, Serialize};

use crate::actor::{Actor, ActorType};
use crate::permission::UnknownName;

macro_rules! words {
    ($($(#[$doc:meta])* $name:ident ($what:literal) { $($(#[$vdoc:meta])* $variant:ident = $word:literal,)* })*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
        pub enum $name { $($(#[$vdoc])* #[serde(rename = $word)] $variant,)* }

        impl $name {
            /// Every value.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// The word in storage and JSON.
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $word,)* }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.pad(self.as_str())
            }
        }

        impl std::str::FromStr for $name {
            type Err = UnknownName;

            fn from_str(text: &str) -> Result<Self, UnknownName> {
                let expected = || Self::ALL.iter().map(|w| w.as_str());
                Self::ALL.iter().copied().find(|w| w.as_str() == text).ok_or_else(|| UnknownName::new(text, $what, expected()))
            }
        }
    )*};
}

words! {
    /// The door through which an access came.
    AccessSource("access source") {
        /// The web pages.
        WebUi = "web_ui",
        /// REST.
        AdminHttp = "admin_http",
        /// REST, called by `kici-admin`.
        AdminCli = "admin_cli",
        /// An agent's connection.
        Agent = "agent",
        /// A comment on a pull request.
        PrComment = "pr_comment",
        /// The platform around the installation.
        PlatformProxy = "platform_proxy",
    }
    /// How an access ended.
    Outcome("outcome") {
        /// It was allowed and done.
        Allowed = "allowed",
        /// It was refused.
        Denied = "denied",
        /// It was allowed and failed.
        Error = "error",
    }
    /// What was accessed.
    TargetType("target type") {
        /// A run.
        Run = "run",
        /// A job.
        Job = "job",
        /// A step.
        Step = "step",
        /// A delivery.
        EventLog = "event_log",
        /// The body of a delivery.
        EventLogPayload = "event_log_payload",
        /// A scope of secrets.
        SecretScope = "secret_scope",
        /// A context.
        Context = "context",
        /// A source.
        Source = "source",
        /// A registered workflow.
        Registration = "registration",
        /// Diagnostics.
        Diagnostics = "diagnostics",
        /// Agents and hosts.
        Fleet = "fleet",
        /// A held run.
        HeldRun = "held_run",
        /// The access log itself.
        AccessLog = "access_log",
        /// An event of the internal bus.
        Event = "event",
        /// A dead letter.
        EventDlq = "event_dlq",
        /// Settings of the organisation.
        OrgSettings = "org_settings",
        /// Settings of the cluster.
        ClusterSettings = "cluster_settings",
        /// A token.
        Token = "token",
    }
}

/// How often an access of one kind is recorded when nothing else makes it worth recording.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// Every time.
    Always,
    /// This many of 10 000 requests; all entries of one request stand or fall together.
    Sample(u32),
    /// At most this many per minute and actor.
    PerMinute(u32),
}

macro_rules! actions {
    ($($(#[$doc:meta])* $variant:ident = $word:literal => $policy:expr,)*) => {
        words! {
            /// What was done.
            Action("action") { $($(#[$doc])* $variant = $word,)* }
        }

        /// The policy of an action. One row per action, so that a new one cannot be forgotten.
        pub const fn policy(action: Action) -> Policy {
            match action { $(Action::$variant => $policy,)* }
        }
    };
}

use Policy::{Always, PerMinute, Sample};

actions! {
    /// List runs.
    RunsList = "runs.list" => Sample(500),
    /// Show a run.
    RunDetail = "run.detail" => Sample(500),
    /// Read logs of a step.
    StepLogs = "step.logs" => Sample(1_000),
    /// Get an artifact of a run.
    ArtifactDownload = "artifact.download" => Always,
    /// List caches.
    CacheList = "cache.list" => Sample(1_000),
    /// Remove entries of caches.
    CacheDelete = "cache.delete" => Always,
    /// Start a run by hand.
    RunTrigger = "run.trigger" => Always,
    /// Cancel a run.
    RunCancel = "run.cancel" => Always,
    /// Run again.
    RunRerun = "run.rerun" => Always,
    /// Validate or explain workflows.
    WorkflowRead = "workflow.read" => Sample(1_000),
    /// List deliveries.
    EventLogList = "event_log.list" => Sample(500),
    /// Show or explain a delivery.
    EventLogDetail = "event_log.detail" => Sample(500),
    /// Read the body of a delivery.
    EventLogPayload = "event_log.payload" => Always,
    /// Deliver again.
    EventLogRedeliver = "event_log.redeliver" => Always,
    /// List dead letters.
    EventDlqList = "event_dlq.list" => Sample(2_000),
    /// Retry a dead letter.
    EventDlqRetry = "event_dlq.retry" => Always,
    /// Discard a dead letter.
    EventDlqDiscard = "event_dlq.discard" => Always,
    /// List events of the internal bus.
    EventList = "event.list" => Sample(500),
    /// Show an event of the internal bus.
    EventDetail = "event.detail" => Sample(500),
    /// Read the document of an event.
    EventPayload = "event.payload" => Always,
    /// Emit an event.
    EventEmit = "event.emit" => Always,
    /// Deliver an event again.
    EventRedeliver = "event.redeliver" => Always,
    /// List or test which repositories may start workflows of others.
    EventTrustList = "event_trust.list" => Sample(1_000),
    /// Let a repository start workflows of another one.
    EventTrustAdd = "event_trust.add" => Always,
    /// Take that back.
    EventTrustRemove = "event_trust.remove" => Always,
    /// Fire a schedule by hand.
    ScheduleTrigger = "schedule.trigger" => Always,
    /// List or show sources.
    SourcesList = "sources.list" => Sample(1_000),
    /// Add a source.
    SourceCreate = "source.create" => Always,
    /// Change a source.
    SourceUpdate = "source.update" => Always,
    /// Remove a source.
    SourceDelete = "source.delete" => Always,
    /// Send a push of a source by hand.
    SourceTrigger = "source.trigger" => Always,
    /// List registrations.
    RegistrationList = "registration.list" => Sample(1_000),
    /// Change a registration.
    RegistrationUpdate = "registration.update" => Always,
    /// List or show agents and hosts.
    FleetRead = "fleet.read" => PerMinute(1),
    /// Declare a host.
    HostDeclare = "host.declare" => Always,
    /// Remove a host.
    HostRemove = "host.remove" => Always,
    /// Announce the restart of a host, or call it off.
    HostReboot = "host.reboot" => Always,
    /// Show the queue.
    QueueRead = "queue.read" => Sample(1_000),
    /// List agent tokens.
    AgentTokenList = "agent_token.list" => Sample(1_000),
    /// Create an agent token.
    AgentTokenCreate = "agent_token.create" => Always,
    /// Revoke an agent token.
    AgentTokenRevoke = "agent_token.revoke" => Always,
    /// List admin tokens.
    TokenList = "token.list" => Always,
    /// Create an admin token.
    TokenCreate = "token.create" => Always,
    /// Revoke an admin token.
    TokenRevoke = "token.revoke" => Always,
    /// Drain an agent, or let it work again.
    AgentDrain = "agent.drain" => Always,
    /// Drain an orchestrator, or let it work again.
    OrchestratorDrain = "orchestrator.drain" => Always,
    /// Diagnose the installation.
    Diagnostics = "diagnostics" => PerMinute(1),
    /// Read the access log.
    AccessLogList = "access_log.list" => Always,
    /// Read the audit log of secrets.
    AuditList = "audit.list" => Always,
}

/// One access.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AccessEntry {
    /// Organisation, if the access was about one.
    pub org: Option<String>,
    /// Who.
    pub actor: Actor,
    /// What they did.
    pub action: Action,
    /// Through which door.
    pub source: AccessSource,
    /// How it ended.
    pub outcome: Outcome,
    /// Kind and id of what was accessed.
    pub target: Option<(TargetType, String)>,
    /// Id of the request.
    pub request_id: Option<String>,
    /// Source that the actor's token is bound to.
    pub routing_key: Option<String>,
    /// Why it was refused or failed; never holds a secret.
    pub error_message: Option<String>,
    /// When.
    pub created_at: Ts,
}

/// What makes an entry worth keeping whatever its action: it was refused or failed, an operator from outside did it,
/// or an agent did it or acted for someone.
fn notable(entry: &AccessEntry) -> bool {
    entry.outcome != Outcome::Allowed
        || matches!(entry.actor.kind, ActorType::PlatformOperator | ActorType::Agent)
        || entry.actor.via.is_some()
}

/// Whether a request falls into the sample. Stable per actor and request.
fn sampled(entry: &AccessEntry, per_10_000: u32) -> bool {
    let Some(request) = &entry.request_id else { return true };
    fnv1a32(&format!("{}:{request}", entry.actor)) % 10_000 < per_10_000
}

/// FNV-1a, 32 bits.
fn fnv1a32(text: &str) -> u32 {
    text.bytes().fold(0x811c_9dc5, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193))
}

/// Most (action, actor) pairs whose rate is remembered.
const MAX_PAIRS: usize = 10_000;
/// A pair that was quiet for this long is forgotten.
const IDLE: Duration = Duration::from_secs(300);
const MINUTE: Duration = Duration::from_secs(60);

/// Decides which accesses are recorded. Holds only the counters of rate-limited actions.
#[derive(Debug, Default)]
pub struct Recorder {
    buckets: Mutex<Buckets>,
}

#[derive(Debug, Default)]
struct Buckets {
    by_pair: HashMap<(Action, Actor), Bucket>,
    swept_at: Option<Ts>,
}

#[derive(Debug)]
struct Bucket {
    tokens: f64,
    at: Ts,
}

impl Recorder {
    /// Whether `entry` is to be written.
    pub fn wants(&self, entry: &AccessEntry) -> bool {
        notable(entry)
            || match policy(entry.action) {
                Always => true,
                Sample(rate) => sampled(entry, rate),
                PerMinute(rate) => self.take(entry, rate),
            }
    }

    fn take(&self, entry: &AccessEntry, per_minute: u32) -> bool {
        let now = entry.created_at;
        let full = f64::from(per_minute);
        let mut buckets = self.buckets.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (entry.action, entry.actor.clone());
        if !buckets.by_pair.contains_key(&key) && buckets.by_pair.len() >= MAX_PAIRS {
            // Not at every call: a flood of actors must not make each access walk the whole table.
            if buckets.swept_at.is_none_or(|at| now.since(at) >= MINUTE) {
                buckets.swept_at = Some(now);
                buckets.by_pair.retain(|_, bucket| now.since(bucket.at) < IDLE);
            }
            if buckets.by_pair.len() >= MAX_PAIRS {
                // Too many actors to count: rather an entry too many than one too few.
                return true;
            }
        }
        let bucket = buckets.by_pair.entry(key).or_insert(Bucket { tokens: full, at: now });
        let earned = now.since(bucket.at).as_secs_f64() / MINUTE.as_secs_f64() * full;
        bucket.tokens = (bucket.tokens + earned).min(full);
        bucket.at = now;
        let wanted = bucket.tokens >= 1.0;
        if wanted {
            bucket.tokens -= 1.0;
        }
        wanted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(action: Action, request: u32, seconds: i64) -> AccessEntry {
        AccessEntry {
            org: None,
            actor: Actor::new(ActorType::ApiKey, "tok"),
            action,
            source: AccessSource::AdminHttp,
            outcome: Outcome::Allowed,
            target: None,
            request_id: Some(format!("req-{request}")),
            routing_key: None,
            error_message: None,
            created_at: Ts::from_micros(seconds * 1_000_000),
        }
    }

    #[test]
    fn refusals_operators_and_agents_are_always_recorded() {
        let recorder = Recorder::default();
        for request in 0..200 {
            let plain = entry(Action::RunsList, request, 0);
            for outcome in [Outcome::Denied, Outcome::Error] {
                assert!(recorder.wants(&AccessEntry { outcome, ..plain.clone() }));
            }
            for kind in [ActorType::PlatformOperator, ActorType::Agent] {
                assert!(recorder.wants(&AccessEntry { actor: Actor::new(kind, "x"), ..plain.clone() }));
            }
            assert!(recorder.wants(&AccessEntry { actor: plain.actor.clone().via("a"), ..plain }));
        }
    }

    #[test]
    fn samples_have_the_right_size_and_are_stable() {
        let recorder = Recorder::default();
        for (action, low, high) in [(Action::RunsList, 400, 600), (Action::StepLogs, 850, 1_150)] {
            let kept: Vec<bool> = (0..10_000).map(|r| recorder.wants(&entry(action, r, 0))).collect();
            let count = kept.iter().filter(|k| **k).count();
            assert!((low..high).contains(&count), "{action}: {count}");
            let again: Vec<bool> = (0..10_000).map(|r| recorder.wants(&entry(action, r, 9))).collect();
            assert_eq!(kept, again);
        }
    }

    #[test]
    fn mutations_and_payload_reads_are_always_recorded() {
        let recorder = Recorder::default();
        for action in Action::ALL {
            let reads = ["list", "detail", "logs", "read", "diagnostics"];
            let read = reads.iter().any(|r| action.as_str().ends_with(r));
            if !read {
                assert!((0..50).all(|r| recorder.wants(&entry(*action, r, 0))), "{action}");
            }
            assert_eq!(action.as_str().parse::<Action>(), Ok(*action));
        }
    }

    #[test]
    fn rates_are_per_actor_and_bounded() {
        let recorder = Recorder::default();
        let at = |seconds| entry(Action::FleetRead, 0, seconds);
        assert!(recorder.wants(&at(0)));
        assert!(!recorder.wants(&at(30)));
        assert!(recorder.wants(&AccessEntry { actor: Actor::system("x"), ..at(30) }));
        assert!(recorder.wants(&at(61)));
        for n in 0..20_000 {
            recorder.wants(&AccessEntry { actor: Actor::new(ActorType::User, n.to_string()), ..at(61) });
        }
        assert!(recorder.buckets.lock().unwrap().by_pair.len() <= MAX_PAIRS);
    }
}
