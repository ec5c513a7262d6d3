//! Text with `${{ … }}`.

use std::sync::Arc;

use serde_json::Value as Json;

use super::{Context, Expr, ExprError, Functions, MAX_INPUT_BYTES, value};

/// A piece of a template.
#[derive(Debug)]
pub enum Part {
    /// Copied.
    Text(String),
    /// Replaced by its value.
    Expr {
        /// The expression.
        expr: Arc<Expr>,
        /// Byte in the template where its source starts.
        offset: usize,
    },
}

/// A parsed template.
#[derive(Debug)]
pub struct Template {
    parts: Vec<Part>,
}

impl Template {
    /// Parses a text; one without `${{` is one piece of text. An error's offset counts from the start of the text.
    pub fn parse(text: &str) -> Result<Self, ExprError> {
        Self::parse_with(text, |source| Expr::parse(source).map(Arc::new))
    }

    /// [`Template::parse`] with expressions that may be known already.
    pub(crate) fn parse_with(
        text: &str,
        mut parse: impl FnMut(&str) -> Result<Arc<Expr>, ExprError>,
    ) -> Result<Self, ExprError> {
        let mut parts = Vec::new();
        let mut at = 0;
        while let Some(found) = text[at..].find("${{") {
            let open = at + found;
            let start = open + 3;
            let end = start
                + closing(&text[start..])
                    .ok_or_else(|| ExprError::Syntax { message: "`${{` without `}}`".to_owned(), offset: open })?;
            if open > at {
                parts.push(Part::Text(text[at..open].to_owned()));
            }
            let raw = &text[start..end];
            let offset = start + (raw.len() - raw.trim_start().len());
            let expr = parse(raw.trim()).map_err(|error| shift(error, offset))?;
            parts.push(Part::Expr { expr, offset });
            at = end + 2;
        }
        if at < text.len() {
            parts.push(Part::Text(text[at..].to_owned()));
        }
        Ok(Self { parts })
    }

    /// Its pieces, in order.
    pub fn parts(&self) -> &[Part] {
        &self.parts
    }

    /// The expression, if the whole text is one `${{ … }}`.
    pub fn sole(&self) -> Option<&Expr> {
        match self.parts.as_slice() {
            [Part::Expr { expr, .. }] => Some(expr),
            _ => None,
        }
    }

    /// The text with all values in place, at most 1 MiB.
    pub fn render(&self, context: &Context, functions: &Functions) -> Result<String, ExprError> {
        let mut text = String::new();
        for part in &self.parts {
            match part {
                Part::Text(piece) => text.push_str(piece),
                Part::Expr { expr, .. } => {
                    let json: Json = expr.eval_json(context, functions)?;
                    text.push_str(&value::to_text(&json));
                }
            }
            if text.len() > MAX_INPUT_BYTES {
                return Err(ExprError::Limit("the rendered text is larger than 1 MiB".to_owned()));
            }
        }
        Ok(text)
    }
}

fn shift(error: ExprError, by: usize) -> ExprError {
    match error {
        ExprError::Syntax { message, offset } => ExprError::Syntax { message, offset: offset + by },
        other => other,
    }
}

/// Where the `}}` stands that ends an expression: outside quotes and outside map literals.
fn closing(text: &str) -> Option<usize> {
    let bytes = text.as_bytes();
    let mut braces = 0usize;
    let mut quote = None;
    let mut at = 0;
    while at < bytes.len() {
        let byte = bytes[at];
        match quote {
            Some(_) if byte == b'\\' => at += 1,
            Some(open) if byte == open => quote = None,
            Some(_) => {}
            None => match byte {
                b'"' | b'\'' => quote = Some(byte),
                b'{' => braces += 1,
                b'}' if braces > 0 => braces -= 1,
                b'}' if bytes.get(at + 1) == Some(&b'}') => return Some(at),
                _ => {}
            },
        }
        at += 1;
    }
    None
}
