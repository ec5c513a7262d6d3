//! The OpenAPI document: collected from the handlers, completed from the table of routes.

use std::sync::LazyLock;

use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityScheme};
use utoipa::openapi::{Content, OpenApi, PathItem, Ref, ResponseBuilder, path::Operation};
use utoipa::{OpenApi as _, ToSchema};

use super::routes::{agents, bus, events, hosts, queue, runs, sources, stored, system, tokens, workflows};
use super::{Route, sse, table};
use crate::problem::Document as Problem;

#[derive(utoipa::OpenApi)]
#[openapi(
    info(title = "KiCI orchestrator", description = "REST interface of a KiCI orchestrator."),
    paths(
        runs::list,
        runs::trigger,
        runs::get,
        runs::jobs,
        runs::steps,
        runs::step_logs,
        runs::logs,
        runs::follow,
        runs::cancel,
        runs::rerun,
        stored::artifacts,
        stored::artifact,
        stored::totals,
        stored::entries,
        stored::delete,
        sse::stream,
        workflows::validate,
        system::capabilities,
        system::openapi,
        sources::list,
        sources::add,
        sources::get,
        sources::remove,
        sources::enable,
        sources::disable,
        sources::set_secrets,
        sources::trigger,
        tokens::list_agent,
        tokens::create_agent,
        tokens::revoke_agent,
        tokens::list_admin,
        tokens::create_admin,
        tokens::revoke_admin,
        agents::list,
        agents::drain,
        hosts::list,
        hosts::get,
        hosts::declare,
        hosts::remove,
        hosts::preview,
        hosts::reboot,
        hosts::cancel_reboot,
        events::list,
        events::get,
        events::payload,
        events::explain,
        events::redeliver,
        events::dlq_list,
        events::dlq_count,
        events::dlq_retry,
        events::dlq_discard,
        bus::list,
        bus::get,
        bus::payload,
        bus::emit,
        bus::redeliver,
        bus::schedules,
        bus::trigger_schedule,
        bus::registrations,
        bus::change_registration,
        bus::trust,
        bus::add_trust,
        bus::remove_trust,
        bus::test_trust,
        queue::list,
        queue::get,
        queue::explain,
        system::drain_state,
        system::drain,
        system::status,
        system::diagnose,
        system::access_log,
        system::audit,
        system::health,
        system::ready,
        system::metrics
    ),
    components(schemas(Problem, crate::dto::stream::Change))
)]
struct Api;

/// The document as JSON text.
pub fn document() -> &'static str {
    static TEXT: LazyLock<String> = LazyLock::new(|| {
        // Plain maps of text: nothing in it can fail to serialise.
        let mut text = build().to_pretty_json().unwrap_or_default();
        text.push('\n');
        text
    });
    &TEXT
}

fn build() -> OpenApi {
    let mut document = Api::openapi();
    if let Some(components) = &mut document.components {
        let bearer = HttpBuilder::new().scheme(HttpAuthScheme::Bearer).bearer_format("kici_admin_…").build();
        components.add_security_scheme("bearer", SecurityScheme::Http(bearer));
    }
    for route in table() {
        if let Some(operation) = document.paths.paths.get_mut(route.path).and_then(|item| operation(item, &route)) {
            complete(operation, &route);
        }
    }
    document
}

fn operation<'a>(item: &'a mut PathItem, route: &Route) -> Option<&'a mut Operation> {
    match route.method.as_str() {
        "GET" => item.get.as_mut(),
        "POST" => item.post.as_mut(),
        "PUT" => item.put.as_mut(),
        "PATCH" => item.patch.as_mut(),
        "DELETE" => item.delete.as_mut(),
        _ => None,
    }
}

/// Adds what all routes have in common: the token, the permission, and the problem document.
fn complete(operation: &mut Operation, route: &Route) {
    let problem = ResponseBuilder::new()
        .description("A problem document (RFC 9457)")
        .content("application/problem+json", Content::new(Some(Ref::from_schema_name(Problem::name()))))
        .build();
    operation.responses.responses.insert("default".to_owned(), problem.into());
    // Handlers of different resources share names; the action is not unique either, so the path is used.
    operation.operation_id = Some(operation_id(route));
    if let Some((permission, _)) = route.access {
        operation.security = Some(vec![utoipa::openapi::SecurityRequirement::new("bearer", Vec::<String>::new())]);
        let note = format!("Needs `{permission}`.");
        operation.description = Some(match operation.description.take() {
            Some(text) if !text.is_empty() => format!("{text}\n\n{note}"),
            _ => note,
        });
    }
}

fn operation_id(route: &Route) -> String {
    let path = route.path.trim_start_matches("/api/v1/").replace(['{', '}'], "");
    format!("{}_{}", route.method.as_str().to_lowercase(), path.replace(['/', '-', '.'], "_"))
}
