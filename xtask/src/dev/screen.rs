//! What a person sees while runs go on: the lines of all jobs, each with its job's name, and one line of progress.

use std::collections::HashMap;
use std::io::{IsTerminal, Write};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use kici_api::client::for_terminal;
use kici_api::dto::logs::{FollowEvent, LogLine, LogStream};
use kici_engine::ids::JobId;
use kici_engine::state::{JobStatus, StepStatus};

/// Colours of job names, in turn; red is kept for failures.
const COLOURS: [u8; 6] = [36, 33, 35, 34, 32, 96];
const RED: u8 = 31;
const DIM: u8 = 2;

/// Prints events of runs. On a terminal it colours and keeps a line of progress below.
pub(crate) struct Screen {
    colour: bool,
    jobs: HashMap<JobId, Job>,
    width: usize,
    progress: Option<ProgressBar>,
}

struct Job {
    prefix: String,
    colour: u8,
    status: JobStatus,
    /// Key of the step whose lines came last; a heading is printed when it changes.
    step: Option<String>,
    steps: HashMap<String, String>,
}

impl Screen {
    /// A screen for the standard output of this process.
    pub(crate) fn new() -> Self {
        // <https://no-color.org>
        let wanted = std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
        let colour = wanted && std::io::stdout().is_terminal();
        let progress = (colour && std::io::stderr().is_terminal()).then(progress);
        Self { colour, jobs: HashMap::new(), width: 0, progress }
    }

    /// Shows an event of a run. `scope` is put before the job's name, to tell workflows apart; it may be empty.
    pub(crate) fn show(&mut self, scope: &str, event: &FollowEvent) {
        let lines = self.lines(scope, event);
        self.print(&lines);
        if let Some(progress) = &self.progress {
            progress.set_message(summary(self.jobs.values().map(|job| job.status)));
        }
    }

    /// Prints lines above the progress.
    pub(crate) fn print(&self, lines: &[String]) {
        let print = || {
            let mut out = std::io::stdout().lock();
            for line in lines {
                // A closed pipe ends us soon enough by its signal or by the next flush.
                let _ = writeln!(out, "{line}");
            }
            let _ = out.flush();
        };
        match &self.progress {
            Some(progress) => progress.suspend(print),
            None => print(),
        }
    }

    /// The runs are over: forgets their jobs and takes the progress away.
    pub(crate) fn finish(&mut self) {
        self.jobs.clear();
        self.width = 0;
        if let Some(progress) = &self.progress {
            progress.finish_and_clear();
            self.progress = Some(self::progress());
        }
    }

    /// Whether colours are wanted.
    pub(crate) fn coloured(&self) -> bool {
        self.colour
    }

    /// Text in a colour, if colours are wanted.
    pub(crate) fn paint(&self, colour: u8, text: &str) -> String {
        if self.colour { format!("\x1b[{colour}m{text}\x1b[0m") } else { text.to_owned() }
    }

    /// The colour of a status.
    pub(crate) fn status(&self, status: &str) -> String {
        match status {
            "success" => self.paint(32, status),
            "failed" => self.paint(RED, status),
            "cancelled" | "skipped" => self.paint(DIM, status),
            _ => self.paint(33, status),
        }
    }

    fn lines(&mut self, scope: &str, event: &FollowEvent) -> Vec<String> {
        match event {
            FollowEvent::Job { job_id, name, status, agent_id: _, reason } => {
                self.job(scope, *job_id, name, *status, reason.as_deref())
            }
            FollowEvent::Step { job_id, step, name, status, exit_code, .. } => {
                self.step(*job_id, step, name, *status, *exit_code)
            }
            FollowEvent::Lines { job_id, step, lines, .. } => self.output(*job_id, step, lines),
            FollowEvent::Run { .. } | FollowEvent::Alive {} | FollowEvent::End { .. } => Vec::new(),
        }
    }

    fn job(&mut self, scope: &str, id: JobId, name: &str, status: JobStatus, reason: Option<&str>) -> Vec<String> {
        let prefix = if scope.is_empty() { name.to_owned() } else { format!("{scope}/{name}") };
        self.width = self.width.max(prefix.chars().count());
        let colour = COLOURS[self.jobs.len() % COLOURS.len()];
        let job = self.jobs.entry(id).or_insert_with(|| Job {
            prefix,
            colour,
            status: JobStatus::Pending,
            step: None,
            steps: HashMap::new(),
        });
        let before = std::mem::replace(&mut job.status, status);
        let why = reason.map(|reason| format!(": {reason}")).unwrap_or_default();
        let waits = reason.is_some() && !status.is_terminal();
        if before == status && !waits || status == JobStatus::Pending {
            return Vec::new();
        }
        match status {
            JobStatus::Running | JobStatus::Queued if !waits => Vec::new(),
            _ => vec![format!("{} {}{why}", self.head(id), self.status(status.as_str()))],
        }
    }

    fn step(&mut self, id: JobId, key: &str, name: &str, status: StepStatus, code: Option<i32>) -> Vec<String> {
        let Some(job) = self.jobs.get_mut(&id) else { return Vec::new() };
        job.steps.insert(key.to_owned(), name.to_owned());
        if status != StepStatus::Failed {
            return Vec::new();
        }
        let code = code.map(|code| format!(" (exit code {code})")).unwrap_or_default();
        vec![format!("{} {}", self.head(id), self.paint(RED, &format!("step failed: {name}{code}")))]
    }

    fn output(&mut self, id: JobId, key: &str, lines: &[LogLine]) -> Vec<String> {
        let mut printed = Vec::new();
        let heading = self.jobs.get_mut(&id).and_then(|job| {
            (job.step.as_deref() != Some(key)).then(|| {
                job.step = Some(key.to_owned());
                job.steps.get(key).map_or(key, String::as_str).to_owned()
            })
        });
        let head = self.head(id);
        if let Some(name) = heading {
            printed.push(format!("{head} {}", self.paint(DIM, &format!("--- {name}"))));
        }
        for line in lines {
            let text = for_terminal(&line.text, self.colour);
            printed.push(match line.stream {
                LogStream::Meta => format!("{head} {}", self.paint(DIM, &text)),
                LogStream::Out | LogStream::Err => format!("{head} {text}"),
            });
        }
        printed
    }

    fn head(&self, id: JobId) -> String {
        let Some(job) = self.jobs.get(&id) else { return String::from("? |") };
        let padding = " ".repeat(self.width.saturating_sub(job.prefix.chars().count()));
        self.paint(job.colour, &format!("{}{padding} |", job.prefix))
    }
}

fn progress() -> ProgressBar {
    let progress = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr_with_hz(10));
    // The template is a literal that parses; without it the bar has its default look.
    if let Ok(style) = ProgressStyle::with_template("{spinner} {elapsed} {msg}") {
        progress.set_style(style);
    }
    progress
}

/// `2 running, 1 queued, 3 of 6 done`.
fn summary(statuses: impl Iterator<Item = JobStatus>) -> String {
    let statuses: Vec<JobStatus> = statuses.collect();
    let done = statuses.iter().filter(|status| status.is_terminal()).count();
    let mut parts = Vec::new();
    for status in JobStatus::ALL.iter().filter(|status| !status.is_terminal()) {
        let count = statuses.iter().filter(|other| *other == status).count();
        if count > 0 {
            parts.push(format!("{count} {}", status.as_str()));
        }
    }
    parts.push(format!("{done} of {} done", statuses.len()));
    parts.join(", ")
}

#[cfg(test)]
mod tests {
    use kici_engine::ids::RunId;
    use kici_engine::state::RunStatus;
    use kici_engine::time::Ts;

    use super::*;

    fn screen() -> Screen {
        Screen { colour: false, jobs: HashMap::new(), width: 0, progress: None }
    }

    fn id(number: u128) -> JobId {
        JobId::from_uuid(uuid(number))
    }

    fn uuid(number: u128) -> uuid::Uuid {
        uuid::Uuid::from_u128(number)
    }

    fn job(number: u128, name: &str, status: JobStatus, reason: Option<&str>) -> FollowEvent {
        FollowEvent::Job {
            job_id: id(number),
            name: name.into(),
            status,
            agent_id: None,
            reason: reason.map(str::to_owned),
        }
    }

    fn lines(number: u128, texts: &[&str]) -> FollowEvent {
        let line =
            |text: &&str| LogLine { seq: 0, at: Ts::from_micros(0), stream: LogStream::Out, text: (*text).into() };
        FollowEvent::Lines { job_id: id(number), epoch: 1, step: "s-0".into(), lines: texts.iter().map(line).collect() }
    }

    #[test]
    fn lines_carry_their_job() {
        let mut screen = screen();
        let mut seen = Vec::new();
        let step = FollowEvent::Step {
            job_id: id(1),
            epoch: 1,
            step: "s-0".into(),
            name: "greet".into(),
            status: StepStatus::Running,
            exit_code: None,
        };
        let failed = FollowEvent::Step {
            job_id: id(1),
            epoch: 1,
            step: "s-0".into(),
            name: "greet".into(),
            status: StepStatus::Failed,
            exit_code: Some(3),
        };
        for event in [
            FollowEvent::Run { run_id: RunId::from_uuid(uuid(9)), status: RunStatus::Pending },
            job(1, "build", JobStatus::Queued, None),
            job(2, "test (de)", JobStatus::Pending, None),
            job(1, "build", JobStatus::Running, None),
            step,
            lines(1, &["hello", "world"]),
            lines(1, &["again"]),
            failed,
            job(1, "build", JobStatus::Failed, Some("step greet failed")),
            job(2, "test (de)", JobStatus::Skipped, Some("upstream_unmet: build (failed)")),
            job(2, "test (de)", JobStatus::Skipped, Some("upstream_unmet: build (failed)")),
        ] {
            seen.extend(screen.lines("", &event));
        }
        assert_eq!(
            seen,
            [
                "build     | --- greet",
                "build     | hello",
                "build     | world",
                "build     | again",
                "build     | step failed: greet (exit code 3)",
                "build     | failed: step greet failed",
                "test (de) | skipped: upstream_unmet: build (failed)",
            ]
        );
    }

    #[test]
    fn a_job_that_nobody_takes_says_so() {
        let mut screen = screen();
        screen.lines("ci", &job(1, "build", JobStatus::Queued, None));
        let seen = screen.lines("ci", &job(1, "build", JobStatus::Queued, Some("no agent offers `gpu`")));
        assert_eq!(seen, ["ci/build | queued: no agent offers `gpu`"]);
    }

    #[test]
    fn progress_counts_what_is_open() {
        let statuses = [JobStatus::Running, JobStatus::Queued, JobStatus::Running, JobStatus::Success];
        assert_eq!(summary(statuses.into_iter()), "1 queued, 2 running, 1 of 4 done");
    }
}
