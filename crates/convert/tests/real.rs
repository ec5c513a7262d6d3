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
