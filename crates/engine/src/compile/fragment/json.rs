//! JSON as the tree that the compiler walks. Strict: no name stands twice in an object, and there is a limit to the depth.

use std::collections::HashSet;
use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};

use crate::yaml::{Data, Entry, Node, Span, Style};

/// As in a workflow file.
const MAX_DEPTH: usize = 32;

/// Reads a document; everything in it lies at `span`.
pub(super) fn read(document: &[u8], span: Span) -> Result<Node, String> {
    let mut from = serde_json::Deserializer::from_slice(document);
    let node = Tree { span, depth: 0 }.deserialize(&mut from).map_err(|error| error.to_string())?;
    from.end().map_err(|error| error.to_string())?;
    Ok(node)
}

#[derive(Clone, Copy)]
struct Tree {
    span: Span,
    depth: usize,
}

impl Tree {
    fn scalar<E>(self, text: String, style: Style) -> Result<Node, E> {
        Ok(Node { span: self.span, data: Data::Scalar(text, style) })
    }

    fn deeper<E: Error>(self) -> Result<Self, E> {
        let depth = self.depth + 1;
        if depth > MAX_DEPTH {
            return Err(E::custom(format!("it is nested deeper than {MAX_DEPTH} levels")));
        }
        Ok(Self { depth, ..self })
    }
}

impl<'de> DeserializeSeed<'de> for Tree {
    type Value = Node;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Node, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Tree {
    type Value = Node;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<Node, E> {
        self.scalar(value.to_string(), Style::Plain)
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<Node, E> {
        self.scalar(value.to_string(), Style::Plain)
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<Node, E> {
        self.scalar(value.to_string(), Style::Plain)
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<Node, E> {
        self.scalar(value.to_string(), Style::Plain)
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<Node, E> {
        self.scalar(value.to_owned(), Style::Quoted)
    }

    fn visit_unit<E: Error>(self) -> Result<Node, E> {
        self.scalar("null".to_owned(), Style::Plain)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Node, A::Error> {
        let inner = self.deeper()?;
        let mut items = Vec::new();
        while let Some(item) = seq.next_element_seed(inner)? {
            items.push(item);
        }
        Ok(Node { span: self.span, data: Data::List(items) })
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Node, A::Error> {
        let inner = self.deeper()?;
        let mut entries: Vec<Entry> = Vec::new();
        let mut seen = HashSet::new();
        while let Some(key) = map.next_key::<String>()? {
            if !seen.insert(key.clone()) {
                return Err(A::Error::custom(format!("`{}` stands twice in one object", crate::yaml::shorten(&key))));
            }
            entries.push(Entry { key, span: self.span, value: map.next_value_seed(inner)? });
        }
        Ok(Node { span: self.span, data: Data::Map(entries) })
    }
}
