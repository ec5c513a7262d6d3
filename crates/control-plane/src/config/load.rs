//! Merging the layers and reading typed values out of them.

use std::collections::BTreeMap;
use std::fmt;
use std::fmt::Write as _;
use std::net::{SocketAddr, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::time::Duration;

use secrecy::SecretString;

use super::ConfigError;
use super::keys::{KEYS, Key, Kind, is_foreign_variable};

/// What a configuration is made from, strongest first: flags, variables, a file.
#[derive(Debug, Default)]
pub struct Layers {
    /// `(key, value)` from flags.
    pub flags: Vec<(&'static str, String)>,
    /// The process environment, or what a test passes as one.
    pub variables: BTreeMap<String, String>,
    /// Path and text of the TOML file.
    pub file: Option<(PathBuf, String)>,
}

/// Where a value came from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Layer {
    /// A command-line flag.
    Flag,
    /// This variable.
    Variable(String),
    /// This file.
    File(PathBuf),
    /// Built in.
    Default,
}

impl fmt::Display for Layer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Flag => f.write_str("a flag"),
            Self::Variable(name) => f.write_str(name),
            Self::File(path) => write!(f, "{}", path.display()),
            Self::Default => f.write_str("the default"),
        }
    }
}

/// The text of a value and its layer.
#[derive(Clone, Debug)]
pub struct Origin {
    /// As a variable would hold it.
    pub text: String,
    /// Where it came from.
    pub layer: Layer,
}

/// Merged values, and the problems met while they are read.
#[derive(Debug)]
pub(super) struct Values {
    by_key: BTreeMap<&'static str, Origin>,
    problems: Vec<String>,
}

/// Merges the layers; unknown keys and variables are problems, reported with the ones of the values.
pub(super) fn merge(layers: &Layers) -> Result<Values, ConfigError> {
    let mut values = Values { by_key: BTreeMap::new(), problems: Vec::new() };
    for key in KEYS {
        if let Some(text) = key.default {
            values.by_key.insert(key.name, Origin { text: text.to_owned(), layer: Layer::Default });
        }
    }
    if let Some((path, text)) = &layers.file {
        values.merge_file(path, text);
    }
    values.merge_variables(&layers.variables);
    for (name, text) in &layers.flags {
        values.by_key.insert(name, Origin { text: text.clone(), layer: Layer::Flag });
    }
    values.check_kinds();
    if values.problems.is_empty() { Ok(values) } else { Err(ConfigError { problems: values.problems }) }
}

impl Values {
    fn merge_file(&mut self, path: &Path, text: &str) {
        let table: toml::Table = match text.parse() {
            Ok(table) => table,
            Err(error) => {
                self.problems.push(format!("{}: not valid TOML: {}", path.display(), one_line(error.message())));
                return;
            }
        };
        for (section, value) in table {
            let toml::Value::Table(keys) = value else {
                self.problems.push(format!("{section}: must be a section `[{section}]` (in {})", path.display()));
                continue;
            };
            for (name, value) in keys {
                let full = format!("{section}.{name}");
                match KEYS.iter().find(|key| key.name == full) {
                    Some(key) => match toml_text(key.kind, &value) {
                        Some(text) => {
                            let layer = Layer::File(path.to_owned());
                            self.by_key.insert(key.name, Origin { text, layer });
                        }
                        None => self.problems.push(format!(
                            "{full}: expected {}, found {} (value from {})",
                            expected(key.kind),
                            value.type_str(),
                            path.display()
                        )),
                    },
                    None => {
                        let hint = suggestion(&full, KEYS.iter().map(|key| key.name.to_owned()));
                        self.problems.push(format!("{full}: unknown key{hint} (in {})", path.display()));
                    }
                }
            }
        }
    }

    fn merge_variables(&mut self, variables: &BTreeMap<String, String>) {
        let lenient = variables.get("KICI_DEV").is_some_and(|v| v == "true" || v == "1");
        for (name, text) in variables.iter().filter(|(name, _)| name.starts_with("KICI_")) {
            let found = KEYS.iter().find(|key| key.variable() == *name || key.aliases.contains(&name.as_str()));
            match found {
                Some(key) => {
                    let origin = Origin { text: text.clone(), layer: Layer::Variable(name.clone()) };
                    self.by_key.insert(key.name, origin);
                }
                None if is_foreign_variable(name) || lenient => {}
                None => {
                    let hint = suggestion(name, KEYS.iter().map(Key::variable));
                    self.problems.push(format!("{name}: unknown variable{hint}; KICI_DEV=true lets it pass"));
                }
            }
        }
    }

    fn check_kinds(&mut self) {
        for key in KEYS {
            let Some(origin) = self.by_key.get(key.name) else { continue };
            if let Err(problem) = check(key.kind, &origin.text) {
                let shown = if key.secret { "***" } else { &origin.text };
                self.problems.push(format!("{}: {problem}, found `{shown}` (value from {})", key.name, origin.layer));
            }
        }
    }

    fn problem(&mut self, key: &str, what: &str) {
        self.problems.push(format!("{key}: {what}"));
    }

    /// Reports what reading the values has found.
    pub(super) fn finish(self) -> Result<(), ConfigError> {
        if self.problems.is_empty() { Ok(()) } else { Err(ConfigError { problems: self.problems }) }
    }

    pub(super) fn text_opt(&self, key: &str) -> Option<String> {
        self.by_key.get(key).map(|origin| origin.text.clone()).filter(|text| !text.is_empty())
    }

    pub(super) fn text(&self, key: &str) -> String {
        self.text_opt(key).unwrap_or_default()
    }

    pub(super) fn path_opt(&self, key: &str) -> Option<PathBuf> {
        self.text_opt(key).map(PathBuf::from)
    }

    pub(super) fn paths(&self, key: &str) -> Vec<PathBuf> {
        self.text(key).split(':').filter(|part| !part.is_empty()).map(PathBuf::from).collect()
    }

    /// The kinds were checked by [`merge`], so what does not parse here is absent.
    pub(super) fn number(&self, key: &str) -> u64 {
        self.text(key).parse().unwrap_or_default()
    }

    pub(super) fn size(&self, key: &str) -> usize {
        usize::try_from(self.number(key)).unwrap_or(usize::MAX)
    }

    pub(super) fn small(&self, key: &str) -> u32 {
        u32::try_from(self.number(key)).unwrap_or(u32::MAX)
    }

    pub(super) fn millis(&self, key: &str) -> Duration {
        Duration::from_millis(self.number(key))
    }

    pub(super) fn address(&self, key: &str) -> SocketAddr {
        resolve(&self.text(key)).unwrap_or_else(|| SocketAddr::from(([127, 0, 0, 1], 4000)))
    }

    pub(super) fn secret_opt(&self, key: &str) -> Option<SecretString> {
        self.text_opt(key).map(SecretString::from)
    }

    pub(super) fn secret_or_file(&mut self, key: &str, file_key: &str) -> Option<SecretString> {
        let path = self.path_opt(file_key);
        match (self.secret_opt(key), path) {
            (Some(_), Some(_)) => {
                self.problem(key, &format!("set together with {file_key}; keep one of the two"));
                None
            }
            (None, Some(path)) => match std::fs::read_to_string(&path) {
                Ok(text) => Some(SecretString::from(text.trim().to_owned())),
                Err(error) => {
                    self.problem(file_key, &format!("cannot read {}: {error}", path.display()));
                    None
                }
            },
            (secret, None) => secret,
        }
    }

    pub(super) fn file_url_opt(&mut self, key: &str) -> Option<PathBuf> {
        let text = self.text_opt(key)?;
        match text.strip_prefix("file:") {
            Some(path) => Some(PathBuf::from(path.strip_prefix("//").unwrap_or(path))),
            None => {
                self.problem(key, &format!("expected `file:PATH`, found `{text}`"));
                None
            }
        }
    }
}

fn one_line(text: &str) -> String {
    text.lines().next().unwrap_or_default().to_owned()
}

fn resolve(text: &str) -> Option<SocketAddr> {
    text.to_socket_addrs().ok()?.next()
}

fn expected(kind: Kind) -> String {
    match kind {
        Kind::Text => "a text".to_owned(),
        Kind::Path => "a path".to_owned(),
        Kind::Address => "HOST:PORT".to_owned(),
        Kind::Bool => "true or false".to_owned(),
        Kind::Number(low, high) => format!("a whole number from {low} to {high}"),
        Kind::Word(words) => format!("one of: {}", words.join(", ")),
        Kind::Paths => "a list of paths".to_owned(),
    }
}

fn check(kind: Kind, text: &str) -> Result<(), String> {
    let good = match kind {
        Kind::Text | Kind::Path => true,
        Kind::Paths => text.split(':').all(|part| part.is_empty() || part.starts_with('/')),
        Kind::Address => resolve(text).is_some(),
        Kind::Bool => matches!(text, "true" | "false" | "1" | "0"),
        Kind::Number(low, high) => text.parse::<u64>().is_ok_and(|n| (low..=high).contains(&n)),
        Kind::Word(words) => words.contains(&text),
    };
    match (good, kind) {
        (true, _) => Ok(()),
        (false, Kind::Paths) => Err("expected absolute paths".to_owned()),
        (false, kind) => Err(format!("expected {}", expected(kind))),
    }
}

/// The text a variable would hold for a TOML value; `None` when its type does not fit.
fn toml_text(kind: Kind, value: &toml::Value) -> Option<String> {
    match (kind, value) {
        (Kind::Number(..), toml::Value::Integer(n)) => Some(n.to_string()),
        (Kind::Bool, toml::Value::Boolean(b)) => Some(b.to_string()),
        (Kind::Paths, toml::Value::Array(items)) => {
            let paths: Option<Vec<&str>> = items.iter().map(toml::Value::as_str).collect();
            paths.map(|paths| paths.join(":"))
        }
        (Kind::Text | Kind::Path | Kind::Address | Kind::Word(_), toml::Value::String(text)) => Some(text.clone()),
        _ => None,
    }
}

fn suggestion(text: &str, names: impl Iterator<Item = String>) -> String {
    names
        .map(|name| (strsim::damerau_levenshtein(text, &name), name))
        .filter(|(distance, _)| *distance <= 3)
        .min()
        .map(|(_, name)| format!("; did you mean `{name}`?"))
        .unwrap_or_default()
}

/// `docs/configuration-reference.md`: every key, made from the table.
pub fn reference_page() -> String {
    let mut page = String::from(
        "# Configuration keys of kici-orchestrator\n\n<!-- generated by `cargo xtask gen`; do not edit -->\n\n\
         A key `section.key` stands in the TOML file as `key = …` under `[section]` and in the environment as\n\
         `KICI_SECTION_KEY`. A flag wins over a variable, a variable over the file, the file over the default.\n\n\
         | key | variable | default | holds | meaning |\n|---|---|---|---|---|\n",
    );
    for key in KEYS {
        let variables: Vec<String> = std::iter::once(key.variable())
            .chain(key.aliases.iter().map(|alias| (*alias).to_owned()))
            .map(|name| format!("`{name}`"))
            .collect();
        let mut unique = variables;
        unique.dedup();
        let default = key.default.filter(|text| !text.is_empty()).map_or("—".to_owned(), |text| format!("`{text}`"));
        // Writing to a String cannot fail.
        let _ = writeln!(
            page,
            "| `{}` | {} | {} | {} | {} |",
            key.name,
            unique.join(", "),
            default,
            expected(key.kind),
            key.help
        );
    }
    page
}

#[cfg(test)]
mod tests {
    use super::super::Config;
    use super::*;

    fn layers(variables: &[(&str, &str)], file: Option<&str>) -> Layers {
        Layers {
            flags: Vec::new(),
            variables: variables.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect(),
            file: file.map(|text| (PathBuf::from("/etc/kici/orchestrator.toml"), text.to_owned())),
        }
    }

    fn problems(layers: &Layers) -> Vec<String> {
        Config::load(layers).unwrap_err().problems
    }

    #[test]
    fn a_variable_wins_over_the_file_and_the_file_over_the_default() {
        let file = "[ingest]\nworkers = 50\n";
        assert_eq!(Config::load(&layers(&[], None)).unwrap().ingest.workers, 16);
        assert_eq!(Config::load(&layers(&[], Some(file))).unwrap().ingest.workers, 50);
        let both = layers(&[("KICI_INGEST_WORKERS", "200")], Some(file));
        assert_eq!(Config::load(&both).unwrap().ingest.workers, 200);
    }

    #[test]
    fn a_mistyped_variable_is_refused_with_the_right_name() {
        let found = problems(&layers(&[("KICI_QUEUE_MAX_ATEMPTS", "1")], None));
        assert_eq!(
            found,
            [
                "KICI_QUEUE_MAX_ATEMPTS: unknown variable; did you mean `KICI_QUEUE_MAX_ATTEMPTS`?; KICI_DEV=true lets it pass"
            ]
        );
        assert!(Config::load(&layers(&[("KICI_QUEUE_MAX_ATEMPTS", "1"), ("KICI_DEV", "true")], None)).is_ok());
        assert!(Config::load(&layers(&[("KICI_RUN_ID", "x"), ("KICI_ADMIN_URL", "y")], None)).is_ok());
    }

    #[test]
    fn every_problem_is_reported_at_once_with_its_layer() {
        let file = "[server]\nlisten = 4000\nlistn = \"x\"\n[queue]\ntimeout_ms = -1\n";
        let found = problems(&layers(&[("KICI_DATABASE_DURABILITY", "maybe")], Some(file)));
        assert_eq!(found.len(), 4, "{found:#?}");
        assert!(found[0].starts_with("server.listen: expected HOST:PORT, found integer"), "{}", found[0]);
        assert!(found.iter().any(|p| p.starts_with("server.listn: unknown key; did you mean `server.listen`?")));
        assert!(found.iter().any(|p| p.contains("expected one of: full, normal, found `maybe`")));
    }

    #[test]
    fn the_reference_page_in_docs_is_fresh() {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/configuration-reference.md");
        let expected = reference_page();
        if std::env::var_os("UPDATE").is_some() {
            std::fs::write(&path, &expected).unwrap();
        }
        let found = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(found == expected, "docs/configuration-reference.md is stale; run `cargo xtask gen`");
    }

    #[test]
    fn a_faulty_secret_is_not_printed() {
        let found = problems(&layers(&[("KICI_SECRETS_KEY", "hunter2"), ("KICI_SECRETS_KEY_FILE", "/nope")], None));
        assert!(!found.join(" ").contains("hunter2"), "{found:?}");
    }
}
