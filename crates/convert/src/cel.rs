//! Pieces of CEL with what is known about their values.

/// What a value is, as far as it matters for `if`, comparison and text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ty {
    /// True or false.
    Bool,
    /// A text.
    Text,
    /// A text that stands for any scalar: `false` and `0` of a matrix are texts here.
    Word,
    /// A number.
    Number,
    /// A list.
    List,
    /// Something of a payload.
    Any,
}

/// A piece of CEL.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Cel {
    /// The source; a unit that may stand beside any operator.
    pub text: String,
    /// Its value.
    pub ty: Ty,
}

impl Cel {
    pub fn new(text: impl Into<String>, ty: Ty) -> Self {
        Self { text: text.into(), ty }
    }

    pub fn bool(text: impl Into<String>) -> Self {
        Self::new(text, Ty::Bool)
    }

    /// The condition that the value is something.
    pub fn truthy(&self) -> String {
        let text = &self.text;
        match self.ty {
            Ty::Bool => text.clone(),
            Ty::Text if text == "''" => "false".to_owned(),
            Ty::Text if text.starts_with('\'') => "true".to_owned(),
            Ty::Text => format!("{text} != ''"),
            Ty::Word => format!("!({text} in ['', 'false', '0'])"),
            Ty::Number => format!("{text} != 0"),
            Ty::List => "true".to_owned(),
            Ty::Any => format!("!({text} in [null, '', false, 0])"),
        }
    }

    /// The value as a text.
    pub fn as_text(&self) -> String {
        match self.ty {
            Ty::Text | Ty::Word => self.text.clone(),
            Ty::Bool => format!("({} ? 'true' : 'false')", self.text),
            Ty::Number => format!("string({})", self.text),
            Ty::List | Ty::Any => format!("to_json({})", self.text),
        }
    }
}

/// A text as a literal.
pub(crate) fn quote(text: &str) -> String {
    let mut out = String::from("'");
    for c in text.chars() {
        match c {
            '\'' => out.push_str("\\'"),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c => out.push(c),
        }
    }
    out.push('\'');
    out
}

/// All of the conditions; none is true.
pub(crate) fn all(conditions: &[String]) -> String {
    join(conditions, " && ", "true")
}

/// One of the conditions; none is false.
pub(crate) fn any(conditions: &[String]) -> String {
    join(conditions, " || ", "false")
}

fn join(conditions: &[String], operator: &str, none: &str) -> String {
    match conditions {
        [] => none.to_owned(),
        [one] => one.clone(),
        many => many.iter().map(|one| unit(one)).collect::<Vec<_>>().join(operator),
    }
}

/// In brackets, where an operator beside it would take it apart.
pub(crate) fn unit(text: &str) -> String {
    let simple = |c: char| c.is_alphanumeric() || matches!(c, '.' | '_');
    let wrapped = text.starts_with('(') && closes_at_end(text);
    if text.chars().all(simple) || wrapped { text.to_owned() } else { format!("({text})") }
}

fn closes_at_end(text: &str) -> bool {
    let mut depth = 0;
    let mut quoted = false;
    for (at, c) in text.char_indices() {
        match c {
            '\'' => quoted = !quoted,
            '(' if !quoted => depth += 1,
            ')' if !quoted => {
                depth -= 1;
                if depth == 0 {
                    return at + 1 == text.len();
                }
            }
            _ => {}
        }
    }
    false
}

/// What the event is about: the tag, or else the branch.
pub(crate) const REF_NAME: &str = "(has(event.tag) ? event.tag : branch)";
/// The branch of a push; nothing for other events.
pub(crate) const PUSHED_BRANCH: &str = "(event.kind == 'push' ? branch : '')";
/// The tag; nothing without one.
pub(crate) const TAG: &str = "(has(event.tag) ? event.tag : '')";
/// Branch that a pull request goes to; nothing for other events.
pub(crate) const BASE: &str = "(event.kind == 'pr' && has(event.target_branch) ? event.target_branch : '')";
/// Branch that a pull request comes from; nothing for other events.
pub(crate) const HEAD: &str = "(has(event.source_branch) ? event.source_branch : '')";
/// Default branch, where it is known.
pub(crate) const DEFAULT_BRANCH: &str = "(has(event.default_branch) ? event.default_branch : '')";
/// Message of the commit, where it is known.
pub(crate) const MESSAGE: &str = "(has(event.commit_message) ? event.commit_message : '')";
/// Who caused it, where that is known.
pub(crate) const SENDER: &str = "(has(event.sender.username) ? event.sender.username : '')";
/// Number of a pull request as text; nothing for other events.
pub(crate) const PR_NUMBER: &str = "(has(event.pr_number) ? string(event.pr_number) : '')";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_stay_together() {
        assert_eq!(unit("a.b"), "a.b");
        assert_eq!(unit("(a || b)"), "(a || b)");
        assert_eq!(unit("(a) || (b)"), "((a) || (b))");
        assert_eq!(all(&["a == 1".into(), "b".into()]), "(a == 1) && b");
        assert_eq!(any(&[]), "false");
        assert_eq!(quote("it's \\"), "'it\\'s \\\\'");
    }
}
