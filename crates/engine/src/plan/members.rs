//! Jobs that a generator made become part of their run: the workflow with them, and their plan.

use std::collections::{BTreeMap, BTreeSet};

use super::{Fleet, JobPlan, MAX_HOST_JOBS, MAX_JOBS, Needs, Part, Scope, context, json, parts, plan_job};
use crate::lock::{GroupNeed, Job, Need, Workflow};
use crate::needs::find_cycle;
use crate::state::JobStatus;

/// The workflow with the jobs that its generator (its position) made, at the end of its jobs. Every need on their group becomes
/// a need on each of them; the jobs before them keep their positions.
///
/// # Errors
/// In words: a name that is taken, a cycle, or more jobs than a run may have.
pub fn merge(workflow: &Workflow, generator: usize, members: Vec<Job>) -> Result<Workflow, String> {
    let maker = workflow.jobs.get(generator).filter(|job| job.generate.is_some());
    let maker = maker.ok_or_else(|| format!("job {generator} of the workflow makes no jobs"))?.name.clone();
    let mut merged = workflow.clone();
    let mut names: BTreeSet<&str> = workflow.jobs.iter().map(|job| job.name.as_str()).collect();
    if let Some(twice) = members.iter().find(|job| !names.insert(&job.name)) {
        return Err(format!("a job of the run has the name `{}` already", twice.name));
    }
    if names.len() > MAX_JOBS {
        return Err(format!("the run would have {} jobs; at most {MAX_JOBS} are allowed", names.len()));
    }
    let made: Vec<String> = members.iter().map(|job| job.name.clone()).collect();
    merged.jobs.extend(members);
    if let Some(generate) = merged.jobs.get_mut(generator).and_then(|job| job.generate.as_mut()) {
        generate.members = Some(made);
    }
    let known: BTreeMap<String, Vec<String>> = merged
        .jobs
        .iter()
        .filter_map(|job| job.generate.as_ref())
        .filter_map(|generate| Some((generate.group.clone(), generate.members.clone()?)))
        .collect();
    let everybody: Vec<String> =
        merged.jobs.iter().filter(|job| !job.is_run_hooks()).map(|job| job.name.clone()).collect();
    for job in &mut merged.jobs {
        resolve(job, &known);
        if job.is_run_hooks() {
            let all: Vec<JobStatus> = JobStatus::terminal().collect();
            let new = everybody.iter().filter(|name| !job.needs.iter().any(|need| need.job == **name));
            let new: Vec<Need> = new.map(|name| Need::on(name, all.clone())).collect();
            job.needs.extend(new);
        }
    }
    match find_cycle(&concrete(&merged)) {
        Some(path) => Err(format!("dependency cycle with the jobs of `{maker}`: {}", path.join(" -> "))),
        None => Ok(merged),
    }
}

/// Turns needs on groups whose jobs are known into needs on those.
fn resolve(job: &mut Job, known: &BTreeMap<String, Vec<String>>) {
    for GroupNeed { group, run_on } in std::mem::take(&mut job.needs_groups) {
        let Some(members) = known.get(&group) else {
            job.needs_groups.push(GroupNeed { group, run_on });
            continue;
        };
        for member in members {
            // An edge that is written out says more than one that a group brings.
            if !job.needs.iter().any(|need| need.job == *member) {
                let need = Need { job: member.clone(), run_on: run_on.clone(), group: Some(group.clone()) };
                job.needs.push(need);
            }
        }
    }
}

/// Who waits for whom; for the jobs of a group that does not exist yet stands the one that makes it.
fn concrete(workflow: &Workflow) -> BTreeMap<&str, Vec<&str>> {
    let maker = |group: &str| generator_of(workflow, group).map(|job| job.name.as_str());
    let edges = |job: &'_ Job| -> Vec<String> {
        let groups = job.needs_groups.iter().filter_map(|need| maker(&need.group)).map(str::to_owned);
        job.needs.iter().map(|need| need.job.clone()).chain(groups).collect()
    };
    let name = |text: &str| workflow.jobs.iter().find(|job| job.name == text).map(|job| job.name.as_str());
    workflow.jobs.iter().map(|job| (job.name.as_str(), edges(job).iter().filter_map(|to| name(to)).collect())).collect()
}

/// The job that makes a group.
pub(super) fn generator_of<'a>(workflow: &'a Workflow, group: &str) -> Option<&'a Job> {
    workflow.jobs.iter().find(|job| job.generate.as_ref().is_some_and(|generate| generate.group == group))
}

/// Plans the jobs from position `first` on, which joined a run that has `planned` jobs, `on_hosts` of them pinned to hosts.
/// None of them starts by itself: each is judged as one whose needs may be met.
///
/// # Errors
/// In words, when the run would have too many jobs.
pub fn plan_members(
    scope: Scope<'_>,
    first: usize,
    fleet: &Fleet,
    planned: usize,
    on_hosts: usize,
) -> Result<Vec<JobPlan>, String> {
    let mut context = context(scope, &BTreeMap::new(), &Needs::new());
    let (mut count, mut pinned) = (planned, on_hosts);
    let mut jobs = Vec::new();
    for (index, job) in scope.workflow.jobs.iter().enumerate().skip(first) {
        let (parts, fault) = match parts(job, &context, fleet) {
            Ok(parts) => (parts, None),
            Err(fault) => (vec![Part::Whole], Some(fault)),
        };
        pinned += parts.iter().filter(|part| matches!(part, Part::Host(_))).count();
        count += parts.len();
        if count - pinned.min(count) > MAX_JOBS || pinned > MAX_HOST_JOBS {
            return Err(format!(
                "with the generated jobs the run would have {count} jobs; at most {MAX_JOBS} are allowed"
            ));
        }
        for part in parts {
            jobs.push(plan_job(scope.workflow, index, part, fault.clone(), &mut context));
        }
        context.set("matrix", json(&BTreeMap::<String, String>::new()));
    }
    Ok(jobs)
}
