//! GitLab CI. <https://docs.gitlab.com/ci/yaml/>

mod containers;
mod job;
mod kept;
mod resolve;
mod rules;

use std::collections::BTreeMap;

use kici_engine::yaml::{Document, Node, Pos};

use crate::Options;
use crate::source::{Fields, Report, entries, get, items};
use crate::target::{Map, Y, job_name};
use job::{Job, Variables};
use kept::Product;
use resolve::Resolver;

/// Keys of the file that are no jobs.
const GLOBALS: [&str; 12] = [
    "after_script",
    "before_script",
    "cache",
    "default",
    "image",
    "include",
    "services",
    "spec",
    "stages",
    "types",
    "variables",
    "workflow",
];
/// Those of them that jobs take over.
const INHERITED: [&str; 5] = ["after_script", "before_script", "cache", "image", "services"];
/// The stages where the file names none.
const STAGES: [&str; 3] = ["build", "test", "deploy"];

/// What jobs share.
struct Around<'a> {
    /// Names of the jobs, here, by name there.
    names: &'a BTreeMap<String, String>,
    /// Names of the jobs before each stage, nearest stage only.
    before: &'a BTreeMap<String, Vec<String>>,
    /// Names of the jobs of all stages before, likewise.
    earlier: &'a BTreeMap<String, Vec<String>>,
    /// What jobs hand over, by name there.
    products: &'a BTreeMap<String, Product>,
    /// The variables of the file.
    variables: &'a Variables,
    /// Pull requests start the workflow.
    merge_requests: bool,
    options: &'a Options,
    report: &'a Report,
}

/// Converts a file. `tags` are the places of `!reference`.
///
/// # Errors
/// Why there is nothing to write.
pub(crate) fn convert(
    documents: &[Document],
    tags: &[Pos],
    stem: &str,
    options: &Options,
    report: &Report,
) -> Result<Y, String> {
    // Inputs of an included file stand in a document before it.
    let documents = match documents {
        [first, rest @ ..] if !rest.is_empty() && get(&first.root, "spec").is_some() => {
            report.lose(first.root.span.start, "spec", crate::later::reason("spec"));
            rest
        }
        all => all,
    };
    let node = crate::only(documents, report)?;
    let resolver = Resolver::new(node, tags, report);
    let root = Fields::of(node, "", report);
    root.later("include");
    let from = node.span.start;
    let variables = Variables::of(root.fields("variables").as_ref(), &Variables::default());
    let jobs = jobs(&root, &resolver, report);
    if jobs.is_empty() {
        return Err("the file has no jobs; it only brings others together".to_owned());
    }
    let mut out = Map::default();
    out.text("name", from, stem);
    let merge_requests = mentions(node, "merge_request");
    let mut on = Map::default();
    for event in ["push", "tag", "pull_request", "manual"] {
        if event != "pull_request" || merge_requests {
            on.put(event, from, Y::Map(Map::default()));
        }
    }
    out.put("on", from, Y::Map(on));
    if let Some(workflow) = root.fields("workflow")
        && let Some(rules) = workflow.take("rules")
    {
        let rules = resolver.node(rules);
        let made = rules::of_rules(&rules, &workflow.at("rules"), &variables.fixed, report);
        if made.condition != "true" {
            out.text("if", from, made.condition);
        }
    }
    out.some("env", from, Y::Map(variables.env()));
    let stages = stages(&root, &jobs, report);
    let Order { names, before, earlier } = order(&jobs, &stages);
    let product = |(name, _, node): &(String, Pos, Node)| Some((name.clone(), Product::of(node)?));
    let around = Around {
        names: &names,
        before: &before,
        earlier: &earlier,
        products: &jobs.iter().filter(|(.., node)| get(node, "script").is_some()).filter_map(product).collect(),
        variables: &variables,
        merge_requests,
        options,
        report,
    };
    let mut written = Map::default();
    for (name, place, node) in &jobs {
        let fields = Fields::of(node, name.clone(), report);
        let job = Job { name, fields, around: &around, from: *place };
        written.put(&names[name], *place, Y::Map(job.convert()));
    }
    out.put("jobs", from, Y::Map(written));
    Ok(Y::Map(out))
}

/// The jobs with their templates and defaults merged in.
fn jobs(root: &Fields<'_>, resolver: &Resolver<'_>, report: &Report) -> Vec<(String, Pos, Node)> {
    let mut defaults: Vec<&Node> = Vec::new();
    let mut inherited = Vec::new();
    for key in INHERITED {
        inherited.extend(root.entry(key).cloned());
    }
    let globals_node = resolver.map(inherited);
    defaults.push(&globals_node);
    let default = root.take("default").map(|node| resolver.node(node));
    defaults.extend(default.as_ref());
    let mut out = Vec::new();
    let all = root.rest();
    let mut used: Vec<String> = Vec::new();
    for entry in &all {
        if entry.key.starts_with('.') || GLOBALS.contains(&entry.key.as_str()) {
            continue;
        }
        if entries(&entry.value).is_empty() {
            report.lose(entry.span.start, entry.key.clone(), crate::later::reason(&entry.key));
            continue;
        }
        let whole = resolver.job(&entry.key, &entry.value, &defaults, &mut used);
        out.push((entry.key.clone(), entry.span.start, whole));
    }
    for entry in &all {
        let known = matches!(entry.key.as_str(), "stages" | "types" | "workflow" | "variables" | "include");
        if entry.key.starts_with('.') && !used.contains(&entry.key) && !resolver.refers_to(&entry.key) {
            report.lose(entry.span.start, entry.key.clone(), "a template that no job of this file uses");
        } else if GLOBALS.contains(&entry.key.as_str()) && !known && !INHERITED.contains(&entry.key.as_str()) {
            report.lose(entry.span.start, entry.key.clone(), crate::later::reason(&entry.key));
        }
    }
    out
}

fn stages(root: &Fields<'_>, jobs: &[(String, Pos, Node)], report: &Report) -> Vec<String> {
    let mut named: Vec<String> = vec![".pre".to_owned()];
    let uses = |stage: &str| jobs.iter().any(|(.., node)| stage_of(node) == stage);
    match root.take("stages").or_else(|| root.take("types")) {
        Some(node) => {
            for item in items(node) {
                let stage = item.text().unwrap_or_default();
                if !uses(stage) {
                    report.lose(item.span.start, "stages", crate::later::reason("stages"));
                }
                named.push(stage.to_owned());
            }
        }
        None => named.extend(STAGES.map(str::to_owned)),
    }
    named.push(".post".to_owned());
    named
}

fn stage_of(node: &Node) -> &str {
    get(node, "stage").and_then(Node::text).unwrap_or("test")
}

/// The names of the jobs, and for each of them the jobs of the nearest stage before its own that has any, and of all.
struct Order {
    names: BTreeMap<String, String>,
    before: BTreeMap<String, Vec<String>>,
    earlier: BTreeMap<String, Vec<String>>,
}

fn order(jobs: &[(String, Pos, Node)], stages: &[String]) -> Order {
    let mut names = BTreeMap::new();
    let mut taken = Vec::new();
    for (name, ..) in jobs {
        let ours = job_name(name, &taken);
        taken.push(ours.clone());
        names.insert(name.clone(), ours);
    }
    let rank = |node: &Node| stages.iter().position(|stage| stage == stage_of(node)).unwrap_or(stages.len());
    // Jobs without a script never run; waiting for them would make no sense.
    let runs = |node: &Node| get(node, "script").is_some() || get(node, "run").is_some();
    let (mut before, mut earlier) = (BTreeMap::new(), BTreeMap::new());
    for (name, _, node) in jobs {
        let mine = rank(node);
        let nearest =
            jobs.iter().filter(|(.., other)| runs(other)).map(|(.., other)| rank(other)).filter(|r| *r < mine).max();
        let ahead = jobs.iter().filter(|(.., other)| runs(other) && Some(rank(other)) == nearest);
        before.insert(name.clone(), ahead.map(|(other, ..)| other.clone()).collect());
        let all = jobs.iter().filter(|(.., other)| runs(other) && rank(other) < mine);
        earlier.insert(name.clone(), all.map(|(other, ..)| other.clone()).collect());
    }
    Order { names, before, earlier }
}

/// Whether a word stands anywhere in the file.
fn mentions(node: &Node, word: &str) -> bool {
    node.text().is_some_and(|text| text.contains(word))
        || items(node).into_iter().any(|item| !std::ptr::eq(item, node) && mentions(item, word))
        || entries(node).iter().any(|entry| mentions(&entry.value, word))
}
