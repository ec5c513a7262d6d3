//! Inputs that a trigger declares.

use std::collections::BTreeMap;

use serde_json::Value as Json;

use crate::compile::is_variable;
use crate::compile::keys;
use crate::compile::walk::Walk;
use crate::inputs::check_declaration;
use crate::lock::{Input, InputType};
use crate::yaml::{Data, Node};

/// Most inputs of one trigger.
pub(super) const MAX_INPUTS: usize = 100;

impl Walk<'_> {
    /// Inputs that are declared, by name.
    pub(in crate::compile) fn declared(&mut self, node: &Node) -> BTreeMap<String, Input> {
        let mut inputs = BTreeMap::new();
        let entries = self.map(node).unwrap_or_default();
        if !self.bounded(entries.len(), MAX_INPUTS, "inputs", node.span) {
            return inputs;
        }
        for entry in entries {
            self.within(&entry.key, |walk| {
                if !is_variable(&entry.key) {
                    walk.fault("K0206", entry.span, format!("`{}` is not a name for an input", entry.key))
                        .expected(["letters, digits and `_`, not starting with a digit"]);
                }
                if let Some(input) = walk.input(&entry.key, &entry.value) {
                    inputs.insert(entry.key.clone(), input);
                }
            });
        }
        inputs
    }

    fn input(&mut self, name: &str, node: &Node) -> Option<Input> {
        let nothing = Node { span: node.span, data: Data::Map(Vec::new()) };
        let node = if node.is_null() { &nothing } else { node };
        let fields = self.fields(node, &keys::INPUT, &format!("input `{name}`"))?;
        let before = self.found;
        let r#type = match fields.get("type") {
            Some(entry) => self.within("type", |walk| walk.input_type(&entry.value)),
            None => Some(InputType::String),
        };
        let field = |walk: &mut Self, key: &str| {
            fields.get(key).and_then(|entry| walk.within(key, |walk| walk.scalar(&entry.value)))
        };
        let default = field(self, "default");
        let (min, max) = (field(self, "min"), field(self, "max"));
        let pattern = field(self, "pattern").and_then(|json| json.as_str().map(str::to_owned));
        let description = field(self, "description").and_then(|json| json.as_str().map(str::to_owned));
        let values = match fields.get("values") {
            Some(entry) => self.within("values", |walk| {
                let items = walk.list(&entry.value, "values").unwrap_or_default();
                items.iter().filter_map(|item| walk.scalar(item)).collect()
            }),
            None => Vec::new(),
        };
        let required = match fields.get("required") {
            Some(entry) => self.within("required", |walk| walk.bool(&entry.value)).unwrap_or_default(),
            None => default.is_none(),
        };
        for (key, bound) in [("min", &min), ("max", &max)] {
            if let (Some(bound), Some(entry)) = (bound, fields.get(key))
                && !bound.is_number()
            {
                self.within(key, |walk| {
                    walk.mismatch("K0202", &entry.value, "a number");
                });
            }
        }
        if self.found > before {
            return None;
        }
        let number = |json: Option<Json>| json.as_ref().and_then(Json::as_f64);
        let (min, max) = (number(min), number(max));
        let input = Input { r#type: r#type?, required, default, values, min, max, pattern, description };
        if let Err(error) = check_declaration(name, &input) {
            self.fault("K0505", node.span, error.to_string());
            return None;
        }
        Some(input)
    }

    fn input_type(&mut self, node: &Node) -> Option<InputType> {
        let words = ["string", "number", "integer", "boolean", "enum", "literal"];
        Some(match self.word(node, &words)? {
            "string" => InputType::String,
            "number" => InputType::Number,
            "integer" => InputType::Integer,
            "boolean" => InputType::Boolean,
            "enum" => InputType::Enum,
            _ => InputType::Literal,
        })
    }
}
