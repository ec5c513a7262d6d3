//! A command in namespaces of its own, by bwrap(1).

use std::ffi::OsString;
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kici_sys::confine::Calls;
use kici_sys::process::Spawn;

/// Where the workspace is inside.
const WORKSPACE: &str = "/workspace";
const HOME: &str = "/tmp/home";
/// Programs and libraries.
const SYSTEM: [&str; 6] = ["/usr", "/bin", "/sbin", "/lib", "/lib64", "/opt"];
/// Of `/etc` what programs look up names, certificates and libraries in; of certificates not the directories with keys.
const ETC: [&str; 21] = [
    "alternatives",
    "ca-certificates",
    "crypto-policies",
    "group",
    "hosts",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "localtime",
    "nsswitch.conf",
    "passwd",
    "pki/ca-trust",
    "pki/java",
    "pki/tls/cert.pem",
    "pki/tls/certs",
    "pki/tls/openssl.cnf",
    "resolv.conf",
    "services",
    "ssl/cert.pem",
    "ssl/certs",
    "ssl/openssl.cnf",
];

/// The sandbox of a job.
#[derive(Debug)]
pub(super) struct Bwrap {
    pub program: PathBuf,
    pub workspace: PathBuf,
    /// The workspace without links on the way to it.
    pub canonical: PathBuf,
    pub scratch: PathBuf,
    pub writable: Vec<PathBuf>,
    pub network: bool,
    pub calls: Option<Arc<Calls>>,
}

impl Bwrap {
    /// The same command inside. What lies in the workspace outside is below `/workspace` there; the files of the step stay
    /// where they are.
    pub fn around(&self, spawn: Spawn) -> io::Result<Spawn> {
        let mut confine = spawn.confine;
        let mut args = self.options();
        // What steps talk to the agent by: its program and the socket of the job, where there is one.
        let socket = spawn.env.iter().find(|(name, _)| name == "KICI_SOCK").map(|(_, path)| PathBuf::from(path));
        let socket_dir = socket.and_then(|socket| socket.parent().map(Path::to_owned));
        for (option, path) in [("--ro-bind-try", std::env::current_exe().ok()), ("--bind-try", socket_dir)] {
            args.extend(
                path.into_iter().flat_map(|path| [option.into(), path.clone().into_os_string(), path.into_os_string()]),
            );
        }
        if let Some(calls) = &self.calls {
            let filter = Arc::new(kici_sys::host::memory_file(&calls.bytes())?);
            args.extend(["--seccomp".into(), filter.as_raw_fd().to_string().into()]);
            confine.keep.push(filter);
        }
        args.extend(["--chdir".into(), self.inside(&spawn.cwd).into_os_string(), "--".into(), spawn.program]);
        args.extend(spawn.args);
        let mut env = spawn.env;
        for (name, value) in [("TMPDIR", "/tmp"), ("HOME", HOME)] {
            env.retain(|(known, _)| known != name);
            env.push((name.into(), value.into()));
        }
        Ok(Spawn { program: self.program.clone().into(), args, env, confine, is_wrapper: true, ..spawn })
    }

    fn inside(&self, path: &Path) -> PathBuf {
        match path.strip_prefix(&self.workspace).or_else(|_| path.strip_prefix(&self.canonical)) {
            Ok(rest) if rest.as_os_str().is_empty() => WORKSPACE.into(),
            Ok(rest) => Path::new(WORKSPACE).join(rest),
            Err(_) => path.to_owned(),
        }
    }

    /// Options in the order in which bwrap follows them: a later mount covers an earlier one.
    fn options(&self) -> Vec<OsString> {
        let mut options: Vec<OsString> = Vec::new();
        let mut one = |words: &[&std::ffi::OsStr]| options.extend(words.iter().map(|word| (*word).to_owned()));
        for word in ["--unshare-pid", "--unshare-ipc", "--die-with-parent"] {
            one(&[word.as_ref()]);
        }
        if !self.network {
            one(&["--unshare-net".as_ref()]);
        }
        one(&["--cap-drop".as_ref(), "ALL".as_ref()]);
        for dir in SYSTEM {
            one(&["--ro-bind-try".as_ref(), dir.as_ref(), dir.as_ref()]);
        }
        for name in ETC {
            let path = Path::new("/etc").join(name);
            one(&["--ro-bind-try".as_ref(), path.as_os_str(), path.as_os_str()]);
        }
        for (option, place) in [("--dev", "/dev"), ("--proc", "/proc"), ("--tmpfs", "/tmp"), ("--dir", HOME)] {
            one(&[option.as_ref(), place.as_ref()]);
        }
        for path in &self.writable {
            one(&["--bind-try".as_ref(), path.as_os_str(), path.as_os_str()]);
        }
        one(&["--bind".as_ref(), self.scratch.as_os_str(), self.scratch.as_os_str()]);
        one(&["--bind".as_ref(), self.workspace.as_os_str(), WORKSPACE.as_ref()]);
        options
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sandbox() -> Bwrap {
        Bwrap {
            program: "/usr/bin/bwrap".into(),
            workspace: "/w/j/workspace".into(),
            canonical: "/disk/w/j/workspace".into(),
            scratch: "/w/j/scratch".into(),
            writable: vec!["/cache".into()],
            network: false,
            calls: None,
        }
    }

    fn words(sandbox: &Bwrap, cwd: &str) -> String {
        let env = vec![("KICI_SOCK".into(), "/run/kici-agent/j/1/job.sock".into())];
        let spawn = Spawn { args: vec!["-e".into(), "script".into()], env, ..Spawn::new("sh", cwd) };
        let inside = sandbox.around(spawn).expect("made");
        assert!(inside.is_wrapper && inside.program == "/usr/bin/bwrap");
        assert!(inside.env.contains(&("TMPDIR".into(), "/tmp".into())));
        let words: Vec<String> = inside.args.into_iter().map(|word| word.into_string().expect("UTF-8")).collect();
        words.join(" ")
    }

    #[test]
    fn every_option_has_its_words_and_mounts_come_in_order() {
        let text = words(&sandbox(), "/w/j/workspace/sub");
        for part in [
            "--unshare-pid --unshare-ipc --die-with-parent --unshare-net --cap-drop ALL --ro-bind-try /usr /usr",
            "--dev /dev --proc /proc --tmpfs /tmp --dir /tmp/home --bind-try /cache /cache",
            "--bind /w/j/scratch /w/j/scratch --bind /w/j/workspace /workspace --ro-bind-try /",
            "--bind-try /run/kici-agent/j/1 /run/kici-agent/j/1 --chdir /workspace/sub -- sh -e script",
        ] {
            assert!(text.contains(part), "{part}\nnot in {text}");
        }
        assert!(!text.contains(" /etc/ssl /etc/ssl ") && !text.contains("private"), "keys stay outside: {text}");
        assert!(text.contains("--ro-bind-try /etc/ssl/certs /etc/ssl/certs"), "{text}");
        let linked = words(&sandbox(), "/disk/w/j/workspace/sub");
        assert!(linked.ends_with("--chdir /workspace/sub -- sh -e script"), "{linked}");
        let host = Bwrap { network: true, ..sandbox() };
        assert!(!words(&host, "/w/j/workspace").contains("--unshare-net"));
        assert!(words(&host, "/w/j/workspace").ends_with("--chdir /workspace -- sh -e script"));
    }
}
