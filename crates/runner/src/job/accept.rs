//! The beginning of a job: written down, with the places that it gets.

use std::fs::File;
use std::io;
use std::panic::AssertUnwindSafe;
use std::path::Path;
use std::sync::Arc;

use futures::FutureExt as _;
use kici_engine::jobspec::JobSpec;
use kici_protocol::agent::JobOffer;

use super::{Ctx, lock};
use crate::confine::JobConfinement;
use crate::container;
use crate::credentials::{self, Access, socket_dir};
use crate::stash::Stash;

/// A job that is written down.
pub(super) struct Accepted {
    /// As long as it lives no other agent takes the directory for a leftover.
    pub(super) lock: File,
    /// An error fails the job.
    pub(super) confine: Result<Arc<JobConfinement>, String>,
    pub(super) stash: Arc<Stash>,
    /// An error fails the job.
    pub(super) access: Result<Option<Access>, String>,
}

/// Writes the job down, synced, and makes its directories, its confinement and its socket meanwhile.
pub(super) async fn accept(ctx: &Ctx, offer: &JobOffer, spec: &JobSpec, dir: &Path) -> Result<Accepted, String> {
    let (journal, key, at) = (Arc::clone(&ctx.journal), ctx.key, ctx.clock.now());
    let (workflow, name) = (offer.workflow.clone(), offer.job_name.clone());
    let writing = tokio::task::spawn_blocking(move || journal.accepted(key, &workflow, &name, at));
    let (host, dirs) = (Arc::clone(&ctx.host), dir.to_owned());
    let limits = container::limits(&ctx.config.isolation.limits, spec.resources.as_ref());
    let (program, socket) = (ctx.services.program().map(Path::to_owned), socket_dir(&ctx.config, key));
    let making = tokio::task::spawn_blocking(move || {
        std::fs::create_dir_all(dirs.join("workspace"))?;
        std::fs::create_dir_all(dirs.join("scratch"))?;
        let lock = lock(&dirs)?;
        let confine = host.job(&key.file_name(), &dirs, &limits).map(Arc::new);
        let places = program.map_or(Ok(()), |program| credentials::places(&program, &dirs, &socket));
        Ok::<_, io::Error>((lock, confine, places))
    });
    let said = |error: &dyn std::fmt::Display| format!("the job cannot be written down: {error}");
    let making = async {
        let made = making.await.map_err(|error| said(&error))?;
        let made = made.map_err(|error| format!("the directory of the job cannot be made: {error}"))?;
        let (lock, confine, places) = made;
        let stash = ctx.stash(dir, &confine);
        let access = async {
            places?;
            ctx.access(dir, offer, &stash).await
        };
        let access = AssertUnwindSafe(access).catch_unwind().await;
        let access = access.unwrap_or_else(|_| Err("a fault of the agent: opening the socket panicked".to_owned()));
        Ok(Accepted { lock, confine, stash, access })
    };
    let (written, made) = tokio::join!(writing, making);
    let written = written.map_err(|error| said(&error)).and_then(|written| written.map_err(|error| said(&error)));
    match (written, made) {
        (Ok(()), made) => made,
        (Err(error), made) => {
            if let Ok(Accepted { access: Ok(Some(access)), .. }) = made {
                access.close().await;
            }
            Err(error)
        }
    }
}
