//! Conditions on a JSON document: `match` and `not` of triggers (workflows-and-events R24).
//!
//! A condition is a JSONPath (RFC 9535) and what it must find: a scalar, a list of scalars (any of them) or `/regex/`, which
//! looks into texts and into the text form of other scalars. It holds when any node that the path finds is as expected; a
//! path that finds nothing does not hold.
//!
//! Paths come from repositories and documents from strangers, so the work is bounded before it is done: length, nesting, two
//! selectors that walk over children (`*`, `..`, a slice, a filter), and 10,000 nodes to visit. The functions `match()` and
//! `search()` are refused, since they compile an expression per node; `/regex/` does it once.

use std::fmt;

use regex::Regex;
use serde_json::Value as Json;
use serde_json_path::JsonPath;

use crate::lock;
use crate::pattern::{bounded_regex, split_regex};

/// Longest path, in bytes.
pub const MAX_PATH_BYTES: usize = 512;
/// Most conditions of one trigger, and most values of one list.
pub const MAX_CONDITIONS: usize = 64;
const MAX_NESTING: usize = 8;
const MAX_WALKS: usize = 2;
const MAX_VISITS: usize = 10_000;

/// A condition that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("condition `{path}`: {problem}")]
pub struct ConditionError {
    /// Its path, cut to 80 characters.
    pub path: String,
    /// What is wrong with it, and what to do.
    pub problem: String,
}

/// What a path costs on a document of `n` nodes.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Cost {
    /// Follows names and positions.
    Direct,
    /// Walks over the document.
    Linear,
    /// Walks within a filter: once per node.
    Square,
}

#[derive(Clone, Debug)]
enum Expected {
    Scalar(Json),
    Regex { text: String, regex: Regex },
}

impl Expected {
    fn compile(value: &Json) -> Result<Self, String> {
        match value {
            Json::Array(_) | Json::Object(_) => Err("it expects a scalar, a list of scalars or `/regex/`".to_owned()),
            Json::String(text) => match split_regex(text) {
                Some((source, flags)) => {
                    let regex = bounded_regex(source, flags).map_err(|error| error.to_string())?;
                    Ok(Self::Regex { text: text.clone(), regex })
                }
                None => Ok(Self::Scalar(value.clone())),
            },
            _ => Ok(Self::Scalar(value.clone())),
        }
    }

    fn fits(&self, found: &Json) -> bool {
        match (self, found) {
            (Self::Scalar(Json::Number(want)), Json::Number(have)) => want == have || want.as_f64() == have.as_f64(),
            (Self::Scalar(want), have) => want == have,
            (Self::Regex { regex, .. }, Json::String(text)) => regex.is_match(text),
            (Self::Regex { regex, .. }, Json::Number(_) | Json::Bool(_)) => regex.is_match(&found.to_string()),
            (Self::Regex { .. }, _) => false,
        }
    }
}

impl fmt::Display for Expected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Scalar(value) => write!(f, "{value}"),
            Self::Regex { text, .. } => f.write_str(text),
        }
    }
}

/// One condition, ready to evaluate.
#[derive(Clone, Debug)]
pub struct Condition {
    text: String,
    path: JsonPath,
    cost: Cost,
    expected: Vec<Expected>,
}

/// What a condition found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Found {
    /// It holds.
    Holds {
        /// The value that fits, cut.
        actual: String,
    },
    /// It does not hold.
    Fails {
        /// What stands there, cut, or `absent`.
        actual: String,
    },
    /// The document is too large for this path; nothing was evaluated.
    TooLarge,
}

impl Condition {
    /// Compiles one entry of `match` or `not`.
    ///
    /// # Errors
    /// [`ConditionError`] naming the path and the problem.
    pub fn compile(path: &str, expected: &Json) -> Result<Self, ConditionError> {
        let fail = |problem: String| ConditionError { path: path.chars().take(80).collect(), problem };
        let cost = cost(path).map_err(fail)?;
        let parsed =
            JsonPath::parse(path).map_err(|error| fail(format!("it is not a JSONPath (RFC 9535): {error}")))?;
        let expected = match expected {
            Json::Array(list) if list.is_empty() => {
                return Err(fail("the list is empty; name at least one value".into()));
            }
            Json::Array(list) if list.len() > MAX_CONDITIONS => {
                return Err(fail(format!("the list has {} values; at most {MAX_CONDITIONS} are allowed", list.len())));
            }
            Json::Array(list) => list.iter().map(Expected::compile).collect::<Result<_, _>>().map_err(fail)?,
            one => vec![Expected::compile(one).map_err(fail)?],
        };
        Ok(Self { text: path.to_owned(), path: parsed, cost, expected })
    }

    /// Its path as written.
    pub fn path(&self) -> &str {
        &self.text
    }

    /// What it expects, for people.
    pub fn expectation(&self) -> String {
        let list: Vec<String> = self.expected.iter().map(ToString::to_string).collect();
        if list.len() == 1 { list.concat() } else { format!("any of {}", list.join(", ")) }
    }

    /// Evaluates it.
    pub fn evaluate(&self, document: &Json) -> Found {
        let visits = match self.cost {
            Cost::Direct => 0,
            Cost::Linear => count_nodes(document, MAX_VISITS),
            Cost::Square => count_nodes(document, MAX_VISITS).saturating_pow(2),
        };
        if visits > MAX_VISITS {
            return Found::TooLarge;
        }
        let nodes = self.path.query(document);
        let mut first = None;
        for node in nodes {
            if self.expected.iter().any(|expected| expected.fits(node)) {
                return Found::Holds { actual: cut(node) };
            }
            first.get_or_insert(node);
        }
        Found::Fails { actual: first.map_or_else(|| "absent".to_owned(), cut) }
    }
}

/// Compiles the map of a trigger.
///
/// # Errors
/// [`ConditionError`] for the first condition that does not compile, or a map over [`MAX_CONDITIONS`].
pub fn compile_all(conditions: &lock::Conditions) -> Result<Vec<Condition>, ConditionError> {
    if let Some(path) = conditions.keys().nth(MAX_CONDITIONS) {
        let problem = format!("there are {} conditions; at most {MAX_CONDITIONS} are allowed", conditions.len());
        return Err(ConditionError { path: path.chars().take(80).collect(), problem });
    }
    conditions.iter().map(|(path, expected)| Condition::compile(path, expected)).collect()
}

fn cut(value: &Json) -> String {
    let text = match value {
        Json::Array(_) => "a list".to_owned(),
        Json::Object(_) => "an object".to_owned(),
        scalar => scalar.to_string(),
    };
    text.chars().take(120).collect()
}

/// Nodes of a document, at most `limit + 1`.
fn count_nodes(document: &Json, limit: usize) -> usize {
    let (mut count, mut stack) = (0, vec![document]);
    while let Some(node) = stack.pop() {
        count += 1;
        if count > limit {
            break;
        }
        match node {
            Json::Array(items) => stack.extend(items.iter().take(limit)),
            Json::Object(map) => stack.extend(map.values().take(limit)),
            _ => {}
        }
    }
    count
}

/// Reads off a path how it walks, and refuses what cannot be bounded. Works on the text: the parser offers no tree.
fn cost(path: &str) -> Result<Cost, String> {
    if path.len() > MAX_PATH_BYTES {
        return Err(format!("the path has {} bytes; at most {MAX_PATH_BYTES} are allowed", path.len()));
    }
    let bytes = path.as_bytes();
    let (mut walks, mut depth, mut filters, mut at) = (0, 0_usize, Vec::<usize>::new(), 0);
    let mut square = false;
    while at < bytes.len() {
        let walk = match bytes[at] {
            quote @ (b'\'' | b'"') => {
                at += 1;
                while at < bytes.len() && bytes[at] != quote {
                    at += 1 + usize::from(bytes[at] == b'\\');
                }
                false
            }
            b'[' | b'(' => {
                depth += 1;
                false
            }
            b']' | b')' => {
                depth = depth.saturating_sub(1);
                filters.retain(|opened| *opened <= depth);
                false
            }
            b'.' if bytes.get(at + 1) == Some(&b'.') => {
                at += 1;
                true
            }
            b'*' | b':' => true,
            b'?' => {
                square |= !filters.is_empty();
                walks += 1;
                filters.push(depth);
                false
            }
            _ => false,
        };
        if depth > MAX_NESTING {
            return Err(format!("it nests deeper than {MAX_NESTING} levels"));
        }
        square |= walk && !filters.is_empty();
        walks += usize::from(walk);
        at += 1;
    }
    if ["match(", "search("].iter().any(|name| path.replace(' ', "").contains(name)) {
        return Err("the functions match() and search() are not supported; expect `/regex/` instead".to_owned());
    }
    if walks > MAX_WALKS {
        return Err(format!("it has {walks} wildcards, slices and filters; at most {MAX_WALKS} are allowed"));
    }
    Ok(match walks {
        0 => Cost::Direct,
        _ if square => Cost::Square,
        _ => Cost::Linear,
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn holds(path: &str, expected: Json, document: &Json) -> bool {
        matches!(Condition::compile(path, &expected).unwrap().evaluate(document), Found::Holds { .. })
    }

    #[test]
    fn scalars_lists_and_expressions() {
        let document =
            json!({"scope": "licenses", "n": 3, "on": true, "none": null, "tags": ["a", "b"], "o": {"x": 1.0}});
        for (path, expected, want) in [
            ("$.scope", json!("licenses"), true),
            ("$.scope", json!(["all", "licenses"]), true),
            ("$.scope", json!("license"), false),
            ("$.scope", json!("/^lic/"), true),
            ("$.scope", json!("/^LIC/i"), true),
            ("$.n", json!(3.0), true),
            ("$.n", json!("3"), false),
            ("$.n", json!("/^3$/"), true),
            ("$.on", json!(true), true),
            ("$.none", json!(null), true),
            ("$.missing", json!(null), false),
            ("$.tags[*]", json!("b"), true),
            ("$.tags[0]", json!("b"), false),
            ("$.tags", json!("/a/"), false),
            ("$..x", json!(1), true),
            ("$.tags[?@ == 'b']", json!("/./"), true),
        ] {
            assert_eq!(holds(path, expected.clone(), &document), want, "{path} {expected}");
        }
    }

    #[test]
    fn hostile_paths_are_refused_with_the_reason() {
        for (path, expected, want) in [
            ("$.a[", json!(1), "not a JSONPath"),
            ("a.b", json!(1), "not a JSONPath"),
            ("$..*..*", json!(1), "at most 2"),
            ("$[?search(@.a, '(a{1000}){1000}')]", json!(1), "not supported"),
            ("$.a", json!({}), "expects a scalar"),
            ("$.a", json!([]), "is empty"),
            ("$.a", json!("/(?=x)/"), "look-around"),
        ] {
            let error = Condition::compile(path, &expected).unwrap_err().to_string();
            assert!(error.contains(want), "{path}: {error}");
        }
        let deep = format!("${}", "[?@".repeat(100));
        assert!(Condition::compile(&deep, &json!(1)).unwrap_err().problem.contains("nests deeper"));
        assert!(Condition::compile(&"$.a".repeat(300), &json!(1)).is_err());
    }

    proptest::proptest! {
        #[test]
        fn any_text_is_a_path_or_an_error(text in r"\$?[\[\]().*?@$:,'a-c0-2&|=!<> -]{0,40}") {
            if let Ok(condition) = Condition::compile(&text, &json!(1)) {
                let _ = condition.evaluate(&json!({"a": [1, {"b": 2}], "c": "x"}));
            }
        }
    }

    #[test]
    fn a_document_that_would_cost_too_much_is_not_walked() {
        let large = Json::Array((0..10_001).map(Json::from).collect());
        let small = Json::Array((0..50).map(Json::from).collect());
        let evaluate = |path: &str, document: &Json| Condition::compile(path, &json!(7)).unwrap().evaluate(document);
        assert_eq!(evaluate("$[*]", &large), Found::TooLarge);
        assert_eq!(evaluate("$[7]", &large), Found::Holds { actual: "7".into() });
        assert_eq!(evaluate("$[?@ == 7]", &small), Found::Holds { actual: "7".into() });
        let medium = Json::Array((0..200).map(Json::from).collect());
        assert_eq!(evaluate("$[?count(@.*) == 0]", &medium), Found::TooLarge, "walks within a filter count twice");
    }
}
