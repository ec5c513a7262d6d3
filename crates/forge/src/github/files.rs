//! Files of a commit and files of a change.

use futures::{StreamExt, TryStreamExt, stream};
use kici_engine::event::ChangedFiles;
use secrecy::SecretString;
use serde::Deserialize;

use super::api::Api;
use crate::forge::ForgeError;
use crate::workflows::{Limits, Selection, WorkflowFiles};

/// GitHub lists at most this many files of a pull request.
const MAX_PULL_FILES: usize = 3000;
/// And this many of a comparison.
const MAX_COMPARE_FILES: usize = 300;
/// Files fetched at once.
const PARALLEL: usize = 8;

#[derive(Deserialize)]
struct Tree {
    tree: Vec<Entry>,
}

#[derive(Deserialize)]
struct Entry {
    path: String,
    mode: String,
    #[serde(rename = "type")]
    kind: String,
    sha: String,
    #[serde(default)]
    size: Option<u64>,
}

/// The root tree, then `.kici` with everything below it, then the files: the size of the repository does not matter.
pub(super) async fn workflows_at(
    api: &Api,
    token: &SecretString,
    repo: &str,
    sha: &str,
    limits: Limits,
) -> Result<WorkflowFiles, ForgeError> {
    let what = format!("commit {sha} of `{repo}`");
    let root: Tree = api.get(&what, api.url(&["repos", repo, "git/trees", sha])?, token).await?;
    let folder = root.tree.into_iter().find(|e| e.path == ".kici" && e.kind == "tree");
    let mut selection = Selection::new(limits);
    if let Some(folder) = folder {
        let mut url = api.url(&["repos", repo, "git/trees", &folder.sha])?;
        url.query_pairs_mut().append_pair("recursive", "1");
        let below: Tree = api.get(&format!(".kici at {what}"), url, token).await?;
        // Mode 120000 is a symbolic link, 160000 a submodule.
        for entry in below.tree.iter().filter(|e| e.kind == "blob" && e.mode.starts_with("100")) {
            selection.offer(&format!(".kici/{}", entry.path), &entry.sha, entry.size);
        }
    }
    let max = usize::try_from(limits.max_file_bytes.max(limits.max_lock_bytes)).unwrap_or(usize::MAX - 1);
    let fetches = selection.take().into_iter().map(|wanted| async {
        let url = api.url(&["repos", repo, "git/blobs", &wanted.oid])?;
        let content = api.raw(&format!("{} at {what}", wanted.path), url, token, max).await?;
        Ok::<_, ForgeError>((wanted, content))
    });
    let contents = stream::iter(fetches).buffered(PARALLEL).try_collect().await?;
    Ok(selection.fill(contents, None))
}

#[derive(Deserialize)]
struct File {
    filename: String,
    #[serde(default)]
    previous_filename: Option<String>,
}

/// A renamed file changed both paths.
fn paths(files: Vec<File>) -> Vec<String> {
    files.into_iter().flat_map(|f| f.previous_filename.into_iter().chain([f.filename])).collect()
}

fn listed(files: Vec<File>, cap: usize) -> ChangedFiles {
    if files.len() >= cap { ChangedFiles::Truncated(paths(files)) } else { ChangedFiles::Known(paths(files)) }
}

/// The files of a pull request, page by page.
pub(super) async fn of_pull_request(
    api: &Api,
    token: &SecretString,
    repo: &str,
    number: u64,
) -> Result<ChangedFiles, ForgeError> {
    let what = format!("files of pull request {number} of `{repo}`");
    let mut url = api.url(&["repos", repo, "pulls", &number.to_string(), "files"])?;
    url.query_pairs_mut().append_pair("per_page", "100");
    let mut files: Vec<File> = Vec::new();
    let mut next = Some(url);
    while let Some(url) = next.take().filter(|_| files.len() < MAX_PULL_FILES) {
        let (page, following): (Vec<File>, _) = api.page(&what, url, token).await?;
        files.extend(page);
        next = following;
    }
    Ok(listed(files, MAX_PULL_FILES))
}

/// The files between the merge base of `base` and `head`, and `head`.
pub(super) async fn between(
    api: &Api,
    token: &SecretString,
    repo: &str,
    base: &str,
    head: &str,
) -> Result<ChangedFiles, ForgeError> {
    #[derive(Deserialize)]
    struct Comparison {
        #[serde(default)]
        files: Vec<File>,
    }
    // A branch name may hold slashes, which this address does not take.
    let range = format!("{base}...{head}").replace('/', "%2F");
    let mut url = api.url(&["repos", repo, "compare"])?;
    url.set_path(&format!("{}/{range}", url.path()));
    // The files come with the first page, whatever its length; the commits are not needed.
    url.query_pairs_mut().append_pair("per_page", "1");
    let found: Comparison = api.get(&format!("comparison of {base} and {head} in `{repo}`"), url, token).await?;
    Ok(listed(found.files, MAX_COMPARE_FILES))
}
