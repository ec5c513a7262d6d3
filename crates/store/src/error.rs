//! What can go wrong in the store.

/// A fault of the store.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// No such row.
    #[error("no such {what}")]
    NotFound {
        /// Kind of row.
        what: &'static str,
    },
    /// A unique value is taken.
    #[error("a {what} with this {field} exists; choose another one")]
    Exists {
        /// Kind of row.
        what: &'static str,
        /// The value that must be unique.
        field: &'static str,
    },
    /// The row was changed since the caller read it.
    #[error("the {what} was changed meanwhile; read it again and repeat the change")]
    Changed {
        /// Kind of row.
        what: &'static str,
    },
    /// Two transactions got in each other's way. The store repeats by itself; this is what is left after eight attempts.
    #[error("the database is too busy: {0}; try again")]
    Conflict(String),
    /// No connection, or the store is closed.
    #[error("the database is not available: {0}")]
    Unavailable(String),
    /// No space or no right to write.
    #[error("the database cannot be written: {0}; free disk space or check its permissions")]
    Full(String),
    /// A row does not read as what it should be.
    #[error("a stored {what} cannot be read: {detail}")]
    Corrupt {
        /// Kind of row.
        what: &'static str,
        /// What is wrong with it.
        detail: String,
    },
    /// The schema was written by a newer version that this one does not understand.
    #[error(
        "the database has migration {migration}, which needs version {needs} or newer; this is version {ours}; install a newer version or restore a backup"
    )]
    SchemaTooNew {
        /// The unknown migration.
        migration: String,
        /// The oldest version that may run beside it.
        needs: String,
        /// This version.
        ours: &'static str,
    },
    /// The address of the database or another setting is wrong.
    #[error("{0}")]
    Config(String),
    /// Any other fault of the database.
    #[error("database: {0}")]
    Db(String),
}
