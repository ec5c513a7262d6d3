//! Operations on caches, artifacts and the uploads that bring them.

use std::sync::Arc;

use kici_engine::ids::{ArtifactId, CacheEntryId, RunId, UploadId};
use kici_engine::time::Ts;

use super::{Backend, Lane, Store};
use crate::model::*;
use crate::{StoreError, pg, sqlite};

facade! {
    /// Begins an upload of a job that the agent holds.
    write(Lane::of(new.job.run_id.uuid())) uploads::upload_begin(new: NewUpload) -> UploadBegun;
    /// Begins one more attempt at receiving an upload, of at most `most`; none when it is committed, abandoned or used up.
    write(Lane::of(id.uuid())) uploads::upload_take(id: UploadId, most: u32) -> Option<Upload>;
    /// Notes what an attempt received; false when the upload is over or a later attempt was received.
    write(Lane::of(id.uuid())) uploads::upload_received(id: UploadId, attempt: u32, sha256: String, size: u64) -> bool;
    /// Makes what was received visible, if the job is still the agent's. Said again it gives the same answer.
    write(Lane::of(commit.job.run_id.uuid())) uploads::upload_commit(commit: CommitUpload) -> Committed;
    /// Gives up uploads that were begun before `before`, with what they left; returns how many.
    write(Lane::META) uploads::uploads_abandon(before: Ts, limit: u32) -> u64;

    /// The entry of this key in all scopes that the space reads, else the newest of the first prefix that fits.
    read caches::cache_find(space: CacheSpace, key: String, restore_keys: Vec<String>) -> Option<CacheFound>;
    /// An entry is read now.
    write(Lane::META) caches::cache_read(id: CacheEntryId) -> ();
    /// Removes an entry whose object is gone.
    write(Lane::META) caches::cache_forget(id: CacheEntryId) -> ();
    /// Entries, newest first.
    read caches::cache_list(filter: CacheFilter, page: Page) -> Listed<CacheEntry>;
    /// How much there is of what the filter means.
    read caches::cache_totals(filter: CacheFilter) -> StoredTotals;
    /// Removes entries, oldest first, at most `limit`; returns them.
    write(Lane::META) caches::cache_delete(filter: CacheFilter, limit: u32) -> Vec<CacheEntry>;
    /// Removes entries that were not read since `before`; returns how many.
    write(Lane::META) caches::cache_expire(before: Ts, limit: u32) -> u64;

    /// The artifacts of a run that are not expired, by name.
    read artifacts::artifact_list(run: RunId) -> Vec<Artifact>;
    /// An artifact of a run that is not expired.
    read artifacts::artifact_find(run: RunId, name: String) -> Option<Artifact>;
    /// An artifact by its id.
    read artifacts::artifact_by_id(id: ArtifactId) -> Option<Artifact>;
    /// How much there is of artifacts.
    read artifacts::artifact_totals() -> StoredTotals;
    /// Removes artifacts that are expired, or whose run is gone; returns how many.
    write(Lane::META) artifacts::artifact_expire(limit: u32) -> u64;
}
