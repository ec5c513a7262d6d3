//! What an engine is told about the containers of a job.

use std::collections::BTreeMap;

use kici_containers::Labels;
use kici_engine::lock::{Container, HARMLESS_CAPABILITIES, Port, Pull, Resources, Service, Value};
use kici_sys::cgroup::Limits;
use serde_json::{Map, Value as Json, json};

use crate::config::ContainerPolicy;

/// Where the workspace is inside.
pub const WORKSPACE: &str = "/workspace";
/// Where our program is inside.
pub const RUNTIME: &str = "/opt/kici";
/// Our program inside.
pub const PROGRAM: &str = "/opt/kici/kici-init";
/// Files of the steps, in memory.
pub const SCRATCH: &str = "/run/kici/scratch";
/// Where steps call their agent.
pub const SOCKET: &str = "/run/kici/call.sock";
/// In memory too: what the files of the steps and the socket lie in.
const STATE: &str = "/run/kici";
/// Of a file system in memory; what is used of it counts for the memory of the job.
const STATE_OPTIONS: &str = "rw,exec,nosuid,nodev,mode=1777,size=256m";
const TEMPORARY_OPTIONS: &str = "rw,exec,nosuid,nodev,mode=1777";

/// Processes and threads of a container.
const MAX_PROCESSES: u64 = 4_096;
/// Memory of a container where neither the job nor the agent says.
const DEFAULT_MEMORY_BYTES: u64 = 2 << 30;
/// Processors of a container, in billionths, where neither the job nor the agent says.
const DEFAULT_NANO_CPUS: u64 = 2_000_000_000;
/// What the programs of services need to give themselves a user and files, and nothing that reaches out of them.
const SERVICE_CAPABILITIES: [&str; 7] =
    ["CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL", "NET_BIND_SERVICE", "SETGID", "SETUID"];
/// How much of the output of a service its engine keeps.
const SERVICE_LOG: &str = "1m";

/// Memory and processor time of one container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// In bytes.
    pub memory_bytes: u64,
    /// In billionths of a processor.
    pub nano_cpus: u64,
}

/// What a job asks for, at most what the agent allows and the host has.
pub fn bounds(allowed: &Limits, resources: Option<&Resources>, processors: u64) -> Bounds {
    let asked = resources.map(|resources| resources.limits).unwrap_or_default();
    let bound = |asked: Option<u64>, allowed: Option<u64>, default: u64| match (asked, allowed) {
        (Some(asked), Some(allowed)) => asked.min(allowed),
        (Some(one), None) | (None, Some(one)) => one,
        (None, None) => default,
    };
    let cpus = asked.cpu_millis.map(|millis| millis.saturating_mul(1_000_000));
    let most = processors.max(1).saturating_mul(1_000_000_000);
    Bounds {
        memory_bytes: bound(asked.memory_bytes, allowed.memory_bytes, DEFAULT_MEMORY_BYTES),
        nano_cpus: bound(cpus, allowed.nano_cpus, DEFAULT_NANO_CPUS).min(most),
    }
}

/// The limits of a job that runs without a container: what it asks for, at most what the agent allows.
pub fn limits(allowed: &Limits, resources: Option<&Resources>) -> Limits {
    let asked = resources.map(|resources| resources.limits).unwrap_or_default();
    let least = |asked: Option<u64>, allowed: Option<u64>| match (asked, allowed) {
        (Some(asked), Some(allowed)) => Some(asked.min(allowed)),
        (one, other) => one.or(other),
    };
    Limits {
        processes: allowed.processes,
        memory_bytes: least(asked.memory_bytes, allowed.memory_bytes),
        nano_cpus: least(asked.cpu_millis.map(|millis| millis.saturating_mul(1_000_000)), allowed.nano_cpus),
    }
}

/// What of a job's options the agent does not allow.
///
/// # Errors
/// In words, with the remedy.
pub fn allowed(container: &Container, policy: &ContainerPolicy) -> Result<(), String> {
    let options = &container.options;
    if options.privileged && !policy.privileged {
        return Err("this agent runs no privileged containers; its operator can allow it with container_allow_privileged = true, \
                    which gives every workflow all rights on the host"
            .to_owned());
    }
    let known = |name: &str| HARMLESS_CAPABILITIES.contains(&name) || policy.capabilities.iter().any(|own| own == name);
    match options.cap_add.iter().find(|name| !known(name)) {
        Some(name) => Err(format!(
            "this agent gives no container the capability {name}; its operator can allow it with container_allow_capabilities"
        )),
        None => Ok(()),
    }
}

/// The text of a value that the orchestrator rendered.
pub fn text(value: &Value) -> &str {
    match value {
        Value::Static { r#static } => r#static,
        // An orchestrator that renders nothing is none that this agent knows.
        Value::Template { template, .. } => template,
    }
}

fn pairs(env: &BTreeMap<String, Value>) -> Vec<String> {
    env.iter().map(|(name, value)| format!("{name}={}", text(value))).collect()
}

/// Names of what belongs to one job.
#[derive(Clone, Debug)]
pub struct Names {
    /// Of its network, its volume and its container.
    pub job: String,
    /// Of the volume with our program.
    pub runtime: String,
    /// What everything of it carries.
    pub labels: Labels,
}

fn host_config(names: &Names, bounds: Bounds, more: Json) -> Json {
    let mut config = Map::from_iter([
        ("NetworkMode".to_owned(), json!(names.job)),
        ("CapDrop".to_owned(), json!(["ALL"])),
        ("SecurityOpt".to_owned(), json!(["no-new-privileges"])),
        ("PidsLimit".to_owned(), json!(MAX_PROCESSES)),
        ("Memory".to_owned(), json!(bounds.memory_bytes)),
        // Swap would let a job outgrow its memory unseen.
        ("MemorySwap".to_owned(), json!(bounds.memory_bytes)),
        ("NanoCpus".to_owned(), json!(bounds.nano_cpus)),
    ]);
    if let Json::Object(more) = more {
        config.extend(more);
    }
    Json::Object(config)
}

/// The document of the container that the steps run in.
pub fn job_document(container: &Container, user: &str, names: &Names, bounds: Bounds) -> Json {
    let volume = |source: &str, target: &str, read_only: bool| {
        json!({
            "Type": "volume", "Source": source, "Target": target, "ReadOnly": read_only,
            "VolumeOptions": {"NoCopy": true},
        })
    };
    let options = &container.options;
    let mut capabilities = options.cap_add.clone();
    if capabilities.iter().any(|name| name == "SETUID") && !capabilities.iter().any(|name| name == "KILL") {
        // Else what a step starts as another user could only be ended with the whole container.
        capabilities.push("KILL".to_owned());
    }
    let mut memory = json!({STATE: STATE_OPTIONS});
    if options.read_only {
        memory["/tmp"] = json!(TEMPORARY_OPTIONS);
    }
    let host = host_config(
        names,
        bounds,
        json!({
            "Mounts": [volume(&names.job, WORKSPACE, false), volume(&names.runtime, RUNTIME, true)],
            "Tmpfs": memory,
            "CapAdd": capabilities,
            "Privileged": options.privileged,
            "ReadonlyRootfs": options.read_only,
            "ShmSize": options.shm_bytes.unwrap_or(64 << 20),
            // Its output is what steps print, in frames; nobody else reads it.
            "LogConfig": {"Type": "none"},
        }),
    );
    json!({
        "Image": text(&container.image),
        "User": user,
        "Entrypoint": [PROGRAM],
        "Cmd": [],
        "WorkingDir": WORKSPACE,
        "Labels": names.labels,
        "AttachStdin": true, "AttachStdout": true, "AttachStderr": true,
        "OpenStdin": true, "StdinOnce": true, "Tty": false,
        // A question of the image about itself would be a process of its own in here.
        "Healthcheck": {"Test": ["NONE"]},
        "HostConfig": host,
    })
}

/// The document of a container that never runs: a volume is only reached through one. It carries the labels of the job, in case
/// that the agent dies before it is removed.
pub fn door_document(image: &str, names: &Names, volume: &str, place: &str) -> Json {
    json!({
        "Image": image,
        "Entrypoint": [PROGRAM],
        "Labels": names.labels,
        "HostConfig": {"NetworkMode": "none", "Mounts": [{
            "Type": "volume", "Source": volume, "Target": place, "VolumeOptions": {"NoCopy": true},
        }]},
    })
}

/// The document of a service.
pub fn service_document(name: &str, service: &Service, names: &Names, bounds: Bounds, publish: bool) -> Json {
    let key = |port: &Port| format!("{}/tcp", port.container);
    let exposed: Map<String, Json> = service.ports.iter().map(|port| (key(port), json!({}))).collect();
    let mut bindings = Map::new();
    for port in service.ports.iter().filter(|_| publish) {
        let host = port.host.map_or_else(String::new, |host| host.to_string());
        bindings.insert(key(port), json!([{"HostIp": "127.0.0.1", "HostPort": host}]));
    }
    let host = host_config(
        names,
        bounds,
        json!({
            "CapAdd": SERVICE_CAPABILITIES,
            "PortBindings": bindings,
            "LogConfig": {"Type": "json-file", "Config": {"max-size": SERVICE_LOG}},
        }),
    );
    json!({
        "Image": text(&service.image),
        "Env": pairs(&service.env),
        "Hostname": name,
        "Labels": names.labels,
        "ExposedPorts": exposed,
        "Healthcheck": {"Test": ["NONE"]},
        "HostConfig": host,
        "NetworkingConfig": {"EndpointsConfig": {names.job.as_str(): {"Aliases": [name]}}},
    })
}

/// Whether an image has to be fetched.
///
/// # Errors
/// In words, when it must be there and is not.
pub fn must_pull(image: &str, pull: Pull, is_there: bool) -> Result<bool, String> {
    match (pull, is_there) {
        (Pull::Always, _) | (Pull::Missing, false) => Ok(true),
        (_, true) => Ok(false),
        (Pull::Never, false) => {
            Err(format!("image `{image}` is not on this host, and `pull: never` says not to fetch it"))
        }
    }
}

/// User and group by number, as far as the texts of `/etc/passwd` and `/etc/group` tell (passwd(5), group(5)).
///
/// # Errors
/// In words, when there is no such user or group.
pub fn ids(user: &str, passwd: &str, group: &str) -> Result<(u32, u32), String> {
    let (name, own_group) = user.split_once(':').map_or((user, None), |(name, group)| (name, Some(group)));
    let line = |text: &'_ str, at: usize, wanted: &str| -> Option<Vec<String>> {
        text.lines()
            .map(|line| line.split(':').map(str::to_owned).collect::<Vec<_>>())
            .find(|fields| fields.get(at).is_some_and(|field| field == wanted))
    };
    let number = |fields: &[String], at: usize| fields.get(at).and_then(|field| field.parse::<u32>().ok());
    let (uid, gid) = match name.parse::<u32>() {
        _ if name.is_empty() => (0, 0),
        Ok(uid) => (uid, line(passwd, 2, name).and_then(|fields| number(&fields, 3)).unwrap_or(0)),
        Err(_) => line(passwd, 0, name)
            .and_then(|fields| Some((number(&fields, 2)?, number(&fields, 3)?)))
            .ok_or_else(|| format!("the image has no user `{name}`"))?,
    };
    let gid = match own_group {
        None => gid,
        Some(text) => match text.parse() {
            Ok(gid) => gid,
            Err(_) => line(group, 0, text)
                .and_then(|fields| number(&fields, 2))
                .ok_or_else(|| format!("the image has no group `{text}`"))?,
        },
    };
    Ok((uid, gid))
}

#[cfg(test)]
mod tests {
    use kici_engine::lock::{Amounts, ContainerOptions};

    use super::*;

    fn container(options: ContainerOptions) -> Container {
        Container {
            image: Value::fixed("busybox"),
            env: BTreeMap::new(),
            user: None,
            pull: Pull::Missing,
            credentials: None,
            options,
        }
    }

    fn names() -> Names {
        let labels = [("kici-sandbox".to_owned(), "true".to_owned())].into();
        Names { job: "kici-1".into(), runtime: "kici-runtime-x".into(), labels }
    }

    const BOUNDS: Bounds = Bounds { memory_bytes: 1 << 30, nano_cpus: 1_000_000_000 };

    #[test]
    fn a_job_gets_what_it_asks_for_up_to_what_the_agent_allows() {
        let limits = |memory, cpus| Limits { processes: None, memory_bytes: memory, nano_cpus: cpus };
        let asks = |memory, cpu| {
            let amounts = Amounts { cpu_millis: cpu, memory_bytes: memory };
            Resources { requests: amounts, limits: amounts }
        };
        let of = |allowed: Limits, asked: Option<Resources>| {
            let bounds = bounds(&allowed, asked.as_ref(), 8);
            (bounds.memory_bytes, bounds.nano_cpus)
        };
        assert_eq!(of(limits(None, None), None), (2 << 30, 2_000_000_000));
        assert_eq!(of(limits(Some(7), Some(5)), None), (7, 5));
        assert_eq!(of(limits(None, None), Some(asks(Some(9 << 30), Some(500)))), (9 << 30, 500_000_000));
        assert_eq!(of(limits(Some(1 << 30), None), Some(asks(Some(9 << 30), Some(99_000)))), (1 << 30, 8_000_000_000));
        let bare = super::limits(&limits(Some(1 << 30), None), Some(&asks(Some(9 << 30), Some(1_500))));
        assert_eq!((bare.memory_bytes, bare.nano_cpus), (Some(1 << 30), Some(1_500_000_000)));
        assert_eq!(super::limits(&limits(None, None), None), limits(None, None));
    }

    #[test]
    fn what_reaches_out_of_a_container_needs_the_operator() {
        let none = ContainerPolicy::default();
        let with = |privileged, cap_add: &[&str]| {
            let cap_add = cap_add.iter().map(|name| (*name).to_owned()).collect();
            container(ContainerOptions { privileged, cap_add, ..ContainerOptions::default() })
        };
        assert_eq!(allowed(&with(false, &["SETUID", "CHOWN"]), &none), Ok(()));
        let refused = allowed(&with(true, &[]), &none).expect_err("refused");
        assert!(refused.contains("container_allow_privileged"), "{refused}");
        let refused = allowed(&with(false, &["SYS_ADMIN"]), &none).expect_err("refused");
        assert!(refused.contains("SYS_ADMIN") && refused.contains("container_allow_capabilities"), "{refused}");
        let policy = ContainerPolicy { privileged: true, capabilities: vec!["SYS_ADMIN".into()], ..none };
        assert_eq!(allowed(&with(true, &["SYS_ADMIN"]), &policy), Ok(()));
    }

    #[test]
    fn a_container_is_hardened_and_nothing_of_the_host_is_in_it() {
        let document = job_document(&container(ContainerOptions::default()), "1000", &names(), BOUNDS);
        let host = &document["HostConfig"];
        assert_eq!(host["CapDrop"], json!(["ALL"]));
        assert_eq!(host["CapAdd"], json!([]));
        assert_eq!(host["SecurityOpt"], json!(["no-new-privileges"]));
        assert_eq!((&host["PidsLimit"], &host["Privileged"]), (&json!(4096), &json!(false)));
        assert_eq!((&host["Memory"], &host["MemorySwap"]), (&json!(1 << 30), &json!(1 << 30)));
        let mounts = host["Mounts"].as_array().expect("a list");
        assert!(mounts.iter().all(|mount| mount["Type"] == "volume"), "no directory of the host: {mounts:?}");
        assert!(host.get("Binds").is_none() && host.get("Devices").is_none() && host.get("PidMode").is_none());
        assert_eq!(document["Entrypoint"], json!([PROGRAM]));
        assert_eq!(document["Labels"]["kici-sandbox"], "true");
        let options = ContainerOptions { cap_add: vec!["SETUID".into()], read_only: true, ..Default::default() };
        let document = job_document(&container(options), "", &names(), BOUNDS);
        assert_eq!(document["HostConfig"]["CapAdd"], json!(["SETUID", "KILL"]));
        assert_eq!(document["HostConfig"]["ReadonlyRootfs"], true);
        assert!(document["HostConfig"]["Tmpfs"].get("/tmp").is_some());
    }

    #[test]
    fn ports_of_services_are_published_on_loopback_and_only_for_jobs_of_the_host() {
        let ports = vec![Port { container: 5432, host: None }, Port { container: 80, host: Some(8080) }];
        let service =
            Service { image: Value::fixed("db"), env: BTreeMap::new(), ports, health: None, credentials: None };
        let document = service_document("db", &service, &names(), BOUNDS, true);
        let bindings = &document["HostConfig"]["PortBindings"];
        assert_eq!(bindings["5432/tcp"], json!([{"HostIp": "127.0.0.1", "HostPort": ""}]));
        assert_eq!(bindings["80/tcp"], json!([{"HostIp": "127.0.0.1", "HostPort": "8080"}]));
        assert_eq!(document["NetworkingConfig"]["EndpointsConfig"]["kici-1"]["Aliases"], json!(["db"]));
        let inside = service_document("db", &service, &names(), BOUNDS, false);
        assert_eq!(inside["HostConfig"]["PortBindings"], json!({}));
    }

    #[test]
    fn images_are_fetched_when_they_must_be() {
        use Pull::{Always, Missing, Never};
        let table = [
            (Always, true, Some(true)),
            (Missing, true, Some(false)),
            (Missing, false, Some(true)),
            (Never, false, None),
        ];
        for (pull, is_there, expected) in table {
            assert_eq!(must_pull("x", pull, is_there).ok(), expected, "{pull:?} {is_there}");
        }
    }

    #[test]
    fn users_by_name_and_number() {
        let (passwd, group) = ("root:x:0:0::/root:/bin/sh\nnode:x:1000:1001::/:/bin/sh\n", "staff:x:50:\n");
        for (user, expected) in [
            ("", Ok((0, 0))),
            ("node", Ok((1000, 1001))),
            ("1000", Ok((1000, 1001))),
            ("7", Ok((7, 0))),
            ("7:8", Ok((7, 8))),
            ("node:staff", Ok((1000, 50))),
            ("nobody", Err("the image has no user `nobody`".to_owned())),
            ("node:wheel", Err("the image has no group `wheel`".to_owned())),
        ] {
            assert_eq!(ids(user, passwd, group), expected, "{user}");
        }
    }
}
