//! No input makes the compiler panic, and what it accepts is whole.

use proptest::prelude::*;

use super::*;

fn check(source: &str) {
    let compiled = compile_file(FILE, source);
    assert!(compiled.diagnostics.len() <= MAX_DIAGNOSTICS);
    assert!(!compiled.diagnostics.is_empty() || !compiled.workflows.is_empty());
    let mut last = (0, 0);
    for diagnostic in &compiled.diagnostics {
        assert!(diagnostic.line >= 1 && diagnostic.col >= 1, "{diagnostic:?}");
        assert!((diagnostic.line, diagnostic.col) >= last);
        last = (diagnostic.line, diagnostic.col);
        render_long(diagnostic, source, false);
        assert_eq!(render_short(diagnostic).lines().count(), 1, "{diagnostic:?}");
    }
    for workflow in &compiled.workflows {
        assert!(!workflow.jobs.is_empty());
        let without_steps = |job: &crate::lock::Job| job.is_run_hooks() || job.invoke.is_some();
        assert!(workflow.jobs.iter().all(|job| without_steps(job) == job.steps.is_empty()));
        let asks = |job: &crate::lock::Job| match &job.runs_on_all {
            Some(hosts) => job.runs_on.is_empty() && job.matrix.is_none() && !hosts.include.is_empty(),
            None => job.invoke.is_some() || !job.runs_on.labels.is_empty(),
        };
        assert!(workflow.jobs.iter().all(asks));
        let json = serde_json::to_string(workflow).unwrap();
        assert_eq!(&serde_json::from_str::<Workflow>(&json).unwrap(), workflow);
        assert_eq!(crate::lockfile::check_workflow(workflow), Ok(()), "what is compiled passes as a lock");
    }
}

/// A valid file with a few pieces cut out, doubled or replaced.
fn mutated() -> impl Strategy<Value = String> {
    let edit = (
        any::<prop::sample::Index>(),
        0_usize..12,
        0_usize..4,
        "[ -~\n\t]{0,4}|[{}\\[\\]:,&*!|>'\"$#%@`?-]{1,3}|ü|\u{feff}",
    );
    prop::collection::vec(edit, 1..6).prop_map(|edits| {
        let mut chars: Vec<char> = include_str!("everything.yaml").chars().collect();
        for (index, length, kind, text) in edits {
            let from = index.index(chars.len().max(1)).min(chars.len());
            let to = (from + length).min(chars.len());
            let piece: Vec<char> = chars[from..to].to_vec();
            match kind {
                0 => drop(chars.drain(from..to)),
                1 => drop(chars.splice(from..from, piece)),
                _ => drop(chars.splice(from..to, text.chars())),
            }
        }
        chars.into_iter().collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn any_text(source in "\\PC{0,200}") {
        check(&source);
    }

    #[test]
    fn any_bytes(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        check(&String::from_utf8_lossy(&bytes));
    }

    #[test]
    fn yaml_like(source in "([ \\-?:,{}\\[\\]&*!|>'\"%@`#\n\ta-c~$<]){0,120}") {
        check(&source);
    }

    #[test]
    fn mutated_files(source in mutated()) {
        check(&source);
    }

    #[test]
    fn any_expression(source in "([ a-z.()\\[\\]{}'\"!&|?:+*/%<>=0-9,\\\\-]){0,60}") {
        let context = crate::expr::Context::new();
        crate::expr::eval_json(&source, &context, &crate::expr::Functions::default()).ok();
        crate::expr::render(&format!("a ${{{{ {source} }}}} b"), &context, &crate::expr::Functions::default()).ok();
    }
}

/// Word lists of the language in random nesting: nearly valid files.
fn nearly(depth: u32) -> impl Strategy<Value = String> {
    let words = keys::WORKFLOW.accepted.iter().chain(keys::JOB.accepted).chain(keys::STEP.accepted);
    let words = words.chain(keys::PARALLEL.accepted).chain(keys::STEP_RETRY.accepted).chain(keys::WAIT_FOR.accepted);
    let words = words.chain(keys::JOB_HOOKS.accepted).chain(keys::INIT.accepted).chain(keys::RULE.accepted);
    let words: Vec<&'static str> = words.chain(keys::ON.accepted).chain(keys::INPUT.accepted).copied().collect();
    let key = prop::sample::select(words);
    let leaf = prop_oneof![
        key.clone().prop_map(str::to_owned),
        Just("${{ inputs.x }}".to_owned()),
        Just("30".to_owned()),
        Just("5m".to_owned()),
        Just("true".to_owned()),
        Just("~".to_owned()),
        "[a-z/*!]{1,6}",
    ];
    let leaf = leaf.prop_map(|text| format!("\"{text}\""));
    leaf.prop_recursive(depth, 60, 6, move |inner| {
        let entry = (key.clone(), inner.clone()).prop_map(|(key, value)| format!("{key}: {value}"));
        prop_oneof![
            prop::collection::vec(inner, 0..4).prop_map(|items| format!("[{}]", items.join(", "))),
            prop::collection::btree_set(entry, 0..6)
                .prop_map(|entries| format!("{{{}}}", entries.into_iter().collect::<Vec<_>>().join(", "))),
        ]
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn nearly_valid_step_files(steps in nearly(4), inputs in nearly(3), with in nearly(2)) {
        let user = "on: push\njobs:\n  a:\n    runs_on: l\n    steps:\n      - x\n      - use: ./.kici/steps/x.yaml\n";
        let part = format!("inputs: {inputs}\nsteps:\n  - {steps}\n  - use: ./.kici/steps/y.yaml\n");
        let files = [
            (FILE.to_owned(), format!("{user}        with: {with}\n")),
            (".kici/steps/x.yaml".to_owned(), part),
            (".kici/steps/y.yaml".to_owned(), format!("steps: [{steps}]\n")),
        ];
        let set = compile_set(&files);
        prop_assert_eq!(set.files.len(), 3);
        for workflow in set.workflows() {
            prop_assert_eq!(crate::lockfile::check_workflow(workflow), Ok(()));
        }
    }

    #[test]
    fn nearly_valid(jobs in nearly(5), on in nearly(3), step in nearly(3)) {
        check(&format!("on: {on}\njobs:\n  a: {jobs}\n  b:\n    runs_on: l\n    steps: [{step}]\n"));
    }
}
