//! The needs graph: when a job may run, when it is skipped, and cycles (dispatch 3.11, workflows-and-events R80).
//!
//! A need on a job with variants is one edge to the job's base name, judged on the aggregate status once all variants are
//! terminal. Everything here is a function of statuses read from the database; there is no memory between calls.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crate::lock::Need;
use crate::state::JobStatus;

/// What a job's edges say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// An upstream job is not terminal and none has ended outside its edge's set.
    Wait,
    /// Every upstream job ended as asked.
    Ready,
    /// An upstream job ended outside its edge's set.
    Skip {
        /// `upstream_unmet: NAME (STATUS)`, for the job's row.
        reason: String,
    },
}

/// The status that a job with variants shows to those who need it: none while a variant is open, or when there is none. One
/// variant shows its own status; of several any failure makes `failed`, else any cancelled makes `cancelled`, else all
/// skipped makes `skipped`, else `success`.
pub fn aggregate(children: impl IntoIterator<Item = JobStatus>) -> Option<JobStatus> {
    let mut seen: Vec<JobStatus> = Vec::new();
    for status in children {
        if !status.is_terminal() {
            return None;
        }
        seen.push(status);
    }
    if let [] | [_] = seen[..] {
        return seen.pop();
    }
    let any = |wanted: JobStatus| seen.contains(&wanted);
    Some(if seen.iter().any(|status| status.is_failure()) {
        JobStatus::Failed
    } else if any(JobStatus::Cancelled) {
        JobStatus::Cancelled
    } else if any(JobStatus::Success) {
        JobStatus::Success
    } else {
        JobStatus::Skipped
    })
}

/// Judges one job. `status_of` gives the aggregate status of an upstream job by its base name, none while it is open.
///
/// An unmet edge skips the job at once, whatever the other edges still wait for; of several the first by name is the reason,
/// so that the order of the edges has no effect. An edge with an empty set, which no lock of ours holds, means success.
pub fn decide<'a>(edges: impl IntoIterator<Item = &'a Need>, status_of: impl Fn(&str) -> Option<JobStatus>) -> Verdict {
    let mut open = false;
    let mut unmet: Option<(&str, JobStatus)> = None;
    for edge in edges {
        match status_of(&edge.job) {
            None => open = true,
            Some(status) if accepts(edge, status) => {}
            Some(status) => {
                if unmet.is_none_or(|(name, _)| edge.job.as_str() < name) {
                    unmet = Some((&edge.job, status));
                }
            }
        }
    }
    match unmet {
        Some((name, status)) => Verdict::Skip { reason: format!("upstream_unmet: {name} ({status})") },
        None if open => Verdict::Wait,
        None => Verdict::Ready,
    }
}

fn accepts(edge: &Need, status: JobStatus) -> bool {
    if edge.run_on.is_empty() { status == JobStatus::Success } else { edge.run_on.contains(&status) }
}

/// A job of a run, as the scheduler sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    /// Key of the job in the workflow; variants share it.
    pub base_name: String,
    /// Its status now.
    pub status: JobStatus,
    /// True once its needs were found met; it is not judged again.
    pub needs_satisfied: bool,
    /// What it needs.
    pub needs: Vec<Need>,
}

/// What [`propagate`] found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Propagation {
    /// Positions of the jobs whose needs are met now, ascending.
    pub ready: Vec<usize>,
    /// Positions of the jobs that are skipped, with the reason, in the order in which the skips follow from each other.
    pub skipped: Vec<(usize, String)>,
}

/// Judges every waiting job of a run (`pending` and not yet satisfied) until nothing changes. A skip is a status like any
/// other to the jobs behind it: each edge's own set decides. Calling it again after applying the result finds nothing new.
pub fn propagate(nodes: &[Node]) -> Propagation {
    let mut groups: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    let mut dependants: BTreeMap<&str, BTreeSet<usize>> = BTreeMap::new();
    for (at, node) in nodes.iter().enumerate() {
        groups.entry(&node.base_name).or_default().push(at);
        for need in &node.needs {
            dependants.entry(&need.job).or_default().insert(at);
        }
    }
    let mut status: Vec<JobStatus> = nodes.iter().map(|node| node.status).collect();
    let waits = |at: usize, status: &[JobStatus]| status[at] == JobStatus::Pending && !nodes[at].needs_satisfied;
    let mut queue: VecDeque<usize> = (0..nodes.len()).filter(|at| waits(*at, &status)).collect();
    let mut ready = BTreeSet::new();
    let mut skipped = Vec::new();
    while let Some(at) = queue.pop_front() {
        if !waits(at, &status) || ready.contains(&at) {
            continue;
        }
        let of = |name: &str| aggregate(groups.get(name)?.iter().map(|child| status[*child]));
        match decide(&nodes[at].needs, of) {
            Verdict::Wait => {}
            Verdict::Ready => {
                ready.insert(at);
            }
            Verdict::Skip { reason } => {
                status[at] = JobStatus::Skipped;
                skipped.push((at, reason));
                queue.extend(dependants.get(nodes[at].base_name.as_str()).into_iter().flatten());
            }
        }
    }
    Propagation { ready: ready.into_iter().collect(), skipped }
}

/// The outputs that a job with variants shows: those of its variants in order, a later one winning by name.
pub fn merge_outputs<'a>(children: impl IntoIterator<Item = &'a BTreeMap<String, String>>) -> BTreeMap<String, String> {
    children.into_iter().flat_map(|outputs| outputs.iter().map(|(k, v)| (k.clone(), v.clone()))).collect()
}

/// The first cycle among named nodes, as a path that ends where it starts (`build, test, build`). Edges to unknown names are
/// not followed. Deterministic: the same graph gives the same path.
pub fn find_cycle<'a>(edges: &BTreeMap<&'a str, Vec<&'a str>>) -> Option<Vec<&'a str>> {
    #[derive(Clone, Copy, PartialEq)]
    enum Mark {
        OnPath,
        Done,
    }
    let mut marks: BTreeMap<&str, Mark> = BTreeMap::new();
    for start in edges.keys() {
        if marks.contains_key(start) {
            continue;
        }
        // (node, position of the next edge to follow); a stack of our own, since the depth is the author's choice.
        let mut path: Vec<(&str, usize)> = vec![(start, 0)];
        marks.insert(start, Mark::OnPath);
        while let Some((node, next)) = path.last_mut() {
            let Some(target) = edges.get(node).and_then(|targets| targets.get(*next)) else {
                marks.insert(node, Mark::Done);
                path.pop();
                continue;
            };
            *next += 1;
            match marks.get(target) {
                Some(Mark::Done) => {}
                Some(Mark::OnPath) => {
                    let from = path.iter().position(|(name, _)| name == target).unwrap_or(0);
                    let mut cycle: Vec<&str> = path[from..].iter().map(|(name, _)| *name).collect();
                    cycle.push(target);
                    return Some(cycle);
                }
                None => {
                    if edges.contains_key(target) {
                        marks.insert(target, Mark::OnPath);
                        path.push((target, 0));
                    }
                }
            }
        }
    }
    None
}

#[cfg(test)]
mod tests;
