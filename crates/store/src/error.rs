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
    /// The instance does not hold the lease any more that the work needs.
    #[error("this instance does not lead any more; another one does this work")]
    Fenced,
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

impl From<diesel::result::Error> for StoreError {
    fn from(error: diesel::result::Error) -> Self {
        use diesel::result::{DatabaseErrorKind as Kind, Error};
        match error {
            Error::NotFound => Self::NotFound { what: "row" },
            Error::DatabaseError(Kind::SerializationFailure, info) => Self::Conflict(info.message().to_owned()),
            Error::DatabaseError(Kind::ClosedConnection, info) => Self::Unavailable(info.message().to_owned()),
            // The remaining ones are told apart by their text only: neither driver passes the code on.
            Error::DatabaseError(_, info) => Self::of_text(info.message()),
            Error::DeserializationError(error) => Self::Corrupt { what: "row", detail: error.to_string() },
            other => Self::of_text(&other.to_string()),
        }
    }
}

impl StoreError {
    fn of_text(text: &str) -> Self {
        let has = |words: &[&str]| words.iter().any(|word| text.contains(word));
        if has(&["deadlock detected", "database is locked", "database table is locked", "lock timeout"]) {
            Self::Conflict(text.to_owned())
        } else if has(&[
            "disk is full",
            "disk I/O error",
            "readonly database",
            "No space left",
            "could not extend file",
        ]) {
            Self::Full(text.to_owned())
        } else if has(&[
            "connection closed",
            "terminating connection",
            "starting up",
            "shutting down",
            "unable to open",
        ]) {
            Self::Unavailable(text.to_owned())
        } else {
            Self::Db(text.to_owned())
        }
    }

    /// True when repeating the operation at once may help.
    pub(crate) const fn is_conflict(&self) -> bool {
        matches!(self, Self::Conflict(_))
    }
}

impl From<diesel::result::ConnectionError> for StoreError {
    fn from(error: diesel::result::ConnectionError) -> Self {
        Self::Unavailable(error.to_string())
    }
}
