//! The page of the documentation that lists the hostile jobs.

use std::path::Path;

/// Compares a part of the page, between comments that name it, with what the tests say; writes it where `UPDATE` is set.
pub fn holds(part: &str, table: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/escape-corpus.md");
    let page = std::fs::read_to_string(&path).expect("the page");
    let (from, to) = (format!("<!-- {part} -->\n"), format!("<!-- end of {part} -->\n"));
    let begin = page.find(&from).expect("its beginning") + from.len();
    let end = begin + page[begin..].find(&to).expect("its end");
    if std::env::var_os("UPDATE").is_some() {
        std::fs::write(&path, format!("{}{table}{}", &page[..begin], &page[end..])).expect("written");
        return;
    }
    assert!(page[begin..end] == *table, "docs/escape-corpus.md is old: run the tests of kici-agent with UPDATE=1");
}

/// A cell of a table.
pub fn cell(text: &str) -> String {
    text.trim().replace('|', "\\|").replace(['\n', '\t'], " ").replace('<', "&lt;")
}

/// What a job ends as, in words.
pub fn end(reason: &str) -> String {
    match reason {
        "" | "success" => "succeeds".to_owned(),
        reason => format!("fails, `{reason}`"),
    }
}
