//! The OpenAPI document is complete and the copy in `docs/` is fresh.

use std::collections::BTreeSet;
use std::path::Path;

use kici_api::server::{openapi, table};
use serde_json::Value as Json;

#[test]
fn the_copy_in_docs_is_fresh() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/openapi.json");
    if std::env::var_os("UPDATE").is_some() {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, openapi::document()).unwrap();
    }
    let copy = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        copy == openapi::document(),
        "docs/openapi.json is stale; run `UPDATE=1 cargo test -p kici-api --test openapi`"
    );
}

#[test]
fn every_route_is_described_once() {
    let document: Json = serde_json::from_str(openapi::document()).unwrap();
    let mut described = BTreeSet::new();
    let mut ids = BTreeSet::new();
    for (path, item) in document["paths"].as_object().unwrap() {
        for (method, operation) in item.as_object().unwrap() {
            if path.starts_with("/api/v1") {
                described.insert((method.to_uppercase(), path.clone()));
                assert!(ids.insert(operation["operationId"].to_string()), "{path}");
            }
            assert!(operation["summary"].is_string(), "{method} {path} has no summary");
        }
    }
    let served = table().iter().map(|route| (route.method.to_string(), route.path.to_owned())).collect();
    assert_eq!(described, served);
    assert_eq!(document["paths"]["/api/v1/runs"]["get"]["security"][0]["bearer"], serde_json::json!([]));
    assert!(document["components"]["schemas"]["Problem"].is_object());
}
