use super::*;

fn flat(node: &Node, depth: usize, out: &mut String) {
    let Span { start, end } = node.span;
    let place = format!("{}:{}-{}:{}", start.line, start.col, end.line, end.col);
    let pad = "  ".repeat(depth);
    match &node.data {
        Data::Scalar(text, style) => out.push_str(&format!("{pad}{place} {text:?} {style:?}\n")),
        Data::List(items) => {
            out.push_str(&format!("{pad}{place} list\n"));
            items.iter().for_each(|item| flat(item, depth + 1, out));
        }
        Data::Map(entries) => {
            out.push_str(&format!("{pad}{place} map\n"));
            for entry in entries {
                out.push_str(&format!("{pad}- {}:{} {}\n", entry.span.start.line, entry.span.start.col, entry.key));
                flat(&entry.value, depth + 1, out);
            }
        }
    }
}

fn show(source: &str) -> String {
    let reading = read(source, Limits::default());
    let mut out = String::new();
    for document in &reading.documents {
        out.push_str("---\n");
        flat(&document.root, 0, &mut out);
    }
    for fault in &reading.faults {
        let start = fault.span.start;
        out.push_str(&format!("{} {}:{} {}\n", fault.kind.code(), start.line, start.col, fault.message));
    }
    out
}

#[test]
fn places_are_kept() {
    let source = "a: b\nlist:\n  - x y\n  - \"q\\t\"\n  - |\n    one\n    two\nempty:\nflow: {k: [1, 'z']}\nähm: ü\n";
    insta::assert_snapshot!(show(source));
}

#[test]
fn anchors_and_merges_expand() {
    let source = "x-base: &b {image: a, n: 1}\njob:\n  <<: *b\n  n: 2\nother:\n  <<: [{n: 3}, *b]\n";
    insta::assert_snapshot!(show(source));
}

#[test]
fn faults_have_places() {
    let cases = [
        "a: 1\na: 2\n",
        "a:\n\t- b\n",
        "a: !custom x\nb: !!str 1\n",
        "a: *nope\n",
        "a: &a [*a]\n",
        "a: [1, 2\n",
        "{a: 1}: b\n",
        "a: b: c\n",
        "a: \"x\n",
        "a:\n  <<: 1\n",
        "run: ${{ x }}\n{{ y }}: z\n",
        "a\nb: c\n",
        "%YAML 1.2\n",
    ];
    let shown: Vec<String> = cases.iter().map(|source| format!("{source}=>\n{}", show(source))).collect();
    insta::assert_snapshot!(shown.join("\n"));
}

#[test]
fn budgets_hold() {
    let deep = format!("a: {}{}", "[".repeat(40), "]".repeat(40));
    assert!(show(&deep).contains("K0702 1:35"), "{}", show(&deep));
    let very_deep = "[".repeat(500_000);
    assert!(show(&very_deep).starts_with("K0"), "refused by the parser's own limit or by ours");
    let mut laughs = "a: &a [x, x, x, x, x, x, x, x, x, x]\n".to_owned();
    for (name, before) in ["b", "c", "d", "e", "f", "g", "h"].iter().zip(["a", "b", "c", "d", "e", "f", "g"]) {
        laughs.push_str(&format!("{name}: &{name} [{}]\n", vec![format!("*{before}"); 10].join(", ")));
    }
    assert!(show(&laughs).contains("K0703"));
    let large = "a: b\n".repeat(200_000);
    assert!(show(&large).contains("K0701 1:1"));
    let nested = "a: &a [[[[[[[[[[1]]]]]]]]]]\nb: &b [[[[[[[[[[*a]]]]]]]]]]\nc: &c [[[[[[[[[[*b]]]]]]]]]]\nd: [[*c]]\n";
    assert!(show(nested).contains("K0702 4:"), "{}", show(nested));
}

#[test]
fn the_core_schema_types_scalars() {
    let cases = [
        ("~", Core::Null),
        ("", Core::Null),
        ("true", Core::Bool(true)),
        ("yes", Core::Str),
        ("on", Core::Str),
        ("30", Core::Int(30)),
        ("-7", Core::Int(-7)),
        ("0x1F", Core::Int(31)),
        ("0o17", Core::Int(15)),
        ("3.10", Core::Float(3.1)),
        ("1e3", Core::Float(1000.0)),
        ("1h30m", Core::Str),
        ("1.2.3", Core::Str),
        ("nan", Core::Str),
        ("infinity", Core::Str),
    ];
    for (text, expected) in cases {
        assert_eq!(core(text), expected, "{text}");
    }
}

#[test]
fn a_character_that_cannot_be_printed_is_a_fault_with_its_place_and_nothing_behind_it_is_lost_silently() {
    let reading = read("a: 1\nb: x\u{0}y\nc: \u{7}\n", Limits::default());
    assert!(reading.documents.is_empty());
    let places: Vec<_> = reading.faults.iter().map(|fault| (fault.span.start.line, fault.span.start.col)).collect();
    assert_eq!(places, [(2, 5), (3, 4)]);
    assert!(reading.faults[0].message.contains("U+0000"), "{}", reading.faults[0].message);
}

#[test]
fn a_byte_order_mark_is_not_part_of_the_first_key() {
    assert_eq!(show("\u{feff}a: 1\n"), show("a: 1\n"));
}
