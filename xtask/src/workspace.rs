//! The repository as cargo and git see it.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::Deserialize;
use xshell::{Shell, cmd};

/// The checkout that this xtask was built from.
pub(crate) struct Workspace {
    /// Runs commands; its directory is `root`.
    pub(crate) shell: Shell,
    /// The directory of the root manifest.
    pub(crate) root: PathBuf,
}

/// The part of `cargo metadata` that is read here.
#[derive(Deserialize)]
pub(crate) struct Metadata {
    /// Every package of the graph, on any platform.
    pub(crate) packages: Vec<Package>,
    /// Ids of our own packages.
    pub(crate) workspace_members: Vec<String>,
    /// What each package is built with.
    pub(crate) resolve: Resolve,
}

#[derive(Deserialize)]
pub(crate) struct Resolve {
    pub(crate) nodes: Vec<Node>,
}

#[derive(Deserialize)]
pub(crate) struct Node {
    pub(crate) id: String,
    pub(crate) features: Vec<String>,
}

#[derive(Deserialize)]
pub(crate) struct Package {
    pub(crate) id: String,
    pub(crate) name: String,
    pub(crate) version: String,
    pub(crate) license: Option<String>,
    /// The native library that it says to link.
    #[serde(default)]
    pub(crate) links: Option<String>,
    pub(crate) description: Option<String>,
    pub(crate) manifest_path: PathBuf,
    pub(crate) dependencies: Vec<Dependency>,
}

#[derive(Deserialize)]
pub(crate) struct Dependency {
    pub(crate) name: String,
    /// `None` for a normal dependency, else `dev` or `build`.
    pub(crate) kind: Option<String>,
}

impl Metadata {
    /// Our own packages.
    pub(crate) fn members(&self) -> impl Iterator<Item = &Package> {
        self.packages.iter().filter(|package| self.workspace_members.contains(&package.id))
    }
}

impl Package {
    /// The package's directory, relative to the checkout where possible.
    pub(crate) fn directory(&self) -> &Path {
        self.manifest_path.parent().unwrap_or(Path::new(""))
    }
}

impl Workspace {
    /// Finds the checkout: the parent of the directory of this crate, which cargo names. Not the one at build time,
    /// since checkouts may share a target directory.
    pub(crate) fn find() -> Result<Self> {
        let shell = Shell::new()?;
        let manifest = shell.var_os("CARGO_MANIFEST_DIR").context("start this by `cargo xtask`")?;
        let root = Path::new(&manifest).parent().context("xtask has no parent directory")?.to_owned();
        shell.change_dir(&root);
        Ok(Self { shell, root })
    }

    /// Asks cargo for the whole graph, of every platform and feature.
    pub(crate) fn metadata(&self) -> Result<Metadata> {
        let text = cmd!(self.shell, "cargo metadata --format-version 1 --locked --all-features").quiet().read()?;
        serde_json::from_str(&text).context("cargo metadata printed something else than its format 1")
    }

    /// Every file that git knows or would add, relative to the root, in order.
    pub(crate) fn files(&self) -> Result<Vec<PathBuf>> {
        let text = cmd!(self.shell, "git ls-files -z --cached --others --exclude-standard").quiet().read()?;
        let mut files: Vec<PathBuf> = text
            .split('\0')
            .filter(|name| !name.is_empty())
            .map(PathBuf::from)
            // A file that was deleted but not yet staged is still listed.
            .filter(|path| self.root.join(path).is_file())
            .collect();
        files.sort();
        files.dedup();
        Ok(files)
    }

    /// Reads a file of the checkout.
    pub(crate) fn read(&self, path: &Path) -> Result<String> {
        Ok(self.shell.read_file(self.root.join(path))?)
    }

    /// Whether this runs under continuous integration.
    pub(crate) fn is_ci(&self) -> bool {
        self.shell.var_os("CI").is_some_and(|value| !value.is_empty() && value != "false")
    }
}
