//! Artifacts of runs, and caches.

use axum::Json;
use axum::body::Body;
use axum::extract::{Path, State};
use axum::response::{IntoResponse, Response};
use http::{HeaderMap, HeaderName, HeaderValue, header};
use kici_engine::ids::RunId;

use crate::dto::stored::{ArtifactView, CacheFilter, CacheView, CachesDeleted, DeleteCaches, StoredTotals};
use crate::page::{Page, PageQuery};
use crate::ports::{Answer, Caller, Ports};
use crate::problem::{Code, Problem};
use crate::server::request::{Listing, PathOf, QueryOf};

/// The artifacts of a run, by name.
#[utoipa::path(get, path = "/api/v1/runs/{id}/artifacts", tag = "runs", params(("id" = String, Path)),
    responses((status = 200, body = Page<ArtifactView>)))]
pub async fn artifacts(
    State(ports): State<Ports>,
    caller: Caller,
    PathOf(run): PathOf<RunId>,
) -> Answer<Json<Page<ArtifactView>>> {
    let items = ports.stored.artifacts(&caller, run).await?;
    Ok(Json(Page { items, next_cursor: None }))
}

/// An artifact as an archive (tar, zstd). `x-kici-sha256` is the digest of the whole.
#[utoipa::path(get, path = "/api/v1/runs/{id}/artifacts/{name}", tag = "runs",
    params(("id" = String, Path), ("name" = String, Path)),
    responses((status = 200, description = "The archive", content_type = "application/zstd")))]
pub async fn artifact(
    State(ports): State<Ports>,
    caller: Caller,
    Path((run, name)): Path<(String, String)>,
) -> Answer<Response> {
    let run = run.parse::<RunId>().map_err(|error| Problem::new(Code::NotFound, error.to_string()))?;
    let found = ports.stored.artifact(&caller, run, &name).await?;
    let mut headers = HeaderMap::new();
    for (key, value) in [
        (header::CONTENT_TYPE, "application/zstd".to_owned()),
        (header::CONTENT_LENGTH, found.view.size.to_string()),
        (header::CACHE_CONTROL, "private, no-store".to_owned()),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff".to_owned()),
        // Names of artifacts are plain.
        (header::CONTENT_DISPOSITION, format!("attachment; filename=\"{}.tar.zst\"", found.view.name)),
        (HeaderName::from_static("x-kici-sha256"), found.view.sha256),
    ] {
        if let Ok(value) = HeaderValue::from_str(&value) {
            headers.insert(key, value);
        }
    }
    Ok((headers, Body::from_stream(found.bytes)).into_response())
}

/// How much is kept of caches and artifacts.
#[utoipa::path(get, path = "/api/v1/admin/caches", tag = "caches", responses((status = 200, body = StoredTotals)))]
pub async fn totals(State(ports): State<Ports>, caller: Caller) -> Answer<Json<StoredTotals>> {
    ports.stored.totals(&caller).await.map(Json)
}

/// Entries of caches, newest first.
#[utoipa::path(get, path = "/api/v1/admin/caches/entries", tag = "caches", params(CacheFilter, PageQuery),
    responses((status = 200, body = Page<CacheView>)))]
pub async fn entries(
    State(ports): State<Ports>,
    caller: Caller,
    listing: Listing<CacheFilter>,
) -> Answer<Json<Page<CacheView>>> {
    let slice = ports.stored.entries(&caller, &listing.filter, listing.page).await?;
    Ok(Json(listing.finish(slice)))
}

/// Removes entries of caches, or only counts them without `apply`. Uploads under way are not touched.
#[utoipa::path(delete, path = "/api/v1/admin/caches", tag = "caches", params(DeleteCaches),
    responses((status = 200, body = CachesDeleted)))]
pub async fn delete(
    State(ports): State<Ports>,
    caller: Caller,
    QueryOf(wanted): QueryOf<DeleteCaches>,
) -> Answer<Json<CachesDeleted>> {
    if wanted.filter() == CacheFilter::default() && !wanted.all {
        return Err(Problem::rejected("all", "no filter means all caches; say so by `all=true`"));
    }
    ports.stored.delete(&caller, &wanted.filter(), wanted.apply).await.map(Json)
}
