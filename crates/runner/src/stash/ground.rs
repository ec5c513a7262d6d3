//! Where the files of a job are: on the host of its agent, or in its container.

use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use kici_engine::cache::{CachePath, Root};

use super::flow::{Closer, Outward};
use super::{Home, StashError, blocking, place};
use crate::archive::{self, ArchiveError, Item, Limits, Links, Packed, Patterns, is_in};
use crate::confine::JobConfinement;
use crate::container::{self, Inside, Packing};

/// Paths of a job that match its patterns, at most.
const MAX_MATCHES: usize = 1_000_000;

/// See the module.
pub(super) enum Ground {
    /// On the host.
    Host {
        /// The checkout.
        workspace: PathBuf,
        /// The home directory of the steps.
        home: Option<Home>,
        /// Who the steps are.
        confine: Arc<JobConfinement>,
    },
    /// In its container, once there is one.
    Inside(Arc<OnceLock<Arc<Inside>>>),
}

/// Something to be packed: its root, its path below it, and what its name begins with in the archive.
pub(super) type Wanted = (Root, String, &'static str);

fn inside(ground: &OnceLock<Arc<Inside>>) -> Result<&Arc<Inside>, ArchiveError> {
    ground.get().ok_or_else(|| ArchiveError::Unfit("the container of the job does not run yet".to_owned()))
}

/// Where paths of the workspace or of the home directory start in a container.
fn root_inside(inside: &Inside, root: Root) -> Option<&Path> {
    match root {
        Root::Workspace => Some(inside.workspace()),
        Root::Home => inside.home(),
    }
}

impl Ground {
    /// The directory that paths start at; none where there is none that outlives a command.
    fn root(&self, root: Root) -> Option<&Path> {
        match (self, root) {
            (Self::Host { workspace, .. }, Root::Workspace) => Some(workspace),
            (Self::Host { home, .. }, Root::Home) => home.as_ref().map(|home| home.dir.as_path()),
            (Self::Inside(ground), _) => root_inside(ground.get()?, root),
        }
    }

    /// The paths that have a root here, and a note on those that have none.
    pub(super) fn rooted(&self, paths: &[String]) -> Result<(Vec<CachePath>, Vec<String>), StashError> {
        if let Self::Inside(ground) = self {
            inside(ground)?;
        }
        let (mut rooted, mut notes) = (Vec::new(), Vec::new());
        for text in paths {
            let path = CachePath::parse(text).map_err(|error| StashError::Bad(format!("path `{text}`: {error}")))?;
            // In a container steps do it themselves, with their own rights.
            if let Self::Host { home: Some(home), .. } = self
                && path.root == Root::Home
                && !home.admits(&path.path)
            {
                return Err(StashError::Bad(format!("path `{path}`: steps may not write there")));
            }
            match self.root(path.root) {
                Some(_) => rooted.push(path),
                None => notes.push(format!("`{path}` is left out: the home directory does not outlive a command here")),
            }
        }
        Ok((rooted, notes))
    }

    /// Whether one of the paths is there.
    pub(super) async fn any_there(&self, paths: &[CachePath]) -> Result<bool, ArchiveError> {
        let at = paths.iter().filter_map(|path| Some((self.root(path.root)?.to_owned(), path.path.clone())));
        let at: Vec<(PathBuf, String)> = at.collect();
        match self {
            Self::Host { .. } => Ok(at.iter().any(|(root, path)| root.join(path).symlink_metadata().is_ok())),
            Self::Inside(ground) => {
                let there = inside(ground)?.look(&at).await.map_err(ArchiveError::Unfit)?;
                Ok(there.into_iter().any(|there| there))
            }
        }
    }

    /// The paths of the workspace that are there and match.
    pub(super) async fn matching(&self, patterns: Patterns) -> Result<Vec<String>, ArchiveError> {
        match self {
            Self::Host { workspace, .. } => {
                let workspace = workspace.clone();
                blocking(move || {
                    let mut found = archive::matching(&workspace, &patterns)?;
                    found.retain(|path| workspace.join(path).symlink_metadata().is_ok());
                    Ok(found)
                })
                .await
            }
            Self::Inside(ground) => {
                let inside = inside(ground)?;
                let root = inside.workspace();
                let at: Vec<_> = patterns.literal.iter().map(|path| (root.to_owned(), path.clone())).collect();
                let there = inside.look(&at).await.map_err(ArchiveError::Unfit)?;
                let mut found: Vec<String> =
                    at.into_iter().zip(there).filter(|(_, there)| *there).map(|((_, path), _)| path).collect();
                if patterns.has_globs() {
                    let literal = found.len();
                    let list = inside.list(|_, path| {
                        // What is in a directory that matches comes with it.
                        let known = found[literal..].last().is_some_and(|dir| is_in(path, dir));
                        if !known && patterns.matches(path) {
                            found.push(path.to_owned());
                        }
                        match found.len() > MAX_MATCHES {
                            true => Err("too many files match".to_owned()),
                            false => Ok(()),
                        }
                    });
                    list.await.map_err(ArchiveError::Unfit)?;
                }
                Ok(Patterns::outermost(found))
            }
        }
    }

    /// Finds what is to be packed.
    pub(super) async fn wanted(&self, wanted: &[Wanted]) -> Result<Ready, ArchiveError> {
        let at = wanted.iter().filter_map(|(root, path, anchor)| {
            let root = self.root(*root)?.to_owned();
            Some((root, path.clone(), *anchor))
        });
        let at: Vec<(PathBuf, String, &'static str)> = at.collect();
        let Self::Inside(ground) = self else { return Ok(Ready::Host(at)) };
        let inside = inside(ground)?;
        let paths: Vec<_> = at.iter().map(|(root, path, _)| (root.clone(), path.clone())).collect();
        let there = inside.look(&paths).await.map_err(ArchiveError::Unfit)?;
        let missing = paths.into_iter().zip(there).filter(|(_, there)| !there).map(|((_, path), _)| path);
        let missing = missing.collect();
        let packing = inside.pack(&at).await.map_err(ArchiveError::Unfit)?;
        Ok(Ready::Inside { packing, missing })
    }

    /// Puts what lies in `scratch` in the place of what is at each path. Returns how many of them are not in there.
    pub(super) async fn replace(&self, scratch: &Path, paths: &[CachePath]) -> Result<usize, ArchiveError> {
        let from = |path: &CachePath| Path::new(path.root.anchor()).join(&path.path);
        let present = paths.iter().filter(|path| scratch.join(from(path)).symlink_metadata().is_ok());
        let present: Vec<&CachePath> = present.collect();
        let absent = paths.len() - present.len();
        match self {
            Self::Host { confine, .. } => {
                let moves: Vec<place::Move> = present
                    .into_iter()
                    .filter_map(|path| {
                        let root = self.root(path.root)?.to_owned();
                        Some(place::Move { from: scratch.join(from(path)), root, to: path.path.clone() })
                    })
                    .collect();
                let confine = Arc::clone(confine);
                blocking(move || place::replace(&moves, &confine)).await?;
            }
            Self::Inside(ground) => {
                let inside = inside(ground)?;
                let moves = present.into_iter().filter_map(|path| {
                    let root = root_inside(inside, path.root)?.to_owned();
                    Some(container::Move {
                        from: format!("{}/{}", path.root.anchor(), path.path),
                        root,
                        to: path.path.clone(),
                    })
                });
                let moves: Vec<container::Move> = moves.collect();
                inside.replace(scratch, &moves).await.map_err(ArchiveError::Unfit)?;
            }
        }
        Ok(absent)
    }

    /// Puts all that lies in `scratch` into a directory of the workspace.
    pub(super) async fn merge(&self, scratch: &Path, into: String) -> Result<(), ArchiveError> {
        match self {
            Self::Host { workspace, confine, .. } => {
                let (dir, root, confine) = (scratch.to_owned(), workspace.clone(), Arc::clone(confine));
                blocking(move || place::merge(&dir, &root, &into, &confine)).await
            }
            Self::Inside(ground) => inside(ground)?.join(scratch, &into).await.map_err(ArchiveError::Unfit),
        }
    }
}

/// Files that are about to be packed.
pub(super) enum Ready {
    /// By the agent.
    Host(Vec<(PathBuf, String, &'static str)>),
    /// By our program in the container.
    Inside {
        /// The archive that comes from there.
        packing: Packing,
        /// What is not there.
        missing: Vec<String>,
    },
}

impl Ready {
    /// Packs into `writer`, whose stream ends well only when all is packed.
    pub(super) async fn pack(self, writer: Outward, limits: Limits, links: Links) -> Result<Packed, ArchiveError> {
        match self {
            Self::Host(at) => {
                let pack = move |writer: Outward| {
                    let items: Vec<Item<'_>> =
                        at.iter().map(|(root, path, anchor)| Item { root, path: path.clone(), anchor }).collect();
                    archive::pack(&items, writer, limits, links)
                };
                blocking(move || whole(writer, pack)).await
            }
            Self::Inside { packing, missing } => {
                let read =
                    packing.read(move |input| whole(writer, |writer| archive::repack(input, writer, limits, links)));
                let (packed, left_out) = read.await?;
                Ok(Packed { missing, left_out, ..packed })
            }
        }
    }
}

/// Closes the stream behind `writer` when all is written. Blocks.
fn whole(writer: Outward, write: impl FnOnce(Outward) -> Result<Packed, ArchiveError>) -> Result<Packed, ArchiveError> {
    let closer = Closer::of(&writer);
    let packed = write(writer)?;
    closer.close();
    Ok(packed)
}
