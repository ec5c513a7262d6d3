//! GitHub's expressions as a tree.

/// An expression.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Expr {
    /// A text.
    Text(String),
    /// A number, as written.
    Number(String),
    /// True or false.
    Bool(bool),
    /// Nothing.
    Null,
    /// `a.b.c`, `a['b']`.
    Path(Vec<String>),
    /// `name(…)`.
    Call(String, Vec<Expr>),
    /// `!a`.
    Not(Box<Expr>),
    /// `a && b`.
    And(Box<Expr>, Box<Expr>),
    /// `a || b`.
    Or(Box<Expr>, Box<Expr>),
    /// `a == b` and the like.
    Compare(&'static str, Box<Expr>, Box<Expr>),
}

/// Deepest nesting that is read.
const MAX_DEPTH: usize = 24;

struct Parser<'a> {
    rest: &'a str,
    depth: usize,
}

/// Reads an expression, without its `${{ }}`.
///
/// # Errors
/// Why it cannot be read.
pub(super) fn parse(text: &str) -> Result<Expr, String> {
    let mut parser = Parser { rest: text, depth: 0 };
    let expr = parser.or()?;
    parser.space();
    if parser.rest.is_empty() { Ok(expr) } else { Err(format!("`{}` is not understood", shorten(parser.rest))) }
}

fn shorten(text: &str) -> String {
    text.chars().take(30).collect()
}

impl Parser<'_> {
    fn space(&mut self) {
        self.rest = self.rest.trim_start();
    }

    fn eat(&mut self, token: &str) -> bool {
        self.space();
        match self.rest.strip_prefix(token) {
            Some(rest) => {
                self.rest = rest;
                true
            }
            None => false,
        }
    }

    fn or(&mut self) -> Result<Expr, String> {
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            return Err("it is nested too deep".to_owned());
        }
        let mut left = self.and()?;
        while self.eat("||") {
            left = Expr::Or(Box::new(left), Box::new(self.and()?));
        }
        self.depth -= 1;
        Ok(left)
    }

    fn and(&mut self) -> Result<Expr, String> {
        let mut left = self.compare()?;
        while self.eat("&&") {
            left = Expr::And(Box::new(left), Box::new(self.compare()?));
        }
        Ok(left)
    }

    fn compare(&mut self) -> Result<Expr, String> {
        let mut left = self.unary()?;
        'more: loop {
            for operator in ["==", "!=", "<=", ">=", "<", ">"] {
                if self.eat(operator) {
                    left = Expr::Compare(operator, Box::new(left), Box::new(self.unary()?));
                    continue 'more;
                }
            }
            return Ok(left);
        }
    }

    fn unary(&mut self) -> Result<Expr, String> {
        self.space();
        if self.rest.starts_with('!') && !self.rest.starts_with("!=") {
            self.rest = &self.rest[1..];
            self.depth += 1;
            if self.depth > MAX_DEPTH {
                return Err("it is nested too deep".to_owned());
            }
            let inner = self.unary()?;
            self.depth -= 1;
            return Ok(Expr::Not(Box::new(inner)));
        }
        self.primary()
    }

    fn primary(&mut self) -> Result<Expr, String> {
        if self.eat("(") {
            let inner = self.or()?;
            return if self.eat(")") { Ok(inner) } else { Err("a bracket is not closed".to_owned()) };
        }
        if self.rest.starts_with('\'') {
            return self.text().map(Expr::Text);
        }
        let end = self.rest.find(|c: char| !c.is_ascii_alphanumeric() && !"_-.".contains(c)).unwrap_or(self.rest.len());
        if self.rest.starts_with(|c: char| c.is_ascii_digit() || c == '-' || c == '.') {
            let (number, rest) = self.rest.split_at(end);
            number.parse::<f64>().map_err(|_| format!("`{}` is not understood", shorten(self.rest)))?;
            self.rest = rest;
            return Ok(Expr::Number(number.to_owned()));
        }
        let name = self.name()?;
        match name.as_str() {
            "true" => return Ok(Expr::Bool(true)),
            "false" => return Ok(Expr::Bool(false)),
            "null" => return Ok(Expr::Null),
            _ => {}
        }
        if self.eat("(") {
            return self.call(name);
        }
        self.path(name)
    }

    fn name(&mut self) -> Result<String, String> {
        let end = self.rest.find(|c: char| !c.is_ascii_alphanumeric() && !"_-".contains(c)).unwrap_or(self.rest.len());
        if end == 0 {
            return Err(format!("`{}` is not understood", shorten(self.rest)));
        }
        let (name, rest) = self.rest.split_at(end);
        self.rest = rest;
        Ok(name.to_owned())
    }

    fn call(&mut self, name: String) -> Result<Expr, String> {
        let mut arguments = Vec::new();
        if self.eat(")") {
            return Ok(Expr::Call(name, arguments));
        }
        loop {
            arguments.push(self.or()?);
            if self.eat(")") {
                return Ok(Expr::Call(name, arguments));
            }
            if !self.eat(",") {
                return Err("an argument is not understood".to_owned());
            }
        }
    }

    fn path(&mut self, root: String) -> Result<Expr, String> {
        let mut path = vec![root];
        loop {
            if self.rest.starts_with(".*") {
                return Err("`.*` has no counterpart".to_owned());
            }
            if self.eat(".") {
                path.push(self.name()?);
            } else if self.eat("[") {
                self.space();
                let key = if self.rest.starts_with('\'') { self.text()? } else { self.name()? };
                // A computed key is no name.
                if !self.eat("]") {
                    return Err("a key that is computed has no counterpart".to_owned());
                }
                path.push(key);
            } else {
                return Ok(Expr::Path(path));
            }
        }
    }

    fn text(&mut self) -> Result<String, String> {
        let mut out = String::new();
        let mut rest = &self.rest[1..];
        loop {
            let at = rest.find('\'').ok_or("a text is not closed")?;
            out.push_str(&rest[..at]);
            rest = &rest[at + 1..];
            match rest.strip_prefix('\'') {
                Some(more) => {
                    out.push('\'');
                    rest = more;
                }
                None => break,
            }
        }
        self.rest = rest;
        Ok(out)
    }
}

/// A text cut at its `${{ }}`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Part<'a> {
    /// Between expressions.
    Text(&'a str),
    /// Inside of one.
    Expr(&'a str),
}

/// Cuts a text.
pub(super) fn parts(text: &str) -> Vec<Part<'_>> {
    let mut out = Vec::new();
    let mut rest = text;
    while let Some(start) = rest.find("${{") {
        let Some(end) = end_of(&rest[start + 3..]) else { break };
        if start > 0 {
            out.push(Part::Text(&rest[..start]));
        }
        out.push(Part::Expr(&rest[start + 3..start + 3 + end]));
        rest = &rest[start + 3 + end + 2..];
    }
    if !rest.is_empty() {
        out.push(Part::Text(rest));
    }
    out
}

/// Where `}}` stands outside of a text.
fn end_of(text: &str) -> Option<usize> {
    let mut quoted = false;
    for (at, c) in text.char_indices() {
        match c {
            '\'' => quoted = !quoted,
            '}' if !quoted && text[at..].starts_with("}}") => return Some(at),
            _ => {}
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expressions_are_read() {
        let path = |text: &str| Expr::Path(text.split('.').map(str::to_owned).collect());
        let text = |text: &str| Expr::Text(text.to_owned());
        assert_eq!(parse(" github.event_name "), Ok(path("github.event_name")));
        assert_eq!(parse("matrix['a-b']"), Ok(path("matrix.a-b")));
        assert_eq!(
            parse("!a || b == 'it''s'"),
            Ok(Expr::Or(
                Box::new(Expr::Not(Box::new(path("a")))),
                Box::new(Expr::Compare("==", Box::new(path("b")), Box::new(text("it's"))))
            ))
        );
        assert_eq!(parse("f(1, true)"), Ok(Expr::Call("f".into(), vec![Expr::Number("1".into()), Expr::Bool(true)])));
        for bad in ["", "a b", "a[b.c]", "(a", "'a", "a.*.b", "a ==", "$x", &"(".repeat(99), &"!".repeat(99)] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn texts_are_cut_at_their_expressions() {
        use Part::{Expr, Text};
        assert_eq!(parts("a ${{ b }}c"), [Text("a "), Expr(" b "), Text("c")]);
        assert_eq!(parts("${{ '}}' }}"), [Expr(" '}}' ")]);
        assert_eq!(parts("a ${{ b"), [Text("a ${{ b")]);
    }
}
