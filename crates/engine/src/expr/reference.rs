//! What an expression reads and calls, found by walking its tree once.

use cel::Program;
use cel::common::ast::{CallExpr, ComprehensionExpr, EntryExpr, Expr as Node, IdedExpr, LiteralValue};

/// A variable that an expression reads, as far as its path is fixed: `needs.a["b"].c` has the path `a`, `b`, `c`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reference {
    /// The variable.
    pub root: String,
    /// The fixed keys below it.
    pub path: Vec<String>,
    /// Byte of the variable in the source.
    pub offset: usize,
}

/// A function that an expression calls.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call {
    /// Its name.
    pub name: String,
    /// Byte in the source.
    pub offset: usize,
}

/// Collects in one walk what the limits and the checks need.
pub(super) struct Walk<'a> {
    program: &'a Program,
    /// Names bound by the macros around the current node.
    bound: Vec<String>,
    /// How many loops over unrelated lists surround the current node.
    product: usize,
    depth: usize,
    level: usize,
    pub(super) references: Vec<Reference>,
    pub(super) calls: Vec<Call>,
    pub(super) nodes: usize,
    pub(super) levels: usize,
    pub(super) comprehensions: usize,
    pub(super) loops: usize,
    pub(super) additions: usize,
}

impl<'a> Walk<'a> {
    pub(super) fn of(program: &'a Program) -> Self {
        let mut walk = Self {
            program,
            bound: Vec::new(),
            product: 0,
            depth: 0,
            level: 0,
            levels: 0,
            references: Vec::new(),
            calls: Vec::new(),
            nodes: 0,
            comprehensions: 0,
            loops: 0,
            additions: 0,
        };
        walk.visit(program.expression());
        walk.references.sort_by_key(|reference| reference.offset);
        walk
    }

    fn offset(&self, node: &IdedExpr) -> usize {
        self.program.source_info().offset_for(node.id).map_or(0, |(start, _)| start as usize)
    }

    fn visit(&mut self, node: &IdedExpr) {
        self.nodes += 1;
        if self.chain(node) {
            return;
        }
        self.level += 1;
        self.levels = self.levels.max(self.level);
        match &node.expr {
            Node::Unspecified | Node::Literal(_) | Node::Ident(_) => {}
            Node::Select(select) => self.visit(&select.operand),
            Node::Call(call) => self.call(node, call),
            Node::List(list) => list.elements.iter().for_each(|element| self.visit(element)),
            Node::Map(map) => self.entries(&map.entries),
            Node::Struct(object) => self.entries(&object.entries),
            Node::Comprehension(comprehension) => self.comprehension(comprehension),
        }
        self.level -= 1;
    }

    fn entries(&mut self, entries: &[cel::common::ast::IdedEntryExpr]) {
        for entry in entries {
            match &entry.expr {
                EntryExpr::StructField(field) => self.visit(&field.value),
                EntryExpr::MapEntry(entry) => {
                    self.visit(&entry.key);
                    self.visit(&entry.value);
                }
            }
        }
    }

    fn call(&mut self, node: &IdedExpr, call: &CallExpr) {
        let name = &call.func_name;
        if name == cel::common::ast::operators::ADD {
            self.additions += 1;
        } else if name.starts_with(|c: char| c.is_ascii_alphabetic()) {
            self.calls.push(Call { name: name.clone(), offset: self.offset(node) });
        }
        if let Some(target) = &call.target {
            self.visit(target);
        }
        call.args.iter().for_each(|arg| self.visit(arg));
    }

    fn comprehension(&mut self, c: &ComprehensionExpr) {
        // A loop over a part of the outer element visits each element once in all; a loop over something else
        // multiplies.
        let nested_in_element = root_of(&c.iter_range).is_some_and(|root| self.bound.iter().any(|name| name == root));
        self.visit(&c.iter_range);
        self.visit(&c.accu_init);
        self.depth += 1;
        self.comprehensions = self.comprehensions.max(self.depth);
        let step = usize::from(!nested_in_element);
        self.product += step;
        self.loops = self.loops.max(self.product);
        let before = self.bound.len();
        self.bound.push(c.iter_var.clone());
        self.bound.extend(c.iter_var2.clone());
        self.bound.push(c.accu_var.clone());
        self.visit(&c.loop_cond);
        self.visit(&c.loop_step);
        self.visit(&c.result);
        self.bound.truncate(before);
        self.product -= step;
        self.depth -= 1;
    }

    /// Takes `a.b["c"].d` as one reference.
    fn chain(&mut self, node: &IdedExpr) -> bool {
        let mut path = Vec::new();
        let mut at = node;
        loop {
            match &at.expr {
                Node::Ident(name) => {
                    self.levels = self.levels.max(self.level + path.len() + 1);
                    if !self.bound.contains(name) {
                        path.reverse();
                        let offset = self.offset(at);
                        self.references.push(Reference { root: name.clone(), path, offset });
                    }
                    return true;
                }
                Node::Select(select) => {
                    path.push(select.field.clone());
                    at = &select.operand;
                }
                _ => match fixed_index(at) {
                    Some((target, key)) => {
                        path.push(key.to_owned());
                        at = target;
                    }
                    None => return false,
                },
            }
            self.nodes += 1;
        }
    }
}

/// `target["key"]`.
fn fixed_index(node: &IdedExpr) -> Option<(&IdedExpr, &str)> {
    let Node::Call(call) = &node.expr else { return None };
    if call.func_name != cel::common::ast::operators::INDEX {
        return None;
    }
    let [target, key] = call.args.as_slice() else { return None };
    match &key.expr {
        Node::Literal(LiteralValue::String(key)) => Some((target, key.inner())),
        _ => None,
    }
}

fn root_of(node: &IdedExpr) -> Option<&str> {
    let mut at = node;
    loop {
        at = match &at.expr {
            Node::Ident(name) => return Some(name),
            Node::Select(select) => &select.operand,
            _ => fixed_index(at)?.0,
        };
    }
}
