//! The last look: what is written must compile. What the compiler refuses is taken out and named; a condition is replaced by
//! one that is false, since what it guards must not run without it.

use kici_engine::compile::compile_file;
use kici_engine::diagnostic::Diagnostic;
use kici_engine::yaml::Pos;

use crate::Dialect;
use crate::source::Report;
use crate::target::{Map, Y};

/// Rounds of taking out; each one removes at least one thing.
const ROUNDS: usize = 40;

/// The text of a workflow that compiles.
///
/// # Errors
/// Why there is none.
pub(crate) fn settle(mut workflow: Y, dialect: Dialect, report: &Report) -> Result<String, String> {
    for _ in 0..ROUNDS {
        drop_dead_ends(&mut workflow, report)?;
        let text = format!("# Converted from {dialect} by `kici-admin workflow convert`.\n{}", workflow.render());
        let compiled = compile_file("converted.yaml", &text);
        let mut errors: Vec<&Diagnostic> = compiled.diagnostics.iter().filter(|found| found.is_error()).collect();
        if errors.is_empty() {
            return Ok(text);
        }
        // Deepest first, so that a list keeps its positions while things go.
        errors.sort_by_key(|error| std::cmp::Reverse((error.line, error.col)));
        let mut changed = false;
        let mut gone: Vec<Vec<&str>> = Vec::new();
        for error in errors {
            let mut path: Vec<&str> = error.path.split('.').filter(|key| !key.is_empty()).collect();
            // Two keys that do not go together yet: the first that is named goes, not all that is around it.
            let named = error.message.split('`').nth(1).filter(|_| error.code == "K0108");
            if let Some(key) = named.filter(|key| has(&workflow, &path, key)) {
                path.push(key);
            }
            // A second fault of what just went is no fault of what is around it.
            if gone.iter().any(|gone| path.starts_with(gone)) {
                continue;
            }
            gone.push(path.clone());
            changed |= remove(&mut workflow, &path, Pos::default(), "", &error.message, report);
        }
        if !changed {
            return Err(format!("what would be written is not valid: {}", errors_of(&compiled.diagnostics)));
        }
    }
    Err("what would be written is not valid".to_owned())
}

/// Whether the map that a path leads to has a key.
fn has(workflow: &Y, path: &[&str], key: &str) -> bool {
    let end = path.iter().try_fold(workflow, |at, key| match at {
        Y::Map(map) => map.get(key),
        _ => None,
    });
    matches!(end, Some(Y::Map(map)) if map.has(key))
}

fn errors_of(diagnostics: &[Diagnostic]) -> String {
    let errors = diagnostics.iter().filter(|found| found.is_error()).take(3);
    errors.map(|error| format!("{}: {}", error.path, error.message)).collect::<Vec<_>>().join("; ")
}

/// Takes out what a path leads to; as much of it as there is.
fn remove(at: &mut Y, path: &[&str], from: Pos, walked: &str, why: &str, report: &Report) -> bool {
    let Some((first, rest)) = path.split_first() else { return false };
    let walked = if walked.is_empty() { (*first).to_owned() } else { format!("{walked}.{first}") };
    match at {
        Y::Map(map) => {
            let Some(found) = map.0.iter().position(|(key, ..)| key == first) else { return false };
            let place = if map.0[found].1 == Pos::default() { from } else { map.0[found].1 };
            if !rest.is_empty() && remove(&mut map.0[found].2, rest, place, &walked, why, report) {
                return true;
            }
            report.lose(place, walked, why);
            if *first == "if" && map.0[found].2 != Y::Text("false".to_owned()) {
                map.0[found].2 = Y::Text("false".to_owned());
            } else {
                map.0.remove(found);
            }
            true
        }
        Y::List(items) => {
            let Ok(index) = first.parse::<usize>() else { return false };
            let Some(index) = nth(items, index) else { return false };
            let place = place_of(&items[index]).unwrap_or(from);
            if !rest.is_empty() && remove(&mut items[index], rest, place, &walked, why, report) {
                return true;
            }
            report.lose(place, walked, why);
            items[index] = Y::Note(format!("not converted: {why}"));
            true
        }
        _ => false,
    }
}

/// Comments stand in the list and do not count for the compiler.
fn nth(items: &[Y], wanted: usize) -> Option<usize> {
    items.iter().enumerate().filter(|(_, item)| !matches!(item, Y::Note(_))).nth(wanted).map(|(at, _)| at)
}

fn place_of(item: &Y) -> Option<Pos> {
    match item {
        Y::Map(Map(entries)) => entries.iter().map(|(_, place, _)| *place).find(|place| *place != Pos::default()),
        _ => None,
    }
}

/// Jobs without a step go, and the edges to them.
fn drop_dead_ends(workflow: &mut Y, report: &Report) -> Result<(), String> {
    let Y::Map(root) = workflow else { return Ok(()) };
    let Some((_, _, Y::Map(jobs))) = root.0.iter_mut().find(|(key, ..)| key == "jobs") else {
        return Err("nothing of it can run".to_owned());
    };
    jobs.0.retain(|(name, place, job)| {
        let runs = matches!(job, Y::Map(job) if matches!(job.get("steps"), Some(Y::List(steps)) if steps.iter().any(|s| !matches!(s, Y::Note(_)))));
        if !runs {
            report.lose(*place, format!("jobs.{name}"), "nothing of the job can run; it is left out");
        }
        runs
    });
    if jobs.0.is_empty() {
        return Err("no job of it can run; see what is lost".to_owned());
    }
    let names: Vec<String> = jobs.0.iter().map(|(name, ..)| name.clone()).collect();
    for (_, _, job) in &mut jobs.0 {
        let Y::Map(job) = job else { continue };
        for (key, place, value) in &mut job.0 {
            let Y::List(needs) = value else { continue };
            if key != "needs" {
                continue;
            }
            needs.retain(|need| {
                let target = match need {
                    Y::Text(name) => Some(name),
                    Y::Map(map) => match map.get("job") {
                        Some(Y::Text(name)) => Some(name),
                        _ => None,
                    },
                    _ => None,
                };
                let there = target.is_some_and(|name| names.contains(name));
                if !there {
                    report.lose(*place, "needs", format!("job `{}` was left out", target.map_or("?", String::as_str)));
                }
                there
            });
        }
        job.0.retain(|(key, _, value)| key != "needs" || *value != Y::List(Vec::new()));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_compiler_refuses_goes_and_a_condition_becomes_false() {
        let at = |line| Pos { line, col: 1 };
        let mut step = Map::default();
        step.text("if", at(5), "nonsense == 1");
        step.text("run", at(6), "true");
        let mut job = Map::default();
        job.put("needs", at(3), Y::texts(["gone"]));
        job.text("runs_on", at(4), "x");
        job.text("colour", at(9), "red");
        job.put("steps", at(5), Y::List(vec![Y::Note("n".into()), Y::Map(step)]));
        let mut gone = Map::default();
        gone.put("steps", at(8), Y::List(vec![Y::Note("n".into())]));
        let mut jobs = Map::default();
        jobs.put("a", at(2), Y::Map(job));
        jobs.put("gone", at(7), Y::Map(gone));
        let mut root = Map::default();
        root.text("on", at(1), "push");
        root.put("jobs", at(2), Y::Map(jobs));
        let report = Report::default();
        let text = settle(Y::Map(root), Dialect::Github, &report).unwrap();
        assert!(text.contains("if: \"false\"") && !text.contains("colour") && !text.contains("needs"), "{text}");
        let places: Vec<(u32, String)> = report.losses().into_iter().map(|loss| (loss.line, loss.key)).collect();
        let expected = [(3, "needs"), (5, "jobs.a.steps.0.if"), (7, "jobs.gone"), (9, "jobs.a.colour")];
        assert_eq!(places, expected.map(|(line, key)| (line, key.to_owned())));
    }
}
