use proptest::prelude::*;

use super::*;

fn hits(pattern: &str, text: &str) -> bool {
    Pattern::compile(pattern).unwrap().is_match(text)
}

#[test]
fn every_form_of_a_glob() {
    for (pattern, yes, no) in [
        ("main", vec!["main"], vec!["main2", "Main", ""]),
        ("*", vec!["main", "a.b"], vec!["a/b"]),
        ("**", vec!["main", "a/b", ""], vec![]),
        ("feature/*", vec!["feature/a"], vec!["feature/a/b", "feature"]),
        ("feature/**", vec!["feature/a", "feature/a/b"], vec!["feature", "features/a"]),
        ("**/README.md", vec!["README.md", "a/README.md", "a/b/README.md"], vec!["xREADME.md"]),
        ("docs/**/*.md", vec!["docs/a.md", "docs/a/b/c.md"], vec!["docs.md", "docs/a.txt"]),
        ("**.js", vec!["a.js", "a/b.js"], vec!["a.jsx"]),
        ("src/**test", vec!["src/test", "src/a/b/xtest"], vec!["src/test/a"]),
        ("a**b", vec!["ab", "a/x/b"], vec!["a/x/bc"]),
        ("**/**", vec!["a", "a/b/c"], vec![]),
        ("a/**/**/b", vec!["a/b", "a/x/y/b"], vec!["ab"]),
        ("v?.?", vec!["v1.2"], vec!["v1.20", "v/.1"]),
        ("v[0-9]*", vec!["v1", "v1.2"], vec!["vx", "v"]),
        ("[!a]b", vec!["xb"], vec!["ab"]),
        ("*.{rs,toml}", vec!["a.rs", "b.toml"], vec!["a/b.rs", "a.r"]),
        ("{src,tests/**}/x", vec!["src/x", "tests/a/b/x"], vec!["src/a/x"]),
        (r"a\*b", vec!["a*b"], vec!["axb"]),
        ("größe/*", vec!["größe/ä"], vec!["grösse/a"]),
        ("/^v[0-9]+$/", vec!["v12"], vec!["v1x"]),
        ("/RELEASE/i", vec!["my release"], vec!["rel"]),
        ("/deploy", vec!["/deploy"], vec!["deploy"]),
    ] {
        for text in yes {
            assert!(hits(pattern, text), "`{pattern}` should hit `{text}`");
        }
        for text in no {
            assert!(!hits(pattern, text), "`{pattern}` should not hit `{text}`");
        }
    }
}

/// Acceptance 6 of workflows-and-events.
#[test]
fn acceptance_6_branch_lists() {
    let list = |patterns: &[&str]| Patterns::compile(patterns).unwrap();
    assert!(list(&["!main"]).matches("feature/x"));
    assert!(!list(&["!main"]).matches("main"));
    assert!(!list(&["feature/*", "!feature/x"]).matches("feature/x"));
    assert!(list(&["feature/*", "!feature/x"]).matches("feature/y"));
    assert!(!list(&["feature/*"]).matches("feature/a/b"));
    assert!(list(&["feature/**"]).matches("feature/a/b"));
    assert!(!list(&["!feature/x", "feature/**"]).matches("feature/x"), "the order has no effect");
    assert!(!list(&["release/*", "!release/old"]).matches("main"), "a lone exclusion is no match for the rest");
}

#[test]
fn paths_drop_what_is_excluded_first() {
    let code = Patterns::compile(&["**", "!docs/**"]).unwrap();
    assert!(code.match_any(&["docs/a.md", "src/a.rs"]));
    assert!(!code.match_any(&["docs/a.md"]));
    assert!(!code.match_any::<&str>(&[]));
    assert!(Patterns::compile(&["!docs/**"]).unwrap().match_any(&["src/a.rs"]));
}

/// Acceptance 9 of workflows-and-events: the engine is linear in time, so an evil expression over 64 KiB is answered; what
/// would need backtracking, or too much memory, does not compile.
#[test]
fn acceptance_9_evil_expressions() {
    let evil = Pattern::compile("/(a+)+$/").unwrap();
    let body = "a".repeat(64 * 1024 - 1) + "!";
    assert!(!evil.is_match(&body));
    assert!(evil.is_match(&body[..body.len() - 1]));
    for (pattern, want) in [
        (r"/(a)\1/", "backreferences are not supported"),
        ("/(?=a)/", "look-around, including look-ahead and look-behind, is not supported"),
        ("/((a{1000}){1000}){1000}/", "compiles to more than 1 MiB"),
        ("/a/g", "flag `g` is not supported; use i, s, m or x"),
        ("a{b", "unclosed alternate group"),
        ("[z-a]", "invalid range"),
        ("", "it is empty"),
    ] {
        let error = Pattern::compile(pattern).unwrap_err().to_string();
        assert!(error.contains(want), "{pattern}: {error}");
    }
    for nested in ["{".repeat(200) + &"}".repeat(200), format!("/{}a{}/", "(".repeat(200), ")".repeat(200))] {
        assert!(Pattern::compile(&nested).is_err(), "nesting is bounded");
    }
    assert!(Pattern::compile(&"a".repeat(MAX_PATTERN_BYTES + 1)).unwrap_err().problem.contains("at most 512"));
    assert!(Patterns::compile(&vec!["a"; MAX_PATTERNS + 1]).is_err());
}

#[test]
fn inclusions_after_an_exclusion_are_pointed_out() {
    assert_eq!(order_warnings(&["a", "!b", "c", "!d", "e"]), [2, 4]);
    assert!(order_warnings(&["a", "!b"]).is_empty() && order_warnings::<&str>(&[]).is_empty());
}

/// A backtracking matcher for the forms that the property below uses.
fn model(pattern: &[char], text: &[char], start: bool) -> bool {
    let stars = pattern.iter().take_while(|c| **c == '*').count();
    let rest = &pattern[stars..];
    if stars > 1 {
        if start && rest.first() == Some(&'/') {
            let after = |at: usize| text[at] == '/' && model(&rest[1..], &text[at + 1..], true);
            return model(&rest[1..], text, true) || (0..text.len()).any(after);
        }
        return (0..=text.len()).any(|at| model(rest, &text[at..], false));
    }
    if stars == 1 {
        let end = text.iter().position(|c| *c == '/').unwrap_or(text.len());
        return (0..=end).any(|at| model(rest, &text[at..], false));
    }
    match (pattern.first(), text.first()) {
        (None, None) => true,
        (Some('?'), Some(have)) if *have != '/' => model(&pattern[1..], &text[1..], false),
        (Some(want), Some(have)) if want == have => model(&pattern[1..], &text[1..], *want == '/'),
        _ => false,
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn a_label_glob_that_is_accepted_compiles(glob in "[a-z0-9.:*?/+(){}\\[\\]!,^&|-]{1,40}") {
        if let Ok(source) = glob_to_label_regex(&glob) {
            prop_assert!(anchored_label_regex(&source).is_ok(), "{glob}: {source}");
        }
    }

    #[test]
    fn globs_agree_with_a_model(
        tokens in proptest::collection::vec(proptest::sample::select(vec!["a", "b", "/", "*", "**", "?", "/**/", "*a"]), 1..7),
        text in "[ab](/?[ab]){0,6}",
    ) {
        let pattern = tokens.concat();
        // Texts are names and paths, which do not end in `/`; nor do patterns that could hit one.
        prop_assume!(split_regex(&pattern).is_none() && !pattern.ends_with('/'));
        let chars = |text: &str| text.chars().collect::<Vec<_>>();
        prop_assert_eq!(hits(&pattern, &text), model(&chars(&pattern), &chars(&text), true), "{} on {}", pattern, text);
    }

    #[test]
    fn any_text_compiles_or_is_an_error(text in "[\\[\\](){}*?!/\\\\a-c|+^$.,-]{0,60}") {
        if let Ok(pattern) = Pattern::compile(&text) {
            let _ = pattern.is_match("a/b/c");
        }
    }
}
