//! What an installation stands on: repositories and file systems.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::stack::clean;

/// A small file system in memory, gone with this value.
pub struct Tmpfs {
    path: PathBuf,
}

impl Tmpfs {
    /// None where this process may not mount; the test then says so and ends.
    pub fn mount(path: &Path, mib: u32) -> Option<Self> {
        fs::create_dir_all(path).unwrap();
        let size = format!("size={mib}m,mode=0700");
        let output = Command::new("mount").args(["-t", "tmpfs", "-o", &size, "none"]).arg(path).output().ok()?;
        if !output.status.success() {
            eprintln!("skipped: no file system can be mounted here: {}", String::from_utf8_lossy(&output.stderr));
            return None;
        }
        Some(Self { path: path.to_owned() })
    }

    fn ballast(&self) -> PathBuf {
        self.path.join("ballast")
    }

    /// Takes all space that is left.
    pub fn fill(&self) {
        use std::io::Write as _;
        let mut file = fs::File::options().create(true).append(true).open(self.ballast()).unwrap();
        for size in [1024 * 1024, 4096, 1] {
            let block = vec![b'x'; size];
            while file.write_all(&block).is_ok() {}
        }
    }

    /// Gives back what [`Self::fill`] took.
    pub fn free(&self) {
        fs::remove_file(self.ballast()).unwrap();
    }
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.path).status();
    }
}

/// A git repository on disk.
pub struct Repository {
    pub path: PathBuf,
}

impl Repository {
    pub fn create(path: &Path, files: &[(&str, &str)]) -> Self {
        fs::create_dir_all(path).unwrap();
        let repository = Self { path: path.to_owned() };
        repository.git(&["init", "-q", "-b", "main"]);
        repository.commit(files);
        repository
    }

    pub fn commit(&self, files: &[(&str, &str)]) {
        for (name, text) in files {
            let path = self.path.join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        self.git(&["add", "-A"]);
        self.git(&["commit", "-q", "-m", "change"]);
    }

    pub fn head(&self) -> String {
        self.git(&["rev-parse", "HEAD"]).trim().to_owned()
    }

    pub fn git(&self, arguments: &[&str]) -> String {
        let output = clean(Path::new("git"))
            .current_dir(&self.path)
            .env("GIT_CONFIG_GLOBAL", "/dev/null")
            .env("GIT_AUTHOR_NAME", "a")
            .env("GIT_AUTHOR_EMAIL", "a@example.com")
            .env("GIT_COMMITTER_NAME", "a")
            .env("GIT_COMMITTER_EMAIL", "a@example.com")
            .args(arguments)
            .output()
            .unwrap();
        assert!(output.status.success(), "git {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }
}
