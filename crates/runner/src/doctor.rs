//! What is in force on this host, what is missing, and what would help.

use std::path::Path;
use std::process::Command;

use kici_engine::time::Clock;
use serde::Serialize;

use crate::config::{BWRAP_HINT, Config, Hardening};
use crate::confine::Host;

/// Oldest kernel: subreaper, pidfd and `close_range`.
const OLDEST_KERNEL: (u32, u32) = (5, 9);
/// Oldest git: `GIT_CONFIG_COUNT`.
const OLDEST_GIT: (u32, u32) = (2, 31);
/// No new work while less is free.
const LEAST_FREE_MIB: u64 = 32;

/// How a thing is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// In force.
    Ok,
    /// Not in force because the settings say so.
    Off,
    /// Missing; jobs run without it.
    Missing,
    /// Missing; jobs cannot run.
    Broken,
}

impl State {
    /// For people.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Off => "off",
            Self::Missing => "missing",
            Self::Broken => "BROKEN",
        }
    }
}

/// One thing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// What.
    pub check: &'static str,
    /// How it is.
    pub state: State,
    /// More of that.
    pub detail: String,
    /// What would help; empty where nothing is missing.
    pub remedy: String,
}

impl Finding {
    fn new(check: &'static str, state: State, detail: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { check, state, detail: detail.into(), remedy: remedy.into() }
    }

    fn ok(check: &'static str, detail: impl Into<String>) -> Self {
        Self::new(check, State::Ok, detail, "")
    }
}

/// Looks at everything but the network. Blocks.
pub fn examine(config: &Config, host: &Host) -> Vec<Finding> {
    let hardened = config.isolation.hardening == Hardening::Auto;
    let mut found = vec![place(), kernel(), git(config), directories(config)];
    found.push(Finding::ok("process trees", "every step has a keeper; what it leaves is found and ended"));
    found.push(memory(config));
    found.push(privileges(config));
    found.extend(way(config));
    found.push(files(config, host));
    if hardened && !config.isolation.sandbox && host.landlock.is_some() {
        found.push(private(host));
    }
    found.push(calls(config, host));
    found.extend(groups(config, host));
    found.push(sandbox(config, host));
    found
}

/// What of the isolation of jobs is missing, in words, without starting another program.
pub fn missing(config: &Config, host: &Host) -> Vec<String> {
    let mut found = vec![privileges(config), memory(config), files(config, host), calls(config, host)];
    found.extend(way(config));
    found.extend(groups(config, host));
    let missing = found.into_iter().filter(|finding| matches!(finding.state, State::Missing | State::Broken));
    missing.map(|finding| format!("{}: {}", finding.check, finding.detail)).collect()
}

/// Whose view this is: user and control group of a service are others than those of a shell.
fn place() -> Finding {
    let group = kici_sys::cgroup::own_group().unwrap_or_else(|| "none".to_owned());
    let detail = format!("as {}, in the control group {group}", kici_sys::host::user_name());
    let is_shell = Path::new("/run/systemd/system").exists() && !group.contains(".service");
    let remedy = if is_shell {
        "to judge a service, run it as its unit does: systemd-run --pipe --wait -p User=… -p Delegate=yes kici-agent doctor"
    } else {
        ""
    };
    Finding::new("this look", State::Ok, detail, remedy)
}

fn memory(config: &Config) -> Finding {
    let check = "memory of the agent";
    let isolation = &config.isolation;
    let is_open = kici_sys::host::uid() == 0
        && isolation.user.is_none()
        && isolation.hardening == Hardening::Off
        && !isolation.sandbox;
    if is_open {
        let remedy = "set sandbox_user, or run the agent as a user without rights";
        return Finding::new(
            check,
            State::Missing,
            "open to steps, which may trace everything (CAP_SYS_PTRACE)",
            remedy,
        );
    }
    Finding::ok(check, "closed to other processes of its user (PR_SET_DUMPABLE=0)")
}

/// What keeps the user of the steps from its workspace.
fn way(config: &Config) -> Option<Finding> {
    let (dir, user) = config.closed_way()?;
    let detail = format!("{} cannot be entered by {}: steps cannot start", dir.display(), user.name);
    Some(Finding::new("way to the workspace", State::Broken, detail, format!("chmod o+x {}", dir.display())))
}

fn kernel() -> Finding {
    let release = kici_sys::host::os_release();
    match version(&release) {
        Some(version) if version < OLDEST_KERNEL => {
            Finding::new("kernel", State::Broken, release, "use Linux 5.9 or newer")
        }
        _ => Finding::ok("kernel", release),
    }
}

fn git(config: &Config) -> Finding {
    let nothing = [("HOME", "/nonexistent"), ("GIT_CONFIG_GLOBAL", "/dev/null")];
    let said = Command::new("git").arg("--version").envs(&config.agent_env).envs(nothing).output();
    let text = said.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned()).unwrap_or_default();
    match text.strip_prefix("git version ").and_then(version) {
        Some(version) if version >= OLDEST_GIT => Finding::ok("git", text),
        Some(_) => Finding::new("git", State::Broken, text, "use git 2.31 or newer"),
        None => Finding::new("git", State::Broken, "not in PATH", "install git; jobs with a checkout fail without"),
    }
}

/// The first two numbers of a version.
fn version(text: &str) -> Option<(u32, u32)> {
    let mut numbers = text.split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

fn directories(config: &Config) -> Finding {
    let check = "directories";
    for dir in [&config.state_dir, &config.work_dir] {
        let existing = dir.ancestors().find(|path| path.is_dir()).unwrap_or(Path::new("/"));
        let name = dir.display();
        match kici_sys::host::disk_free_bytes(existing) {
            Ok(free) if free >> 20 < LEAST_FREE_MIB => {
                let remedy = format!("free {LEAST_FREE_MIB} MiB or more: the agent takes no work before");
                return Finding::new(check, State::Broken, format!("{name}: {} MiB free", free >> 20), remedy);
            }
            Ok(_) if kici_sys::host::can_write(existing) => {}
            Ok(_) => {
                let user = kici_sys::host::user_name();
                let detail = format!("{name} cannot be written by {user}");
                return Finding::new(check, State::Broken, detail, format!("install -d -o {user} -m 0700 {name}"));
            }
            Err(error) => return Finding::new(check, State::Broken, format!("{name}: {error}"), "name another one"),
        }
    }
    Finding::ok(check, format!("state in {}, work in {}", config.state_dir.display(), config.work_dir.display()))
}

fn privileges(config: &Config) -> Finding {
    let check = "user of steps";
    match &config.isolation.user {
        Some(user) => Finding::ok(check, format!("{} ({}), another than the agent's", user.name, user.uid)),
        None if kici_sys::host::uid() == 0 => {
            let remedy = "set sandbox_user, or run the agent as a user without rights";
            Finding::new(check, State::Missing, "root, as the agent", remedy)
        }
        None => Finding::ok(check, format!("{}, as the agent; no new privileges", kici_sys::host::user_name())),
    }
}

fn files(config: &Config, host: &Host) -> Finding {
    let hardened = config.isolation.hardening == Hardening::Auto;
    match host.landlock {
        _ if !hardened => Finding::new("files (Landlock)", State::Off, "hardening = off", ""),
        _ if config.isolation.sandbox => Finding::ok("files (Landlock)", "not needed: steps run in a sandbox"),
        Some(abi) => {
            if let Err(why) = host.try_files() {
                let remedy = "mend that, or set hardening = off";
                return Finding::new("files (Landlock)", State::Broken, why, remedy);
            }
            let paths: Vec<_> = config.isolation.writable.iter().map(|path| path.display().to_string()).collect();
            let paths = if paths.is_empty() { "nothing else".to_owned() } else { paths.join(", ") };
            Finding::ok("files (Landlock)", format!("version {abi}; steps write workspace, temporary files, {paths}"))
        }
        None => {
            let remedy = "use Linux 5.19 or newer with landlock in lsm=, or sandbox = true";
            Finding::new("files (Landlock)", State::Missing, "steps can write all that the agent can", remedy)
        }
    }
}

fn calls(config: &Config, host: &Host) -> Finding {
    let hardened = config.isolation.hardening == Hardening::Auto;
    match &host.calls {
        _ if !hardened => Finding::new("system calls (seccomp)", State::Off, "hardening = off", ""),
        Ok(_) => Finding::ok("system calls (seccomp)", "no mount, bpf, kexec, keyctl, …; no signals to the agent"),
        Err(why) => {
            Finding::new("system calls (seccomp)", State::Missing, why, "use a kernel with CONFIG_SECCOMP_FILTER")
        }
    }
}

fn private(host: &Host) -> Finding {
    let exposed: Vec<String> = host.exposed().iter().map(|path| path.display().to_string()).collect();
    if exposed.is_empty() {
        return Finding::ok("files of the agent", "closed to steps");
    }
    let remedy =
        "move state_dir out of what steps may write (/var/lib/kici-agent), or set writable_paths, or sandbox_user";
    Finding::new("files of the agent", State::Missing, format!("steps can reach {}", exposed.join(", ")), remedy)
}

fn groups(config: &Config, host: &Host) -> Vec<Finding> {
    let place = match &host.groups {
        Ok(place) => place,
        Err(why) => {
            let detail = "none: trees are ended by search, no limits, no peak memory";
            return vec![Finding::new("control groups", State::Missing, detail, why)];
        }
    };
    let mut found = vec![if place.kills() {
        Finding::ok("control groups", format!("in {}; a job is ended at once", place.dir().display()))
    } else {
        let remedy = "use Linux 5.14 or newer";
        Finding::new("control groups", State::Missing, "no cgroup.kill: trees are ended by search", remedy)
    }];
    let limits = &config.isolation.limits;
    let asked = [
        ("pids", "limit of processes", limits.processes.map(|n| n.to_string())),
        ("memory", "limit of memory", limits.memory_bytes.map(|n| format!("{} MiB", n >> 20))),
        ("cpu", "limit of processor time", limits.nano_cpus.map(|n| format!("{} m", n / 1_000_000))),
    ];
    for (controller, check, value) in asked {
        let there = place.controllers().iter().any(|name| name == controller);
        found.push(match (there, value) {
            (true, Some(value)) => Finding::ok(check, value),
            (true, None) => Finding::new(check, State::Off, "not set", ""),
            (false, None) => {
                Finding::new(check, State::Off, format!("not set; the controller {controller} is not there"), "")
            }
            (false, Some(value)) => {
                let remedy =
                    "set Delegate=yes in the unit, and boot with cgroup v2 alone (hybrid hosts keep controllers in v1)";
                Finding::new(
                    check,
                    State::Missing,
                    format!("the controller {controller} is not there: {value} is not enforced"),
                    remedy,
                )
            }
        });
    }
    found
}

fn sandbox(config: &Config, host: &Host) -> Finding {
    let check = "sandbox (bwrap)";
    match (config.isolation.sandbox, host.bwrap()) {
        (true, Some(path)) if works(path) => Finding::ok(check, path.display().to_string()),
        (true, Some(_)) => {
            let remedy = "allow user namespaces: sysctl user.max_user_namespaces, kernel.unprivileged_userns_clone=1";
            Finding::new(check, State::Broken, "bwrap cannot make namespaces", remedy)
        }
        (true, None) => Finding::new(check, State::Broken, "bwrap is not in PATH", BWRAP_HINT),
        (false, Some(_)) => Finding::new(check, State::Off, "sandbox = false; bwrap is there", ""),
        (false, None) => Finding::new(check, State::Off, "sandbox = false; bwrap is not in PATH", BWRAP_HINT),
    }
}

fn works(bwrap: &Path) -> bool {
    let args = ["--ro-bind", "/", "/", "--unshare-pid", "--proc", "/proc", "--dev", "/dev", "true"];
    Command::new(bwrap).args(args).output().is_ok_and(|output| output.status.success())
}

/// The engine of containers, and what it is. Blocks only for as long as connecting takes.
pub async fn containers(config: &Config, host: &Host) -> Finding {
    let check = "containers";
    let needed = config.containers.image.is_some();
    let missing = if needed { State::Broken } else { State::Missing };
    let remedy = "install Docker or Podman and let the agent's user use its socket (container_socket), if jobs shall run in containers";
    if let Err(error) = host.containers.look() {
        return Finding::new(check, missing, error.to_string(), remedy);
    }
    match host.containers.engine().await {
        Ok(engine) => {
            let rights = if engine.rootless { "without the rights of root" } else { "with the rights of root" };
            let socket = engine.socket().display();
            Finding::ok(check, format!("{} {} at {socket}, {rights}", engine.kind, engine.version))
        }
        Err(error) => Finding::new(check, missing, error, remedy),
    }
}

/// Whether the orchestrator answers, and how far its clock is from ours.
pub async fn orchestrator(config: &Config, clock: &dyn Clock) -> Vec<Finding> {
    let check = "orchestrator";
    let url = &config.orchestrator_url;
    let client = reqwest::Client::builder().timeout(std::time::Duration::from_secs(5)).build();
    let answer = match client {
        Ok(client) => client.get(format!("{url}/health")).send().await,
        Err(error) => return vec![Finding::new(check, State::Broken, error.to_string(), "")],
    };
    let answer = match answer {
        Ok(answer) => answer,
        Err(error) => {
            let detail = format!("{url}: {}", crate::session::chain(&error.without_url()));
            return vec![Finding::new(check, State::Broken, detail, "see orchestrator_url, name server and firewall")];
        }
    };
    let mut found = vec![Finding::ok(check, format!("{url} answers"))];
    let date = answer.headers().get("date").and_then(|date| date.to_str().ok()).and_then(http_date);
    if let Some(theirs) = date {
        let apart = (clock.now().as_micros() / 1_000_000 - theirs).abs();
        found.push(if apart <= 5 {
            Finding::ok("clock", "within 5 s of the orchestrator's")
        } else {
            let detail = format!("{apart} s from the orchestrator's: times of log lines are wrong");
            Finding::new("clock", State::Missing, detail, "run an NTP client on both hosts")
        });
    }
    found
}

/// Seconds since the epoch of an IMF-fixdate (RFC 9110 section 5.6.7), which is the only form that servers send.
fn http_date(text: &str) -> Option<i64> {
    let words: Vec<&str> = text.split([' ', ':']).collect();
    let [_, day, month, year, hour, minute, second, "GMT"] = words.as_slice() else { return None };
    let months = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
    let month = months.iter().position(|name| name == month)? + 1;
    let iso = format!("{year}-{month:02}-{day}T{hour}:{minute}:{second}Z");
    Some(kici_engine::time::Ts::parse_rfc3339(&iso).ok()?.as_micros() / 1_000_000)
}

/// The findings as JSON: `{"checks": [{"check", "state", "detail", "remedy"}]}`.
pub fn json(found: &[Finding]) -> String {
    format!("{:#}", serde_json::json!({ "checks": found }))
}

/// The findings as a table, one line each.
pub fn table(found: &[Finding]) -> String {
    let width = found.iter().map(|finding| finding.check.len()).max().unwrap_or_default();
    let line = |finding: &Finding| {
        let arrow = if finding.remedy.is_empty() {
            String::new()
        } else {
            format!("\n{:width$}           -> {}", "", finding.remedy)
        };
        format!("{:width$}  {:7}  {}{arrow}\n", finding.check, finding.state.as_str(), finding.detail)
    };
    found.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_closed_directory_above_the_workspaces_is_named() {
        let dir = tempfile::tempdir().expect("a directory");
        let work = dir.path().join("work").display().to_string();
        let env = [("KICI_ORCHESTRATOR_URL", "http://a"), ("KICI_STATE_DIR", "/s"), ("KICI_WORK_DIR", &work)];
        let env = env.into_iter().map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
        let mut config = Config::load(&crate::config::Sources { env, ..Default::default() }).expect("right");
        assert_eq!(way(&config), None, "steps are of the agent's user");
        let user = kici_sys::confine::User {
            name: "ci".into(),
            uid: u32::MAX - 1,
            gid: u32::MAX - 1,
            groups: Vec::new(),
            home: "/".into(),
            shell: "/bin/sh".into(),
        };
        config.isolation.user = Some(std::sync::Arc::new(user));
        let open = |mode| std::fs::set_permissions(dir.path(), std::os::unix::fs::PermissionsExt::from_mode(mode));
        open(0o700).expect("set");
        let found = way(&config).expect("a finding");
        assert_eq!((found.state, found.remedy), (State::Broken, format!("chmod o+x {}", dir.path().display())));
        open(0o711).expect("set");
        assert_eq!(way(&config), None);
    }

    #[test]
    fn versions_and_dates_are_read() {
        assert_eq!(version("6.18.44-fc-v595"), Some((6, 18)));
        assert_eq!(version("2.39.5 (Apple Git)"), Some((2, 39)));
        assert_eq!(version("rubbish"), None);
        assert_eq!(http_date("Sun, 06 Nov 1994 08:49:37 GMT"), Some(784_111_777));
        assert_eq!(http_date("yesterday"), None);
    }

    #[test]
    fn a_table_names_the_remedy_below_what_is_missing() {
        let found =
            [Finding::ok("git", "git version 2.50"), Finding::new("kernel", State::Broken, "4.19", "use Linux 5.9")];
        assert_eq!(
            table(&found),
            "git     ok       git version 2.50\nkernel  BROKEN   4.19\n                 -> use Linux 5.9\n"
        );
    }
}
