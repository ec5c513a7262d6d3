//! `hash_files(…)` of expressions: one digest over the files that globs match in the checkout.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use globset::{GlobBuilder, GlobSet, GlobSetBuilder};
use kici_engine::expr::HashFiles;
use sha2::{Digest, Sha256};
use tokio::runtime::{Handle, RuntimeFlavor};

use crate::archive;
use crate::container::Inside;

/// Files that one call may match.
const MAX_FILES: usize = 100_000;

/// The function for the checkout in `dir`: SHA-256 (hex) over path and content of every file that one of the globs matches,
/// in the order of their paths; empty when none matches. `.git` is left out and links are not followed.
pub fn in_dir(dir: &Path) -> HashFiles {
    let dir = dir.to_owned();
    Arc::new(move |globs: &[String]| digest(&dir, globs))
}

/// The same for the workspace of a container, as it is at that moment.
pub fn in_container(inside: &Arc<Inside>) -> HashFiles {
    let inside = Arc::clone(inside);
    Arc::new(move |globs: &[String]| {
        let set = set(globs)?;
        let runtime = Handle::try_current().map_err(|error| error.to_string())?;
        if runtime.runtime_flavor() == RuntimeFlavor::CurrentThread {
            // Nobody would be left to hear the container.
            return Err("files of a container cannot be read here".to_owned());
        }
        // Expressions are rendered at once: whoever renders one waits here, and others take its place.
        tokio::task::block_in_place(|| runtime.block_on(digest_inside(&inside, &set)))
    })
}

async fn digest_inside(inside: &Inside, set: &GlobSet) -> Result<String, String> {
    let mut matched: Vec<String> = Vec::new();
    let list = inside.list(|kind, path| {
        if kind == b'f' && set.is_match(path) {
            matched.push(path.to_owned());
        }
        few(matched.len())
    });
    list.await?;
    if matched.is_empty() {
        return Ok(String::new());
    }
    // In the order of their parts, as the host sorts its paths.
    matched.sort_by(|a, b| Path::new(a).cmp(Path::new(b)));
    let root = inside.workspace();
    let items: Vec<_> = matched.iter().map(|path| (root.to_owned(), path.clone(), "")).collect();
    let packing = inside.pack(&items).await?;
    let read = packing.read(move |input| {
        let digests = archive::contents(input, &matched)?;
        Ok(joined(matched.iter().map(|path| path.as_bytes()).zip(digests)))
    });
    read.await.map(|(digest, _)| digest).map_err(|error| error.to_string())
}

fn set(globs: &[String]) -> Result<GlobSet, String> {
    let mut set = GlobSetBuilder::new();
    for glob in globs {
        set.add(GlobBuilder::new(glob).literal_separator(true).build().map_err(|error| error.to_string())?);
    }
    set.build().map_err(|error| error.to_string())
}

fn few(files: usize) -> Result<(), String> {
    if files > MAX_FILES { Err(format!("more than {MAX_FILES} files match")) } else { Ok(()) }
}

/// One digest over paths with the digests of their contents.
fn joined<'a>(files: impl Iterator<Item = (&'a [u8], [u8; 32])>) -> String {
    let mut all = Sha256::new();
    for (path, content) in files {
        all.update(path);
        all.update([0]);
        all.update(content);
    }
    hex::encode(all.finalize())
}

fn digest(root: &Path, globs: &[String]) -> Result<String, String> {
    let set = set(globs)?;
    let mut matched: Vec<PathBuf> = Vec::new();
    let mut open = vec![PathBuf::new()];
    while let Some(dir) = open.pop() {
        let entries = std::fs::read_dir(root.join(&dir)).map_err(|error| format!("{}: {error}", dir.display()))?;
        for entry in entries.flatten() {
            let path = dir.join(entry.file_name());
            let Ok(kind) = entry.file_type() else { continue };
            if kind.is_dir() && path != Path::new(".git") {
                open.push(path);
            } else if kind.is_file() && set.is_match(&path) {
                matched.push(path);
            }
        }
        few(matched.len())?;
    }
    if matched.is_empty() {
        return Ok(String::new());
    }
    matched.sort();
    let mut digests = Vec::with_capacity(matched.len());
    for path in &matched {
        digests.push(content(&root.join(path)).map_err(|error| format!("{}: {error}", path.display()))?);
    }
    Ok(joined(matched.iter().map(|path| path.as_os_str().as_encoded_bytes()).zip(digests)))
}

fn content(path: &Path) -> std::io::Result<[u8; 32]> {
    let mut file = File::open(path)?;
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 64 * 1024];
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(hash.finalize().into()),
            n => hash.update(&buffer[..n]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_digest_follows_names_and_contents() {
        let dir = tempfile::tempdir().expect("a directory");
        std::fs::create_dir(dir.path().join("sub")).expect("made");
        std::fs::write(dir.path().join("sub/a.lock"), "1").expect("written");
        std::fs::write(dir.path().join("b.txt"), "2").expect("written");
        let hash = |globs: &[&str]| {
            let globs: Vec<String> = globs.iter().map(|g| (*g).to_owned()).collect();
            in_dir(dir.path())(&globs).expect("hashed")
        };
        let first = hash(&["**/*.lock"]);
        assert_eq!((first.len(), hash(&["*.lock"]).as_str()), (64, ""));
        std::fs::write(dir.path().join("b.txt"), "3").expect("written");
        assert_eq!(hash(&["**/*.lock"]), first);
        std::fs::write(dir.path().join("sub/a.lock"), "3").expect("written");
        assert_ne!(hash(&["**/*.lock"]), first);
    }
}
