//! What the program of containers does with files, without a container: it is an ordinary program there.

#![cfg(target_os = "linux")]

use std::fs;
use std::io::Write as _;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::PathBuf;
use std::process::{Command, Output};

use kici_sys::init::tar::{self, Kind};

struct Site {
    dir: tempfile::TempDir,
    program: PathBuf,
}

impl Site {
    fn new() -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let program = dir.path().join("kici-init");
        // Closed before it runs: a program that somebody may write does not start.
        let mut file = fs::File::create(&program).expect("made");
        file.write_all(kici_sys::init::PROGRAM).expect("written");
        file.set_permissions(fs::Permissions::from_mode(0o755)).expect("set");
        drop(file);
        fs::create_dir(dir.path().join("w")).expect("made");
        Self { dir, program }
    }

    fn at(&self, path: &str) -> PathBuf {
        self.dir.path().join(path)
    }

    fn write(&self, path: &str, content: &str) {
        let path = self.at(path);
        fs::create_dir_all(path.parent().expect("a parent")).expect("made");
        fs::write(path, content).expect("written");
    }

    fn read(&self, path: &str) -> String {
        fs::read_to_string(self.at(path)).unwrap_or_else(|error| format!("{path}: {error}"))
    }

    fn run(&self, verb: &str, fields: &[&str]) -> Output {
        let list = self.at("list");
        let fields: Vec<String> =
            fields.iter().map(|field| field.replace("{dir}", self.dir.path().to_str().expect("text"))).collect();
        fs::write(&list, fields.join("\0")).expect("written");
        // Another test of this process may start a program while ours is open for writing in the child that it forked.
        let output = loop {
            match Command::new(&self.program).args(["files", verb]).arg(&list).output() {
                Err(error) if error.kind() == std::io::ErrorKind::ExecutableFileBusy => std::thread::yield_now(),
                output => break output.expect("started"),
            }
        };
        assert!(!list.exists(), "the list is taken away");
        output
    }

    fn done(&self, verb: &str, fields: &[&str]) -> Vec<u8> {
        let output = self.run(verb, fields);
        assert!(output.status.success(), "{}", said(&output));
        output.stdout
    }

    fn refused(&self, verb: &str, fields: &[&str], words: &str) {
        let output = self.run(verb, fields);
        assert_eq!(output.status.code(), Some(1));
        assert!(said(&output).contains(words), "{}", said(&output));
    }
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn entries(archive: &[u8]) -> Vec<(String, Kind, String)> {
    let mut input = archive;
    let mut found = Vec::new();
    while let Some(entry) = tar::read(&mut input).expect("an archive") {
        let (content, rest) = input.split_at(usize::try_from(entry.size).expect("small"));
        input = rest;
        tar::skip_pad(&mut input, entry.size).expect("whole");
        let text = if entry.kind == Kind::Link { entry.target } else { content.to_vec() };
        found.push((String::from_utf8(entry.name).expect("text"), entry.kind, String::from_utf8(text).expect("text")));
    }
    found
}

#[test]
fn what_is_there_is_told_and_packed_and_no_link_is_followed() {
    let site = Site::new();
    site.write("secret", "secret");
    site.write("w/a/b/one", "1");
    site.write("w/.git/HEAD", "x");
    symlink(site.at("secret"), site.at("w/out")).expect("made");
    symlink("a", site.at("w/in")).expect("made");
    let _socket = std::os::unix::net::UnixListener::bind(site.at("w/a/socket")).expect("bound");
    let told = site.done("look", &["{dir}/w", "a/b", "{dir}/w", "none", "{dir}/w", "out", "{dir}/w", "a/b/one/x"]);
    assert_eq!(told, b"1010");
    let listed = String::from_utf8(site.done("list", &["{dir}/w"])).expect("text");
    assert_eq!(listed.split('\0').collect::<Vec<_>>(), ["da", "da/b", "fa/b/one", "oa/socket", "oin", "oout", ""]);

    let output = site.run("pack", &["{dir}/w", "a", "__repo__", "{dir}/w", "out", "", "{dir}/w", "none", "x"]);
    assert!(output.status.success());
    assert_eq!(said(&output).trim(), "1", "the socket is left out");
    let secret = site.at("secret").display().to_string();
    let text = |text: &str| text.to_owned();
    assert_eq!(
        entries(&output.stdout),
        [
            (text("__repo__/a/"), Kind::Dir, text("")),
            (text("__repo__/a/b/"), Kind::Dir, text("")),
            (text("__repo__/a/b/one"), Kind::File, text("1")),
            (text("out"), Kind::Link, secret),
        ]
    );
    site.refused("pack", &["{dir}/w", "in/b/one", ""], "goes through a link");
    site.refused("pack", &["{dir}/w", "out/x", ""], "goes through a link");
    let output = site.run("burn", &["{dir}/w"]);
    assert!(!output.status.success());
    assert_eq!(site.read("w/a/b/one"), "1");
}

#[test]
fn what_is_replaced_is_exactly_what_is_named() {
    let site = Site::new();
    site.write("w/stage/__repo__/a/b/new", "new");
    site.write("w/stage/__repo__/file", "file");
    site.write("w/a/b/old", "old");
    site.write("w/a/beside", "beside");
    site.write("w/file/was/a/directory", "x");
    fs::set_permissions(site.at("w/file/was"), fs::Permissions::from_mode(0o500)).expect("set");
    let moves = ["{dir}/w/stage", "__repo__/a/b", "{dir}/w", "a/b", "__repo__/file", "{dir}/w", "file"];
    site.done("replace", &moves);
    assert_eq!((site.read("w/a/b/new").as_str(), site.read("w/a/beside").as_str()), ("new", "beside"));
    assert_eq!(site.read("w/file"), "file");
    assert!(!site.at("w/a/b/old").exists() && !site.at("w/stage").exists());
    let names = |dir: &str| fs::read_dir(site.at(dir)).expect("there").count();
    assert_eq!((names("w"), names("w/a")), (2, 2), "nothing is left beside them");

    // What leads elsewhere on the way is not gone through; what is named may be a link, which is replaced itself.
    fs::create_dir(site.at("elsewhere")).expect("made");
    symlink(site.at("elsewhere"), site.at("w/link")).expect("made");
    site.write("w/stage/x", "x");
    site.refused("replace", &["{dir}/w/stage", "x", "{dir}/w", "link/x"], "is not gone through");
    assert!(!site.at("w/stage").exists(), "taken away all the same");
    assert_eq!(names("elsewhere"), 0);
    site.write("w/stage/x", "x");
    site.done("replace", &["{dir}/w/stage", "x", "{dir}/w", "link"]);
    assert_eq!((site.read("w/link").as_str(), names("elsewhere")), ("x", 0));
}

#[test]
fn directories_are_joined_and_a_file_never_takes_the_place_of_one() {
    let site = Site::new();
    site.write("w/stage/got/sub/new", "new");
    site.write("w/stage/got/file", "2");
    site.write("w/here/got/sub/old", "old");
    site.write("w/here/got/file", "1");
    site.done("join", &["{dir}/w/stage", "{dir}/w", "here"]);
    assert_eq!((site.read("w/here/got/sub/new").as_str(), site.read("w/here/got/sub/old").as_str()), ("new", "old"));
    assert_eq!(site.read("w/here/got/file"), "2");
    site.write("w/stage/got/sub", "a file");
    site.refused("join", &["{dir}/w/stage", "{dir}/w", "here"], "is a directory here and a file in the artifact");
    site.write("w/stage/top", "top");
    site.done("join", &["{dir}/w/stage", "{dir}/w", ""]);
    assert_eq!(site.read("w/top"), "top");
}
