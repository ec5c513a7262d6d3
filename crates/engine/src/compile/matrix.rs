//! `matrix`: the variants of a job.

use std::collections::{BTreeMap, BTreeSet};

use crate::expr::{Scope, Template};
use crate::lock::{Matrix, MatrixTable};
use crate::matrix::{MAX_VARIANTS, MatrixError, expand};
use crate::yaml::{Data, Entry, Node};

use super::keys::nearest;
use super::walk::Walk;

impl Walk<'_> {
    pub(super) fn matrix(&mut self, node: &Node, scope: &Scope) -> Option<Matrix> {
        match &node.data {
            Data::Scalar(..) => self.matrix_expression(node, scope),
            Data::List(items) => {
                let values = self.matrix_values("value", items);
                self.checked(node, MatrixTable { dimensions: BTreeMap::from([values?]), ..MatrixTable::default() })
            }
            Data::Map(entries) => self.matrix_table(node, entries),
        }
    }

    fn matrix_expression(&mut self, node: &Node, scope: &Scope) -> Option<Matrix> {
        let text = self.text(node, "a map of lists")?;
        let parse = |walk: &Self| Template::parse_with(text, |source| walk.library.memo.expression(source)).ok();
        let sole = parse(self).is_some_and(|template| template.sole().is_some());
        if !sole && !text.contains("${{") {
            self.mismatch("K0201", node, "a map of lists, or one `${{ from_json(…) }}`");
            return None;
        }
        self.template(node, scope)?;
        let template = parse(self)?;
        match template.sole() {
            Some(expr) => Some(Matrix::Expr(expr.source().to_owned())),
            None => {
                self.fault("K0405", node.span, "`matrix` must be one `${{ … }}` without other text");
                None
            }
        }
    }

    fn matrix_table(&mut self, node: &Node, entries: &[Entry]) -> Option<Matrix> {
        let before = self.found;
        let mut table = MatrixTable::default();
        for entry in entries.iter().filter(|entry| entry.key != "include" && entry.key != "exclude") {
            self.within(&entry.key, |walk| {
                if !super::is_variable(&entry.key) {
                    walk.fault("K0206", entry.span, format!("`{}` is not a name for a dimension", entry.key))
                        .expected(["letters, digits and `_`, not starting with a digit"]);
                }
                let items = walk.list(&entry.value, "values").unwrap_or_default();
                if items.is_empty() && matches!(entry.value.data, Data::List(_)) {
                    walk.fault("K0205", entry.value.span, format!("dimension `{}` has no values", entry.key));
                }
                table.dimensions.extend(walk.matrix_values(&entry.key, items));
            });
        }
        for entry in entries {
            match entry.key.as_str() {
                "include" => table.include = self.within("include", |walk| walk.matrix_entries(&entry.value, None)),
                "exclude" => {
                    let names: BTreeSet<&str> = table.dimensions.keys().map(String::as_str).collect();
                    table.exclude = self.within("exclude", |walk| walk.matrix_entries(&entry.value, Some(&names)));
                }
                _ => {}
            }
        }
        if self.found > before {
            return None;
        }
        self.checked(node, table)
    }

    fn checked(&mut self, node: &Node, table: MatrixTable) -> Option<Matrix> {
        match expand(&table) {
            Ok(_) => Some(Matrix::Table(table)),
            Err(MatrixError::Empty) => {
                self.fault("K0205", node.span, "the matrix has no combinations")
                    .help("give every dimension a value and exclude less");
                None
            }
            Err(error) => {
                self.fault("K0706", node.span, error.to_string())
                    .expected([format!("at most {MAX_VARIANTS} variants")]);
                None
            }
        }
    }

    fn matrix_values(&mut self, name: &str, items: &[Node]) -> Option<(String, Vec<String>)> {
        let place = items.first().map(|item| item.span).unwrap_or_default();
        if !self.bounded(items.len(), MAX_VARIANTS, "values in a dimension", place) {
            return None;
        }
        let mut values = Vec::new();
        for item in items {
            let value = self.fixed(item, "a plain value")?.to_owned();
            if values.contains(&value) {
                self.fault("K0304", item.span, format!("value `{value}` stands twice in dimension `{name}`"));
                return None;
            }
            values.push(value);
        }
        Some((name.to_owned(), values))
    }

    /// `include` and `exclude`. The keys of an exclusion must be dimensions: another key would never exclude anything.
    fn matrix_entries(&mut self, node: &Node, known: Option<&BTreeSet<&str>>) -> Vec<BTreeMap<String, String>> {
        let mut out = Vec::new();
        for item in self.list(node, "maps").unwrap_or_default() {
            let mut values = BTreeMap::new();
            for entry in self.map(item).unwrap_or_default() {
                let name = entry.key.as_str();
                if let Some(known) = known.filter(|known| !known.contains(name)) {
                    let suggestion = nearest(name, known.iter().copied()).map(str::to_owned);
                    self.fault("K0305", entry.span, format!("`{name}` is no dimension of this matrix"))
                        .expected(known.iter().copied())
                        .replace(suggestion);
                } else if !super::is_variable(name) {
                    self.fault("K0206", entry.span, format!("`{name}` is not a name for a dimension"));
                }
                if let Some(value) = self.fixed(&entry.value, "a plain value") {
                    values.insert(entry.key.clone(), value.to_owned());
                }
            }
            out.push(values);
        }
        out
    }
}

/// The keys that `matrix.…` has; none where an expression yields them.
pub(super) fn matrix_keys(node: Option<&Node>) -> Option<Vec<String>> {
    let Some(node) = node else { return Some(Vec::new()) };
    match &node.data {
        Data::Scalar(..) => None,
        Data::List(_) => Some(vec!["value".to_owned()]),
        Data::Map(entries) => {
            let mut keys = BTreeSet::new();
            for entry in entries {
                match (entry.key.as_str(), &entry.value.data) {
                    ("include", Data::List(items)) => {
                        for item in items {
                            let Data::Map(extra) = &item.data else { continue };
                            keys.extend(extra.iter().map(|entry| entry.key.clone()));
                        }
                    }
                    ("include" | "exclude", _) => {}
                    (name, _) => {
                        keys.insert(name.to_owned());
                    }
                }
            }
            Some(keys.into_iter().collect())
        }
    }
}
