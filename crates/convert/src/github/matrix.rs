//! `strategy.matrix`.

use std::collections::{BTreeMap, BTreeSet};

use kici_engine::yaml::{Data, Node, Pos};

use crate::source::{Report, entries, items};
use crate::target::{Map, Y, variable};

/// A matrix that was carried over.
pub(super) struct Table {
    /// As written here.
    pub written: Y,
    /// Its keys; true where every variant has it.
    pub keys: BTreeMap<String, bool>,
}

/// Values of one combination, nested maps joined by `_`.
type Row = Vec<(String, String)>;

/// A matrix. Values that are maps become several keys; then the combinations are written out.
///
/// # Errors
/// Why it cannot be carried over.
pub(super) fn convert(node: &Node, path: &str, report: &Report) -> Result<Table, String> {
    let Data::Map(all) = &node.data else {
        return Err("a matrix that is computed has no counterpart, since other jobs have no results yet".to_owned());
    };
    let mut dimensions: Vec<(String, Pos, Vec<Row>)> = Vec::new();
    let (mut include, mut exclude) = (Vec::new(), Vec::new());
    for entry in all {
        match entry.key.as_str() {
            "include" => include = rows(&entry.value)?,
            "exclude" => exclude = rows(&entry.value)?,
            key => {
                let Data::List(values) = &entry.value.data else {
                    return Err(format!("the values of `{key}` are computed, which has no counterpart"));
                };
                let mut made: Vec<Row> = Vec::new();
                for value in values {
                    let mut row = Row::new();
                    flatten(value, &variable(key), &mut row)?;
                    if !made.contains(&row) {
                        made.push(row);
                    }
                }
                dimensions.push((variable(key), entry.span.start, made));
            }
        }
    }
    let names: BTreeSet<&String> = dimensions.iter().map(|(name, ..)| name).collect();
    // An exclusion by something that is no dimension never excludes anything there.
    exclude.retain(|row: &Row| {
        let known = row.iter().all(|(key, _)| names.contains(key));
        if !known {
            report.lose(node.span.start, format!("{path}.exclude"), "an exclusion by a key that is no dimension");
        }
        known
    });
    let plain = dimensions.iter().all(|(name, _, rows)| rows.iter().all(|row| row.len() == 1 && row[0].0 == *name));
    if !plain {
        return written_out(dimensions, include, &exclude);
    }
    let mut out = Map::default();
    let mut keys: BTreeMap<String, bool> = BTreeMap::new();
    let whole = !dimensions.is_empty();
    for (name, from, rows) in &dimensions {
        keys.insert(name.clone(), true);
        out.put(name, *from, Y::texts(rows.iter().flatten().map(|(_, value)| value.clone())));
    }
    for (key, everywhere) in common(&include) {
        keys.entry(key).or_insert(everywhere && !whole);
    }
    // An inclusion may be a variant of its own, which then lacks dimensions.
    let extra = |row: &Row| names.iter().any(|name| !row.iter().any(|(key, _)| key == *name));
    if include.iter().any(extra) && include.iter().any(|row| row.iter().any(|(key, _)| names.contains(key))) {
        let have: Vec<&String> = dimensions.iter().map(|(name, ..)| name).collect();
        for name in have {
            if include.iter().any(|row| !row.iter().any(|(key, _)| key == name)) {
                keys.insert(name.clone(), false);
            }
        }
    }
    out.some("include", node.span.start, maps(&include));
    out.some("exclude", node.span.start, maps(&exclude));
    Ok(Table { written: Y::Map(out), keys })
}

/// Every combination as an inclusion.
fn written_out(dimensions: Vec<(String, Pos, Vec<Row>)>, include: Vec<Row>, exclude: &[Row]) -> Result<Table, String> {
    let mut all: Vec<Row> = vec![Row::new()];
    for (.., rows) in &dimensions {
        if all.len() * rows.len() > 256 {
            return Err("the matrix has more than 256 combinations".to_owned());
        }
        all =
            all.iter().flat_map(|left| rows.iter().map(move |right| [left.clone(), right.clone()].concat())).collect();
    }
    all.retain(|row| !exclude.iter().any(|out| !out.is_empty() && out.iter().all(|pair| row.contains(pair))));
    for row in include {
        let same = |have: &Row| {
            row.iter().all(|(key, value)| have.iter().find(|(k, _)| k == key).is_none_or(|(_, v)| v == value))
        };
        let mut placed = false;
        for have in all.iter_mut().filter(|have| same(have)) {
            placed = true;
            let new: Vec<_> = row.iter().filter(|pair| !have.contains(pair)).cloned().collect();
            have.extend(new);
        }
        if !placed {
            all.push(row);
        }
    }
    let mut out = Map::default();
    out.some("include", Pos::default(), maps(&all));
    Ok(Table { written: Y::Map(out), keys: common(&all) })
}

/// The keys of rows; true where every row has it.
fn common(rows: &[Row]) -> BTreeMap<String, bool> {
    let keys: BTreeSet<&String> = rows.iter().flatten().map(|(key, _)| key).collect();
    let everywhere = |key: &String| rows.iter().all(|row| row.iter().any(|(k, _)| k == key));
    keys.into_iter().map(|key| (key.clone(), everywhere(key))).collect()
}

fn maps(rows: &[Row]) -> Y {
    let map = |row: &Row| {
        let mut map = Map::default();
        row.iter().for_each(|(key, value)| map.text(key, Pos::default(), value));
        Y::Map(map)
    };
    Y::List(rows.iter().filter(|row| !row.is_empty()).map(map).collect())
}

fn rows(node: &Node) -> Result<Vec<Row>, String> {
    if node.text().is_some_and(|text| text.contains("${{")) {
        return Err("a matrix that is computed has no counterpart".to_owned());
    }
    let row = |item: &&Node| {
        let mut row = Row::new();
        for entry in entries(item) {
            flatten(&entry.value, &variable(&entry.key), &mut row)?;
        }
        Ok(row)
    };
    items(node).iter().map(row).collect()
}

fn flatten(node: &Node, name: &str, row: &mut Row) -> Result<(), String> {
    match &node.data {
        Data::Scalar(text, _) if text.contains("${{") => Err("a value that is computed has no counterpart".to_owned()),
        Data::Scalar(text, _) => {
            row.push((name.to_owned(), if node.is_null() { String::new() } else { text.clone() }));
            Ok(())
        }
        Data::Map(inner) => {
            inner.iter().try_for_each(|entry| flatten(&entry.value, &format!("{name}_{}", variable(&entry.key)), row))
        }
        Data::List(_) => Err("a value that is a list has no counterpart".to_owned()),
    }
}
