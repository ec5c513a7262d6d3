//! The git hook that makes the next commit or push run. It only leaves a mark in a file: it cannot fail git, it needs no
//! program, and it does no harm when nobody looks any more. What has changed is then read from the refs.

use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::repo::Repo;

const SHEBANG: &str = "#!/bin/sh\n";

/// An installed block; it is removed on drop.
pub(crate) struct Hook {
    script: PathBuf,
    marks: PathBuf,
    begin: String,
    end: String,
    seen: u64,
}

/// What became of the wish for a hook.
pub(crate) enum Installed {
    /// The block is in place.
    Hook(Hook),
    /// The existing hook was left as it is, for this reason.
    Refused(String),
}

impl Hook {
    /// Puts a block into the hook that fires when a commit arrives: `post-commit` of a work tree, `post-receive` of a
    /// bare repository. `data` is our directory; it tells our block from that of another `xtask dev`.
    pub(crate) fn install(repo: &Repo, data: &Path) -> Result<Installed> {
        let name = if repo.bare { "post-receive" } else { "post-commit" };
        let directory = repo.hooks()?;
        let script = directory.join(name);
        let marks = data.join("hook-marks");
        fs::write(&marks, "").with_context(|| marks.display().to_string())?;
        let begin = format!("# >>> kici dev {} >>>", data.display());
        let end = format!("# <<< kici dev {} <<<", data.display());
        let old = match fs::read_to_string(&script) {
            Ok(text) => {
                if let Some(reason) = unfit(&script, &text)? {
                    return Ok(Installed::Refused(reason));
                }
                text
            }
            Err(error) if error.kind() == ErrorKind::NotFound => SHEBANG.to_owned(),
            Err(error) => return Err(error).with_context(|| script.display().to_string()),
        };
        let old = without(&old, &begin, &end);
        // Right after the first line: the rest may leave early.
        let (first, rest) = old.split_once('\n').unwrap_or((&old, ""));
        let mark = quote(&marks);
        let block = format!("{begin}\n( [ ! -f {mark} ] || echo >> {mark} ) </dev/null >/dev/null 2>&1 &\n{end}\n");
        fs::create_dir_all(&directory).with_context(|| directory.display().to_string())?;
        write(&script, &format!("{first}\n{block}{rest}"))?;
        Ok(Installed::Hook(Self { script, marks, begin, end, seen: 0 }))
    }

    /// Whether git has called the hook since the last look.
    pub(crate) fn fired(&mut self) -> bool {
        let now = fs::metadata(&self.marks).map_or(0, |file| file.len());
        let fired = now > self.seen;
        self.seen = now;
        fired
    }

    /// The file that holds the block.
    pub(crate) fn script(&self) -> &Path {
        &self.script
    }

    fn remove(&self) -> Result<()> {
        let text = fs::read_to_string(&self.script)?;
        let rest = without(&text, &self.begin, &self.end);
        if rest == SHEBANG {
            fs::remove_file(&self.script)?;
        } else {
            write(&self.script, &rest)?;
        }
        fs::remove_file(&self.marks)?;
        Ok(())
    }
}

impl Drop for Hook {
    fn drop(&mut self) {
        if let Err(error) = self.remove() {
            eprintln!("warning: the hook {} could not be cleaned up: {error:#}", self.script.display());
        }
    }
}

/// Why a block cannot go into an existing hook.
fn unfit(script: &Path, text: &str) -> Result<Option<String>> {
    let interpreter = text.lines().next().unwrap_or_default();
    let shell = ["sh", "bash", "dash", "zsh", "ksh"].iter().any(|shell| {
        interpreter.strip_prefix("#!").is_some_and(|path| path.split(['/', ' ']).any(|part| part == *shell))
    });
    if !shell {
        return Ok(Some(format!("{} is not a shell script", script.display())));
    }
    let mode = fs::metadata(script)?.permissions().mode();
    Ok((mode & 0o111 == 0).then(|| format!("{} is not executable, so git does not run it", script.display())))
}

/// `text` without the block between the two lines, if it is there.
fn without(text: &str, begin: &str, end: &str) -> String {
    let mut inside = false;
    let mut rest = String::new();
    for line in text.split_inclusive('\n') {
        let bare = line.trim_end();
        inside |= bare == begin;
        if !inside {
            rest.push_str(line);
        }
        inside &= bare != end;
    }
    rest
}

/// Replaces the script in one step, executable as before: git may run it at any moment.
fn write(script: &Path, text: &str) -> Result<()> {
    // A hook may be a link into a folder that several repositories share; replace the file, keep the link.
    let target = script.canonicalize().unwrap_or_else(|_| script.to_owned());
    let mode = fs::metadata(&target).map_or(0o755, |file| file.permissions().mode());
    let draft = target.with_extension("kici-new");
    fs::write(&draft, text)?;
    fs::set_permissions(&draft, fs::Permissions::from_mode(mode))?;
    fs::rename(&draft, &target).with_context(|| target.display().to_string())
}

/// The path as one word of a shell script.
fn quote(path: &Path) -> String {
    format!("'{}'", path.display().to_string().replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    struct Case {
        directory: tempfile::TempDir,
        repo: Repo,
    }

    impl Case {
        fn new() -> Self {
            let directory = tempfile::tempdir().unwrap();
            let template = directory.path().join("template");
            fs::create_dir(&template).unwrap();
            fs::write(template.join("file"), "x").unwrap();
            fs::create_dir(directory.path().join("it's data")).unwrap();
            let repo = Repo::create(&template, &directory.path().join("repo")).unwrap();
            Self { directory, repo }
        }

        fn install(&self) -> Installed {
            Hook::install(&self.repo, &self.directory.path().join("it's data")).unwrap()
        }

        fn hook(&self) -> Hook {
            match self.install() {
                Installed::Hook(hook) => hook,
                Installed::Refused(reason) => panic!("{reason}"),
            }
        }

        fn script(&self) -> PathBuf {
            self.repo.path.join(".git/hooks/post-commit")
        }

        fn existing(&self, text: &str, mode: u32) {
            fs::create_dir_all(self.script().parent().unwrap()).unwrap();
            fs::write(self.script(), text).unwrap();
            fs::set_permissions(self.script(), fs::Permissions::from_mode(mode)).unwrap();
        }
    }

    /// Runs the hook and waits for the background part: it holds the pipe open until it is done.
    fn fire(script: &Path) {
        let text = fs::read_to_string(script).unwrap().replace(">/dev/null 2>&1 &", "2>&1 &");
        let copy = script.with_extension("test");
        fs::write(&copy, text).unwrap();
        assert!(Command::new("sh").arg(&copy).output().unwrap().status.success());
        fs::remove_file(copy).unwrap();
    }

    #[test]
    fn a_new_hook_marks_and_goes_away() {
        let case = Case::new();
        let mut hook = case.hook();
        assert!(!hook.fired());
        fire(&case.script());
        assert!(hook.fired() && !hook.fired());
        drop(hook);
        assert!(!case.script().exists());
    }

    #[test]
    fn an_existing_hook_keeps_its_text_and_mode() {
        let case = Case::new();
        let text = "#!/usr/bin/env bash\nset -e\nexit 0\n";
        case.existing(text, 0o700);
        let mut hook = case.hook();
        fire(&case.script());
        assert!(hook.fired(), "{}", fs::read_to_string(case.script()).unwrap());
        assert_eq!(fs::metadata(case.script()).unwrap().permissions().mode() & 0o777, 0o700);
        drop(hook);
        assert_eq!(fs::read_to_string(case.script()).unwrap(), text);
    }

    #[test]
    fn a_block_that_was_left_behind_is_replaced() {
        let case = Case::new();
        std::mem::forget(case.hook());
        drop(case.hook());
        assert!(!case.script().exists());
    }

    #[test]
    fn a_hook_that_is_no_shell_script_is_left_alone() {
        let case = Case::new();
        for (text, mode) in [("#!/usr/bin/python3\nprint()\n", 0o755), ("#!/bin/sh\n", 0o644)] {
            case.existing(text, mode);
            assert!(matches!(case.install(), Installed::Refused(_)), "{text}");
            assert_eq!(fs::read_to_string(case.script()).unwrap(), text);
        }
    }
}
