//! `git_credentials`.

use std::collections::BTreeMap;

use crate::lock::{CredentialMaterial, GitAccess, GitCredentials, MAX_NAMED, Material, NamedCredential};
use crate::yaml::{Core, Data, Entry, Node};

use super::keys::{self, nearest};
use super::walk::{Fields, Walk};

/// Longest part of a credential: an RSA key of 16,384 bits has about 13,000 characters.
const MAX_MATERIAL_BYTES: usize = 16 * 1024;

/// What the audit log calls the credential of a source.
const SOURCE: &str = "source";

impl Walk<'_> {
    pub(super) fn git_credentials(&mut self, node: &Node) -> Option<GitCredentials> {
        match (&node.data, node.core()) {
            (Data::Scalar(..), Some(Core::Bool(enabled))) => Some(GitCredentials { enabled, ..Default::default() }),
            (Data::Map(_), _) => self.git_credentials_map(node),
            _ => {
                self.mismatch("K0202", node, "true, false or a map with `repos`, `access`, `named` and `default`");
                None
            }
        }
    }

    fn git_credentials_map(&mut self, node: &Node) -> Option<GitCredentials> {
        let fields = self.fields(node, &keys::GIT_CREDENTIALS, "`git_credentials`")?;
        let repos = self.git_repos(fields);
        let access = fields
            .get("access")
            .and_then(|entry| self.within("access", |walk| walk.word(&entry.value, &["read", "write"])));
        let named = match fields.get("named") {
            Some(entry) => self.within("named", |walk| walk.named_credentials(&entry.value)),
            None => BTreeMap::new(),
        };
        let default = fields.get("default").and_then(|entry| {
            self.within("default", |walk| {
                let name = walk.fixed(&entry.value, "the name of a credential under `named`")?;
                let declared = raw_names(fields);
                if !declared.contains(&name) {
                    let suggestion = nearest(name, declared).map(str::to_owned);
                    walk.fault("K0303", entry.value.span, format!("no credential `{name}` is declared under `named`"))
                        .replace(suggestion);
                }
                Some(name.to_owned())
            })
        });
        let access = if access == Some("write") { GitAccess::Write } else { GitAccess::Read };
        Some(GitCredentials { enabled: true, repos, access, named, default })
    }

    fn git_repos(&mut self, fields: Fields<'_>) -> Vec<String> {
        fields.get("repos").map_or_else(Vec::new, |entry| self.within("repos", |walk| walk.patterns(&entry.value)))
    }

    fn named_credentials(&mut self, node: &Node) -> BTreeMap<String, NamedCredential> {
        let entries = self.map(node).unwrap_or_default();
        if !self.bounded(entries.len(), MAX_NAMED, "named credentials", node.span) {
            return BTreeMap::new();
        }
        let mut named = BTreeMap::new();
        for entry in entries {
            let credential = self.within(&entry.key, |walk| walk.named_credential(entry));
            named.extend(credential.map(|credential| (entry.key.clone(), credential)));
        }
        named
    }

    fn named_credential(&mut self, entry: &Entry) -> Option<NamedCredential> {
        let (name, node) = (entry.key.as_str(), &entry.value);
        if !super::is_job_name(&name.to_ascii_lowercase()) {
            self.fault("K0206", entry.span, format!("`{name}` is not a name for a credential"))
                .expected(["up to 64 letters, digits, `_` and `-`"]);
        }
        if name == SOURCE {
            let message = format!("`{SOURCE}` is not a name for a credential: the source's own is called that");
            self.fault("K0206", entry.span, message);
        }
        if matches!(node.data, Data::Scalar(..)) && !node.is_null() {
            self.fault(
                "K0108",
                node.span,
                format!("a reference to a secret as credential `{name}` is not supported yet"),
            )
            .help("contexts with secrets do not exist yet; write a map with `kind` and `…_value` keys");
            return None;
        }
        let kind = self.map(node)?.iter().find(|entry| entry.key == "kind");
        let Some(kind) = kind else {
            self.fault("K0101", node.span, format!("credential `{name}` has no `kind`"))
                .expected(["basic", "github_app"]);
            return None;
        };
        let kind = self.within("kind", |walk| {
            if kind.value.text() == Some("ssh") {
                walk.fault("K0108", kind.value.span, format!("kind `ssh` of credential `{name}` is not supported yet"));
                return None;
            }
            walk.word(&kind.value, &["basic", "github_app"])
        })?;
        let owner = format!("credential `{name}`");
        let keys = if kind == "basic" { &keys::BASIC_CREDENTIAL } else { &keys::GITHUB_APP_CREDENTIAL };
        let fields = self.fields(node, keys, &owner)?;
        let material = match kind {
            "basic" => {
                let (user, token) =
                    (self.material(fields, node, &owner, "user"), self.material(fields, node, &owner, "token"));
                CredentialMaterial::Basic { user: user?, token: token? }
            }
            _ => {
                let mut number = |field| self.number_material(fields, node, &owner, field);
                let (app_id, installation_id) = (number("app_id"), number("installation_id"));
                let private_key = self.material(fields, node, &owner, "private_key");
                CredentialMaterial::GithubApp {
                    app_id: app_id?,
                    private_key: private_key?,
                    installation_id: installation_id?,
                }
            }
        };
        let host = fields.get("host").and_then(|entry| self.within("host", |walk| walk.git_host(&entry.value)));
        Some(NamedCredential { host, repos: self.git_repos(fields), material })
    }

    /// The part of a credential that stands under `<field>_value`.
    fn material(&mut self, fields: Fields<'_>, node: &Node, owner: &str, field: &str) -> Option<Material> {
        let key = format!("{field}_value");
        let Some(entry) = fields.get(&key) else {
            // A refused reference says enough.
            let said =
                matches!(&node.data, Data::Map(entries) if entries.iter().any(|e| e.key == format!("{field}_secret")));
            if !said {
                self.fault("K0101", node.span, format!("{owner} has no `{key}`"));
            }
            return None;
        };
        self.within(key, |walk| {
            let text = walk.fixed(&entry.value, "a text")?;
            let breaks = field != "private_key" && text.contains(char::is_control);
            if text.is_empty() || text.len() > MAX_MATERIAL_BYTES || breaks || text.contains('\0') {
                // Without the text: it may be a secret.
                walk.fault(
                    "K0205",
                    entry.value.span,
                    format!("`{field}_value` of {owner} is empty, too long or holds control characters"),
                );
                return None;
            }
            Some(Material::Value(text.to_owned()))
        })
    }

    fn number_material(&mut self, fields: Fields<'_>, node: &Node, owner: &str, field: &str) -> Option<Material> {
        let material = self.material(fields, node, owner, field)?;
        if material.value().parse::<u64>().is_ok_and(|n| n > 0) {
            return Some(material);
        }
        let span = fields.get(&format!("{field}_value")).map_or(node.span, |entry| entry.value.span);
        self.fault("K0202", span, format!("expected the number of a GitHub App as `{field}_value` of {owner}"));
        None
    }

    /// `git.example.com` or `git.example.com:8443`, in the form that git's questions are compared with; credentials go over https
    /// only.
    fn git_host(&mut self, node: &Node) -> Option<String> {
        let text = self.fixed(node, "a host")?;
        let host = canonical_host(text);
        if host.is_none() {
            self.mismatch("K0204", node, "a host such as git.example.com");
        }
        host
    }
}

/// In lower case, without a final dot and without the usual port.
fn canonical_host(text: &str) -> Option<String> {
    let (name, port) = text.split_once(':').map_or((text, None), |(name, port)| (name, Some(port)));
    let name = name.strip_suffix('.').unwrap_or(name).to_ascii_lowercase();
    let legal = |b: u8| b.is_ascii_alphanumeric() || b == b'.' || b == b'-';
    if name.is_empty() || name.len() > 253 || !name.bytes().all(legal) || name.starts_with(['-', '.']) {
        return None;
    }
    let Some(port) = port else { return Some(name) };
    let number = port.bytes().all(|b| b.is_ascii_digit()).then(|| port.parse::<u16>().ok()).flatten()?;
    match number {
        0 => None,
        443 => Some(name),
        number => Some(format!("{name}:{number}")),
    }
}

/// The names under `named` as they are written, also of those that are faulty.
fn raw_names(fields: Fields<'_>) -> Vec<&str> {
    match fields.get("named").map(|entry| &entry.value.data) {
        Some(Data::Map(entries)) => entries.iter().map(|entry| entry.key.as_str()).collect(),
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::canonical_host;

    #[test]
    fn hosts_have_one_form_and_odd_ones_are_none() {
        let table = [
            ("Git.Example.com", Some("git.example.com")),
            ("git.example.com:443", Some("git.example.com")),
            ("git.example.com.", Some("git.example.com")),
            ("git.example.com.:0443", Some("git.example.com")),
            ("h:8443", Some("h:8443")),
            ("h:08443", Some("h:8443")),
            ("h:+8", None),
            ("h:0", None),
            ("h:65536", None),
            ("h:", None),
            ("h:1:2", None),
            ("", None),
            (".", None),
            ("-h", None),
            ("a b", None),
            ("u@h", None),
        ];
        for (text, expected) in table {
            assert_eq!(canonical_host(text).as_deref(), expected, "{text}");
        }
    }
}
