//! Every wrong form, with the place and the text of its diagnostic.

use super::*;

/// A block of sources, separated by lines of `---`, with the diagnostics of each.
fn table(sources: &str) -> String {
    let mut out = String::new();
    for source in sources.split("=====\n").filter(|source| !source.trim().is_empty()) {
        let diagnostics = short(source);
        assert!(!diagnostics.is_empty(), "nothing is wrong with:\n{source}");
        out.push_str(source);
        for line in diagnostics {
            writeln!(out, "=> {}", line.strip_prefix(".kici/workflows/").unwrap_or(&line)).unwrap();
        }
        out.push('\n');
    }
    out
}

#[test]
fn syntax() {
    insta::assert_snapshot!(table(include_str!("refused/syntax.txt")));
}

#[test]
fn workflow() {
    insta::assert_snapshot!(table(include_str!("refused/workflow.txt")));
}

#[test]
fn triggers() {
    insta::assert_snapshot!(table(include_str!("refused/triggers.txt")));
}

#[test]
fn jobs() {
    insta::assert_snapshot!(table(include_str!("refused/jobs.txt")));
}

#[test]
fn git_credentials() {
    insta::assert_snapshot!(table(include_str!("refused/git_credentials.txt")));
}

#[test]
fn containers() {
    insta::assert_snapshot!(table(include_str!("refused/containers.txt")));
}

#[test]
fn steps() {
    insta::assert_snapshot!(table(include_str!("refused/steps.txt")));
}

#[test]
fn caches_and_artifacts() {
    insta::assert_snapshot!(table(include_str!("refused/kept.txt")));
}

#[test]
fn dynamic() {
    insta::assert_snapshot!(table(include_str!("refused/dynamic.txt")));
}

#[test]
fn protection() {
    insta::assert_snapshot!(table(include_str!("refused/protection.txt")));
}

#[test]
fn expressions() {
    insta::assert_snapshot!(table(include_str!("refused/expressions.txt")));
}

#[test]
fn every_planned_key_is_refused_as_such() {
    let refused = |source: &str, key: &str| {
        let found = short(source);
        let expected = format!("key '{key}' in ");
        assert!(found.iter().any(|line| line.contains("[K0108]") && line.contains(&expected)), "{key}: {found:?}");
        assert!(!found.iter().any(|line| line.contains("[K0102]")), "{key}: {found:?}");
    };
    for key in keys::WORKFLOW.planned {
        refused(&format!("on: push\n{key}: x\njobs: {{a: {{runs_on: l, run: x}}}}\n"), key);
    }
    for key in keys::DEFAULTS.planned {
        refused(&format!("on: push\ndefaults: {{{key}: x}}\njobs: {{a: {{runs_on: l, run: x}}}}\n"), key);
    }
    for key in keys::ON.planned {
        refused(&format!("on: {{{key}: x}}\njobs: {{a: {{runs_on: l, run: x}}}}\n"), key);
        let found = short(&format!("on: [{key}]\njobs: {{a: {{runs_on: l, run: x}}}}\n"));
        assert!(found.len() == 1 && found[0].contains("[K0108]"), "{key}: {found:?}");
    }
    for key in keys::JOB.planned {
        refused(&format!("on: push\njobs: {{a: {{runs_on: l, run: x, {key}: x}}}}\n"), key);
    }
    for key in keys::STEP.planned {
        refused(&format!("on: push\njobs: {{a: {{runs_on: l, steps: [{{{key}: x}}]}}}}\n"), key);
    }
    for key in keys::RESOURCES.planned {
        refused(&format!("on: push\njobs: {{a: {{runs_on: l, run: x, resources: {{{key}: 1}}}}}}\n"), key);
    }
    for key in keys::CHECKOUT.planned {
        refused(&format!("on: push\njobs: {{a: {{runs_on: l, run: x, checkout: {{{key}: x}}}}}}\n"), key);
    }
}

#[test]
fn all_faults_of_a_file_come_at_once_and_in_order() {
    let source = "on: pushh\nif: 1 +\njobs:\n  a: {run: x}\n  b:\n    runs_on: l\n    steps: [{run: x, tiemout: 5}]\n";
    let codes: Vec<String> = compile_file(FILE, source).diagnostics.into_iter().map(|d| d.code).collect();
    assert_eq!(codes, ["K0501", "K0401", "K0101", "K0102"]);
}

#[test]
fn the_number_of_diagnostics_is_bounded() {
    let keys: String = (0..500).map(|n| format!("zzz{n}: 1\n")).collect();
    assert_eq!(compile_file(FILE, &keys).diagnostics.len(), MAX_DIAGNOSTICS);
}

#[test]
fn a_fault_in_one_document_or_file_leaves_the_others() {
    let good = |name: &str| format!("name: {name}\non: push\njobs: {{a: {{runs_on: l, run: x}}}}\n");
    let compiled = compile_file(FILE, &format!("{}---\non: nope\n---\n{}", good("one"), good("two")));
    let names: Vec<&str> = compiled.workflows.iter().map(|workflow| workflow.name.as_str()).collect();
    assert_eq!(names, ["one", "two"]);
    let set = compile_set(&[
        ("a.yaml".to_owned(), good("one")),
        ("b.yaml".to_owned(), "{".to_owned()),
        ("c.yaml".to_owned(), good("one")),
        ("d.yaml".to_owned(), good("two")),
    ]);
    assert_eq!(set.workflows().map(|workflow| workflow.name.as_str()).collect::<Vec<_>>(), ["one", "two"]);
    let found: Vec<String> = set.diagnostics().map(render_short).collect();
    assert_eq!(found.len(), 2, "{found:?}");
    assert_eq!(
        found[1],
        "c.yaml:1:7: error[K0306]: workflow 'one' is defined already in a.yaml:1; give it another 'name'"
    );
}

#[test]
fn line_ends_do_not_change_a_workflow() {
    let unix = include_str!("everything.yaml");
    let windows = unix.replace('\n', "\r\n");
    assert_eq!(only(unix), only(&windows));
}

#[test]
fn a_syntax_fault_leaves_the_documents_before_it() {
    let good = "on: push\njobs: {a: {runs_on: l, run: x}}\n";
    assert_eq!(compile_file(FILE, &format!("{good}---\na: [\n")).workflows.len(), 1);
    assert_eq!(compile_file(FILE, &format!("on: push\n{good}")).workflows, []);
    assert_eq!(compile_file(FILE, &format!("a: 1\na: 2\n---\n{good}")).workflows.len(), 1);
}

/// Files as large as they may be, made to cost as much as they can. None may be accepted, all must end soon.
#[test]
fn large_hostile_files_are_refused_early() {
    let fill = |head: &str, piece: &dyn Fn(usize) -> String| {
        let mut source = head.to_owned();
        let mut n = 0;
        while source.len() < 500 * 1024 {
            source.push_str(&piece(n));
            n += 1;
        }
        source
    };
    let jobs = "on: push\njobs:\n  a:\n    runs_on: l\n    run: x\n";
    let files = [
        fill("", &|n| format!("key{n}: 1\n")),
        fill("on: push\njobs:\n", &|n| format!("  j{n}: {{needs: k{n}}}\n")),
        fill(&format!("{jobs}    needs:\n"), &|n| format!("    - aa{n}\n")),
        fill(&format!("{jobs}    matrix:\n      x:\n"), &|n| format!("      - {n}\n")),
        fill("jobs: {a: {runs_on: l, run: x}}\non:\n  push:\n    paths:\n", &|n| format!("    - a*{n}\n")),
        fill("on: push\njobs:\n  a:\n    run: x\n    runs_on:\n", &|n| format!("    - a*{n}\n")),
        fill("on: push\njobs:\n  a:\n    runs_on: l\n    steps:\n", &|n| format!("    - echo {n}\n")),
        fill("jobs: {a: {runs_on: l, run: x}}\non:\n  manual:\n    inputs:\n", &|n| {
            format!("      i{n}: {{pattern: 'a{n}'}}\n")
        }),
    ];
    for source in files {
        let compiled = compile_file(FILE, &source);
        assert!(compiled.has_errors() && compiled.workflows.is_empty(), "{}", &source[..80]);
        assert!(compiled.diagnostics.len() <= MAX_DIAGNOSTICS);
    }
}
