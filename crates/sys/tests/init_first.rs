//! The first process of a job's container, as the first process of a namespace of its own.

#![cfg(target_os = "linux")]

use std::collections::BTreeSet;
use std::io::Write as _;
use std::process::{Command, Stdio};
use std::time::Duration;

use kici_sys::init::wire::{self, MAX_REPLY_BYTES, Reply, Request, Start};

/// Commands one after the other.
const COMMANDS: u32 = 300;

/// `unshare` with what it needs here to make a namespace of processes; none where that is not allowed.
fn namespace() -> Option<Command> {
    [&[][..], &["--user", "--map-root-user"]].into_iter().find_map(|more| {
        let made = |program: &str| {
            let mut command = Command::new("unshare");
            command.args(more).args(["--pid", "--fork", "--kill-child", "--mount-proc", program]);
            command
        };
        let status = made("true").stdout(Stdio::null()).stderr(Stdio::null()).status();
        status.is_ok_and(|status| status.success()).then(|| made(env!("CARGO_BIN_EXE_kici-init")))
    })
}

/// The end of a command looks for strays; the keeper of the next one, which begins just then, was taken for one, and its start
/// never answered.
#[test]
fn the_end_of_a_command_leaves_the_one_that_begins_meanwhile_alone() {
    let Some(mut first) = namespace() else {
        eprintln!("skipped: no namespace of processes can be made here");
        return;
    };
    let mut first = first.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("started");
    let mut input = first.stdin.take().expect("its input");
    let mut output = first.stdout.take().expect("its output");
    let (told, tells) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        while let Ok(Some(frame)) = wire::read(&mut output, MAX_REPLY_BYTES) {
            if told.send(Reply::decode(&frame).expect("a frame")).is_err() {
                break;
            }
        }
    });
    let start = |id| {
        let commands = vec![vec![b"true".to_vec()]];
        let env = vec![(b"PATH".to_vec(), b"/usr/bin:/bin".to_vec())];
        Request::Start(Start { id, root: "/".into(), cwd: "/".into(), env, commands, ..Start::default() }).encode()
    };
    let (mut started, mut ended) = (BTreeSet::new(), BTreeSet::new());
    input.write_all(&start(0)).expect("written");
    while ended.len() < COMMANDS as usize {
        match tells.recv_timeout(Duration::from_secs(20)).expect("an answer") {
            Reply::Started { id } => assert!(started.insert(id), "{id}"),
            // The agent goes on at once, while the keeper of this one still ends.
            Reply::Exit { id, status, .. } => {
                assert_eq!(status, 0, "{id}");
                assert!(started.contains(&id) && ended.insert(id), "{id}");
                if id + 1 < COMMANDS {
                    input.write_all(&start(id + 1)).expect("written");
                }
            }
            Reply::Output { .. } => {}
            other => panic!("{other:?}"),
        }
    }
    drop(input);
    assert!(first.wait().expect("its end").success());
}
