//! The handlers by resource, and the table of all routes.

pub(super) mod agents;
pub(super) mod events;
pub(super) mod queue;
pub(super) mod runs;
pub(super) mod sources;
pub(super) mod system;
pub(super) mod tokens;
pub(super) mod workflows;

use http::Method;
use kici_access::Permission as P;

use super::{Route, sse};

/// Every route under `/api/v1`.
pub fn table() -> Vec<Route> {
    let (get, post, delete) = (|| Method::GET, || Method::POST, || Method::DELETE);
    vec![
        Route::new(get(), "/api/v1/runs", P::RunRead, "runs.list", runs::list).scoped(),
        Route::new(post(), "/api/v1/runs", P::RunTrigger, "run.trigger", runs::trigger).scoped(),
        Route::new(get(), "/api/v1/runs/{id}", P::RunRead, "run.detail", runs::get).on("run").scoped(),
        Route::new(get(), "/api/v1/runs/{id}/jobs", P::RunRead, "run.detail", runs::jobs).on("run").scoped(),
        Route::new(get(), "/api/v1/runs/{id}/steps", P::RunRead, "run.detail", runs::steps).on("run").scoped(),
        Route::new(
            get(),
            "/api/v1/runs/{id}/jobs/{job}/steps/{step}/logs",
            P::RunRead,
            "step.logs",
            runs::step_logs,
        )
        .on("run")
        .scoped(),
        Route::new(get(), "/api/v1/runs/{id}/logs", P::RunRead, "step.logs", runs::logs).on("run").scoped(),
        Route::new(post(), "/api/v1/runs/{id}/logs/follow", P::RunRead, "step.logs", runs::follow).on("run").scoped(),
        Route::new(post(), "/api/v1/runs/{id}/cancel", P::RunCancel, "run.cancel", runs::cancel).on("run").scoped(),
        Route::new(post(), "/api/v1/runs/{id}/rerun", P::RunRerun, "run.rerun", runs::rerun).on("run").scoped(),
        Route::new(get(), "/api/v1/stream", P::RunRead, "stream.open", sse::stream).scoped(),
        Route::new(post(), "/api/v1/workflows/validate", P::WorkflowRead, "workflow.validate", workflows::validate)
            .scoped(),
        Route::open(get(), "/api/v1/capabilities", "capabilities", system::capabilities),
        Route::open(get(), "/api/v1/openapi.json", "openapi", system::openapi),
        Route::new(get(), "/api/v1/admin/sources", P::SourceRead, "sources.list", sources::list).scoped(),
        Route::new(post(), "/api/v1/admin/sources", P::SourceManage, "source.add", sources::add),
        Route::new(get(), "/api/v1/admin/sources/{name}", P::SourceRead, "source.detail", sources::get)
            .on("source")
            .scoped(),
        Route::new(delete(), "/api/v1/admin/sources/{name}", P::SourceManage, "source.remove", sources::remove)
            .on("source"),
        Route::new(post(), "/api/v1/admin/sources/{name}/enable", P::SourceManage, "source.enable", sources::enable)
            .on("source")
            .scoped(),
        Route::new(post(), "/api/v1/admin/sources/{name}/disable", P::SourceManage, "source.disable", sources::disable)
            .on("source")
            .scoped(),
        Route::new(post(), "/api/v1/admin/sources/{name}/trigger", P::RunTrigger, "source.trigger", sources::trigger)
            .on("source")
            .scoped(),
        Route::new(get(), "/api/v1/admin/agent-tokens", P::FleetRead, "agent_token.list", tokens::list_agent),
        Route::new(post(), "/api/v1/admin/agent-tokens", P::AgentTokenManage, "agent_token.create", tokens::create_agent),
        Route::new(
            delete(),
            "/api/v1/admin/agent-tokens/{id}",
            P::AgentTokenManage,
            "agent_token.revoke",
            tokens::revoke_agent,
        )
        .on("token"),
        Route::new(get(), "/api/v1/admin/tokens", P::TokenManage, "token.list", tokens::list_admin),
        Route::new(post(), "/api/v1/admin/tokens", P::TokenManage, "token.create", tokens::create_admin),
        Route::new(delete(), "/api/v1/admin/tokens/{id}", P::TokenManage, "token.revoke", tokens::revoke_admin)
            .on("token"),
        Route::new(get(), "/api/v1/admin/agents", P::FleetRead, "fleet.read", agents::list),
        Route::new(post(), "/api/v1/admin/agents/{id}/drain", P::FleetManage, "agent.drain", agents::drain).on("agent"),
        Route::new(get(), "/api/v1/admin/event-log", P::EventLogRead, "event_log.list", events::list).scoped(),
        Route::new(get(), "/api/v1/admin/event-log/{id}", P::EventLogRead, "event_log.detail", events::get)
            .on("event_log")
            .scoped(),
        Route::new(
            get(),
            "/api/v1/admin/event-log/{id}/payload",
            P::EventLogReadPayload,
            "event_log.payload",
            events::payload,
        )
        .on("event_log_payload")
        .scoped(),
        Route::new(get(), "/api/v1/admin/event-log/{id}/explain", P::EventLogRead, "event_log.explain", events::explain)
            .on("event_log")
            .scoped(),
        Route::new(
            post(),
            "/api/v1/admin/event-log/{id}/redeliver",
            P::EventLogManage,
            "event_log.redeliver",
            events::redeliver,
        )
        .on("event_log")
        .scoped(),
        Route::new(get(), "/api/v1/admin/event-dlq", P::EventDlqRead, "event_dlq.list", events::dlq_list).scoped(),
        Route::new(get(), "/api/v1/admin/event-dlq/count", P::EventDlqRead, "event_dlq.count", events::dlq_count)
            .scoped(),
        Route::new(post(), "/api/v1/admin/event-dlq/{id}/retry", P::EventDlqManage, "event_dlq.retry", events::dlq_retry)
            .on("event_dlq")
            .scoped(),
        Route::new(delete(), "/api/v1/admin/event-dlq/{id}", P::EventDlqManage, "event_dlq.discard", events::dlq_discard)
            .on("event_dlq")
            .scoped(),
        Route::new(get(), "/api/v1/admin/queue", P::RunRead, "queue.list", queue::list).scoped(),
        Route::new(get(), "/api/v1/admin/queue/{id}", P::RunRead, "queue.detail", queue::get).on("job").scoped(),
        Route::new(get(), "/api/v1/admin/queue/{id}/explain", P::RunRead, "queue.explain", queue::explain)
            .on("job")
            .scoped(),
        Route::new(get(), "/api/v1/admin/drain", P::ClusterRead, "orchestrator.drain_state", system::drain_state),
        Route::new(post(), "/api/v1/admin/drain", P::OrchestratorDrain, "orchestrator.drain", system::drain),
        Route::new(get(), "/api/v1/admin/diagnose", P::ClusterRead, "diagnostics.run", system::diagnose),
        Route::new(get(), "/api/v1/admin/access-log", P::AccessLogRead, "access_log.list", system::access_log),
    ]
}
