//! The git credentials that a workflow declares for a job.

use std::collections::BTreeMap;
use std::fmt;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Most named credentials of a job.
pub const MAX_NAMED: usize = 32;

/// What git may do on behalf of a job. The default is what holds where nothing is written: the job's own repository, read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct GitCredentials {
    /// False: git gets no credential in the steps.
    #[serde(default = "yes")]
    pub enabled: bool,
    /// Repositories (`owner/name` patterns) besides the job's own that the credential of the source may reach.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub repos: Vec<String>,
    /// How far the credential of the source goes.
    #[serde(default)]
    pub access: GitAccess,
    /// Credentials of the workflow's own, by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub named: BTreeMap<String, NamedCredential>,
    /// The named one that applies where none is asked for by name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub default: Option<String>,
}

fn yes() -> bool {
    true
}

impl Default for GitCredentials {
    fn default() -> Self {
        Self { enabled: true, repos: Vec::new(), access: GitAccess::Read, named: BTreeMap::new(), default: None }
    }
}

/// How far a credential goes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum GitAccess {
    /// Fetch only.
    #[default]
    Read,
    /// Steps may open write windows.
    Write,
}

/// A credential that a workflow brings along.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct NamedCredential {
    /// The host that it is for; the host of the source when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// Repositories (`owner/name` patterns) that it is used for without being named.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub repos: Vec<String>,
    /// What it is.
    #[serde(flatten)]
    pub material: CredentialMaterial,
}

/// The parts of a credential.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum CredentialMaterial {
    /// User name and password or token.
    Basic {
        /// User name.
        user: Material,
        /// Password or token.
        token: Material,
    },
    /// A GitHub App of the workflow's own.
    GithubApp {
        /// Its number.
        app_id: Material,
        /// Its key in PEM.
        private_key: Material,
        /// The number of its installation.
        installation_id: Material,
    },
}

impl CredentialMaterial {
    /// The word in workflows.
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::Basic { .. } => "basic",
            Self::GithubApp { .. } => "github_app",
        }
    }
}

/// A part of a credential. `Debug` does not show it.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Material {
    /// Written in the workflow file.
    Value(String),
}

impl Material {
    /// The text.
    pub fn value(&self) -> &str {
        match self {
            Self::Value(text) => text,
        }
    }
}

impl fmt::Debug for Material {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Material(..)")
    }
}
