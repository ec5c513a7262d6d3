//! Statements that are prepared once per connection. The query builder prepares anew, on PostgreSQL with a round trip of its
//! own, whatever holds SQL text or is an `UPDATE`, because their text may vary without end. That of these does not.

use diesel::backend::Backend;
use diesel::expression::{AppearsOnTable, Expression, SelectableExpression, ValidGrouping, is_aggregate};
use diesel::prelude::QueryResult;
use diesel::query_builder::{AstPass, Query, QueryFragment, QueryId};
use diesel::sql_types::Bool;

/// A condition of constant text: a partial index is only used when the planner sees its literal.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Condition(pub(crate) &'static str);

impl Expression for Condition {
    type SqlType = Bool;
}

impl<T> AppearsOnTable<T> for Condition {}

impl<T> SelectableExpression<T> for Condition {}

impl<G> ValidGrouping<G> for Condition {
    type IsAggregate = is_aggregate::Never;
}

impl<DB: Backend> QueryFragment<DB> for Condition {
    fn walk_ast<'b>(&'b self, mut out: AstPass<'_, 'b, DB>) -> QueryResult<()> {
        out.push_sql(self.0);
        Ok(())
    }
}

impl QueryId for Condition {
    type QueryId = ();

    const HAS_STATIC_QUERY_ID: bool = false;
}

/// A statement whose text takes few forms. It is found again by its text.
#[derive(Clone, Debug)]
pub(crate) struct Kept<Q> {
    query: Q,
    keep: bool,
}

/// Has a statement prepared once.
pub(crate) fn kept<Q>(query: Q) -> Kept<Q> {
    kept_if(true, query)
}

/// Has a statement prepared once if its text is the usual one.
pub(crate) fn kept_if<Q>(keep: bool, query: Q) -> Kept<Q> {
    Kept { query, keep }
}

impl<DB: Backend, Q: QueryFragment<DB>> QueryFragment<DB> for Kept<Q> {
    fn walk_ast<'b>(&'b self, out: AstPass<'_, 'b, DB>) -> QueryResult<()> {
        self.query.walk_ast(out)
    }

    fn is_safe_to_cache_prepared(&self, backend: &DB) -> QueryResult<bool> {
        Ok(self.keep || self.query.is_safe_to_cache_prepared(backend)?)
    }
}

impl<Q> QueryId for Kept<Q> {
    type QueryId = ();

    const HAS_STATIC_QUERY_ID: bool = false;
}

impl<Q: Query> Query for Kept<Q> {
    type SqlType = Q::SqlType;
}
