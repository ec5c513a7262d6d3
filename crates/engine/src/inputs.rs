//! Inputs of manual and dispatched runs (workflows-and-events R26): checked against their declaration before the run exists.

use std::collections::BTreeMap;

use serde_json::Value as Json;

use crate::lock::{Input, InputType};
use crate::pattern::bounded_regex;

/// Longest text of one input, in bytes.
pub const MAX_INPUT_BYTES: usize = 64 * 1024;

/// One fault of one input.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("input `{field}`: {message}")]
pub struct InputError {
    /// Name of the input.
    pub field: String,
    /// What is wrong and what is allowed.
    pub message: String,
}

/// Checks what was given, converts texts to the declared type (a command line has only texts) and adds the defaults. A null
/// counts as not given.
///
/// # Errors
/// One [`InputError`] per faulty or unknown input, sorted by name.
pub fn validate(
    declared: &BTreeMap<String, Input>,
    given: &BTreeMap<String, Json>,
) -> Result<BTreeMap<String, Json>, Vec<InputError>> {
    let mut out = BTreeMap::new();
    let mut errors = Vec::new();
    for field in given.keys().filter(|field| !declared.contains_key(*field)) {
        errors.push(InputError { field: field.chars().take(80).collect(), message: unknown(declared) });
    }
    for (field, input) in declared {
        let result = match given.get(field).filter(|value| !value.is_null()) {
            Some(value) => convert(input, value).map(Some),
            None => match &input.default {
                Some(default) => convert(input, default).map(Some).map_err(|fault| format!("its default: {fault}")),
                None if input.required => Err(format!("it is required; give {}", expectation(input))),
                None => Ok(None),
            },
        };
        match result {
            Ok(value) => out.extend(value.map(|value| (field.clone(), value))),
            Err(message) => errors.push(InputError { field: field.clone(), message }),
        }
    }
    errors.sort_by(|a, b| a.field.cmp(&b.field));
    if errors.is_empty() { Ok(out) } else { Err(errors) }
}

/// The inputs of a run that a schedule starts: what the schedule gives, and the defaults. Nobody is there to be asked for the
/// others. A workflow that declares no inputs has those of the schedule, as texts.
///
/// # Errors
/// One [`InputError`] per value that does not fit its declaration, or has none.
pub fn scheduled(
    declared: &BTreeMap<String, Input>,
    given: &BTreeMap<String, String>,
) -> Result<BTreeMap<String, Json>, Vec<InputError>> {
    let given: BTreeMap<String, Json> =
        given.iter().map(|(name, text)| (name.clone(), Json::from(text.as_str()))).collect();
    if declared.is_empty() {
        return Ok(given);
    }
    let mut result = validate(declared, &given);
    for error in result.as_mut().err().into_iter().flatten() {
        let missing = declared.get(&error.field).is_some_and(|input| input.required && input.default.is_none());
        if missing && given.get(&error.field).is_none_or(Json::is_null) {
            error.message.push_str(", as its default or in the schedule's `inputs`");
        }
    }
    result
}

/// The inputs of a run that a forge's `repository_dispatch` starts: those that are declared, from its free document.
///
/// # Errors
/// One [`InputError`] per value that does not fit its declaration or is missing.
pub fn dispatched(
    declared: &BTreeMap<String, Input>,
    given: &BTreeMap<String, Json>,
) -> Result<BTreeMap<String, Json>, Vec<InputError>> {
    let named = given.iter().filter(|(name, _)| declared.contains_key(*name));
    validate(declared, &named.map(|(name, value)| (name.clone(), value.clone())).collect())
}

/// Checks a declaration: its pattern compiles, its bounds are in order, an `enum` has values, its default is legal.
///
/// # Errors
/// The first fault.
pub fn check_declaration(field: &str, input: &Input) -> Result<(), InputError> {
    let fail = |message: String| Err(InputError { field: field.to_owned(), message });
    if let Some(pattern) = &input.pattern
        && let Err(error) = whole(pattern)
    {
        return fail(error);
    }
    if let (Some(min), Some(max)) = (input.min, input.max)
        && min > max
    {
        return fail(format!("`min` {min} is above `max` {max}"));
    }
    if matches!(input.r#type, InputType::Enum | InputType::Literal) && input.values.is_empty() {
        return fail("it needs `values`, the list of what is allowed".to_owned());
    }
    match input.default.as_ref().map(|default| convert(input, default)) {
        Some(Err(fault)) => fail(format!("its default: {fault}")),
        _ => Ok(()),
    }
}

fn unknown(declared: &BTreeMap<String, Input>) -> String {
    if declared.is_empty() {
        return "the workflow declares no inputs".to_owned();
    }
    let names: Vec<&str> = declared.keys().map(String::as_str).collect();
    format!("the workflow does not declare it; it declares: {}", names.join(", "))
}

fn convert(input: &Input, value: &Json) -> Result<Json, String> {
    if value.as_str().is_some_and(|text| text.len() > MAX_INPUT_BYTES) {
        return Err(format!("it is longer than {MAX_INPUT_BYTES} bytes"));
    }
    match input.r#type {
        InputType::String => text(input, value),
        InputType::Number => number(input, value, false),
        InputType::Integer => number(input, value, true),
        InputType::Boolean => match value {
            Json::Bool(_) => Ok(value.clone()),
            Json::String(text) if text == "true" => Ok(Json::Bool(true)),
            Json::String(text) if text == "false" => Ok(Json::Bool(false)),
            _ => Err(mismatch(input, value)),
        },
        InputType::Enum | InputType::Literal => {
            let same =
                |allowed: &&Json| *allowed == value || as_text(allowed).is_some_and(|t| value.as_str() == Some(&t));
            input.values.iter().find(same).cloned().ok_or_else(|| mismatch(input, value))
        }
    }
}

fn text(input: &Input, value: &Json) -> Result<Json, String> {
    // A number or boolean in JSON or YAML is what somebody typed for a text.
    let text = as_text(value).ok_or_else(|| mismatch(input, value))?;
    #[allow(clippy::cast_precision_loss, reason = "a text of 2^52 characters does not pass the limit above")]
    let length = text.chars().count() as f64;
    if input.min.is_some_and(|min| length < min) || input.max.is_some_and(|max| length > max) {
        return Err(format!("it has {length} characters; expected {}", expectation(input)));
    }
    if let Some(pattern) = &input.pattern
        && !whole(pattern)?.is_match(&text)
    {
        return Err(mismatch(input, value));
    }
    Ok(Json::String(text))
}

fn number(input: &Input, value: &Json, integer: bool) -> Result<Json, String> {
    let parsed = match value {
        Json::Number(number) => Some(number.clone()),
        Json::String(text) => text.trim().parse::<serde_json::Number>().ok(),
        _ => None,
    };
    let Some(number) = parsed else { return Err(mismatch(input, value)) };
    let Some(float) = number.as_f64().filter(|float| float.is_finite()) else { return Err(mismatch(input, value)) };
    if integer && !(number.is_i64() || number.is_u64()) {
        return Err(mismatch(input, value));
    }
    if input.min.is_some_and(|min| float < min) || input.max.is_some_and(|max| float > max) {
        return Err(mismatch(input, value));
    }
    Ok(Json::Number(number))
}

fn whole(pattern: &str) -> Result<regex::Regex, String> {
    // By itself first: `a)|(b` must not become well-formed by the group around it.
    bounded_regex(pattern, "").map_err(|error| error.to_string())?;
    bounded_regex(&format!(r"\A(?:{pattern})\z"), "").map_err(|error| error.to_string())
}

fn as_text(value: &Json) -> Option<String> {
    match value {
        Json::String(text) => Some(text.clone()),
        Json::Number(_) | Json::Bool(_) => Some(value.to_string()),
        _ => None,
    }
}

fn mismatch(input: &Input, value: &Json) -> String {
    let shown: String = value.to_string().chars().take(80).collect();
    format!("{shown} is not allowed; expected {}", expectation(input))
}

/// What the declaration asks for, in words.
fn expectation(input: &Input) -> String {
    let range = |unit: &str| match (input.min, input.max) {
        (Some(min), Some(max)) => format!(" of {min} to {max}{unit}"),
        (Some(min), None) => format!(" of at least {min}{unit}"),
        (None, Some(max)) => format!(" of at most {max}{unit}"),
        (None, None) => String::new(),
    };
    match input.r#type {
        InputType::String => match &input.pattern {
            Some(pattern) => format!("a text{} that matches `{pattern}`", range(" characters")),
            None => format!("a text{}", range(" characters")),
        },
        InputType::Number => format!("a number{}", range("")),
        InputType::Integer => format!("an integer{}", range("")),
        InputType::Boolean => "true or false".to_owned(),
        InputType::Enum | InputType::Literal => {
            let values: Vec<String> = input.values.iter().map(ToString::to_string).collect();
            format!("one of {}", values.join(", "))
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn input(kind: InputType) -> Input {
        Input {
            r#type: kind,
            required: false,
            default: None,
            values: Vec::new(),
            min: None,
            max: None,
            pattern: None,
            description: None,
        }
    }

    fn one(declared: Input, given: Json) -> Result<Json, String> {
        let declared = BTreeMap::from([("x".to_owned(), declared)]);
        match validate(&declared, &BTreeMap::from([("x".to_owned(), given)])) {
            Ok(mut values) => Ok(values.remove("x").unwrap_or(Json::Null)),
            Err(errors) => Err(errors.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")),
        }
    }

    #[test]
    fn a_schedule_must_have_a_value_for_every_input_that_is_required() {
        let required = Input { required: true, ..input(InputType::String) };
        let declared = BTreeMap::from([
            ("env".to_owned(), required),
            ("n".to_owned(), Input { default: Some(json!(2)), ..input(InputType::Integer) }),
            ("more".to_owned(), input(InputType::String)),
        ]);
        let errors = scheduled(&declared, &BTreeMap::new()).unwrap_err();
        let texts: Vec<String> = errors.iter().map(ToString::to_string).collect();
        let want = "input `env`: it is required; give a text, as its default or in the schedule's `inputs`";
        assert_eq!(texts, [want]);
        let given = BTreeMap::from([("env".to_owned(), "test".to_owned())]);
        let all = scheduled(&declared, &given).unwrap();
        assert_eq!(serde_json::to_value(all).unwrap(), json!({"env": "test", "n": 2}));
    }

    #[test]
    fn values_are_checked_and_texts_become_what_was_declared() {
        let ranged = Input { min: Some(1.0), max: Some(5.0), ..input(InputType::Integer) };
        let choice = Input { values: vec![json!("staging"), json!(2)], ..input(InputType::Enum) };
        let tag = Input { pattern: Some("v[0-9]+|latest".into()), ..input(InputType::String) };
        for (declared, given, want) in [
            (input(InputType::String), json!("a"), Ok(json!("a"))),
            (input(InputType::String), json!(3), Ok(json!("3"))),
            (input(InputType::Number), json!("2.5"), Ok(json!(2.5))),
            (input(InputType::Boolean), json!("true"), Ok(json!(true))),
            (ranged.clone(), json!("3"), Ok(json!(3))),
            (choice.clone(), json!("2"), Ok(json!(2))),
            (tag.clone(), json!("v12"), Ok(json!("v12"))),
            (input(InputType::Integer), json!(null), Ok(Json::Null)),
            (input(InputType::Boolean), json!("yes"), Err("input `x`: \"yes\" is not allowed; expected true or false")),
            (ranged.clone(), json!(6), Err("input `x`: 6 is not allowed; expected an integer of 1 to 5")),
            (ranged, json!(1.5), Err("input `x`: 1.5 is not allowed; expected an integer of 1 to 5")),
            (choice, json!("prod"), Err("input `x`: \"prod\" is not allowed; expected one of \"staging\", 2")),
            (
                tag,
                json!("xv1"),
                Err("input `x`: \"xv1\" is not allowed; expected a text that matches `v[0-9]+|latest`"),
            ),
            (input(InputType::String), json!([1]), Err("input `x`: [1] is not allowed; expected a text")),
        ] {
            assert_eq!(one(declared, given), want.map_err(str::to_owned));
        }
    }

    #[test]
    fn every_fault_is_told_once_by_name() {
        let declared = BTreeMap::from([
            ("a".to_owned(), Input { required: true, ..input(InputType::Number) }),
            ("d".to_owned(), Input { default: Some(json!("x")), ..input(InputType::String) }),
        ]);
        let given = BTreeMap::from([("zz".to_owned(), json!(1))]);
        let errors: Vec<_> = validate(&declared, &given).unwrap_err().iter().map(ToString::to_string).collect();
        assert_eq!(
            errors,
            [
                "input `a`: it is required; give a number",
                "input `zz`: the workflow does not declare it; it declares: a, d"
            ]
        );
        let good = validate(&declared, &BTreeMap::from([("a".to_owned(), json!(1))])).unwrap();
        assert_eq!(good["d"], json!("x"));
    }

    #[test]
    fn declarations_are_checked_too() {
        let check = |input: Input| check_declaration("x", &input).map_err(|error| error.message);
        assert_eq!(check(input(InputType::String)), Ok(()));
        assert!(check(input(InputType::Enum)).unwrap_err().contains("needs `values`"));
        let bad = Input { default: Some(json!("a")), ..input(InputType::Integer) };
        assert!(check(bad).unwrap_err().starts_with("its default: \"a\" is not allowed"));
        assert!(check(Input { pattern: Some("(".into()), ..input(InputType::String) }).is_err());
        assert!(check(Input { min: Some(2.0), max: Some(1.0), ..input(InputType::Number) }).is_err());
    }
}
