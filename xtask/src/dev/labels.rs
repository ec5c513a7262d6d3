//! Which labels the one agent has to offer so that every job of the repository finds it.

use std::collections::BTreeSet;

use kici_engine::compile::compile_set;
use kici_engine::lock::{Matcher, Matrix};

/// What every agent of `xtask dev` offers besides the labels that come by themselves.
const ALWAYS: &str = "default";

/// Reserved: the orchestrator derives these itself.
const RESERVED: &str = "kici:";

/// All labels that the workflows name literally, or through a value of their matrix, in order. A file that does not
/// compile adds nothing; the run will say what is wrong with it.
pub(crate) fn wanted(files: &[(String, String)]) -> BTreeSet<String> {
    let mut labels: BTreeSet<String> =
        [ALWAYS, std::env::consts::OS, std::env::consts::ARCH].into_iter().map(str::to_owned).collect();
    let compiled = compile_set(files);
    let workflows = compiled.files.iter().flat_map(|(_, file)| &file.workflows);
    for job in workflows.flat_map(|workflow| &workflow.jobs) {
        for matcher in &job.runs_on.labels {
            let Matcher::Exact { value } = matcher else { continue };
            if value.contains("${{") {
                labels.extend(matrix_values(job.matrix.as_ref()).filter(|value| is_label(value)));
            } else if is_label(value) {
                labels.insert(value.to_lowercase());
            }
        }
    }
    labels
}

/// Every value of a written matrix. Which of them ends in `runs_on` is an expression's matter, and one label too many
/// does no harm here.
fn matrix_values(matrix: Option<&Matrix>) -> impl Iterator<Item = String> {
    let table = match matrix {
        Some(Matrix::Table(table)) => Some(table),
        Some(Matrix::Expr(_)) | None => None,
    };
    let values = table.into_iter().flat_map(|table| {
        let included = table.include.iter().flat_map(|variant| variant.values());
        table.dimensions.values().flatten().chain(included)
    });
    values.map(|value| value.to_lowercase()).collect::<Vec<_>>().into_iter()
}

/// The syntax of labels, and not reserved.
fn is_label(text: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || "._:/@+-".contains(c);
    !text.is_empty() && text.len() <= 128 && text.chars().all(plain) && !text.starts_with(RESERVED)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &str) -> Vec<String> {
        let labels = wanted(&[(".kici/workflows/ci.yaml".into(), text.into())]);
        let always = [ALWAYS, std::env::consts::OS, std::env::consts::ARCH];
        labels.into_iter().filter(|label| !always.contains(&label.as_str())).collect()
    }

    #[test]
    fn labels_come_from_the_workflows() {
        assert_eq!(of("not: [a workflow"), Vec::<String>::new());
        let text = "
name: ci
on: push
jobs:
  a: { runs_on: GPU, run: 'true' }
  b: { runs_on: [default, big, 'kici:os:linux'], run: 'true' }
  c: { runs_on: 'deploy-*', run: 'true' }
  d:
    matrix: { size: [small, 'not a label'] }
    runs_on: '${{ matrix.size }}'
    run: 'true'
";
        assert_eq!(of(text), ["big", "gpu", "small"]);
    }
}
