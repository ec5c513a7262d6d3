//! Variants of a job: from a matrix to the list of its combinations (workflows-and-events R81).
//!
//! Dimensions in the order of their names, row-major. `exclude` first, then `include`: an entry that agrees with existing
//! combinations adds its other keys to them, else it is a combination of its own. `{}` entries do nothing.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value as Json;

use crate::lock::MatrixTable;

/// Most variants of one job.
pub const MAX_VARIANTS: usize = 256;
/// Longest label of a variant, in characters; the rest is cut.
const MAX_LABEL_CHARS: usize = 160;

/// The values of one combination, by dimension.
pub type Values = BTreeMap<String, String>;

/// One variant of a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Variant {
    /// `v1, v2`: its values for people.
    pub label: String,
    /// Its values.
    pub values: Values,
}

impl Variant {
    /// Name of the job of this variant: `job (v1, v2)`.
    pub fn job_name(&self, base: &str) -> String {
        format!("{base} ({})", self.label)
    }
}

/// A matrix that yields no usable list of variants.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MatrixError {
    /// Nothing is left.
    #[error("matrix produced no combinations")]
    Empty,
    /// More than [`MAX_VARIANTS`].
    #[error("matrix produced {0} combinations; at most {MAX_VARIANTS} are allowed")]
    TooMany(usize),
    /// An expression yielded something else than a matrix.
    #[error("matrix: {path} is {found}; expected {expected}")]
    Shape {
        /// Where.
        path: String,
        /// What stands there.
        found: &'static str,
        /// What should.
        expected: &'static str,
    },
}

/// The variants of a matrix, 1 to [`MAX_VARIANTS`], with labels that are unique.
///
/// # Errors
/// [`MatrixError::Empty`] and [`MatrixError::TooMany`].
pub fn expand(table: &MatrixTable) -> Result<Vec<Variant>, MatrixError> {
    let originals = combinations(table)?;
    let mut extras: Vec<Values> = vec![Values::new(); originals.len()];
    let mut added: Vec<Values> = Vec::new();
    for entry in table.include.iter().filter(|entry| !entry.is_empty()) {
        let agrees = |values: &Values| entry.iter().all(|(key, value)| values.get(key).is_none_or(|v| v == value));
        let mut placed = false;
        for (at, _) in originals.iter().enumerate().filter(|(_, values)| agrees(values)) {
            placed = true;
            let new = entry.iter().filter(|(key, _)| !originals[at].contains_key(*key));
            extras[at].extend(new.map(|(k, v)| (k.clone(), v.clone())));
        }
        if !placed {
            added.push(entry.clone());
        }
    }
    let total = originals.len() + added.len();
    match total {
        0 => return Err(MatrixError::Empty),
        n if n > MAX_VARIANTS => return Err(MatrixError::TooMany(n)),
        _ => {}
    }
    let mut taken = BTreeSet::new();
    let mut out = Vec::with_capacity(total);
    for (values, extra) in originals.into_iter().zip(extras) {
        let label = unique_label(&values, &mut taken);
        out.push(Variant { label, values: values.into_iter().chain(extra).collect() });
    }
    for values in added {
        let label = unique_label(&values, &mut taken);
        out.push(Variant { label, values });
    }
    Ok(out)
}

/// The product of the dimensions without what is excluded; none without dimensions.
fn combinations(table: &MatrixTable) -> Result<Vec<Values>, MatrixError> {
    if table.dimensions.is_empty() {
        return Ok(Vec::new());
    }
    let size = table.dimensions.values().try_fold(1_usize, |n, values| n.checked_mul(values.len()));
    // Before exclusions, so that a small file cannot ask for a product that does not fit into memory.
    let limit = MAX_VARIANTS * 16;
    match size {
        Some(n) if n <= limit => {}
        other => return Err(MatrixError::TooMany(other.unwrap_or(usize::MAX))),
    }
    let mut rows = vec![Values::new()];
    for (name, values) in &table.dimensions {
        rows = rows
            .iter()
            .flat_map(|row| {
                values.iter().map(|value| {
                    let mut next = row.clone();
                    next.insert(name.clone(), value.clone());
                    next
                })
            })
            .collect();
    }
    let excluded = |row: &Values| {
        table.exclude.iter().any(|e| !e.is_empty() && e.iter().all(|(key, value)| row.get(key) == Some(value)))
    };
    rows.retain(|row| !excluded(row));
    Ok(rows)
}

/// Values joined for people; a number tells equal ones apart, since the name of a job is unique in its run.
fn unique_label(values: &Values, taken: &mut BTreeSet<String>) -> String {
    let joined = values.values().map(String::as_str).collect::<Vec<_>>().join(", ");
    let clean: String = joined.chars().map(|c| if c.is_control() { ' ' } else { c }).take(MAX_LABEL_CHARS).collect();
    let mut label = clean.clone();
    let mut n = 1;
    while !taken.insert(label.clone()) {
        n += 1;
        label = format!("{clean} #{n}");
    }
    label
}

/// Reads a matrix that an expression yielded: an object like the YAML form, or a list, which is the dimension `value`.
///
/// # Errors
/// [`MatrixError::Shape`] naming the place.
pub fn from_json(value: &Json) -> Result<MatrixTable, MatrixError> {
    let mut table = MatrixTable::default();
    match value {
        Json::Array(items) => {
            table.dimensions.insert("value".to_owned(), texts("the list", items)?);
        }
        Json::Object(map) => {
            for (key, value) in map {
                let Json::Array(items) = value else {
                    return Err(shape(format!("`{key}`"), value, "a list"));
                };
                match key.as_str() {
                    "include" => table.include = entries("include", items)?,
                    "exclude" => table.exclude = entries("exclude", items)?,
                    _ => {
                        table.dimensions.insert(key.clone(), texts(&format!("`{key}`"), items)?);
                    }
                }
            }
        }
        other => return Err(shape("the value".to_owned(), other, "a list, or an object of lists")),
    }
    Ok(table)
}

fn texts(path: &str, items: &[Json]) -> Result<Vec<String>, MatrixError> {
    items.iter().enumerate().map(|(at, item)| text(|| format!("{path}[{at}]"), item)).collect()
}

fn entries(path: &str, items: &[Json]) -> Result<Vec<Values>, MatrixError> {
    let entry = |(at, item): (usize, &Json)| match item {
        Json::Object(map) => map
            .iter()
            .map(|(key, value)| Ok((key.clone(), text(|| format!("{path}[{at}].{key}"), value)?)))
            .collect::<Result<Values, MatrixError>>(),
        other => Err(shape(format!("{path}[{at}]"), other, "an object")),
    };
    items.iter().enumerate().map(entry).collect()
}

fn text(path: impl Fn() -> String, value: &Json) -> Result<String, MatrixError> {
    match value {
        Json::String(text) => Ok(text.clone()),
        Json::Number(number) => Ok(number.to_string()),
        Json::Bool(flag) => Ok(flag.to_string()),
        other => Err(shape(path(), other, "a string, a number or a boolean")),
    }
}

fn shape(path: String, found: &Json, expected: &'static str) -> MatrixError {
    let found = match found {
        Json::Null => "null",
        Json::Bool(_) => "a boolean",
        Json::Number(_) => "a number",
        Json::String(_) => "a string",
        Json::Array(_) => "a list",
        Json::Object(_) => "an object",
    };
    MatrixError::Shape { path, found, expected }
}

#[cfg(test)]
mod tests;
