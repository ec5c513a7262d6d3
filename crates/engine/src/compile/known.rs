//! The jobs and groups of a workflow that `needs` may name.

use crate::lock::{Job, Workflow};
use crate::yaml::{Data, Entry, Node};

use super::scope::NeedNames;

/// See the module.
#[derive(Clone, Debug, Default)]
pub(super) struct Known {
    /// Names with what the jobs show, in file order.
    jobs: Vec<(String, NeedNames)>,
    /// Groups with the jobs that make their members.
    groups: Vec<(String, String)>,
}

/// A field of a job as written, before the job is compiled.
pub(super) fn raw<'n>(job: &'n Node, key: &str) -> Option<&'n Node> {
    let Data::Map(entries) = &job.data else { return None };
    entries.iter().find(|entry| entry.key == key).map(|entry| &entry.value)
}

impl Known {
    /// The jobs of a file.
    pub(super) fn written(jobs: &[Entry]) -> Self {
        let mut known = Self::default();
        known.add_written(jobs);
        known
    }

    /// The jobs of a compiled workflow.
    pub(super) fn compiled(workflow: &Workflow) -> Self {
        let mut known = Self::default();
        for job in workflow.jobs.iter().filter(|job| !job.is_run_hooks()) {
            known.jobs.push((job.name.clone(), shown(job)));
            let group = job.generate.as_ref().map(|generate| (generate.group.clone(), job.name.clone()));
            known.groups.extend(group);
        }
        known
    }

    /// Adds jobs that are not compiled yet.
    pub(super) fn add_written(&mut self, jobs: &[Entry]) {
        for job in jobs {
            let outputs = match raw(&job.value, "outputs").map(|node| &node.data) {
                Some(Data::Map(entries)) => entries.iter().map(|entry| entry.key.clone()).collect(),
                _ => Vec::new(),
            };
            let hosts = raw(&job.value, "runs_on_all").is_some();
            self.jobs.push((job.key.clone(), NeedNames { outputs, hosts, open: false }));
            if let Some(generate) = raw(&job.value, "generate") {
                let group = raw(generate, "group").and_then(Node::text).unwrap_or(&job.key);
                self.groups.push((group.to_owned(), job.key.clone()));
            }
        }
    }

    /// The names of all jobs.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.jobs.iter().map(|(name, _)| name.as_str())
    }

    /// The names of all groups.
    pub(super) fn groups(&self) -> impl Iterator<Item = &str> {
        self.groups.iter().map(|(group, _)| group.as_str())
    }

    /// What a job shows to those that need it.
    pub(super) fn job(&self, name: &str) -> Option<&NeedNames> {
        self.jobs.iter().find(|(known, _)| known == name).map(|(_, shown)| shown)
    }

    /// The jobs that say they make a group; one, unless the file is wrong.
    pub(super) fn generators<'a>(&'a self, group: &'a str) -> impl Iterator<Item = &'a str> {
        self.groups.iter().filter(move |(known, _)| known == group).map(|(_, job)| job.as_str())
    }
}

/// What a compiled job shows to those that need it.
pub(super) fn shown(job: &Job) -> NeedNames {
    NeedNames { outputs: job.outputs.keys().cloned().collect(), hosts: job.runs_on_all.is_some(), open: false }
}
