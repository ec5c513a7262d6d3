//! `requires`: tests on files of the commit (workflows-and-events R16). What a file holds is read by the caller; here it is
//! only judged.

use serde_json::Value as Json;

use crate::condition::{self, Condition, Found};
use crate::lock::{Conditions, Requirement};

/// A larger file is not judged.
pub const MAX_FILE_BYTES: usize = 1024 * 1024;
/// Most requirements of one workflow.
pub const MAX_REQUIREMENTS: usize = 32;

/// What a test says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It holds.
    Holds,
    /// It does not; why.
    Fails(String),
    /// It cannot be told; why.
    Unknown(String),
}

/// A file of the commit as it could be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Content {
    /// It is not there.
    Absent,
    /// Its bytes.
    Bytes(Vec<u8>),
    /// Why it cannot be read.
    Unreadable(String),
}

/// Judges one requirement.
pub fn judge(requirement: &Requirement, content: &Content) -> Verdict {
    let file = &requirement.file;
    let bytes = match (content, requirement.exists) {
        (Content::Unreadable(why), _) => return Verdict::Unknown(format!("{file} cannot be read: {why}")),
        (Content::Absent, true) => return Verdict::Fails(format!("{file} is not there")),
        (Content::Absent, false) => return Verdict::Holds,
        (Content::Bytes(_), false) => return Verdict::Fails(format!("{file} is there")),
        (Content::Bytes(bytes), true) => bytes,
    };
    if requirement.r#match.is_empty() && requirement.not.is_empty() {
        return Verdict::Holds;
    }
    if bytes.len() > MAX_FILE_BYTES {
        return Verdict::Unknown(format!("{file} is larger than 1 MiB"));
    }
    let document: Json = match serde_json::from_slice(bytes) {
        Ok(document) => document,
        Err(error) => return Verdict::Unknown(format!("{file} is not JSON: {error}")),
    };
    conditions(file, &document, &requirement.r#match, true)
        .or_else(|| conditions(file, &document, &requirement.not, false))
        .unwrap_or(Verdict::Holds)
}

/// The first condition that is not as wanted.
fn conditions(file: &str, document: &Json, conditions: &Conditions, wanted: bool) -> Option<Verdict> {
    let compiled = match condition::compile_all(conditions) {
        Ok(compiled) => compiled,
        Err(error) => return Some(Verdict::Unknown(format!("{file}: {error}"))),
    };
    compiled.iter().find_map(|one| verdict(file, document, one, wanted))
}

fn verdict(file: &str, document: &Json, one: &Condition, wanted: bool) -> Option<Verdict> {
    match (one.evaluate(document), wanted) {
        (Found::Holds { .. }, true) | (Found::Fails { .. }, false) => None,
        (Found::Fails { actual }, true) => {
            Some(Verdict::Fails(format!("{file}: `{}` is {actual}, not {}", one.path(), one.expectation())))
        }
        (Found::Holds { actual }, false) => Some(Verdict::Fails(format!("{file}: `{}` is {actual}", one.path()))),
        (Found::TooLarge, _) => Some(Verdict::Unknown(format!("{file} has too many nodes for `{}`", one.path()))),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn requirement(json: Json) -> Requirement {
        serde_json::from_value(json).unwrap()
    }

    #[test]
    fn a_definite_no_is_told_from_what_cannot_be_judged() {
        let bytes = |text: &str| Content::Bytes(text.as_bytes().to_vec());
        let there = json!({"file": "f", "exists": true});
        let gone = json!({"file": "f", "exists": false});
        let test = json!({"file": "f", "exists": true, "match": {"$.scripts.test": "/./"}, "not": {"$.private": true}});
        let big = Content::Bytes(vec![b' '; MAX_FILE_BYTES + 1]);
        for (wanted, content, expected) in [
            (&there, Content::Absent, "no: f is not there"),
            (&there, bytes("x"), "yes"),
            (&there, big.clone(), "yes"),
            (&gone, Content::Absent, "yes"),
            (&gone, bytes("x"), "no: f is there"),
            (&gone, Content::Unreadable("404".into()), "unknown: f cannot be read: 404"),
            (&test, bytes(r#"{"scripts":{"test":"jest"}}"#), "yes"),
            (&test, bytes(r#"{"scripts":{}}"#), "no: f: `$.scripts.test` is absent, not /./"),
            (&test, bytes(r#"{"scripts":{"test":"x"},"private":true}"#), "no: f: `$.private` is true"),
            (&test, bytes("{"), "unknown: f is not JSON"),
            (&test, big, "unknown: f is larger than 1 MiB"),
        ] {
            let found = match judge(&requirement(wanted.clone()), &content) {
                Verdict::Holds => "yes".to_owned(),
                Verdict::Fails(why) => format!("no: {why}"),
                Verdict::Unknown(why) => format!("unknown: {why}"),
            };
            assert!(found.starts_with(expected), "{found} instead of {expected}");
        }
    }
}
