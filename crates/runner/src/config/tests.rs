use super::*;

fn vars(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
    pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect()
}

fn problems(env: &[(&str, &str)]) -> Vec<String> {
    let sources = Sources { env: vars(env), ..Sources::default() };
    match Config::load(&sources) {
        Ok(config) => panic!("accepted: {config:?}"),
        Err(Problems(all)) => all.iter().map(ToString::to_string).collect(),
    }
}

#[test]
fn file_environment_and_flags_in_that_order() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("agent.toml");
    let text =
        "orchestrator_url = \"http://a\"\nmax_concurrency = 2\nlabels = [\"GPU\", \"x\"]\n[git]\ntimeout_ms = 5\n";
    std::fs::write(&file, text).expect("written");
    let sources = Sources {
        file: Some(file),
        env: vars(&[
            ("KICI_AGENT_MAX_CONCURRENCY", "3"),
            ("KICI_JOB_ID", "inside a job"),
            ("PATH", "/bin"),
            ("CARGO_HOME", "/c"),
            ("KICI_PASS_ENV", "CARGO_HOME,ABSENT"),
            ("SECRET", "no"),
        ]),
        flags: vars(&[("max_concurrency", "4"), ("state_dir", "/s")]),
    };
    let config = Config::load(&sources).expect("right");
    assert_eq!((config.max_concurrency, config.git_timeout), (4, Duration::from_millis(5)));
    assert_eq!((config.labels, config.work_dir), (vec!["gpu".into(), "x".into()], PathBuf::from("/s/work")));
    assert_eq!(config.host_env, vars(&[("PATH", "/bin"), ("CARGO_HOME", "/c")]));
}

#[test]
fn every_mistake_is_told_at_once() {
    let found = problems(&[
        ("KICI_AGENT_MAX_CONCURRENCY", "0"),
        ("KICI_AGENT_TOKEN", "secret-text"),
        ("KICI_LABELS", "kici:os:linux"),
        ("KICI_LABLES", "x"),
        ("KICI_PASS_ENV", "KICI_AGENT_TOKEN"),
        ("KICI_SCALER_CLAIM_CODE", "secret-text"),
    ]);
    let expected = [
        "KICI_LABLES: is not a variable of the agent; did you mean KICI_LABELS?",
        "orchestrator_url: is not set; give KICI_ORCHESTRATOR_URL or --orchestrator-url",
        "KICI_AGENT_TOKEN: the value is not an agent token: it begins with kici_agent_ and 70 hex digits follow",
        "KICI_LABELS: `kici:os:linux` cannot be claimed: kici: labels are derived by the orchestrator",
        "KICI_AGENT_MAX_CONCURRENCY: `0` is not a number from 1 to 1024",
        "KICI_PASS_ENV: `KICI_AGENT_TOKEN` is never passed on: KICI_ names belong to the agent",
        "KICI_SCALER_CLAIM_CODE: the value is not a claim code: it begins with kici_claim_ and 70 hex digits follow",
    ];
    for line in expected {
        assert!(found.iter().any(|f| f == line), "{line}\nnot in {found:#?}");
    }
    assert_eq!(found.len(), expected.len());
    assert!(!found.iter().any(|line| line.contains("secret-text")));
}

#[test]
fn variables_of_a_newer_scaler_are_no_mistake_where_a_scaler_or_a_developer_starts_the_agent() {
    let base = [("KICI_ORCHESTRATOR_URL", "http://a"), ("KICI_SCALER_CLAIM_COD", "x")];
    for (name, value, is_lenient) in [
        ("KICI_SCALER_MANAGED", "1", true),
        ("KICI_SCALER_MANAGED", "true", true),
        ("KICI_DEV", "true", true),
        ("KICI_DEV", "false", false),
        ("KICI_SCALER_MANAGED", "0", false),
    ] {
        let mut env = vars(&base);
        env.insert(name.to_owned(), value.to_owned());
        let loaded = Config::load(&Sources { env, ..Sources::default() });
        match loaded {
            Ok(config) => assert_eq!((is_lenient, config.ignored.len()), (true, 1), "{name}={value}"),
            Err(Problems(all)) => assert_eq!((is_lenient, all.len()), (false, 1), "{name}={value}: {all:?}"),
        }
    }
}

#[test]
fn an_agent_of_a_scaler_may_say_what_it_was_started_as() {
    let labels = ("KICI_LABELS", "linux,kici:agent:container");
    let url = ("KICI_ORCHESTRATOR_URL", "http://a");
    assert_eq!(problems(&[url, labels]).len(), 1);
    let env = vars(&[url, labels, ("KICI_SCALER_MANAGED", "1")]);
    let config = Config::load(&Sources { env, ..Sources::default() }).expect("the orchestrator judges it");
    assert_eq!(config.labels, ["kici:agent:container", "linux"]);
}

#[test]
fn the_home_of_the_steps_is_not_that_of_the_agent() {
    let env =
        vars(&[("KICI_ORCHESTRATOR_URL", "http://a"), ("HOME", "/of/the/agent"), ("KICI_SANDBOX_USER", "nobody")]);
    match Config::load(&Sources { env, ..Sources::default() }) {
        Ok(config) => {
            assert_eq!(config.agent_env["HOME"], "/of/the/agent");
            assert_ne!(config.host_env["HOME"], "/of/the/agent");
            assert!(!config.agent_env.contains_key("USER"));
        }
        Err(Problems(all)) => {
            assert!(kici_sys::host::uid() != 0 && all.len() == 1 && all[0].message.contains("root"), "{all:?}");
        }
    }
}

#[test]
fn the_description_holds_no_token() {
    let token = format!("kici_agent_{}", "a".repeat(70));
    let code = format!("kici_claim_{}", "a".repeat(70));
    let env =
        vars(&[("KICI_ORCHESTRATOR_URL", "http://a"), ("KICI_AGENT_TOKEN", &token), ("KICI_SCALER_CLAIM_CODE", &code)]);
    let config = Config::load(&Sources { env, ..Sources::default() }).expect("right");
    assert!(!config.describe().contains("aaaa") && !format!("{config:?}").contains("aaaa"));
}

#[test]
fn every_key_is_documented() {
    let text = include_str!("../../../../docs/agent.md");
    for key in KEYS {
        let row = format!("| `{}` | `{}` |", key.name, key.env);
        assert!(text.contains(&row), "docs/agent.md has no row {row}");
    }
}

#[test]
fn a_runtime_dir_that_is_too_long_for_sockets_is_told_at_the_start() {
    let url = ("KICI_ORCHESTRATOR_URL", "http://a");
    let longest = format!("/{}", "r".repeat(86));
    let sources = Sources { env: vars(&[url, ("KICI_RUNTIME_DIR", &longest)]), ..Sources::default() };
    let config = Config::load(&sources).expect("just short enough");
    assert_eq!(config.runtime_dir.join("j/01234567/job.sock").as_os_str().len(), 107);
    let found = problems(&[url, ("KICI_RUNTIME_DIR", &format!("{longest}x"))]);
    let expected = "is too long for sockets of jobs: use a directory of at most 87 bytes";
    assert!(
        found.len() == 1 && found[0].starts_with("KICI_RUNTIME_DIR: ") && found[0].ends_with(expected),
        "{found:?}"
    );
}

#[test]
fn what_an_agent_says_about_containers_is_checked() {
    let found = problems(&[
        ("KICI_ORCHESTRATOR_URL", "http://a"),
        ("KICI_EXECUTION_MODE", "container"),
        ("KICI_CONTAINER_SOCKET", "docker.sock"),
        ("KICI_CONTAINER_ALLOW_CAPABILITIES", "SYS_PTRACE,CAP_X"),
    ]);
    let expected = [
        "KICI_EXECUTION_MODE: container needs container_image, the image of jobs that name none",
        "KICI_CONTAINER_SOCKET: `docker.sock` is not the full path of a socket",
        "KICI_CONTAINER_ALLOW_CAPABILITIES: `CAP_X` is not a capability; names are in capitals without CAP_, such as SYS_PTRACE",
    ];
    assert_eq!(found, expected);
    let found = problems(&[("KICI_ORCHESTRATOR_URL", "http://a"), ("KICI_CONTAINER_IMAGE", "debian:12")]);
    assert_eq!(found, ["KICI_CONTAINER_IMAGE: has no effect without execution_mode = container"]);
    let right = vars(&[
        ("KICI_ORCHESTRATOR_URL", "http://a"),
        ("KICI_EXECUTION_MODE", "container"),
        ("KICI_CONTAINER_IMAGE", "debian:12"),
        ("KICI_CONTAINER_SOCKET", "unix:///run/docker.sock"),
    ]);
    let config = Config::load(&Sources { env: right, ..Sources::default() }).expect("right");
    assert_eq!(config.containers.socket.as_deref(), Some(Path::new("/run/docker.sock")));
    assert!(config.containers.by_default().is_some() && config.describe().contains("execution_mode = container"));
}
