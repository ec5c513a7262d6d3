//! Checking workflow files. Pure: nothing is stored or run, so no port is needed.

use axum::Json;
use kici_engine::compile::compile_set;
use kici_engine::diagnostic::to_json;

use crate::dto::workflows::{ValidateWorkflows, ValidationReport};
use crate::ports::Answer;
use crate::problem::Problem;
use crate::server::request::Body;

const MAX_FILES: usize = 100;

/// Compiles workflow files together and reports what is wrong with them.
#[utoipa::path(post, path = "/api/v1/workflows/validate", tag = "workflows", request_body = ValidateWorkflows,
    responses((status = 200, body = ValidationReport)))]
pub async fn validate(Body(request): Body<ValidateWorkflows>) -> Answer<Json<ValidationReport>> {
    if request.files.len() > MAX_FILES {
        return Err(Problem::rejected("files", format!("holds more than {MAX_FILES} files; check them in parts")));
    }
    let files: Vec<_> = request.files.into_iter().map(|file| (file.path, file.content)).collect();
    // The compiler is bounded, but a full set may take longer than a task should hold its thread.
    let set = tokio::task::spawn_blocking(move || compile_set(&files)).await.map_err(|_| Problem::internal())?;
    let compiled = || set.files.iter().map(|(_, compiled)| compiled);
    Ok(Json(ValidationReport {
        valid: !compiled().any(|file| file.has_errors()),
        workflows: compiled().flat_map(|file| &file.workflows).map(|workflow| workflow.name.clone()).collect(),
        diagnostics: compiled().flat_map(|file| &file.diagnostics).map(to_json).collect(),
    }))
}
