//! `container`, `services` and `resources`.

use std::collections::BTreeMap;

use crate::expr::Scope;
use crate::lock::{
    Amounts, Container, ContainerOptions, Health, MAX_PORTS, MAX_SERVICES, Material, Port, Pull, RegistryCredentials,
    Resources, Service, Value, is_image,
};
use crate::size;
use crate::yaml::{Core, Data, Entry, Node, shorten};

use super::keys;
use super::walk::{Fields, Walk};

const DEFAULT_INTERVAL_MS: u64 = 2_000;
const DEFAULT_RETRIES: u32 = 30;
/// Most thousandths of a processor.
const MAX_CPU_MILLIS: u64 = 4_096_000;
/// Least memory of a job, in bytes: the engines start nothing with less than 6 MiB.
const MIN_MEMORY_BYTES: u64 = 16 << 20;
/// Longest part of a credential.
const MAX_MATERIAL_BYTES: usize = 16 * 1024;
/// Most capabilities: there are 41 (capabilities(7)).
const MAX_CAPABILITIES: usize = 64;

impl Walk<'_> {
    /// An image, or a map with one.
    pub(super) fn container(&mut self, node: &Node, scope: &Scope) -> Option<Container> {
        let plain = |image| Container {
            image,
            env: BTreeMap::new(),
            user: None,
            pull: Pull::default(),
            credentials: None,
            options: ContainerOptions::default(),
        };
        if let Data::Scalar(..) = node.data {
            return self.image(node, scope).map(plain);
        }
        let fields = self.fields(node, &keys::CONTAINER, "`container`")?;
        let image = self.image_of(node, fields, scope, "`container`");
        let env = self.env_of(fields, scope);
        let user = fields.get("user").and_then(|entry| self.within("user", |walk| walk.container_user(&entry.value)));
        let pull = fields.get("pull").and_then(|entry| {
            self.within("pull", |walk| walk.word(&entry.value, &["always", "missing", "never"]).map(pull_of))
        });
        let credentials = self.registry_credentials(fields, "`container`");
        let options =
            fields.get("options").and_then(|entry| self.within("options", |walk| walk.container_options(&entry.value)));
        let options = options.unwrap_or_default();
        Some(Container { env, user, pull: pull.unwrap_or_default(), credentials, options, ..plain(image?) })
    }

    /// A map of names to services.
    pub(super) fn services(&mut self, node: &Node, scope: &Scope) -> BTreeMap<String, Service> {
        let entries = self.map(node).unwrap_or_default();
        if !self.bounded(entries.len(), MAX_SERVICES, "services", node.span) {
            return BTreeMap::new();
        }
        let mut services = BTreeMap::new();
        for entry in entries {
            let service = self.within(&entry.key, |walk| walk.service(entry, scope));
            services.extend(service.map(|service| (entry.key.clone(), service)));
        }
        services
    }

    fn service(&mut self, entry: &Entry, scope: &Scope) -> Option<Service> {
        let name = entry.key.as_str();
        if !is_host_name(name) {
            self.fault("K0206", entry.span, format!("`{}` is not a name for a service", shorten(name)))
                .expected(["up to 63 of a-z, 0-9 and `-`, starting and ending with a letter or digit"]);
        }
        let owner = format!("service `{name}`");
        let node = &entry.value;
        if let Data::Scalar(..) = node.data {
            let image = self.image(node, scope)?;
            return Some(Service { image, env: BTreeMap::new(), ports: Vec::new(), health: None, credentials: None });
        }
        let fields = self.fields(node, &keys::SERVICE, &owner)?;
        let image = self.image_of(node, fields, scope, &owner);
        let env = self.env_of(fields, scope);
        let ports = fields
            .get("ports")
            .map_or_else(Vec::new, |entry| self.within("ports", |walk| walk.service_ports(&entry.value)));
        let health =
            fields.get("health").and_then(|entry| self.within("health", |walk| walk.health(&entry.value, &owner)));
        let credentials = self.registry_credentials(fields, &owner);
        Some(Service { image: image?, env, ports, health, credentials })
    }

    fn env_of(&mut self, fields: Fields<'_>, scope: &Scope) -> BTreeMap<String, Value> {
        fields
            .get("env")
            .map_or_else(BTreeMap::new, |entry| self.within("env", |walk| walk.env(&entry.value, scope, false)))
    }

    fn image_of(&mut self, node: &Node, fields: Fields<'_>, scope: &Scope, owner: &str) -> Option<Value> {
        let Some(entry) = fields.get("image") else {
            self.fault("K0101", node.span, format!("{owner} has no `image`"))
                .expected(["`image`, such as `rust:1.86`"]);
            return None;
        };
        self.within("image", |walk| walk.image(&entry.value, scope))
    }

    fn image(&mut self, node: &Node, scope: &Scope) -> Option<Value> {
        let value = self.template(node, scope)?;
        if let Value::Static { r#static: text } = &value
            && !is_image(text)
        {
            let lower = text.trim().to_lowercase();
            self.fault("K0204", node.span, format!("`{}` is not the name of an image", shorten(text)))
                .expected(["a name such as `rust:1.86` or `registry.example.com/acme/app:3`"])
                .replace(is_image(&lower).then_some(lower));
            return None;
        }
        Some(value)
    }

    fn container_user(&mut self, node: &Node) -> Option<String> {
        let text = self.fixed(node, "a user")?;
        let part = |part: &str| {
            (1..=64).contains(&part.len())
                && part.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-' | b'.'))
        };
        let legal = match text.split_once(':') {
            Some((user, group)) => part(user) && part(group),
            None => part(text),
        };
        if !legal {
            self.fault("K0204", node.span, format!("`{}` is not a user", shorten(text)))
                .expected(["a name or number, with `:` and a group or its number where it has another"]);
        }
        legal.then(|| text.to_owned())
    }

    fn container_options(&mut self, node: &Node) -> Option<ContainerOptions> {
        let fields = self.fields(node, &keys::CONTAINER_OPTIONS, "`options`")?;
        let mut flag = |key: &str| {
            fields.get(key).and_then(|entry| self.within(key, |walk| walk.bool(&entry.value))).unwrap_or_default()
        };
        let (privileged, read_only) = (flag("privileged"), flag("read_only"));
        let shm_bytes =
            fields.get("shm_size").and_then(|entry| self.within("shm_size", |walk| walk.size(&entry.value)));
        let cap_add = fields
            .get("cap_add")
            .map_or_else(Vec::new, |entry| self.within("cap_add", |walk| walk.capabilities(&entry.value)));
        Some(ContainerOptions { privileged, cap_add, read_only, shm_bytes })
    }

    fn capabilities(&mut self, node: &Node) -> Vec<String> {
        let items = self.one_or_list(node, "a capability").unwrap_or_default();
        if !self.bounded(items.len(), MAX_CAPABILITIES, "capabilities", node.span) {
            return Vec::new();
        }
        let mut all = Vec::new();
        for item in items {
            let Some(text) = self.fixed(item, "a capability") else { continue };
            let upper = text.to_ascii_uppercase();
            let name = upper.strip_prefix("CAP_").unwrap_or(&upper);
            let is_legal = name != "ALL" && name.bytes().all(|b| b.is_ascii_uppercase() || b == b'_');
            if name == text && is_legal {
                all.push(name.to_owned());
                continue;
            }
            let suggestion = is_legal.then(|| name.to_owned());
            self.fault("K0204", item.span, format!("`{}` is not a capability", shorten(text)))
                .expected(["a name of capabilities(7) in capitals without `CAP_`, such as `SETUID`"])
                .replace(suggestion);
        }
        all.sort();
        all.dedup();
        all
    }

    fn service_ports(&mut self, node: &Node) -> Vec<Port> {
        let items = self.list(node, "ports").unwrap_or_default();
        if !self.bounded(items.len(), MAX_PORTS, "ports", node.span) {
            return Vec::new();
        }
        items.iter().filter_map(|item| self.service_port(item)).collect()
    }

    /// `5432`, or `15432:5432` for a certain port of the host.
    fn service_port(&mut self, node: &Node) -> Option<Port> {
        let text = self.fixed(node, "a port")?;
        let number = |text: &str| text.parse::<u16>().ok().filter(|port| *port > 0);
        let port = match text.split_once(':') {
            Some((host, container)) => {
                number(container).zip(number(host)).map(|(container, host)| Port { container, host: Some(host) })
            }
            None => number(text).map(|container| Port { container, host: None }),
        };
        if port.is_none() {
            self.fault("K0204", node.span, format!("`{}` is not a port", shorten(text)))
                .expected(["`5432`, or `15432:5432` for a certain port of the host"]);
        }
        port
    }

    fn health(&mut self, node: &Node, owner: &str) -> Option<Health> {
        if let Data::Scalar(..) = node.data {
            let run = self.script(node, "health")?;
            return Some(Health { run, interval_ms: DEFAULT_INTERVAL_MS, retries: DEFAULT_RETRIES });
        }
        let fields = self.fields(node, &keys::HEALTH, "`health`")?;
        let interval_ms =
            fields.get("interval").and_then(|entry| self.within("interval", |walk| walk.duration(&entry.value)));
        let retries =
            fields.get("retries").and_then(|entry| self.within("retries", |walk| walk.int(&entry.value, 1, 1000)));
        let Some(run) = fields.get("run") else {
            self.fault("K0101", node.span, format!("`health` of {owner} has no `run`"))
                .expected(["`run`, a script such as `pg_isready`"]);
            return None;
        };
        let run = self.within("run", |walk| walk.script(&run.value, "run"))?;
        let retries = retries.and_then(|n| u32::try_from(n).ok()).unwrap_or(DEFAULT_RETRIES);
        Some(Health { run, interval_ms: interval_ms.unwrap_or(DEFAULT_INTERVAL_MS), retries })
    }

    fn registry_credentials(&mut self, fields: Fields<'_>, owner: &str) -> Option<RegistryCredentials> {
        let entry = fields.get("credentials")?;
        self.within("credentials", |walk| {
            let node = &entry.value;
            let fields = walk.fields(node, &keys::REGISTRY_CREDENTIALS, &format!("`credentials` of {owner}"))?;
            let user = walk.registry_material(fields, node, owner, "user");
            let token = walk.registry_material(fields, node, owner, "token");
            Some(RegistryCredentials { user: user?, token: token? })
        })
    }

    fn registry_material(&mut self, fields: Fields<'_>, node: &Node, owner: &str, field: &str) -> Option<Material> {
        let key = format!("{field}_value");
        let Some(entry) = fields.get(&key) else {
            // A refused reference says enough.
            if fields.get(&format!("{field}_secret")).is_none() {
                self.fault("K0101", node.span, format!("`credentials` of {owner} has no `{key}`"));
            }
            return None;
        };
        self.within(key.clone(), |walk| {
            let text = walk.fixed(&entry.value, "a text")?;
            if text.is_empty() || text.len() > MAX_MATERIAL_BYTES || text.contains(char::is_control) {
                // Without the text: it may be a secret.
                let message = format!("`{key}` of {owner} is empty, too long or holds control characters");
                walk.fault("K0205", entry.value.span, message);
                return None;
            }
            Some(Material::Value(text.to_owned()))
        })
    }

    /// `{cpus, memory}` for both sides, or `requests` and `limits`; a side that is not given is as the other.
    pub(super) fn resources(&mut self, node: &Node) -> Option<Resources> {
        let fields = self.fields(node, &keys::RESOURCES, "`resources`")?;
        let both = self.amounts(fields);
        let mut side = |key: &str| {
            let entry = fields.get(key)?;
            if ["cpus", "memory"].iter().any(|key| fields.get(key).is_some()) {
                let message = format!("`resources` has both `{key}` and amounts for both sides");
                self.fault("K0103", entry.span, message).help("put the amounts into `requests` or `limits`");
            }
            self.within(key, |walk| {
                let fields = walk.fields(&entry.value, &keys::AMOUNTS, &format!("`{key}`"))?;
                Some(walk.amounts(fields))
            })
        };
        let (requests, limits) = (side("requests"), side("limits"));
        let resources = match (requests, limits) {
            (None, None) => Resources { requests: both, limits: both },
            (Some(one), None) | (None, Some(one)) => Resources { requests: one, limits: one },
            (Some(requests), Some(limits)) => Resources { requests, limits },
        };
        let over = |request: Option<u64>, limit: Option<u64>| request.zip(limit).is_some_and(|(r, l)| r > l);
        let (asked, limit) = (resources.requests, resources.limits);
        for (key, is_over) in [
            ("cpus", over(asked.cpu_millis, limit.cpu_millis)),
            ("memory", over(asked.memory_bytes, limit.memory_bytes)),
        ] {
            if is_over {
                self.fault("K0205", node.span, format!("`requests` asks for more `{key}` than `limits` allows"));
            }
        }
        Some(resources)
    }

    fn amounts(&mut self, fields: Fields<'_>) -> Amounts {
        let cpu_millis = fields.get("cpus").and_then(|entry| self.within("cpus", |walk| walk.cpus(&entry.value)));
        let memory_bytes = fields.get("memory").and_then(|entry| {
            self.within("memory", |walk| {
                let bytes = walk.size(&entry.value)?;
                if bytes < MIN_MEMORY_BYTES {
                    walk.fault("K0205", entry.value.span, "a job needs at least 16MiB of memory");
                    return None;
                }
                Some(bytes)
            })
        });
        Amounts { cpu_millis, memory_bytes }
    }

    /// `2` or `0.5` processors.
    fn cpus(&mut self, node: &Node) -> Option<u64> {
        let number = match node.core() {
            Some(Core::Int(_) | Core::Float(_)) => node.text().and_then(|text| text.parse::<f64>().ok()),
            _ => None,
        };
        let Some(number) = number else {
            self.mismatch("K0202", node, "a number of processors such as 2 or 0.5");
            return None;
        };
        let millis = (number * 1000.0).round();
        if !(10.0..=MAX_CPU_MILLIS as f64).contains(&millis) {
            self.mismatch("K0205", node, "a number of processors from 0.01 to 4096");
            return None;
        }
        Some(millis as u64)
    }

    /// `512MiB`, in bytes.
    fn size(&mut self, node: &Node) -> Option<u64> {
        let text = self.fixed(node, "a size such as \"512MiB\"")?;
        match size::parse(text) {
            Ok(bytes) => Some(bytes),
            Err(error) => {
                self.fault("K0204", node.span, format!("`{}` is not a size: {error}", shorten(text)))
                    .replace(size::suggest(text));
                None
            }
        }
    }
}

fn pull_of(word: &str) -> Pull {
    match word {
        "always" => Pull::Always,
        "never" => Pull::Never,
        _ => Pull::Missing,
    }
}

/// A label of a host name (RFC 1123), in lower case.
fn is_host_name(name: &str) -> bool {
    let edge = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
    name.len() <= 63
        && name.starts_with(edge)
        && name.ends_with(edge)
        && name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
}
