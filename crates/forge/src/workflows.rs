//! The workflow files of one commit, and the limits on them (R11).

use serde::{Deserialize, Serialize};

/// Folder of workflow files, relative to the repository.
pub const WORKFLOW_DIR: &str = ".kici/workflows";
/// Folder of step files, relative to the repository.
pub const STEP_DIR: &str = ".kici/steps";
/// Settings of a repository.
pub const CONFIG_FILE: &str = ".kici/config.yaml";
/// A lock document written by a program.
pub const LOCK_FILE: &str = ".kici/kici.lock.json";

/// Limits on what is read from a commit. What exceeds them is named in [`WorkflowFiles::skipped`], never read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Most workflow files.
    pub max_files: usize,
    /// Most bytes of one workflow file or of `config.yaml`.
    pub max_file_bytes: u64,
    /// Most bytes of the lock document.
    pub max_lock_bytes: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self { max_files: 100, max_file_bytes: 512 * 1024, max_lock_bytes: 5 * 1024 * 1024 }
    }
}

/// One file with its content.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkflowFile {
    /// Path in the repository, with `/`.
    pub path: String,
    /// Content; always UTF-8.
    pub content: String,
}

/// A file that was not read, and why.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Skipped {
    /// Path in the repository.
    pub path: String,
    /// Why, as a phrase for the delivery's note.
    pub reason: String,
}

/// What a commit says about workflows.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkflowFiles {
    /// `.kici/workflows/*.{yaml,yml}`, sorted by path. Names that start with `_` and sub-folders are not workflows.
    pub files: Vec<WorkflowFile>,
    /// `.kici/steps/*.{yaml,yml}`, sorted by path: steps that workflows use.
    #[serde(default)]
    pub steps: Vec<WorkflowFile>,
    /// `.kici/config.yaml`.
    pub config: Option<String>,
    /// `.kici/kici.lock.json`.
    pub lock: Option<String>,
    /// What was left out: too large, too many, not UTF-8.
    pub skipped: Vec<Skipped>,
    /// The commit's message, where reading it costs nothing (local repositories).
    pub commit_message: Option<String>,
}

impl WorkflowFiles {
    /// All that is compiled together: workflows and the steps that they use, with their paths.
    pub fn sources(&self) -> Vec<(String, String)> {
        self.files.iter().chain(&self.steps).map(|file| (file.path.clone(), file.content.clone())).collect()
    }

    /// Whether the commit has nothing that could describe a workflow.
    pub fn is_empty(&self) -> bool {
        self.files.is_empty() && self.lock.is_none() && self.skipped.is_empty()
    }

    /// Approximate size in memory, in bytes.
    pub fn weight(&self) -> u64 {
        let files: usize = self.files.iter().chain(&self.steps).map(|f| f.path.len() + f.content.len()).sum();
        let rest = [&self.config, &self.lock, &self.commit_message];
        let rest: usize = rest.into_iter().flatten().map(String::len).sum();
        (files + rest + 256) as u64
    }
}

/// What a file is to us.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    Workflow,
    Step,
    Config,
    Lock,
}

/// One file of the tree that is to be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Wanted {
    pub path: String,
    pub oid: String,
    pub role: Role,
}

/// Collects what a tree offers, within the limits. Both forges use it, so that both have the same rules.
#[derive(Debug)]
pub(crate) struct Selection {
    limits: Limits,
    wanted: Vec<Wanted>,
    skipped: Vec<Skipped>,
}

impl Selection {
    pub fn new(limits: Limits) -> Self {
        Self { limits, wanted: Vec::new(), skipped: Vec::new() }
    }

    /// What `path` is; `None` for everything that is not read.
    pub fn role(path: &str) -> Option<Role> {
        if path == CONFIG_FILE {
            return Some(Role::Config);
        }
        if path == LOCK_FILE {
            return Some(Role::Lock);
        }
        let below = |folder: &str| path.strip_prefix(folder)?.strip_prefix('/');
        let (name, role) = match (below(WORKFLOW_DIR), below(STEP_DIR)) {
            (Some(name), _) => (name, Role::Workflow),
            (None, name) => (name?, Role::Step),
        };
        let yaml = name.ends_with(".yaml") || name.ends_with(".yml");
        (yaml && !name.starts_with('_') && !name.contains('/')).then_some(role)
    }

    /// Offers a regular file. `size` is `None` when the tree does not tell; [`Selection::fill`] checks again.
    pub fn offer(&mut self, path: &str, oid: &str, size: Option<u64>) {
        let Some(role) = Self::role(path) else { return };
        if let Some(reason) = size.and_then(|s| self.too_large(role, s)) {
            self.skip(path, reason);
            return;
        }
        self.wanted.push(Wanted { path: path.to_owned(), oid: oid.to_owned(), role });
    }

    /// What is to be read, sorted by path; beyond the file limit the rest is skipped.
    pub fn take(&mut self) -> Vec<Wanted> {
        self.wanted.sort_by(|a, b| a.path.cmp(&b.path));
        let (mut workflows, mut steps) = (0, 0);
        let mut kept = Vec::new();
        for wanted in std::mem::take(&mut self.wanted) {
            if wanted.role == Role::Workflow {
                workflows += 1;
                if workflows > self.limits.max_files {
                    let reason = format!("more than {} workflow files in one repository", self.limits.max_files);
                    self.skipped.push(Skipped { path: wanted.path, reason });
                    continue;
                }
            }
            if wanted.role == Role::Step {
                steps += 1;
                if steps > self.limits.max_files {
                    let reason = format!("more than {} step files in one repository", self.limits.max_files);
                    self.skipped.push(Skipped { path: wanted.path, reason });
                    continue;
                }
            }
            kept.push(wanted);
        }
        kept
    }

    /// Why a file of this size is not read.
    pub fn too_large(&self, role: Role, size: u64) -> Option<String> {
        let limit = if role == Role::Lock { self.limits.max_lock_bytes } else { self.limits.max_file_bytes };
        (size > limit).then(|| format!("{size} bytes, the limit is {limit}"))
    }

    /// Records a file that was left out.
    pub fn skip(&mut self, path: &str, reason: String) {
        self.skipped.push(Skipped { path: path.to_owned(), reason });
    }

    /// Puts the contents together.
    pub fn fill(mut self, contents: Vec<(Wanted, Vec<u8>)>, commit_message: Option<String>) -> WorkflowFiles {
        let mut out = WorkflowFiles { commit_message, ..WorkflowFiles::default() };
        for (wanted, bytes) in contents {
            if let Some(reason) = self.too_large(wanted.role, bytes.len() as u64) {
                self.skip(&wanted.path, reason);
                continue;
            }
            let Ok(content) = String::from_utf8(bytes) else {
                self.skip(&wanted.path, "not UTF-8".to_owned());
                continue;
            };
            match wanted.role {
                Role::Workflow => out.files.push(WorkflowFile { path: wanted.path, content }),
                Role::Step => out.steps.push(WorkflowFile { path: wanted.path, content }),
                Role::Config => out.config = Some(content),
                Role::Lock => out.lock = Some(content),
            }
        }
        out.skipped = self.skipped;
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_yaml_files_directly_in_the_folder_are_workflows() {
        let table = [
            (".kici/workflows/ci.yaml", Some(Role::Workflow)),
            (".kici/workflows/ci.yml", Some(Role::Workflow)),
            (".kici/workflows/_part.yaml", None),
            (".kici/workflows/sub/ci.yaml", None),
            (".kici/workflows/readme.md", None),
            (".kici/workflowsx/ci.yaml", None),
            (".kici/steps/notify.yaml", Some(Role::Step)),
            (".kici/steps/sub/notify.yaml", None),
            (".kici/config.yaml", Some(Role::Config)),
            (".kici/config.yml", None),
            (".kici/kici.lock.json", Some(Role::Lock)),
            ("ci.yaml", None),
        ];
        for (path, role) in table {
            assert_eq!(Selection::role(path), role, "{path}");
        }
    }

    #[test]
    fn limits_skip_and_say_so() {
        let mut selection = Selection::new(Limits { max_files: 1, max_file_bytes: 4, max_lock_bytes: 8 });
        selection.offer(".kici/workflows/b.yaml", "2", Some(1));
        selection.offer(".kici/workflows/a.yaml", "1", Some(1));
        selection.offer(".kici/workflows/big.yaml", "3", Some(5));
        selection.offer(".kici/kici.lock.json", "4", None);
        selection.offer("src/main.rs", "5", Some(1));
        let wanted = selection.take();
        let paths: Vec<_> = wanted.iter().map(|w| w.path.as_str()).collect();
        assert_eq!(paths, [".kici/kici.lock.json", ".kici/workflows/a.yaml"]);
        let contents = wanted.into_iter().map(|w| (w, b"123456789".to_vec())).collect();
        let files = selection.fill(contents, None);
        assert!(files.files.is_empty() && files.lock.is_none());
        let reasons: Vec<_> = files.skipped.iter().map(|s| format!("{}: {}", s.path, s.reason)).collect();
        assert_eq!(
            reasons,
            [
                ".kici/workflows/big.yaml: 5 bytes, the limit is 4",
                ".kici/workflows/b.yaml: more than 1 workflow files in one repository",
                ".kici/kici.lock.json: 9 bytes, the limit is 8",
                ".kici/workflows/a.yaml: 9 bytes, the limit is 4",
            ]
        );
    }

    #[test]
    fn content_that_is_not_text_is_skipped() {
        let mut selection = Selection::new(Limits::default());
        selection.offer(".kici/workflows/a.yaml", "1", None);
        let contents = selection.take().into_iter().map(|w| (w, vec![0xff])).collect();
        let files = selection.fill(contents, None);
        assert_eq!(files.skipped.len(), 1);
        assert!(!files.is_empty(), "a broken file is not the same as no file");
    }
}
