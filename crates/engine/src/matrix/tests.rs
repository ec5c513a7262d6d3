use proptest::prelude::*;
use serde_json::json;

use super::*;

fn values(pairs: &[(&str, &str)]) -> Values {
    pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
}

fn table(value: serde_json::Value) -> MatrixTable {
    from_json(&value).unwrap()
}

fn names(value: serde_json::Value) -> Vec<String> {
    expand(&table(value)).unwrap().iter().map(|variant| variant.job_name("test")).collect()
}

#[test]
fn dimensions_go_by_name_and_row_major() {
    assert_eq!(
        names(json!({"os": ["linux", "mac"], "arch": ["x64", "arm"], "exclude": [{"os": "mac", "arch": "x64"}, {}]})),
        ["test (x64, linux)", "test (arm, linux)", "test (arm, mac)"]
    );
    assert_eq!(names(json!(["3.10", 2, true])), ["test (3.10)", "test (2)", "test (true)"]);
}

/// The worked example of GitHub's documentation on `include`.
#[test]
fn include_adds_keys_or_variants() {
    let found = expand(&table(json!({
        "fruit": ["apple", "pear"],
        "animal": ["cat", "dog"],
        "include": [
            {"color": "green"},
            {"color": "pink", "animal": "cat"},
            {"fruit": "apple", "shape": "circle"},
            {"fruit": "banana"},
            {"fruit": "banana", "animal": "cat"},
            {},
        ],
    })))
    .unwrap();
    let want = [
        values(&[("animal", "cat"), ("color", "pink"), ("fruit", "apple"), ("shape", "circle")]),
        values(&[("animal", "cat"), ("color", "pink"), ("fruit", "pear")]),
        values(&[("animal", "dog"), ("color", "green"), ("fruit", "apple"), ("shape", "circle")]),
        values(&[("animal", "dog"), ("color", "green"), ("fruit", "pear")]),
        values(&[("fruit", "banana")]),
        values(&[("animal", "cat"), ("fruit", "banana")]),
    ];
    assert_eq!(found.iter().map(|variant| variant.values.clone()).collect::<Vec<_>>(), want);
    assert_eq!(found[0].label, "cat, apple", "added keys do not name a variant");
}

#[test]
fn nothing_and_too_much_are_errors() {
    assert_eq!(expand(&table(json!({"a": []}))), Err(MatrixError::Empty));
    assert_eq!(expand(&table(json!({"a": ["x"], "exclude": [{"a": "x"}]}))), Err(MatrixError::Empty));
    assert_eq!(expand(&table(json!({"a": ["x"], "exclude": [{}]}))).unwrap().len(), 1);
    let n: Vec<u32> = (0..17).collect();
    assert_eq!(expand(&table(json!({"a": n, "b": n}))), Err(MatrixError::TooMany(289)));
    let huge: Vec<u32> = (0..1000).collect();
    let wide: serde_json::Map<_, _> = (0..40).map(|at| (format!("d{at}"), json!(huge))).collect();
    assert!(matches!(expand(&table(wide.into())), Err(MatrixError::TooMany(_))), "refused before it is built");
}

#[test]
fn equal_labels_are_told_apart() {
    assert_eq!(names(json!({"include": [{"a": 1}, {"b": 1}, {"b": 1}]})), ["test (1)", "test (1 #2)", "test (1 #3)"]);
}

#[test]
fn a_computed_matrix_of_the_wrong_shape_names_the_place() {
    for (value, want) in [
        (json!("x"), "matrix: the value is a string; expected a list, or an object of lists"),
        (json!({"a": 1}), "matrix: `a` is a number; expected a list"),
        (json!({"a": [[1]]}), "matrix: `a`[0] is a list; expected a string, a number or a boolean"),
        (json!({"include": [1]}), "matrix: include[0] is a number; expected an object"),
        (json!({"exclude": [{"k": null}]}), "matrix: exclude[0].k is null; expected a string, a number or a boolean"),
    ] {
        assert_eq!(from_json(&value).unwrap_err().to_string(), want);
    }
}

fn any_entry() -> impl Strategy<Value = Values> {
    proptest::collection::btree_map("[a-d]", "[0-3]", 0..3)
}

proptest! {
    /// Against a model that walks over all combinations by counting.
    #[test]
    fn products_and_exclusions_agree_with_a_model(
        dimensions in proptest::collection::btree_map("[a-c]", proptest::collection::vec("[0-3]", 1..4), 1..4),
        exclude in proptest::collection::vec(any_entry(), 0..4),
    ) {
        let total: usize = dimensions.values().map(Vec::len).product();
        let mut want = Vec::new();
        for number in 0..total {
            let mut rest = number;
            let mut row = Values::new();
            for (name, list) in dimensions.iter().rev() {
                row.insert(name.clone(), list[rest % list.len()].clone());
                rest /= list.len();
            }
            let out = exclude.iter().any(|e| !e.is_empty() && e.iter().all(|(k, v)| row.get(k) == Some(v)));
            if !out {
                want.push(row);
            }
        }
        let table = MatrixTable { dimensions, include: Vec::new(), exclude };
        match expand(&table) {
            Ok(found) => prop_assert_eq!(found.into_iter().map(|v| v.values).collect::<Vec<_>>(), want),
            Err(error) => prop_assert!(want.is_empty() && error == MatrixError::Empty),
        }
    }

    #[test]
    fn labels_are_unique_and_dimensions_are_never_overwritten(
        dimensions in proptest::collection::btree_map("[a-c]", proptest::collection::vec("[0-2]", 1..3), 0..3),
        include in proptest::collection::vec(any_entry(), 0..6),
    ) {
        let table = MatrixTable { dimensions: dimensions.clone(), include, exclude: Vec::new() };
        let plain = MatrixTable { include: Vec::new(), ..table.clone() };
        if let Ok(found) = expand(&table) {
            let labels: BTreeSet<_> = found.iter().map(|variant| &variant.label).collect();
            prop_assert_eq!(labels.len(), found.len());
            for (with, without) in found.iter().zip(expand(&plain).unwrap_or_default()) {
                prop_assert!(without.values.iter().all(|(key, value)| with.values.get(key) == Some(value)));
            }
        }
    }
}
