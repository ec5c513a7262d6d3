//! Expressions: the one place that knows the CEL engine.
//!
//! `if` keys hold a bare expression, other keys hold text with `${{ … }}`. Neither does I/O. The engine has no cost meter
//! and may recurse or panic on hostile text, so everything is bounded before it runs: source size, bracket depth, nodes,
//! nesting of comprehensions, size of what the expression reads, and a bound on the work of its loops.

mod check;
mod functions;
mod limits;
mod reference;
mod template;
mod value;

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use cel::Program;
use serde::{Deserialize, Serialize};
use serde_json::Value as Json;

pub use check::{Finding, FindingKind, Scope, Shape, check_expr, check_template};
pub use functions::{Functions, HashFiles, Outcome};
pub use reference::{Call, Reference};
pub use template::{Part, Template};

/// Longest source of one expression, in bytes.
pub const MAX_SOURCE_BYTES: usize = 4096;
/// Deepest nesting of brackets, prefix operators and conditionals.
pub const MAX_DEPTH: usize = 32;
/// Most operator and selector characters of one expression: a chain of them nests as deeply as it is long.
pub const MAX_OPERATORS: usize = 250;
/// Deepest tree of one expression: the evaluator recurses, and a stack that overflows ends the process.
pub const MAX_LEVELS: usize = 64;
/// Most nodes of one expression after its macros are expanded.
pub const MAX_NODES: usize = 500;
/// Deepest nesting of `all`, `exists`, `exists_one`, `map` and `filter`.
pub const MAX_COMPREHENSIONS: usize = 2;
/// Most bytes of JSON that one expression may read, and the longest text that it may yield.
pub const MAX_INPUT_BYTES: usize = 1 << 20;

/// Why an expression has no value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ExprError {
    /// It is not CEL.
    #[error("expression is not valid: {message}")]
    Syntax {
        /// What the parser expected.
        message: String,
        /// Byte in the source where it stopped.
        offset: usize,
    },
    /// It is larger than what is evaluated.
    #[error("expression is too large: {0}")]
    Limit(String),
    /// It failed on these values.
    #[error("expression `{source_text}` failed: {message}")]
    Eval {
        /// The expression.
        source_text: String,
        /// What went wrong.
        message: String,
    },
    /// A condition that is not a condition.
    #[error("expression `{source_text}` must yield true or false, it yields {found}")]
    NotBool {
        /// The expression.
        source_text: String,
        /// The type it yields.
        found: &'static str,
    },
}

/// The variables that expressions see, by name: `event`, `repo`, `ref`, `sha`, `branch`, `inputs`, `vars`, `matrix`,
/// `needs`, `run`, and on the agent `agent`, `env`, `steps`, `job`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Context(BTreeMap<String, Json>);

impl Context {
    /// No variables.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets a variable, and replaces an older value.
    pub fn set(&mut self, name: impl Into<String>, value: impl Into<Json>) -> &mut Self {
        self.0.insert(name.into(), value.into());
        self
    }

    /// [`Context::set`] for chains.
    #[must_use]
    pub fn with(mut self, name: impl Into<String>, value: impl Into<Json>) -> Self {
        self.set(name, value);
        self
    }

    /// A variable.
    pub fn get(&self, name: &str) -> Option<&Json> {
        self.0.get(name)
    }

    /// A variable, to change in place.
    pub fn get_mut(&mut self, name: &str) -> Option<&mut Json> {
        self.0.get_mut(name)
    }

    /// The variables.
    pub fn into_inner(self) -> BTreeMap<String, Json> {
        self.0
    }
}

impl From<BTreeMap<String, Json>> for Context {
    fn from(map: BTreeMap<String, Json>) -> Self {
        Self(map)
    }
}

/// What is evaluated.
#[derive(Debug)]
enum Body {
    /// `a.b.c`, the most frequent form by far: looked up without the engine, whose parser costs more than all the rest.
    Path,
    /// Anything else.
    Program(Box<Program>),
}

/// A parsed expression.
#[derive(Debug)]
pub struct Expr {
    source: String,
    body: Body,
    facts: limits::Facts,
}

impl Expr {
    /// Parses one expression and checks the limits that do not depend on values.
    pub fn parse(source: &str) -> Result<Self, ExprError> {
        let depth = limits::prescan(source)?;
        if let Some(facts) = limits::Facts::of_path(source) {
            return Ok(Self { source: source.to_owned(), body: Body::Path, facts });
        }
        let parsed = guarded(depth > DEEP_BRACKETS, || Program::compile(source))
            .ok_or_else(|| ExprError::Limit("the parser gave up".to_owned()))?;
        let program = parsed.map_err(|errors| value::syntax_error(source, &errors))?;
        let facts = limits::Facts::of(source, &program)?;
        Ok(Self { source: source.to_owned(), body: Body::Program(Box::new(program)), facts })
    }

    /// The text it was parsed from.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// The variables that it reads, in source order.
    pub fn references(&self) -> &[Reference] {
        &self.facts.references
    }

    /// The functions that it calls, without operators.
    pub fn calls(&self) -> &[Call] {
        &self.facts.calls
    }

    /// Whether it calls `success`, `failure`, `cancelled` or `always`.
    pub fn asks_outcome(&self) -> bool {
        self.facts.calls.iter().any(|call| functions::OUTCOME.contains(&call.name.as_str()))
    }

    /// Its value, as JSON.
    pub fn eval_json(&self, context: &Context, functions: &Functions) -> Result<Json, ExprError> {
        let program = match &self.body {
            Body::Path => return self.look_up(context),
            Body::Program(program) => program,
        };
        let inputs = value::project(&self.facts, context)?;
        let value = guarded(self.facts.levels > DEEP_LEVELS, || {
            let mut scope = functions::scope(functions);
            for (name, value) in inputs {
                scope.add_variable_from_value(name, value);
            }
            program.execute(&scope)
        })
        .ok_or_else(|| self.failed("the evaluator gave up"))?
        .map_err(|error| self.failed(&value::describe(&error)))?;
        value::to_json(&value, MAX_INPUT_BYTES).map_err(|message| self.failed(&message))
    }

    /// Its value, which must be true or false.
    pub fn eval_bool(&self, context: &Context, functions: &Functions) -> Result<bool, ExprError> {
        match self.eval_json(context, functions)? {
            Json::Bool(value) => Ok(value),
            other => Err(ExprError::NotBool { source_text: self.source.clone(), found: value::type_name(&other) }),
        }
    }

    fn look_up(&self, context: &Context) -> Result<Json, ExprError> {
        let Some(reference) = self.facts.references.first() else { return Err(self.failed("it names nothing")) };
        let root = &reference.root;
        let mut at = context.get(root).ok_or_else(|| self.failed(&format!("`{root}` is not available here")))?;
        for key in &reference.path {
            at = match at {
                Json::Object(fields) => fields
                    .get(key)
                    .ok_or_else(|| self.failed(&format!("there is no `{key}`; ask with has(…) first")))?,
                other => return Err(self.failed(&format!("{} has no `{key}`", value::type_name(other)))),
            };
        }
        value::within_limit(at, MAX_INPUT_BYTES).map_err(|message| self.failed(&message))?;
        Ok(at.clone())
    }

    fn failed(&self, message: &str) -> ExprError {
        ExprError::Eval { source_text: self.source.clone(), message: message.to_owned() }
    }
}

/// Parses and evaluates a condition.
pub fn eval_bool(source: &str, context: &Context, functions: &Functions) -> Result<bool, ExprError> {
    Expr::parse(source)?.eval_bool(context, functions)
}

/// Parses and evaluates an expression.
pub fn eval_json(source: &str, context: &Context, functions: &Functions) -> Result<Json, ExprError> {
    Expr::parse(source)?.eval_json(context, functions)
}

/// Renders a text with `${{ … }}`. Text without them is returned as it is.
pub fn render(template: &str, context: &Context, functions: &Functions) -> Result<String, ExprError> {
    Template::parse(template)?.render(context, functions)
}

/// Whether a step runs: no condition means `success()`, and a condition that asks no outcome means `success() && (…)`.
pub fn eval_step_condition(
    condition: Option<&str>,
    outcome: Outcome,
    context: &Context,
    functions: &Functions,
) -> Result<bool, ExprError> {
    let Some(source) = condition else { return Ok(outcome == Outcome::Success) };
    let expr = Expr::parse(source)?;
    if !expr.asks_outcome() && outcome != Outcome::Success {
        return Ok(false);
    }
    expr.eval_bool(context, &Functions { outcome: Some(outcome), ..functions.clone() })
}

/// Brackets and levels up to which the stack of any thread is enough, also in a build without optimisation.
const DEEP_BRACKETS: usize = 4;
const DEEP_LEVELS: usize = 8;
/// Enough for [`MAX_DEPTH`] and [`MAX_LEVELS`] four times over; memory that is not touched costs nothing.
const DEEP_STACK_BYTES: usize = 32 << 20;

/// Runs the engine so that neither its panics nor its recursion reach the caller. None: it panicked, or there is no
/// thread for it.
fn guarded<T: Send>(deep: bool, work: impl FnOnce() -> T + Send) -> Option<T> {
    if !deep {
        return catch_unwind(AssertUnwindSafe(work)).ok();
    }
    std::thread::scope(|threads| {
        let thread = std::thread::Builder::new().stack_size(DEEP_STACK_BYTES).spawn_scoped(threads, work).ok()?;
        thread.join().ok()
    })
}

/// Shared by everything that evaluates; building it anew would cost more than an evaluation.
fn environment() -> Arc<cel::Env> {
    static ENV: std::sync::OnceLock<Arc<cel::Env>> = std::sync::OnceLock::new();
    ENV.get_or_init(|| Arc::new(cel::Env::stdlib())).clone()
}

#[cfg(test)]
mod tests;
