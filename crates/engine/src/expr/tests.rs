use serde_json::json;

use super::*;

fn eval(source: &str, context: &Context) -> Result<Json, ExprError> {
    eval_json(source, context, &Functions::default())
}

#[test]
fn values_keep_their_types() {
    let context = Context::new()
        .with("event", json!({"pr_number": 7, "ratio": 1.5, "payload": {"list": [1, 2, 3], "none": null}}))
        .with("branch", "main");
    let cases = [
        ("event.pr_number + 1", json!(8)),
        ("event.pr_number == 7 && event.ratio > 1.0", json!(true)),
        ("branch == 'main' ? 'a' : 'b'", json!("a")),
        ("event.payload.list.map(x, x * 2)", json!([2, 4, 6])),
        ("event.payload[\"list\"].exists(x, x == 3)", json!(true)),
        ("has(event.payload.list) && !has(event.payload.nope)", json!(true)),
        ("event.payload.none == null", json!(true)),
        ("size(event.payload)", json!(2)),
        ("glob('a/b', 'a/*') && !glob('a/b/c', 'a/*') && 'a/b/c'.glob('a/**')", json!(true)),
        ("branch.matches('^m.*n$') && matches(branch, 'ai')", json!(true)),
        ("from_json('{\"a\": [1]}').a[0]", json!(1)),
        ("to_json({'b': 1, 'a': [true]})", json!("{\"a\":[true],\"b\":1}")),
        ("join(['a', 'b'], ', ') + ['c', 1].join('')", json!("a, bc1")),
    ];
    for (source, expected) in cases {
        assert_eq!(eval(source, &context), Ok(expected), "{source}");
    }
}

#[test]
fn a_fault_is_never_silently_false() {
    let context = Context::new().with("inputs", json!({}));
    for source in ["inputs.env == 'x'", "nope", "1 / 0 == 1", "success()", "from_json('{')", "[1][3] == 1"] {
        let error = eval_bool(source, &context, &Functions::default()).unwrap_err();
        assert!(matches!(error, ExprError::Eval { .. }), "{source}: {error}");
    }
    let error = eval_bool("'x'", &context, &Functions::default()).unwrap_err();
    assert_eq!(error.to_string(), "expression `'x'` must yield true or false, it yields a string");
}

#[test]
fn templates_render_scalars_bare_and_the_rest_as_json() {
    let context = Context::new().with("inputs", json!({"n": 3, "s": "x", "l": [1, "a"], "z": null, "b": true}));
    let cases = [
        ("plain", "plain"),
        ("", ""),
        ("${{ inputs.s }}", "x"),
        ("a ${{inputs.n}} b ${{ inputs.b }}", "a 3 b true"),
        ("${{ inputs.l }}|${{ inputs.z }}|", "[1,\"a\"]||"),
        ("${{ '}}' + \"}}\" }}", "}}}}"),
        ("${{ {'a': {'b': inputs.n}}['a']['b'] }}", "3"),
        ("$HOME ${X} $${{ inputs.s }}", "$HOME ${X} $x"),
    ];
    for (template, expected) in cases {
        assert_eq!(render(template, &context, &Functions::default()).as_deref(), Ok(expected), "{template}");
    }
    let error = render("ab ${{ 1 +", &context, &Functions::default()).unwrap_err();
    assert_eq!(error, ExprError::Syntax { message: "`${{` without `}}`".to_owned(), offset: 3 });
}

#[test]
fn step_conditions_imply_success() {
    let context = Context::new();
    let cases = [
        (None, [true, false, false]),
        (Some("true"), [true, false, false]),
        (Some("always()"), [true, true, true]),
        (Some("failure()"), [false, true, false]),
        (Some("cancelled()"), [false, false, true]),
        (Some("success() || failure()"), [true, true, false]),
    ];
    for (condition, expected) in cases {
        let outcomes = [Outcome::Success, Outcome::Failure, Outcome::Cancelled];
        let found = outcomes.map(|o| eval_step_condition(condition, o, &context, &Functions::default()).unwrap());
        assert_eq!(found, expected, "{condition:?}");
    }
}

#[test]
fn hash_files_is_the_agents() {
    let hash: HashFiles = Arc::new(|globs| Ok(globs.join("+")));
    let functions = Functions { hash_files: Some(hash), ..Functions::default() };
    let value = eval_json("hash_files('Cargo.lock', '*.toml')", &Context::new(), &functions);
    assert_eq!(value, Ok(json!("Cargo.lock+*.toml")));
    assert!(eval_json("hash_files()", &Context::new(), &functions).is_err());
}

/// Acceptance 20 of the specification: none of these may end the process or run for long.
#[test]
fn hostile_sources_are_refused() {
    let deep = |open: &str, close: &str, n: usize| format!("{}1{}", open.repeat(n), close.repeat(n));
    let corpus = [
        deep("(", ")", 2000),
        deep("[", "]", 1000),
        deep("-", "", 3000),
        deep("!", "", 3000),
        deep("- ", "", 2000),
        format!("{}1", "true ? 1 : ".repeat(300)),
        format!("1{}", " + 1".repeat(900)),
        format!("a{}", ".b".repeat(2000)),
        format!("a{}", "[0]".repeat(1300)),
        format!("true{}", " && true".repeat(400)),
        "x".repeat(5000),
        format!("'{}", "x".repeat(4000)),
        format!("'{}'", "\\".repeat(3999)),
        "[1].all(a, [1].all(b, [1].all(c, true)))".to_owned(),
        String::new(),
        "1 +".to_owned(),
        "\u{0}".to_owned(),
        "99999999999999999999999999".to_owned(),
        "'\\u{110000}'".to_owned(),
        "\"\\xZZ\"".to_owned(),
        "a b".to_owned(),
        "#".to_owned(),
        "{".to_owned(),
        "b'\\400'".to_owned(),
    ];
    for source in corpus {
        let shown: String = source.chars().take(40).collect();
        assert!(Expr::parse(&source).is_err(), "{shown}");
    }
}

#[test]
fn hostile_values_are_refused() {
    let long: Vec<u32> = (0..5000).collect();
    let text = "x".repeat(600_000);
    let context = Context::new()
        .with("event", json!({"payload": {"l": long, "t": text, "u": text}}))
        .with("inputs", json!({"n": i64::MAX, "bad": "(a+)+$("}));
    for source in [
        "event.payload.l.all(x, event.payload.l.all(y, x + y >= 0))",
        "event.payload.t == event.payload.u",
        "event.payload.l.map(x, event.payload.t + event.payload.t)",
        "inputs.n + 1 > 0",
        "inputs.bad.matches(inputs.bad)",
        "glob('x', '[')",
        "int('9999999999999999999999')",
        "timestamp('nonsense')",
        "duration('1x')",
    ] {
        assert!(eval(source, &context).is_err(), "{source}");
    }
    // One field of a large document is still cheap to read.
    assert_eq!(eval("size(event.payload.l)", &context), Ok(json!(5000)));
    assert_eq!(eval("event.payload.l.exists(x, x == 4999)", &context), Ok(json!(true)));
}

#[test]
fn a_walk_over_nested_lists_is_not_a_product() {
    let commits: Vec<Json> = (0..20).map(|n| json!({"modified": vec![format!("src/{n}.rs"); 100]})).collect();
    let context = Context::new().with("event", json!({"payload": {"commits": commits}}));
    let source = "event.payload.commits.exists(c, c.modified.exists(f, f.startsWith('docs/')))";
    assert_eq!(eval(source, &context), Ok(json!(false)));
}

#[test]
fn references_know_their_paths_and_places() {
    let expr = Expr::parse("needs.a.outputs['v'] == '1' && matrix.os.startsWith(inputs.p)").unwrap();
    let found: Vec<(String, usize)> =
        expr.references().iter().map(|r| (format!("{}.{}", r.root, r.path.join(".")), r.offset)).collect();
    assert_eq!(found, [("needs.a.outputs.v".to_owned(), 0), ("matrix.os".to_owned(), 31), ("inputs.p".to_owned(), 52)]);
    assert_eq!(expr.calls(), [Call { name: "startsWith".to_owned(), offset: 41 }]);
    assert!(!expr.asks_outcome());
}

#[test]
fn syntax_errors_carry_an_offset() {
    let cases = [("1 +* 2", 3), ("branch == == 'x'", 10), ("a b", 2)];
    for (source, expected) in cases {
        let Err(ExprError::Syntax { offset, .. }) = Expr::parse(source) else { panic!("{source}") };
        assert_eq!(offset, expected, "{source}");
    }
}

#[test]
fn the_longest_chains_need_no_large_stack() {
    let chains = [
        format!("a{}", ".b".repeat(MAX_OPERATORS)),
        format!("a{}", "[0]".repeat(MAX_OPERATORS)),
        format!("a{}", ".b()".repeat(MAX_OPERATORS / 2)),
        format!("1{}", " + 1".repeat(MAX_OPERATORS)),
        format!("true{}", " && true".repeat(MAX_OPERATORS / 2)),
        format!("{}1", "true ? 1 : ".repeat(MAX_DEPTH)),
        format!("a{}", ".b()".repeat(MAX_LEVELS - 1)),
        format!("a{}", ".b".repeat(MAX_LEVELS - 1)),
        format!("1{}", " + 1".repeat(MAX_LEVELS - 1)),
        format!("{}1{}", "f(".repeat(MAX_DEPTH), ")".repeat(MAX_DEPTH)),
        format!("{}1{}", "(".repeat(MAX_DEPTH), ")".repeat(MAX_DEPTH)),
        format!("{}1{}", "[".repeat(MAX_DEPTH), "]".repeat(MAX_DEPTH)),
        format!("{}true", "!".repeat(MAX_DEPTH)),
    ];
    for source in chains {
        let thread = std::thread::Builder::new().stack_size(1 << 20).spawn(move || {
            let context = Context::new().with("a", json!({}));
            if let Ok(expr) = Expr::parse(&source) {
                expr.eval_json(&context, &Functions::default()).ok();
            }
        });
        assert!(thread.unwrap().join().is_ok());
    }
}

#[test]
fn paths_and_programs_agree() {
    let context = Context::new()
        .with("event", json!({"payload": {"a": {"b": [1, {"c": null}]}, "in": 1, "big": "x".repeat(1 << 20)}}))
        .with("int", 1);
    for path in ["event", "event.payload.a", "event.payload.a.b", "event.payload.a.x", "event.payload.a.b.c", "nope.a"]
    {
        if path == "event" {
            assert!(eval(path, &context).is_err() && eval("(event)", &context).is_err(), "too large");
            continue;
        }
        let (looked_up, evaluated) = (eval(path, &context), eval(&format!("({path})"), &context));
        assert_eq!(looked_up.is_ok(), evaluated.is_ok(), "{path}: {looked_up:?} {evaluated:?}");
        if let Ok(value) = looked_up {
            assert_eq!(Ok(value), evaluated, "{path}");
        }
    }
    for reserved in ["event.in", "true", "null"] {
        assert!(!matches!(Expr::parse(reserved), Ok(Expr { body: Body::Path, .. })), "{reserved}");
    }
}
