//! Step files in use: their steps have ids and inputs of their own, and give outputs to where they are used.

use std::collections::BTreeMap;

use kici_engine::expr;
use kici_engine::lock::{Composite, Step};
use kici_engine::state::{FailureReason, JobStatus, StepStatus};
use serde_json::{Map, Value as Json, json};

use super::environment::Variables;
use super::step::Done;
use super::{Outcome, Run};

/// One use of a step file.
#[derive(Debug, Default)]
pub(super) struct Frame {
    /// Whether it runs; none before its first step, an error when that cannot be told.
    pub(super) entered: Option<Result<bool, String>>,
    /// Its condition holds although the job is not a success: then only its own failures count for its steps.
    forgiving: bool,
    /// One of its steps made the job a failure.
    failed: bool,
    ran: bool,
    left: bool,
    /// Results of its steps by id.
    pub(super) results: Map<String, Json>,
    pub(super) inputs: BTreeMap<String, Json>,
    /// `INPUT_*` and its `env`, with those of what it stands in.
    pub(super) env: Variables,
}

impl Run<'_> {
    /// The use that something stands in, where there is one.
    pub(super) fn frame_at(&self, at: Option<u32>) -> Option<&Frame> {
        self.frames.get(at? as usize)
    }

    fn used(&self, at: u32) -> &Composite {
        &self.job.spec.composites[at as usize]
    }

    /// The uses that a step stands in, the outermost first.
    fn chain(&self, mut at: Option<u32>) -> Vec<u32> {
        let mut chain = Vec::new();
        // A use that is not there is none, and a parent always stands before: a list that no compiler made cannot end the agent.
        while let Some((used, found)) = at.and_then(|at| Some((at, self.job.spec.composites.get(at as usize)?))) {
            chain.insert(0, used);
            at = found.parent.filter(|parent| *parent < used);
        }
        chain
    }

    /// Enters what the step at `index` stands in.
    pub(super) fn enter(&mut self, index: usize) {
        for at in self.chain(self.job.spec.steps[index].composite) {
            if self.frames[at as usize].entered.is_none() {
                let frame = self.frame(at);
                self.frames[at as usize] = frame;
            }
        }
    }

    fn frame(&self, at: u32) -> Frame {
        let used = self.used(at);
        let fault =
            |message: String| Frame { entered: Some(Err(format!("`{}`: {message}", used.path))), ..Frame::default() };
        match (used.parent, self.frame_at(used.parent).map(|parent| &parent.entered)) {
            (_, Some(Some(Ok(true)))) | (None, _) => {}
            _ => return Frame { entered: Some(Ok(false)), ..Frame::default() },
        }
        let seen = match self.seen_at(used.parent) {
            Ok(seen) => seen,
            Err(message) => return fault(message),
        };
        let standing = self.standing_at(used.parent);
        let context = self.context(&seen, used.parent);
        let wanted = expr::eval_step_condition(used.condition.as_deref(), standing, &context, &self.functions());
        match wanted {
            Ok(true) => {}
            Ok(false) => return Frame { entered: Some(Ok(false)), ..Frame::default() },
            Err(error) => return fault(format!("if: {error}")),
        }
        let with = match self.render_all(&used.with, &seen, used.parent) {
            Ok(with) => with.into_iter().map(|(name, text)| (name, Json::from(text))).collect(),
            Err(message) => return fault(format!("with: {message}")),
        };
        let inputs = match kici_engine::inputs::validate(&used.inputs, &with) {
            Ok(inputs) => inputs,
            Err(errors) => {
                let errors: Vec<String> = errors.iter().map(ToString::to_string).collect();
                return fault(errors.join("; "));
            }
        };
        let own = match self.render_all(&used.env, &seen, used.parent) {
            Ok(own) => own,
            Err(message) => return fault(format!("env: {message}")),
        };
        let mut env = self.frame_at(used.parent).map(|parent| parent.env.clone()).unwrap_or_default();
        env.extend(own);
        env.extend(kici_engine::plan::input_variables(&inputs));
        let forgiving = standing != expr::Outcome::Success;
        Frame { entered: Some(Ok(true)), forgiving, inputs, env, ..Frame::default() }
    }

    /// How what a step stands in is doing: the job, or the use of a step file that runs although the job failed.
    pub(super) fn standing_at(&self, at: Option<u32>) -> expr::Outcome {
        match self.frame_at(at) {
            Some(frame) if frame.forgiving && !frame.failed => expr::Outcome::Success,
            _ => self.standing(),
        }
    }

    /// Why the steps of a use do not run, where they do not.
    pub(super) fn held_back(&self, step: &Step) -> Option<Result<(), String>> {
        let Some(frame) = self.frame_at(Some(step.composite?)) else {
            return Some(Err("it stands in a step file that is not used".to_owned()));
        };
        match &frame.entered {
            Some(Ok(true)) | None => None,
            Some(Ok(false)) => Some(Ok(())),
            Some(Err(message)) => Some(Err(message.clone())),
        }
    }

    /// Notes down the result of a step where it belongs.
    pub(super) fn note(&mut self, done: &Done) {
        let step = &self.job.spec.steps[done.index];
        let ran = done.in_sync || !matches!(done.status, StepStatus::Skipped | StepStatus::Cancelled);
        for at in self.chain(step.composite) {
            let frame = &mut self.frames[at as usize];
            frame.ran |= ran;
            frame.failed |= done.failure.is_some();
        }
        if let Some(id) = &step.id {
            let result = json!({ "status": done.status.as_str(), "outputs": done.outputs });
            self.results_at(step.composite).insert(id.clone(), result);
        }
    }

    fn results_at(&mut self, at: Option<u32>) -> &mut Map<String, Json> {
        match at.and_then(|at| self.frames.get_mut(at as usize)) {
            Some(frame) => &mut frame.results,
            None => &mut self.results,
        }
    }

    /// Leaves what the step before `next` stood in and `next` does not.
    pub(super) fn leave(&mut self, before: usize, next: usize) {
        let steps = &self.job.spec.steps;
        let stays = self.chain(steps.get(next).and_then(|step| step.composite));
        for at in self.chain(steps[before].composite).into_iter().rev().filter(|at| !stays.contains(at)) {
            let frame = &self.frames[at as usize];
            if frame.left {
                continue;
            }
            let status = match (frame.failed, frame.ran) {
                (true, _) => StepStatus::Failed,
                (false, true) => StepStatus::Success,
                (false, false) => StepStatus::Skipped,
            };
            let outputs = if frame.ran { self.outputs_of(at) } else { Ok(BTreeMap::new()) };
            let outputs = outputs.unwrap_or_else(|message| {
                // After a failure, and where nothing is applied, a result may well be missing.
                if status == StepStatus::Success && !self.job.spec.check_mode.is_check() {
                    let message = format!("outputs of `{}`: {message}", self.used(at).path);
                    let failure = Outcome::new(JobStatus::Failed, Some(FailureReason::ExprError), message);
                    self.outcome.get_or_insert(failure);
                }
                BTreeMap::new()
            });
            self.frames[at as usize].left = true;
            let used = self.used(at);
            if let Some(id) = used.id.clone() {
                let result = json!({ "status": status.as_str(), "outputs": outputs });
                self.results_at(self.job.spec.composites[at as usize].parent).insert(id, result);
            }
        }
    }

    fn outputs_of(&self, at: u32) -> Result<Variables, String> {
        let seen = self.seen_at(Some(at))?;
        self.render_all(&self.used(at).outputs, &seen, Some(at))
    }

    /// What people see of a use.
    pub(super) fn used_name(&self, at: u32) -> String {
        let Some(used) = self.job.spec.composites.get(at as usize) else { return String::new() };
        let stem = || used.path.rsplit('/').next().unwrap_or_default().trim_end_matches(".yaml").to_owned();
        used.name.clone().or_else(|| used.id.clone()).unwrap_or_else(stem)
    }
}
