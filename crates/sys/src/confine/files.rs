//! Which files a command may read and write (Landlock, landlock(7)). Rights only ever add up below a directory, so what shall be
//! hidden is left out by granting its neighbours instead.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};

use landlock::{
    ABI, AccessFs, BitFlags, CompatLevel, Compatible, PathBeneath, PathFd, Ruleset, RulesetAttr, RulesetCreatedAttr,
};
use nix::libc;

/// Older ones would refuse every rename to another directory.
const OLDEST_ABI: u32 = 2;
/// Directories whose neighbours are granted at most; a hidden path in a directory with more entries is an error.
const MAX_GRANTS: usize = 20_000;

/// The version of Landlock that this kernel has; `None` when it has none that can be used.
pub fn landlock_abi() -> Option<u32> {
    const VERSION: u32 = 1;
    let none = std::ptr::null::<libc::c_void>();
    // SAFETY: with this flag the call takes no attributes and returns a number (landlock_create_ruleset(2)).
    let abi = unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, none, 0, VERSION) };
    u32::try_from(abi).ok().filter(|abi| *abi >= OLDEST_ABI)
}

/// What a command can reach.
#[derive(Clone, Debug, Default)]
pub struct Reach {
    /// Directories and files that it may write and read, with all below them, also where that is hidden. Those that do not
    /// exist are left out.
    pub writable: Vec<PathBuf>,
    /// Files that it may not read, and directories with such; everything else can be read.
    pub hidden: Vec<PathBuf>,
}

impl Reach {
    /// What is hidden in vain, since it lies below what is writable.
    pub fn exposed(&self) -> Vec<&Path> {
        self.split().0
    }

    /// What is hidden in vain, and the places of what is not. Paths that do not exist are neither.
    fn split(&self) -> (Vec<&Path>, Vec<PathBuf>) {
        let writable: Vec<PathBuf> = self.writable.iter().filter_map(|path| path.canonicalize().ok()).collect();
        let (mut exposed, mut hidden) = (Vec::new(), Vec::new());
        for path in &self.hidden {
            match path.canonicalize() {
                Ok(place) if writable.iter().any(|root| place.starts_with(root)) => exposed.push(path.as_path()),
                Ok(place) => hidden.push(place),
                Err(_) => {}
            }
        }
        (exposed, hidden)
    }
}

/// A set of rules that a command takes on.
#[derive(Debug)]
pub struct Files {
    rules: OwnedFd,
}

impl Files {
    /// Makes the rules. Blocks, and takes a few system calls for each neighbour of what is hidden.
    ///
    /// # Errors
    /// When the kernel has no Landlock, or a directory that holds hidden files cannot be read.
    pub fn new(reach: &Reach) -> io::Result<Self> {
        let unsupported = || io::Error::new(io::ErrorKind::Unsupported, "this kernel has no usable Landlock");
        landlock_abi().ok_or_else(unsupported)?;
        let (_, hidden) = reach.split();
        let mut handled = write_access();
        if !hidden.is_empty() {
            handled |= AccessFs::ReadFile;
        }
        let mut ruleset = Ruleset::default()
            .set_compatibility(CompatLevel::BestEffort)
            .handle_access(handled)
            .and_then(Ruleset::create)
            .map_err(io::Error::other)?;
        let mut grants: Vec<(PathBuf, BitFlags<AccessFs>)> = Vec::new();
        if !hidden.is_empty() {
            let read = BitFlags::from(AccessFs::ReadFile);
            around(Path::new("/"), &hidden, &entries, &mut |path| grants.push((path, read)))?;
        }
        // Nobody makes devices: whoever could, could open all of them.
        let write = handled & !(AccessFs::MakeChar | AccessFs::MakeBlock);
        grants.extend(reach.writable.iter().map(|path| (path.clone(), write)));
        if grants.len() > MAX_GRANTS {
            return Err(io::Error::other(format!(
                "{} entries lie beside what must be hidden from steps; keep state_dir and the token in directories with less",
                grants.len()
            )));
        }
        for (path, access) in grants {
            // It may be gone by now, or be closed to this user, and so to its steps.
            let Ok(fd) = PathFd::new(&path) else { continue };
            ruleset = ruleset.add_rule(PathBeneath::new(fd, access)).map_err(io::Error::other)?;
        }
        let rules = Option::<OwnedFd>::from(ruleset).ok_or_else(unsupported)?;
        Ok(Self { rules })
    }

    pub(crate) fn raw(&self) -> RawFd {
        self.rules.as_raw_fd()
    }
}

/// Everything that changes a file or a directory.
fn write_access() -> BitFlags<AccessFs> {
    AccessFs::from_write(ABI::V3)
}

/// What is in a directory, without symbolic links.
fn entries(dir: &Path) -> io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir)? {
        let entry = entry?;
        if entry.file_type().is_ok_and(|kind| !kind.is_symlink()) {
            found.push(entry.path());
        }
    }
    Ok(found)
}

/// Calls `grant` with paths that together are all of `path` but `hidden`. Symbolic links need no rights of their own.
fn around(
    path: &Path,
    hidden: &[PathBuf],
    list: &impl Fn(&Path) -> io::Result<Vec<PathBuf>>,
    grant: &mut impl FnMut(PathBuf),
) -> io::Result<()> {
    if hidden.iter().any(|hidden| path.starts_with(hidden)) {
        return Ok(());
    }
    if !hidden.iter().any(|hidden| hidden.starts_with(path)) {
        grant(path.to_owned());
        return Ok(());
    }
    let named = |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", path.display()));
    let inside = match list(path) {
        // It can be passed, not listed: what is in it stays closed, but for the ways to what is hidden.
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            let next = |hidden: &PathBuf| Some(path.join(hidden.strip_prefix(path).ok()?.components().next()?));
            hidden.iter().filter_map(next).collect::<BTreeSet<_>>().into_iter().collect()
        }
        inside => inside.map_err(named)?,
    };
    inside.iter().try_for_each(|entry| around(entry, hidden, list, grant))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_but_the_hidden_is_granted_in_as_few_places_as_possible() {
        let dir = tempfile::tempdir().expect("a directory");
        let root = dir.path().canonicalize().expect("there");
        for path in ["a/x", "a/y/secret", "a/y/z", "b"] {
            std::fs::create_dir_all(root.join(path)).expect("made");
        }
        let granted = |hidden: &[&str]| {
            let hidden: Vec<PathBuf> = hidden.iter().map(|path| root.join(path)).collect();
            let mut found = Vec::new();
            around(&root, &hidden, &entries, &mut |path| found.push(path)).expect("listed");
            let short = |path: &PathBuf| path.strip_prefix(&root).expect("below").display().to_string();
            let mut found: Vec<String> = found.iter().map(short).collect();
            found.sort();
            found
        };
        assert_eq!(granted(&[]), [""]);
        assert_eq!(granted(&["a/y/secret"]), ["a/x", "a/y/z", "b"]);
        assert_eq!(granted(&["a", "c"]), ["b"]);
        assert!(granted(&[""]).is_empty());
    }

    #[test]
    fn a_directory_that_cannot_be_listed_closes_what_is_in_it_but_is_no_error() {
        let list = |dir: &Path| match dir.to_str() {
            Some("/") => Ok(vec!["/home".into(), "/usr".into()]),
            Some("/home/ci") => Ok(vec!["/home/ci/state".into(), "/home/ci/cache".into()]),
            _ => Err(io::ErrorKind::PermissionDenied.into()),
        };
        let mut found = Vec::new();
        around(Path::new("/"), &["/home/ci/state".into()], &list, &mut |path| found.push(path)).expect("no error");
        assert_eq!(found, [Path::new("/home/ci/cache"), Path::new("/usr")]);
    }

    #[test]
    fn the_list_of_a_directory_is_an_error_otherwise() {
        let list = |_: &Path| Err(io::Error::from(io::ErrorKind::NotFound));
        assert!(around(Path::new("/"), &["/a".into()], &list, &mut |_| {}).is_err());
    }
}
