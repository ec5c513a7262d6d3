use std::fs;
use std::io::Cursor;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;
use std::time::{Duration, UNIX_EPOCH};

use kici_sys::init::tar::{self, Entry, Kind};
use proptest::prelude::*;
use tempfile::TempDir;

use super::*;

const SMALL: Limits = Limits { bytes: 1 << 20, entries: 1000, reader: None };

fn dir() -> TempDir {
    tempfile::tempdir().expect("a directory")
}

fn packed(root: &Path, paths: &[&str], links: Links) -> Result<(Vec<u8>, Packed), ArchiveError> {
    let items: Vec<Item<'_>> =
        paths.iter().map(|path| Item { root, path: (*path).to_owned(), anchor: "__repo__" }).collect();
    let mut out = Vec::new();
    pack(&items, &mut out, SMALL, links).map(|packed| (out, packed))
}

fn unpacked(archive: &[u8], links: Links) -> (TempDir, Result<Unpacked, ArchiveError>) {
    let into = dir();
    let done = unpack(Cursor::new(archive), &Dir::open(into.path()).expect("open"), SMALL, links);
    (into, done)
}

/// An archive of any entries, well-formed or not.
fn archive(entries: &[(Entry, &[u8])]) -> Vec<u8> {
    let mut out = zstd::stream::write::Encoder::new(Vec::new(), 1).expect("made");
    for (entry, bytes) in entries {
        tar::write(&mut out, entry).expect("written");
        io::Write::write_all(&mut out, bytes).expect("written");
        tar::pad(&mut out, bytes.len() as u64).expect("written");
    }
    tar::end(&mut out).expect("written");
    out.finish().expect("finished")
}

fn file(name: &str, bytes: &[u8]) -> Entry {
    let (name, size) = (name.as_bytes().to_vec(), bytes.len() as u64);
    Entry { name, kind: Kind::File, target: Vec::new(), mode: 0o644, modified: 1, size }
}

fn link(name: &str, target: &str) -> Entry {
    let (name, target) = (name.as_bytes().to_vec(), target.as_bytes().to_vec());
    Entry { name, kind: Kind::Link, target, mode: 0o777, modified: 1, size: 0 }
}

/// A plain archive whose header says something else.
fn changed(change: impl FnOnce(&mut [u8])) -> Vec<u8> {
    let mut raw = Vec::new();
    tar::write(&mut raw, &file("x", b"")).expect("written");
    change(&mut raw);
    let sum: u32 =
        raw.iter().enumerate().map(|(at, b)| if (148..156).contains(&at) { 32 } else { u32::from(*b) }).sum();
    raw[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    tar::end(&mut raw).expect("written");
    zstd::bulk::compress(&raw, 1).expect("packed")
}

#[test]
fn what_is_packed_comes_back_with_modes_times_links_and_long_names() {
    let from = dir();
    let deep = format!("target/{}/{}", "d".repeat(120), "e".repeat(120));
    fs::create_dir_all(from.path().join(&deep)).expect("made");
    fs::write(from.path().join(&deep).join("file"), "content").expect("written");
    fs::write(from.path().join("target/run"), "#!/bin/sh").expect("written");
    fs::set_permissions(from.path().join("target/run"), PermissionsExt::from_mode(0o4755)).expect("set");
    let at = UNIX_EPOCH + Duration::from_secs(1_500_000_000);
    fs::File::options().write(true).open(from.path().join("target/run")).expect("open").set_modified(at).expect("set");
    symlink("run", from.path().join("target/link")).expect("made");
    symlink("/nowhere/outside", from.path().join("target/out")).expect("made");
    fs::create_dir(from.path().join("target/empty")).expect("made");
    let (bytes, packed) = packed(from.path(), &["target", "missing", "no/such"], Links::Any).expect("packed");
    assert_eq!((packed.files, packed.missing.as_slice()), (4, ["missing".to_owned(), "no/such".to_owned()].as_slice()));
    let (into, done) = unpacked(&bytes, Links::Any);
    assert_eq!(done.expect("unpacked").files, 4);
    let at = |name: &str| into.path().join("__repo__").join(name);
    assert_eq!(fs::read_to_string(at(&deep).join("file")).expect("read"), "content");
    let run = at("target/run").metadata().expect("there");
    assert_eq!((run.mode() & 0o7777, run.mtime()), (0o755, 1_500_000_000), "no set-user-id bit comes back");
    assert_eq!(fs::read_link(at("target/link")).expect("a link"), Path::new("run"));
    assert_eq!(fs::read_link(at("target/out")).expect("a link"), Path::new("/nowhere/outside"));
    assert!(at("target/empty").is_dir());
}

#[test]
fn hostile_archives_are_refused_whole() {
    let one = |entry: Entry| archive(&[(entry, b"")]);
    let long = "n/".repeat(200);
    let cases: Vec<(&str, Vec<u8>)> = vec![
        ("climbs out", one(file("../x", b""))),
        ("climbs out", one(file("a/../../x", b""))),
        ("is absolute", one(file("/etc/x", b""))),
        ("has no name", one(file("", b""))),
        ("has no name", one(file("./.", b""))),
        ("too many parts", one(file(&long, b""))),
        ("comes twice", archive(&[(file("a", b"1"), b"1"), (file("a", b"2"), b"2")])),
        // A link, then a file that would go through it: the file makes a directory, and the link finds its place taken.
        ("is a link and something else", archive(&[(link("d", "/tmp"), b""), (file("d/x", b"1"), b"1")])),
        ("goes through", archive(&[(file("d", b"1"), b"1"), (file("d/x", b"1"), b"1")])),
        ("is a link and something else", archive(&[(link("l", "a"), b""), (link("l", "b"), b"")])),
        ("to nothing", one(link("l", ""))),
        ("a hard link", changed(|raw| raw[156] = b'1')),
        ("a device", changed(|raw| raw[156] = b'3')),
        ("a device or a pipe", changed(|raw| raw[156] = b'6')),
        ("unknown kind", changed(|raw| raw[156] = b'S')),
        ("unknown kind", changed(|raw| raw[156] = b'x')),
        ("more than", changed(|raw| raw[124..135].copy_from_slice(b"77777777777"))),
        ("ends in the middle", changed(|raw| raw[124..135].copy_from_slice(b"00000100000"))),
        (
            "too long",
            changed(|raw| {
                raw[156] = b'L';
                raw[124..135].copy_from_slice(b"77777777777");
            }),
        ),
        ("damaged", {
            let mut raw = vec![b'x'; tar::BLOCK];
            raw.extend([0; 1024]);
            zstd::bulk::compress(&raw, 1).expect("packed")
        }),
        ("follows its end", {
            let mut raw = vec![0; 2 * tar::BLOCK];
            raw.extend([1; tar::BLOCK]);
            zstd::bulk::compress(&raw, 1).expect("packed")
        }),
    ];
    for (expected, bytes) in cases {
        let (_, done) = unpacked(&bytes, Links::Any);
        let error = done.expect_err(expected).to_string();
        assert!(error.contains(expected) && error.contains("refused"), "{expected}: {error}");
    }
    for (target, inside) in
        [("../x", false), ("/etc/passwd", false), ("b/../../../x", false), ("../b", true), ("c", true)]
    {
        let name = if inside { "d/e/l" } else { "l" };
        let (_, done) = unpacked(&one(link(name, target)), Links::Inside);
        assert_eq!(done.is_ok(), inside, "{target}");
    }
    // Not even zstd.
    assert!(matches!(unpacked(b"nonsense", Links::Any).1, Err(ArchiveError::Io { .. })));
}

#[test]
fn bombs_end_at_the_limits() {
    let zeros = vec![0_u8; 2 << 20];
    let (into, done) = unpacked(&archive(&[(file("a", &zeros), &zeros)]), Links::Any);
    assert!(done.expect_err("too large").to_string().contains("more than 1048576 bytes"));
    assert_eq!(fs::read_dir(into.path()).expect("there").count(), 0, "the size is looked at before a byte is written");
    let names: Vec<String> = (0..1001).map(|n| n.to_string()).collect();
    let many: Vec<(Entry, &[u8])> = names.iter().map(|name| (file(name, b""), &b""[..])).collect();
    assert!(unpacked(&archive(&many), Links::Any).1.expect_err("too many").to_string().contains("1000 entries"));
    // What the limits of reading would refuse is not written either.
    let from = dir();
    fs::write(from.path().join("big"), &zeros).expect("written");
    assert!(matches!(packed(from.path(), &["big"], Links::Any), Err(ArchiveError::TooMuch(_))));
}

#[test]
fn packing_goes_through_no_link() {
    let from = dir();
    fs::create_dir_all(from.path().join("real/inner")).expect("made");
    fs::write(from.path().join("real/inner/secret"), "x").expect("written");
    symlink("real", from.path().join("way")).expect("made");
    let error = packed(from.path(), &["way/inner"], Links::Any).expect_err("a link on the way").to_string();
    assert!(error.contains("`way` cannot be entered"), "{error}");
    symlink("/etc/passwd", from.path().join("real/leaves")).expect("made");
    let error = packed(from.path(), &["real"], Links::Inside).expect_err("leaves").to_string();
    assert!(error.contains("real/leaves") && error.contains("leaves the workspace"), "{error}");
    // A pipe would block who opens it; it is left out.
    nix::unistd::mkfifo(&from.path().join("real/pipe"), nix::sys::stat::Mode::S_IRWXU).expect("made");
    let (_, packed) = packed(from.path(), &["real"], Links::Any).expect("packed");
    assert_eq!((packed.files, packed.left_out), (2, 1));
}

#[test]
fn patterns_find_files_and_directories_once_and_leave_git_out() {
    let root = dir();
    for name in ["dist/a.whl", "dist/deep/b.whl", "dist/c.txt", "log/x.log", ".git/y.log", "odd [x]/z"] {
        let path = root.path().join(name);
        fs::create_dir_all(path.parent().expect("a parent")).expect("made");
        fs::write(path, "").expect("written");
    }
    let found = |patterns: &[&str]| {
        let patterns: Vec<String> = patterns.iter().map(|pattern| (*pattern).to_owned()).collect();
        matching(root.path(), &Patterns::of(&patterns).expect("patterns")).expect("found")
    };
    assert_eq!(found(&["dist/**/*.whl"]), ["dist/a.whl", "dist/deep/b.whl"]);
    assert_eq!(found(&["**/*.log"]), ["log/x.log"]);
    assert_eq!(found(&["dist", "dist/a.whl", "dist/deep/*", "log/x.log"]), ["dist", "log/x.log"]);
    assert_eq!(found(&["di*", "nothing"]), ["dist", "nothing"]);
    assert_eq!(found(&[".git/*.log", "none*"]), Vec::<String>::new());
}

proptest! {
    #[test]
    fn any_bytes_are_an_error_or_an_archive(bytes in proptest::collection::vec(any::<u8>(), 0..2048)) {
        let packed = zstd::bulk::compress(&bytes, 1).expect("packed");
        let (_, _) = unpacked(&packed, Links::Any);
    }

    #[test]
    fn headers_come_back(
        name in "[a-z/ ]{1,300}", target in "[a-z/.]{0,300}", size in 0_u64..(1 << 40), modified in 0_u64..(1 << 35),
    ) {
        let kind = if target.is_empty() { Kind::File } else { Kind::Link };
        let size = if kind == Kind::File { size } else { 0 };
        let entry = Entry { name: name.into_bytes(), kind, target: target.into_bytes(), mode: 0o640, modified, size };
        let mut raw = Vec::new();
        tar::write(&mut raw, &entry).expect("written");
        prop_assert_eq!(tar::read(&mut &raw[..]).expect("read"), Some(entry));
    }
}

/// A plain tar stream.
fn plain(entries: &[(Entry, &[u8])]) -> Vec<u8> {
    let mut out = Vec::new();
    for (entry, bytes) in entries {
        tar::write(&mut out, entry).expect("written");
        out.extend_from_slice(bytes);
        tar::pad(&mut out, bytes.len() as u64).expect("written");
    }
    tar::end(&mut out).expect("written");
    out
}

#[test]
fn what_comes_out_of_a_container_is_judged_entry_by_entry() {
    let repacked = |raw: &[u8], links| {
        let mut out = Vec::new();
        repack(raw, &mut out, SMALL, links).map(|packed| (out, packed))
    };
    let good = plain(&[(file("./a//b", b"content"), b"content"), (link("l", "a"), b"")]);
    let (archive, packed) = repacked(&good, Links::Inside).expect("good");
    assert_eq!((packed.files, packed.bytes), (2, 7));
    let (into, done) = unpacked(&archive, Links::Inside);
    assert_eq!(done.expect("one of ours").files, 2);
    assert_eq!(fs::read_to_string(into.path().join("a/b")).expect("there"), "content");
    let out_of = plain(&[(link("l", "/etc/passwd"), b"")]);
    assert!(repacked(&out_of, Links::Any).is_ok());
    let huge = Entry { size: 1 << 40, ..file("x", b"") };
    for hostile in [
        out_of,
        plain(&[(file("../x", b""), b"")]),
        plain(&[(file("/x", b""), b"")]),
        plain(&[(link("l", ""), b"")]),
        plain(&[(huge, b"")]),
        plain(&vec![(file("x", b""), &b""[..]); 1001]),
        good[..600].to_vec(),
        good[..1024].to_vec(),
        b"{\"kind\":\"no archive\"}".to_vec(),
        Vec::new(),
    ] {
        assert!(repacked(&hostile, Links::Inside).is_err());
    }
}

#[test]
fn contents_are_those_of_the_files_that_were_asked_for() {
    let raw = plain(&[(file("a", b"1"), b"1"), (file("b", b""), b"")]);
    let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
    let found = contents(&raw[..], &names(&["a", "b"])).expect("both");
    assert_eq!(hex::encode(found[0]), "6b86b273ff34fce19d6b804eff5a3f5747ada4eaa22f1d49c01e52ddb7875b4b");
    for wrong in [&["a"][..], &["b", "a"], &["a", "b", "c"]] {
        assert!(contents(&raw[..], &names(wrong)).is_err());
    }
}
