//! The handlers by resource, and the table of all routes.

pub(super) mod agents;
pub(super) mod bus;
pub(super) mod events;
pub(super) mod hosts;
pub(super) mod queue;
pub(super) mod runs;
pub(super) mod sources;
pub(super) mod stored;
pub(super) mod system;
pub(super) mod tokens;
pub(super) mod workflows;

use http::Method;
use kici_access::{Action as A, Permission as P, TargetType as T};

use super::{Route, sse};

/// Every route under `/api/v1`.
pub fn table() -> Vec<Route> {
    let (get, post, put, delete) = (|| Method::GET, || Method::POST, || Method::PUT, || Method::DELETE);
    let mut routes = bus_table();
    routes.extend(stored_table());
    routes.extend([
        Route::new(get(), "/api/v1/runs", P::RunRead, A::RunsList, runs::list).scoped(),
        Route::new(post(), "/api/v1/runs", P::RunTrigger, A::RunTrigger, runs::trigger).scoped(),
        Route::new(get(), "/api/v1/runs/{id}", P::RunRead, A::RunDetail, runs::get).on(T::Run).scoped(),
        Route::new(get(), "/api/v1/runs/{id}/jobs", P::RunRead, A::RunDetail, runs::jobs).on(T::Run).scoped(),
        Route::new(get(), "/api/v1/runs/{id}/steps", P::RunRead, A::RunDetail, runs::steps).on(T::Run).scoped(),
        Route::new(get(), "/api/v1/runs/{id}/jobs/{job}/steps/{step}/logs", P::RunRead, A::StepLogs, runs::step_logs)
            .on(T::Run)
            .scoped(),
        Route::new(get(), "/api/v1/runs/{id}/logs", P::RunRead, A::StepLogs, runs::logs).on(T::Run).scoped(),
        Route::new(post(), "/api/v1/runs/{id}/logs/follow", P::RunRead, A::StepLogs, runs::follow).on(T::Run).scoped(),
        Route::new(post(), "/api/v1/runs/{id}/cancel", P::RunCancel, A::RunCancel, runs::cancel).on(T::Run).scoped(),
        Route::new(post(), "/api/v1/runs/{id}/rerun", P::RunRerun, A::RunRerun, runs::rerun).on(T::Run).scoped(),
        Route::new(get(), "/api/v1/stream", P::RunRead, A::RunsList, sse::stream).scoped(),
        Route::new(post(), "/api/v1/workflows/validate", P::WorkflowRead, A::WorkflowRead, workflows::validate)
            .scoped(),
        Route::open(get(), "/api/v1/capabilities", system::capabilities),
        Route::open(get(), "/api/v1/openapi.json", system::openapi),
        Route::new(get(), "/api/v1/admin/sources", P::SourceRead, A::SourcesList, sources::list).scoped(),
        Route::new(post(), "/api/v1/admin/sources", P::SourceManage, A::SourceCreate, sources::add),
        Route::new(get(), "/api/v1/admin/sources/{name}", P::SourceRead, A::SourcesList, sources::get)
            .on(T::Source)
            .scoped(),
        Route::new(delete(), "/api/v1/admin/sources/{name}", P::SourceManage, A::SourceDelete, sources::remove)
            .on(T::Source),
        Route::new(post(), "/api/v1/admin/sources/{name}/enable", P::SourceManage, A::SourceUpdate, sources::enable)
            .on(T::Source)
            .scoped(),
        Route::new(post(), "/api/v1/admin/sources/{name}/disable", P::SourceManage, A::SourceUpdate, sources::disable)
            .on(T::Source)
            .scoped(),
        Route::new(
            put(),
            "/api/v1/admin/sources/{name}/secrets",
            P::SourceManage,
            A::SourceUpdate,
            sources::set_secrets,
        )
        .on(T::Source),
        Route::new(post(), "/api/v1/admin/sources/{name}/trigger", P::RunTrigger, A::SourceTrigger, sources::trigger)
            .on(T::Source)
            .scoped(),
        Route::new(get(), "/api/v1/admin/agent-tokens", P::FleetRead, A::AgentTokenList, tokens::list_agent),
        Route::new(
            post(),
            "/api/v1/admin/agent-tokens",
            P::AgentTokenManage,
            A::AgentTokenCreate,
            tokens::create_agent,
        ),
        Route::new(
            delete(),
            "/api/v1/admin/agent-tokens/{id}",
            P::AgentTokenManage,
            A::AgentTokenRevoke,
            tokens::revoke_agent,
        )
        .on(T::Token),
        Route::new(get(), "/api/v1/admin/tokens", P::TokenManage, A::TokenList, tokens::list_admin),
        Route::new(post(), "/api/v1/admin/tokens", P::TokenManage, A::TokenCreate, tokens::create_admin),
        Route::new(delete(), "/api/v1/admin/tokens/{id}", P::TokenManage, A::TokenRevoke, tokens::revoke_admin)
            .on(T::Token),
        Route::new(get(), "/api/v1/admin/agents", P::FleetRead, A::FleetRead, agents::list),
        Route::new(post(), "/api/v1/admin/agents/{id}/drain", P::FleetManage, A::AgentDrain, agents::drain)
            .on(T::Fleet),
        Route::new(get(), "/api/v1/admin/hosts", P::FleetRead, A::FleetRead, hosts::list),
        Route::new(post(), "/api/v1/admin/hosts/preview", P::FleetRead, A::FleetRead, hosts::preview),
        Route::new(get(), "/api/v1/admin/hosts/{id}", P::FleetRead, A::FleetRead, hosts::get).on(T::Fleet),
        Route::new(put(), "/api/v1/admin/hosts/{id}", P::HostManage, A::HostDeclare, hosts::declare).on(T::Fleet),
        Route::new(delete(), "/api/v1/admin/hosts/{id}", P::HostManage, A::HostRemove, hosts::remove).on(T::Fleet),
        Route::new(post(), "/api/v1/admin/hosts/{id}/reboot", P::HostManage, A::HostReboot, hosts::reboot).on(T::Fleet),
        Route::new(delete(), "/api/v1/admin/hosts/{id}/reboot", P::HostManage, A::HostReboot, hosts::cancel_reboot)
            .on(T::Fleet),
        Route::new(get(), "/api/v1/admin/event-log", P::EventLogRead, A::EventLogList, events::list).scoped(),
        Route::new(get(), "/api/v1/admin/event-log/{id}", P::EventLogRead, A::EventLogDetail, events::get)
            .on(T::EventLog)
            .scoped(),
        Route::new(
            get(),
            "/api/v1/admin/event-log/{id}/payload",
            P::EventLogReadPayload,
            A::EventLogPayload,
            events::payload,
        )
        .on(T::EventLogPayload)
        .scoped(),
        Route::new(get(), "/api/v1/admin/event-log/{id}/explain", P::EventLogRead, A::EventLogDetail, events::explain)
            .on(T::EventLog)
            .scoped(),
        Route::new(
            post(),
            "/api/v1/admin/event-log/{id}/redeliver",
            P::EventLogManage,
            A::EventLogRedeliver,
            events::redeliver,
        )
        .on(T::EventLog)
        .scoped(),
        Route::new(get(), "/api/v1/admin/event-dlq", P::EventDlqRead, A::EventDlqList, events::dlq_list).scoped(),
        Route::new(get(), "/api/v1/admin/event-dlq/count", P::EventDlqRead, A::EventDlqList, events::dlq_count)
            .scoped(),
        Route::new(
            post(),
            "/api/v1/admin/event-dlq/{id}/retry",
            P::EventDlqManage,
            A::EventDlqRetry,
            events::dlq_retry,
        )
        .on(T::EventDlq)
        .scoped(),
        Route::new(
            delete(),
            "/api/v1/admin/event-dlq/{id}",
            P::EventDlqManage,
            A::EventDlqDiscard,
            events::dlq_discard,
        )
        .on(T::EventDlq)
        .scoped(),
        Route::new(get(), "/api/v1/admin/queue", P::RunRead, A::QueueRead, queue::list).scoped(),
        Route::new(get(), "/api/v1/admin/queue/{id}", P::RunRead, A::QueueRead, queue::get).on(T::Job).scoped(),
        Route::new(get(), "/api/v1/admin/queue/{id}/explain", P::RunRead, A::QueueRead, queue::explain)
            .on(T::Job)
            .scoped(),
        Route::new(get(), "/api/v1/admin/drain", P::ClusterRead, A::Diagnostics, system::drain_state),
        Route::new(post(), "/api/v1/admin/drain", P::OrchestratorDrain, A::OrchestratorDrain, system::drain),
        Route::new(get(), "/api/v1/admin/status", P::ClusterRead, A::Diagnostics, system::status),
        Route::new(get(), "/api/v1/admin/diagnose", P::ClusterRead, A::Diagnostics, system::diagnose),
        Route::new(get(), "/api/v1/admin/access-log", P::AccessLogRead, A::AccessLogList, system::access_log),
        Route::new(get(), "/api/v1/admin/audit", P::AuditRead, A::AuditList, system::audit),
    ]);
    routes
}

/// The routes of artifacts and caches.
fn stored_table() -> Vec<Route> {
    let get = || Method::GET;
    vec![
        Route::new(get(), "/api/v1/runs/{id}/artifacts", P::RunRead, A::RunDetail, stored::artifacts)
            .on(T::Run)
            .scoped(),
        Route::new(get(), "/api/v1/runs/{id}/artifacts/{name}", P::RunRead, A::ArtifactDownload, stored::artifact)
            .on(T::Run)
            .scoped(),
        Route::new(get(), "/api/v1/admin/caches", P::OrgSettingsRead, A::CacheList, stored::totals),
        Route::new(get(), "/api/v1/admin/caches/entries", P::OrgSettingsRead, A::CacheList, stored::entries),
        Route::new(Method::DELETE, "/api/v1/admin/caches", P::MaintenancePurge, A::CacheDelete, stored::delete),
    ]
}

/// The routes of the internal bus.
fn bus_table() -> Vec<Route> {
    let (get, post) = (|| Method::GET, || Method::POST);
    vec![
        Route::new(get(), "/api/v1/admin/events", P::EventLogRead, A::EventList, bus::list).scoped(),
        Route::new(post(), "/api/v1/admin/events/emit", P::EventEmit, A::EventEmit, bus::emit).scoped(),
        Route::new(get(), "/api/v1/admin/events/{id}", P::EventLogRead, A::EventDetail, bus::get).on(T::Event).scoped(),
        Route::new(get(), "/api/v1/admin/events/{id}/payload", P::EventLogReadPayload, A::EventPayload, bus::payload)
            .on(T::Event)
            .scoped(),
        Route::new(post(), "/api/v1/admin/events/{id}/redeliver", P::EventLogManage, A::EventRedeliver, bus::redeliver)
            .on(T::Event)
            .scoped(),
        Route::new(get(), "/api/v1/admin/schedules", P::RegistrationRead, A::RegistrationList, bus::schedules).scoped(),
        Route::new(
            post(),
            "/api/v1/admin/schedules/{registration}/trigger",
            P::ScheduledJobTrigger,
            A::ScheduleTrigger,
            bus::trigger_schedule,
        )
        .on(T::Registration)
        .scoped(),
        Route::new(get(), "/api/v1/admin/registrations", P::RegistrationRead, A::RegistrationList, bus::registrations)
            .scoped(),
        Route::new(
            Method::PATCH,
            "/api/v1/admin/registrations/{id}",
            P::RegistrationManage,
            A::RegistrationUpdate,
            bus::change_registration,
        )
        .on(T::Registration)
        .scoped(),
        Route::new(get(), "/api/v1/admin/event-trust", P::OrgSettingsRead, A::EventTrustList, bus::trust),
        Route::new(post(), "/api/v1/admin/event-trust", P::OrgSettingsManage, A::EventTrustAdd, bus::add_trust),
        Route::new(post(), "/api/v1/admin/event-trust/test", P::OrgSettingsRead, A::EventTrustList, bus::test_trust),
        Route::new(
            Method::DELETE,
            "/api/v1/admin/event-trust/{id}",
            P::OrgSettingsManage,
            A::EventTrustRemove,
            bus::remove_trust,
        )
        .on(T::OrgSettings),
    ]
}
