//! What the mutations start from.

use std::path::{Path, PathBuf};

use anyhow::Result;

use crate::workspace::Workspace;

/// A kind of input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Corpus {
    /// Workflow files.
    Workflows,
    /// Workflow files of any system.
    Foreign,
    /// Lock documents.
    Locks,
    /// Expressions and templates, one each.
    Expressions,
    /// `PATH<newline>EXPECTED<newline>DOCUMENT`.
    Paths,
    /// `EVENT<newline>BODY`.
    Webhooks,
}

/// Expressions of every form that the language has.
const EXPRESSIONS: [&str; 14] = [
    "branch == 'main' && event.kind in ['push', 'tag']",
    "has(event.payload.pull_request) ? event.payload.pull_request.title : ''",
    "event.payload.commits.exists(c, c.message.contains('x'))",
    "[1, 2, 3].map(x, x * 2).filter(x, x > 2)",
    "inputs.n + 1 < 2 || !(matrix.os in ['a'])",
    "ref.matches('^refs/(heads|tags)/.*$')",
    "glob(ref, 'refs/**/x*')",
    "from_json('{\"a\": [1, null, true]}').a[0]",
    "to_json(event) + string(1.5) + join(['a', 'b'], ',')",
    "duration('1h30m') > duration('30m') && timestamp('2026-01-01T00:00:00Z').getFullYear() == 2026",
    "success() || failure() && cancelled() || always()",
    "a ${{ matrix.os }}-${{ inputs.n }} b",
    "${{ needs.a.outputs.b }}",
    "{'a': 1, 'b': [dyn(2), 'c']}['a']",
];

const PATHS: [&str; 6] = [
    "$.scope\n[\"all\", \"x\"]\n{\"scope\": \"all\"}",
    "$.a[?@.b > 1].c\n\"/^x/i\"\n{\"a\": [{\"b\": 2, \"c\": \"xyz\"}]}",
    "$..name\ntrue\n{\"name\": true, \"x\": {\"name\": false}}",
    "$.a[1:5:2]\n3\n{\"a\": [1, 2, 3, 4]}",
    "$['a b'][-1]\nnull\n{\"a b\": [null]}",
    "$.a[?length(@.b) == 3 && match(@.c, 'x.*')]\n{}\n{\"a\": []}",
];

const WEBHOOKS: [&str; 3] = [
    "push\n{\"ref\": \"refs/heads/main\", \"before\": \"0000000000000000000000000000000000000000\", \"after\": \"1111111111111111111111111111111111111111\", \"repository\": {\"full_name\": \"o/r\", \"default_branch\": \"main\"}, \"commits\": [{\"added\": [\"a\"], \"message\": \"m\"}]}",
    "pull_request\n{\"action\": \"opened\", \"number\": 1, \"pull_request\": {\"head\": {\"ref\": \"t\", \"sha\": \"1111111111111111111111111111111111111111\", \"repo\": {\"full_name\": \"o/r\", \"id\": 1}}, \"base\": {\"ref\": \"main\", \"sha\": \"2222222222222222222222222222222222222222\", \"repo\": {\"full_name\": \"o/r\", \"id\": 1}}}, \"repository\": {\"full_name\": \"o/r\"}}",
    "deploy\npayload=%7B%22a%22%3A1%7D&x=y",
];

/// Foreign files of the forms that the converters know.
const FOREIGN: [&str; 3] = [
    "name: CI\non: { push: { branches: [main] }, workflow_dispatch: { inputs: { a: { type: boolean } } } }\njobs:\n  b:\n    runs-on: ${{ matrix.os }}\n    strategy: { matrix: { os: [a, b], include: [{ os: c, x: 1 }] } }\n    if: github.event_name == 'push' && contains(github.ref, 'x')\n    steps:\n      - uses: actions/checkout@v4\n      - run: |\n          echo '${{ matrix.x }}' ${{ github.event.number || 'none' }}\n",
    "stages: [build, test]\nvariables: { A: x, B: \"$A-y\" }\n.base: { script: [make], rules: [{ if: '$CI_COMMIT_TAG =~ /^v/', when: never }, { when: on_success }] }\nbuild: { extends: .base, stage: build, parallel: { matrix: [{ X: [1, 2] }] } }\ntest: { stage: test, script: [!reference [.base, script], 'echo $CI_PROJECT_DIR'], needs: [{ job: build, optional: true }] }\n",
    "when: [{ event: push, branch: { include: [main], exclude: ['x/*'] } }]\nmatrix: { V: [1, 2] }\nsteps:\n  - { name: a, image: x, commands: ['echo $${V}'], when: { status: [success, failure] } }\n  - { name: b, image: plugins/x, settings: { t: { from_secret: s } } }\n",
];

/// The inputs of one kind: samples of this file, files of the repository and, where they are, the real files beside it.
pub(super) fn of(workspace: &Workspace, kind: Corpus) -> Result<Vec<Vec<u8>>> {
    let texts = |texts: &[&str]| texts.iter().map(|text| text.as_bytes().to_vec()).collect::<Vec<_>>();
    let real = beside(workspace);
    Ok(match kind {
        Corpus::Workflows => {
            let mut all = workflows(workspace)?;
            all.extend(files(&real.join("workflows/github"))?);
            all
        }
        Corpus::Foreign => {
            let mut all = texts(&FOREIGN);
            for system in ["github", "gitlab", "woodpecker"] {
                all.extend(files(&real.join("workflows").join(system))?);
            }
            all
        }
        Corpus::Locks => locks(&workflows(workspace)?),
        Corpus::Expressions => texts(&EXPRESSIONS),
        Corpus::Paths => texts(&PATHS),
        Corpus::Webhooks => {
            let mut all = texts(&WEBHOOKS);
            for path in listed(&real.join("webhooks/github"))? {
                let event = path.file_name().unwrap_or_default().to_string_lossy();
                let event = event.split('.').next().unwrap_or_default().as_bytes().to_vec();
                all.push([event, b"\n".to_vec(), std::fs::read(&path)?].concat());
            }
            all
        }
    })
}

/// Real files that are not part of the repository.
fn beside(workspace: &Workspace) -> PathBuf {
    let mut roots = workspace.root.ancestors().map(|folder| folder.join("shared/data"));
    roots.find(|folder| folder.is_dir()).unwrap_or_default()
}

fn workflows(workspace: &Workspace) -> Result<Vec<Vec<u8>>> {
    let mut all = Vec::new();
    for example in listed(&workspace.root.join("examples"))? {
        all.extend(files(&example.join(".kici/workflows"))?);
    }
    all.extend(files(&workspace.root.join(".kici/workflows"))?);
    Ok(all)
}

/// What the workflows compile to.
fn locks(workflows: &[Vec<u8>]) -> Vec<Vec<u8>> {
    let compile = |bytes: &Vec<u8>| {
        let text = String::from_utf8_lossy(bytes).into_owned();
        let compiled = kici_engine::compile::compile_file("a.yaml", &text).workflows;
        serde_json::to_vec(&super::targets::document(compiled)).unwrap_or_default()
    };
    workflows.iter().map(compile).collect()
}

fn files(folder: &Path) -> Result<Vec<Vec<u8>>> {
    listed(folder)?.iter().filter(|path| path.is_file()).map(|path| Ok(std::fs::read(path)?)).collect()
}

/// The entries of a folder by name; none when it is not there.
fn listed(folder: &Path) -> Result<Vec<PathBuf>> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Ok(Vec::new()) };
    let mut paths = entries.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
    paths.sort();
    Ok(paths)
}
