//! Which program runs a script.

use std::ffi::OsString;
use std::path::Path;

use kici_engine::lock::Shell;

/// The program and arguments that run `script`. `path` is the PATH of the step, to see whether there is a bash.
pub(super) fn command(shell: Option<&Shell>, script: &Path, path: &str) -> (OsString, Vec<OsString>) {
    let words = |program: &str, args: &[&str]| {
        let args = args.iter().map(OsString::from).chain([script.as_os_str().to_owned()]).collect();
        (OsString::from(program), args)
    };
    match shell {
        Some(Shell::Bash) => words("bash", &["--noprofile", "--norc", "-eo", "pipefail"]),
        None if is_on_path("bash", path) => words("bash", &["--noprofile", "--norc", "-eo", "pipefail"]),
        None | Some(Shell::Sh) => words("sh", &["-e"]),
        Some(Shell::Pwsh) => words("pwsh", &["-NoLogo", "-NoProfile", "-NonInteractive", "-File"]),
        Some(Shell::Python) => words("python3", &[]),
        Some(Shell::Command(list)) => {
            let script = script.display().to_string();
            let mut list = list.iter().map(|word| OsString::from(word.replace("{0}", &script)));
            (list.next().unwrap_or_default(), list.collect())
        }
    }
}

fn is_on_path(program: &str, path: &str) -> bool {
    path.split(':').any(|dir| Path::new(dir).join(program).is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shells_and_their_arguments() {
        let script = Path::new("/s/script");
        let custom = Shell::Command(vec!["perl".into(), "-w".into(), "{0}".into()]);
        let cases = [
            (Some(Shell::Bash), "/none", "bash --noprofile --norc -eo pipefail /s/script"),
            (None, "/none", "sh -e /s/script"),
            (Some(Shell::Python), "/none", "python3 /s/script"),
            (Some(custom), "/none", "perl -w /s/script"),
        ];
        for (shell, path, expected) in cases {
            let (program, args) = command(shell.as_ref(), script, path);
            let all: Vec<String> = [program].into_iter().chain(args).map(|s| s.into_string().expect("UTF-8")).collect();
            assert_eq!(all.join(" "), expected);
        }
    }
}
