//! Engines for tests: those that `cargo xtask test` started and named, with an image that is made here from a static busybox.

#![allow(dead_code, reason = "each test program uses a part")]

use std::path::{Path, PathBuf};

use kici_containers::Engine;

/// An image with a shell and nothing else: no git, no bash, no program of ours. It has the user `ci` (1000).
pub const BUSYBOX: &str = "localhost/kici-test/busybox:1";
/// The same with the user `ci` as its own.
pub const CI: &str = "localhost/kici-test/ci:1";

/// The sockets that tests use, by the variable that names them.
const NAMED: [(&str, &str); 2] = [("docker", "KICI_TEST_DOCKER_HOST"), ("podman", "KICI_TEST_PODMAN_HOST")];

/// The socket of an engine, or none where there is none: then the test is skipped, but in CI, where it fails.
pub fn socket(kind: &str) -> Option<PathBuf> {
    let (_, variable) = NAMED.iter().find(|(name, _)| *name == kind).expect("a known engine");
    if let Some(host) = std::env::var_os(variable) {
        let host = host.into_string().expect("UTF-8");
        return Some(host.strip_prefix("unix://").unwrap_or(&host).into());
    }
    let message = format!("{variable} is not set: no {kind} for tests; `cargo xtask test` starts one where it can");
    assert!(std::env::var_os(format!("KICI_REQUIRE_{}", kind.to_uppercase())).is_none(), "{message}");
    eprintln!("skipped: {message}");
    None
}

/// The engine of a test with the images of tests on it.
pub async fn engine(kind: &str) -> Option<Engine> {
    let socket = socket(kind)?;
    let engine = Engine::connect(&socket).await.expect("the engine answers");
    images(&engine).await;
    Some(engine)
}

async fn images(engine: &Engine) {
    for (name, changes) in [(BUSYBOX, &[][..]), (CI, &["USER ci"])] {
        if engine.image(name).await.expect("asked").is_none() {
            let changes: Vec<&str> = changes.iter().copied().chain(["ENV PATH=/bin", "ENV OF_IMAGE=there"]).collect();
            engine.import(name, root_file_system(), &changes).await.expect("imported");
        }
    }
}

/// A root file system as an archive.
pub fn root_file_system() -> Vec<u8> {
    const APPLETS: [&str; 43] = [
        "sh", "ls", "cat", "echo", "env", "sleep", "id", "touch", "mkdir", "rm", "ln", "mv", "cp", "dd", "head",
        "tail", "grep", "sed", "awk", "wc", "seq", "ps", "kill", "setsid", "nohup", "mount", "umount", "mknod",
        "chmod", "chown", "nc", "nslookup", "ping", "ip", "httpd", "true", "false", "test", "tr", "od", "stat", "date",
        "su",
    ];
    let program = ["/bin/busybox", "/usr/bin/busybox"].map(Path::new).into_iter().find(|path| path.is_file());
    let program = std::fs::read(program.expect("busybox-static is installed (apt-get install busybox-static)"));
    let program = program.expect("it can be read");
    let mut archive = tar::Builder::new(Vec::new());
    let mut put = |name: &str, kind, mode, content: &[u8], link: Option<&str>| {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(kind);
        header.set_mode(mode);
        header.set_size(content.len() as u64);
        match link {
            Some(link) => archive.append_link(&mut header, name, link).expect("added"),
            None => archive.append_data(&mut header, name, content).expect("added"),
        }
    };
    use tar::EntryType::{Directory, Regular, Symlink};
    for (dir, mode) in
        [("bin", 0o755), ("etc", 0o755), ("tmp", 0o1777), ("proc", 0o755), ("root", 0o700), ("var", 0o755)]
    {
        put(dir, Directory, mode, &[], None);
    }
    put("bin/busybox", Regular, 0o755, &program, None);
    for applet in APPLETS {
        put(&format!("bin/{applet}"), Symlink, 0o777, &[], Some("busybox"));
    }
    put("etc/passwd", Regular, 0o644, b"root:x:0:0:root:/root:/bin/sh\nci:x:1000:1000:ci:/tmp:/bin/sh\n", None);
    put("etc/group", Regular, 0o644, b"root:x:0:\nci:x:1000:\n", None);
    archive.into_inner().expect("whole")
}
