//! What must hold afterwards, from three witnesses: the database (through the interface), the logs, and the file that the
//! steps themselves wrote.

use std::collections::{BTreeMap, BTreeSet};

use kici_engine::state::{FailureClass, FailureReason, JobStatus};
use kici_engine::time::Ts;

/// Clocks of the two programs are one, but a kill is noted a moment before it happens.
const AROUND: std::time::Duration = std::time::Duration::from_secs(2);

/// A job as the interface shows it, with the lines of its steps.
#[derive(Clone, Debug)]
pub(super) struct Job {
    /// Bare uuid.
    pub(super) id: String,
    pub(super) name: String,
    pub(super) run: String,
    pub(super) status: JobStatus,
    pub(super) failure: Option<(FailureReason, FailureClass, String)>,
    pub(super) agent: Option<String>,
    pub(super) epoch: u32,
    pub(super) started_at: Option<Ts>,
    pub(super) finished_at: Option<Ts>,
    /// Lines that each step prints.
    pub(super) expected: Vec<u64>,
    /// Lines of the steps that were kept, by epoch and step.
    pub(super) lines: BTreeMap<(u32, usize), Vec<String>>,
    /// A job that it needs did not succeed.
    pub(super) unmet: bool,
}

/// What a step wrote into the judge's file.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Mark {
    pub(super) job: String,
    pub(super) epoch: u32,
    pub(super) step: usize,
    pub(super) end: bool,
}

impl Mark {
    /// Reads `<job>.<epoch> <step> start|end`.
    pub(super) fn read(line: &str) -> Option<Self> {
        let mut words = line.split(' ');
        let (job, epoch) = words.next()?.rsplit_once('.')?;
        let (step, word) = (words.next()?.parse().ok()?, words.next()?);
        let end = match word {
            "start" => false,
            "end" => true,
            _ => return None,
        };
        Some(Self { job: job.to_owned(), epoch: epoch.parse().ok()?, step, end })
    }
}

/// What may excuse a job that was lost.
#[derive(Debug, Default)]
pub(super) struct Excuses {
    /// When which agent was killed.
    pub(super) kills: Vec<(String, Ts)>,
    /// Agents that ended their jobs because they had no contact for too long.
    pub(super) fenced: BTreeSet<String>,
}

/// The sums of one run, and what is wrong.
#[derive(Debug, Default)]
pub(super) struct Verdict {
    pub(super) jobs: usize,
    pub(super) succeeded: usize,
    /// Failed as lost while their agent was killed, or fenced itself.
    pub(super) excused: usize,
    pub(super) skipped: usize,
    pub(super) lines: u64,
    pub(super) lost: usize,
    pub(super) double: usize,
    pub(super) hung: usize,
    pub(super) lines_lost: u64,
    pub(super) lines_doubled: u64,
    /// The job's id, or nothing, and what is wrong.
    pub(super) problems: Vec<(Option<String>, String)>,
}

impl Verdict {
    fn problem(&mut self, job: &Job, what: String) {
        let text = format!("job {} ({}) of run {}: {what}", job.name, job.id, job.run);
        self.problems.push((Some(job.id.clone()), text));
    }
}

/// Judges all jobs of one run of the workload.
pub(super) fn judge(jobs: &[Job], marks: &[Mark], excuses: &Excuses) -> Verdict {
    let mut verdict = Verdict { jobs: jobs.len(), ..Verdict::default() };
    let mut by_job: BTreeMap<&str, Vec<&Mark>> = BTreeMap::new();
    for mark in marks {
        by_job.entry(&mark.job).or_default().push(mark);
    }
    for job in jobs {
        let marks = by_job.remove(job.id.as_str()).unwrap_or_default();
        starts(job, &marks, &mut verdict);
        outcome(job, &marks, excuses, &mut verdict);
        lines(job, &mut verdict);
    }
    for (job, marks) in by_job {
        verdict.lost += 1;
        let text = format!("job {job} ran ({} marks) and is not in the database", marks.len());
        verdict.problems.push((Some(job.to_owned()), text));
    }
    verdict
}

/// User code starts at most once. No job of the workload asks for a second attempt, so a start at another epoch is one too
/// many as well: a job whose start was granted is never given to anybody else.
fn starts(job: &Job, marks: &[&Mark], verdict: &mut Verdict) {
    let mut seen: BTreeMap<(u32, usize), u32> = BTreeMap::new();
    for mark in marks.iter().filter(|mark| !mark.end) {
        *seen.entry((mark.epoch, mark.step)).or_default() += 1;
    }
    let epochs: BTreeSet<u32> = seen.keys().map(|(epoch, _)| *epoch).collect();
    if epochs.len() > 1 {
        verdict.double += 1;
        verdict.problem(job, format!("user code started at several hand-overs: {epochs:?}"));
    } else if let Some(((epoch, step), times)) = seen.iter().find(|(_, times)| **times > 1) {
        verdict.double += 1;
        verdict.problem(job, format!("step {step} started {times} times at hand-over {epoch}"));
    }
}

fn outcome(job: &Job, marks: &[&Mark], excuses: &Excuses, verdict: &mut Verdict) {
    match job.status {
        JobStatus::Success => {
            let done = |step: &usize, end| {
                marks.iter().any(|mark| mark.epoch == job.epoch && mark.step == *step && mark.end == end)
            };
            let missing = (0..job.expected.len()).find(|step| !done(step, false) || !done(step, true));
            if let Some(step) = missing {
                verdict.lost += 1;
                verdict.problem(job, format!("it reads success and step {step} did not run to its end"));
            } else {
                verdict.succeeded += 1;
            }
        }
        JobStatus::Skipped if job.unmet && marks.is_empty() => verdict.skipped += 1,
        JobStatus::Skipped => {
            verdict.lost += 1;
            let why = if marks.is_empty() { "although all that it needs succeeded" } else { "although it ran" };
            verdict.problem(job, format!("it was skipped {why}"));
        }
        status if status.is_failure() && excused(job, excuses) => verdict.excused += 1,
        status if status.is_terminal() => {
            verdict.lost += 1;
            verdict.problem(job, format!("it ended as {status} for no good reason: {:?}", job.failure));
        }
        status => {
            verdict.hung += 1;
            verdict.problem(job, format!("it is still {status}"));
        }
    }
}

/// A job may be lost with its agent: when that was killed while it had the job, or gave up contact.
fn excused(job: &Job, excuses: &Excuses) -> bool {
    let Some((_, FailureClass::Lost, _)) = &job.failure else { return false };
    let (Some(agent), Some(from), Some(to)) = (&job.agent, job.started_at, job.finished_at) else { return false };
    let killed = |(name, at): &(String, Ts)| name == agent && at.plus(AROUND) >= from && *at <= to.plus(AROUND);
    excuses.kills.iter().any(killed) || excuses.fenced.contains(agent)
}

/// A step that succeeded has all of its lines in order; one that was ended has a beginning of them. Never one twice.
fn lines(job: &Job, verdict: &mut Verdict) {
    for ((epoch, step), lines) in &job.lines {
        verdict.lines += lines.len() as u64;
        let numbers: Vec<u64> = lines.iter().filter_map(|line| line.strip_prefix("line ")?.parse().ok()).collect();
        let distinct: BTreeSet<u64> = numbers.iter().copied().collect();
        let doubled = (numbers.len() - distinct.len()) as u64;
        let last = match job.status {
            JobStatus::Success => job.expected.get(*step).copied().unwrap_or_default(),
            _ => distinct.last().copied().unwrap_or_default(),
        };
        let missing = (1..=last).filter(|number| !distinct.contains(number)).count() as u64;
        verdict.lines_doubled += doubled;
        verdict.lines_lost += missing;
        let sorted = numbers.is_sorted();
        if doubled > 0 || missing > 0 || !sorted || numbers.len() != lines.len() {
            let order = if sorted { "" } else { ", out of order" };
            let strange = lines.len() - numbers.len();
            verdict.problem(
                job,
                format!("log of step {step} at hand-over {epoch}: {missing} lines of {last} are missing, {doubled} came twice, {strange} are not its own{order}"),
            );
        }
    }
    if job.status == JobStatus::Success {
        for step in (0..job.expected.len()).filter(|step| !job.lines.contains_key(&(job.epoch, *step))) {
            verdict.lines_lost += job.expected[step];
            verdict.problem(job, format!("the log of step {step} is empty"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(second: i64) -> Ts {
        Ts::from_micros(second * 1_000_000)
    }

    fn lines(numbers: impl IntoIterator<Item = u64>) -> Vec<String> {
        numbers.into_iter().map(|number| format!("line {number}")).collect()
    }

    fn success() -> (Job, Vec<Mark>) {
        let job = Job {
            id: "j".into(),
            name: "build".into(),
            run: "r".into(),
            status: JobStatus::Success,
            failure: None,
            agent: Some("a".into()),
            epoch: 2,
            started_at: Some(at(10)),
            finished_at: Some(at(20)),
            expected: vec![3],
            lines: BTreeMap::from([((2, 0), lines(1..=3))]),
            unmet: false,
        };
        let marks = ["j.2 0 start", "j.2 0 end"].map(|line| Mark::read(line).unwrap()).to_vec();
        (job, marks)
    }

    fn lost() -> (Job, Vec<Mark>) {
        let (mut job, marks) = success();
        job.status = JobStatus::Failed;
        job.failure = Some((FailureReason::AgentLost, FailureClass::Lost, String::new()));
        job.lines.insert((2, 0), lines(1..=2));
        (job, marks[..1].to_vec())
    }

    fn of(job: Job, marks: &[Mark]) -> Verdict {
        judge(&[job], marks, &Excuses { kills: vec![("a".into(), at(15))], fenced: BTreeSet::new() })
    }

    #[test]
    fn a_good_run_has_no_problems() {
        let (job, marks) = success();
        let verdict = of(job, &marks);
        assert_eq!((verdict.succeeded, verdict.lines, verdict.problems.len()), (1, 3, 0), "{verdict:?}");
        let (job, marks) = lost();
        let verdict = of(job, &marks);
        assert_eq!((verdict.excused, verdict.problems.len()), (1, 0), "{verdict:?}");
    }

    #[test]
    fn two_starts_are_a_double_run_at_one_hand_over_and_at_two() {
        for line in ["j.2 0 start", "j.1 0 start"] {
            let (job, mut marks) = success();
            marks.push(Mark::read(line).unwrap());
            assert_eq!(of(job, &marks).double, 1, "{line}");
        }
    }

    #[test]
    fn a_success_that_did_not_run_and_a_run_that_nobody_knows_are_lost() {
        let (job, marks) = success();
        assert_eq!(of(job, &marks[..1]).lost, 1);
        let (job, mut marks) = success();
        marks.push(Mark::read("other.1 0 start").unwrap());
        assert_eq!(of(job, &marks).lost, 1);
    }

    #[test]
    fn a_job_is_excused_only_by_the_death_of_its_own_agent_while_it_ran() {
        let (job, marks) = lost();
        for kills in [vec![("b".to_owned(), at(15))], vec![("a".to_owned(), at(3))], vec![("a".to_owned(), at(30))]] {
            let verdict = judge(std::slice::from_ref(&job), &marks, &Excuses { kills, fenced: BTreeSet::new() });
            assert_eq!((verdict.lost, verdict.excused), (1, 0));
        }
        let fenced = BTreeSet::from(["a".to_owned()]);
        assert_eq!(judge(&[job], &marks, &Excuses { kills: vec![], fenced }).excused, 1);
    }

    #[test]
    fn lines_that_are_missing_or_come_twice_are_counted_and_a_lost_job_may_lack_the_end_only() {
        let (mut job, marks) = success();
        job.lines.insert((2, 0), lines([1, 3, 3]));
        let verdict = of(job, &marks);
        assert_eq!((verdict.lines_lost, verdict.lines_doubled), (1, 1));
        let (mut job, marks) = lost();
        job.lines.insert((2, 0), lines([1, 2, 2, 5]));
        let verdict = of(job, &marks);
        assert_eq!((verdict.lines_lost, verdict.lines_doubled), (2, 1));
        let (mut job, marks) = success();
        job.lines.clear();
        assert_eq!(of(job, &marks).lines_lost, 3);
    }

    #[test]
    fn what_is_skipped_needs_a_reason_and_what_is_open_hangs() {
        let (mut job, _) = success();
        job.status = JobStatus::Skipped;
        job.lines.clear();
        job.unmet = true;
        assert_eq!(of(job.clone(), &[]).skipped, 1);
        job.unmet = false;
        assert_eq!(of(job.clone(), &[]).lost, 1);
        job.status = JobStatus::Queued;
        assert_eq!(of(job, &[]).hung, 1);
    }
}
