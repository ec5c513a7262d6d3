//! The arguments and results of the verbs of `cache` and `artifact`. Paths count from the workspace.

use serde::{Deserialize, Serialize};

/// `cache.restore`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CacheRestore {
    /// What is looked for.
    pub key: String,
    /// What is replaced; from the home directory with `~/`.
    pub paths: Vec<String>,
    /// Beginnings of keys that will do.
    #[serde(default)]
    pub restore_keys: Vec<String>,
}

/// Result of `cache.restore`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hit {
    /// An entry was found and its files are there.
    pub hit: bool,
    /// It is the one of this very key.
    pub exact: bool,
    /// Its key.
    pub matched_key: Option<String>,
    /// Its files.
    pub files: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Words for people.
    #[serde(default)]
    pub notes: Vec<String>,
}

/// `cache.save`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CacheSave {
    /// What it is found by.
    pub key: String,
    /// What is kept.
    pub paths: Vec<String>,
}

/// `artifact.upload`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ArtifactUpload {
    /// Its name, unique in the run.
    pub name: String,
    /// Paths and globs.
    pub paths: Vec<String>,
    /// How long it is kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expire_in_ms: Option<u64>,
}

/// `artifact.download`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ArtifactDownload {
    /// Its name.
    pub name: String,
    /// The job that must have made it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<String>,
    /// Directory that its files go to; the workspace itself when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
}

/// Result of the other verbs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Done {
    /// It was done; false when there was one already, or nothing to do.
    pub stored: bool,
    /// Nothing matches the paths.
    #[serde(default)]
    pub empty: bool,
    /// Files.
    pub files: u64,
    /// Bytes, packed where something was sent.
    pub bytes: u64,
    /// Words for people.
    #[serde(default)]
    pub notes: Vec<String>,
}
