//! Real files of public repositories. They are not part of this repository: the folder is named by KICI_TEST_WORKFLOWS, or
//! lies beside it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use kici_convert::{Conversion, Dialect, Options, Outcome, convert};
use kici_engine::compile::compile_file;

fn folder() -> Option<PathBuf> {
    let named = std::env::var_os("KICI_TEST_WORKFLOWS").map(PathBuf::from);
    let near = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/data/workflows");
    let nearer = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../../shared/data/workflows");
    named.into_iter().chain([near, nearer]).find(|path| path.is_dir())
}

fn all() -> BTreeMap<String, (String, Conversion)> {
    let Some(folder) = folder() else {
        eprintln!("skipped: no folder with real files; name it by KICI_TEST_WORKFLOWS");
        return BTreeMap::new();
    };
    let mut out = BTreeMap::new();
    for system in ["github", "gitlab", "woodpecker"] {
        for entry in std::fs::read_dir(folder.join(system)).expect("a folder") {
            let path = entry.expect("an entry").path();
            let text = std::fs::read_to_string(&path).expect("text");
            let name = format!("{system}/{}", path.file_name().expect("a name").to_string_lossy());
            let made = convert(&name, &text, None, &Options::default());
            out.insert(name, (text, made));
        }
    }
    assert_eq!(out.len(), 65);
    out
}

#[test]
fn every_real_file_has_an_outcome_and_what_is_written_compiles() {
    for (name, (text, made)) in all() {
        let lines = text.lines().count() as u32;
        for loss in &made.losses {
            assert!(
                (1..=lines + 1).contains(&loss.line) && loss.column >= 1 && !loss.reason.is_empty(),
                "{name}: {loss:?}"
            );
        }
        match (&made.outcome, &made.text) {
            (Outcome::Refused { reason }, None) => {
                assert!(!reason.contains("would be written"), "{name}: {reason}");
            }
            (Outcome::Runs, Some(_)) => assert_eq!(made.losses, [], "{name}"),
            (Outcome::RunsWithLoss, Some(_)) => assert!(!made.losses.is_empty(), "{name}"),
            other => panic!("{name}: {other:?}"),
        }
        if let Some(written) = &made.text {
            let compiled = compile_file("converted.yaml", written);
            let errors: Vec<_> = compiled.diagnostics.iter().filter(|d| d.is_error()).collect();
            assert!(errors.is_empty(), "{name}: {errors:#?}\n{written}");
            assert_eq!(compiled.workflows.len(), 1, "{name}");
        }
        let expected = if name.starts_with("github") {
            vec![Dialect::Github]
        } else if name.starts_with("gitlab") {
            vec![Dialect::Gitlab]
        } else {
            vec![Dialect::Woodpecker, Dialect::Drone]
        };
        assert!(expected.contains(&made.dialect), "{name}: {}", made.dialect);
    }
}

/// Most files run after the conversion; that this stays so is worth a number.
#[test]
fn most_real_files_are_not_refused() {
    let all = all();
    let refused: Vec<String> = all
        .iter()
        .filter_map(|(name, (_, made))| match &made.outcome {
            Outcome::Refused { reason } => Some(format!("{name}: {reason}")),
            _ => None,
        })
        .collect();
    for (name, (_, made)) in &all {
        println!("{name}: {:?}, {} losses", made.outcome, made.losses.len());
    }
    println!("{}", refused.join("\n"));
    assert!(refused.len() <= 10, "{refused:#?}");
}

/// The keys that are lost most often, without what leads there.
fn lost(made: &Conversion) -> String {
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for loss in &made.losses {
        let key = loss.key.rsplit('.').find(|part| part.parse::<usize>().is_err()).unwrap_or("-");
        *counts.entry(if key.is_empty() { "-" } else { key }).or_default() += 1;
    }
    let mut counts: Vec<(&str, usize)> = counts.into_iter().collect();
    counts.sort_by_key(|(key, count)| (std::cmp::Reverse(*count), *key));
    let shown: Vec<String> = counts.iter().take(6).map(|(key, count)| format!("`{key}` {count}")).collect();
    let more = counts.len().saturating_sub(shown.len());
    shown.join(", ") + &if more > 0 { format!(", {more} more") } else { String::new() }
}

/// The report of the documentation tells the truth: each file, and what becomes of it. `UPDATE=1` writes it again.
#[test]
fn the_report_of_the_documentation_is_of_these_files() {
    let all = all();
    if all.is_empty() {
        return;
    }
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/converting-report.md");
    if std::env::var_os("UPDATE").is_some() {
        std::fs::write(&path, report(&all)).expect("written");
    }
    let written = std::fs::read_to_string(&path).expect("the report");
    for (name, (_, made)) in &all {
        let start = format!("| {name} | {} |", outcome(made));
        assert!(written.contains(&start), "`{start}` is not in docs/converting-report.md; UPDATE=1 writes it again");
    }
}

fn outcome(made: &Conversion) -> String {
    match &made.outcome {
        Outcome::Runs => "runs".to_owned(),
        Outcome::RunsWithLoss => "runs with losses".to_owned(),
        Outcome::Refused { reason } => format!("refused: {reason}"),
    }
}

fn report(all: &BTreeMap<String, (String, Conversion)>) -> String {
    let mut out = String::from(
        "# Real files, converted\n\nWhat `kici-admin workflow convert` makes of 65 public files of other systems, unchanged: the outcome, the jobs of \
         the workflow,\nhow many losses are named, and the keys that are lost most often with their numbers. Made by the tests of \
         `kici-convert`\n(`UPDATE=1`); [converting.md](converting.md) says what comes along.\n\n",
    );
    let count = |wanted: &str| all.values().filter(|(_, made)| outcome(made).starts_with(wanted)).count();
    let losses = count("runs with losses");
    out += &format!(
        "{} run as they were, {losses} run with losses, {} are refused.\n\n| file | outcome | jobs | losses | lost most often |\n|---|---|---|---|---|\n",
        count("runs") - losses,
        count("refused")
    );
    for (name, (_, made)) in all {
        let jobs = made.text.as_deref().map_or(0, |text| {
            compile_file("converted.yaml", text).workflows.iter().map(|workflow| workflow.jobs.len()).sum()
        });
        out += &format!("| {name} | {} | {jobs} | {} | {} |\n", outcome(made), made.losses.len(), lost(made));
    }
    out
}
