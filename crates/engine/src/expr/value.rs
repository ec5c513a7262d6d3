//! Between JSON and the values of the expression engine.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use cel::objects::{Key, Map};
use cel::{ExecutionError, Value};
use serde_json::Value as Json;

use super::limits::Facts;
use super::reference::Reference;
use super::{Context, ExprError, MAX_INPUT_BYTES};

/// Bound on (iterations of the loops) x (bytes that one iteration can touch): about a quarter of a second.
const MAX_WORK: u128 = 1 << 29;

/// The variables that the expression reads, cut down to the paths it reads: an event's document can be megabytes, and
/// most expressions look at one field of it.
pub(super) fn project(facts: &Facts, context: &Context) -> Result<Vec<(String, Value)>, ExprError> {
    let mut roots: BTreeMap<&str, Vec<&Reference>> = BTreeMap::new();
    for reference in &facts.references {
        roots.entry(&reference.root).or_default().push(reference);
    }
    let mut size = Size::default();
    let mut inputs = Vec::with_capacity(roots.len());
    for (root, references) in roots {
        let Some(json) = context.get(root) else { continue };
        let paths: Vec<&[String]> = references.iter().map(|reference| reference.path.as_slice()).collect();
        inputs.push((root.to_owned(), cut(json, &paths, &mut size)?));
    }
    let reads_json = facts.calls.iter().any(|call| call.name == "from_json");
    let longest = if reads_json { size.bytes.max(size.elements) } else { size.elements };
    let elements = (longest.max(facts.nodes) as u128) * (1 + facts.additions as u128);
    let touched = (size.bytes + super::MAX_SOURCE_BYTES) as u128;
    let iterations = elements.checked_pow(facts.loops as u32).unwrap_or(u128::MAX);
    if facts.loops > 0 && iterations.saturating_mul(touched) > MAX_WORK {
        let message = format!("its loops would run over {} elements and {} bytes", size.elements, size.bytes);
        return Err(ExprError::Limit(message));
    }
    Ok(inputs)
}

#[derive(Default)]
struct Size {
    bytes: usize,
    elements: usize,
}

impl Size {
    fn add(&mut self, bytes: usize) -> Result<(), ExprError> {
        self.bytes += bytes;
        self.elements += 1;
        if self.bytes > MAX_INPUT_BYTES {
            return Err(ExprError::Limit("it reads more than 1 MiB; name the field that it needs".to_owned()));
        }
        Ok(())
    }
}

fn cut(json: &Json, paths: &[&[String]], size: &mut Size) -> Result<Value, ExprError> {
    let Json::Object(fields) = json else { return convert(json, size) };
    if paths.iter().any(|path| path.is_empty()) {
        return convert(json, size);
    }
    let mut below: BTreeMap<&str, Vec<&[String]>> = BTreeMap::new();
    for path in paths {
        if let Some((first, rest)) = path.split_first() {
            below.entry(first).or_default().push(rest);
        }
    }
    let mut map = HashMap::with_capacity(below.len());
    for (key, paths) in below {
        if let Some(field) = fields.get(key) {
            size.add(key.len())?;
            map.insert(Key::from(key), cut(field, &paths, size)?);
        }
    }
    Ok(Value::Map(Map { map: Arc::new(map) }))
}

fn convert(json: &Json, size: &mut Size) -> Result<Value, ExprError> {
    match json {
        Json::Array(items) => {
            size.add(2)?;
            let items: Result<Vec<Value>, ExprError> = items.iter().map(|item| convert(item, size)).collect();
            Ok(Value::List(Arc::new(items?)))
        }
        Json::Object(fields) => {
            size.add(2)?;
            let mut map = HashMap::with_capacity(fields.len());
            for (key, field) in fields {
                size.add(key.len())?;
                map.insert(Key::from(key.as_str()), convert(field, size)?);
            }
            Ok(Value::Map(Map { map: Arc::new(map) }))
        }
        Json::String(text) => {
            size.add(text.len())?;
            Ok(Value::String(Arc::new(text.clone())))
        }
        scalar => {
            size.add(8)?;
            Ok(from_json(scalar))
        }
    }
}

/// Whole numbers become `int` where they fit, so that arithmetic with literals works.
pub(super) fn from_json(json: &Json) -> Value {
    match json {
        Json::Null => Value::Null,
        Json::Bool(value) => Value::Bool(*value),
        Json::Number(number) => match (number.as_i64(), number.as_u64(), number.as_f64()) {
            (Some(int), _, _) => Value::Int(int),
            (None, Some(uint), _) => Value::UInt(uint),
            (None, None, float) => Value::Float(float.unwrap_or(f64::NAN)),
        },
        Json::String(text) => Value::String(Arc::new(text.clone())),
        Json::Array(items) => Value::List(Arc::new(items.iter().map(from_json).collect())),
        Json::Object(fields) => {
            let map: HashMap<Key, Value> =
                fields.iter().map(|(key, field)| (Key::from(key.as_str()), from_json(field))).collect();
            Value::Map(Map { map: Arc::new(map) })
        }
    }
}

/// JSON of a value of at most `limit` bytes; the keys of maps are sorted, so that equal values have equal text.
pub(super) fn to_json(value: &Value, limit: usize) -> Result<Json, String> {
    let mut left = limit;
    to_json_within(value, &mut left)
}

fn to_json_within(value: &Value, left: &mut usize) -> Result<Json, String> {
    let bytes = match value {
        Value::String(text) => text.len() + 2,
        Value::Bytes(bytes) => bytes.len() * 2,
        _ => 4,
    };
    *left = left.checked_sub(bytes).ok_or("the value is larger than 1 MiB")?;
    match value {
        Value::List(items) => {
            items.iter().map(|item| to_json_within(item, left)).collect::<Result<Vec<_>, _>>().map(Json::Array)
        }
        Value::Map(map) => {
            let mut sorted: Vec<(String, &Value)> = map.map.iter().map(|(key, v)| (key.to_string(), v)).collect();
            sorted.sort_by(|a, b| a.0.cmp(&b.0));
            let mut object = serde_json::Map::new();
            for (key, value) in sorted {
                *left = left.checked_sub(key.len() + 3).ok_or("the value is larger than 1 MiB")?;
                object.insert(key, to_json_within(value, left)?);
            }
            Ok(Json::Object(object))
        }
        Value::Function(..) | Value::Opaque(_) | Value::Struct(_) => {
            Err(format!("a value of type {} cannot be used here", value.type_of()))
        }
        scalar => scalar.json().map_err(|error| error.to_string()),
    }
}

/// Whether JSON is at most `limit` bytes, roughly.
pub(super) fn within_limit(json: &Json, limit: usize) -> Result<(), String> {
    let mut size = Size::default();
    let fits = measure(json, &mut size).is_ok() && size.bytes <= limit;
    if fits { Ok(()) } else { Err("the value is larger than 1 MiB".to_owned()) }
}

fn measure(json: &Json, size: &mut Size) -> Result<(), ExprError> {
    match json {
        Json::Array(items) => items.iter().try_for_each(|item| measure(item, size)),
        Json::Object(fields) => fields.iter().try_for_each(|(key, field)| {
            size.add(key.len())?;
            measure(field, size)
        }),
        Json::String(text) => size.add(text.len()),
        _ => size.add(8),
    }
}

/// How a value reads inside text: strings bare, null as nothing, lists and maps as JSON.
pub(super) fn to_text(json: &Json) -> String {
    match json {
        Json::Null => String::new(),
        Json::String(text) => text.clone(),
        other => other.to_string(),
    }
}

pub(super) fn type_name(json: &Json) -> &'static str {
    match json {
        Json::Null => "null",
        Json::Bool(_) => "a truth value",
        Json::Number(_) => "a number",
        Json::String(_) => "a string",
        Json::Array(_) => "a list",
        Json::Object(_) => "a map",
    }
}

/// The engine's message, without the values: they may be long.
pub(super) fn describe(error: &ExecutionError) -> String {
    match error {
        ExecutionError::NoSuchKey(key) => format!("there is no `{key}`; ask with has(…) first"),
        ExecutionError::UndeclaredReference(name) => format!("`{name}` is not available here"),
        ExecutionError::FunctionError { function, message } => format!("{function}: {message}"),
        ExecutionError::DivisionByZero(_) | ExecutionError::RemainderByZero(_) => "division by zero".to_owned(),
        ExecutionError::Overflow(..) => "a number is too large".to_owned(),
        ExecutionError::IndexOutOfBounds(_) => "an index is outside the list".to_owned(),
        ExecutionError::ValuesNotComparable(a, b) => {
            format!("{} and {} cannot be compared", a.type_of(), b.type_of())
        }
        ExecutionError::UnsupportedBinaryOperator(operator, a, b) => {
            format!("operator `{operator}` does not take {} and {}", a.type_of(), b.type_of())
        }
        other => {
            let text = other.to_string();
            match text.char_indices().nth(200) {
                Some((end, _)) => format!("{}…", &text[..end]),
                None => text,
            }
        }
    }
}

pub(super) fn syntax_error(source: &str, errors: &cel::ParseErrors) -> ExprError {
    let Some(first) = errors.errors.first() else {
        return ExprError::Syntax { message: "it cannot be parsed".to_owned(), offset: 0 };
    };
    let message = plain_message(first.msg.strip_prefix("Syntax error: ").unwrap_or(&first.msg));
    let line = usize::try_from(first.pos.0 - 1).unwrap_or(0);
    let column = usize::try_from(first.pos.1 - 1).unwrap_or(0);
    let start: usize = source.split_inclusive('\n').take(line).map(str::len).sum();
    let rest = source.get(start..).unwrap_or_default();
    let offset = start + rest.char_indices().nth(column).map_or(rest.len(), |(byte, _)| byte);
    ExprError::Syntax { message, offset: offset.min(source.len()) }
}

/// The parser's messages list token names; what stands in the source is what helps.
fn plain_message(message: &str) -> String {
    let line = message.lines().next().unwrap_or_default();
    let quoted = |after: &str| line.strip_prefix(after).and_then(|rest| rest.strip_prefix('\'')).map(str::trim);
    let token = quoted("mismatched input ")
        .or_else(|| quoted("extraneous input "))
        .map(|rest| rest.split("' expecting").next().unwrap_or(rest))
        .or_else(|| quoted("token recognition error at: ").or_else(|| quoted("no viable alternative at input ")));
    match token.map(|token| token.trim_end_matches('\'').trim()) {
        Some("<EOF>") => "it ends too early".to_owned(),
        Some(token) if token.starts_with('=') => "`=` does not compare, write `==`".to_owned(),
        Some("") | None => line.replace('\'', "`"),
        Some(token) => format!("unexpected `{}`", token.chars().take(40).collect::<String>()),
    }
}
