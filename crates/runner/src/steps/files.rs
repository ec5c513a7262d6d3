//! The files through which a step speaks: `$KICI_OUTPUT`, `$KICI_ENV`, `$KICI_PATH`, `$KICI_SUMMARY`.

use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use crate::confine::JobConfinement;

/// A larger file is ignored, with a line in the log.
pub const MAX_FILE_BYTES: u64 = 1024 * 1024;

/// The private files of one step.
#[derive(Debug)]
pub struct StepFiles {
    /// Results: `KEY=value` and heredocs.
    pub output: PathBuf,
    /// Changes of the environment of later steps, in the same form.
    pub env: PathBuf,
    /// Directories for the front of PATH, one a line.
    pub path: PathBuf,
    /// Markdown.
    pub summary: PathBuf,
    /// The script of the step.
    pub script: PathBuf,
}

impl StepFiles {
    /// Makes the files of a step in a new directory.
    ///
    /// # Errors
    /// When they cannot be written.
    pub fn create(dir: &Path, script: &str) -> io::Result<Self> {
        std::fs::create_dir_all(dir)?;
        let files = Self {
            output: dir.join("output"),
            env: dir.join("env"),
            path: dir.join("path"),
            summary: dir.join("summary"),
            script: dir.join("script"),
        };
        for path in [&files.output, &files.env, &files.path, &files.summary] {
            std::fs::File::create(path)?;
        }
        let mut file = std::fs::File::options().write(true).create_new(true).mode(0o700).open(&files.script)?;
        io::Write::write_all(&mut file, script.as_bytes())?;
        Ok(files)
    }

    /// Gives the files and their directory to the user of the step; the directory last, which is closed to that user until then.
    ///
    /// # Errors
    /// When they cannot be changed.
    pub fn give(&self, dir: &Path, confine: &JobConfinement) -> io::Result<()> {
        let all = [&self.output, &self.env, &self.path, &self.summary, &self.script, dir];
        all.iter().try_for_each(|path| confine.give(path))
    }
}

/// What a step wrote into one of its files.
///
/// # Errors
/// In words, when it is not a plain file any more or too large.
pub fn read(path: &Path) -> Result<String, String> {
    let name = path.file_name().unwrap_or_default().to_string_lossy().to_uppercase();
    let refuse = |why: &str| format!("$KICI_{name} was ignored: {why}");
    let file = match kici_sys::host::open_plain(path) {
        Ok(Some(file)) => file,
        Ok(None) => return Err(refuse("it is not a plain file any more")),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(String::new()),
        Err(error) => return Err(refuse(&error.to_string())),
    };
    let mut bytes = Vec::new();
    file.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes).map_err(|error| refuse(&error.to_string()))?;
    if bytes.len() as u64 > MAX_FILE_BYTES {
        return Err(refuse("it is larger than 1 MiB"));
    }
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Reads `KEY=value` lines and heredocs `KEY<<END … END`, in order; a later one of the same key wins. Lines that are neither
/// come back as problems in words.
pub fn assignments(text: &str) -> (Vec<(String, String)>, Vec<String>) {
    let (mut found, mut problems) = (Vec::new(), Vec::new());
    let mut lines = text.lines().enumerate();
    while let Some((number, line)) = lines.next() {
        if line.trim().is_empty() {
            continue;
        }
        let equals = line.find('=').unwrap_or(usize::MAX);
        let heredoc = line.find("<<").filter(|at| *at < equals);
        let (key, value) = if let Some(at) = heredoc {
            let end = line[at + 2..].trim();
            let mut value: Vec<&str> = Vec::new();
            let mut ended = false;
            for (_, line) in lines.by_ref() {
                if line == end {
                    ended = true;
                    break;
                }
                value.push(line);
            }
            if !ended || end.is_empty() {
                problems.push(format!("line {}: the text after `<<{end}` has no end", number + 1));
                continue;
            }
            (&line[..at], value.join("\n"))
        } else if equals != usize::MAX {
            (&line[..equals], line[equals + 1..].to_owned())
        } else {
            problems.push(format!("line {}: expected KEY=value", number + 1));
            continue;
        };
        if is_name(key.trim()) {
            found.push((key.trim().to_owned(), value));
        } else {
            problems.push(format!("line {}: `{}` is not a name", number + 1, key.trim()));
        }
    }
    (found, problems)
}

/// `[A-Za-z_][A-Za-z0-9_-]*`, at most 255 bytes.
fn is_name(key: &str) -> bool {
    let mut bytes = key.bytes();
    key.len() <= 255
        && bytes.next().is_some_and(|b| b.is_ascii_alphabetic() || b == b'_')
        && bytes.all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_grammar_of_output_files() {
        type Case = (&'static str, &'static [(&'static str, &'static str)], &'static [&'static str]);
        let cases: [Case; 9] = [
            ("", &[], &[]),
            ("A=1\nB=two words\n", &[("A", "1"), ("B", "two words")], &[]),
            ("A=x=y\n", &[("A", "x=y")], &[]),
            ("A=\n\nA=2", &[("A", ""), ("A", "2")], &[]),
            ("A=a<<b\n", &[("A", "a<<b")], &[]),
            ("A<<EOF\nl1\n\nl3\nEOF\nB=1\r\n", &[("A", "l1\n\nl3"), ("B", "1")], &[]),
            ("A<<EOF\nl1\n", &[], &["line 1: the text after `<<EOF` has no end"]),
            ("nonsense\nA=1", &[("A", "1")], &["line 1: expected KEY=value"]),
            ("1A=1\n b =2", &[("b", "2")], &["line 1: `1A` is not a name"]),
        ];
        for (text, expected, complaints) in cases {
            let (found, problems) = assignments(text);
            let found: Vec<(&str, &str)> = found.iter().map(|(k, v)| (k.as_str(), v.as_str())).collect();
            assert_eq!((found.as_slice(), problems), (expected, complaints.iter().map(|s| (*s).to_owned()).collect()));
        }
    }

    #[test]
    fn a_file_that_was_replaced_or_is_too_large_is_ignored() {
        let dir = tempfile::tempdir().expect("a directory");
        let files = StepFiles::create(&dir.path().join("0"), "true").expect("made");
        std::fs::write(&files.output, vec![b'x'; 1024 * 1024 + 1]).expect("written");
        assert_eq!(read(&files.output), Err("$KICI_OUTPUT was ignored: it is larger than 1 MiB".to_owned()));
        std::fs::remove_file(&files.env).expect("removed");
        std::os::unix::fs::symlink("/etc/passwd", &files.env).expect("linked");
        assert_eq!(read(&files.env), Err("$KICI_ENV was ignored: it is not a plain file any more".to_owned()));
        assert_eq!(read(&dir.path().join("gone")), Ok(String::new()));
    }
}
