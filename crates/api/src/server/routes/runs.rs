//! Runs, their jobs, steps and logs.

use axum::Json;
use axum::body::Body as HttpBody;
use axum::extract::{Path, State};
use axum::response::{IntoResponse, Response};
use http::{HeaderName, StatusCode, header};
use kici_engine::ids::{JobId, RunId};
use serde::Deserialize;

use crate::dto::logs::{DEFAULT_LINES, FollowRequest, LogFormat, LogQuery, LogRange, MAX_LINES};
use crate::dto::runs::{
    CancelAccepted, CancelRun, JobView, RerunRun, RunAccepted, RunDetail, RunFilter, RunView, StepView, TriggerRun,
};
use crate::page::{Page, PageQuery};
use crate::ports::{Answer, Caller, JobRef, LogRequest, Ports, StepRef};
use crate::problem::{Code, FieldError, Problem};
use crate::server::auth::Session;
use crate::server::follow;
use crate::server::request::{Body, IdempotencyKey, Listing, PathOf, QueryOf};
use crate::server::{ApiState, streams};

/// Runs, newest first.
#[utoipa::path(get, path = "/api/v1/runs", tag = "runs", params(RunFilter, PageQuery),
    responses((status = 200, body = Page<RunView>)))]
pub async fn list(
    State(ports): State<Ports>,
    caller: Caller,
    listing: Listing<RunFilter>,
) -> Answer<Json<Page<RunView>>> {
    listing.filter.statuses().map_err(|error| {
        let text = error.to_string();
        Problem::new(Code::RequestInvalid, format!("status: {text}")).with_errors(vec![FieldError::new("status", text)])
    })?;
    let slice = ports.runs.list(&caller, &listing.filter, listing.page).await?;
    Ok(Json(listing.finish(slice)))
}

/// One run with its jobs.
#[utoipa::path(get, path = "/api/v1/runs/{id}", tag = "runs", params(("id" = String, Path)),
    responses((status = 200, body = RunDetail)))]
pub async fn get(State(ports): State<Ports>, caller: Caller, PathOf(run): PathOf<RunId>) -> Answer<Json<RunDetail>> {
    ports.runs.get(&caller, run).await.map(Json)
}

/// The jobs of a run.
#[utoipa::path(get, path = "/api/v1/runs/{id}/jobs", tag = "runs", params(("id" = String, Path)),
    responses((status = 200, body = Vec<JobView>)))]
pub async fn jobs(
    State(ports): State<Ports>,
    caller: Caller,
    PathOf(run): PathOf<RunId>,
) -> Answer<Json<Vec<JobView>>> {
    ports.runs.jobs(&caller, run).await.map(Json)
}

/// Which job's steps.
#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct StepsQuery {
    job: Option<String>,
    epoch: Option<u32>,
}

/// The steps of a run's jobs at their latest hand-over.
#[utoipa::path(get, path = "/api/v1/runs/{id}/steps", tag = "runs",
    params(("id" = String, Path), ("job" = Option<String>, Query, description = "Only this job, by id or name."),
        ("epoch" = Option<u32>, Query, description = "An earlier hand-over of the job, which must be named then.")),
    responses((status = 200, body = Vec<StepView>)))]
pub async fn steps(
    State(ports): State<Ports>,
    caller: Caller,
    PathOf(run): PathOf<RunId>,
    QueryOf(query): QueryOf<StepsQuery>,
) -> Answer<Json<Vec<StepView>>> {
    let job = query.job.as_deref().map(job_ref);
    if query.epoch.is_some() && job.is_none() {
        return Err(Problem::rejected("epoch", "it counts the hand-overs of one job; name it as `job`"));
    }
    ports.runs.steps(&caller, run, job.as_ref(), query.epoch).await.map(Json)
}

/// A job is named by its id or its name in the run.
fn job_ref(text: &str) -> JobRef {
    text.parse::<JobId>().map_or_else(|_| JobRef::Name(text.to_owned()), JobRef::Id)
}

/// A step is named by its ordinal or its key.
fn step_ref(text: &str) -> StepRef {
    text.parse::<u32>().map_or_else(|_| StepRef::Key(text.to_owned()), StepRef::Ordinal)
}

/// A range of one step's log. `x-next-seq` and `x-log-complete` say how to go on.
#[utoipa::path(get, path = "/api/v1/runs/{id}/jobs/{job}/steps/{step}/logs", tag = "runs",
    params(("id" = String, Path), ("job" = String, Path, description = "Id or name."),
        ("step" = String, Path, description = "Ordinal or key."), LogQuery),
    responses((status = 200, body = LogRange)))]
pub async fn step_logs(
    State(ports): State<Ports>,
    caller: Caller,
    Path((run, job, step)): Path<(String, String, String)>,
    QueryOf(query): QueryOf<LogQuery>,
) -> Answer<Response> {
    let run = run.parse::<RunId>().map_err(|error| Problem::new(Code::NotFound, error.to_string()))?;
    let limit = query.limit.unwrap_or(DEFAULT_LINES);
    if !(1..=MAX_LINES).contains(&limit) {
        let message = format!("must be a number from 1 to {MAX_LINES}");
        let errors = vec![FieldError::new("limit", &message)];
        return Err(Problem::new(Code::RequestInvalid, format!("limit: {message}")).with_errors(errors));
    }
    let request = LogRequest {
        run,
        job: job_ref(&job),
        epoch: query.epoch,
        step: step_ref(&step),
        from_seq: query.from_seq,
        limit,
    };
    let range = ports.runs.logs(&caller, &request).await?;
    let headers = [
        (HeaderName::from_static("x-next-seq"), range.next_seq.to_string()),
        (HeaderName::from_static("x-log-complete"), range.complete.to_string()),
    ];
    Ok(match query.format.unwrap_or(LogFormat::Json) {
        LogFormat::Json => (headers, Json(range)).into_response(),
        LogFormat::Text => {
            let text: String = range.lines.iter().flat_map(|line| [line.text.as_str(), "\n"]).collect();
            (headers, [(header::CONTENT_TYPE, "text/plain; charset=utf-8")], text).into_response()
        }
    })
}

/// What of a run's logs.
#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LogsQuery {
    job: Option<String>,
    step: Option<String>,
    follow: bool,
}

/// The logs of all jobs of a run, merged, as JSON lines.
#[utoipa::path(get, path = "/api/v1/runs/{id}/logs", tag = "runs",
    params(("id" = String, Path), ("job" = Option<String>, Query, description = "Only this job, by id or name."),
        ("step" = Option<String>, Query, description = "Only this step, by ordinal, key or name."),
        ("follow" = Option<bool>, Query, description = "Stay until the run has ended.")),
    responses((status = 200, body = crate::dto::logs::FollowEvent, content_type = "application/x-ndjson")))]
pub async fn logs(
    State(state): State<ApiState>,
    caller: Caller,
    session: Session,
    PathOf(run): PathOf<RunId>,
    QueryOf(query): QueryOf<LogsQuery>,
) -> Answer<Response> {
    let request = FollowRequest { job: query.job, step: query.step, follow: query.follow, ..FollowRequest::default() };
    answer_follow(&state, caller, session, run, request).await
}

/// Like the merged logs, going on after lines that the caller has.
#[utoipa::path(post, path = "/api/v1/runs/{id}/logs/follow", tag = "runs", params(("id" = String, Path)),
    request_body = FollowRequest,
    responses((status = 200, body = crate::dto::logs::FollowEvent, content_type = "application/x-ndjson")))]
pub async fn follow(
    State(state): State<ApiState>,
    caller: Caller,
    session: Session,
    PathOf(run): PathOf<RunId>,
    Body(request): Body<FollowRequest>,
) -> Answer<Response> {
    answer_follow(&state, caller, session, run, request).await
}

async fn answer_follow(
    state: &ApiState,
    caller: Caller,
    session: Session,
    run: RunId,
    request: FollowRequest,
) -> Answer<Response> {
    let slot = state.slots.take(&caller)?;
    let follower = follow::Follower::open(state.ports.clone(), caller, session, run, request).await?;
    let body = HttpBody::from_stream(streams::json_lines(follower, slot));
    Ok(([(header::CONTENT_TYPE, "application/x-ndjson"), (header::CACHE_CONTROL, "no-store")], body).into_response())
}

/// Cancels a run.
#[utoipa::path(post, path = "/api/v1/runs/{id}/cancel", tag = "runs", params(("id" = String, Path)),
    request_body = CancelRun, responses((status = 202, body = CancelAccepted)))]
pub async fn cancel(
    State(ports): State<Ports>,
    caller: Caller,
    PathOf(run): PathOf<RunId>,
    Body(request): Body<CancelRun>,
) -> Answer<(StatusCode, Json<CancelAccepted>)> {
    Ok((StatusCode::ACCEPTED, Json(ports.runs.cancel(&caller, run, request).await?)))
}

/// Repeats a run with the same commit, workflow and inputs.
#[utoipa::path(post, path = "/api/v1/runs/{id}/rerun", tag = "runs",
    params(("id" = String, Path), ("idempotency-key" = Option<String>, Header)),
    request_body = RerunRun, responses((status = 202, body = RunAccepted)))]
pub async fn rerun(
    State(ports): State<Ports>,
    caller: Caller,
    PathOf(run): PathOf<RunId>,
    IdempotencyKey(key): IdempotencyKey,
    Body(request): Body<RerunRun>,
) -> Answer<(StatusCode, Json<RunAccepted>)> {
    Ok((StatusCode::ACCEPTED, Json(ports.runs.rerun(&caller, run, request, key.as_deref()).await?)))
}

/// Starts a workflow by hand.
#[utoipa::path(post, path = "/api/v1/runs", tag = "runs", params(("idempotency-key" = Option<String>, Header)),
    request_body = TriggerRun, responses((status = 202, body = RunAccepted)))]
pub async fn trigger(
    State(ports): State<Ports>,
    caller: Caller,
    IdempotencyKey(key): IdempotencyKey,
    Body(request): Body<TriggerRun>,
) -> Answer<(StatusCode, Json<RunAccepted>)> {
    Ok((StatusCode::ACCEPTED, Json(ports.runs.trigger(&caller, &request, key.as_deref()).await?)))
}
