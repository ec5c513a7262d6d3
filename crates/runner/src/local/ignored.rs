//! What a workflow asks for that only an orchestrator does.

use std::collections::BTreeSet;

use kici_engine::lock::Workflow;

/// One line for each key of the workflow, and of its jobs at these places, that a local run does not follow.
pub(super) fn keys(workflow: &Workflow, jobs: &BTreeSet<usize>) -> Vec<String> {
    let mut lines = Vec::new();
    let whole = [
        (!workflow.requires.is_empty(), "`requires` is ignored: no commit is looked at"),
        (workflow.concurrency.is_some(), "`concurrency` is ignored: this run waits for no other and cancels none"),
    ];
    lines.extend(whole.iter().filter(|(there, _)| *there).map(|(_, line)| (*line).to_owned()));
    for job in jobs.iter().filter_map(|at| workflow.jobs.get(*at)) {
        let own = [
            (job.concurrency.is_some(), "`concurrency` is ignored: jobs run one after the other"),
            (job.retry.is_some(), "`retry` is ignored: a job that fails has failed"),
            (
                job.checkout.path.is_some() || job.checkout.git_ref.is_some(),
                "`checkout` is ignored: the files are those that are there",
            ),
            (job.runs_on_all.is_some(), "`runs_on_all` finds no hosts: only an orchestrator knows them"),
        ];
        lines.extend(own.iter().filter(|(there, _)| *there).map(|(_, line)| format!("job `{}`: {line}", job.name)));
    }
    lines
}
