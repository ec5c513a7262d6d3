//! The limits on an expression that hold before anything is evaluated.

use cel::Program;

use super::reference::{Call, Reference, Walk};
use super::{ExprError, MAX_COMPREHENSIONS, MAX_DEPTH, MAX_LEVELS, MAX_NODES, MAX_OPERATORS, MAX_SOURCE_BYTES};

/// What one walk over the tree found.
#[derive(Debug)]
pub(super) struct Facts {
    pub(super) references: Vec<Reference>,
    pub(super) calls: Vec<Call>,
    /// How many loops over unrelated lists are nested: the exponent of the work.
    pub(super) loops: usize,
    /// Depth of the tree.
    pub(super) levels: usize,
    /// Nodes, the size of what the expression itself can write down.
    pub(super) nodes: usize,
    /// `+` operators: each may join two lists.
    pub(super) additions: usize,
}

impl Facts {
    /// For a source that is names joined by dots, and nothing that the language reserves.
    pub(super) fn of_path(source: &str) -> Option<Self> {
        let mut names = source.split('.');
        let root = names.next().filter(|root| is_name(root) && !RESERVED.contains(root))?;
        let path: Vec<String> = names.map(str::to_owned).collect();
        if path.len() + 1 > MAX_LEVELS || !path.iter().all(|name| is_name(name) && !RESERVED.contains(&name.as_str())) {
            return None;
        }
        let nodes = path.len() + 1;
        let references = vec![Reference { root: root.to_owned(), path, offset: 0 }];
        Some(Self { references, calls: Vec::new(), loops: 0, levels: nodes, nodes, additions: 0 })
    }

    pub(super) fn of(source: &str, program: &Program) -> Result<Self, ExprError> {
        let walk = Walk::of(program);
        if walk.nodes > MAX_NODES {
            return Err(limit(format!("{} nodes, at most {MAX_NODES}", walk.nodes)));
        }
        if walk.levels > MAX_LEVELS {
            return Err(limit(format!("{} levels of operators and calls, at most {MAX_LEVELS}", walk.levels)));
        }
        if walk.comprehensions > MAX_COMPREHENSIONS {
            let found = walk.comprehensions;
            return Err(limit(format!(
                "{found} nested loops (all, exists, map, filter), at most {MAX_COMPREHENSIONS}"
            )));
        }
        let mut references = walk.references;
        let mut calls = walk.calls;
        // The tree's offsets count characters.
        if !source.is_ascii() {
            for offset in references.iter_mut().map(|r| &mut r.offset).chain(calls.iter_mut().map(|c| &mut c.offset)) {
                *offset = source.char_indices().nth(*offset).map_or(source.len(), |(byte, _)| byte);
            }
        }
        for call in &mut calls {
            call.offset = start_of_call(source, call);
        }
        Ok(Self {
            references,
            calls,
            loops: walk.loops,
            levels: walk.levels,
            nodes: walk.nodes,
            additions: walk.additions,
        })
    }
}

fn is_name(text: &str) -> bool {
    text.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_')
}

/// Words of the CEL grammar and names of its types (CEL specification, syntax and values).
const RESERVED: [&str; 34] = [
    "as",
    "bool",
    "break",
    "bytes",
    "const",
    "continue",
    "double",
    "dyn",
    "else",
    "false",
    "for",
    "function",
    "if",
    "import",
    "in",
    "int",
    "let",
    "list",
    "loop",
    "map",
    "namespace",
    "null",
    "null_type",
    "optional",
    "package",
    "return",
    "string",
    "timestamp",
    "true",
    "type",
    "uint",
    "var",
    "void",
    "while",
];

/// A method call is recorded at its parenthesis; its name stands before.
fn start_of_call(source: &str, call: &Call) -> usize {
    let upto = source.len().min(call.offset + call.name.len());
    match source.get(..upto).and_then(|head| head.rfind(&call.name)) {
        Some(found) => found,
        None => call.offset,
    }
}

fn limit(message: String) -> ExprError {
    ExprError::Limit(message)
}

/// Refuses text that could exhaust the parser's stack, which nothing could catch. Skips what stands in quotes.
/// Returns how deep the rest nests.
pub(super) fn prescan(source: &str) -> Result<usize, ExprError> {
    if source.len() > MAX_SOURCE_BYTES {
        return Err(limit(format!("{} bytes, at most {MAX_SOURCE_BYTES}", source.len())));
    }
    if source.trim().is_empty() {
        return Err(ExprError::Syntax { message: "it is empty".to_owned(), offset: 0 });
    }
    let mut scan = Scan::default();
    let mut quote: Option<char> = None;
    let mut escaped = false;
    for c in source.chars() {
        match quote {
            Some(_) if escaped => escaped = false,
            Some(_) if c == '\\' => escaped = true,
            Some(open) if c == open => quote = None,
            Some(_) => {}
            None if c == '"' || c == '\'' => {
                quote = Some(c);
                scan.prefix = 0;
            }
            None => scan.plain(c)?,
        }
    }
    Ok(scan.deepest.max(scan.conditionals))
}

#[derive(Default)]
struct Scan {
    depth: usize,
    deepest: usize,
    prefix: usize,
    conditionals: usize,
    operators: usize,
}

impl Scan {
    fn plain(&mut self, c: char) -> Result<(), ExprError> {
        match c {
            '(' | '[' | '{' => self.depth += 1,
            ')' | ']' | '}' => self.depth = self.depth.saturating_sub(1),
            '?' => self.conditionals += 1,
            _ => {}
        }
        // Chains without brackets (`a.b.c`, `a + b + c`) nest as deeply as they are long.
        if matches!(c, '.' | '[' | '(' | '+' | '-' | '*' | '/' | '%' | '<' | '>' | '=' | '!' | '&' | '|' | '?' | ',') {
            self.operators += 1;
        }
        self.prefix = match c {
            '!' | '-' => self.prefix + 1,
            c if c.is_whitespace() => self.prefix,
            _ => 0,
        };
        self.deepest = self.deepest.max(self.depth);
        if self.depth.max(self.prefix).max(self.conditionals) > MAX_DEPTH {
            return Err(limit(format!("nested deeper than {MAX_DEPTH}")));
        }
        if self.operators > MAX_OPERATORS {
            return Err(limit(format!("more than {MAX_OPERATORS} operators")));
        }
        Ok(())
    }
}
