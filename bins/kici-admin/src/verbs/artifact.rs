//! `artifact`, and `run artifacts`.

use std::path::{Path, PathBuf};

use clap::Subcommand;
use kici_api::client::Download;
use kici_api::dto::stored::ArtifactView;
use kici_engine::ids::RunId;
use kici_runner::stash::{self, Archive, Place};
use serde_json::json;

use super::Context;
use crate::exit::Failure;
use crate::output::{Column, fields, optional, text};

/// Files that runs hand over
#[derive(Debug, Subcommand)]
pub(crate) enum Verb {
    /// List the artifacts of a run
    List {
        /// The run
        run: RunId,
    },
    /// Get an artifact; its digest is checked before anything of it is used
    Download {
        /// The run
        run: RunId,
        /// Its name
        name: String,
        /// Unpack into this directory, which is made if it is not there [default: a directory of the artifact's name]
        #[arg(long)]
        dir: Option<PathBuf>,
        /// Write the archive (tar, zstd) to this file instead
        #[arg(long, conflicts_with = "dir")]
        archive: Option<PathBuf>,
    },
}

/// Runs the command.
pub(crate) async fn run(context: &Context, verb: Verb) -> Result<u8, Failure> {
    match verb {
        Verb::List { run } => list(context, run).await,
        Verb::Download { run, name, dir, archive } => {
            let (client, out) = (context.client()?, &context.out);
            // Before it becomes the name of a directory.
            kici_engine::cache::check_artifact_name(&name).map_err(|error| Failure::usage(error.to_string()))?;
            let download = client.artifact(run, &name).await?;
            let size = download.size;
            if let Some(path) = archive {
                to_file(download, &path).await?;
                let done = json!({"name": name, "bytes": size, "archive": path.display().to_string()});
                out.document(&done, |_| {
                    fields(&[("written", path.display().to_string()), ("bytes", size.to_string())])
                })?;
                return Ok(0);
            }
            let dir = dir.unwrap_or_else(|| PathBuf::from(&name));
            let wanted = Archive { place: Place(String::new()), size, sha256: download.sha256 };
            let unpacked = stash::unpack_into(&dir, &wanted, download.bytes).await;
            let (files, bytes) = unpacked.map_err(|error| Failure::other(format!("artifact {name}: {error}")))?;
            let done = json!({"name": name, "files": files, "bytes": bytes, "dir": dir.display().to_string()});
            out.document(&done, |_| {
                fields(&[
                    ("unpacked into", dir.display().to_string()),
                    ("files", files.to_string()),
                    ("bytes", bytes.to_string()),
                ])
            })?;
            Ok(0)
        }
    }
}

/// The list.
pub(crate) async fn list(context: &Context, run: RunId) -> Result<u8, Failure> {
    let page = context.client()?.artifacts(run).await?;
    context.out.page(&page, "the run has no artifacts", &columns(context))?;
    Ok(0)
}

fn columns(context: &Context) -> Vec<Column<'_, ArtifactView>> {
    vec![
        ("NAME", Box::new(|one| text(&one.name))),
        ("JOB", Box::new(|one| text(&one.job))),
        ("BYTES", Box::new(|one| text(one.size))),
        ("STORED", Box::new(|one| text(context.out.time(Some(one.created_at))))),
        ("EXPIRES", Box::new(|one| optional(one.expires_at.map(|at| context.out.time(Some(at))).as_ref()))),
    ]
}

/// Into a file beside it first, so that nobody takes half of it for the whole.
async fn to_file(download: Download, path: &Path) -> Result<(), Failure> {
    let fault = |error: std::io::Error| Failure::other(format!("{}: {error}", path.display()));
    let wanted = Archive { place: Place(String::new()), size: download.size, sha256: download.sha256 };
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let part = tempfile::NamedTempFile::new_in(parent).map_err(fault)?;
    let mut out = tokio::fs::File::from_std(part.reopen().map_err(fault)?);
    let written = stash::write_into(&mut out, &wanted, download.bytes).await;
    written.map_err(|error| Failure::other(format!("{}: {error}", path.display())))?;
    part.persist(path).map_err(|error| fault(error.error))?;
    Ok(())
}
