//! `needs`: the edges between jobs.

use std::collections::{BTreeMap, HashSet};

use crate::lock::{GroupNeed, Need};
use crate::needs::find_cycle;
use crate::state::JobStatus;
use crate::yaml::{Data, Node, Span};

use super::keys::{self, nearest};
use super::known::Known;
use super::walk::Walk;

const KEYWORDS: [&str; 4] = ["on-success", "always", "on-skip", "on-failure"];

/// What a job needs.
#[derive(Clone, Debug, Default)]
pub(super) struct Needs {
    pub(super) jobs: Vec<Need>,
    pub(super) groups: Vec<GroupNeed>,
}

impl Needs {
    /// The jobs that must have ended before, those that make groups included.
    pub(super) fn upstream<'a>(&'a self, known: &'a Known) -> Vec<&'a str> {
        let groups = self.groups.iter().flat_map(|need| known.generators(&need.group));
        self.jobs.iter().map(|need| need.job.as_str()).chain(groups).collect()
    }
}

/// One entry of `needs`.
enum Target {
    Job(String),
    Group(String),
}

impl Walk<'_> {
    /// The edges of one job; names that are no job or group are faults.
    pub(super) fn needs(&mut self, node: &Node, job: &str, known: &Known) -> Needs {
        let items = match &node.data {
            Data::Map(_) => std::slice::from_ref(node),
            _ => self.one_or_list(node, "a job").unwrap_or_default(),
        };
        let mut needs = Needs::default();
        let mut seen = HashSet::new();
        for item in items {
            let Some((target, run_on, span)) = self.need(item) else { continue };
            let (name, what) = match &target {
                Target::Job(name) => (name.clone(), "job"),
                Target::Group(name) => (name.clone(), "group"),
            };
            let (exists, own) = match &target {
                Target::Job(name) => (known.job(name).is_some(), name == job),
                Target::Group(name) => {
                    (known.generators(name).next().is_some(), known.generators(name).any(|maker| maker == job))
                }
            };
            if own {
                let message = match target {
                    Target::Job(_) => format!("job `{job}` needs itself"),
                    Target::Group(_) => format!("job `{job}` needs group `{name}`, which it makes"),
                };
                self.fault("K0302", span, message);
            } else if !exists {
                let suggestion = if self.full() {
                    None
                } else {
                    match what {
                        "job" => nearest(&name, known.names().filter(|name| *name != job)),
                        _ => nearest(&name, known.groups()),
                    }
                };
                let suggestion = suggestion.map(str::to_owned);
                let name = crate::yaml::shorten(&name);
                self.fault("K0301", span, format!("job `{job}` needs unknown {what} `{name}`")).replace(suggestion);
            } else if !seen.insert(name.clone()) {
                // Also a job and a group of one name: expressions could not tell them apart.
                self.fault("K0304", span, format!("job `{job}` needs `{name}` twice"));
            } else {
                match target {
                    Target::Job(job) => needs.jobs.push(Need::on(job, run_on)),
                    Target::Group(group) => needs.groups.push(GroupNeed { group, run_on }),
                }
            }
        }
        needs
    }

    fn need(&mut self, node: &Node) -> Option<(Target, Vec<JobStatus>, Span)> {
        if let Data::Scalar(..) = node.data {
            let job = self.fixed(node, "the name of a job")?.to_owned();
            return Some((Target::Job(job), vec![JobStatus::Success], node.span));
        }
        let fields = self.fields(node, &keys::NEED, "`needs`")?;
        let run_on = match fields.get("when") {
            Some(entry) => self.within("when", |walk| walk.when(&entry.value)),
            None => Some(vec![JobStatus::Success]),
        };
        let (target, span) = match (fields.get("job"), fields.get("group")) {
            (Some(entry), None) => {
                (self.fixed(&entry.value, "the name of a job").map(|n| Target::Job(n.into())), entry.value.span)
            }
            (None, Some(entry)) => {
                (self.fixed(&entry.value, "the name of a group").map(|n| Target::Group(n.into())), entry.value.span)
            }
            (Some(_), Some(entry)) => {
                self.fault("K0103", entry.span, "an entry of `needs` has both `job` and `group`")
                    .help("write two entries");
                return None;
            }
            (None, None) => {
                self.fault("K0101", node.span, "an entry of `needs` has no `job`")
                    .expected(["`job`, the name of a job", "`group`, the name of a group of generated jobs"]);
                return None;
            }
        };
        Some((target?, run_on?, span))
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
