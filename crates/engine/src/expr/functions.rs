//! The functions that expressions may call besides CEL's own.

use std::fmt;
use std::sync::Arc;

use cel::extractors::{Arguments, This};
use cel::{ExecutionError, Value};
use globset::GlobBuilder;
use serde_json::Value as Json;

use super::{MAX_INPUT_BYTES, environment, value};

/// How a job is doing when a step's condition is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// No step failed.
    Success,
    /// A step failed.
    Failure,
    /// The job is being cancelled.
    Cancelled,
}

/// The digest (hex) of the files that some globs match, or why there is none. The agent supplies it: only it has files.
pub type HashFiles = Arc<dyn Fn(&[String]) -> Result<String, String> + Send + Sync>;

/// What differs between the places that evaluate. The default is the orchestrator: no outcome, no files.
#[derive(Clone, Default)]
pub struct Functions {
    /// Answers `success()`, `failure()`, `cancelled()` and `always()`; they do not exist without it.
    pub outcome: Option<Outcome>,
    /// Answers `hash_files(…)`; it does not exist without it.
    pub hash_files: Option<HashFiles>,
}

impl fmt::Debug for Functions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Functions")
            .field("outcome", &self.outcome)
            .field("hash_files", &self.hash_files.is_some())
            .finish()
    }
}

/// Functions that ask how the job is doing. Agent only.
pub(super) const OUTCOME: [&str; 4] = ["success", "failure", "cancelled", "always"];
/// Functions that need the agent.
pub(super) const AGENT_ONLY: [&str; 5] = ["success", "failure", "cancelled", "always", "hash_files"];
/// Every function that exists, without the agent's.
pub(super) const KNOWN: [&str; 31] = [
    "all",
    "bool",
    "bytes",
    "contains",
    "double",
    "duration",
    "dyn",
    "endsWith",
    "exists",
    "exists_one",
    "filter",
    "from_json",
    "getDate",
    "getDayOfMonth",
    "getDayOfWeek",
    "getDayOfYear",
    "getFullYear",
    "getHours",
    "getMilliseconds",
    "getMinutes",
    "getMonth",
    "getSeconds",
    "glob",
    "has",
    "int",
    "join",
    "map",
    "matches",
    "size",
    "startsWith",
    "string",
];
/// Further ones; a second list keeps the first in one shape.
pub(super) const KNOWN_MORE: [&str; 4] = ["timestamp", "to_json", "type", "uint"];

/// An empty scope with all functions.
pub(super) fn scope(functions: &Functions) -> cel::Context<'static, 'static> {
    let mut scope = cel::Context::with_env(environment());
    let added = [
        scope.add_function("glob", glob),
        scope.add_function("from_json", from_json),
        scope.add_function("to_json", to_json),
        scope.add_function("join", join),
    ];
    debug_assert!(added.iter().all(Result::is_ok), "the standard library has none of these names");
    if let Some(outcome) = functions.outcome {
        let answers = [
            ("success", outcome == Outcome::Success),
            ("failure", outcome == Outcome::Failure),
            ("cancelled", outcome == Outcome::Cancelled),
            ("always", true),
        ];
        for (name, answer) in answers {
            let added = scope.add_function(name, move || answer);
            debug_assert!(added.is_ok(), "the standard library has none of these names");
        }
    }
    if let Some(hash) = functions.hash_files.clone() {
        let added = scope.add_function("hash_files", move |Arguments(args): Arguments| hash_files(&hash, &args));
        debug_assert!(added.is_ok(), "the standard library has none of these names");
    }
    scope
}

fn fault(function: &str, message: impl ToString) -> ExecutionError {
    ExecutionError::function_error(function, message)
}

/// The globs of `crate::pattern`: `*` and `?` stop at `/`.
fn glob(This(text): This<Arc<String>>, pattern: Arc<String>) -> Result<bool, ExecutionError> {
    let glob = GlobBuilder::new(&pattern)
        .literal_separator(true)
        .backslash_escape(true)
        .build()
        .map_err(|error| fault("glob", error))?;
    Ok(glob.compile_matcher().is_match(text.as_str()))
}

fn from_json(This(text): This<Arc<String>>) -> Result<Value, ExecutionError> {
    if text.len() > MAX_INPUT_BYTES {
        return Err(fault("from_json", "the text is larger than 1 MiB"));
    }
    let json: Json = serde_json::from_str(&text).map_err(|error| fault("from_json", error))?;
    Ok(value::from_json(&json))
}

fn to_json(This(value): This<Value>) -> Result<Arc<String>, ExecutionError> {
    let json = value::to_json(&value, MAX_INPUT_BYTES).map_err(|message| fault("to_json", message))?;
    Ok(Arc::new(json.to_string()))
}

fn join(This(list): This<Value>, separator: Arc<String>) -> Result<Arc<String>, ExecutionError> {
    let Value::List(items) = list else { return Err(fault("join", "expected a list and a separator")) };
    let mut text = String::new();
    for (index, item) in items.iter().enumerate() {
        if index > 0 {
            text.push_str(&separator);
        }
        let json = value::to_json(item, MAX_INPUT_BYTES).map_err(|message| fault("join", message))?;
        text.push_str(&value::to_text(&json));
        if text.len() > MAX_INPUT_BYTES {
            return Err(fault("join", "the text is larger than 1 MiB"));
        }
    }
    Ok(Arc::new(text))
}

fn hash_files(hash: &HashFiles, args: &[Value]) -> Result<Arc<String>, ExecutionError> {
    let globs: Option<Vec<String>> = args
        .iter()
        .map(|arg| match arg {
            Value::String(text) => Some(text.to_string()),
            _ => None,
        })
        .collect();
    match globs {
        Some(globs) if !globs.is_empty() => hash(&globs).map(Arc::new).map_err(|message| fault("hash_files", message)),
        _ => Err(fault("hash_files", "expected one or more globs")),
    }
}
