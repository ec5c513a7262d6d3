//! `needs`: the edges between jobs.

use std::collections::{BTreeMap, HashSet};

use crate::lock::Need;
use crate::needs::find_cycle;
use crate::state::JobStatus;
use crate::yaml::{Data, Entry, Node, Span};

use super::keys::{self, nearest};
use super::walk::Walk;

const KEYWORDS: [&str; 4] = ["on-success", "always", "on-skip", "on-failure"];

impl Walk<'_> {
    /// The edges of one job; names that are no job are faults. `jobs` are all jobs of the workflow.
    pub(super) fn needs(&mut self, node: &Node, job: &str, jobs: &[Entry]) -> Vec<Need> {
        let items = match &node.data {
            Data::Map(_) => std::slice::from_ref(node),
            _ => self.one_or_list(node, "a job").unwrap_or_default(),
        };
        let mut needs = Vec::new();
        let mut seen = HashSet::new();
        for item in items {
            let Some((need, span)) = self.need(item) else { continue };
            if need.job == job {
                self.fault("K0302", span, format!("job `{job}` needs itself"));
            } else if !jobs.iter().any(|entry| entry.key == need.job) {
                let others = jobs.iter().map(|entry| entry.key.as_str()).filter(|name| *name != job);
                let suggestion = nearest(&need.job, others).map(str::to_owned);
                let name = crate::yaml::shorten(&need.job);
                self.fault("K0301", span, format!("job `{job}` needs unknown job `{name}`")).replace(suggestion);
            } else if !seen.insert(need.job.clone()) {
                self.fault("K0304", span, format!("job `{job}` needs `{}` twice", need.job));
            } else {
                needs.push(need);
            }
        }
        needs
    }

    fn need(&mut self, node: &Node) -> Option<(Need, Span)> {
        if let Data::Scalar(..) = node.data {
            let job = self.fixed(node, "the name of a job")?.to_owned();
            return Some((Need { job, run_on: vec![JobStatus::Success] }, node.span));
        }
        let fields = self.fields(node, &keys::NEED, "`needs`")?;
        let Some(entry) = fields.get("job") else {
            let Data::Map(entries) = &node.data else { return None };
            if !entries.iter().any(|entry| entry.key == "group") {
                self.fault("K0101", node.span, "an entry of `needs` has no `job`")
                    .expected(["`job`, the name of a job"]);
            }
            return None;
        };
        let job = self.fixed(&entry.value, "the name of a job")?.to_owned();
        let run_on = match fields.get("when") {
            Some(entry) => self.within("when", |walk| walk.when(&entry.value))?,
            None => vec![JobStatus::Success],
        };
        Some((Need { job, run_on }, entry.value.span))
    }

    /// A keyword, or a list of terminal statuses.
    fn when(&mut self, node: &Node) -> Option<Vec<JobStatus>> {
        if let Data::Scalar(..) = node.data {
            return Some(match self.word(node, &KEYWORDS)? {
                "always" => JobStatus::terminal().collect(),
                "on-skip" => vec![JobStatus::Success, JobStatus::Skipped],
                "on-failure" => JobStatus::terminal().filter(|status| status.is_failure()).collect(),
                _ => vec![JobStatus::Success],
            });
        }
        let words: Vec<String> = JobStatus::terminal().map(|status| status.to_string()).collect();
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let items = self.list(node, "statuses")?;
        let mut statuses = Vec::new();
        for item in items {
            let word = self.word(item, &words)?;
            let status = JobStatus::terminal().find(|status| status.to_string() == word)?;
            if !statuses.contains(&status) {
                statuses.push(status);
            }
        }
        if statuses.is_empty() {
            self.fault("K0205", node.span, "`when` names no status, the job could never run").expected(words);
            return None;
        }
        Some(statuses)
    }

    /// Looks for a cycle; `places` says where each job is written.
    pub(super) fn cycle(&mut self, edges: &BTreeMap<&str, Vec<&str>>, places: impl Fn(&str) -> Span) {
        if let Some(cycle) = find_cycle(edges) {
            let span = cycle.first().map_or_else(Span::default, |first| places(first));
            self.fault("K0302", span, format!("dependency cycle: {}", cycle.join(" -> ")));
        }
    }
}
