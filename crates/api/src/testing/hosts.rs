//! The hosts of the fake.

use async_trait::async_trait;
use kici_engine::hosts::{Host, HostMatcher, HostQuery, HostStatus, Lifecycle, reach, targets};
use kici_engine::ids::AgentId;
use kici_engine::labels::CanonicalLabel;

use super::{Fake, NOW};
use crate::dto::hosts::{DeclareHost, HostEffect, HostFilter, HostView, HostsPreview, PreviewHosts, RebootHost};
use crate::page::Page;
use crate::ports::{Answer, Caller, Hosts};
use crate::problem::{Code, Problem};

fn host(view: &HostView) -> Host {
    Host {
        agent_id: view.id.clone(),
        labels: view.labels.iter().filter_map(|label| CanonicalLabel::parse(label).ok()).collect(),
        lifecycle: view.lifecycle,
        status: view.status,
        scaler_managed: view.scaler_managed,
        initialized: view.last_seen_at.is_some(),
        properties: view.properties.clone(),
    }
}

fn query(text: &str) -> Answer<HostQuery> {
    HostQuery::parse(text).map_err(|fault| Problem::rejected("selector", fault.to_string()))
}

fn blank(id: &AgentId) -> HostView {
    HostView {
        id: id.clone(),
        status: HostStatus::Unreachable,
        hostname: None,
        labels: Vec::new(),
        automatic_labels: Vec::new(),
        platform: None,
        arch: None,
        version: None,
        lifecycle: Lifecycle::Static,
        scaler_managed: false,
        declared: true,
        declared_labels: None,
        properties: Default::default(),
        instance: None,
        last_seen_at: None,
        reboot_pending_until: None,
        created_at: NOW,
    }
}

impl Fake {
    /// A host that is out of contact.
    pub fn add_host(&self, name: &str) {
        let Ok(id) = AgentId::new(name) else { return };
        self.world().hosts.insert(id.clone(), blank(&id));
    }
}

#[async_trait]
impl Hosts for Fake {
    async fn list(&self, _: &Caller, filter: &HostFilter) -> Answer<Page<HostView>> {
        let query = query(filter.selector.as_deref().unwrap_or_default())?;
        let items = self.reach()?.hosts.values().filter(|view| query.matches(&host(view))).cloned().collect();
        Ok(Page { items, next_cursor: None })
    }

    async fn get(&self, _: &Caller, id: &AgentId) -> Answer<HostView> {
        self.reach()?.hosts.get(id).cloned().ok_or_else(|| Problem::not_found(format_args!("host `{id}`")))
    }

    async fn declare(&self, _: &Caller, id: &AgentId, request: &DeclareHost) -> Answer<(HostView, bool)> {
        let mut world = self.reach()?;
        let created = !world.hosts.contains_key(id);
        let view = world.hosts.entry(id.clone()).or_insert_with(|| blank(id));
        if request.hostname.is_some() {
            view.hostname.clone_from(&request.hostname);
        }
        if let Some(labels) = &request.labels {
            view.labels.clone_from(labels);
        }
        view.properties.extend(request.properties.clone());
        view.properties.retain(|_, value| !value.is_null());
        Ok((view.clone(), created))
    }

    async fn remove(&self, _: &Caller, id: &AgentId) -> Answer<()> {
        let mut world = self.reach()?;
        match world.hosts.get(id) {
            None => Err(Problem::not_found(format_args!("host `{id}`"))),
            Some(view) if view.status == HostStatus::Ready => {
                Err(Problem::new(Code::Conflict, format!("host `{id}` is connected")))
            }
            Some(_) => {
                world.hosts.remove(id);
                Ok(())
            }
        }
    }

    async fn reboot(&self, _: &Caller, id: &AgentId, request: &RebootHost) -> Answer<HostView> {
        let mut world = self.reach()?;
        let view = world.hosts.get_mut(id).ok_or_else(|| Problem::not_found(format_args!("host `{id}`")))?;
        let deadline = std::time::Duration::from_secs(request.deadline_s.unwrap_or(900));
        view.reboot_pending_until = Some(NOW.plus(deadline));
        Ok(view.clone())
    }

    async fn cancel_reboot(&self, _: &Caller, id: &AgentId) -> Answer<HostView> {
        let mut world = self.reach()?;
        let view = world.hosts.get_mut(id).ok_or_else(|| Problem::not_found(format_args!("host `{id}`")))?;
        if view.reboot_pending_until.take().is_none() {
            return Err(Problem::new(Code::Conflict, format!("host `{id}` is not about to restart")));
        }
        Ok(view.clone())
    }

    async fn preview(&self, _: &Caller, request: &PreviewHosts) -> Answer<HostsPreview> {
        let query = query(&request.selector)?;
        let matcher =
            HostMatcher::compile(&query.selector).map_err(|error| Problem::rejected("selector", error.to_string()))?;
        let hosts: Vec<Host> = self.reach()?.hosts.values().map(host).collect();
        let effect = |host: &Host| reach(Some((host.lifecycle, host.status)), request.on_unreachable);
        let hosts = targets(&matcher, request.include_uninitialized, &hosts)
            .into_iter()
            .map(|host| HostEffect { id: host.agent_id.clone(), status: host.status, effect: effect(host) })
            .collect();
        Ok(HostsPreview { hosts, note: None })
    }
}
