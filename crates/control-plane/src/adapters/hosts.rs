//! Hosts over the roster.

use std::sync::Arc;

use async_trait::async_trait;
use kici_api::dto::hosts::{
    DEFAULT_HOSTS, DeclareHost, HostEffect, HostFilter, HostView, HostsPreview, PreviewHosts, RebootHost,
};
use kici_api::page::Page;
use kici_api::ports::{Answer, Caller, Hosts};
use kici_api::problem::{Code, Problem};
use kici_dispatch::{Dispatcher, RebootError};
use kici_engine::hosts::{Host, HostMatcher, HostQuery, is_reserved_property, reach, targets};
use kici_engine::ids::AgentId;
use kici_engine::labels::{CanonicalLabel, host_label, split};
use kici_store::Store;
use kici_store::model::{DeclaredHost, HostRemoved, RosterHost};
use serde_json::Value as Json;

use super::fault;

/// Longest key or text of a property.
const MAX_PROPERTY: usize = 1024;
/// Most properties in one request.
const MAX_PROPERTIES: usize = 100;
/// Most declared labels of one host.
const MAX_LABELS: usize = 200;

/// Hosts over the store and the dispatcher.
pub(crate) struct HostBook {
    pub(crate) store: Store,
    pub(crate) dispatcher: Arc<Dispatcher>,
    /// Most hosts of one fan-out.
    pub(crate) max_fanout_hosts: usize,
}

fn query(text: &str) -> Answer<HostQuery> {
    HostQuery::parse(text).map_err(|fault| Problem::rejected("selector", fault.to_string()))
}

fn labels(texts: &[String]) -> Answer<Vec<String>> {
    if texts.len() > MAX_LABELS {
        return Err(Problem::rejected("labels", format!("at most {MAX_LABELS} are allowed")));
    }
    let read = |(at, text): (usize, &String)| {
        let label = CanonicalLabel::parse_user(text);
        label.map(|l| l.to_string()).map_err(|error| Problem::rejected(format!("labels[{at}]"), error.to_string()))
    };
    texts.iter().enumerate().map(read).collect()
}

/// A host name that makes a label: selectors go by it.
fn hostname(text: &str) -> Answer<String> {
    match host_label(text) {
        Some(_) => Ok(text.trim().to_owned()),
        None => Err(Problem::rejected("hostname", "use letters, digits, `.` and `-`")),
    }
}

fn check_properties(request: &DeclareHost) -> Answer<()> {
    if request.properties.len() > MAX_PROPERTIES {
        return Err(Problem::rejected("properties", format!("at most {MAX_PROPERTIES} are allowed")));
    }
    for (key, value) in &request.properties {
        let at = format!("properties.{key}");
        if key.is_empty() || key.len() > MAX_PROPERTY || key.contains('=') {
            return Err(Problem::rejected(at, format!("a name has 1 to {MAX_PROPERTY} bytes and no `=`")));
        }
        match value {
            Json::Array(_) | Json::Object(_) => {
                return Err(Problem::rejected(at, "must be text, a number, a boolean, or null to remove it"));
            }
            Json::String(text) if text.len() > MAX_PROPERTY => {
                return Err(Problem::rejected(at, format!("may have at most {MAX_PROPERTY} bytes")));
            }
            _ => {}
        }
    }
    Ok(())
}

impl HostBook {
    fn view(&self, host: RosterHost) -> HostView {
        let seen = self.dispatcher.host(&host);
        let parts = split(&seen.labels);
        let texts = |set: &kici_engine::labels::LabelSet| set.iter().map(ToString::to_string).collect::<Vec<_>>();
        let drifted = |declared: &Vec<String>| host.initialized() && *declared != texts(&parts.user);
        HostView {
            id: host.agent_id.clone(),
            status: seen.status,
            hostname: host.hostname.clone(),
            labels: texts(&parts.user),
            automatic_labels: texts(&parts.automatic),
            platform: host.platform.clone(),
            arch: host.arch.clone(),
            version: host.version.clone(),
            lifecycle: seen.lifecycle,
            scaler_managed: host.scaler_managed,
            declared: host.declared_at.is_some(),
            declared_labels: host.declared_labels.clone().filter(drifted),
            properties: seen.properties.into_iter().filter(|(key, _)| !is_reserved_property(key)).collect(),
            instance: host.connected_instance_id.as_ref().map(ToString::to_string),
            last_seen_at: host.last_seen,
            reboot_pending_until: host.reboot.as_ref().map(|reboot| reboot.until),
            created_at: host.created_at,
        }
    }
}

fn missing(id: &AgentId) -> Problem {
    Problem::not_found(format_args!("host `{id}`"))
}

#[async_trait]
impl Hosts for HostBook {
    async fn list(&self, _caller: &Caller, filter: &HostFilter) -> Answer<Page<HostView>> {
        let query = query(filter.selector.as_deref().unwrap_or_default())?;
        let after = filter.cursor.as_deref().unwrap_or_default();
        let limit = filter.limit.unwrap_or(DEFAULT_HOSTS) as usize;
        let roster = self.store.roster_list().await.map_err(fault::store)?;
        let mut found = roster
            .into_iter()
            .filter(|host| host.agent_id.as_str() > after && query.matches(&self.dispatcher.host(host)));
        let items: Vec<HostView> = found.by_ref().take(limit).map(|host| self.view(host)).collect();
        let next_cursor = found.next().and_then(|_| items.last().map(|last| last.id.to_string()));
        Ok(Page { items, next_cursor })
    }

    async fn get(&self, _caller: &Caller, id: &AgentId) -> Answer<HostView> {
        let host = self.store.roster_get(id.clone()).await.map_err(fault::store)?;
        host.map(|host| self.view(host)).ok_or_else(|| missing(id))
    }

    async fn declare(&self, caller: &Caller, id: &AgentId, request: &DeclareHost) -> Answer<(HostView, bool)> {
        check_properties(request)?;
        let declared = DeclaredHost {
            agent_id: id.clone(),
            hostname: request.hostname.as_deref().map(hostname).transpose()?,
            labels: request.labels.as_deref().map(labels).transpose()?,
            properties: request.properties.clone(),
            by: caller.actor.to_string(),
        };
        let (host, created) = self.dispatcher.declare_host(declared).await.map_err(fault::dispatch)?;
        tracing::info!(host = %id, created, by = %caller.actor, "a host was declared");
        Ok((self.view(host), created))
    }

    async fn remove(&self, caller: &Caller, id: &AgentId) -> Answer<()> {
        match self.dispatcher.remove_host(id).await.map_err(fault::dispatch)? {
            HostRemoved::Removed => {
                tracing::info!(host = %id, by = %caller.actor, "a host was removed");
                Ok(())
            }
            HostRemoved::Connected => {
                let detail = format!("the agent of host `{id}` is connected; stop it first");
                Err(Problem::new(Code::Conflict, detail))
            }
            HostRemoved::NotFound => Err(missing(id)),
        }
    }

    async fn reboot(&self, caller: &Caller, id: &AgentId, request: &RebootHost) -> Answer<HostView> {
        let deadline = request.deadline_s.map(std::time::Duration::from_secs);
        let by = caller.actor.to_string();
        self.dispatcher.request_reboot(id, None, deadline, &by).await.map_err(|error| match error {
            RebootError::NoSuchHost(id) => missing(&id),
            RebootError::OwnHost(_) => Problem::new(Code::Conflict, error.to_string()),
            RebootError::Deadline => Problem::rejected("deadline_s", error.to_string()),
            RebootError::Store(error) => fault::store(error),
        })?;
        self.get(caller, id).await
    }

    async fn cancel_reboot(&self, caller: &Caller, id: &AgentId) -> Answer<HostView> {
        let view = self.get(caller, id).await?;
        if !self.dispatcher.cancel_reboot(id).await.map_err(fault::dispatch)? {
            return Err(Problem::new(Code::Conflict, format!("host `{id}` is not about to restart")));
        }
        Ok(HostView { reboot_pending_until: None, ..view })
    }

    async fn preview(&self, _caller: &Caller, request: &PreviewHosts) -> Answer<HostsPreview> {
        let query = query(&request.selector)?;
        if query.has_conditions() || query.selector.include.is_empty() {
            let detail =
                "a fan-out goes by labels only; name at least one, and no `status=`, `lifecycle=` or `property:`";
            return Err(Problem::rejected("selector", detail));
        }
        let matcher =
            HostMatcher::compile(&query.selector).map_err(|error| Problem::rejected("selector", error.to_string()))?;
        let roster = self.store.roster_list().await.map_err(fault::store)?;
        let hosts: Vec<Host> = roster.iter().map(|host| self.dispatcher.host(host)).collect();
        let found = targets(&matcher, request.include_uninitialized, &hosts);
        let note = match found.len() {
            0 => Some("no known host has these labels: the job would fail".to_owned()),
            count if count > self.max_fanout_hosts => Some(format!(
                "{count} hosts are more than `roster.max_fanout_hosts` ({}) allows: the job would fail",
                self.max_fanout_hosts
            )),
            _ => None,
        };
        let effect = |host: &Host| reach(Some((host.lifecycle, host.status)), request.on_unreachable);
        let hosts = found
            .into_iter()
            .map(|host| HostEffect { id: host.agent_id.clone(), status: host.status, effect: effect(host) })
            .collect();
        Ok(HostsPreview { hosts, note })
    }
}
