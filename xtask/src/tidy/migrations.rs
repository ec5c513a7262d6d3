//! The schema is written twice; both directories hold the same migrations, each with a way up and a way down.

use std::collections::BTreeSet;
use std::path::PathBuf;

use anyhow::Result;

use super::Tree;

const BACKENDS: [&str; 2] = ["postgres", "sqlite"];

pub(super) fn check(tree: &Tree<'_>) -> Result<Vec<String>> {
    let names = tree.files.iter().filter_map(|path| {
        let below = path.strip_prefix("migrations").ok()?;
        Some(below.to_string_lossy().into_owned())
    });
    Ok(problems(&names.collect()))
}

/// `names` are paths below `migrations/`.
fn problems(names: &BTreeSet<String>) -> Vec<String> {
    let mut problems = Vec::new();
    let mut migrations = BTreeSet::new();
    for name in names {
        let parts: Vec<&str> = name.split('/').collect();
        match parts.as_slice() {
            [backend, migration, "up.sql" | "down.sql"] if BACKENDS.contains(backend) => {
                migrations.insert((*migration).to_owned());
            }
            _ => problems.push(format!("migrations/{name} is not BACKEND/MIGRATION/{{up,down}}.sql")),
        }
    }
    for migration in migrations {
        for backend in BACKENDS {
            for file in ["up.sql", "down.sql"] {
                let wanted = PathBuf::from(backend).join(&migration).join(file);
                if !names.contains(&*wanted.to_string_lossy()) {
                    problems
                        .push(format!("migrations/{} is missing: both databases change together", wanted.display()));
                }
            }
        }
    }
    problems
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_are_complete() {
        let whole = ["postgres/1_a/up.sql", "postgres/1_a/down.sql", "sqlite/1_a/up.sql", "sqlite/1_a/down.sql"];
        let mut names: BTreeSet<String> = whole.into_iter().map(str::to_owned).collect();
        assert_eq!(problems(&names), Vec::<String>::new());
        names.insert("sqlite/2_b/up.sql".into());
        assert_eq!(problems(&names).len(), 3);
        names.insert("notes.txt".into());
        assert_eq!(problems(&names).len(), 4);
    }
}
