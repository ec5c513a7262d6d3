//! What git is told: for some hosts, and only for them, ask the agent.

use std::path::Path;

/// The keys of git's configuration that name the helper. No secret is in them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HelperConfig {
    keys: Vec<(String, String)>,
}

impl HelperConfig {
    /// The helper `program` at `socket` for each of `urls` (`https://host`). Helpers of the host system are switched off for
    /// them, unless `inherit` is set: git hands every credential to every helper, and one of them may write it to a disk.
    pub fn new(program: &Path, socket: &Path, urls: Vec<String>, inherit: bool) -> Self {
        // `!` makes it a command for the shell, to which git adds the operation (gitcredentials(7)).
        let helper = format!(
            "!{} credential-helper --socket {}",
            quoted(&program.to_string_lossy()),
            quoted(&socket.to_string_lossy())
        );
        let mut keys = Vec::new();
        for url in urls {
            if !inherit {
                keys.push((format!("credential.{url}.helper"), String::new()));
            }
            keys.push((format!("credential.{url}.helper"), helper.clone()));
            // Without the path one credential would do for all repositories of the host.
            keys.push((format!("credential.{url}.useHttpPath"), "true".to_owned()));
        }
        Self { keys }
    }

    /// For the environment of steps, in order.
    pub fn keys(&self) -> &[(String, String)] {
        &self.keys
    }

    /// For the configuration file of a clone (git-config(1), "Syntax").
    pub fn file(&self) -> String {
        let mut text = String::new();
        for (key, value) in &self.keys {
            let Some((url, name)) = key.strip_prefix("credential.").and_then(|rest| rest.rsplit_once('.')) else {
                continue;
            };
            let value = value.replace('\\', "\\\\").replace('"', "\\\"");
            text.push_str(&format!("[credential \"{url}\"]\n\t{name} = \"{value}\"\n"));
        }
        text
    }
}

/// As one word of the shell.
fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn git_reads_what_is_written_and_starts_the_helper_with_any_path() {
        let dir = tempfile::tempdir().expect("a directory");
        let odd = dir.path().join("it's a \"dir\"");
        std::fs::create_dir(&odd).expect("made");
        let program = odd.join("helper");
        std::fs::write(&program, "#!/bin/sh\necho username=$#; echo \"password=$1 $2 $3 $4\"\n").expect("written");
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        std::fs::set_permissions(&program, mode).expect("set");
        let config = HelperConfig::new(&program, Path::new("/run/a b/job.sock"), vec!["https://h:1".into()], false);
        let file = dir.path().join("config");
        std::fs::write(&file, format!("[credential]\n\thelper = \"!echo username=other; #\"\n{}", config.file()))
            .expect("written");
        let mut git = Command::new("git");
        git.args(["credential", "fill"]).env_clear().env("PATH", "/usr/local/bin:/usr/bin:/bin");
        git.env("GIT_CONFIG_GLOBAL", &file).env("GIT_CONFIG_NOSYSTEM", "1").env("GIT_TERMINAL_PROMPT", "0");
        git.stdin(std::process::Stdio::piped()).stdout(std::process::Stdio::piped());
        let mut child = git.spawn().expect("git runs");
        std::io::Write::write_all(&mut child.stdin.take().expect("a pipe"), b"protocol=https\nhost=h:1\npath=a/b\n\n")
            .expect("taken");
        let said = String::from_utf8(child.wait_with_output().expect("ended").stdout).expect("UTF-8");
        assert!(said.contains("path=a/b\n") && said.contains("username=4\n"), "{said}");
        assert!(said.contains("password=credential-helper --socket /run/a b/job.sock get\n"), "{said}");
    }

    #[test]
    fn helpers_of_the_host_are_switched_off_first_unless_inherited() {
        let of = |inherit| HelperConfig::new(Path::new("/p"), Path::new("/s"), vec!["https://h".into()], inherit);
        assert_eq!(of(false).keys()[0], ("credential.https://h.helper".to_owned(), String::new()));
        assert_eq!((of(false).keys().len(), of(true).keys().len()), (3, 2));
    }
}
