//! Frames between an agent and the first process of a job's container, over that process' standard input and output.
//!
//! A frame is its length without itself (`u32`, big endian), its kind (`u8`), then its fields in order: numbers big endian, texts
//! with their length (`u32`) in front, lists with their count (`u32`). This file stands alone: the program inside links nothing.

use std::io::{self, Read, Write};

/// Both sides must have the same.
pub const VERSION: u32 = 1;
/// Longest frame to the container: a script with its files.
pub const MAX_REQUEST_BYTES: usize = 64 * 1024 * 1024;
/// Longest frame from the container: what a step left in its files.
pub const MAX_REPLY_BYTES: usize = 16 * 1024 * 1024;
/// Most bytes of a file that come back: one more than a step may write, so that too many are seen.
pub const MAX_FILE_BYTES: u64 = 1024 * 1024 + 1;
/// Output of a command that may be on its way.
pub const WINDOW_BYTES: u32 = 256 * 1024;
/// Stands for all commands in [`Reply::Killed`].
pub const ALL: u32 = u32::MAX;

/// Bytes that a system takes as they are.
pub type Bytes = Vec<u8>;

/// A file to make before a command starts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct File {
    /// Where; its directories are made.
    pub path: Bytes,
    /// Its mode.
    pub mode: u32,
    /// What is in it.
    pub content: Bytes,
}

/// What became of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Left {
    /// What is in it, at most [`MAX_FILE_BYTES`].
    Content(Bytes),
    /// It is not there.
    Gone,
    /// It is no plain file any more, or cannot be read.
    Unreadable,
}

/// A command to start.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Start {
    /// What it is called in later frames.
    pub id: u32,
    /// The directory that it must start in or below.
    pub root: Bytes,
    /// Where it starts.
    pub cwd: Bytes,
    /// Its whole environment.
    pub env: Vec<(Bytes, Bytes)>,
    /// Its words; the next ones are taken where the program of the ones before does not exist.
    pub commands: Vec<Vec<Bytes>>,
    /// Files to make before.
    pub files: Vec<File>,
    /// Files that come back when it has ended.
    pub back: Vec<Bytes>,
}

/// From the agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Request {
    /// The first frame.
    Hello {
        /// [`VERSION`].
        version: u32,
    },
    /// Start a command.
    Start(Start),
    /// So much more output may be sent.
    Credit {
        /// Of which command.
        id: u32,
        /// Bytes.
        bytes: u32,
    },
    /// SIGTERM to the process group of a command.
    Terminate {
        /// Which.
        id: u32,
    },
    /// SIGKILL to a command and all that it started.
    Kill {
        /// Which, or [`ALL`].
        id: u32,
    },
    /// What was used so far?
    Usage,
    /// Bytes for the caller of a call; none: there are no more.
    Answer {
        /// Which call.
        call: u32,
        /// 1 and 2 for its output and error output.
        channel: u8,
        /// The bytes.
        bytes: Bytes,
    },
    /// A call is over.
    Done {
        /// Which.
        call: u32,
        /// With this exit code.
        code: u8,
    },
}

/// From the container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// The answer to the first frame.
    Ready {
        /// [`VERSION`].
        version: u32,
        /// The environment of the image and its user.
        env: Vec<(Bytes, Bytes)>,
    },
    /// A command runs.
    Started {
        /// Which.
        id: u32,
    },
    /// A command does not run.
    NotStarted {
        /// Which.
        id: u32,
        /// Why, in words.
        message: Bytes,
    },
    /// Output of a command.
    Output {
        /// Of which.
        id: u32,
        /// 1 or 2, as file descriptors are numbered.
        channel: u8,
        /// The bytes; none: there are no more.
        bytes: Bytes,
    },
    /// A command ended. What it left behind may go on.
    Exit {
        /// Which.
        id: u32,
        /// As wait(2) tells it.
        status: i32,
        /// The files that were asked for.
        back: Vec<(Bytes, Left)>,
    },
    /// Nothing of a command is left.
    Killed {
        /// Which, or [`ALL`].
        id: u32,
        /// How many processes were ended.
        count: u32,
    },
    /// What was used so far; 0 where it is not known.
    Used {
        /// Processes that were ended for want of memory.
        oom_kills: u64,
        /// Most memory at once, in bytes.
        peak: u64,
        /// The limit, in bytes.
        limit: u64,
    },
    /// A step calls its agent.
    Call {
        /// What it is called in later frames.
        call: u32,
        /// The words.
        words: Vec<Bytes>,
    },
    /// Input of a call; none: there is no more.
    Input {
        /// Which call.
        call: u32,
        /// The bytes.
        bytes: Bytes,
    },
    /// The caller is gone.
    HungUp {
        /// Which call.
        call: u32,
    },
}

/// Bytes that are no frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoFrame;

impl From<NoFrame> for io::Error {
    fn from(_: NoFrame) -> Self {
        io::Error::new(io::ErrorKind::InvalidData, "what came is no frame")
    }
}

struct Out(Bytes);

impl Out {
    fn of(kind: u8) -> Self {
        Self(vec![0, 0, 0, 0, kind])
    }

    fn u32(mut self, n: u32) -> Self {
        self.0.extend(n.to_be_bytes());
        self
    }

    fn u64(mut self, n: u64) -> Self {
        self.0.extend(n.to_be_bytes());
        self
    }

    fn u8(mut self, n: u8) -> Self {
        self.0.push(n);
        self
    }

    fn bytes(mut self, bytes: &[u8]) -> Self {
        self = self.u32(length(bytes.len()));
        self.0.extend(bytes);
        self
    }

    fn list<T>(self, items: &[T], mut each: impl FnMut(Self, &T) -> Self) -> Self {
        let mut out = self.u32(length(items.len()));
        for item in items {
            out = each(out, item);
        }
        out
    }

    fn words(self, words: &[Bytes]) -> Self {
        self.list(words, |out, word| out.bytes(word))
    }

    fn pairs(self, pairs: &[(Bytes, Bytes)]) -> Self {
        self.list(pairs, |out, (name, value)| out.bytes(name).bytes(value))
    }

    fn end(mut self) -> Bytes {
        let size = length(self.0.len() - 4).to_be_bytes();
        self.0[..4].copy_from_slice(&size);
        self.0
    }
}

/// Nothing that is sent is as long as 4 GiB: both sides refuse far less.
fn length(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}

struct In<'a>(&'a [u8]);

impl In<'_> {
    fn take(&mut self, n: usize) -> Result<&[u8], NoFrame> {
        let (taken, rest) = self.0.split_at_checked(n).ok_or(NoFrame)?;
        self.0 = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], NoFrame> {
        self.take(N)?.try_into().map_err(|_| NoFrame)
    }

    fn u8(&mut self) -> Result<u8, NoFrame> {
        self.array::<1>().map(|[byte]| byte)
    }

    fn u32(&mut self) -> Result<u32, NoFrame> {
        self.array().map(u32::from_be_bytes)
    }

    fn u64(&mut self) -> Result<u64, NoFrame> {
        self.array().map(u64::from_be_bytes)
    }

    fn bytes(&mut self) -> Result<Bytes, NoFrame> {
        let n = self.u32()? as usize;
        self.take(n).map(<[u8]>::to_vec)
    }

    fn list<T>(&mut self, mut each: impl FnMut(&mut Self) -> Result<T, NoFrame>) -> Result<Vec<T>, NoFrame> {
        // What is announced is not believed: an item takes at least a byte.
        (0..self.u32()?).map(|_| each(self)).collect()
    }

    fn words(&mut self) -> Result<Vec<Bytes>, NoFrame> {
        self.list(Self::bytes)
    }

    fn pairs(&mut self) -> Result<Vec<(Bytes, Bytes)>, NoFrame> {
        self.list(|input| Ok((input.bytes()?, input.bytes()?)))
    }

    fn end<T>(self, value: T) -> Result<T, NoFrame> {
        if self.0.is_empty() { Ok(value) } else { Err(NoFrame) }
    }
}

impl Request {
    /// As it goes over the wire.
    pub fn encode(&self) -> Bytes {
        match self {
            Self::Hello { version } => Out::of(1).u32(*version),
            Self::Start(start) => Out::of(2)
                .u32(start.id)
                .bytes(&start.root)
                .bytes(&start.cwd)
                .pairs(&start.env)
                .list(&start.commands, |out, words| out.words(words))
                .list(&start.files, |out, file| out.bytes(&file.path).u32(file.mode).bytes(&file.content))
                .words(&start.back),
            Self::Credit { id, bytes } => Out::of(3).u32(*id).u32(*bytes),
            Self::Terminate { id } => Out::of(4).u32(*id),
            Self::Kill { id } => Out::of(5).u32(*id),
            Self::Usage => Out::of(6),
            Self::Answer { call, channel, bytes } => Out::of(7).u32(*call).u8(*channel).bytes(bytes),
            Self::Done { call, code } => Out::of(8).u32(*call).u8(*code),
        }
        .end()
    }

    /// From a frame without its length.
    ///
    /// # Errors
    /// [`NoFrame`].
    pub fn decode(frame: &[u8]) -> Result<Self, NoFrame> {
        let mut input = In(frame);
        let request = match input.u8()? {
            1 => Self::Hello { version: input.u32()? },
            2 => Self::Start(Start {
                id: input.u32()?,
                root: input.bytes()?,
                cwd: input.bytes()?,
                env: input.pairs()?,
                commands: input.list(In::words)?,
                files: input
                    .list(|input| Ok(File { path: input.bytes()?, mode: input.u32()?, content: input.bytes()? }))?,
                back: input.words()?,
            }),
            3 => Self::Credit { id: input.u32()?, bytes: input.u32()? },
            4 => Self::Terminate { id: input.u32()? },
            5 => Self::Kill { id: input.u32()? },
            6 => Self::Usage,
            7 => Self::Answer { call: input.u32()?, channel: input.u8()?, bytes: input.bytes()? },
            8 => Self::Done { call: input.u32()?, code: input.u8()? },
            _ => return Err(NoFrame),
        };
        input.end(request)
    }
}

impl Reply {
    /// As it goes over the wire.
    pub fn encode(&self) -> Bytes {
        match self {
            Self::Ready { version, env } => Out::of(1).u32(*version).pairs(env),
            Self::Started { id } => Out::of(2).u32(*id),
            Self::NotStarted { id, message } => Out::of(3).u32(*id).bytes(message),
            Self::Output { id, channel, bytes } => Out::of(4).u32(*id).u8(*channel).bytes(bytes),
            Self::Exit { id, status, back } => {
                Out::of(5).u32(*id).u32(status.cast_unsigned()).list(back, |out, (path, left)| {
                    let out = out.bytes(path);
                    match left {
                        Left::Content(content) => out.u8(1).bytes(content),
                        Left::Gone => out.u8(2),
                        Left::Unreadable => out.u8(3),
                    }
                })
            }
            Self::Killed { id, count } => Out::of(6).u32(*id).u32(*count),
            Self::Used { oom_kills, peak, limit } => Out::of(7).u64(*oom_kills).u64(*peak).u64(*limit),
            Self::Call { call, words } => Out::of(8).u32(*call).words(words),
            Self::Input { call, bytes } => Out::of(9).u32(*call).bytes(bytes),
            Self::HungUp { call } => Out::of(10).u32(*call),
        }
        .end()
    }

    /// From a frame without its length.
    ///
    /// # Errors
    /// [`NoFrame`].
    pub fn decode(frame: &[u8]) -> Result<Self, NoFrame> {
        let mut input = In(frame);
        let left = |input: &mut In<'_>| match input.u8()? {
            1 => Ok(Left::Content(input.bytes()?)),
            2 => Ok(Left::Gone),
            3 => Ok(Left::Unreadable),
            _ => Err(NoFrame),
        };
        let reply = match input.u8()? {
            1 => Self::Ready { version: input.u32()?, env: input.pairs()? },
            2 => Self::Started { id: input.u32()? },
            3 => Self::NotStarted { id: input.u32()?, message: input.bytes()? },
            4 => Self::Output { id: input.u32()?, channel: input.u8()?, bytes: input.bytes()? },
            5 => Self::Exit {
                id: input.u32()?,
                status: input.u32()?.cast_signed(),
                back: input.list(|input| Ok((input.bytes()?, left(input)?)))?,
            },
            6 => Self::Killed { id: input.u32()?, count: input.u32()? },
            7 => Self::Used { oom_kills: input.u64()?, peak: input.u64()?, limit: input.u64()? },
            8 => Self::Call { call: input.u32()?, words: input.words()? },
            9 => Self::Input { call: input.u32()?, bytes: input.bytes()? },
            10 => Self::HungUp { call: input.u32()? },
            _ => return Err(NoFrame),
        };
        input.end(reply)
    }
}

/// Reads a frame without its length. None at the end.
///
/// # Errors
/// When the stream breaks off or what comes is longer than `most`.
pub fn read(from: &mut impl Read, most: usize) -> io::Result<Option<Bytes>> {
    let mut size = [0; 4];
    match from.read_exact(&mut size) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        Err(error) => return Err(error),
    }
    let size = u32::from_be_bytes(size) as usize;
    if size == 0 || size > most {
        return Err(NoFrame.into());
    }
    let mut frame = vec![0; size];
    from.read_exact(&mut frame)?;
    Ok(Some(frame))
}

/// Writes an encoded frame, and flushes.
///
/// # Errors
/// When it cannot be written.
pub fn write(to: &mut impl Write, frame: &[u8]) -> io::Result<()> {
    to.write_all(frame)?;
    to.flush()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_round_trip_and_what_is_cut_or_too_long_is_none() {
        let b = |text: &str| text.as_bytes().to_vec();
        let requests = [
            Request::Hello { version: VERSION },
            Request::Start(Start {
                id: 7,
                root: b("/w"),
                cwd: b("/w/a"),
                env: vec![(b("A"), b("1"))],
                commands: vec![vec![b("bash"), b("x")], vec![b("sh")]],
                files: vec![File { path: b("/f"), mode: 0o700, content: b("true") }],
                back: vec![b("/f")],
            }),
            Request::Credit { id: 1, bytes: 9 },
            Request::Terminate { id: 1 },
            Request::Kill { id: ALL },
            Request::Usage,
            Request::Answer { call: 1, channel: 2, bytes: b("x") },
            Request::Done { call: 1, code: 3 },
        ];
        for request in requests {
            let frame = request.encode();
            assert_eq!(Request::decode(&frame[4..]), Ok(request.clone()));
            let read = read(&mut frame.as_slice(), MAX_REQUEST_BYTES).expect("whole").expect("one");
            assert_eq!(read, &frame[4..]);
            for cut in 0..frame.len() - 4 {
                assert_eq!(Request::decode(&frame[4..4 + cut]), Err(NoFrame), "{request:?} at {cut}");
            }
            assert_eq!(Request::decode(&[&frame[4..], b"x"].concat()), Err(NoFrame));
        }
        let replies = [
            Reply::Ready { version: VERSION, env: vec![(b("PATH"), b("/bin"))] },
            Reply::Started { id: 1 },
            Reply::NotStarted { id: 1, message: b("no") },
            Reply::Output { id: 1, channel: 1, bytes: b("out") },
            Reply::Exit {
                id: 1,
                status: -1,
                back: vec![(b("a"), Left::Content(b("c"))), (b("b"), Left::Gone), (b("c"), Left::Unreadable)],
            },
            Reply::Killed { id: 1, count: 2 },
            Reply::Used { oom_kills: 1, peak: 2, limit: u64::MAX },
            Reply::Call { call: 1, words: vec![b("get")] },
            Reply::Input { call: 1, bytes: b("") },
            Reply::HungUp { call: 1 },
        ];
        for reply in replies {
            let frame = reply.encode();
            assert_eq!(Reply::decode(&frame[4..]), Ok(reply.clone()));
            for cut in 0..frame.len() - 4 {
                assert_eq!(Reply::decode(&frame[4..4 + cut]), Err(NoFrame), "{reply:?} at {cut}");
            }
        }
        assert!(read(&mut [0, 0, 0, 9, 1].as_slice(), 8).is_err(), "too long");
        assert!(read(&mut [0, 0, 0, 0].as_slice(), 8).is_err(), "empty");
        assert_eq!(read(&mut [].as_slice(), 8).expect("the end"), None);
        // A count of four thousand millions in a frame of a few bytes costs nothing.
        assert_eq!(Request::decode(&[2, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 255, 255, 255, 255]), Err(NoFrame));
    }
}
