//! What the files of a set have in common: the same expressions and patterns stand in many places, and to parse them is the
//! dearest part of compiling.

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use crate::expr::{Expr, ExprError};
use crate::pattern::{Pattern, PatternError};

/// Most entries of each kind: a set of hostile files must not keep everything in memory twice.
const MAX_ENTRIES: usize = 4096;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Memo {
    expressions: RefCell<HashMap<String, Arc<Expr>>>,
    /// Patterns that can be used.
    patterns: RefCell<HashSet<String>>,
}

impl Memo {
    /// An expression.
    pub(super) fn expression(&self, source: &str) -> Result<Arc<Expr>, ExprError> {
        if let Some(known) = self.expressions.borrow().get(source) {
            return Ok(Arc::clone(known));
        }
        let expr = Arc::new(Expr::parse(source)?);
        let mut all = self.expressions.borrow_mut();
        if all.len() < MAX_ENTRIES {
            all.insert(source.to_owned(), Arc::clone(&expr));
        }
        Ok(expr)
    }

    /// Whether a pattern without its `!` can be used.
    pub(super) fn pattern(&self, text: &str) -> Result<(), PatternError> {
        if self.patterns.borrow().contains(text) {
            return Ok(());
        }
        Pattern::check(text)?;
        let mut all = self.patterns.borrow_mut();
        if all.len() < MAX_ENTRIES {
            all.insert(text.to_owned());
        }
        Ok(())
    }
}
