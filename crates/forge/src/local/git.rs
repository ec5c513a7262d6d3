//! The git program, as far as a local repository needs it. Only commands that read; none touches the index, runs a
//! hook or follows a replacement ref.

use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::process::{Child, ChildStderr, ChildStdin, ChildStdout, Command};
use tokio::sync::Mutex;

use super::tree;
use crate::forge::ForgeError;
use crate::source::path_text;
use crate::workflows::{Limits, STEP_DIR, Selection, WORKFLOW_DIR, Wanted, WorkflowFiles};

/// Variables that would point git at another repository (`git rev-parse --local-env-vars`): we may have been started
/// from a hook.
const LOCAL_ENV: [&str; 16] = [
    "GIT_ALTERNATE_OBJECT_DIRECTORIES",
    "GIT_COMMON_DIR",
    "GIT_CONFIG",
    "GIT_CONFIG_COUNT",
    "GIT_CONFIG_PARAMETERS",
    "GIT_DIR",
    "GIT_GRAFT_FILE",
    "GIT_IMPLICIT_WORK_TREE",
    "GIT_INDEX_FILE",
    "GIT_INTERNAL_SUPER_PREFIX",
    "GIT_NAMESPACE",
    "GIT_OBJECT_DIRECTORY",
    "GIT_PREFIX",
    "GIT_REPLACE_REF_BASE",
    "GIT_SHALLOW_FILE",
    "GIT_WORK_TREE",
];

/// Most bytes of a tree or commit object that are read.
const MAX_OBJECT: u64 = 1024 * 1024;
/// Most bytes of the output of a one-off command.
const MAX_OUTPUT: u64 = 8 * 1024 * 1024;
/// Requests written before the answers are read; small enough for a pipe's buffer.
const PIPELINE: usize = 128;

/// git in one repository.
#[derive(Debug)]
pub(super) struct Git {
    path: PathBuf,
    timeout: Duration,
    reader: Mutex<Option<Reader>>,
}

impl Git {
    pub fn new(path: PathBuf, timeout: Duration) -> Self {
        Self { path, timeout, reader: Mutex::new(None) }
    }

    fn command(&self) -> Command {
        let mut command = Command::new("git");
        for name in LOCAL_ENV {
            command.env_remove(name);
        }
        command
            .env("GIT_NO_REPLACE_OBJECTS", "1")
            .env("GIT_NO_LAZY_FETCH", "1")
            .env("GIT_OPTIONAL_LOCKS", "0")
            .env("GIT_TERMINAL_PROMPT", "0")
            .env("GIT_CONFIG_NOSYSTEM", "1")
            .env("GIT_CONFIG_GLOBAL", "/dev/null")
            .env("LC_ALL", "C")
            // The operator has allowed this path; who owns its files does not matter for reading objects.
            .args(["-c", "safe.directory=*", "-C"])
            .arg(&self.path)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // A Ctrl-C on the terminal is for us; while we shut down, git may still be needed.
            .process_group(0)
            .kill_on_drop(true);
        command
    }

    fn failed(&self, problem: impl ToString) -> ForgeError {
        ForgeError::unavailable(format!("git in {}", path_text(&self.path)), problem)
    }

    /// The workflow files at a commit.
    pub async fn workflows_at(&self, sha: &str, limits: Limits) -> Result<WorkflowFiles, ForgeError> {
        // The process leaves its slot while in use: when this future is dropped halfway, so is the process, and the
        // next caller never reads the rest of our answers.
        let mut slot = self.reader.lock().await;
        if let Some(mut reader) = slot.take()
            && let Ok(Ok(Some(files))) = tokio::time::timeout(self.timeout, reader.workflows_at(sha, limits)).await
        {
            *slot = Some(reader);
            return Ok(files);
        }
        // It had died, or the repository was replaced under it. A fresh process decides.
        let mut reader = Reader::start(self.command()).map_err(|e| self.failed(format!("git did not start: {e}")))?;
        match tokio::time::timeout(self.timeout, reader.workflows_at(sha, limits)).await {
            Ok(Ok(Some(files))) => {
                *slot = Some(reader);
                Ok(files)
            }
            Ok(Ok(None)) => {
                *slot = Some(reader);
                Err(ForgeError::not_found(format!("commit {sha} in {}", path_text(&self.path))))
            }
            Ok(Err(error)) => Err(self.failed(reader.explain(error).await)),
            Err(_) => Err(self.failed(format!("no answer within {} s", self.timeout.as_secs()))),
        }
    }

    /// Runs one command to its end. The exit code is `None` for a signal.
    async fn run(&self, args: &[&str]) -> Result<Finished, ForgeError> {
        let mut child =
            self.command().args(args).spawn().map_err(|e| self.failed(format!("git did not start: {e}")))?;
        let (out, err) = (child.stdout.take(), child.stderr.take());
        let work = async {
            let (out, err) = futures::future::join(drain(out, MAX_OUTPUT), drain(err, 4096)).await;
            let (out, cut) = out?;
            if cut {
                child.start_kill()?;
            }
            let status = child.wait().await?;
            Ok::<_, std::io::Error>(Finished { code: status.code(), out, cut, err: text(&err?.0) })
        };
        match tokio::time::timeout(self.timeout, work).await {
            Ok(done) => done.map_err(|e| self.failed(e)),
            Err(_) => Err(self.failed(format!("no answer within {} s", self.timeout.as_secs()))),
        }
    }

    /// The target of a symbolic ref; `None` when it is not symbolic or not there.
    pub async fn symbolic_ref(&self, name: &str) -> Result<Option<String>, ForgeError> {
        let done = self.run(&["symbolic-ref", "--quiet", name]).await?;
        self.optional(done)
    }

    /// The commit that a ref names; `None` when there is none.
    pub async fn commit_of(&self, git_ref: &str) -> Result<Option<String>, ForgeError> {
        let spec = format!("{git_ref}^{{commit}}");
        let done = self.run(&["rev-parse", "--verify", "--quiet", "--end-of-options", &spec]).await?;
        self.optional(done)
    }

    /// The commit at which two histories part.
    pub async fn merge_base(&self, one: &str, other: &str) -> Result<String, ForgeError> {
        let done = self.run(&["merge-base", one, other]).await?;
        self.optional(done)?.ok_or_else(|| self.failed("the histories have no commit in common"))
    }

    /// A regular file of a commit; none when there is no such file.
    pub async fn file_at(&self, sha: &str, path: &str, max: usize) -> Result<Option<Vec<u8>>, ForgeError> {
        let listed = self.run(&["ls-tree", "-z", "--full-tree", "-l", sha, "--", path]).await?;
        if listed.code != Some(0) {
            return Err(self.failed(listed.err));
        }
        // `<mode> blob <oid> <size>\t<path>`; 120000 is a symbolic link, 160000 a submodule.
        let line = text(&listed.out);
        let Some((facts, _)) = line.split_once('\t').filter(|(_, rest)| rest.trim_end_matches('\0') == path) else {
            return Ok(None);
        };
        let facts: Vec<&str> = facts.split_whitespace().collect();
        let [mode, "blob", oid, size] = facts[..] else { return Ok(None) };
        if !mode.starts_with("100") {
            return Ok(None);
        }
        if size.parse::<usize>().map_or(true, |size| size > max) {
            return Err(self.failed(format!("{path} has {size} bytes, at most {max} are read")));
        }
        let read = self.run(&["cat-file", "blob", oid]).await?;
        if read.code == Some(0) && !read.cut { Ok(Some(read.out)) } else { Err(self.failed(read.err)) }
    }

    /// Paths that differ between two commits, and whether there are more than `max`.
    pub async fn changed(&self, base: &str, head: &str, max: usize) -> Result<(Vec<String>, bool), ForgeError> {
        let args = ["diff-tree", "-r", "-z", "--name-only", "--no-renames", "--no-ext-diff", "--end-of-options"];
        let done = self.run(&[&args[..], &[base, head]].concat()).await?;
        if !done.cut && done.code != Some(0) {
            return Err(self.failed(done.err));
        }
        let mut paths: Vec<String> =
            done.out.split(|b| *b == 0).filter(|p| !p.is_empty()).map(|p| text(p).clone()).collect();
        if done.cut {
            // The last path may be cut in two.
            paths.pop();
        }
        let more = done.cut || paths.len() > max;
        paths.truncate(max);
        Ok((paths, more))
    }

    fn optional(&self, done: Finished) -> Result<Option<String>, ForgeError> {
        match done.code {
            Some(0) => Ok(Some(text(&done.out).trim_end().to_owned())),
            Some(1) => Ok(None),
            _ => Err(self.failed(done.err)),
        }
    }
}

struct Finished {
    code: Option<i32>,
    out: Vec<u8>,
    /// More output than is kept.
    cut: bool,
    err: String,
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

async fn drain(from: Option<impl tokio::io::AsyncRead + Unpin>, max: u64) -> std::io::Result<(Vec<u8>, bool)> {
    let mut out = Vec::new();
    if let Some(from) = from {
        from.take(max + 1).read_to_end(&mut out).await?;
    }
    let cut = out.len() as u64 > max;
    out.truncate(usize::try_from(max).unwrap_or(usize::MAX));
    Ok((out, cut))
}

/// A running `git cat-file --batch-command`.
#[derive(Debug)]
struct Reader {
    child: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
    stderr: Option<ChildStderr>,
}

/// What git knows about an object.
#[derive(Clone, Debug)]
struct Info {
    oid: String,
    kind: String,
    size: u64,
}

impl Reader {
    fn start(mut command: Command) -> std::io::Result<Self> {
        let mut child = command.args(["cat-file", "--batch-command"]).stdin(Stdio::piped()).spawn()?;
        let piped = || std::io::Error::other("no pipe");
        let stdin = child.stdin.take().ok_or_else(piped)?;
        let stdout = BufReader::new(child.stdout.take().ok_or_else(piped)?);
        Ok(Self { stderr: child.stderr.take(), child, stdin, stdout })
    }

    /// What git said before it died, or the plain error.
    async fn explain(mut self, error: std::io::Error) -> String {
        drop(self.stdin);
        drop(self.child.start_kill());
        let said = drain(self.stderr.take(), 2048).await.map(|(said, _)| text(&said)).unwrap_or_default();
        let said = said.trim();
        if said.is_empty() { error.to_string() } else { said.to_owned() }
    }

    /// `None` when the repository has no such commit. Four exchanges, however many files there are.
    async fn workflows_at(&mut self, sha: &str, limits: Limits) -> std::io::Result<Option<WorkflowFiles>> {
        let folders = [".kici", WORKFLOW_DIR, STEP_DIR];
        let specs = folders.map(|folder| format!("{sha}:{folder}"));
        let mut infos = self.info(&[sha, &specs[0], &specs[1], &specs[2]]).await?.into_iter();
        let Some(commit) = infos.next().flatten().filter(|commit| commit.kind == "commit") else { return Ok(None) };
        let mut selection = Selection::new(limits);
        let mut objects = Vec::new();
        let mut places = Vec::new();
        if commit.size <= MAX_OBJECT {
            objects.push(commit);
            places.push(None);
        }
        // git follows no symbolic link on the way: what it finds is a folder of the repository, or nothing.
        for (folder, info) in folders.into_iter().zip(infos) {
            match info {
                Some(info) if info.kind == "tree" && info.size <= MAX_OBJECT => {
                    objects.push(info);
                    places.push(Some(folder));
                }
                Some(info) if info.kind == "tree" => selection.skip(folder, "too many entries".to_owned()),
                _ => {}
            }
        }
        let mut message = None;
        for (place, raw) in places.into_iter().zip(self.contents(&objects).await?) {
            match place {
                None => message = text(&raw).split_once("\n\n").map(|(_, message)| message.to_owned()),
                Some(folder) => offer(folder, &raw, sha.len() / 2, &mut selection)?,
            }
        }
        let contents = self.read(&mut selection).await?;
        Ok(Some(selection.fill(contents, message)))
    }

    /// Reads what was selected, after asking for sizes: a huge file is never read.
    async fn read(&mut self, selection: &mut Selection) -> std::io::Result<Vec<(Wanted, Vec<u8>)>> {
        let wanted = selection.take();
        let ids: Vec<&str> = wanted.iter().map(|w| w.oid.as_str()).collect();
        let infos = self.info(&ids).await?;
        let mut small = Vec::new();
        for (wanted, info) in wanted.into_iter().zip(infos) {
            let Some(info) = info else {
                selection.skip(&wanted.path, "its content is not in this partial clone".to_owned());
                continue;
            };
            match selection.too_large(wanted.role, info.size) {
                Some(reason) => selection.skip(&wanted.path, reason),
                None => small.push((wanted, info)),
            }
        }
        let (wanted, infos): (Vec<_>, Vec<_>) = small.into_iter().unzip();
        Ok(wanted.into_iter().zip(self.contents(&infos).await?).collect())
    }

    /// Asks about several objects at once; `None` for each that is not there.
    async fn info(&mut self, specs: &[&str]) -> std::io::Result<Vec<Option<Info>>> {
        let mut out = Vec::with_capacity(specs.len());
        for some in specs.chunks(PIPELINE) {
            let request: String = some.iter().map(|spec| format!("info {spec}\n")).collect();
            self.stdin.write_all(request.as_bytes()).await?;
            for _ in some {
                out.push(self.header().await?);
            }
        }
        Ok(out)
    }

    /// The contents of objects whose sizes were asked for before.
    async fn contents(&mut self, objects: &[Info]) -> std::io::Result<Vec<Vec<u8>>> {
        let mut out = Vec::with_capacity(objects.len());
        for some in objects.chunks(PIPELINE) {
            let request: String = some.iter().map(|info| format!("contents {}\n", info.oid)).collect();
            self.stdin.write_all(request.as_bytes()).await?;
            for info in some {
                let header = self.header().await?.filter(|header| header.size == info.size);
                let header = header.ok_or_else(|| std::io::Error::other("an object changed while it was read"))?;
                let size = usize::try_from(header.size).map_err(std::io::Error::other)?;
                let mut content = vec![0; size + 1];
                self.stdout.read_exact(&mut content).await?;
                content.truncate(size);
                out.push(content);
            }
        }
        Ok(out)
    }

    /// `<oid> <kind> <size>`, or anything else (`… missing`, `… ambiguous`) for "not there".
    async fn header(&mut self) -> std::io::Result<Option<Info>> {
        let mut line = String::new();
        if self.stdout.read_line(&mut line).await? == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        let mut words = line.trim_end().split(' ');
        let (Some(oid), Some(kind), Some(size), None) = (words.next(), words.next(), words.next(), words.next()) else {
            return Ok(None);
        };
        Ok(size.parse().ok().map(|size| Info { oid: oid.to_owned(), kind: kind.to_owned(), size }))
    }
}

/// Offers the files of a folder. Symbolic links and submodules are not files.
fn offer(folder: &str, tree: &[u8], id_len: usize, selection: &mut Selection) -> std::io::Result<()> {
    let entries = tree::parse(tree, id_len).ok_or_else(|| std::io::Error::other("unreadable tree object"))?;
    for entry in entries.iter().filter(|entry| entry.is_file) {
        selection.offer(&format!("{folder}/{}", entry.name), &entry.oid, None);
    }
    Ok(())
}
