//! `emit`: an event for other workflows.

use std::collections::BTreeMap;
use std::io;

use kici_engine::expr::Template;
use kici_engine::lock::Emit;
use kici_engine::state::FailureReason;
use serde_json::Value as Json;
use tokio::sync::watch;
use tokio::time::Instant;

use super::Run;
use super::command::Went;
use super::environment::Variables;
use super::exec::{Ended, told};
use super::step::Attempt;
use crate::ports::{Emission, Emitted, Reporter};
use crate::spool::StepLog;
use crate::stop::Stop;

impl Run<'_> {
    /// Sends the event and waits until it is stored, within the limit of the step.
    pub(super) async fn emit(
        &self,
        index: usize,
        attempt: &Attempt<'_>,
        emit: &Emit,
        log: &mut StepLog,
        reporter: &dyn Reporter,
        stop: &mut watch::Receiver<Stop>,
    ) -> io::Result<Went> {
        let emission = match self.emission(index, attempt, emit) {
            Ok(emission) => emission,
            Err(message) => return Ok(Went::failed(FailureReason::ExprError, message)),
        };
        if let Some(interrupted) = self.interrupted(attempt.after_stop, stop) {
            return Ok(interrupted);
        }
        let name = emission.name.clone();
        let deadline = self.job.deadline.filter(|_| !attempt.after_stop);
        let late = async {
            match deadline {
                Some(deadline) => tokio::time::sleep_until(deadline).await,
                None => std::future::pending().await,
            }
        };
        let emitted = tokio::select! {
            emitted = reporter.emit(emission) => emitted,
            () = late => return Ok(Went::interrupted(Ended::DeadlineReached)),
            stop = told(stop, attempt.after_stop) => return Ok(Went::interrupted(Ended::Stopped(stop))),
            () = tokio::time::sleep_until(attempt.until.max(Instant::now())) => {
                let limit = attempt.limit.as_secs_f64();
                let message = format!("event `{name}` was not stored within {limit} s");
                return Ok(Went::failed(FailureReason::StepTimeout, message));
            }
        };
        Ok(match emitted {
            Emitted::Stored(id) => {
                self.say(log, &[format!("event `{name}` is stored as {id}")]).await?;
                Went { outputs: BTreeMap::from([("event_id".to_owned(), id)]), ..Went::success() }
            }
            Emitted::Nowhere(why) => {
                self.say(log, &[format!("event `{name}` goes nowhere: {why}")]).await?;
                Went { outputs: BTreeMap::from([("event_id".to_owned(), String::new())]), ..Went::success() }
            }
            Emitted::Refused(why) => {
                Went::failed(FailureReason::StepFailed, format!("event `{name}` was refused: {why}"))
            }
        })
    }

    fn emission(&self, index: usize, attempt: &Attempt<'_>, emit: &Emit) -> Result<Emission, String> {
        let (env, at) = (self.seen(attempt.base), attempt.step.composite);
        let name = self.render(&emit.event, &env, at)?;
        let payload = self.document(&emit.payload, &env, at)?;
        Ok(Emission { step: index, name, payload, target_repos: emit.target_repos.clone() })
    }

    /// A document with its templates rendered. Values that must not be shown do not leave this host.
    fn document(&self, json: &Json, env: &Variables, at: Option<u32>) -> Result<Json, String> {
        Ok(match json {
            Json::String(text) if text.contains("${{") => {
                let template = Template::parse(text).map_err(|error| error.to_string())?;
                let (context, functions) = (self.context(env, at), self.functions());
                let value = match template.sole() {
                    Some(expr) => expr.eval_json(&context, &functions),
                    None => template.render(&context, &functions).map(Json::String),
                };
                self.job.masker.mask_json(value.map_err(|error| error.to_string())?)
            }
            Json::Array(items) => {
                Json::Array(items.iter().map(|item| self.document(item, env, at)).collect::<Result<_, _>>()?)
            }
            Json::Object(fields) => Json::Object(
                fields
                    .iter()
                    .map(|(name, field)| Ok((name.clone(), self.document(field, env, at)?)))
                    .collect::<Result<_, String>>()?,
            ),
            plain => plain.clone(),
        })
    }
}
