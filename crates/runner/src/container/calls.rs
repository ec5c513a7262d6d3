//! Calls of steps in a container to their agent: git's credential helper and `kici`. The program that answers runs beside the
//! agent, with the socket of the job; a step chooses its words, so only words that are known to be harmless reach it.

use std::collections::HashMap;
use std::path::PathBuf;
use std::process::Stdio;

use kici_sys::init::wire::{Bytes, Request};
use tokio::io::{AsyncBufReadExt as _, AsyncRead, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::process::Command;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// Calls of one job at once.
const MAX_CALLS: usize = 64;
/// Pieces of input that may wait for a program.
const INPUTS: usize = 16;
/// Most output of a call: tokens and words for people.
const MAX_OUTPUT_BYTES: usize = 1024 * 1024;
const READ_BYTES: usize = 16 * 1024;
/// Exit code of words that are not known.
const USAGE: u8 = 2;
/// The channel on which a window is told to be open.
const OPEN: u8 = 3;
/// What `git with-write` runs on the host while the command runs in the container: it says that the window is open, and ends
/// with its input.
const HOLD: &str = "echo open; exec cat >/dev/null";

/// What answers calls of a job.
#[derive(Clone, Debug)]
pub struct Answering {
    /// The program of the agent.
    pub program: PathBuf,
    /// The socket of the job.
    pub socket: PathBuf,
}

/// The calls of one job.
pub struct Calls {
    /// None: the job has no socket.
    answering: Option<Answering>,
    open: HashMap<u32, Open>,
    tasks: TaskTracker,
}

struct Open {
    /// None: there is no more input.
    input: Option<mpsc::Sender<Bytes>>,
    gone: CancellationToken,
}

/// A call that may be made.
#[derive(Debug, PartialEq, Eq)]
struct Wanted {
    arguments: Vec<String>,
    /// It holds a write window while its caller works.
    is_window: bool,
}

/// What steps may ask of their agent: the words of the verb, options that take a value, options that do not, and the least and the most
/// other words.
type Verb = (&'static [&'static str], &'static [&'static str], &'static [&'static str], usize, usize);

const VERBS: [Verb; 8] = [
    (&["git", "token"], &["--repo", "--permission", "--credential"], &[], 0, 0),
    (&["git", "with-write"], &["--repo", "--permission", "--credential", "--ttl"], &[], 0, 0),
    (&["cache", "restore"], &["--key", "--restore-key"], &["--required"], 1, MAX_WORDS),
    (&["cache", "save"], &["--key"], &["--required"], 1, MAX_WORDS),
    (&["artifact", "upload"], &["--expire-in"], &["--allow-empty"], 2, MAX_WORDS),
    (&["artifact", "download"], &["--from", "--path"], &[], 1, 1),
    (&["emit"], &["--payload", "--target"], &[], 1, 1),
    (&["mask"], &[], &[], 0, MAX_WORDS),
];
/// Words of one call.
const MAX_WORDS: usize = 1_000;

/// What is run for the words of a step; none for words that are not known.
fn wanted(words: &[Bytes], socket: &str) -> Option<Wanted> {
    let words: Vec<&str> = words.iter().map(|word| std::str::from_utf8(word).ok()).collect::<Option<_>>()?;
    if words.iter().any(|word| word.contains('\0')) {
        return None;
    }
    let own = |arguments: &[&str]| arguments.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
    match words.as_slice() {
        ["credential-helper", .., operation] if matches!(*operation, "get" | "store" | "erase") => {
            Some(Wanted { arguments: own(&["credential-helper", "--socket", socket, operation]), is_window: false })
        }
        words => {
            let found = VERBS.iter().find(|(verb, ..)| words.starts_with(verb));
            let (verb, valued, flags, least, most) = found?;
            let mut rest = words[verb.len()..].iter();
            let mut others = 0;
            while let Some(word) = rest.next() {
                if !word.starts_with('-') {
                    others += 1;
                    continue;
                }
                if flags.contains(word) {
                    continue;
                }
                let (name, value) = word.split_once('=').map_or((*word, None), |(name, value)| (name, Some(value)));
                let value = value.or_else(|| rest.next().copied())?;
                // A value that looks like an option, `--` above all, would be one.
                if !valued.contains(&name) || value.starts_with('-') {
                    return None;
                }
            }
            if !(*least..=*most).contains(&others) {
                return None;
            }
            let mut arguments = own(&["step"]);
            arguments.extend(own(words));
            let is_window = *verb == ["git", "with-write"];
            if is_window {
                arguments.extend(own(&["--", "sh", "-c", HOLD]));
            }
            Some(Wanted { arguments, is_window })
        }
    }
}

impl Calls {
    /// Of one job.
    pub fn new(answering: Option<Answering>) -> Self {
        Self { answering, open: HashMap::new(), tasks: TaskTracker::new() }
    }

    /// A step calls.
    pub fn open(&mut self, call: u32, words: Vec<Bytes>, requests: mpsc::UnboundedSender<Bytes>) {
        self.open.retain(|_, open| !open.gone.is_cancelled());
        let refuse = |why: &str| {
            let bytes = format!("kici: {why}\n").into_bytes();
            // The container is gone: then nobody hears it.
            let _ = requests.send(Request::Answer { call, channel: 2, bytes }.encode());
            let _ = requests.send(Request::Done { call, code: USAGE }.encode());
        };
        let Some(answering) = &self.answering else {
            return refuse("this agent answers no calls");
        };
        let Some(wanted) = wanted(&words, &answering.socket.to_string_lossy()) else {
            return refuse(
                "in a container there are `kici git token`, `kici git with-write -- CMD`, `kici cache`, `kici artifact`, `kici emit` and `kici mask`; their words may not begin with `-`",
            );
        };
        if self.open.len() >= MAX_CALLS {
            return refuse("too many calls at once");
        }
        let (input, inputs) = mpsc::channel(INPUTS);
        let gone = CancellationToken::new();
        self.open.insert(call, Open { input: Some(input), gone: gone.clone() });
        let answering = answering.clone();
        self.tasks.spawn(async move {
            let code = answer(call, wanted, answering, inputs, &requests, &gone).await;
            let _ = requests.send(Request::Done { call, code }.encode());
            gone.cancel();
        });
    }

    /// Input of a call; none: there is no more.
    pub fn input(&mut self, call: u32, bytes: Bytes) {
        let Some(open) = self.open.get_mut(&call) else { return };
        if bytes.is_empty() {
            open.input = None;
        } else if open.input.as_ref().is_some_and(|input| input.try_send(bytes).is_err()) {
            // Nothing that may be called reads much: whoever sends more means harm, or nobody reads any more.
            open.gone.cancel();
        }
    }

    /// The caller is gone.
    pub fn hung_up(&mut self, call: u32) {
        if let Some(open) = self.open.remove(&call) {
            open.gone.cancel();
        }
    }
}

impl Drop for Calls {
    fn drop(&mut self) {
        self.open.values().for_each(|open| open.gone.cancel());
    }
}

async fn answer(
    call: u32,
    wanted: Wanted,
    answering: Answering,
    mut inputs: mpsc::Receiver<Bytes>,
    requests: &mpsc::UnboundedSender<Bytes>,
    gone: &CancellationToken,
) -> u8 {
    let mut command = Command::new(&answering.program);
    command.args(&wanted.arguments).env_clear().env("PATH", crate::steps::environment::DEFAULT_PATH);
    command.env("KICI_SOCK", &answering.socket).current_dir("/").kill_on_drop(true);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let Ok(mut child) = command.spawn() else { return 1 };
    let (stdin, stdout, stderr) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
    let feed = async {
        let Some(mut stdin) = stdin else { return };
        while let Some(bytes) = inputs.recv().await {
            if stdin.write_all(&bytes).await.is_err() {
                return;
            }
        }
    };
    let work = async {
        let out = async {
            let Some(stdout) = stdout else { return };
            let mut stdout = BufReader::new(stdout);
            if wanted.is_window {
                let mut line = String::new();
                // Without the line the program ends by itself, with words of its own.
                if stdout.read_line(&mut line).await.is_ok_and(|n| n > 0) {
                    let _ = requests.send(Request::Answer { call, channel: OPEN, bytes: b"open".to_vec() }.encode());
                }
            }
            forward(call, 1, stdout, requests).await;
        };
        let err = async {
            if let Some(stderr) = stderr {
                forward(call, 2, stderr, requests).await;
            }
        };
        tokio::join!(out, err);
        child.wait().await.ok().and_then(|status| status.code()).and_then(|code| u8::try_from(code).ok()).unwrap_or(1)
    };
    tokio::pin!(feed, work);
    let mut fed = false;
    loop {
        tokio::select! {
            code = &mut work => return code,
            () = &mut feed, if !fed => fed = true,
            // Its end closes the program's connection, and with it a window.
            () = gone.cancelled() => return 1,
        }
    }
}

async fn forward(call: u32, channel: u8, mut from: impl AsyncRead + Unpin, requests: &mpsc::UnboundedSender<Bytes>) {
    let (mut buffer, mut sent) = (vec![0; READ_BYTES], 0);
    while let Ok(n) = from.read(&mut buffer).await {
        sent += n;
        if n == 0 || sent > MAX_OUTPUT_BYTES {
            return;
        }
        let _ = requests.send(Request::Answer { call, channel, bytes: buffer[..n].to_vec() }.encode());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(words: &[&str]) -> Option<Vec<String>> {
        let words: Vec<Bytes> = words.iter().map(|word| word.as_bytes().to_vec()).collect();
        wanted(&words, "/s/job.sock").map(|wanted| wanted.arguments)
    }

    #[test]
    fn words_of_steps_start_nothing_but_what_is_meant() {
        let helper = of(&["credential-helper", "--socket", "/evil", "get"]).expect("known");
        assert_eq!(helper, ["credential-helper", "--socket", "/s/job.sock", "get"]);
        let token = of(&["git", "token", "--repo", "acme/app", "--permission=contents=read"]).expect("known");
        assert_eq!(token, ["step", "git", "token", "--repo", "acme/app", "--permission=contents=read"]);
        let window = of(&["git", "with-write", "--ttl", "60"]).expect("known");
        assert_eq!(window[..5], ["step", "git", "with-write", "--ttl", "60"]);
        assert_eq!(window[5..8], ["--", "sh", "-c"]);
        for fine in [
            &["cache", "restore", "--key", "k", "--restore-key=p", "--required", "a", "~/b"][..],
            &["cache", "save", "--key=k", "a"],
            &["artifact", "upload", "n", "a/*", "--allow-empty", "--expire-in", "3"],
            &["artifact", "download", "n", "--from", "build", "--path", "got"],
            &["emit", "ready", "--payload", "{\"a\": 1}"],
            &["mask"],
        ] {
            let expected: Vec<String> =
                std::iter::once("step").chain(fine.iter().copied()).map(str::to_owned).collect();
            assert_eq!(of(fine), Some(expected));
        }
        for hostile in [
            &["git", "with-write", "--", "sh", "-c", "evil"][..],
            &["git", "with-write", "--repo", "--", "sh"],
            &["git", "with-write", "--repo=--", "sh"],
            &["git", "token", "--socket", "/evil"],
            &["git", "token", "acme/app"],
            &["git", "token", "--repo"],
            &["git", "push"],
            &["git", "token", "--repo", "a/b", "with-write"],
            &["cache", "save", "--key", "k"],
            &["cache", "save", "--key", "k", "--socket", "/evil", "x"],
            &["cache", "save", "--key", "k", "--", "x"],
            &["cache", "restore", "--required=--", "x"],
            &["artifact", "download", "x", "y"],
            &["artifact", "upload", "x"],
            &["emit"],
            &["mask", "-x"],
            &["cache"],
            &["credential-helper", "--socket", "/evil", "run"],
            &["run"],
            &["--config", "/evil"],
            &["doctor"],
            &[],
        ] {
            assert_eq!(of(hostile), None, "{hostile:?}");
        }
    }
}
